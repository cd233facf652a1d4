"""Reading: find, lease, copy, verify. No lock is taken, and nothing is believed before its checksum was.

A tile is verified where it landed, in the caller's memory, so it does not matter what happens to the stored bytes
during or after the copy: an extent that was evicted and reused meanwhile is a miss.
"""

from __future__ import annotations

import ctypes
import time
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headwater.errors import BufferMismatchError, DeadlineError, HeadwaterError, StoreDamagedError
from headwater.kv.encoding import ENCODINGS, RAW, can_decode, refuse, stored_tile_bytes
from headwater.kv.format import checksum, gather_part, part_checksums, part_rows
from headwater.kv.hashing import ChunkRef
from headwater.kv.spec import KVSpec
from headwater.kv.topology import Shard, Split
from headwater.stores.base import Piece, RootRef, Run, Status, Tiles
from headwater.stores.decode import settle_tiles
from headwater.stores.embedded.core import Core
from headwater.stores.embedded.data import MappedData
from headwater.stores.embedded.index import Entry
from headwater.stores.embedded.known import KnownTiles
from headwater.stores.embedded.layout import CHUNK, COMPLETE, WORDS_PER_CELL, Record, Word
from headwater.stores.embedded.members import Members


class Loaded(NamedTuple):
    """A chunk's record with its checksums, verified and copied out of the index."""

    entry: Entry
    sums: memoryview
    spec: KVSpec
    word: int
    word_at: int
    offset: int
    tile_bytes: int
    addressable: bool
    """Whether its tiles are mapped, raw and in one part, so that a reader can copy them as they are."""
    exportable: bool
    """Whether they are mapped and in one part, so that another store can take them as they are."""

    @property
    def lendable(self) -> bool:
        """Whether they are mapped, in one part, and can be used here."""
        return self.exportable and can_decode(self.entry.record.encoding)

    def still(self, state_words: memoryview, spec: KVSpec, num_tokens: int) -> bool:
        """Whether the record is still there (see `known`), and is what is asked for."""
        same = self.spec is spec and self.entry.record.num_tokens == num_tokens
        return same and state_words[self.word_at] == self.word


class TileReadPlan:
    """Tiles to copy, as five numbers each: piece, layer and head there, offset of the stored bytes, checksum."""

    def __init__(self) -> None:
        self._numbers = array("Q")
        self.add = self._numbers.extend
        """Takes (piece, layer, head, offset, checksum)."""

    def carry_out(
        self, data: MappedData, tiles: Sequence[Tiles] | Tiles, statuses: list[Status], deadline: float
    ) -> None:
        """Copy each tile and verify it while it is still in the cache."""
        copy, hashed, segments, segment_bytes = np.copyto, checksum, data.segments, data.segment_bytes
        since, late, numbers = _CLOCK_BYTES, False, iter(self._numbers)
        for i, j, k, offset, expected in zip(numbers, numbers, numbers, numbers, numbers, strict=True):
            target = tiles[i][j, k]
            size = target.size
            since += size
            if since > _CLOCK_BYTES:
                since, late = 0, late or time.monotonic() >= deadline
            if late:
                statuses[i] = Status.TIMEOUT
                continue
            segment, start = divmod(offset, segment_bytes)
            copy(target, segments[segment][start : start + size])
            if hashed(target) != expected:
                statuses[i] = Status.DAMAGED


_CLOCK_LOADS = 64
_CLOCK_BYTES = 4 << 20
"""How much is copied between two looks at the clock: about a millisecond's worth."""
_KNOWN_CHUNKS = 4096
"""Records whose checksums are kept at hand, a few kilobytes each."""


class ChunkLease:
    """One published extent id. See `stores.base.Lease`."""

    def __init__(self, members: Members, extent_id: int) -> None:
        self._members = members
        self._id: int | None = extent_id

    def release(self) -> None:
        extent_id, self._id = self._id, None
        if extent_id is not None:
            self._members.retract(extent_id)


class Reader:
    """The reading half of an embedded store."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._index = core.index
        self._mapped = core.data if isinstance(core.data, MappedData) else None
        self._loaded: dict[bytes, Loaded] = {}
        self._known: dict[KVSpec, KnownTiles] = {}

    # ---- finding ------------------------------------------------------------------------------------------------
    def root_entry(self, root: RootRef) -> Entry | None:
        """The root's record, if it hangs under its living space."""
        space = self._index.find(root.space.key)
        entry = self._index.find(root.key)
        if space is None or entry is None or entry.record.parent_id != space.record.id:
            return None
        return entry if entry.state == COMPLETE else None

    def run(self, root: RootRef, keys: list[bytes]) -> Run:
        """See `stores.base.Store.run`."""
        start = self.root_entry(root)
        if start is None:
            return Run(0, ())
        length, last = self._index.run(keys, start.record.id)
        if length < len(keys):
            self._knows(self._index.find(keys[length]))
        return Run(length, tuple(tokens for tokens in (last or start).tails if tokens))

    def visible(self, root: RootRef, chunk: ChunkRef) -> bool:
        """Whether one chunk is complete and hangs under its complete parent."""
        entry, parent = self._index.find(chunk.key), self._index.find(chunk.parent)
        if entry is None or parent is None or entry.state != COMPLETE or parent.state != COMPLETE:
            return False
        return entry.record.parent_id == parent.record.id and self._knows(entry)

    def _knows(self, entry: Entry | None) -> bool:
        """Whether a record's tiles are in a known encoding; the log says so where they are not."""
        known = entry is None or entry.record.encoding in ENCODINGS
        if entry is not None and not known:
            refuse(entry.record.encoding, self._core.name)
        return known

    def lease(self, root: RootRef, key: bytes, *, is_hit: bool = False) -> ChunkLease | None:
        """Publish, then look again: an evictor marks, then looks at what is published."""
        entry = self._index.find(key)
        lease = self.lease_entry(entry) if entry is not None and entry.state == COMPLETE else None
        if is_hit and entry is not None and lease is not None:
            self._index.add_hits(entry.cell)  # leased, so that the cell stays this record's
        return lease

    def lease_entry(self, entry: Entry) -> ChunkLease | None:
        """A lease on one particular record, if it is still the one under its key."""
        if not self._core.members.publish(entry.record.id):
            return None
        lease = ChunkLease(self._core.members, entry.record.id)
        again = self._index.find(entry.record.key)
        if again is None or again.state != COMPLETE or again.record.id != entry.record.id:
            lease.release()
            return None
        return lease

    # ---- reading ------------------------------------------------------------------------------------------------
    def read(self, root: RootRef, pieces: Sequence[Piece], deadline: float) -> list[Status]:
        """See `stores.base.Store.read`."""
        spec, words, plan = root.space.spec, self._index.state_words, TileReadPlan()
        statuses = [Status.OK] * len(pieces)
        loaded: list[Loaded | None] = [None] * len(pieces)
        for i, (chunk, shard, tiles, *_) in enumerate(pieces):
            if i % _CLOCK_LOADS == _CLOCK_LOADS - 1 and time.monotonic() >= deadline:
                return [Status.TIMEOUT] * len(pieces)
            found = self._loaded.get(chunk.key)
            if found is None or not found.still(words, spec, chunk.num_tokens):
                found = self.load(spec, chunk)
                if found is None:
                    statuses[i] = Status.MISS
                    continue
            loaded[i] = found
            if not found.addressable or shard.split.parts > 1:
                statuses[i] = self._read_slowly(spec, found, shard, tiles, deadline)
                continue
            base, size, sums = found.offset, found.tile_bytes, found.sums
            for j, k, number in _spots(spec, shard):
                plan.add((i, j, k, base + number * size, sums[number]))
        if isinstance(self._core.data, MappedData):
            plan.carry_out(self._core.data, [piece.tiles for piece in pieces], statuses, deadline)
        self._settle(loaded, statuses, deadline)
        return statuses

    def read_shard(
        self, root: RootRef, chunks: Sequence[ChunkRef], shard: Shard, tiles: Tiles, deadline: float
    ) -> list[Status]:
        """See `stores.base.Store.read_shard`.

        Between two copies of 128 KiB the interpreter's own memory has left the cache, and every line of Python costs
        several times what it costs elsewhere. So this plans with vectors first, and then only copies and verifies.
        """
        spec, data = root.space.spec, self._core.data
        if not isinstance(data, MappedData) or shard.split.parts > 1 or not tiles.size or min(tiles.strides) < 0:
            return self.read(root, [Piece(c, shard, t) for c, t in zip(chunks, tiles, strict=True)], deadline)
        spots, statuses = np.array(_spots(spec, shard), np.int64), [Status.OK] * len(chunks)
        good, cells, offsets, sums = self._known_of(spec).look_up(chunks, chunks[0].num_tokens, spots[:, 2])
        for i in np.flatnonzero(~good).tolist():
            if chunks[i].num_tokens != chunks[0].num_tokens:
                raise BufferMismatchError("one array for all needs chunks of one size; read the tail by itself")
            if i % _CLOCK_LOADS == _CLOCK_LOADS - 1 and time.monotonic() >= deadline:
                return [Status.TIMEOUT] * len(chunks)
            found = self.load(spec, chunks[i])
            if found is None:
                statuses[i] = Status.MISS
            elif found.addressable:
                self._remember(found)
                good[i], cells[i], offsets[i] = True, found.entry.cell, found.offset
                sums[i] = [found.sums[number] for number in spots[:, 2].tolist()]
            else:
                statuses[i] = self._read_slowly(spec, found, shard, tiles[i], deadline)
        planned = np.flatnonzero(good)
        segments, starts = np.divmod(offsets[planned, None] + spots[:, 2] * tiles.shape[3], data.segment_bytes)
        strides = np.array(tiles.strides[:3], np.int64)
        places = planned[:, None] * strides[0] + spots[:, :2] @ strides[1:]
        owners, sources = np.repeat(planned, len(spots)), data.addresses[segments] + starts
        _copy_tiles(tiles, owners, places.ravel(), sources.ravel(), sums[planned].ravel(), statuses, deadline)
        self._index.touch_all(cells[planned], time.time_ns())
        for i in [i for i, status in enumerate(statuses) if status == Status.DAMAGED]:
            # Once more, the way that knows which record it read: gone, written anew, or really damaged.
            statuses[i] = self.read(root, [Piece(chunks[i], shard, tiles[i])], deadline)[0]
        return statuses

    def _settle(self, loaded: list[Loaded | None], statuses: list[Status], deadline: float) -> None:
        """After the copies: note the uses, and judge what did not verify."""
        now = time.time_ns()
        for cell in {found.entry.cell for found in loaded if found is not None}:
            self._index.touch(cell, now)
        if Status.DAMAGED in statuses:
            for i, found in enumerate(loaded):
                if found is not None and statuses[i] == Status.DAMAGED:
                    statuses[i] = self.blame(found.entry, deadline)

    def load(self, spec: KVSpec, chunk: ChunkRef) -> Loaded | None:
        """The record of a complete chunk with its checksums; None where there is none that fits what is asked."""
        found = self.peek(spec, chunk)
        if found is not None:
            if len(self._loaded) >= _KNOWN_CHUNKS:
                self._loaded.clear()
            self._loaded[chunk.key] = found
        return found

    def _known_of(self, spec: KVSpec) -> KnownTiles:
        known = self._known.get(spec)
        if known is None:
            known = self._known.setdefault(spec, KnownTiles(spec, self._index.state_column))
        return known

    def _remember(self, found: Loaded) -> None:
        record = found.entry.record
        known = self._known_of(found.spec)
        known.remember(record.key, found.word_at, found.word, found.offset, record.num_tokens, found.sums)

    def peek(self, spec: KVSpec, chunk: ChunkRef, entry: Entry | None = None) -> Loaded | None:
        """`load` without remembering it, of a record that was found before."""
        entry = entry or self._index.find(chunk.key)
        if entry is None or entry.state != COMPLETE:
            return None
        record = entry.record
        size = self.fitting_tile_bytes(spec, chunk, record)
        if not size:
            return None
        payload = self._index.payload(entry)
        if payload is None:
            # Evicted meanwhile, or noise: the next writer will know which.
            again = self._index.find(chunk.key)
            if again is not None and again.record.id == record.id and again.state == COMPLETE:
                self._index.words[Word.SUSPECT] = 1
            return None
        # Where its segment is gone, the slow way says what that means.
        mapped, offset, length = self._mapped, record.offset, record.length
        exportable = mapped is not None and record.parts == 1 and mapped.holds(offset, length)
        sums = memoryview(payload)[: 8 * record.num_sums].cast("Q")
        at, addressable = entry.cell * WORDS_PER_CELL, exportable and record.encoding == RAW
        return Loaded(entry, sums, spec, entry.word, at, offset, size, addressable, exportable)

    def fitting_tile_bytes(self, spec: KVSpec, chunk: ChunkRef, record: Record) -> int:
        """Stored bytes of a tile, where a record is what is asked for, in an encoding that is known; 0 elsewhere."""
        size = stored_tile_bytes(spec, chunk.num_tokens, record.encoding)
        if record.encoding not in ENCODINGS:
            refuse(record.encoding, self._core.name)
        tiles = spec.num_tiles
        shape = (record.kind, record.num_tokens, record.length, record.num_sums, record.first_token, record.row_bytes)
        asked = (CHUNK, chunk.num_tokens, tiles * size, tiles * record.parts, chunk.first_token, spec.row_bytes)
        return size if shape == asked else 0

    def _read_slowly(self, spec: KVSpec, found: Loaded, shard: Shard, tiles: Tiles, deadline: float) -> Status:
        if time.monotonic() >= deadline:
            return Status.TIMEOUT
        record = found.entry.record
        if not can_decode(record.encoding):
            refuse(record.encoding, self._core.name)
            return Status.MISS
        whole = record.parts == 1 and shard.split.parts == 1
        copy = self._copy_file if whole else self._copy_parts
        if record.encoding != RAW:
            copy = self._copy_encoded
        try:
            return copy(spec, found, shard, tiles, deadline)
        except (OSError, IndexError):
            return Status.DAMAGED  # a segment is gone or short

    def _copy_file(self, spec: KVSpec, found: Loaded, shard: Shard, tiles: Tiles, deadline: float) -> Status:
        """One `preadv` per layer (a shard's heads lie together), verified after it."""
        for i, layer in enumerate(shard.layers):
            status = self._copy_layer(spec, found, layer, shard.heads, tiles[i], deadline)
            if status != Status.OK:
                return status
        return Status.OK

    def read_stored(self, spec: KVSpec, found: Loaded, deadline: float) -> tuple[Status, Tiles]:
        """A copy of all tiles of a chunk in one part, as they are stored, verified."""
        tiles = np.empty((spec.num_layers, spec.num_kv_heads, found.tile_bytes), np.uint8)
        whole = Shard(range(spec.num_layers), range(spec.num_kv_heads))
        try:
            status = self._copy_file(spec, found, whole, tiles, deadline)
        except (OSError, IndexError):
            status = Status.DAMAGED
        return self.blame(found.entry, deadline) if status == Status.DAMAGED else status, tiles

    def _copy_encoded(self, spec: KVSpec, found: Loaded, shard: Shard, tiles: Tiles, deadline: float) -> Status:
        """Tiles that are not raw: verified as they are stored, in scratch memory, and then decoded."""
        record = found.entry.record
        chunk = ChunkRef(record.key, b"", record.number, record.first_token, record.num_tokens, b"")
        stored = np.empty((1, len(shard.heads), found.tile_bytes), np.uint8)
        for i, layer in enumerate(shard.layers):
            status = self._copy_layer(spec, found, layer, shard.heads, stored[0], deadline)
            if status == Status.OK and time.monotonic() >= deadline:
                status = Status.TIMEOUT
            if status != Status.OK:
                return status
            if not settle_tiles(spec, chunk, shard, record.encoding, stored, tiles[i : i + 1]):
                return Status.DAMAGED
        return Status.OK

    def _copy_layer(
        self, spec: KVSpec, found: Loaded, layer: int, heads: range, tiles: Tiles, deadline: float
    ) -> Status:
        """The stored tiles of one layer of some heads, verified."""
        number = layer * spec.num_kv_heads + heads.start
        targets = [tiles[j] for j in range(len(heads))]
        if not self._core.data.load(found.offset + number * found.tile_bytes, targets, deadline):
            return Status.TIMEOUT
        for j, target in enumerate(targets):
            if checksum(target) != found.sums[number + j]:
                return Status.DAMAGED
        return Status.OK

    def _copy_parts(self, spec: KVSpec, found: Loaded, shard: Shard, tiles: Tiles, deadline: float) -> Status:
        """Tiles that context-parallel ranks wrote or read: verified whole in scratch memory, then the rows wanted."""
        record = found.entry.record
        tokens, first, parts = record.num_tokens, record.first_token, record.parts
        split, size = Split(parts, record.interleave), found.tile_bytes
        rows = part_rows(shard.split, shard.part, first, tokens)
        scratch = np.empty(size, np.uint8)
        for i, layer in enumerate(shard.layers):
            for j, head in enumerate(shard.heads):
                number = layer * spec.num_kv_heads + head
                if not self._core.data.load(record.offset + number * size, [scratch], deadline):
                    return Status.TIMEOUT
                expected = found.sums[number * parts : (number + 1) * parts].tolist()
                if part_checksums(spec, split, first, tokens, scratch) != expected:
                    return Status.DAMAGED
                gather_part(spec, scratch, rows, tokens, tiles[i, j])
            if time.monotonic() >= deadline:
                return Status.TIMEOUT
        return Status.OK

    def blame(self, entry: Entry, deadline: float) -> Status:
        """Bytes did not verify. If their record is still the same, they are damaged and go; else they were reused."""

        def judge() -> Status:
            now = self._index.find(entry.record.key)
            if now is None or now.state != COMPLETE or now.record.id != entry.record.id:
                return Status.MISS
            self._core.janitor.remove([now])
            self._core.janitor.sweep()
            self._index.words[Word.DAMAGED] += 1
            return Status.DAMAGED

        try:
            return self._core.transact(judge, deadline)
        except (DeadlineError, StoreDamagedError):
            return Status.DAMAGED

    # ---- borrowing ----------------------------------------------------------------------------------------------
    def forget(self) -> None:
        """Let go of everything remembered."""
        self._loaded.clear()
        self._known.clear()

    def borrow(self, root: RootRef, chunk: ChunkRef, shard: Shard) -> tuple[ChunkLease, Tiles] | Status:
        """See `stores.base.MappedStore.borrow`."""
        if not self._core.data.mapped or shard.split.parts != 1:
            raise HeadwaterError("only whole tiles of a mapped store can be borrowed; use read")
        lease = self.lease(root, chunk.key)
        found = self.load(root.space.spec, chunk) if lease is not None else None
        if lease is None or found is None:
            if lease is not None:
                lease.release()
            return Status.MISS
        if found.entry.record.encoding != RAW:
            return self._borrow_copy(root, chunk, shard, lease)
        tiles = extent_tiles(self._core, root.space.spec, found.entry)
        view = tiles[shard.layers.start : shard.layers.stop : shard.layers.step, shard.heads.start : shard.heads.stop]
        status = self._verify_in_place(root.space.spec, found, shard, view)
        if status != Status.OK:
            lease.release()
            return self.blame(found.entry, time.monotonic() + 1.0)
        view.flags.writeable = False
        return lease, view

    def _borrow_copy(
        self, root: RootRef, chunk: ChunkRef, shard: Shard, lease: ChunkLease
    ) -> tuple[ChunkLease, Tiles] | Status:
        tiles = np.empty(shard.local_shape(root.space.spec, chunk.first_token, chunk.num_tokens), np.uint8)
        status = self.read(root, [Piece(chunk, shard, tiles)], time.monotonic() + 1.0)[0]
        if status != Status.OK:
            lease.release()
            return status
        tiles.flags.writeable = False
        return lease, tiles

    def _verify_in_place(self, spec: KVSpec, found: Loaded, shard: Shard, view: Tiles) -> Status:
        record, parts = found.entry.record, found.entry.record.parts
        split = Split(parts, record.interleave)
        for i, layer in enumerate(shard.layers):
            for j, head in enumerate(shard.heads):
                number = (layer * spec.num_kv_heads + head) * parts
                sums = part_checksums(spec, split, record.first_token, record.num_tokens, view[i, j])
                if sums != found.sums[number : number + parts].tolist():
                    return Status.DAMAGED
        return Status.OK


def _copy_tiles(
    tiles: Tiles,
    owners: npt.NDArray[np.int64],
    places: npt.NDArray[np.int64],
    sources: npt.NDArray[np.int64],
    sums: npt.NDArray[np.uint64],
    statuses: list[Status],
    deadline: float,
) -> None:
    """Copy each tile from its address to its place in `tiles`, and verify it while it is still in the cache.

    This loop is the read path's whole cost: one copy, one slice, one hash, one comparison a tile.
    """
    size, memmove, hashed = tiles.shape[3], ctypes.memmove, checksum
    base = tiles.ctypes.data
    span = sum(stride * (length - 1) for stride, length in zip(tiles.strides, tiles.shape, strict=True)) + 1
    memory = memoryview((ctypes.c_uint8 * span).from_address(base)).cast("B")
    step = max(1, _CLOCK_BYTES // max(size, 1))
    for start in range(0, len(owners), step):
        part = slice(start, start + step)
        if time.monotonic() >= deadline:
            for i in owners[start:].tolist():
                statuses[i] = Status.TIMEOUT
            return
        rows = zip(
            owners[part].tolist(), places[part].tolist(), sources[part].tolist(), sums[part].tolist(), strict=True
        )
        for i, place, source, expected in rows:
            memmove(base + place, source, size)
            if hashed(memory[place : place + size]) != expected:
                statuses[i] = Status.DAMAGED


def _spots(spec: KVSpec, shard: Shard) -> list[tuple[int, int, int]]:
    width = spec.num_kv_heads
    return [(j, k, la * width + he) for j, la in enumerate(shard.layers) for k, he in enumerate(shard.heads)]


def extent_tiles(core: Core, spec: KVSpec, entry: Entry) -> Tiles:
    """The stored bytes of a chunk of a mapped store, as (layers, heads, tile bytes)."""
    record = entry.record
    flat = core.data.view(record.offset, record.length)
    return flat.reshape(spec.num_layers, spec.num_kv_heads, record.tile_bytes)
