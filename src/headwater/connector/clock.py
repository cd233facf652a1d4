"""How much time the connector takes from the engine: in the thread that runs the model, and in its own threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from headwater.locks import ForkSafeLock

THREAD_PREFIX = "headwater"

_Method = TypeVar("_Method", bound=Callable[..., Any])


def timed(method: _Method) -> _Method:
    """Add the duration of each call to the object's `step_seconds`. The calls of one object must not nest."""

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return method(self, *args, **kwargs)
        finally:
            self.step_seconds += time.perf_counter() - start

    return cast("_Method", call)


class ThreadClock:
    """Processor time of all threads of this process that are Headwater's, looked at from time to time. Threads that
    end keep what they had used at the last look."""

    def __init__(self, every_s: float = 0.5) -> None:
        self._every_s = every_s
        self._next = 0.0
        self._seconds = 0.0
        self._seen: dict[int, float] = {}
        self._lock = ForkSafeLock()

    def seconds(self) -> float:
        """Since the start; never less than before. Costs some microseconds a thread, and nothing between two looks.
        Thread-safe."""
        if time.monotonic() < self._next:
            return self._seconds
        with self._lock:
            self._look(time.monotonic())
        return self._seconds

    def _look(self, now: float) -> None:
        if now >= self._next:
            self._next = now + self._every_s
            used = _thread_seconds()
            # A number that is used less than before is another thread's now.
            self._seconds += sum(s - (old if (old := self._seen.get(i, 0.0)) <= s else 0.0) for i, s in used.items())
            self._seen = used


PROCESS_THREADS = ThreadClock()
"""One for the process: its threads outlive the halves that started them, and some serve several."""


def _thread_seconds() -> dict[int, float]:
    """By thread."""
    found = {}
    for thread in threading.enumerate():
        if thread.name.startswith(THREAD_PREFIX) and thread.native_id is not None:
            try:
                with open(f"/proc/self/task/{thread.native_id}/schedstat") as file:
                    found[thread.native_id] = int(file.read().split()[0]) / 1e9
            except (OSError, ValueError, IndexError):
                continue  # it has just ended, or this is no Linux
    return found
