"""Lending: where stored tiles lie, and what their checksums must be, for those who copy and verify them elsewhere.

A complete chunk is lent whole. Of a pending one those tiles are lent whose checksums are in: a rank need not wait for
its slowest peer, and what is written layer by layer can be read layer by layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from headwater.errors import HeadwaterError
from headwater.kv.encoding import RAW, can_decode
from headwater.kv.hashing import ChunkRef
from headwater.kv.spec import KVSpec
from headwater.kv.topology import Shard
from headwater.stores.base import NOT_HERE, Arrived, Lease, Loan, Place, RootRef
from headwater.stores.embedded.core import Core
from headwater.stores.embedded.data import MappedData
from headwater.stores.embedded.index import Entry
from headwater.stores.embedded.layout import COMPLETE, PENDING
from headwater.stores.embedded.reader import ChunkLease, Reader

_TRIES = 3
_MANY = 16
"""Fewer records are sooner found one by one."""


class _Leases:
    """Several leases as one."""

    def __init__(self, leases: Sequence[Lease]) -> None:
        self._leases = leases

    def release(self) -> None:
        for lease in self._leases:
            lease.release()


class _Shown(NamedTuple):
    """One chunk that can be lent, and what holds it."""

    lease: ChunkLease
    place: Place
    sums: bytes | memoryview
    """Of all its tiles: those that were not asked for may mean nothing."""
    encoding: int


class Lender:
    """The part of an embedded store that lends. Takes no lock."""

    def __init__(self, core: Core, reader: Reader) -> None:
        self._core = core
        self._index = core.index
        self._reader = reader

    def lend(self, root: RootRef, chunks: Sequence[ChunkRef], shard: Shard) -> Loan:
        """See `stores.base.MappedStore.lend`. Some microseconds a chunk."""
        spec, data = root.space.spec, self._core.data
        if not isinstance(data, MappedData) or shard.split.parts != 1:
            raise HeadwaterError("only whole tiles of a mapped store can be lent; use read")
        # Only leaves are evicted, so the deepest complete chunk keeps all complete ones before it.
        lease: Lease | None = next(filter(None, (self._reader.lease(root, c.key) for c in reversed(chunks))), None)
        entries = self._find([chunk.key for chunk in chunks])
        places: list[Place | None] = []
        payloads, blank = list[bytes | memoryview](), bytes(8 * spec.num_tiles)
        encodings = list[int]()
        cells = list[int]()
        for chunk, entry in zip(chunks, entries, strict=True):
            found = self._reader.peek(spec, chunk, entry)
            encodings.append(RAW if entry is None else entry.record.encoding)
            if found is None or not found.lendable:
                places.append(None)
                payloads.append(blank)
                continue
            segment, start = divmod(found.offset, data.segment_bytes)
            places.append(Place(data.segments[segment], start))  # attached, and long enough: `peek` has looked
            payloads.append(found.sums)
            cells.append(found.entry.cell)
        if len(cells) < len(chunks):
            leases = [] if lease is None else [lease]
            # Also the chunk before one that is not complete: should that one go, this is a leaf, whatever comes behind.
            others = [i for i, place in enumerate(places) if place is None]
            for i in sorted({*others, *(i - 1 for i in others if i)}):
                shown = self._show(spec, chunks[i], shard, data)
                leases += [] if shown is None else [shown.lease]
                places[i], payloads[i] = (None, blank) if shown is None else (shown.place, shown.sums)
                encodings[i] = RAW if shown is None else shown.encoding
            lease = _Leases(leases) if leases else None
        # Only of what is complete: the age of a pending record says when its writers last came.
        self._index.touch_all(np.array(cells, np.int64), time.time_ns())
        layers, heads = shard.layers, shard.heads
        sums = np.frombuffer(b"".join(payloads), np.uint64).reshape(-1, spec.num_layers, spec.num_kv_heads)
        part = sums[:, layers.start : layers.stop : layers.step, heads.start : heads.stop]
        return Loan(lease, places, part, encodings)

    def arrived(self, chunks: Sequence[ChunkRef], shard: Shard, spec: KVSpec) -> list[Arrived]:
        """See `stores.base.MappedStore.arrived`. Some microseconds a chunk, and some tens for each group of writers."""
        entries = self._find([chunk.key for chunk in chunks])
        is_dead = self._core.janitor.expiry()
        return [self._arrived(spec, chunk, shard, entry, is_dead) for chunk, entry in zip(chunks, entries, strict=True)]

    def _find(self, keys: Sequence[bytes]) -> list[Entry | None]:
        found: list[Entry | None] = [None] * len(keys)
        if len(keys) >= _MANY:
            found = self._core.columns.find(keys).entries()
        return [entry or self._index.find(key) for key, entry in zip(keys, found, strict=True)]

    def _arrived(
        self, spec: KVSpec, chunk: ChunkRef, shard: Shard, entry: Entry | None, is_dead: Callable[[Entry], bool]
    ) -> Arrived:
        if entry is None or entry.state not in (COMPLETE, PENDING):
            return NOT_HERE
        record, is_complete = entry.record, entry.state == COMPLETE
        if not is_complete and is_dead(entry):
            return NOT_HERE
        is_fit = record.parts == 1 and can_decode(record.encoding)
        is_fit = is_fit and self._reader.fitting_tile_bytes(spec, chunk, record) > 0
        if not is_fit:  # whatever it is, it cannot be lent
            return Arrived(record.id, 0, is_complete, record.encoding)
        num_layers = len(shard.layers) if is_complete else self._num_noted(spec, shard, entry)
        return Arrived(record.id, num_layers, is_complete, record.encoding)

    def _num_noted(self, spec: KVSpec, shard: Shard, entry: Entry) -> int:
        """Layers of the shard, from the first on, all of whose checksums a pending record has."""
        layers, heads, width = shard.layers, shard.heads, spec.num_kv_heads
        flags = self._index.flags(entry)
        if len(heads) == width and layers.step == 1:
            first_missing = flags.find(0, layers.start * width, layers.stop * width)
            return len(layers) if first_missing < 0 else first_missing // width - layers.start
        rows = (flags[layer * width + heads.start : layer * width + heads.stop] for layer in layers)
        return next((number for number, row in enumerate(rows) if 0 in row), len(layers))

    def _show(self, spec: KVSpec, chunk: ChunkRef, shard: Shard, data: MappedData) -> _Shown | None:
        """A chunk that was not complete a moment ago: pending with all checksums that are asked for, or complete now.

        A flag that is set stays set, and its checksum was written before it. So: see the flags, publish the id, see
        that the record is still the same, read the checksums. Whoever removes a record hides it first and then looks at
        what is published: one of the two always sees the other.
        """
        for _ in range(_TRIES):
            entry = self._index.find(chunk.key)
            if entry is None:
                return None
            if entry.state == COMPLETE:
                shown = self._show_complete(spec, chunk, entry, data)
            elif not self._is_in(spec, chunk, shard, entry):
                return None
            else:
                shown = self._show_pending(entry, data)
            if shown is not None:
                return shown
        return None

    def _show_complete(self, spec: KVSpec, chunk: ChunkRef, entry: Entry, data: MappedData) -> _Shown | None:
        lease = self._reader.lease_entry(entry)
        if lease is None:
            return None
        found = self._reader.peek(spec, chunk, entry)
        if found is None or not found.lendable:
            lease.release()
            return None
        return _Shown(lease, data.place(found.offset), found.sums, found.entry.record.encoding)

    def _show_pending(self, entry: Entry, data: MappedData) -> _Shown | None:
        record, members = entry.record, self._core.members
        if not members.publish(record.id):
            return None
        lease = ChunkLease(members, record.id)
        is_same = self._index.state_words[self._index.word_at(entry.cell)] == entry.word
        if is_same and data.holds(record.offset, record.length):
            return _Shown(lease, data.place(record.offset), self._index.pending_sums(entry), record.encoding)
        lease.release()
        return None

    def _is_in(self, spec: KVSpec, chunk: ChunkRef, shard: Shard, entry: Entry) -> bool:
        """Whether a pending record is what is asked for, and has all checksums of this shard's tiles."""
        record = entry.record
        if entry.state != PENDING or record.parts != 1 or not can_decode(record.encoding):
            return False
        if not self._reader.fitting_tile_bytes(spec, chunk, record):
            return False
        return self._index.noted(entry, spec, shard.layers, shard.heads, 0) == shard.num_tiles
