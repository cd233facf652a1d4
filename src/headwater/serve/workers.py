"""The threads that parse and tokenise large requests: few, the server's own, and shared fairly.

A job is a generator. It yields after each piece of work, and the threads take turns between jobs, so a short one never
waits for the whole of a long one. A job whose client has left is dropped between two pieces.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from enum import Enum
from typing import Any, Generic, TypeVar

from headwater.errors import EngineDeadError, HeadwaterError, RequestError

MAX_JOBS = 128
"""Jobs at a time; more are refused. Their bytes are bounded by the server's budget for bodies."""
JOIN_S = 2.0

_Result = TypeVar("_Result")


class PieceLength(Enum):
    """How much work a job's next piece is. One thread never takes a long one."""

    SHORT = 0
    LONG = 1


TextJob = Generator[PieceLength, None, _Result]
"""Yields what its next piece will be; the first piece of every job is short."""


class _Ticket(Generic[_Result]):
    """A job on its way, and the future that its caller waits for."""

    def __init__(self, job: TextJob[_Result], loop: asyncio.AbstractEventLoop) -> None:
        self.job = job
        self.done: asyncio.Future[_Result] = loop.create_future()
        self._loop = loop

    def settle(self, set_outcome: Callable[[Any], None], outcome: Any) -> None:
        def unless_done() -> None:
            if not self.done.done():
                set_outcome(outcome)

        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(unless_done)


class TextWorkers:
    """Two daemon threads: the process can end whatever they are doing. Close them when the server stops."""

    def __init__(self, max_jobs: int = MAX_JOBS) -> None:
        self._max_jobs = max_jobs
        self._queues: dict[PieceLength, deque[_Ticket[Any]]] = {piece: deque() for piece in PieceLength}
        self._tickets: set[_Ticket[Any]] = set()
        self._closing: HeadwaterError | None = None
        self._news = threading.Condition()
        self._threads = [
            threading.Thread(target=self._work, args=(pieces,), name="headwater-text", daemon=True)
            for pieces in ((PieceLength.LONG, PieceLength.SHORT), (PieceLength.SHORT,))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_jobs(self) -> int:
        """Jobs that wait or run."""
        return len(self._tickets)

    async def run(self, job: TextJob[_Result]) -> _Result:
        """What the job returns or raises. Cancelling drops what is left of it.

        Raises RequestError ("overloaded") if too many jobs wait, EngineDeadError once the server stops.
        """
        ticket = _Ticket(job, asyncio.get_running_loop())
        with self._news:
            if self._closing is not None:
                raise self._closing
            if len(self._tickets) >= self._max_jobs:
                text = f"{len(self._tickets)} requests are waiting to be tokenised, which is the limit; try again later"
                raise RequestError(text, code="overloaded")
            self._tickets.add(ticket)
            self._queues[PieceLength.SHORT].append(ticket)
            self._news.notify_all()
        try:
            return await ticket.done
        finally:
            self._drop(ticket)

    async def call(self, work: Callable[[], _Result]) -> _Result:
        """`run` for work that is one short piece."""

        def job() -> TextJob[_Result]:
            yield PieceLength.SHORT
            return work()

        return await self.run(job())

    def close(self) -> None:
        """Fail every job, and let the threads end after the piece that they work on. Idempotent."""
        with self._news:
            self._closing = EngineDeadError("the server is stopping")
            for waiting in self._queues.values():
                waiting.clear()
            for ticket in self._tickets:
                ticket.settle(ticket.done.set_exception, self._closing)
            self._news.notify_all()

    def join(self, timeout_s: float = JOIN_S) -> None:
        """Wait for the threads of closed workers: a process that ends in the middle of a piece may crash."""
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _drop(self, ticket: _Ticket[Any]) -> None:
        with self._news:
            self._tickets.discard(ticket)
            for waiting in self._queues.values():
                with suppress(ValueError):
                    waiting.remove(ticket)

    def _work(self, pieces: tuple[PieceLength, ...]) -> None:
        while (ticket := self._take(pieces)) is not None:
            try:
                piece = next(ticket.job)
            except StopIteration as end:
                ticket.settle(ticket.done.set_result, end.value)
            except BaseException as error:
                ticket.settle(ticket.done.set_exception, error)
            else:
                self._put_back(ticket, piece)
            del ticket  # it holds the text of a request

    def _take(self, pieces: tuple[PieceLength, ...]) -> _Ticket[Any] | None:
        with self._news:
            while self._closing is None:
                for piece in pieces:
                    if self._queues[piece]:
                        return self._queues[piece].popleft()
                self._news.wait()
        return None

    def _put_back(self, ticket: _Ticket[Any], piece: PieceLength) -> None:
        with self._news:
            if ticket in self._tickets and self._closing is None:
                self._queues[piece].append(ticket)
                self._news.notify_all()
