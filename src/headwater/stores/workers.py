"""Threads for calls that may hang: whoever calls waits until its deadline, and no longer.

A call that is late is left to itself. While one hangs, others get little patience, and when every thread hangs nobody
waits at all: a backend that does not answer costs one deadline, not one for each call.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable

from headwater.locks import ForkSafeLock

STUCK_PATIENCE_S = 0.05
"""For a call beside one that hangs: many times what a disk or a network that is well takes to answer."""


def run_in_threads(works: Iterable[Callable[[], object]], count: int) -> None:
    """Do all of them, `count` at a time, in this thread and others that have ended when this returns. Each must take a
    bounded time. After one has failed no other is begun, and its exception is raised."""
    todo, errors, lock = iter(works), list[BaseException](), threading.Lock()

    def run() -> None:
        while not errors:
            try:
                with lock:
                    work = next(todo, None)
                if work is None:
                    return
                work()
            except BaseException as error:  # raised again below
                errors.append(error)

    others = [threading.Thread(target=run, name="headwater-run", daemon=True) for _ in range(count - 1)]
    for thread in others:
        thread.start()
    run()
    for thread in others:
        thread.join()
    if errors:
        raise errors[0]


class Workers:
    """A few daemon threads, started when first needed."""

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self.jobs = 0
        """Calls that have not ended."""
        self._num_late = 0
        """Of those: nobody waits for them any more."""
        self._queue: queue.SimpleQueue[WorkerCall | None] | None = None
        self._lock = ForkSafeLock()

    def call(self, work: Callable[[], object], deadline: float) -> object:
        """Run `work` in a thread. Its result, the exception it raised, or None where it is late (or hopeless)."""
        with self._lock:
            if self._num_late >= self._count:
                return None
            if self._num_late:
                deadline = min(deadline, time.monotonic() + STUCK_PATIENCE_S)
        return self.wait(self._start(work), deadline)

    def begin(self, work: Callable[[], object]) -> WorkerCall | None:
        """Run `work` in a thread while the caller does something else; `wait` for it afterwards. None: hopeless."""
        with self._lock:
            if self._num_late >= self._count:
                return None
        return self._start(work)

    def wait(self, job: WorkerCall, deadline: float) -> object:
        """The end of what was begun: see `call`."""
        if job.done.wait(max(0.0, deadline - time.monotonic())):
            return job.outcome
        with self._lock:
            if job.done.is_set():
                return job.outcome
            job.is_late = True
            self._num_late += 1
        return None

    def post(self, work: Callable[[], object]) -> None:
        """Run `work` after what was asked before, and wait for nothing. What it raises is forgotten."""
        self._start(work)

    def close(self) -> None:
        """Let the threads end when they are free. Idempotent."""
        with self._lock:
            if self._queue is not None:
                for _ in range(self._count):
                    self._queue.put(None)
                self._queue = None

    def _start(self, work: Callable[[], object]) -> WorkerCall:
        with self._lock:
            if self._queue is None:
                self._queue = queue.SimpleQueue()
                for number in range(self._count):
                    threading.Thread(
                        target=_serve, args=(self._queue,), name=f"{self._name}-{number}", daemon=True
                    ).start()
            self.jobs += 1
            job = WorkerCall(work, self._ended)
            self._queue.put(job)
        return job

    def _ended(self, job: WorkerCall) -> None:
        with self._lock:
            self.jobs -= 1
            self._num_late -= job.is_late
            job.done.set()


class WorkerCall:
    """One call on its way."""

    def __init__(self, work: Callable[[], object], ended: Callable[[WorkerCall], None]) -> None:
        self._work = work
        self._ended = ended
        self.outcome: object = None
        self.is_late = False
        self.done = threading.Event()

    def run(self) -> None:
        try:
            self.outcome = self._work()
        except Exception as error:
            self.outcome = error  # whoever called sees that it is no result; the thread lives on
        self._ended(self)


def _serve(jobs: queue.SimpleQueue[WorkerCall | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job  # it may hold a large buffer, and the next one may be long in coming
