"""The circuit breaker: when it opens, that it asks, and that it closes again."""

from __future__ import annotations

import os
import threading

import pytest

from headwater.errors import BackendError
from headwater.stores.breaker import BreakerSettings, CircuitBreaker

from support import wait_until

FAST = BreakerSettings(first_pause_s=0.01, longest_pause_s=0.02)


class Backend:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.up = threading.Event()
        self.asked = 0

    def probe(self) -> None:
        self.asked += 1
        if not self.up.is_set():
            raise BackendError("down")


@pytest.fixture
def backend() -> Backend:
    return Backend()


def test_it_opens_after_failures_in_a_row_and_closes_when_the_backend_answers(backend: Backend) -> None:
    breaker, back = CircuitBreaker("b", backend.probe, FAST), threading.Event()
    breaker.on_close(back.set)
    for _ in range(2):
        breaker.failed("x")
        assert breaker.closed
    breaker.succeeded()  # not in a row any more
    for _ in range(3):
        breaker.failed("why")
    assert not breaker.closed
    assert breaker.stats().trips == 1
    assert breaker.stats().reason == "why"
    wait_until(lambda: backend.asked >= 3, what="probes")
    assert not back.is_set()
    backend.up.set()
    wait_until(lambda: breaker.closed, what="closing")
    assert back.is_set()
    assert breaker.stats().failures == 5


def test_half_of_the_last_operations_is_too_many(backend: Backend) -> None:
    breaker = CircuitBreaker("b", backend.probe, FAST)
    for _ in range(8):
        breaker.succeeded()
        assert breaker.closed
        breaker.failed("now and then")
    assert not breaker.closed
    breaker.close()


def test_failures_while_it_is_open_do_not_trip_it_again(backend: Backend) -> None:
    breaker = CircuitBreaker("b", backend.probe, FAST)
    for _ in range(30):
        breaker.failed("x")
    assert breaker.stats().trips == 1
    breaker.close()


def test_a_forked_child_begins_with_a_closed_one(backend: Backend) -> None:
    breaker = CircuitBreaker("b", backend.probe, FAST)
    for _ in range(3):
        breaker.failed("x")
    pid = os.fork()
    if pid == 0:
        os._exit(0 if breaker.closed else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert not breaker.closed
    breaker.close()
