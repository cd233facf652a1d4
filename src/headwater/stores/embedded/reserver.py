"""Reserving: pending records with their extents, made or joined, many in one transaction.

A writer group is one running server; its ranks fill the same extents. Two groups never fill one extent: the second
to come skips the chunk. While a process writes, it publishes the extent, so that nobody reuses the bytes under it
even if its reservation was taken away.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Sequence

from headwater.errors import DeadlineError, SpecMismatchError, StoreDamagedError
from headwater.kv.encoding import RAW, stored_extent_bytes
from headwater.kv.format import checksum
from headwater.kv.hashing import ChunkRef
from headwater.kv.spec import KVSpec
from headwater.stores.base import Form, RootRef, SpaceRef, Status
from headwater.stores.embedded.core import Core
from headwater.stores.embedded.fill import empty_payload
from headwater.stores.embedded.index import Entry
from headwater.stores.embedded.janitor import PENDING_SHARE
from headwater.stores.embedded.layout import CHUNK, COMPLETE, PENDING, ROOT, SPACE, Record, Word, cells_for

_ROOM_ROUNDS = 16

Outcome = Entry | Status
"""The pending record to fill, or why there is none."""


def _new_id() -> int:
    return int.from_bytes(os.urandom(8), "little") >> 1 | 1


class Reserver:
    """The part of an embedded store that makes and joins pending records."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self._index = core.index
        self._exclusive = False
        """Of the transaction under way: whether it is for one filler alone."""

    def reserve(
        self,
        root: RootRef,
        chunks: Sequence[ChunkRef],
        forms: Sequence[Form],
        deadline: float,
        begun: Collection[bytes] = (),
        *,
        exclusive: bool = False,
    ) -> list[Outcome]:
        """One transaction for all, more only where new segments must be had first.

        Chunks whose keys are in `begun` were reserved before: where that record is gone they are LOST, since a new one
        would lack what went into it. An `exclusive` reservation is for one filler, who fills the whole extent: nobody
        joins it, and it joins nobody's.
        """
        found: list[Outcome] = []

        def work() -> bool:
            self._exclusive = exclusive
            home = self._ensure_root(root)
            # The chunk before, just looked at: the usual parent. Nothing is removed between one chunk and the next.
            last = self._join_all(chunks[len(found) :], forms[len(found) :], found) if home is not None else None
            if home is not None:
                last = self._make_all(root, chunks[len(found) :], forms[len(found) :], last, begun, found)
            while len(found) < len(chunks):
                chunk, form = chunks[len(found)], forms[len(found)]
                may_make = chunk.key not in begun
                outcome = Status.FULL if home is None else self._reserve_one(root, chunk, form, last, may_make)
                if outcome is None:
                    return False
                found.append(outcome)
                last = outcome if isinstance(outcome, Entry) else None
            return True

        try:
            while not self.core.transact(work, deadline):
                self.core.grow(deadline)
        except (DeadlineError, StoreDamagedError):
            found += [Status.TIMEOUT] * (len(chunks) - len(found))
        return found

    def _join_all(self, chunks: Sequence[ChunkRef], forms: Sequence[Form], found: list[Outcome]) -> Entry | None:
        """Join the first chunks as long as each is pending for this group under the one before; the last of them.

        That is what every rank of a server but its first meets for whole prompts.
        """
        if not chunks or self._index.find(chunks[0].key) is None:
            return None  # new chunks: looking for all of them would take as long as making two
        members = self.core.members
        parent = self._index.find(chunks[0].parent)
        joined: list[Entry] = []
        if parent is None or parent.state not in (PENDING, COMPLETE):
            return None
        entries = self.core.columns.find([chunk.key for chunk in chunks]).entries()
        for chunk, form, entry in zip(chunks, forms, entries, strict=True):
            if entry is None or entry.state != PENDING or chunk.parent != parent.record.key:
                break
            record = entry.record
            if record.parent_id != parent.record.id or record.group != members.group:
                break
            if not self._is_alike(record, form) or self.core.janitor.expired(entry):
                break
            joined.append(entry)
            parent = entry
        del joined[members.publish_all([entry.record.id for entry in joined]) :]
        found += joined
        return joined[-1] if joined else None

    def _make_all(
        self,
        root: RootRef,
        chunks: Sequence[ChunkRef],
        forms: Sequence[Form],
        last: Entry | None,
        begun: Collection[bytes],
        found: list[Outcome],
    ) -> Entry | None:
        """Make records for the first chunks, as long as each is whole, new, of one form and behind the one before, and
        as many as there is room for side by side; the last of them, or the one before them.

        That is what the first rank of a server meets for a new prompt. The rest is left to `_reserve_one`.
        """
        if len(chunks) < 2 or forms[0].split.parts > 1 or chunks[0].num_tokens < root.space.chunk_tokens:
            return last
        form = forms[0]
        janitor, members, index, spec = self.core.janitor, self.core.members, self._index, root.space.spec
        parent = last if last is not None and last.record.key == chunks[0].parent else index.find(chunks[0].parent)
        if parent is None or parent.state not in (PENDING, COMPLETE):
            return last
        length = stored_extent_bytes(spec, root.space.chunk_tokens, form.encoding)
        room = max(0, self._pending_limit - index.words[Word.PENDING]) // length
        wanted, above = 0, chunks[0].parent
        for chunk, other in zip(chunks[:room], forms, strict=False):
            is_whole = chunk.num_tokens == root.space.chunk_tokens and chunk.parent == above
            if not is_whole or other != form or chunk.key in begun or index.find(chunk.key) is not None:
                break
            wanted, above = wanted + 1, chunk.key
        ids = [_new_id() for _ in range(wanted)]
        published = members.publish_all(ids)  # before they can be seen: a record that nobody fills is dead
        offset, count = janitor.allocate_run(length, published)
        need = cells_for(len(empty_payload(spec, form.split, chunks[0])))
        first = index.claim(need * count) if count else 0
        if count and not first:
            janitor.free_run(offset, length, count)
            count = 0
        members.retract_all(ids[count:published])
        if not count:
            return last
        stride, now = janitor.units_for(length) * self.core.geometry.unit_bytes, time.time_ns()
        parents = [(parent.record.id, parent.cell), *((ids[i], first + i * need) for i in range(count - 1))]
        records = [
            self._record(root, chunks[i], form, ids[i], parents[i], offset + i * stride, length, now)
            for i in range(count)
        ]
        made = self.core.columns.insert(first, records, now)
        index.add_child(parent.cell, 1)
        index.words[Word.PENDING] += length * count
        found += made
        return made[-1]

    @property
    def _pending_limit(self) -> int:
        """Bytes that may be pending."""
        return self.core.geometry.data_bytes // PENDING_SHARE

    def _record(
        self,
        root: RootRef,
        chunk: ChunkRef,
        form: Form,
        record_id: int,
        parent: tuple[int, int],
        offset: int,
        length: int,
        now: int,
    ) -> Record:
        """The record of a new chunk whose extent lies there. `parent`: its id and cell."""
        spec = root.space.spec
        num_sums = spec.num_tiles * form.split.parts
        return Record(
            key=chunk.key,
            id=record_id,
            parent_id=parent[0],
            offset=offset,
            length=length,
            group=self.core.members.group,
            created_ns=now,
            payload_sum=0,
            parent_cell=parent[1],
            num_tokens=chunk.num_tokens,
            number=chunk.number,
            num_sums=num_sums,
            interleave=form.split.interleave,
            payload_bytes=9 * num_sums,
            parts=form.split.parts,
            kind=CHUNK,
            encoding=form.encoding,
            chunk_tokens=root.space.chunk_tokens,
            row_bytes=spec.row_bytes,
            exclusive=int(self._exclusive),
        )

    def _ensure_root(self, root: RootRef) -> Entry | None:
        """The root's record under its space's, both made where they are missing."""
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
            encoding=RAW,
            chunk_tokens=chunk_tokens,
            row_bytes=0,
            exclusive=0,
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

    def _reserve_one(
        self, root: RootRef, chunk: ChunkRef, form: Form, last: Entry | None, may_make: bool
    ) -> Outcome | None:
        """None where another segment must be had first."""
        index = self._index
        parent = last if last is not None and last.record.key == chunk.parent else index.find(chunk.parent)
        if parent is None or parent.state not in (PENDING, COMPLETE):
            return Status.NO_PARENT
        entry = index.find(chunk.key)
        joined = self._join(entry, parent, form) if entry is not None else None
        if joined is not None:
            return joined
        if not may_make:
            return Status.LOST
        # Counted as a child from here on: a childless parent could be evicted to make room for this very chunk, or
        # go with the dead writer's child that is removed below.
        index.add_child(parent.cell, 1)
        try:
            if entry is not None:
                index.words[Word.ABORTED] += entry.record.parent_id == parent.record.id
                self.core.janitor.remove([entry])
            return self._reserve_new(root, chunk, form, parent)
        finally:
            index.add_child(parent.cell, -1)

    def _join(self, entry: Entry, parent: Entry, form: Form) -> Outcome | None:
        """What a record that is there means for whoever wants to write; None where it is dead and must go."""
        record, members = entry.record, self.core.members
        if record.parent_id != parent.record.id:
            return None
        if entry.state == COMPLETE:
            if record.is_tail and record.num_tokens not in parent.tails:
                self._index.add_tail(parent.cell, record.num_tokens)  # forgotten for newer ones, or damaged
            return Status.EXISTS
        if self.core.janitor.expired(entry):
            return None
        if record.group != members.group or not self._is_alike(record, form):
            return Status.BUSY
        return entry if members.publish(record.id) else Status.FULL

    def _is_alike(self, record: Record, form: Form) -> bool:
        """Whether a pending record is to be filled as this process would fill it."""
        mine = (form.split.parts, form.split.interleave, form.encoding)
        alike = (record.parts, record.interleave, record.encoding) == mine
        return alike and not record.is_exclusive and not self._exclusive

    def _reserve_new(self, root: RootRef, chunk: ChunkRef, form: Form, parent: Entry) -> Outcome | None:
        janitor, members, words = self.core.janitor, self.core.members, self._index.words
        spec = root.space.spec
        length = stored_extent_bytes(spec, chunk.num_tokens, form.encoding)
        if words[Word.PENDING] + length > self._pending_limit:
            janitor.sweep()
            if words[Word.PENDING] + length > self._pending_limit:
                return Status.FULL
        offset = janitor.allocate(length, evict=not self.core.can_grow)
        if offset < 0:
            return None if self.core.can_grow else Status.FULL
        payload, now = empty_payload(spec, form.split, chunk), time.time_ns()
        record = self._record(root, chunk, form, _new_id(), (parent.record.id, parent.cell), offset, length, now)
        # Making room may have swept an expired parent away, which a count of children does not prevent.
        above = self._index.entry(parent.cell, chunk.parent)
        entry, is_published = None, members.publish(record.id)  # before it can be seen: one that nobody fills is dead
        if is_published and above is not None and above.record.id == parent.record.id:
            entry = self._insert(record, payload, PENDING, parent, now)
        if entry is None:
            if is_published:
                members.retract(record.id)
            janitor.free_units(Entry(0, 0, record, ()))
            return Status.FULL if above is not None else Status.NO_PARENT
        words[Word.PENDING] += length
        return entry


def _spec_text(payload: bytes) -> str:
    try:
        return str(KVSpec.from_canonical(json.loads(payload)["spec"]))
    except (ValueError, KeyError, TypeError):
        return "one that cannot be read"
