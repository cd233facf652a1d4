"""What administrators do with an embedded store: pins, removal, listings, statistics, a full check."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from headwater.errors import DeadlineError, SpecError, StoreDamagedError
from headwater.kv.format import part_checksums
from headwater.kv.hashing import ChunkRef
from headwater.kv.spec import KVSpec
from headwater.kv.topology import Split
from headwater.stores.base import Progress, Status
from headwater.stores.embedded.audit import audit
from headwater.stores.embedded.core import Core
from headwater.stores.embedded.index import Entry
from headwater.stores.embedded.janitor import orphans
from headwater.stores.embedded.layout import CELL, CHUNK, COMPLETE, LIMBO, PENDING, ROOT, SPACE, Geometry, Word
from headwater.stores.embedded.reader import Reader
from headwater.stores.stats import ChunkInfo, StoreStats, VerifyReport

_ADMIN_DEADLINE_S = 10.0
_SWEEP_BATCH = 1000


class Admin:
    """The administrator's half of an embedded store. Whoever calls it keeps the store open meanwhile."""

    def __init__(self, core: Core, reader: Reader) -> None:
        self._core = core
        self._reader = reader

    def pin(self, key: bytes, pinned: bool, deadline: float) -> Status:
        """See `stores.base.Store.pin`."""
        core = self._core

        def work() -> Status:
            entry = core.index.find(key)
            if entry is None or entry.state != COMPLETE or entry.record.kind != CHUNK:
                return Status.MISS
            core.index.set_pinned(entry.cell, pinned)
            return Status.OK

        return core.transact(work, deadline)

    def abandon(self, keys: Sequence[bytes], encoding: int | None, deadline: float) -> int:
        """See `stores.base.Store.abandon`."""
        core = self._core

        def work() -> int:
            found = [core.index.find(key) for key in keys]
            mine = [e for e in found if e is not None and e.state == PENDING and e.record.group == core.members.group]
            begun = [e for e in mine if encoding in (None, e.record.encoding)]
            if begun:
                core.janitor.remove(begun)
                core.index.words[Word.ABORTED] += len(begun)
                core.janitor.sweep()  # what hangs below can never be found either
            return len(begun)

        try:
            return core.transact(work, deadline)
        except (DeadlineError, StoreDamagedError):
            return 0  # what is not given up now expires

    def remove(self, keys: Sequence[bytes], deadline: float) -> list[Status]:
        """See `stores.base.Store.remove`."""
        core = self._core

        def work() -> list[Status]:
            found = [core.index.find(key) for key in keys]
            chunks = [e if e is not None and e.record.kind == CHUNK else None for e in found]
            core.janitor.remove(list({e.cell: e for e in chunks if e is not None}.values()))
            core.janitor.sweep()
            return [Status.OK if e is not None else Status.MISS for e in chunks]

        return core.transact(work, deadline)

    def clear(
        self, match: Callable[[dict[str, Any], dict[str, Any]], bool] | None, progress: Progress | None = None
    ) -> int:
        """Roots vanish in one transaction, and every chunk with them; the room comes back batch by batch after it."""
        core = self._core

        def cut() -> list[Entry]:
            entries = core.janitor.entries()
            spaces = {(e.cell, e.record.id): _payload(core, e) for e in entries if e.record.kind == SPACE}
            roots = [e for e in entries if e.record.kind == ROOT and e.state == COMPLETE]
            above = [spaces.get((e.record.parent_cell, e.record.parent_id), {}) for e in roots]
            chosen = [e for e, s in zip(roots, above, strict=True) if match is None or match(s, _payload(core, e))]
            core.janitor.remove(chosen)
            return orphans(core.janitor.entries())

        def drop(batch: list[Entry]) -> None:
            found = [(old, core.index.entry(old.cell, old.record.key)) for old in batch]
            core.janitor.remove([e for old, e in found if e and e.record.id == old.record.id and e.state != LIMBO])

        # Nothing can be found any more after the first transaction. The room comes back in small steps; whoever comes
        # after a death in between is told to sweep by the mark that the first one left.
        lost = core.transact(cut, time.monotonic() + _ADMIN_DEADLINE_S)
        for start in range(0, len(lost), _SWEEP_BATCH):
            batch = lost[start : start + _SWEEP_BATCH]
            core.transact(partial(drop, batch), time.monotonic() + _ADMIN_DEADLINE_S)
            if progress is not None:
                progress(start + len(batch), len(lost))
        core.transact(core.janitor.sweep, time.monotonic() + _ADMIN_DEADLINE_S)
        return sum(entry.state == COMPLETE and entry.record.kind == CHUNK for entry in lost)

    def scan(self) -> list[ChunkInfo]:
        """Every complete chunk whose prefix is there."""
        found: list[ChunkInfo] = []
        core = self._core
        published = core.members.published()
        homes: dict[tuple[int, int], tuple[dict[str, Any], dict[str, Any]]] = {}
        for entry in core.janitor.entries():
            record, place = entry.record, (entry.cell, entry.record.id)
            above = homes.get((record.parent_cell, record.parent_id))
            if entry.state != COMPLETE:
                continue
            if record.kind == SPACE:
                homes[place] = (_payload(core, entry), {})
            elif above is not None and record.kind == ROOT:
                homes[place] = (above[0], _payload(core, entry))
            elif above is not None:
                homes[place] = above
                info = ChunkInfo(
                    key=record.key,
                    space=above[0],
                    root=above[1],
                    number=record.number,
                    num_tokens=record.num_tokens,
                    num_bytes=record.length,
                    is_tail=record.is_tail,
                    pinned=bool(core.index.counts(entry.cell)[1]),
                    leased=record.id in published,
                    last_used_ns=core.index.age(entry.cell),
                    hits=core.index.hits(entry.cell),
                )
                found.append(info)
        return found

    def stats(self, url: str) -> StoreStats:
        """The store now."""
        core = self._core
        return store_stats(url, core.geometry, core.index.words, core.members.count())

    def verify(self, progress: Progress | None = None) -> VerifyReport:
        """Read every tile, then check the whole index under the lock. What is damaged is removed or rebuilt."""
        core = self._core
        entries = core.janitor.entries()
        homes: dict[tuple[int, int], KVSpec] = {}
        chunks = tiles = num_bytes = damaged = lost = done = 0
        problems: list[str] = []
        total = sum(entry.record.length for entry in entries)
        for entry in entries:
            record = entry.record
            done += record.length
            if entry.state != COMPLETE:
                continue
            spec = _described_spec(core, entry) if record.kind == SPACE else None
            spec = spec or homes.get((record.parent_cell, record.parent_id))
            outcome = Status.MISS if spec is None or record.kind != CHUNK else self._verify_chunk(core, spec, entry)
            if outcome == Status.DAMAGED:
                outcome = self._reader.blame(entry, time.monotonic() + _ADMIN_DEADLINE_S)
            if outcome == Status.OK and spec is not None:
                chunks, tiles, num_bytes = chunks + 1, tiles + spec.num_tiles, num_bytes + record.length
            elif outcome == Status.DAMAGED:
                damaged += 1
                continue
            elif outcome == Status.TIMEOUT:
                problems.append(f"chunk {record.key.hex()[:12]} could not be read within {_ADMIN_DEADLINE_S:.0f} s")
            if spec is not None:
                homes[(entry.cell, record.id)] = spec
            elif record.kind == CHUNK:
                lost += 1  # it continued a damaged one, and went with it
            if progress is not None:
                progress(done, total)
        found = self.audit()
        if found:
            core.index.words[Word.SUSPECT] = 1  # whoever writes next rebuilds what can be rebuilt
        return VerifyReport(chunks, tiles, num_bytes, damaged, lost, (*problems, *found))

    def _verify_chunk(self, core: Core, spec: KVSpec, entry: Entry) -> Status:
        """OK, DAMAGED, TIMEOUT, or MISS where it went meanwhile."""
        record = entry.record
        ref = ChunkRef(record.key, b"", record.number, record.first_token, record.num_tokens, b"")
        loaded = self._reader.load(spec, ref)
        if loaded is None or loaded.entry.record.id != record.id:
            return Status.MISS
        size, parts = record.tile_bytes, record.parts
        split, scratch = Split(parts, record.interleave), np.empty(size, np.uint8)
        for tile in range(spec.num_tiles):
            deadline = time.monotonic() + _ADMIN_DEADLINE_S
            try:
                read = core.data.load(record.offset + tile * size, [scratch], deadline)
            except (OSError, IndexError):
                return Status.DAMAGED
            if not read:
                return Status.TIMEOUT
            sums = part_checksums(spec, split, record.first_token, record.num_tokens, scratch)
            if sums != loaded.sums[tile * parts : (tile + 1) * parts].tolist():
                return Status.DAMAGED
        return Status.OK

    def audit(self) -> list[str]:
        """Check every invariant of the index (not the stored bytes); what is wrong, in words."""
        core = self._core
        return core.transact(lambda: audit(core), time.monotonic() + _ADMIN_DEADLINE_S)


def store_stats(url: str, g: Geometry, words: Sequence[int], num_members: int) -> StoreStats:
    """Figures from the words of an index."""
    return StoreStats(
        url=url,
        capacity_bytes=g.capacity,
        data_bytes=g.data_bytes,
        used_bytes=words[Word.USED_UNITS] * g.unit_bytes,
        pending_bytes=words[Word.PENDING],
        index_bytes=g.index_bytes,
        index_used_bytes=words[Word.USED_CELLS] * CELL,
        chunks=words[Word.CHUNKS],
        members=num_members,
        stored=words[Word.STORED],
        stored_bytes=words[Word.STORED_BYTES],
        stored_raw_bytes=words[Word.STORED_RAW_BYTES],
        evicted=words[Word.EVICTED],
        damaged=words[Word.DAMAGED],
        aborted=words[Word.ABORTED],
        rebuilds=words[Word.REBUILDS],
    )


def _described_spec(core: Core, entry: Entry) -> KVSpec | None:
    try:
        return KVSpec.from_canonical(_payload(core, entry)["spec"])
    except (KeyError, SpecError):
        return None


def _payload(core: Core, entry: Entry) -> dict[str, Any]:
    """The description in a space's or root's record; empty where it does not verify."""
    raw = core.index.payload(entry)
    try:
        data = json.loads(raw) if raw is not None else {}
    except ValueError:
        data = {}
    return data if isinstance(data, dict) else {}
