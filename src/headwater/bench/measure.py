"""Measuring, the same way for every benchmark: alternating rounds, lower quartiles, ratios and their noise.

What is compared runs in the same process, in turns, so that a busy neighbour or a warm clock meets both sides. Nothing
here knows what is measured.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

Timed = Callable[[], float]
"""One repetition. It returns the seconds that count; what it prepares first does not."""

Note = Callable[[str], None]
"""Told what is going on, for people who wait."""


def stopwatch(work: Callable[[], object]) -> Timed:
    """A repetition that has nothing to prepare."""

    def run() -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return run


def next_of(works: Sequence[Timed]) -> Timed:
    """A repetition is the next of them, and after the last the first again."""
    turn = itertools.cycle(works)
    return lambda: next(turn)()


def in_threads(works: Sequence[Callable[[], object]]) -> float:
    """Seconds from the moment when all threads begin to the moment when the last one ends. Raises what they raise."""
    gate = threading.Barrier(len(works) + 1)
    errors: list[BaseException] = []

    def serve(work: Callable[[], object]) -> None:
        gate.wait()
        try:
            work()
        except BaseException as error:  # re-raised below, in the thread that asked
            errors.append(error)

    threads = [threading.Thread(target=serve, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    gate.wait()
    start = time.perf_counter()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    if errors:
        raise errors[0]
    return seconds


@dataclass(frozen=True)
class Rounds:
    """Seconds of every repetition of the things that took turns."""

    seconds: Mapping[str, Sequence[float]]

    def time(self, name: str) -> float:
        """The lower quartile: what it takes when nobody disturbs, without the luck of a minimum."""
        return float(np.percentile(self.seconds[name], 25))

    def ratio(self, name: str, other: str) -> float:
        """How many times as long `name` takes as `other`."""
        return self.time(name) / self.time(other)

    def noise(self, name: str, again: str) -> float:
        """How far from 1 the ratio of two equal things came out."""
        return abs(self.ratio(name, again) - 1)

    def spread(self, name: str) -> float:
        """The noise of one thing: its odd repetitions against its even ones."""
        every = self.seconds[name]
        return Rounds({"odd": every[::2], "even": every[1::2] or every[::2]}).noise("odd", "even")


def take_turns(runs: Mapping[str, Timed], count: int) -> Rounds:
    """Repeat everything `count` times, once a round, after one round that does not count.

    Every second round is the one before backwards, then another one begins: nothing always follows the same.
    """
    names = list(runs)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        runs[name]()
    with _settled_heap():
        for number in range(count):
            first = number // 2 % len(names)
            order = names[first:] + names[:first]
            for name in reversed(order) if number % 2 else order:
                seconds[name].append(runs[name]())
    return Rounds(seconds)


@contextlib.contextmanager
def _settled_heap() -> Iterator[None]:
    """Keep the collector away from what the benchmark itself has allocated; it still collects what is new."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def gbps(num_bytes: int, seconds: float) -> float:
    """Gigabytes (10**9) a second."""
    return num_bytes / seconds / 1e9


def machine() -> dict[str, Any]:
    """What a reader must know to judge the figures. No names and no paths."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "ram_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: _version(name) for name in ("headwater", "numpy", "xxhash")},
    }


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass  # not every container shows it
    return platform.machine()


def _version(package: str) -> str:
    if package == "headwater":
        from headwater import __version__

        return __version__
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
