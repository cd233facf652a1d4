"""Bounded memory between a paged cache and the pool: slots of one chunk each, taken and given back."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class Slots:
    """A fixed number of equal slots in one allocation. Thread-safe; nobody ever waits for one."""

    def __init__(self, slot_bytes: int, budget_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.count = max(2, budget_bytes // slot_bytes)
        """Two at least, whatever the budget: one fills while the other empties."""
        self._memory: Bytes = np.zeros(self.count * slot_bytes, np.uint8)  # pages come with the first use
        self._free = list(range(self.count))
        self._lock = threading.Lock()

    def take(self, count: int) -> list[int]:
        """Up to that many slots: those that are free now."""
        with self._lock:
            taken = self._free[len(self._free) - min(count, len(self._free)) :]
            del self._free[len(self._free) - len(taken) :]
        return taken

    def give_back(self, slots: list[int]) -> None:
        """Return slots that were taken."""
        with self._lock:
            self._free += slots

    @property
    def num_free(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    def bytes_of(self, slot: int, shape: tuple[int, int, int]) -> Bytes:
        """The beginning of a slot as tiles (layers, heads, bytes of a tile part)."""
        size = shape[0] * shape[1] * shape[2]
        assert size <= self.slot_bytes, f"{size} bytes do not fit into a slot of {self.slot_bytes}"
        start = slot * self.slot_bytes
        return self._memory[start : start + size].reshape(shape)
