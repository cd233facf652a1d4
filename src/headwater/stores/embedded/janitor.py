"""Room and order: allocation, eviction, removal, and the rebuild that repairs anything. All under the write lock.

Nothing here frees an extent that a living process has published (it reads it under a lease, or is still writing
to it): such a record goes into limbo, unreachable, until nobody touches its bytes any more.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from headwater.stores.embedded.data import DataArea
from headwater.stores.embedded.index import Entry, Index
from headwater.stores.embedded.layout import (
    CHUNK,
    COMPLETE,
    CREATED_WORD,
    EVICTING,
    ID_WORD,
    KIND_WORD,
    LIMBO,
    PENDING,
    ROOT,
    SPACE,
    TOKENS_WORD,
    Geometry,
    Record,
    Word,
)
from headwater.stores.embedded.members import Members
from headwater.stores.embedded.units import ABSENT_UNIT, FREE_UNIT, USED_UNIT
from headwater.stores.events import EventKind
from headwater.stores.policy import EvictionPolicy, Leaves

PENDING_SHARE = 4
"""Pending bytes may take one part in this many of the data area."""
MAX_PENDING_NS = 30_000_000_000
"""A reservation older than this is given up by whoever needs the room or the key."""
_MAX_ROUNDS = 64
_MAX_SCANS = 2
"""Scans of one eviction: the second is for the case that all candidates of the first were used meanwhile."""
_PLAUSIBLE = 1 << 56
_EVENT_COUNTS = (
    *(Word.EVICTED, Word.DAMAGED, Word.STORED, Word.ABORTED, Word.REBUILDS),
    *(Word.STORED_BYTES, Word.STORED_RAW_BYTES),
)


class Janitor:
    """See the module."""

    def __init__(
        self,
        geometry: Geometry,
        index: Index,
        members: Members,
        data: DataArea,
        policy: EvictionPolicy,
        note: Callable[[EventKind, Record | None], None] = lambda kind, record: None,
    ) -> None:
        self._geometry = geometry
        self._index = index
        self._members = members
        self._data = data
        self._policy = policy
        self._note = note
        self._candidates: list[tuple[int, int, int]] = []  # heap of (rank, cell, id)
        self._cutoff = 0
        """Leaves outside the heap rank at least this. A leaf above it waits for the next scan, which compares them."""

    # ---- allocation ---------------------------------------------------------------------------------------------
    def units_for(self, length: int) -> int:
        """Units of an extent."""
        return -(-length // self._geometry.unit_bytes)

    def allocate(self, length: int, *, evict: bool) -> int:
        """Offset of a fresh extent, evicting leaves if allowed; -1 where there is no room."""
        need = self.units_for(length)
        for _ in range(_MAX_ROUNDS):
            at = self._find_units(need)
            if at >= 0:
                self._index.units.fill(at, need, USED_UNIT)
                self._index.words[Word.UNIT_HINT] = at + need
                self._index.words[Word.USED_UNITS] += need
                return at * self._geometry.unit_bytes
            if not evict or not self.evict(need):
                return -1
        return -1

    def allocate_run(self, length: int, most: int) -> tuple[int, int]:
        """Fresh extents one behind the other, as many of `most` as are found at once and without evicting: the first
        one's offset, and how many."""
        index, need = self._index, self.units_for(length)
        words, per_segment = index.words, self._geometry.units_per_segment
        backed = min(words[Word.BACKED], self._geometry.num_segments) * per_segment
        count = min(most, per_segment // need, max(0, backed - words[Word.USED_UNITS]) // need)
        at = self._find_units(need * count) if count > 1 else -1
        if at < 0:
            return 0, 0
        index.units.fill(at, need * count, USED_UNIT)
        words[Word.UNIT_HINT] = at + need * count
        words[Word.USED_UNITS] += need * count
        return at * self._geometry.unit_bytes, count

    def _find_units(self, need: int) -> int:
        words, per_segment = self._index.words, self._geometry.units_per_segment
        backed = min(words[Word.BACKED], self._geometry.num_segments)
        if need > per_segment or backed * per_segment - words[Word.USED_UNITS] < need:
            return -1
        hint, high = words[Word.UNIT_HINT], min(backed * per_segment, self._geometry.num_units)
        low = hint // per_segment * per_segment if hint < high else 0
        at = self._index.units.find(need, low, min(low + per_segment, high), hint)
        return at if at >= 0 else self._index.units.find_within(need, per_segment, high)

    def free_units(self, entry: Entry) -> None:
        """Give an extent's units back."""
        self.free_run(entry.record.offset, entry.record.length, 1)

    def free_run(self, offset: int, length: int, count: int) -> None:
        """Give back what `allocate_run` gave."""
        start, need = offset // self._geometry.unit_bytes, self.units_for(length) * count
        self._index.units.fill(start, need, FREE_UNIT)
        words = self._index.words
        words[Word.USED_UNITS] -= min(need, words[Word.USED_UNITS])
        words[Word.UNIT_HINT] = start

    # ---- removal ------------------------------------------------------------------------------------------------
    def remove(self, entries: Sequence[Entry]) -> int:
        """Take records out of sight and free what nobody touches; how many were freed.

        In this order, as for eviction: hide, look who touches them, free. A reader publishes, then looks whether the
        record is still there. Their children become orphans, never visible.
        """
        for entry in entries:
            self._hide(entry)
        touched = self._members.published()
        free = [entry for entry in entries if entry.record.id not in touched or not entry.record.length]
        for entry in free:
            self._release(entry)
        return len(free)

    def _hide(self, entry: Entry) -> None:
        """Unreachable from now on, its bytes held back: a record in limbo."""
        index, record, words = self._index, entry.record, self._index.words
        if entry.state == LIMBO:
            return
        index.unlink(entry.cell, record.key)
        if record.length:
            index.set_state(entry, LIMBO)
        if entry.state == PENDING:
            words[Word.PENDING] -= min(record.length, words[Word.PENDING])
        elif record.kind == CHUNK:
            words[Word.CHUNKS] -= min(1, words[Word.CHUNKS])
            self._note(EventKind.REMOVED, record)
        elif record.kind == ROOT:
            self._note(EventKind.CLEARED, record)
        if index.counts(entry.cell)[0]:
            words[Word.SWEEP] = 1
        self._forget_child(record.parent_cell, record.parent_id)

    def _release(self, entry: Entry) -> None:
        """Give a hidden record's cells and bytes back."""
        self._index.free(entry)
        if entry.record.length:
            self.free_units(entry)

    def _forget_child(self, parent_cell: int, parent_id: int) -> None:
        parent = self._index.entry(parent_cell)
        if parent is None or parent.record.id != parent_id:
            return
        self._index.add_child(parent_cell, -1)
        # Roots and spaces exist for their children only.
        if parent.record.kind in (SPACE, ROOT) and not self._index.counts(parent_cell)[0]:
            self.remove([parent])

    def expired(self, entry: Entry, published: set[int] | None = None) -> bool:
        """Whether a pending record's writers are dead, or have committed nothing for too long. One that is for a single
        filler dies with that process, whoever else of its group lives. `published`: what living processes touch."""
        return self.expiry(published)(entry)

    def expiry(self, published: set[int] | None = None) -> Callable[[Entry], bool]:
        """`expired` for many records at one moment: each group of writers is looked at once."""
        now, alive = time.time_ns(), dict[int, bool]()

        def is_expired(entry: Entry) -> bool:
            nonlocal published
            record, used = entry.record, self._index.age(entry.cell)
            since = max(record.created_ns, used) if used <= now else record.created_ns
            if now - since > MAX_PENDING_NS:
                return True
            if record.group not in alive:
                alive[record.group] = self._members.group_alive(record.group)
            if not alive[record.group]:
                return True
            if not record.is_exclusive:
                return False
            published = self._members.published() if published is None else published
            return record.id not in published

        return is_expired

    # ---- eviction -----------------------------------------------------------------------------------------------
    def evict(self, need_units: int) -> bool:
        """Evict the lowest-ranked leaves until about that many units are free; whether anything was freed.

        Mark, look at the leases, then free: a reader publishes its lease and then looks at the mark, so that one of
        the two always sees the other.
        """
        victims: list[Entry] = []
        units = num_scans = 0
        now = time.time_ns()  # one for the whole eviction: ages are capped by it, so no candidate rises for ever
        published = self._members.published()
        while units < need_units:
            if not self._candidates:
                if victims or num_scans == _MAX_SCANS:
                    break
                num_scans += 1
                if self.sweep():
                    return True
                if not self._refill(published, now):
                    break
            entry = self._next_victim(published, now)
            if entry is not None:
                self._index.set_state(entry, EVICTING)
                victims.append(entry)
                units += self.units_for(entry.record.length)
        published = self._members.published()
        freed = False
        for entry in victims:
            if entry.record.id in published:
                self._index.set_state(entry, COMPLETE)
                continue
            self._inherit_age(entry, now)
            self._hide(entry)
            self._release(entry)
            self._index.words[Word.EVICTED] += 1
            freed = True
        return freed

    def _next_victim(self, published: set[int], now: int) -> Entry | None:
        rank, cell, extent_id = heapq.heappop(self._candidates)
        entry = self._index.entry(cell)
        if entry is None or entry.record.id != extent_id or not self._evictable(entry) or extent_id in published:
            return None
        current = self._rank(entry, now)
        if current > rank:  # used since the scan: its turn comes later
            self._offer(current, entry)
            return None
        return entry

    def _offer(self, rank: int, entry: Entry) -> None:
        """Make a leaf a candidate, unless a leaf outside the heap may rank below it."""
        if rank <= self._cutoff:
            heapq.heappush(self._candidates, (rank, entry.cell, entry.record.id))

    def _evictable(self, entry: Entry) -> bool:
        leaf = entry.record.kind == CHUNK and entry.state == COMPLETE
        return leaf and self._index.counts(entry.cell) == (0, 0)

    def _rank(self, entry: Entry, now: int) -> int:
        used = self._index.age_by(entry.cell, now)
        return self._rank_of(used, min(entry.record.created_ns, used), entry.record.is_tail)

    def _rank_of(self, used: int, created: int, is_tail: bool) -> int:
        leaves = Leaves(np.array([used], np.int64), np.array([created], np.int64), np.array([is_tail]))
        return int(self._policy.rank(leaves)[0])

    def _inherit_age(self, entry: Entry, now: int) -> None:
        """A prefix is as young as its youngest user, and was hit as often as whatever continued it; once childless, it
        is a candidate of that age."""
        cell = entry.record.parent_cell
        parent = self._index.entry(cell)
        if parent is None or parent.record.id != entry.record.parent_id:
            return
        self._index.touch(cell, max(self._index.age_by(cell, now), self._index.age_by(entry.cell, now)))
        if (hits := self._index.hits(entry.cell)) and parent.record.kind == CHUNK:
            self._index.add_hits(cell, hits)
        if parent.record.kind == CHUNK and self._index.counts(cell)[0] == 1:
            self._offer(self._rank(parent, now), parent)

    def _refill(self, published: set[int], now: int) -> bool:
        """Scan for the lowest-ranked sixteenth of all leaves; whether there are candidates now."""
        heads = self._index.used_heads()
        leaves = heads.cell[(heads.state == COMPLETE) & (heads.children == 0) & (heads.pinned == 0)]
        fixed = self._index.fixed_words(leaves)
        is_chunk = (fixed[:, KIND_WORD] >> np.uint64(16)) & np.uint64(0xFF) == CHUNK
        for cell in leaves[~is_chunk].tolist():
            node = self._index.entry(cell)  # a root or space whose only writer found no room
            if node is not None and node.record.kind in (SPACE, ROOT):
                self.remove([node])
        leaves, fixed = leaves[is_chunk], fixed[is_chunk]
        if not leaves.size:
            return False
        tokens, chunk_tokens = fixed[:, TOKENS_WORD] >> np.uint64(32), fixed[:, KIND_WORD] >> np.uint64(32)
        used = self._index.ages_of(leaves, now)
        created = np.minimum(fixed[:, CREATED_WORD].astype(np.int64), used)
        ranks = self._policy.rank(Leaves(used, created, tokens < chunk_tokens))
        take = min(leaves.size, max(256, leaves.size // 16))
        lowest = np.argpartition(ranks, take - 1)[:take]
        # If the scan took every leaf, only chunks made later are outside: they rank at least as one made now.
        self._cutoff = int(ranks[lowest].max()) if take < leaves.size else self._rank_of(now, now, is_tail=False)
        ids = fixed[:, ID_WORD]
        found = [(int(ranks[i]), int(leaves[i]), int(ids[i])) for i in lowest]
        self._candidates = [candidate for candidate in found if candidate[2] not in published]
        heapq.heapify(self._candidates)
        return bool(self._candidates)

    # ---- sweeping -----------------------------------------------------------------------------------------------
    def sweep(self) -> int:
        """Free what is dead: limbo that nobody touches, reservations of the dead, orphans. How many records went."""
        heads, words, published = self._index.used_heads(), self._index.words, self._members.published()
        dead = []
        for cell in heads.cell[(heads.state == LIMBO) | (heads.state == PENDING)].tolist():
            entry = self._index.entry(cell)
            if entry is not None and (entry.state == LIMBO or self.expired(entry, published)):
                words[Word.ABORTED] += entry.state == PENDING
                dead.append(entry)
        removed = self.remove(dead)
        if words[Word.SWEEP]:
            removed += self.remove(orphans(self.entries()))
            words[Word.SWEEP] = 0
        return removed

    def entries(self) -> list[Entry]:
        """Every record in the heap that verifies, parents before children."""
        found = [entry for cell in self._index.heads().cell.tolist() if (entry := self._index.entry(cell)) is not None]
        return sorted(found, key=lambda entry: (entry.record.kind, entry.record.number, entry.record.created_ns))

    # ---- rebuilding ---------------------------------------------------------------------------------------------
    def rebuild(self) -> None:
        """Make directory, maps, counts and tails anew from the records that verify; drop the rest.

        Some microseconds a record. Readers meanwhile miss, and look again when it is over.
        """
        index, words, geometry = self._index, self._index.words, self._geometry
        entries = self.entries()
        published = self._members.published()
        backed = 0
        while backed < geometry.num_segments and self._data.is_backed(backed):
            backed += 1
        present = min(backed * geometry.units_per_segment, geometry.num_units)
        words[Word.SUSPECT] = words[Word.SWEEP] = words[Word.UNIT_HINT] = words[Word.CELL_HINT] = 0
        index.reset_maps(present)
        index.units.fill(present, geometry.num_units - present, ABSENT_UNIT)
        words[Word.BACKED] = backed
        for counter in (Word.USED_UNITS, Word.USED_CELLS, Word.PENDING, Word.CHUNKS):
            words[counter] = 0
        for counter in _EVENT_COUNTS:
            # What happened is in no record: kept where it can be true, begun anew where it is noise.
            words[counter] = words[counter] if words[counter] < _PLAUSIBLE else 0
        self._candidates = []
        keys: set[bytes] = set()
        places: set[tuple[int, int]] = set()
        for entry in entries:
            if not self._readmit(entry, published, keys, places):
                index.forget(entry.cell)
        words[Word.REBUILDS] += 1
        self._note(EventKind.CLEARED, None)

    def _readmit(self, entry: Entry, published: set[int], keys: set[bytes], places: set[tuple[int, int]]) -> bool:
        """Put one record back in its place; False where it must go. Parents come before their children."""
        index, record = self._index, entry.record
        held = bool(record.length) and record.id in published
        orphan = record.kind != SPACE and (record.parent_cell, record.parent_id) not in places
        dead = orphan or (entry.state == PENDING and self.expired(entry, published)) or record.key in keys
        if (dead or entry.state == LIMBO) and not held:
            return False
        if entry.state in (COMPLETE, EVICTING) and index.payload(entry) is None:
            index.words[Word.DAMAGED] += 1
            return False
        if not self._claim(entry):
            return False
        if dead or entry.state == LIMBO:
            index.set_state(entry, LIMBO)
            return True
        if entry.state == EVICTING:
            index.set_state(entry, COMPLETE)
        index.reset_derived(entry)
        keys.add(record.key)
        places.add((entry.cell, record.id))
        index.link(entry.cell, record.key)
        if record.kind != SPACE:
            index.add_child(record.parent_cell, 1)
        if entry.state == PENDING:
            index.words[Word.PENDING] += record.length
            index.recount(entry)
        elif record.kind == CHUNK:
            index.words[Word.CHUNKS] += 1
            if record.is_tail:
                index.add_tail(record.parent_cell, record.num_tokens)
        return True

    def _claim(self, entry: Entry) -> bool:
        """Mark a record's cells and units as used; False where another has them or they cannot be."""
        index, record, unit = self._index, entry.record, self._geometry.unit_bytes
        start, need = record.offset // unit, self.units_for(record.length)
        if not index.cells.is_all(entry.cell, record.num_cells, FREE_UNIT):
            return False
        if record.length and (record.offset % unit or not index.units.is_all(start, need, FREE_UNIT)):
            return False
        index.cells.fill(entry.cell, record.num_cells, USED_UNIT)
        index.words[Word.USED_CELLS] += record.num_cells
        if record.length:
            index.units.fill(start, need, USED_UNIT)
            index.words[Word.USED_UNITS] += need
        return True


def orphans(entries: Iterable[Entry]) -> list[Entry]:
    """Records whose parent is gone, and all below them. `entries` must have parents before children."""
    alive: set[tuple[int, int]] = set()  # (cell, id)
    lost: list[Entry] = []
    for entry in entries:
        record = entry.record
        if entry.state == LIMBO:
            continue
        if record.kind == SPACE or (record.parent_cell, record.parent_id) in alive:
            alive.add((entry.cell, record.id))
        else:
            lost.append(entry)
    return lost
