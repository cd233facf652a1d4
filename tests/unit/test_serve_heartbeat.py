"""The engine's heartbeat: a thread that works moves, one that hangs stands still, one that comes round lives."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from itertools import pairwise

import pytest

from headwater.serve.heartbeat import HEARTBEAT_S, Heart

WAIT_S = 20.0


def beats_of(
    work: Callable[[Heart, Callable[[], bool]], None], num_beats: int = 5, *, computes: bool = True
) -> list[float]:
    """What is sent while a thread does `work` until its second argument says that it is enough."""
    found: list[float] = []
    deadline_s = time.monotonic() + WAIT_S

    def is_over() -> bool:
        assert time.monotonic() < deadline_s, "no beats"
        return len(found) >= num_beats

    with Heart(found.append, computes=computes) as heart:
        work(heart, is_over)
    return found


def test_a_thread_that_hangs_stands_still() -> None:
    found: list[float] = []
    enough = threading.Event()

    def send(still_s: float) -> None:
        found.append(still_s)
        if len(found) == 5:
            enough.set()

    with Heart(send):
        assert enough.wait(WAIT_S)
    assert found[0] < found[1] < found[-1]
    assert found[-1] >= 3 * HEARTBEAT_S


@pytest.mark.parametrize("computes", [True, False])
def test_a_long_step_computes_though_it_is_at_one_place(computes: bool) -> None:
    """Where time on a processor says nothing, it does not count."""
    begin_s = time.thread_time()
    hashlib.pbkdf2_hmac("sha256", b"key", b"salt", 100_000)
    num_rounds = int(100_000 * 8 * HEARTBEAT_S / (time.thread_time() - begin_s))
    found: list[float] = []
    with Heart(found.append, computes=computes):
        hashlib.pbkdf2_hmac("sha256", b"key", b"salt", num_rounds)  # two seconds, in one call
        num_beats = len(found)
    assert num_beats >= 4
    moved = any(later < earlier for earlier, later in pairwise(found[1:num_beats]))
    assert moved == computes


def test_a_long_step_that_waits_at_one_place_after_another_moves() -> None:
    def work(heart: Heart, is_over: Callable[[], bool]) -> None:
        idle = threading.Event()
        while not is_over():
            idle.wait(HEARTBEAT_S)
            idle.wait(HEARTBEAT_S / 2)

    assert min(beats_of(work, 8, computes=False)[1:]) < HEARTBEAT_S


def test_a_loop_that_comes_round_to_one_place_lives() -> None:
    def work(heart: Heart, is_over: Callable[[], bool]) -> None:
        idle = threading.Event()
        while not is_over():
            heart.turn()
            idle.wait(HEARTBEAT_S / 5)

    assert min(beats_of(work)[1:]) < HEARTBEAT_S


def test_a_heart_whose_server_is_gone_ends_quietly() -> None:
    def send(still_s: float) -> None:
        raise BrokenPipeError

    with Heart(send) as heart:
        heart._thread.join(WAIT_S)
        assert not heart._thread.is_alive()
