"""The index of an embedded store: records found by key, by many readers without a lock and one writer with it.

Readers copy a record and believe it only if its state word matches its content, so that a torn, freed or noisy
record is a miss. Writers hold the store's write lock (see `members`) for every method marked so. A record's state is
one aligned 64-bit store, which no kill can tear; everything else that a writer updates can be rebuilt.
"""

from __future__ import annotations

import mmap
import struct
import time
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headwater.kv.encoding import ENCODINGS, RAW
from headwater.kv.format import checksum
from headwater.kv.spec import KVSpec
from headwater.stores.embedded.layout import (
    AGE_CELLS,
    CELL,
    CHILDREN,
    COMPLETE,
    ENCODING_AT,
    FIXED_OFFSET,
    FREE,
    HEAD_BYTES,
    HITS,
    MAGIC_AT,
    NUM_TAILS,
    PAYLOAD_SUM_AT,
    PINNED,
    RECORD_MAGIC,
    REMAINING,
    TAILS,
    WORDS_OFFSET,
    WORDS_PER_CELL,
    Geometry,
    Record,
    Word,
    state_word,
    unpack_record,
)
from headwater.stores.embedded.units import FREE_UNIT, USED_UNIT, UnitMap

_IDS = struct.Struct("<QQ")  # a record's id and its parent's
_U64, _U32, _TAILS = struct.Struct("<Q"), struct.Struct("<I"), struct.Struct(f"<{NUM_TAILS}H")
_TRIES = 4
_MAX_PROBES = 1024
"""The directory is at most half full, so that a longer chain is noise."""
MAX_HITS = 1 << 40


class IndexDamage(Exception):  # noqa: N818 - a condition that never leaves the store
    """The index contradicts itself; the transaction is given up and the index rebuilt."""


class Entry(NamedTuple):
    """A record as it was found: where it lies, its state, its fixed part and the lengths of its tails."""

    cell: int
    state: int
    record: Record
    tails: tuple[int, ...]
    word: int = 0
    """Its state word: as long as that stands there, the record is this one, in this state."""


class Heads(NamedTuple):
    """Columns over every record in the heap, for scans. Taken without validation: check a record before use."""

    cell: npt.NDArray[np.int64]
    state: npt.NDArray[np.uint64]
    children: npt.NDArray[np.uint32]
    pinned: npt.NDArray[np.uint32]


class Index:
    """See the module. All offsets handed in and out are cells, counted from the heap's beginning; cell 0 is unused."""

    def __init__(self, mapping: mmap.mmap, geometry: Geometry) -> None:
        g = self.geometry = geometry
        self._map = mapping
        view = memoryview(mapping)
        self.words = view[WORDS_OFFSET : WORDS_OFFSET + 8 * Word.COUNT].cast("Q")
        self._directory = view[g.directory_offset : g.directory_offset + 4 * g.directory_slots].cast("I")
        self._directory_column = np.frombuffer(mapping, "<u4", g.directory_slots, g.directory_offset)
        self._mask = g.directory_slots - 1
        self._ages = view[g.ages_offset : g.ages_offset + 8 * (g.num_cells // AGE_CELLS + 1)].cast("Q")
        self._age_column = np.frombuffer(mapping, "<i8", g.num_cells // AGE_CELLS + 1, g.ages_offset)
        self._heap = g.heap_offset
        self._stopped_seq = -1
        self.heap_bytes = np.frombuffer(mapping, np.uint8, g.num_cells * CELL, g.heap_offset)
        self._words_of_heap = np.frombuffer(mapping, "<u8", g.num_cells * (CELL // 8), g.heap_offset).reshape(-1, 8)
        self.state_words = view[g.heap_offset : g.heap_offset + g.num_cells * CELL].cast("Q")
        self.state_column = self._words_of_heap.reshape(-1)
        self.cells = UnitMap(mapping, g.cell_map_offset, g.num_cells)
        self.units = UnitMap(mapping, g.unit_map_offset, g.num_units)
        self._view = view

    def close(self) -> None:
        """Let go of the mapping."""
        del self._directory_column, self.heap_bytes, self._words_of_heap, self.state_column, self._age_column
        for view in (self.words, self._directory, self._ages, self.state_words, self._view):
            view.release()
        try:
            self._map.close()
        except BufferError:
            pass  # somebody still holds a view; the mapping goes with it

    # ---- reading, without a lock --------------------------------------------------------------------------------
    def find(self, key: bytes) -> Entry | None:
        """The record of `key`, whatever its state; None where there is none that verifies. A microsecond or two."""
        directory, mask, home = self._directory, self._mask, _U64.unpack_from(key)[0]
        suspect = False
        for attempt in range(_TRIES):
            before = self.words[Word.SEQ]
            slot = home & mask
            for _ in range(_MAX_PROBES):
                cell = directory[slot]
                if not cell:
                    break
                entry = self.entry(cell, key)
                if entry is not None:
                    return entry
                suspect = suspect or self._holds_key(cell, key)
                slot = (slot + 1) & mask
            else:
                suspect = True
            if not suspect and not before & 1 and before == self.words[Word.SEQ]:
                return None
            # The directory was being rearranged, or the record rewritten: look again, unless whoever does it was
            # found stopped there before.
            if before & 1 and before == self._stopped_seq:
                break
            time.sleep(0 if attempt < 2 else 0.0002)
        self._stopped_seq = self.words[Word.SEQ]
        if suspect:
            self.words[Word.SUSPECT] = 1
        return None

    def entry(self, cell: int, key: bytes | None = None) -> Entry | None:
        """The record at `cell` if it verifies (and has that key)."""
        if not 0 < cell < self.geometry.num_cells - 2:
            return None
        start = self._heap + cell * CELL
        raw = self._map[start : start + HEAD_BYTES]
        fixed = raw[FIXED_OFFSET:]
        if key is not None and fixed[:32] != key:
            return None
        word = _U64.unpack_from(raw)[0]
        state = word & 7
        if state == FREE or word != state_word(fixed, state):
            return None
        return Entry(cell, state, Record._make(unpack_record(fixed)), _TAILS.unpack_from(raw, TAILS), word)

    @staticmethod
    def word_at(cell: int) -> int:
        """Where the state word of the record at `cell` is in `state_words`."""
        return cell * WORDS_PER_CELL

    def run(self, keys: list[bytes], parent_id: int) -> tuple[int, Entry | None]:
        """Length and last entry of the longest run of `keys` that are complete, each the child of the one before, in
        encodings that are known.

        A scheduler waits for this, so the usual case, a record in its first slot, is written out: under 1 µs a key.
        """
        directory, mask, heap, mapping = self._directory, self._mask, self._heap, self._map
        home, ids, hashed = _U64.unpack_from, _IDS.unpack_from, checksum
        cell, length = 0, 0
        for length, key in enumerate(keys):  # noqa: B007 - the number of keys before this one
            found = directory[home(key)[0] & mask]
            start = heap + found * CELL
            raw = mapping[start : start + HEAD_BYTES]
            fixed = raw[FIXED_OFFSET:]
            if fixed[:32] != key or home(raw)[0] != hashed(fixed) & ~7 | COMPLETE or fixed[ENCODING_AT] != RAW:
                entry = self.find(key)
                if entry is None or entry.state != COMPLETE or entry.record.encoding not in ENCODINGS:
                    break
                found, fixed = entry.cell, entry.record.pack()
            own_id, above = ids(fixed, 32)
            if above != parent_id:
                break
            cell, parent_id = found, own_id
        else:
            length = len(keys)
        return length, self.entry(cell) if length else None

    def sane(self) -> bool:
        """Whether the counters are possible at all."""
        g, words = self.geometry, self.words
        possible = words[Word.USED_UNITS] <= g.num_units and words[Word.USED_CELLS] <= g.num_cells
        return possible and words[Word.BACKED] <= g.num_segments and words[Word.PENDING] <= g.data_bytes

    def payload(self, entry: Entry) -> bytes | None:
        """The payload of a complete record, verified; None if it changed meanwhile or is damaged."""
        record = entry.record
        if record.payload_bytes > (self.geometry.num_cells - entry.cell) * CELL - HEAD_BYTES:
            return None
        start = self._heap + entry.cell * CELL + HEAD_BYTES
        raw = self._map[start : start + record.payload_bytes]
        return raw if checksum(raw) == record.payload_sum else None

    def pending_sums(self, entry: Entry) -> bytes:
        """The checksums of a pending record as they are now; those that are `noted` are final."""
        start = self._heap + entry.cell * CELL + HEAD_BYTES
        return self._map[start : start + 8 * entry.record.num_sums]

    def touch(self, cell: int, now_ns: int) -> None:
        """Note a use. Needs no lock: a late touch of a cell that was reused only misdates the newcomer."""
        self._ages[cell // AGE_CELLS] = now_ns

    def touch_all(self, cells: npt.NDArray[np.int64], now_ns: int) -> None:
        """Note a use of many records."""
        self._age_column[cells // AGE_CELLS] = now_ns

    def add_hits(self, cell: int, count: int = 1) -> None:
        """Count requests that load the prefix which ends with this chunk. Needs no lock, but a lease on the record (or
        the lock): without one the cell may belong to another record by now. Of two at once, one may be lost."""
        at = cell * WORDS_PER_CELL + HITS // 8
        self.state_words[at] = min(self.state_words[at] + count, MAX_HITS)

    def hits(self, cell: int) -> int:
        """How many requests have loaded the prefix that ends with this chunk; noise is no number of them."""
        return min(self.state_words[cell * WORDS_PER_CELL + HITS // 8], MAX_HITS)

    def age(self, cell: int) -> int:
        """When the record was last used, in nanoseconds since the epoch."""
        return self._ages[cell // AGE_CELLS]

    def used_heads(self) -> Heads:
        """`heads` of the cells that are marked as used: much less, where most of the heap is empty.

        Raises IndexDamage where their number is not what it should be: a record whose mark is gone would never go.
        """
        used = self.cells.used()
        if len(used) != self.words[Word.USED_CELLS]:
            raise IndexDamage("the map of cells contradicts their number")
        return self.heads(used if 2 * len(used) < self.geometry.num_cells else None)

    def heads(self, among: npt.NDArray[np.int64] | None = None) -> Heads:
        """Columns over everything in the heap that looks like a record: one pass over the heap, 4 GB/s or so. With
        `among`, only over what begins at one of these cells."""
        rows = self._words_of_heap[:-2]  # a record's head takes three cells
        states, magics = rows[:, 0], rows[:, MAGIC_AT // 8]
        if among is not None:
            among = among[: np.searchsorted(among, len(rows))]
            states, magics = states[among], magics[among]
        looks = np.flatnonzero((magics == np.uint64(RECORD_MAGIC)) & ((states & np.uint64(7)) != 0))
        cell = looks if among is None else among[looks]
        counts = rows[cell, CHILDREN // 8]
        children, pinned = counts & np.uint64(0xFFFFFFFF), counts >> np.uint64(32)
        return Heads(cell, rows[cell, 0] & np.uint64(7), children.astype(np.uint32), pinned.astype(np.uint32))

    def age_by(self, cell: int, now_ns: int) -> int:
        """`ages_of` of one record."""
        slot = cell // AGE_CELLS
        used = self._ages[slot]
        if used > now_ns:
            self._ages[slot] = used = now_ns
        return used

    def ages_of(self, cells: npt.NDArray[np.int64], now_ns: int, *, keep: bool = True) -> npt.NDArray[np.int64]:
        """Last uses of many records, none after `now_ns`.

        A later one (the clock was set back, or noise) becomes `now_ns` for good, so that the record ages from now on;
        without `keep`, for those who only look, nothing is changed.
        """
        slots = cells // AGE_CELLS
        ages = self._age_column[slots]
        late = (ages > now_ns) | (ages < 0)  # noise above 2^63 is negative in this column
        ages[late] = now_ns
        if keep and late.any():
            self._age_column[slots[late]] = now_ns
        return ages

    def fixed_words(self, cells: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """The fixed parts of many records as rows of sixteen words (see `layout` for which is which)."""
        rows = self._words_of_heap
        return np.concatenate([rows[cells + 1], rows[cells + 2]], axis=1)

    def first_cells(self, homes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """What stands in the first slot of keys that begin with these numbers."""
        return self._directory_column[(homes & np.uint64(self._mask)).astype(np.int64)].astype(np.int64)

    def _holds_key(self, cell: int, key: bytes) -> bool:
        """Whether a record that did not verify claims to be this key's, and complete. (A pending one may just be
        turning complete.)"""
        start = self._heap + cell * CELL
        raw = self._map[start : start + FIXED_OFFSET + 32]
        return raw[FIXED_OFFSET:] == key and raw[0] & 7 == COMPLETE

    # ---- writing, under the write lock --------------------------------------------------------------------------
    def insert(self, record: Record, payload: bytes, state: int, now_ns: int) -> int:
        """Place a record and make it findable; its cell, or 0 where the heap has no room."""
        cell = self.claim(record.num_cells)
        if not cell:
            return 0
        start, fixed, mutable = self._heap + cell * CELL, record.pack(), bytearray(CELL)
        _U32.pack_into(mutable, REMAINING, payload[8 * record.num_sums :].count(0) if record.num_sums else 0)
        _U64.pack_into(mutable, MAGIC_AT, RECORD_MAGIC)
        self._map[start : start + HEAD_BYTES + len(payload)] = bytes(mutable) + fixed + payload
        self.touch(cell, now_ns)
        self._set_word(cell, state_word(fixed, state))
        self.link(cell, record.key)
        return cell

    def claim(self, need: int) -> int:
        """Take some cells of the heap, side by side: the first one, or 0 where there are none."""
        cell = self.cells.find(need, 1, self.geometry.num_cells, self.words[Word.CELL_HINT])
        if cell >= 0:
            self.cells.fill(cell, need, USED_UNIT)
            self.words[Word.CELL_HINT] = cell + need
            self.words[Word.USED_CELLS] += need
        return max(cell, 0)

    def link(self, cell: int, key: bytes) -> None:
        """Make the record at `cell` findable under `key`."""
        slot = _U64.unpack_from(key)[0] & self._mask
        for _ in range(len(self._directory)):
            if not self._directory[slot]:
                self._directory[slot] = cell
                return
            slot = (slot + 1) & self._mask
        raise IndexDamage("the directory has no empty slot")

    def unlink(self, cell: int, key: bytes) -> None:
        """Take `cell` out of the directory, closing the gap so that probes need no tombstones."""
        directory, mask = self._directory, self._mask
        slot = _U64.unpack_from(key)[0] & mask
        for _ in range(len(directory)):
            if directory[slot] in (cell, 0):
                break
            slot = (slot + 1) & mask
        if directory[slot] != cell:
            return
        self.words[Word.SEQ] += 1
        gap = slot
        for _ in range(len(directory)):
            slot = (slot + 1) & mask
            moved = directory[slot]
            if not moved:
                break
            # An entry may fill the gap unless its home lies after the gap, cyclically.
            if (slot - self._home(moved)) & mask >= (slot - gap) & mask:
                directory[gap] = moved
                gap = slot
        directory[gap] = 0
        self.words[Word.SEQ] += 1

    def free(self, entry: Entry) -> None:
        """Forget an unlinked record and give its cells back."""
        self._set_word(entry.cell, FREE)
        need = entry.record.num_cells
        self.cells.fill(entry.cell, need, FREE_UNIT)
        self.words[Word.USED_CELLS] -= min(need, self.words[Word.USED_CELLS])
        self.words[Word.CELL_HINT] = entry.cell

    def forget(self, cell: int) -> None:
        """Make a record invalid and nothing else: for rebuilds, which account for everything themselves."""
        self._set_word(cell, FREE)

    def set_state(self, entry: Entry, state: int) -> None:
        """Change a record's state: one aligned store, seen by readers at once."""
        self._set_word(entry.cell, state_word(entry.record.pack(), state))

    def put_sums(self, entry: Entry, first: int, sums: list[int]) -> bool:
        """Note checksums `first …` of a pending record; False if one was noted before with another value."""
        base = self._heap + entry.cell * CELL + HEAD_BYTES
        if first < 0 or first + len(sums) > entry.record.num_sums:
            raise IndexDamage("checksums outside their record")
        count, packed = len(sums), struct.pack(f"<{len(sums)}Q", *sums)
        flags = base + 8 * entry.record.num_sums + first
        known = self._map[flags : flags + count]
        if known.count(1):
            old = self._map[base + 8 * first : base + 8 * (first + count)]
            if any(known[i] and old[8 * i : 8 * i + 8] != packed[8 * i : 8 * i + 8] for i in range(count)):
                return False
        self._map[base + 8 * first : base + 8 * (first + count)] = packed
        self._map[flags : flags + count] = b"\1" * count
        self._add_u32(entry.cell, REMAINING, known.count(1) - count)
        return True

    def put_block(
        self, entry: Entry, shape: tuple[int, int], layers: range, heads: range, part: int, sums: npt.NDArray[np.uint64]
    ) -> bool:
        """`put_sums` for tiles that do not lie together in a model of `shape` (layers, heads), in one go.

        By strided slices of bytes: for some dozens of numbers that is faster than arrays.
        """
        base, count, parts = self._heap + entry.cell * CELL + HEAD_BYTES, entry.record.num_sums, entry.record.parts
        if count != shape[0] * shape[1] * parts:
            raise IndexDamage("checksums outside their record")
        values = bytearray(self._map[base : base + 8 * count])
        flags = bytearray(self._map[base + 8 * count : base + 9 * count])
        words, row, known = memoryview(values).cast("L"), shape[1] * parts, 0
        columns = memoryview(np.ascontiguousarray(sums.reshape(len(layers), len(heads)).T).reshape(-1))
        for i, head in enumerate(heads):
            at = slice(layers.start * row + head * parts + part, layers.stop * row, layers.step * row)
            new, before = columns[i * len(layers) : (i + 1) * len(layers)], flags[at]
            if before.count(1):
                known += before.count(1)
                if any(flag == 1 and old != value for flag, old, value in zip(before, words[at], new, strict=True)):
                    return False
            words[at] = new
            flags[at] = b"\1" * len(layers)
        self._map[base : base + 8 * count] = values
        self._map[base + 8 * count : base + 9 * count] = flags
        self._add_u32(entry.cell, REMAINING, known - len(layers) * len(heads))
        return True

    def noted(self, entry: Entry, spec: KVSpec, layers: range, heads: range, part: int) -> int:
        """How many of some tiles' checksums a pending record has already."""
        parts, width = entry.record.parts, spec.num_kv_heads
        base = self._heap + entry.cell * CELL + HEAD_BYTES + 8 * entry.record.num_sums
        if parts == 1 and len(heads) == width and layers.step == 1:
            return self._map[base + layers.start * width : base + layers.stop * width].count(1)
        flags, row = self._map[base : base + entry.record.num_sums], width * parts
        places = range(heads.start * parts + part, heads.stop * parts, parts)
        return sum([flags[layers.start * row + at : layers.stop * row : layers.step * row].count(1) for at in places])

    def flags(self, entry: Entry) -> bytes:
        """Of a pending record: which checksums it has, in their order, 1 for each."""
        base = self._heap + entry.cell * CELL + HEAD_BYTES + 8 * entry.record.num_sums
        return self._map[base : base + entry.record.num_sums]

    def complete(self, entry: Entry) -> bool:
        """If every checksum is in, turn the pending record complete; whether it did."""
        record, base = entry.record, self._heap + entry.cell * CELL
        if _U32.unpack_from(self._map, base + REMAINING)[0]:
            return False
        start = base + HEAD_BYTES
        payload = self._map[start : start + record.payload_bytes]
        if payload.count(1, 8 * record.num_sums) != record.num_sums:
            return False
        fixed = record.pack()
        fixed = fixed[:PAYLOAD_SUM_AT] + _U64.pack(checksum(payload)) + fixed[PAYLOAD_SUM_AT + 8 :]
        self._map[base + FIXED_OFFSET : base + HEAD_BYTES] = fixed
        self._set_word(entry.cell, state_word(fixed, COMPLETE))
        return True

    def counts(self, cell: int) -> tuple[int, int]:
        """(children, pinned) of a record."""
        children, pinned = struct.unpack_from("<II", self._map, self._heap + cell * CELL + CHILDREN)
        return children, pinned

    def add_child(self, cell: int, delta: int) -> None:
        """Count a child in or out."""
        self._add_u32(cell, CHILDREN, delta)

    def set_pinned(self, cell: int, pinned: bool) -> None:
        """Keep a record from eviction, or stop keeping it."""
        _U32.pack_into(self._map, self._heap + cell * CELL + PINNED, int(pinned))

    def add_tail(self, cell: int, num_tokens: int) -> None:
        """Put a tail's length first in its parent's list of the newest eight."""
        start = self._heap + cell * CELL + TAILS
        others = [length for length in _TAILS.unpack_from(self._map, start) if length not in (0, num_tokens)]
        lengths = [num_tokens, *others][:NUM_TAILS]
        _TAILS.pack_into(self._map, start, *lengths, *[0] * (NUM_TAILS - len(lengths)))

    def recount(self, entry: Entry) -> None:
        """Count anew how many checksums a pending record lacks: its writer may have died between the two."""
        base = self._heap + entry.cell * CELL
        flags = base + HEAD_BYTES + 8 * entry.record.num_sums
        missing = self._map[flags : flags + entry.record.num_sums].count(0)
        _U32.pack_into(self._map, base + REMAINING, missing)

    def reset_derived(self, entry: Entry) -> None:
        """Before a rebuild counts them anew: no children, no tails."""
        start = self._heap + entry.cell * CELL
        _U32.pack_into(self._map, start + CHILDREN, 0)
        _TAILS.pack_into(self._map, start + TAILS, *[0] * NUM_TAILS)

    def reset_maps(self, used_segment_units: int) -> None:
        """Before a rebuild: an empty directory, free cells, free units where there is storage."""
        g = self.geometry
        self.words[Word.SEQ] += 1 + (self.words[Word.SEQ] & 1)
        self._map[g.directory_offset : g.directory_offset + 4 * g.directory_slots] = bytes(4 * g.directory_slots)
        self.cells.fill(0, g.num_cells, FREE_UNIT)
        self.units.fill(0, used_segment_units, FREE_UNIT)
        self.words[Word.SEQ] += 1

    def _home(self, cell: int) -> int:
        if cell >= self.geometry.num_cells:
            return 0
        return int(_U64.unpack_from(self._map, self._heap + cell * CELL + FIXED_OFFSET)[0]) & self._mask

    def _add_u32(self, cell: int, field: int, delta: int) -> None:
        at = self._heap + cell * CELL + field
        value = _U32.unpack_from(self._map, at)[0] + delta
        _U32.pack_into(self._map, at, max(0, value))

    def _set_word(self, cell: int, word: int) -> None:
        # A numpy scalar store of eight aligned bytes is one machine instruction.
        self._words_of_heap[cell, 0] = word
