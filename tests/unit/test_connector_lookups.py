"""Looking up never keeps a scheduler: late and failing stores have nothing, and are asked again when they are back."""

from __future__ import annotations

import threading
import time
from itertools import count

import pytest

from headwater.connector.lookups import DEADLINE_S, Lookups
from headwater.errors import InvalidArgumentError, StoreError

from support import wait_until


@pytest.mark.parametrize("local", [True, False])
def test_answers_and_failures(local: bool) -> None:
    lookups = Lookups(local=local)
    assert lookups.ask(lambda: 5, 0) == 5

    def fail(error: Exception) -> int:
        raise error

    assert lookups.ask(lambda: fail(StoreError("gone")), 7) == 7
    with pytest.raises(InvalidArgumentError):
        lookups.ask(lambda: fail(InvalidArgumentError("wrong")), 7)


def test_a_late_answer_costs_its_deadline_once_and_what_follows_keeps_its_order() -> None:
    lookups = Lookups(local=False)
    gate, calls = threading.Event(), []

    def late() -> int:
        gate.wait(30)
        calls.append("lease")
        return 1

    begin = time.monotonic()
    assert lookups.ask(late, 0) == 0
    assert time.monotonic() - begin >= DEADLINE_S
    begin = time.monotonic()
    for _ in range(100):
        assert lookups.ask(lambda: 1, 0) == 0, "asked while the first has not come back"
    lookups.tell(lambda: calls.append("release"))
    assert time.monotonic() - begin < DEADLINE_S, "somebody waited for a store that does not answer"
    assert calls == []
    gate.set()
    wait_until(lambda: calls == ["lease", "release"], what="the late calls")
    numbers = count()
    wait_until(lambda: lookups.ask(lambda: next(numbers) >= 0, False), what="an answer")


def test_its_thread_ends_with_it() -> None:
    before = set(threading.enumerate())
    lookups = Lookups(local=False)
    assert lookups.ask(lambda: 1, 0) == 1
    (thread,) = set(threading.enumerate()) - before
    del lookups
    thread.join(10)
    assert not thread.is_alive()
