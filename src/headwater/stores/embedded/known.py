"""Records that were read before, as columns: what a read of many tiles needs to know, in a few vector operations.

A remembered record is good as long as its state word in the index is what it was: the word is bound to the record's
content, and that to a random id, so the same word is the same record.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headwater.kv.hashing import ChunkRef
from headwater.kv.spec import KVSpec
from headwater.locks import ForkSafeLock
from headwater.stores.embedded.layout import WORDS_PER_CELL

_COLUMN_BYTES = 16 << 20
"""Memory for checksums, per spec and handle."""


class FoundTiles(NamedTuple):
    """For each chunk of a read: is it known, its cell, its extent, the checksums of the tiles asked for."""

    good: npt.NDArray[np.bool_]
    cells: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    sums: npt.NDArray[np.uint64]


class KnownTiles:
    """Offsets and checksums of chunks of one spec whose tiles are mapped and in one part."""

    def __init__(self, spec: KVSpec, state_words: npt.NDArray[np.uint64]) -> None:
        self._state_words = state_words
        self._lock = ForkSafeLock()
        self._room = int(np.clip(_COLUMN_BYTES // (8 * spec.num_tiles), 16, 4096))
        self._slots: dict[bytes, int] = {}
        self._word_at = np.zeros(self._room, np.int64)
        self._word = np.zeros(self._room, np.uint64)
        self._tokens = np.zeros(self._room, np.int64)
        self._offset = np.zeros(self._room, np.int64)
        self._sums = np.zeros((self._room, spec.num_tiles), np.uint64)

    def look_up(self, chunks: Sequence[ChunkRef], num_tokens: int, numbers: npt.NDArray[np.int64]) -> FoundTiles:
        """What is known of each chunk, copied out: slots change hands when another thread needs the room."""
        get = self._slots.get
        with self._lock:
            slots = np.array([get(chunk.key, -1) for chunk in chunks], np.int64)
            word_at = self._word_at[slots]
            good = (self._state_words[word_at] == self._word[slots]) & (self._tokens[slots] == num_tokens)
            offsets, sums = self._offset[slots], self._sums[slots[:, None], numbers]
        return FoundTiles(good & (slots >= 0), word_at // WORDS_PER_CELL, offsets, sums)

    def remember(self, key: bytes, word_at: int, word: int, offset: int, num_tokens: int, sums: memoryview) -> None:
        """Note a record. When there is no room, everything else is forgotten first."""
        with self._lock:
            if len(self._slots) >= self._room:
                self._slots.clear()
                self._tokens[:] = 0
            slot = self._slots.setdefault(key, len(self._slots))
            self._word_at[slot], self._word[slot], self._tokens[slot] = word_at, word, num_tokens
            self._offset[slot], self._sums[slot] = offset, sums
