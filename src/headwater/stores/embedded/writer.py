"""Writing: reserve an extent, fill it, commit its checksums. The commit that brings the last one makes it visible.

Who may fill which extent is decided in `reserver`. Checksums of many chunks are noted column by column: a server saves
the same layers and heads of every chunk, and a transaction that every rank waits for must be short.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from headwater.errors import DeadlineError, HeadwaterError, InvalidArgumentError, StoreDamagedError
from headwater.kv.encoding import RAW, stored_extent_bytes
from headwater.kv.format import checksum, part_rows, scatter_part
from headwater.kv.hashing import ChunkRef
from headwater.kv.spec import KVSpec
from headwater.kv.topology import Shard
from headwater.stores.base import Filled, Form, Piece, Place, Reservation, RootRef, SpaceRef, Status, Tiles
from headwater.stores.embedded.core import Core
from headwater.stores.embedded.data import MappedData, Sources
from headwater.stores.embedded.fill import Sums, fill_mapped, put_all_sums, row_runs
from headwater.stores.embedded.index import Entry
from headwater.stores.embedded.janitor import PENDING_SHARE
from headwater.stores.embedded.layout import COMPLETE, PENDING, Word
from headwater.stores.embedded.reader import extent_tiles
from headwater.stores.embedded.reserver import Reserver
from headwater.stores.embedded.ticket import Commit, Ticket
from headwater.stores.events import EventKind

_BATCH_CHUNKS = 64
_COLUMN_CHUNKS = 4
"""From so many chunks on, columns are faster than one chunk after another."""


@lru_cache(maxsize=64)
def _tile_numbers(width: int, parts: int, layers: range, heads: range, part: int) -> npt.NDArray[np.int64]:
    """Which of a record's checksums are those of these tiles, in [layer][head] order, in a model of `width` heads."""
    tiles = np.array(layers, np.int64)[:, None] * width + np.array(heads, np.int64)
    return (tiles * parts + part).reshape(-1)


@lru_cache(maxsize=256)
def _check_form(spec: KVSpec, num_tokens: int, form: Form) -> None:
    """Raise InvalidArgumentError where tiles of so many tokens cannot be stored so."""
    is_divided = form.split.parts > 1 and form.encoding != RAW
    if is_divided or not stored_extent_bytes(spec, num_tokens, form.encoding):
        raise InvalidArgumentError(
            f"tiles of {num_tokens} tokens of {spec} in {form.split.parts} parts cannot be stored in encoding "
            f"{form.encoding}; expected {RAW}, raw"
        )


class Writer:
    """The writing half of an embedded store."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self._index = core.index
        self._reserver = Reserver(core)

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
                    size += stored_extent_bytes(spec, chunk.num_tokens, pieces[end].encoding)
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
        firsts = list({piece.chunk.key: piece for piece in reversed(pieces)}.values())[::-1]
        begun = {piece.chunk.key for piece in pieces if piece.before is not None}
        chunks, forms = [p.chunk for p in firsts], [Form(p.shard.split, p.encoding) for p in firsts]
        opened = self.reserve(root, chunks, forms, deadline, begun=begun)
        tickets = {chunk.key: ticket for chunk, ticket in zip(chunks, opened, strict=True)}
        statuses = [tickets[piece.chunk.key].status for piece in pieces]
        commits: list[tuple[int, Commit]] = []
        claimed: list[tuple[int, Shard]] = []
        try:
            # All claims before the first copy: what runs between copies runs with a cold cache.
            for i, (chunk, shard, _, before, encoding) in enumerate(pieces):
                entry = tickets[chunk.key].entry
                if entry is not None and entry.record.encoding != encoding:
                    statuses[i] = Status.BUSY  # two pieces of one chunk that are not alike
                elif entry is not None:
                    statuses[i] = self._claim(spec, entry, shard, before)
                    if statuses[i] == Status.OK:
                        claimed.append((entry.record.id, shard))
            for i, (chunk, shard, tiles, _, _) in enumerate(pieces):
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

    def _claim(self, spec: KVSpec, entry: Entry, shard: Shard, before: range | None) -> Status:
        """The right of one thread of this process to fill these tiles: the same prompt may be running twice, and its
        two results may differ in the last bit. Between ranks there is nothing to claim: each has its own tiles."""
        noted = self._index.noted(entry, spec, before, shard.heads, shard.part) if before else 0
        if before and noted < len(before) * len(shard.heads):
            return Status.LOST  # another record than the one they went into
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
        size, sums, runs = record.tile_bytes, list[int](), list[Sources]()
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
    def reserve(
        self,
        root: RootRef,
        chunks: Sequence[ChunkRef],
        forms: Sequence[Form],
        deadline: float,
        *,
        begun: Collection[bytes] = (),
        exclusive: bool = False,
    ) -> list[Ticket]:
        """See `stores.base.MappedStore.reserve`. Of the keys in `begun` no new record is made."""
        spec, pid = root.space.spec, os.getpid()
        for chunk, form in zip(chunks, forms, strict=True):
            _check_form(spec, chunk.num_tokens, form)
        found = self._reserver.reserve(root, chunks, forms, deadline, begun, exclusive=exclusive)
        return [
            Ticket(self, spec, chunk, Status.OK, outcome, pid)
            if isinstance(outcome, Entry)
            else Ticket(self, spec, chunk, outcome, None, pid)
            for chunk, outcome in zip(chunks, found, strict=True)
        ]

    def check_space(self, space: SpaceRef, entry: Entry) -> None:
        """Raise SpecMismatchError unless the stored description of the space is ours."""
        self._reserver.check_space(space, entry)

    def places(self, reservations: Sequence[Reservation]) -> list[Place | None]:
        """See `stores.base.MappedStore.places`."""
        data, pid = self.core.data, os.getpid()
        if not isinstance(data, MappedData):
            return [None] * len(reservations)
        places: list[Place | None] = []
        for ticket in [self.own(reservation) for reservation in reservations]:
            if ticket.entry is None or not ticket.is_open or ticket.pid != pid:
                places.append(None)
            else:
                places.append(data.place(ticket.entry.record.offset))
        return places

    def noted(self, reservations: Sequence[Reservation], layers: range, heads: range, part: int) -> list[int]:
        """See `stores.base.MappedStore.noted`."""
        tickets = [self.own(reservation) for reservation in reservations]
        entries = [ticket.entry for ticket in tickets if ticket.entry is not None]
        if len(entries) < len(tickets) or len({entry.record.num_sums for entry in entries}) != 1:
            noted = self._index.noted
            return [0 if t.entry is None else noted(t.entry, t.spec, layers, heads, part) for t in tickets]
        numbers = _tile_numbers(tickets[0].spec.num_kv_heads, entries[0].record.parts, layers, heads, part)
        return self.core.columns.noted(entries, numbers)

    def own(self, reservation: Reservation) -> Ticket:
        """A reservation of this very store. Raises InvalidArgumentError for another's."""
        if not isinstance(reservation, Ticket) or reservation.writer is not self:
            raise InvalidArgumentError("a reservation of another store cannot be used here")
        return reservation

    # ---- committing ---------------------------------------------------------------------------------------------
    def commit_filled(self, filled: Sequence[Filled], deadline: float) -> list[Status]:
        """See `stores.base.MappedStore.commit`."""
        statuses, numbered, spec = [Status.LOST] * len(filled), list[tuple[int, Commit]](), None
        for i, (ticket, layers, heads, part, sums) in enumerate(filled):
            own = self.own(ticket)
            commit = own.check_commit(layers, heads, part, sums)
            if commit is not None:
                spec = own.spec
                numbered.append((i, commit))
        if spec is not None:
            outcome = self.commit([commit for _, commit in numbered], spec, deadline)
            for (i, _), status in zip(numbered, outcome, strict=True):
                statuses[i] = status
        return statuses

    def commit_shard(
        self, reservations: Sequence[Reservation], shard: Shard, sums: npt.NDArray[np.uint64], deadline: float
    ) -> list[Status]:
        """See `stores.base.MappedStore.commit_shard`."""
        tickets = [self.own(reservation) for reservation in reservations]
        if not tickets:
            return []
        if sums.dtype != np.uint64 or sums.shape != (len(tickets), len(shard.layers), len(shard.heads)):
            raise InvalidArgumentError(
                f"checksums are {sums.dtype} of shape {sums.shape}; expected 64 bits for each tile of {shard.layers} × "
                f"{shard.heads} of {len(tickets)} chunks"
            )
        pid, spec = os.getpid(), tickets[0].spec
        if any(ticket.entry is None or ticket.pid != pid for ticket in tickets):
            raise InvalidArgumentError("some of these reservations are not open in this process")
        tickets[0].check_commit(shard.layers, shard.heads, shard.part, sums[0])
        rows = sums.reshape(len(tickets), -1)

        def work() -> list[Status]:
            if self._commit_rows(tickets, shard, rows):
                return [Status.OK] * len(tickets)
            place = shard.layers, shard.heads, shard.part
            return self._commit_all(spec, [(ticket, *place, row) for ticket, row in zip(tickets, rows, strict=True)])

        return self._settle(work, len(tickets), deadline)

    def _commit_rows(self, tickets: Sequence[Ticket], shard: Shard, rows: npt.NDArray[np.uint64]) -> bool:
        """Commit the same tiles of chunks of one shape; False, and not all of it done, where one was not as usual."""
        entries = [ticket.entry for ticket in tickets if ticket.entry is not None]
        first, spec = entries[0].record, tickets[0].spec
        shapes = {(entry.record.num_sums, entry.record.parts) for entry in entries}
        if len({entry.cell for entry in entries}) < len(tickets) or shapes != {
            (spec.num_tiles * first.parts, first.parts)
        }:
            return False
        numbers = _tile_numbers(spec.num_kv_heads, first.parts, shard.layers, shard.heads, shard.part)
        fresh = self.core.columns.put(entries, numbers, rows)
        if not fresh.all():
            entries = [entries[row] for row in np.flatnonzero(fresh)]
        self._complete(entries)
        return len(entries) == len(tickets)

    def commit(self, commits: Sequence[Commit], spec: KVSpec, deadline: float) -> list[Status]:
        """Note what was filled, all in one transaction."""
        if not commits:
            return []
        return self._settle(lambda: self._commit_all(spec, commits), len(commits), deadline)

    def _settle(self, work: Callable[[], list[Status]], count: int, deadline: float) -> list[Status]:
        try:
            return self.core.transact(work, deadline)
        except DeadlineError:
            return [Status.TIMEOUT] * count
        except StoreDamagedError:
            return [Status.LOST] * count

    def _commit_all(self, spec: KVSpec, commits: Sequence[Commit]) -> list[Status]:
        done = self._commit_columns(spec, commits) if len(commits) >= _COLUMN_CHUNKS else set[int]()
        return [Status.OK if i in done else self._commit_one(spec, *commit) for i, commit in enumerate(commits)]

    def _commit_columns(self, spec: KVSpec, commits: Sequence[Commit]) -> set[int]:
        """Commit those whose records are pending and new to their checksums, equal places together; which ones."""
        groups: dict[tuple[range, range, int, int, int], dict[int, tuple[int, Entry, npt.NDArray[np.uint64]]]] = {}
        for i, (ticket, layers, heads, part, sums) in enumerate(commits):
            if ticket.entry is not None and isinstance(sums, np.ndarray):
                record = ticket.entry.record
                group = groups.setdefault((layers, heads, part, record.parts, record.num_sums), {})
                group.setdefault(ticket.entry.cell, (i, ticket.entry, sums))
        done: set[int] = set()
        for (layers, heads, part, parts, num_sums), group in groups.items():
            if num_sums != spec.num_tiles * parts:
                continue
            members = list(group.values())
            entries = [entry for _, entry, _ in members]
            numbers = _tile_numbers(spec.num_kv_heads, parts, layers, heads, part)
            fresh = np.flatnonzero(self.core.columns.put(entries, numbers, np.stack([sums for *_, sums in members])))
            self._complete([entries[row] for row in fresh])
            done.update(members[row][0] for row in fresh)
        return done

    def _commit_one(self, spec: KVSpec, ticket: Ticket, layers: range, heads: range, part: int, sums: Sums) -> Status:
        index = self._index
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
        self._complete([entry])
        return Status.OK

    def _complete(self, entries: Sequence[Entry]) -> None:
        """Make visible what has all its checksums."""
        index, words = self._index, self._index.words
        # Also those that are not complete yet: a commit shows that their writers are at work.
        index.touch_all(np.array([entry.cell for entry in entries], np.int64), time.time_ns())
        done = self.core.columns.complete(entries)
        if not done:
            return
        for entry in done:
            self.core.journal.note(EventKind.STORED, entry.record)
        num_bytes = sum([entry.record.length for entry in done])
        words[Word.PENDING] -= min(num_bytes, words[Word.PENDING])
        words[Word.CHUNKS] += len(done)
        words[Word.STORED] += len(done)
        words[Word.STORED_BYTES] += num_bytes
        words[Word.STORED_RAW_BYTES] += sum([entry.record.raw_bytes for entry in done])
        for record in [entry.record for entry in done if entry.record.is_tail]:
            parent = index.entry(record.parent_cell)
            if parent is not None and parent.record.id == record.parent_id:
                index.add_tail(record.parent_cell, record.num_tokens)

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
