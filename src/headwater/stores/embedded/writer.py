"""Writing: reserve an extent, fill it, commit its checksums. The commit that brings the last one makes it visible.

A writer group is one running server; its ranks fill the same extents. Two groups never fill one extent: the second
to come skips the chunk. While a process writes, it publishes the extent, so that nobody reuses the bytes under it
even if its reservation was taken away.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from headwater.errors import (
    DeadlineError,
    HeadwaterError,
    InvalidArgumentError,
    SpecMismatchError,
    StoreClosedError,
    StoreDamagedError,
)
from headwater.kv.format import checksum, part_rows, scatter_part
from headwater.kv.hashing import ChunkRef
from headwater.kv.spec import KVSpec
from headwater.kv.topology import Shard, Split
from headwater.stores.base import Filled, Piece, RootRef, SpaceRef, Status, Tiles
from headwater.stores.embedded.core import Core
from headwater.stores.embedded.data import Sources
from headwater.stores.embedded.fill import Sums, empty_payload, fill_mapped, put_all_sums, row_runs
from headwater.stores.embedded.index import Entry
from headwater.stores.embedded.janitor import PENDING_SHARE
from headwater.stores.embedded.layout import CHUNK, COMPLETE, PENDING, ROOT, SPACE, Record, Word
from headwater.stores.embedded.reader import extent_tiles

_BATCH_CHUNKS = 64
_ROOM_ROUNDS = 16


@lru_cache(maxsize=64)
def _check_place(layers: range, heads: range, parts: int, interleave: int, part: int) -> None:
    """Raise TopologyError where no rank holds that. A server commits the same place for every chunk."""
    Shard(layers, heads, Split(parts, interleave), part)


def _new_id() -> int:
    return int.from_bytes(os.urandom(8), "little") >> 1 | 1


class Ticket:
    """This process's right to fill one pending extent. See `stores.base.Reservation`."""

    def __init__(self, writer: Writer, spec: KVSpec, chunk: ChunkRef, status: Status, entry: Entry | None) -> None:
        self.writer = writer
        self.spec = spec
        self.chunk = chunk
        self.status = status
        self.entry = entry
        self._open = entry is not None
        self._pid = os.getpid()

    @property
    def tiles(self) -> Tiles | None:
        """The extent's bytes as (layers, heads, tile bytes), to be filled in place; None where there is no extent."""
        core = self.writer.core
        if self.entry is None or not self._is_open or not core.data.mapped:
            return None
        with core.use():
            return extent_tiles(core, self.spec, self.entry)

    @property
    def _is_open(self) -> bool:
        # A forked child has published nothing, so its parent's tickets are not its own.
        return self._open and self._pid == os.getpid()

    def commit(
        self,
        layers: range,
        heads: range,
        part: int,
        sums: Sequence[int] | npt.NDArray[np.uint64],
        deadline_s: float = 1.0,
    ) -> Status:
        """See `stores.base.Reservation.commit`."""
        commit = self.check_commit(layers, heads, part, sums)
        if commit is None:
            return Status.LOST
        with self.writer.core.use():
            return self.writer.commit([commit], self.spec, time.monotonic() + deadline_s)[0]

    def noted(self, layers: range, heads: range, part: int) -> int:
        """See `stores.base.Reservation.noted`."""
        if self.entry is None:
            return 0
        with self.writer.core.use() as core:
            return core.index.noted(self.entry, self.spec, layers, heads, part)

    def check_commit(
        self, layers: range, heads: range, part: int, sums: Sequence[int] | npt.NDArray[np.uint64]
    ) -> Commit | None:
        """What to commit; None where this process has no reservation. Raises InvalidArgumentError for a misfit."""
        if self.entry is None or self._pid != os.getpid():
            return None
        record = self.entry.record
        # A column of 64-bit numbers needs no look at each of them, and there may be hundreds a chunk.
        values: Sums = sums.ravel() if isinstance(sums, np.ndarray) and sums.dtype == np.uint64 else list(sums)
        _check_place(layers, heads, record.parts, max(record.interleave, 1), part)
        fits = layers.stop <= self.spec.num_layers and heads.stop <= self.spec.num_kv_heads
        in_range = not isinstance(values, list) or all(0 <= value < 1 << 64 for value in values)
        if not fits or len(values) != len(layers) * len(heads) or not in_range:
            raise InvalidArgumentError(
                f"{len(values)} checksums were given for {layers} × {heads} of {self.spec}; expected 64 bits for each"
            )
        return self, layers, heads, part, values

    def abort(self) -> None:
        """See `stores.base.Reservation.abort`."""
        with contextlib.suppress(StoreClosedError):
            if self._is_open:
                with self.writer.core.use():
                    self.writer.abort([self])

    def close(self) -> None:
        """See `stores.base.Reservation.close`."""
        was_open, self._open = self._is_open, False
        if was_open and self.entry is not None:
            self.writer.core.members.retract(self.entry.record.id)


Commit = tuple[Ticket, range, range, int, Sums]


class Writer:
    """The writing half of an embedded store."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self._index = core.index

    # ---- whole writes -------------------------------------------------------------------------------------------
    def write(self, root: RootRef, pieces: Sequence[Piece], deadline: float) -> list[Status]:
        """See `stores.base.Store.write`. Works through the pieces in batches that leave room for other writers."""
        statuses: list[Status] = []
        limit = self.core.geometry.data_bytes // (2 * PENDING_SHARE)
        spec = root.space.spec
        start = 0
        while start < len(pieces):
            end, size, keys = start, 0, set[bytes]()
            while end < len(pieces):
                chunk = pieces[end].chunk
                if chunk.key not in keys:
                    size += spec.extent_bytes(chunk.num_tokens)
                    keys.add(chunk.key)
                if end > start and (size > limit or len(keys) > _BATCH_CHUNKS):
                    break
                end += 1
            if statuses and time.monotonic() >= deadline:
                return statuses + [Status.TIMEOUT] * (len(pieces) - start)
            statuses += self._write_batch(root, pieces[start:end], deadline)
            start = end
        return statuses

    def _write_batch(self, root: RootRef, pieces: Sequence[Piece], deadline: float) -> list[Status]:
        spec = root.space.spec
        chunks = list({piece.chunk.key: piece.chunk for piece in pieces}.values())
        tickets = dict(
            zip((c.key for c in chunks), self.reserve(root, chunks, pieces[0].shard.split, deadline), strict=True)
        )
        statuses = [tickets[piece.chunk.key].status for piece in pieces]
        commits: list[tuple[int, Commit]] = []
        claimed: list[tuple[int, Shard]] = []
        try:
            # All claims before the first copy: what runs between copies runs with a cold cache.
            for i, (chunk, shard, _) in enumerate(pieces):
                entry = tickets[chunk.key].entry
                if entry is not None:
                    statuses[i] = self._claim(spec, entry, shard)
                    if statuses[i] == Status.OK:
                        claimed.append((entry.record.id, shard))
            for i, (chunk, shard, tiles) in enumerate(pieces):
                ticket = tickets[chunk.key]
                if ticket.entry is None or statuses[i] != Status.OK:
                    continue
                late = time.monotonic() >= deadline
                sums = None if late else self._fill(spec, ticket.entry, shard, tiles, deadline)
                if sums is None:
                    statuses[i] = Status.TIMEOUT if time.monotonic() >= deadline else Status.FULL
                    self.abort([ticket])
                else:
                    commits.append((i, (ticket, shard.layers, shard.heads, shard.part, sums)))
            outcome = self.commit([commit for _, commit in commits], spec, deadline)
            for (i, _), status in zip(commits, outcome, strict=True):
                statuses[i] = status
            dropped = [tickets[pieces[i].chunk.key] for (i, _), s in zip(commits, outcome, strict=True) if not s.stored]
            if dropped:
                self.abort(dropped)
        finally:
            for claim in claimed:
                self.core.claims.release(*claim)
            for ticket in tickets.values():
                ticket.close()
        return statuses

    def _claim(self, spec: KVSpec, entry: Entry, shard: Shard) -> Status:
        """The right of one thread of this process to fill these tiles: the same prompt may be running twice, and its
        two results may differ in the last bit. Between ranks there is nothing to claim: each has its own tiles."""
        if not self.core.claims.take(entry.record.id, shard):
            return Status.BUSY
        noted = self._index.noted(entry, spec, shard.layers, shard.heads, shard.part)
        if shard.num_tiles and noted:
            self.core.claims.release(entry.record.id, shard)
            return Status.EXISTS if noted == shard.num_tiles else Status.BUSY
        return Status.OK

    def _fill(self, spec: KVSpec, entry: Entry, shard: Shard, tiles: Tiles, deadline: float) -> list[int] | None:
        """Copy a piece into its extent; its checksums in [layer][head] order, or None where that failed."""
        record, data, split, layers, heads = entry.record, self.core.data, shard.split, shard.layers, shard.heads
        size, sums, runs = spec.tile_bytes(record.num_tokens), list[int](), list[Sources]()
        try:
            if data.mapped and split.parts == 1:
                return fill_mapped(extent_tiles(self.core, spec, entry), layers, heads, tiles)
            rows = part_rows(split, shard.part, record.first_token, record.num_tokens)
            for i, layer in enumerate(layers):
                for j, head in enumerate(heads):
                    sums.append(checksum(tiles[i, j]))
                    offset = record.offset + (layer * spec.num_kv_heads + head) * size
                    if split.parts == 1:
                        runs.append((offset, [tiles[i, j]]))
                    elif data.mapped:
                        scatter_part(spec, tiles[i, j], rows, record.num_tokens, data.view(offset, size))
                    else:
                        runs += row_runs(spec, offset, tiles[i, j], rows, record.num_tokens)
        except OSError:
            return None  # the segment finds no storage
        # A late write goes on under its own publication of the extent, after this ticket is closed.
        members, extent_id = self.core.members, record.id
        if runs and not members.publish(extent_id):
            return None
        saved = not runs or data.save(runs, deadline, lambda: members.retract(extent_id))
        return sums if saved else None

    # ---- reserving ----------------------------------------------------------------------------------------------
    def reserve(self, root: RootRef, chunks: Sequence[ChunkRef], split: Split, deadline: float) -> list[Ticket]:
        """One transaction for all, more only where new segments must be had first."""
        tickets: list[Ticket] = []

        def work() -> bool:
            home = self._ensure_root(root)
            while len(tickets) < len(chunks):
                chunk = chunks[len(tickets)]
                outcome = Status.FULL if home is None else self._reserve_one(root, chunk, split)
                if outcome is None:
                    return False
                entry = outcome if isinstance(outcome, Entry) else None
                status = Status.OK if entry is not None else outcome
                assert isinstance(status, Status)
                tickets.append(Ticket(self, root.space.spec, chunk, status, entry))
            return True

        try:
            while not self.core.transact(work, deadline):
                self.core.grow(deadline)
        except (DeadlineError, StoreDamagedError):
            tickets += [Ticket(self, root.space.spec, c, Status.TIMEOUT, None) for c in chunks[len(tickets) :]]
        return tickets

    def _ensure_root(self, root: RootRef) -> Entry | None:
        space = self._index.find(root.space.key)
        if space is None:
            space = self._insert_node(root.space.key, root.space.payload, SPACE, None, root.space.chunk_tokens)
        else:
            self.check_space(root.space, space)
        if space is None:
            return None
        entry = self._index.find(root.key)
        if entry is not None and entry.record.parent_id != space.record.id:
            self.core.janitor.remove([entry])
            entry = None
        return entry or self._insert_node(root.key, root.payload, ROOT, space, root.space.chunk_tokens)

    def check_space(self, space: SpaceRef, entry: Entry) -> None:
        """Raise SpecMismatchError unless the stored description of the space is ours."""
        stored = self._index.payload(entry)
        if stored is not None and stored != space.payload:
            raise SpecMismatchError(
                f"this store holds KV of the same weights under another spec: it has {_spec_text(stored)}, asked for "
                f"{space.spec}; one of the two servers describes its cache wrongly"
            )

    def _insert_node(
        self, key: bytes, payload: bytes, kind: int, parent: Entry | None, chunk_tokens: int
    ) -> Entry | None:
        now = time.time_ns()
        record = Record(
            key=key,
            id=_new_id(),
            parent_id=parent.record.id if parent else 0,
            offset=0,
            length=0,
            group=0,
            created_ns=now,
            payload_sum=checksum(payload),
            parent_cell=parent.cell if parent else 0,
            num_tokens=0,
            number=0,
            num_sums=0,
            interleave=0,
            payload_bytes=len(payload),
            parts=0,
            kind=kind,
            flags=0,
            chunk_tokens=chunk_tokens,
            row_bytes=0,
            reserved=0,
        )
        return self._insert(record, payload, COMPLETE, parent, now)

    def _insert(self, record: Record, payload: bytes, state: int, parent: Entry | None, now: int) -> Entry | None:
        # Counted as a child first: a childless parent might be evicted to make room for this very record.
        if parent is not None:
            self._index.add_child(parent.cell, 1)
        for _ in range(_ROOM_ROUNDS):
            cell = self._index.insert(record, payload, state, now)
            if cell:
                return self._index.entry(cell)
            if not self.core.janitor.evict(1):
                break
        if parent is not None:
            self._index.add_child(parent.cell, -1)
        return None

    def _reserve_one(self, root: RootRef, chunk: ChunkRef, split: Split) -> Entry | Status | None:
        """The pending record to fill, or why there is none; None where another segment must be had first."""
        index = self._index
        parent = index.find(chunk.parent)
        if parent is None or parent.state not in (PENDING, COMPLETE):
            return Status.NO_PARENT
        # Counted as a child from here on: a childless parent could be evicted to make room for this very chunk, or
        # go with the dead writer's child that is removed below.
        index.add_child(parent.cell, 1)
        try:
            return self._reserve_under(parent, root, chunk, split)
        finally:
            index.add_child(parent.cell, -1)

    def _reserve_under(self, parent: Entry, root: RootRef, chunk: ChunkRef, split: Split) -> Entry | Status | None:
        index, janitor, members = self._index, self.core.janitor, self.core.members
        entry = index.find(chunk.key)
        if entry is not None:
            if entry.record.parent_id == parent.record.id:
                if entry.state == COMPLETE:
                    return Status.EXISTS
                same_split = (entry.record.parts, entry.record.interleave) == (split.parts, split.interleave)
                if not janitor.expired(entry):
                    if entry.record.group != members.group or not same_split:
                        return Status.BUSY
                    return entry if members.publish(entry.record.id) else Status.FULL
                index.words[Word.ABORTED] += 1
            janitor.remove([entry])
        return self._reserve_new(root, chunk, split, parent)

    def _reserve_new(self, root: RootRef, chunk: ChunkRef, split: Split, parent: Entry) -> Entry | Status | None:
        janitor, members, words = self.core.janitor, self.core.members, self._index.words
        spec = root.space.spec
        length = spec.extent_bytes(chunk.num_tokens)
        pending_limit = self.core.geometry.data_bytes // PENDING_SHARE
        if words[Word.PENDING] + length > pending_limit:
            janitor.sweep()
            if words[Word.PENDING] + length > pending_limit:
                return Status.FULL
        offset = janitor.allocate(length, evict=not self.core.can_grow)
        if offset < 0:
            return None if self.core.can_grow else Status.FULL
        payload = empty_payload(spec, split, chunk)
        now = time.time_ns()
        record = Record(
            key=chunk.key,
            id=_new_id(),
            parent_id=parent.record.id,
            offset=offset,
            length=length,
            group=members.group,
            created_ns=now,
            payload_sum=0,
            parent_cell=parent.cell,
            num_tokens=chunk.num_tokens,
            number=chunk.number,
            num_sums=spec.num_tiles * split.parts,
            interleave=split.interleave,
            payload_bytes=len(payload),
            parts=split.parts,
            kind=CHUNK,
            flags=0,
            chunk_tokens=root.space.chunk_tokens,
            row_bytes=spec.row_bytes,
            reserved=0,
        )
        # Making room may have swept an expired parent away, which a count of children does not prevent.
        above = self._index.entry(parent.cell, chunk.parent)
        entry = None
        if above is not None and above.record.id == parent.record.id:
            entry = self._insert(record, payload, PENDING, parent, now)
        if entry is None:
            janitor.free_units(Entry(0, 0, record, ()))
            return Status.FULL if above is not None else Status.NO_PARENT
        words[Word.PENDING] += length
        if not members.publish(record.id):
            janitor.remove([entry])
            return Status.FULL
        return entry

    # ---- committing ---------------------------------------------------------------------------------------------
    def commit_filled(self, filled: Sequence[Filled], deadline: float) -> list[Status]:
        """See `stores.base.Store.commit`."""
        statuses, numbered, spec = [Status.LOST] * len(filled), list[tuple[int, Commit]](), None
        for i, (ticket, layers, heads, part, sums) in enumerate(filled):
            if not isinstance(ticket, Ticket) or ticket.writer is not self:
                raise InvalidArgumentError("a reservation of another store cannot be committed here")
            commit = ticket.check_commit(layers, heads, part, sums)
            if commit is not None:
                spec = ticket.spec
                numbered.append((i, commit))
        if spec is not None:
            outcome = self.commit([commit for _, commit in numbered], spec, deadline)
            for (i, _), status in zip(numbered, outcome, strict=True):
                statuses[i] = status
        return statuses

    def commit(self, commits: Sequence[Commit], spec: KVSpec, deadline: float) -> list[Status]:
        """Note what was filled, all in one transaction."""
        if not commits:
            return []
        try:
            return self.core.transact(lambda: [self._commit_one(spec, *commit) for commit in commits], deadline)
        except DeadlineError:
            return [Status.TIMEOUT] * len(commits)
        except StoreDamagedError:
            return [Status.LOST] * len(commits)

    def _commit_one(self, spec: KVSpec, ticket: Ticket, layers: range, heads: range, part: int, sums: Sums) -> Status:
        index, words = self._index, self._index.words
        entry = index.entry(ticket.entry.cell, ticket.chunk.key) if ticket.entry is not None else None
        if entry is None or ticket.entry is None or entry.record.id != ticket.entry.record.id:
            return Status.LOST
        if entry.state == COMPLETE:
            return Status.OK
        if entry.state != PENDING:
            return Status.LOST
        if not put_all_sums(index, spec, entry, layers, heads, part, sums):
            self._drop(entry)
            return Status.LOST
        if index.complete(entry):
            record = entry.record
            words[Word.PENDING] -= min(record.length, words[Word.PENDING])
            words[Word.CHUNKS] += 1
            words[Word.STORED] += 1
            words[Word.STORED_BYTES] += record.length
            index.touch(entry.cell, time.time_ns())
            parent = index.entry(record.parent_cell)
            if record.is_tail and parent is not None and parent.record.id == record.parent_id:
                index.add_tail(record.parent_cell, record.num_tokens)
        return Status.OK

    def abort(self, tickets: Sequence[Ticket]) -> None:
        """Give chunks up for the whole group. Late or stuck is no matter: what is not aborted expires."""

        def work() -> None:
            for ticket in tickets:
                if ticket.entry is not None:
                    entry = self._index.entry(ticket.entry.cell, ticket.chunk.key)
                    if entry is not None and entry.record.id == ticket.entry.record.id and entry.state == PENDING:
                        self._drop(entry)

        for ticket in tickets:
            ticket.close()
        try:
            self.core.transact(work, time.monotonic() + 0.1)
        except HeadwaterError:
            return

    def _drop(self, entry: Entry) -> None:
        self.core.janitor.remove([entry])
        self._index.words[Word.ABORTED] += 1
        if self._index.words[Word.SWEEP]:
            self.core.janitor.sweep()


def _spec_text(payload: bytes) -> str:
    try:
        return str(KVSpec.from_canonical(json.loads(payload)["spec"]))
    except (ValueError, KeyError, TypeError):
        return "one that cannot be read"
