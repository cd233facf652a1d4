"""The threads that tokenise: turns between jobs, jobs that are dropped, a queue with an end, and an end in time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("msgspec")

from headwater.errors import EngineDeadError, RequestError
from headwater.serve.workers import PieceLength, TextJob, TextWorkers

WAIT_S = 20.0


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What blocked jobs wait for; it opens at the end, so that no thread is left behind."""
    event = threading.Event()
    yield event
    event.set()


def run(test: Callable[[TextWorkers], object], gate: threading.Event, **options: int) -> None:
    async def bounded() -> None:
        workers = TextWorkers(**options)
        try:
            async with asyncio.timeout(WAIT_S):
                await test(workers)  # type: ignore[misc]
        finally:
            gate.set()
            workers.close()
            workers.join()

    asyncio.run(bounded())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def blocked(gate: threading.Event, begun: list[int], piece: PieceLength) -> TextJob[int]:
    yield piece
    begun.append(1)
    gate.wait(WAIT_S)
    return 7


def test_what_a_job_returns_or_raises_arrives(gate: threading.Event) -> None:
    async def test(workers: TextWorkers) -> None:
        def job(text: str) -> TextJob[int]:
            yield PieceLength.SHORT
            yield PieceLength.LONG
            return int(text)

        assert await workers.run(job("5")) == 5
        assert await workers.call(lambda: 6) == 6
        with pytest.raises(ValueError, match="x"):
            await workers.run(job("x"))
        assert workers.num_jobs == 0

    run(test, gate)


def test_long_pieces_leave_a_thread_to_short_ones(gate: threading.Event) -> None:
    async def test(workers: TextWorkers) -> None:
        begun: list[int] = []
        long = [asyncio.create_task(workers.run(blocked(gate, begun, PieceLength.LONG))) for _ in range(6)]
        await until(lambda: bool(begun))
        assert await workers.call(lambda: "at once") == "at once"
        assert len(begun) == 1, "one long piece at a time"
        gate.set()
        assert await asyncio.gather(*long) == [7] * 6

    run(test, gate)


def test_jobs_take_turns(gate: threading.Event) -> None:
    """A short job that comes last does not wait for the rest of those that are there."""

    async def test(workers: TextWorkers) -> None:
        num_pieces = 0

        def endless() -> TextJob[None]:
            nonlocal num_pieces
            while not gate.is_set():
                yield PieceLength.SHORT
                num_pieces += 1

        others = [asyncio.create_task(workers.run(endless())) for _ in range(6)]
        await until(lambda: num_pieces > 100)
        assert await workers.call(lambda: "soon") == "soon"
        gate.set()
        await asyncio.gather(*others)

    run(test, gate)


def test_work_whose_client_left_is_dropped(gate: threading.Event) -> None:
    async def test(workers: TextWorkers) -> None:
        begun: list[int] = []
        seen: list[str] = []

        def job(name: str) -> TextJob[None]:
            yield PieceLength.LONG
            seen.append(name)
            yield PieceLength.LONG
            seen.append(f"{name} again")

        def left_in_the_middle() -> TextJob[None]:
            yield from blocked(gate, begun, PieceLength.LONG)
            yield PieceLength.LONG
            seen.append("left in the middle")

        first = asyncio.create_task(workers.run(left_in_the_middle()))
        await until(lambda: bool(begun))
        waiting = asyncio.create_task(workers.run(job("left")))
        staying = asyncio.create_task(workers.run(job("stays")))
        await until(lambda: workers.num_jobs == 3)
        waiting.cancel()
        first.cancel()
        await until(lambda: workers.num_jobs == 1)
        gate.set()
        await staying
        assert seen == ["stays", "stays again"]

    run(test, gate)


def test_too_many_jobs_are_told_to_come_back(gate: threading.Event) -> None:
    async def test(workers: TextWorkers) -> None:
        begun: list[int] = []
        jobs = [asyncio.create_task(workers.run(blocked(gate, begun, PieceLength.LONG))) for _ in range(3)]
        await until(lambda: workers.num_jobs == 3)
        with pytest.raises(RequestError) as caught:
            await workers.call(lambda: None)
        assert caught.value.code == "overloaded"
        jobs[-1].cancel()
        await until(lambda: workers.num_jobs == 2)
        await workers.call(lambda: None)

    run(test, gate, max_jobs=3)


def test_closing_fails_what_waits_and_what_runs_at_once(gate: threading.Event) -> None:
    async def test(workers: TextWorkers) -> None:
        begun: list[int] = []
        jobs = [asyncio.create_task(workers.run(blocked(gate, begun, PieceLength.LONG))) for _ in range(4)]
        await until(lambda: bool(begun))
        workers.close()
        results = await asyncio.gather(*jobs, return_exceptions=True)
        assert [type(result) for result in results] == [EngineDeadError] * 4
        with pytest.raises(EngineDeadError):
            await workers.call(lambda: None)
        begin_s = time.monotonic()
        workers.join(0.05)
        assert time.monotonic() - begin_s < WAIT_S / 2, "the piece that runs is not waited for longer than asked"

    run(test, gate)
