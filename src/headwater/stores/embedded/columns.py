"""Many records at once: found, noted and completed with a few vector operations and a short loop.

A rank of eight moves 4 MiB a chunk, which takes the bus 75 µs: what the host does for a chunk must take less than that.
What is not as usual (a record that is not in its first slot, or was not pending any more) is left to `index`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headwater.kv.format import checksum
from headwater.stores.embedded.index import Entry, Index
from headwater.stores.embedded.layout import (
    CELL,
    CHILDREN,
    FREE,
    HEAD_BYTES,
    MAGIC_AT,
    NUM_TAILS,
    PENDING,
    RECORD_MAGIC,
    REMAINING,
    WORDS_PER_CELL,
    Record,
    iter_records,
    state_word,
)

_FIXED_BYTES = 128
_STATE = np.uint64(7)
_NO_TAILS = (0,) * NUM_TAILS


class FoundRecords(NamedTuple):
    """Records under some keys, copied and verified as one would be."""

    good: npt.NDArray[np.bool_]
    """Where one was found in its first slot; the rest means nothing elsewhere."""
    cells: npt.NDArray[np.int64]
    words: npt.NDArray[np.uint64]
    fixed: npt.NDArray[np.uint64]
    """Fixed parts as rows of sixteen words."""

    def entries(self) -> list[Entry | None]:
        """The same one by one, without tails; None where there is none."""
        records = map(Record._make, iter_records(self.fixed.tobytes()))
        rows = zip(self.good.tolist(), self.cells.tolist(), self.words.tolist(), records, strict=True)
        return [Entry(cell, word & 7, record, (), word) if good else None for good, cell, word, record in rows]


class Columns:
    """An index, column by column."""

    def __init__(self, index: Index) -> None:
        self._index = index

    # ---- without a lock -----------------------------------------------------------------------------------------
    def find(self, keys: Sequence[bytes]) -> FoundRecords:
        """The records of some keys. A microsecond each."""
        index = self._index
        wanted = np.frombuffer(b"".join(keys), "<u8").reshape(-1, 4)
        cells = index.first_cells(wanted[:, 0])
        inside = (cells > 0) & (cells < index.geometry.num_cells - 2)
        cells = np.where(inside, cells, 1)
        words, fixed = index.state_column[cells * WORDS_PER_CELL], index.fixed_words(cells)
        raw, size = memoryview(fixed.tobytes()), _FIXED_BYTES
        sums = np.array([checksum(raw[at : at + size]) for at in range(0, len(raw), size)], np.uint64)
        states = words & _STATE
        good = inside & (states != FREE) & ((sums & ~_STATE) | states == words) & (fixed[:, :4] == wanted).all(axis=1)
        return FoundRecords(good, cells, words, fixed)

    def noted(self, entries: Sequence[Entry], numbers: npt.NDArray[np.int64]) -> list[int]:
        """`Index.noted` of many records of one shape."""
        cells = np.array([entry.cell for entry in entries], np.int64)
        flags = self._index.heap_bytes[cells[:, None] * CELL + (_flags_at(entries[0].record) + numbers)]
        counts: list[int] = np.count_nonzero(flags == 1, axis=1).tolist()
        return counts

    # ---- under the write lock -----------------------------------------------------------------------------------
    def insert(self, first: int, records: Sequence[Record], now_ns: int) -> list[Entry]:
        """Place pending records of one size, of which nothing is noted, side by side in cells that were claimed, each
        but the last the parent of the next; and make them findable."""
        index, count, need = self._index, len(records), records[0].num_cells
        cells = first + need * np.arange(count)
        fixed = [record.pack() for record in records]
        words = [state_word(raw, PENDING) for raw in fixed]
        head = np.zeros((count, HEAD_BYTES // 8), np.uint64)
        head[:-1, CHILDREN // 8] = 1
        head[:, REMAINING // 8] = records[0].num_sums
        head[:, MAGIC_AT // 8] = RECORD_MAGIC
        head[:, CELL // 8 :] = np.frombuffer(b"".join(fixed), "<u8").reshape(count, -1)
        whole = index.state_column[first * WORDS_PER_CELL : (first + need * count) * WORDS_PER_CELL].reshape(count, -1)
        whole[:, head.shape[1] :] = 0
        whole[:, : head.shape[1]] = head
        index.touch_all(cells, now_ns)
        whole[:, 0] = words
        found = list[Entry]()
        for cell, record, word in zip(cells.tolist(), records, words, strict=True):
            index.link(cell, record.key)
            found.append(Entry(cell, PENDING, record, _NO_TAILS, word))
        return found

    def put(
        self, entries: Sequence[Entry], numbers: npt.NDArray[np.int64], sums: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.bool_]:
        """Note checksums `numbers` of many pending records of one shape, a row of `sums` for each; for which that was
        done. The others are as they were: no longer pending, or with some of these checksums already."""
        index = self._index
        cells = np.array([entry.cell for entry in entries], np.int64)
        # Sums before flags, as always: who dies in between leaves sums without flags, and counts that are made anew.
        if len(numbers) and numbers[-1] - numbers[0] == len(numbers) - 1:
            first = int(numbers[0])
            fresh = np.array([self._put_run(entry, first, row) for entry, row in zip(entries, sums, strict=True)])
        else:
            heap, column = index.heap_bytes, index.state_column
            words = np.array([entry.word for entry in entries], np.uint64)
            places = cells[:, None] * CELL + (_flags_at(entries[0].record) + numbers)
            fresh = (column[cells * WORDS_PER_CELL] == words) & ~(heap[places] == 1).any(axis=1)
            column[(cells[fresh] * WORDS_PER_CELL + HEAD_BYTES // 8)[:, None] + numbers] = sums[fresh]
            heap[places[fresh]] = 1
        remaining, at = index.heap_bytes.view("<u4"), cells[fresh] * (CELL // 4) + REMAINING // 4
        remaining[at] = np.maximum(remaining[at].astype(np.int64) - len(numbers), 0)
        return fresh

    def _put_run(self, entry: Entry, first: int, sums: npt.NDArray[np.uint64]) -> bool:
        """`put` of one record's checksums that lie together: a slice is faster than a place for each."""
        index, word = self._index, entry.cell * WORDS_PER_CELL
        at = entry.cell * CELL + _flags_at(entry.record) + first
        flags = index.heap_bytes[at : at + len(sums)]
        if index.state_words[word] != entry.word or 1 in flags.tobytes():
            return False
        word += HEAD_BYTES // 8 + first
        index.state_column[word : word + len(sums)] = sums
        flags[:] = 1
        return True

    def complete(self, entries: Sequence[Entry]) -> list[Entry]:
        """Turn pending records complete that have every checksum; which ones."""
        index = self._index
        cells = np.array([entry.cell for entry in entries], np.int64)
        missing = index.heap_bytes.view("<u4")[cells * (CELL // 4) + REMAINING // 4].tolist()
        return [entry for entry, count in zip(entries, missing, strict=True) if not count and index.complete(entry)]


def _flags_at(record: Record) -> int:
    return HEAD_BYTES + 8 * record.num_sums
