"""What Headwater logs in a process of vLLM: as vLLM's own lines are, with its name, and once."""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from headwater.integrations.vllm.logs import join_logs
from headwater.integrations.vllm.startup import _check_capacity
from headwater.stores.breaker import BreakerSettings, CircuitBreaker
from headwater.stores.url import parse_url

from support import wait_until


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What a handler of vLLM's logger writes; Headwater's loggers as they are in a new process,
    and a root logger that somebody else has set up."""
    out, others, own, root = io.StringIO(), io.StringIO(), logging.getLogger("headwater"), logging.getLogger()
    before = own.handlers, own.propagate, own.level
    own.handlers, own.propagate = [], True
    own.setLevel(logging.NOTSET)
    vllm = logging.getLogger("vllm")
    handler = logging.StreamHandler(out)
    handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(message)s"))
    monkeypatch.setattr(vllm, "handlers", [handler])
    monkeypatch.setattr(vllm, "propagate", False)
    vllm.setLevel(logging.INFO)
    extra = logging.StreamHandler(others)
    root.addHandler(extra)
    yield out
    root.removeHandler(extra)
    own.handlers, own.propagate = before[:2]
    own.setLevel(before[2])
    vllm.setLevel(logging.NOTSET)
    assert "redis://cache" not in others.getvalue(), "written twice"


def test_a_breaker_that_opens_and_closes_is_in_vllms_log(written: io.StringIO) -> None:
    for _ in range(3):
        join_logs()  # both sides of a connector may live in one process
    up = threading.Event()

    def probe() -> None:
        if not up.is_set():
            raise OSError("down")

    breaker = CircuitBreaker("redis://cache", probe, BreakerSettings(threshold=1, first_pause_s=0.01))
    breaker.failed("100 % of it")
    up.set()
    wait_until(lambda: "is back" in written.getvalue(), what="the recovery in the log")
    opened, closed = written.getvalue().splitlines()
    assert "WARNING" in opened
    assert opened.endswith("Headwater: redis://cache is not used until it answers again: 100 % of it")
    assert "WARNING" in closed
    assert "Headwater: redis://cache is back after" in closed


def test_the_level_is_vllms(written: io.StringIO) -> None:
    logging.getLogger("vllm").setLevel(logging.ERROR)
    join_logs()
    logging.getLogger("headwater.stores").warning("quiet")
    logging.getLogger("headwater.stores").error("loud")
    (line,) = written.getvalue().splitlines()
    assert line.endswith("Headwater: loud")


def test_a_small_pool_is_named_as_the_user_named_it(written: io.StringIO) -> None:
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=1024))
    stats = SimpleNamespace(store=SimpleNamespace(data_bytes=64 << 20))
    member = SimpleNamespace(
        spec=SimpleNamespace(extent_bytes=lambda num_tokens: 90 << 10), pool=SimpleNamespace(stats=lambda: stats)
    )
    _check_capacity(config, member, parse_url("shm:///mine?capacity=64MiB"))  # type: ignore[arg-type]
    said = " ".join(written.getvalue().split())
    assert "shm:///mine?capacity=64MiB holds 64.0 MiB" in said
    assert "a capacity of 720.0 MiB or more (pool: shm:///mine?capacity=…)" in said
    assert "remove the pool that there is first (headwater pool clear --remove shm:///mine)" in said
