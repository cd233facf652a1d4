"""Counting: the scheduler side's, a rank's, durations, and the processor time of threads."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from hypothesis import given
from hypothesis import strategies as st

from headwater.connector.clock import ThreadClock
from headwater.connector.config import ConnectorConfig
from headwater.connector.fetches import Fetches
from headwater.connector.orders import LoadOrder, SaveOrder, StepOrders, TransferJob
from headwater.connector.stats import MAX_RECENT, Durations, SchedulerCounts, TransferStats
from headwater.connector.worker import WorkerSide
from headwater.kv.topology import whole_shard
from headwater.pool.pool import open_pool

from support import gqa, identity, local_tiles, wait_until
from transfer_cases import ORDERS, cache_view


def test_the_scheduler_side_counts_what_came_and_what_did_not() -> None:
    counts = SchedulerCounts()
    counts.asked("a", 1000, 800)
    counts.load_started("a", range(200, 800))
    counts.load_ended("a", 801)  # the last token's KV came along
    counts.asked("b", 500, 500)
    counts.load_started("b", range(500))
    counts.load_ended("b", 256)
    counts.load_started("c", range(100))
    counts.load_cancelled("c")
    counts.load_ended("c", 0)
    counts.load_ended("never", 7)
    stats = counts.stats()
    assert (stats.num_asked_tokens, stats.num_matched_tokens) == (1500, 1300)
    assert (stats.num_loaded_tokens, stats.num_failed_loads) == (600 + 256, 1)
    assert stats.wait_seconds > 0
    assert counts.add_to(TransferStats(loaded_bytes=5)).loaded_bytes == 5


def test_a_request_that_waits_for_blocks_is_asked_for_once() -> None:
    counts = SchedulerCounts()
    for _ in range(50):
        counts.asked("first in the queue", 1000, 256)
    assert counts.stats().num_asked_tokens == 1000
    counts.asked("first in the queue", 1000, 512)
    counts.asked("another", 1000, 512)
    assert counts.stats().num_asked_tokens == 3000


@given(st.lists(st.floats(0, 20, allow_nan=False)))
def test_durations_fall_into_the_bucket_whose_bound_they_do_not_exceed(values: list[float]) -> None:
    bounds = (0.5, 1.0, 10.0)
    durations = Durations(bounds)
    for value in values:
        durations.add(value)
    at_most = [sum(value <= bound for value in values) for bound in bounds]
    total = durations.total
    assert [sum(total.counts[: i + 1]) for i in range(len(bounds))] == at_most
    assert sum(total.counts) == len(values)
    assert total.sum == pytest.approx(sum(values))
    assert durations.take() == values
    assert durations.take() == []
    assert durations.total == total


def test_durations_that_nobody_takes_do_not_grow() -> None:
    durations = Durations((1.0,))
    for number in range(MAX_RECENT + 10):
        durations.add(float(number))
    assert durations.take() == [float(number) for number in range(10, MAX_RECENT + 10)]
    assert sum(durations.total.counts) == MAX_RECENT + 10


def test_the_clock_keeps_what_ended_threads_used_and_counts_nothing_twice() -> None:
    clock = ThreadClock(every_s=0.0)
    before_s, least_s = clock.seconds(), 0.0
    for number in range(3):
        done, leave = threading.Event(), threading.Event()
        thread = threading.Thread(target=burn, args=(0.05, done, leave), name=f"headwater-test-{number}")
        thread.start()
        assert done.wait(60)
        least_s += 0.05
        wait_until(lambda: clock.seconds() - before_s >= least_s, 10, "the kernel has counted it")  # noqa: B023
        for _ in range(50):
            assert clock.seconds() - before_s >= least_s
        leave.set()
        thread.join(60)
        assert clock.seconds() - before_s >= least_s
    assert clock.seconds() - before_s < 1.0, "a thread that goes on is counted at every look"


def burn(seconds: float, done: threading.Event, leave: threading.Event) -> None:
    """Use so much processor time, then wait."""
    stop_s = time.thread_time() + 1.1 * seconds
    while time.thread_time() < stop_s:
        pass
    done.set()
    leave.wait(60)


def test_a_rank_counts_its_loads_and_saves() -> None:
    """A real pool and a real cache: what was saved is loaded into other blocks, and both are in the figures."""
    spec = gqa()
    shard = whole_shard(spec)
    with open_pool("memory://?capacity=8MiB") as pool:
        space = pool.space(identity(), spec, chunk_tokens=16)
        view, _ = cache_view(spec, shard, num_blocks=16, block_size=4, order=ORDERS[0])
        side = WorkerSide(space, view, shard, ConnectorConfig(pool="memory://"))
        try:
            chunks = tuple(space.keys([*range(1, 33)]).chunks())
            save = SaveOrder(TransferJob.of("a", chunks, np.arange(8, dtype=np.int32)))
            side.start_step(StepOrders(before=(save,)))
            assert side.drain(10)
            saved = side.stats().save_times
            times = side.take_times()
            assert times["load_times"] == []
            assert sum(saved.counts) == len(times["save_times"]) > 0
            assert saved.sum == pytest.approx(sum(times["save_times"]))
            side.start_step(StepOrders(before=(save,)))  # the pool has them: nothing is stored
            assert side.drain(10)
            assert side.take_times()["save_times"] == []
            load = LoadOrder(TransferJob.of("b", chunks, np.arange(8, 16, dtype=np.int32)))
            side.start_loads(StepOrders(loads=(load,)))
            wait_until(lambda: bool(side.take_report().ended), 10, "the load ends")
            stats = side.stats()
            assert stats.saved_bytes == stats.loaded_bytes == sum(spec.extent_bytes(c.num_tokens) for c in chunks)
            (seconds,) = side.take_times()["load_times"]
            assert sum(stats.load_times.counts) == 1
            assert stats.load_times.sum == seconds >= stats.load_seconds > 0
            assert stats.step_seconds > 0
        finally:
            side.close()


def test_a_fetch_is_counted_when_it_is_released(tmp_path: Path) -> None:
    """A real fetch, from a file into memory; one that has nothing to bring is not counted."""
    spec, counts = gqa(), SchedulerCounts()
    shard = whole_shard(spec)
    with open_pool(f"memory://?capacity=8MiB,file://{tmp_path}/below?capacity=8MiB") as pool:
        space = pool.space(identity(), spec, chunk_tokens=16)
        chunks = space.keys([*range(1, 33)]).chunks()
        space.write(chunks, shard, [local_tiles(spec, chunk, shard) for chunk in chunks])
        assert pool.flush(30)
        pool._store._front.clear(None)  # type: ignore[attr-defined]
        fetches = Fetches(30.0, counts.fetch_times.add)
        ticket, again = fetches.begin(space, chunks), fetches.begin(space, chunks)
        assert ticket is not None
        assert again is not None
        wait_until(lambda: ticket.is_over, 30, "the fetch ends")
        ticket.release()
        assert counts.take_times() == {"fetch_times": []}, "another request uses it"
        again.release()
        (seconds,) = counts.take_times()["fetch_times"]
        total = counts.stats().fetch_times
        assert total.sum == seconds > 0
        assert sum(total.counts) == 1
        pool._store._front.clear(None)  # type: ignore[attr-defined]
        orphan = fetches.begin(space, chunks[1:])  # without its parent it cannot be kept
        assert orphan is not None
        orphan.release()
        assert counts.stats().fetch_times == total
