"""Loads under way on one rank, and how they ended. Ends come from the loader's thread, all else from the engine's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from headwater.connector.orders import ASYNC, LoadOrder, StepReport

OnEnd = Callable[[str, int], None]
"""Called from the loader's thread with a request and how many of its chunks are in place."""


class Arrivals:
    """What one rank has been told to load. Thread-safe."""

    def __init__(self, block_size: int, dummy_block: int, on_end: OnEnd | None = None) -> None:
        """With `on_end`, ends are told at once and are left out of `take_report`."""
        self._block_size = block_size
        self._dummy_block = dummy_block
        self._on_end = on_end
        self._changed = threading.Condition()
        self._loads: dict[str, LoadOrder] = {}
        self._ended: dict[str, tuple[int, ...]] = {}
        self._finished: set[str] = set()
        self._failed_blocks: set[int] = set()

    def expect(self, orders: Sequence[LoadOrder]) -> None:
        """These loads are about to begin."""
        with self._changed:
            self._loads.update({order.job.request_id: order for order in orders})

    def end(self, request_id: str, num_chunks: int) -> None:
        """A load has ended with so many chunks, counted from its first, in place. Unknown ones are ignored."""
        with self._changed:
            order = self._loads.pop(request_id, None)
            if order is None:
                return
            if self._on_end is None:
                self._ended[request_id] = (*self._ended.get(request_id, ()), num_chunks)
                if order.mode == ASYNC:
                    self._finished.add(request_id)
                self._failed_blocks |= order.failed_blocks(num_chunks, self._block_size, self._dummy_block)
            self._changed.notify_all()
        if self._on_end is not None:
            self._on_end(request_id, num_chunks)

    def fail_blocks(self, block_ids: frozenset[int]) -> None:
        """Blocks to be reported with those of failed loads."""
        with self._changed:
            self._failed_blocks |= block_ids

    def has(self, mode: str | None = None) -> bool:
        """Whether a load of that mode (None: of any) is under way."""
        with self._changed:
            return any(mode in (None, order.mode) for order in self._loads.values())

    def wait(self, mode: str) -> None:
        """Until no load of that mode is under way. Every load ends by its deadline, so this does too."""
        with self._changed:
            self._changed.wait_for(lambda: all(order.mode != mode for order in self._loads.values()))

    def wait_any(self, timeout_s: float) -> None:
        """Until one load has ended, at most that long."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            count = len(self._loads)
            self._changed.wait_for(lambda: len(self._loads) < count, deadline - time.monotonic())

    def take_finished(self) -> set[str]:
        """Requests that wait outside the batch and whose load has ended since the last call."""
        with self._changed:
            finished, self._finished = self._finished, set()
        return finished

    def take_failed_blocks(self) -> set[int]:
        """Blocks that were to be filled and were not, since the last call."""
        with self._changed:
            failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_report(self) -> StepReport:
        """Loads that have ended since the last call."""
        with self._changed:
            ended, self._ended = self._ended, {}
        return StepReport(ended=ended)
