"""Several threads for one load: every piece once, in order, up to the first that fails; and the gate to the cache."""

from __future__ import annotations

import threading

import pytest

from headwater.transfer.copy_threads import CopyThreads, Gate

TIMEOUT_S = 10.0


@pytest.fixture(params=[1, 2, 4])
def copy_threads(request: pytest.FixtureRequest) -> object:
    made = CopyThreads(request.param)
    yield made
    made.close()
    made.close()


def test_every_piece_is_carried_once(copy_threads: CopyThreads) -> None:
    for count in (0, 1, 3, 100):
        done: list[int] = []
        assert copy_threads.run(count, lambda number, done=done: done.append(number) or True) == count
        assert sorted(done) == list(range(count))


def test_what_follows_a_piece_that_failed_is_not_counted(copy_threads: CopyThreads) -> None:
    begun: list[int] = []

    def work(number: int) -> bool:
        begun.append(number)
        return number not in (7, 9)

    assert copy_threads.run(100, work) == 7
    assert set(range(8)) <= set(begun), "all before the first that failed must have been tried"
    assert len(begun) <= 8 + 4, "pieces were begun long after one had failed"


def test_an_error_reaches_the_caller_and_the_threads_go_on(copy_threads: CopyThreads) -> None:
    def work(number: int) -> bool:
        if number == 3:
            raise ValueError("no")
        return True

    with pytest.raises(ValueError, match="no"):
        copy_threads.run(10, work)
    assert copy_threads.run(10, lambda number: True) == 10


def test_pieces_are_carried_at_the_same_time() -> None:
    copy_threads, both = CopyThreads(2), threading.Barrier(2)
    try:
        assert copy_threads.run(2, lambda number: both.wait(TIMEOUT_S) is not None) == 2
    finally:
        copy_threads.close()


def test_a_gate_closes_once_and_waits_for_those_inside() -> None:
    gate, closed = Gate(), threading.Event()
    assert gate.enter()
    assert gate.enter()

    def close() -> None:
        assert gate.close()
        closed.set()

    closer = threading.Thread(target=close)
    closer.start()
    gate.leave()
    while not gate.is_closed:
        threading.Event().wait(0.001)
    assert not gate.enter(), "somebody was let in after the gate had been closed"
    assert not closed.is_set(), "closed while somebody was inside"
    gate.leave()
    assert closed.wait(TIMEOUT_S)
    closer.join(TIMEOUT_S)
    assert not gate.close()
