"""Looking up never keeps a scheduler: late and failing stores have nothing, and are asked again when they are back."""

from __future__ import annotations

import threading
import time
from itertools import count
from pathlib import Path

import pytest

from headwater.connector.lookups import LookupRunner
from headwater.errors import InvalidArgumentError, StoreError
from headwater.stores import open_store

from support import wait_until


@pytest.mark.parametrize("lookup_s", [0.0, 0.2])
def test_answers_and_failures(lookup_s: float) -> None:
    runner = LookupRunner(lookup_s)
    assert runner.run(lambda: 5, 0) == 5

    def fail(error: Exception) -> int:
        raise error

    assert runner.run(lambda: fail(StoreError("gone")), 7) == 7
    with pytest.raises(InvalidArgumentError):
        runner.run(lambda: fail(InvalidArgumentError("wrong")), 7)


def test_a_late_answer_costs_its_deadline_once_and_what_follows_keeps_its_order() -> None:
    runner = LookupRunner(0.2)
    gate, calls = threading.Event(), []

    def late() -> int:
        gate.wait(30)
        calls.append("lease")
        return 1

    begin = time.monotonic()
    assert runner.run(late, 0) == 0
    assert time.monotonic() - begin >= runner.deadline_s
    begin = time.monotonic()
    for _ in range(100):
        assert runner.run(lambda: 1, 0) == 0, "asked while the first has not come back"
    runner.post(lambda: calls.append("release"))
    assert time.monotonic() - begin < runner.deadline_s, "somebody waited for a store that does not answer"
    assert calls == []
    gate.set()
    wait_until(lambda: calls == ["lease", "release"], what="the late calls")
    numbers = count()
    wait_until(lambda: runner.run(lambda: next(numbers) >= 0, False), what="an answer")


def test_it_has_the_patience_that_the_urls_ask_for(tmp_path: Path) -> None:
    front = "memory://?capacity=2MiB"
    for below, lookup_s in (
        (f"file://{tmp_path}/pool?capacity=2MiB", 0.0),
        ("redis://127.0.0.1:1?lookup=0.75", 0.75),
        ("redis://127.0.0.1:1?lookup=0.75,redis://127.0.0.1:2", 0.95),
    ):
        store = open_store(f"{front},{below}", None)
        assert store.lookup_s == pytest.approx(lookup_s)
        store.close()

    def slow() -> int:
        time.sleep(0.5)
        return 1

    assert LookupRunner(0.75).run(slow, 0) == 1


def test_its_thread_ends_with_it() -> None:
    before = set(threading.enumerate())
    runner = LookupRunner(0.2)
    assert runner.run(lambda: 1, 0) == 1
    (thread,) = set(threading.enumerate()) - before
    del runner
    thread.join(10)
    assert not thread.is_alive()
