"""Work in several threads: all of it, some at a time, and nothing goes on after the return."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from headwater.stores.workers import run_in_threads


@pytest.mark.parametrize("count", [1, 2, 5])
def test_everything_is_done_once(count: int) -> None:
    done: list[int] = []
    run_in_threads((partial(done.append, number) for number in range(100)), count)
    assert sorted(done) == list(range(100))
    run_in_threads((), count)


def test_threads_run_at_the_same_time() -> None:
    gate = threading.Barrier(2, timeout=20)
    run_in_threads([gate.wait, gate.wait], 2)


def test_a_failure_is_raised_when_all_have_ended_and_nothing_else_begins() -> None:
    failed, ended = threading.Event(), list[str]()

    def fail() -> None:
        failed.set()
        raise ValueError("the first")

    def go_on() -> None:
        assert failed.wait(20)
        ended.append("the other")

    endless = itertools.chain([go_on, fail], itertools.repeat(lambda: None))
    with pytest.raises(ValueError, match="the first"):
        run_in_threads(endless, 2)
    assert ended == ["the other"]


def test_work_that_cannot_be_found_is_a_failure_too() -> None:
    def works() -> Iterator[Callable[[], object]]:
        yield lambda: None
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        run_in_threads(works(), 3)
