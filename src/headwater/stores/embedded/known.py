"""Records that were read before, as columns: what a read of many tiles needs to know, in a few vector operations.

A remembered record is good as long as its state word in the index is what it was: the word is bound to the record's
content, and that to a random id, so the same word is the same record.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headwater.kv.hashing import ChunkRef
from headwater.kv.spec import KVSpec
from headwater.stores.embedded.layout import WORDS_PER_CELL

_COLUMN_BYTES = 16 << 20
"""Memory for checksums, per spec and handle."""


class KnownTiles:
    """Offsets and checksums of chunks of one spec whose tiles are mapped and in one part."""

    def __init__(self, spec: KVSpec, state_words: npt.NDArray[np.uint64]) -> None:
        self._state_words = state_words
        self._room = int(np.clip(_COLUMN_BYTES // (8 * spec.num_tiles), 16, 4096))
        self._slots: dict[bytes, int] = {}
        self._word_at = np.zeros(self._room, np.int64)
        self._word = np.zeros(self._room, np.uint64)
        self._tokens = np.zeros(self._room, np.int64)
        self.offset = np.zeros(self._room, np.int64)
        self.sums = np.zeros((self._room, spec.num_tiles), np.uint64)

    def find(self, chunks: Sequence[ChunkRef], num_tokens: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """The slot of each chunk, and whether it is known and still good."""
        get = self._slots.get
        slots = np.array([get(chunk.key, -1) for chunk in chunks], np.int64)
        good = (self._state_words[self._word_at[slots]] == self._word[slots]) & (self._tokens[slots] == num_tokens)
        return slots, good & (slots >= 0)

    def cells(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where the records of some slots lie in the index."""
        return self._word_at[slots] // WORDS_PER_CELL

    def remember(self, key: bytes, word_at: int, word: int, offset: int, num_tokens: int, sums: memoryview) -> int:
        """Note a record; its slot. When there is no room, everything is forgotten first."""
        if len(self._slots) >= self._room:
            self._slots.clear()
            self._tokens[:] = 0
        slot = self._slots.setdefault(key, len(self._slots))
        self._word_at[slot], self._word[slot], self._tokens[slot] = word_at, word, num_tokens
        self.offset[slot] = offset
        self.sums[slot] = sums
        return slot
