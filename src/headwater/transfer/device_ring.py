"""Bounded device memory between a paged cache and the pool, and copies between it and stored tiles.

Slots of one chunk each, taken as runs and given back in the same order, so that the chunks of a run lie side by side
and leave in few large copies. Which chunks move is decided by callers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headwater.transfer.convert import Plan
from headwater.transfer.copy import copy_pieces

Tiles = npt.NDArray[np.uint8]

BATCH_BYTES = 128 << 20
"""What is copied and reported together. The bus is content with less; it is the host, a millisecond or so a batch,
that needs them large: with 64 MiB one rank of an 8B model saved at 41 to 50 GB/s on an H200, with 128 at 54."""


class DeviceRing:
    """A fixed number of equal slots in one allocation. Thread-safe."""

    def __init__(self, slot_bytes: int, budget_bytes: int, device: torch.device) -> None:
        self.slot_bytes = slot_bytes
        self.count = max(2, budget_bytes // slot_bytes)
        """Two at least, whatever the budget: one fills while the other empties."""
        self.batch = max(1, min(BATCH_BYTES // slot_bytes, self.count // 4))
        """Chunks that are copied together."""
        self._memory = torch.empty(self.count * slot_bytes, dtype=torch.uint8, device=device)
        self._next = 0
        self._free = self.count
        self._changed = threading.Condition()

    @property
    def num_free(self) -> int:
        """Slots that nobody holds."""
        return self._free

    def take(self, count: int) -> range:
        """Up to that many slots side by side: those that are free now. At the end of the ring a run ends early."""
        with self._changed:
            taken = min(count, self._free, self.count - self._next)
            run = range(self._next, self._next + taken)
            self._next = (self._next + taken) % self.count
            self._free -= taken
        return run

    def undo(self, count: int) -> None:
        """Return the newest slots that were taken. For whoever took them, before taking more."""
        with self._changed:
            self._next = (self._next - count) % self.count
            self._free += count
            self._changed.notify_all()

    def give_back(self, count: int) -> None:
        """Return the oldest slots that are taken."""
        with self._changed:
            self._free += count
            self._changed.notify_all()

    def wait(self, count: int, timeout_s: float) -> bool:
        """Wait until so many slots are free."""
        with self._changed:
            return self._changed.wait_for(lambda: self._free >= count, timeout_s)

    def flat(self, run: range) -> Tensor:
        """A run's bytes, as `convert` takes them."""
        return self._memory[run.start * self.slot_bytes : run.stop * self.slot_bytes]


def copy_chunks(
    plan: Plan, flat: Tensor, num_layers: int, stored: Sequence[tuple[int, slice, Tiles]], *, to_host: bool
) -> None:
    """Copy between staged spans and stored tiles, on the current stream: (span, which of its layers, tiles).

    Spans that lie one behind the other on both sides go in one copy, whole or as rows at one pitch.
    """
    groups = list(zip(plan.groups, plan.staged(flat, num_layers), strict=True))
    # By segment: two of them may happen to be neighbours, and no copy may cross from one registration to the next.
    for _, runs in groupby(_runs(stored), key=lambda run: id(run[3].base)):
        host: list[Tiles | Tensor] = []
        device: list[Tiles | Tensor] = []
        for first, count, layers, tiles in runs:
            # Equal and consecutive, so in one group.
            group, staged = next(pair for pair in groups if first in pair[0])
            device.append(staged[first - group.start : first - group.start + count, layers])
            shape, strides = (count, *tiles.shape), (_step(tiles), *tiles.strides)
            host.append(np.lib.stride_tricks.as_strided(tiles, shape, strides, writeable=tiles.flags.writeable))
        copy_pieces(host, device) if to_host else copy_pieces(device, host)


def _runs(stored: Sequence[tuple[int, slice, Tiles]]) -> Iterator[tuple[int, int, slice, Tiles]]:
    """(first span, how many, layers, the first span's tiles), where each extent follows the one before it."""
    at = 0
    while at < len(stored):
        span, layers, tiles = stored[at]
        step, address, end = _step(tiles), _address(tiles), at + 1
        while end < len(stored):
            other, other_layers, more = stored[end]
            follows = other == span + end - at and _address(more) == address + (end - at) * step
            same = more.base is tiles.base and other_layers == layers
            if not follows or not same or more.shape != tiles.shape or more.strides != tiles.strides:
                break
            end += 1
        yield span, end - at, layers, tiles
        at = end


def _step(tiles: Tiles) -> int:
    return int(tiles.strides[0] * tiles.shape[0])


def _address(tiles: Tiles) -> int:
    address: int = tiles.__array_interface__["data"][0]
    return address
