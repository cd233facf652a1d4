"""Timing work on a device: between two events of the device's own clock, launched many times or as a CUDA graph.

On a CPU, where the tests run the same measurements, it is a stopwatch.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from headwater.bench.measure import Timed
from headwater.errors import EngineError

Work = Callable[[], object]


class DeviceClock:
    """Makes repetitions for `measure.take_turns`; each gives the seconds of one call of the work."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def repeated(self, work: Work, count: int) -> Timed:
        """`count` calls one after the other. For work that takes the device longer than the host takes to launch it."""
        if self._device.type != "cuda":
            return _stopwatch(work, 1)
        return _between_events(lambda: [work() for _ in range(count)], count)

    def captured(self, work: Work, count: int) -> Timed:
        """`count` replays of a graph of the work, which is run first, so that everything is compiled. Launching costs
        nothing then; the work must not wait for the device."""
        if self._device.type != "cuda":
            return _stopwatch(work, 1)
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(2):
                work()
        torch.cuda.current_stream(self._device).wait_stream(side)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            kept = work()

        def replay() -> object:
            for _ in range(count):
                graph.replay()
            return kept  # a graph writes into these

        return _between_events(replay, count)


def check_close(name: str, got: Tensor, expected: Tensor) -> None:
    """Raise EngineError where something wrong would be timed."""
    got, expected = got.float(), expected.float()
    error = float((got - expected).norm() / expected.norm().clamp_min(1e-30))
    if not error < 1e-2:
        raise EngineError(f"{name} is wrong: a relative error of {error:.2e}")


def _stopwatch(work: Work, count: int) -> Timed:
    def run() -> float:
        start = time.perf_counter()
        work()
        return (time.perf_counter() - start) / count

    return run


def _between_events(work: Work, count: int) -> Timed:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def run() -> float:
        torch.cuda.synchronize()
        first.record()
        work()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1000 / count

    return run
