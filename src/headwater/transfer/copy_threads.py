"""Several threads for one load on a CPU: one core copies, checks and turns a few GB/s, and a load should not be slower
than the memory. Nothing here knows KV.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable

MAX_COPY_THREADS = 4
"""More than these a memory bus hardly feeds, and the engine needs its cores."""

Work = Callable[[int], bool]


class Gate:
    """Lets writers in until it is closed. Closing waits for those inside; they are only copying."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_inside = 0
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Whether nobody gets in any more."""
        return self._is_closed

    def enter(self) -> bool:
        """Whether the caller may write now; if so, it must `leave`."""
        with self._changed:
            self._num_inside += not self._is_closed
            return not self._is_closed

    def leave(self) -> None:
        """The caller has written."""
        with self._changed:
            self._num_inside -= 1
            self._changed.notify_all()

    def close(self) -> bool:
        """Let nobody in any more, and wait for those inside. True for the one caller that closed it."""
        with self._changed:
            is_first, self._is_closed = not self._is_closed, True
            self._changed.wait_for(lambda: not self._num_inside)
            return is_first


class _Round:
    """Pieces of one call, given out in order."""

    def __init__(self, count: int, work: Work) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._next = 0
        self.num_good = count
        """Pieces before the first that failed, so far."""
        self.error: BaseException | None = None

    def take_part(self) -> None:
        """Do pieces until there are none, or one has failed."""
        while True:
            with self._lock:
                number, self._next = self._next, self._next + 1
                if number >= self.num_good:
                    return
            is_good = False
            try:
                is_good = self._work(number)
            except BaseException as error:
                self.error = error
            if not is_good:
                with self._lock:
                    self.num_good = min(self.num_good, number)


class CopyThreads:
    """A few threads beside the caller's. They may run on all cores that the thread may which makes them."""

    def __init__(self, num_threads: int | None = None) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        count = min(MAX_COPY_THREADS, cores) if num_threads is None else num_threads
        self._rounds: queue.SimpleQueue[tuple[_Round, threading.Semaphore] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"headwater-copy-{number}", daemon=True)
            for number in range(1, count)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, count: int, work: Work) -> int:
        """Call `work` with 0 to `count - 1`, in about that order, and return how many of them, from the first on, were
        good. After one that was not, no further one begins. What `work` raises is raised here."""
        one_round, done = _Round(count, work), threading.Semaphore(0)
        for _ in self._threads[: count - 1]:
            self._rounds.put((one_round, done))
        one_round.take_part()
        for _ in self._threads[: count - 1]:
            done.acquire()
        if one_round.error is not None:
            raise one_round.error
        return one_round.num_good

    def close(self, timeout_s: float = 5.0) -> None:
        """End the threads; one that is stuck in its work is left alone. Idempotent."""
        threads, self._threads = self._threads, []
        for _ in threads:
            self._rounds.put(None)
        for thread in threads:
            thread.join(timeout_s)

    def _run(self) -> None:
        while (job := self._rounds.get()) is not None:
            one_round, done = job
            one_round.take_part()
            done.release()
