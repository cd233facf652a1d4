"""A first-fit allocator over a byte map: one byte a unit, zero is free.

It runs over shared memory under the write lock. The map is a cache of what the records say: `rebuild` fills it anew.
"""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

_FIRST_WINDOW, _WINDOW = 256, 1 << 16
"""Units looked at in one go: few at first, since the hint is usually right."""

FREE_UNIT, USED_UNIT, ABSENT_UNIT = 0, 1, 2
"""ABSENT: the unit's segment has no storage behind it yet."""


class UnitMap:
    """Runs of units in `mapping[base : base + count]`."""

    def __init__(self, mapping: mmap.mmap, base: int, count: int) -> None:
        self._map = mapping
        self._base = base
        self.count = count

    def find(self, need: int, low: int, high: int, hint: int = 0) -> int:
        """First free run of `need` units inside [low, high), looking from `hint` first; -1 where there is none.

        Cost: a copy and a substring search of the part looked at, some microseconds per 64 Ki units.
        """
        hint = hint if low <= hint < high else low
        found = self._search(need, hint, high)
        return found if found >= 0 or hint == low else self._search(need, low, min(hint + need - 1, high))

    def _search(self, need: int, low: int, high: int) -> int:
        needle, window = bytes(need), _FIRST_WINDOW
        while high - low >= need:
            end = min(low + max(window, 2 * need), high)
            window = min(4 * window, _WINDOW)
            at = self._map[self._base + low : self._base + end].find(needle)
            if at >= 0:
                return low + at
            low = end - need + 1
        return -1

    def find_within(self, need: int, stretch: int, stop: int) -> int:
        """First free run of `need` units below `stop` that crosses no multiple of `stretch`; -1 where there is none.

        One copy of the map and one search of it: for when there is nothing near the hint, as in a full store.
        """
        whole, needle, low = self._map[self._base : self._base + stop], bytes(need), 0
        while (at := whole.find(needle, low)) >= 0:
            low = (at // stretch + 1) * stretch
            if at + need <= low:
                return at
        return -1

    def used(self) -> npt.NDArray[np.int64]:
        """Units that are not free."""
        return np.flatnonzero(np.frombuffer(self.snapshot(), np.uint8))

    def fill(self, start: int, count: int, value: int) -> None:
        """Set a run."""
        self._map[self._base + start : self._base + start + count] = bytes((value,)) * count

    def is_all(self, start: int, count: int, value: int) -> bool:
        """Whether a run is inside the map and has one value throughout."""
        if start < 0 or count < 0 or start + count > self.count:
            return False
        return self._map[self._base + start : self._base + start + count] == bytes((value,)) * count

    def snapshot(self) -> bytes:
        """The whole map."""
        return self._map[self._base : self._base + self.count]
