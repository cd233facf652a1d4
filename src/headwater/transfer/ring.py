"""Bounded device memory between a paged cache and the pool: taken and given back in order, as a ring.

What is taken in one piece lies side by side, so that many chunks, or some layers of many chunks, are gathered by one
kernel and leave in few large copies. Which chunks move is decided by callers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from headwater.kernels.extent import SUM_BYTES

BATCH_BYTES = 128 << 20
"""What is copied and reported together, where the ring has room for four. The bus is content with less; it is the host,
half a millisecond a batch, that needs them large."""

_ALIGNMENT = SUM_BYTES


class Room(NamedTuple):
    """A piece of the ring."""

    start: int
    num_units: int
    """How many of the asked-for units it holds, side by side."""
    num_bytes: int
    """What it takes up, and what must be given back for it: its units, and what was skipped at the ring's end."""


class StagingRing:
    """One allocation of so many slots for whole chunks. Thread-safe."""

    def __init__(self, slot_bytes: int, budget_bytes: int, device: torch.device, *, with_sums: bool = False) -> None:
        self.slot_bytes = slot_bytes
        self.count = max(2, budget_bytes // slot_bytes)
        """Chunks that fit. Two at least, whatever the budget: one fills while the other empties."""
        self.batch = max(1, min(BATCH_BYTES // slot_bytes, self.count // 4))
        """Chunks that are copied together."""
        self._size = self.count * _round_up(slot_bytes)
        self._memory = torch.empty(self._size, dtype=torch.uint8, device=device)
        self._sums: Tensor | None = None
        if with_sums and device.type == "cuda":
            self._sums = torch.empty((self._size // SUM_BYTES, 8), dtype=torch.int64, device=device)
        self._next = 0
        self._free = self._size
        self._changed = threading.Condition()

    @property
    def num_free(self) -> int:
        """Chunks that there is room for."""
        return self._free // _round_up(self.slot_bytes)

    def take(self, unit_bytes: int, count: int, *, least: int = 1) -> Room | None:
        """Up to `count` units side by side; None where there is no room for `least` of them. At the end of the ring a
        piece may end early, with fewer, and the next one begins at its beginning."""
        if unit_bytes < 1 or count < 1:
            return None
        with self._changed:
            if self._free == self._size:
                self._next = 0
            skipped, to_end = 0, (self._size - self._next) // unit_bytes
            fitting = min(to_end, self._free // unit_bytes)
            if not fitting and self._free >= self._size - self._next:
                skipped, to_end = self._size - self._next, self._size // unit_bytes
                fitting = min(to_end, (self._free - skipped) // unit_bytes)
            taken = min(count, fitting)
            if not taken or taken < min(least, count, to_end):
                return None
            start = (self._next + skipped) % self._size
            # Aligned, except where the last bytes of all are taken.
            used = min(_round_up(taken * unit_bytes), self._size - start, self._free - skipped)
            self._next = (start + used) % self._size
            self._free -= skipped + used
        return Room(start, taken, skipped + used)

    def take_while(
        self, unit_bytes: int, count: int, is_patient: Callable[[], bool], poll_s: float = 0.002
    ) -> Room | None:
        """`take`, waiting for room as long as the caller is patient."""
        while (room := self.take(unit_bytes, count)) is None and count and is_patient():
            with self._changed:
                self._changed.wait(poll_s)
        return room

    def give_back(self, num_bytes: int) -> None:
        """Return the oldest bytes that are taken."""
        with self._changed:
            self._free += num_bytes
            self._changed.notify_all()

    def reset(self) -> None:
        """Return everything that is taken."""
        with self._changed:
            self._free, self._next = self._size, 0
            self._changed.notify_all()

    def wait(self, num_chunks: int, timeout_s: float) -> bool:
        """Wait until there is room for so many chunks."""
        with self._changed:
            return self._changed.wait_for(lambda: self.num_free >= num_chunks, timeout_s)

    def sums(self, room: Room) -> Tensor | None:
        """Beside a piece's bytes, what a gather adds up of them: a sixteenth of the ring more. None where they were not
        asked for, and on the host, where nobody needs them."""
        return None if self._sums is None else self._sums[room.start // SUM_BYTES :]

    def flat(self, room: Room, unit_bytes: int) -> Tensor:
        """A piece's bytes, as `convert` takes them."""
        return self._memory[room.start : room.start + room.num_units * unit_bytes]


def sums_bytes(ring_bytes: int) -> int:
    """Memory for the sums beside a ring."""
    return ring_bytes // SUM_BYTES * 8 * 8


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
