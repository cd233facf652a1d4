"""Looking up never keeps a scheduler: late and failing stores have nothing, and are asked again when they are back."""

from __future__ import annotations

import threading
import time
from itertools import count

import pytest

from headwater.connector.asker import DEADLINE_S, Asker
from headwater.errors import InvalidArgumentError, StoreError

from support import wait_until


@pytest.mark.parametrize("local", [True, False])
def test_answers_and_failures(local: bool) -> None:
    asker = Asker(local=local)
    assert asker.ask(lambda: 5, 0) == 5

    def fail(error: Exception) -> int:
        raise error

    assert asker.ask(lambda: fail(StoreError("gone")), 7) == 7
    with pytest.raises(InvalidArgumentError):
        asker.ask(lambda: fail(InvalidArgumentError("wrong")), 7)


def test_a_late_answer_costs_its_deadline_once_and_what_follows_keeps_its_order() -> None:
    asker = Asker(local=False)
    gate, calls = threading.Event(), []

    def late() -> int:
        gate.wait(30)
        calls.append("lease")
        return 1

    begin = time.monotonic()
    assert asker.ask(late, 0) == 0
    assert time.monotonic() - begin >= DEADLINE_S
    begin = time.monotonic()
    for _ in range(100):
        assert asker.ask(lambda: 1, 0) == 0, "asked while the first has not come back"
    asker.tell(lambda: calls.append("release"))
    assert time.monotonic() - begin < DEADLINE_S, "somebody waited for a store that does not answer"
    assert calls == []
    gate.set()
    wait_until(lambda: calls == ["lease", "release"], what="the late calls")
    numbers = count()
    wait_until(lambda: asker.ask(lambda: next(numbers) >= 0, False), what="an answer")


def test_its_thread_ends_with_it() -> None:
    before = set(threading.enumerate())
    asker = Asker(local=False)
    assert asker.ask(lambda: 1, 0) == 1
    (thread,) = set(threading.enumerate()) - before
    del asker
    thread.join(10)
    assert not thread.is_alive()
