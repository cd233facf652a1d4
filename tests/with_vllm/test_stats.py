"""Headwater's metrics on their way through vLLM's own classes: from several processes, over its wire, into its log and
its page. No engine is started."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, generate_latest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm, KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector, MultiKVConnectorStats
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from headwater.connector.metrics import PEER_METRICS, POOL_METRICS, Source, host_values, own_values
from headwater.connector.stats import TransferStats
from headwater.integrations.vllm import stats as stats_module
from headwater.integrations.vllm.connector import HeadwaterConnector
from headwater.integrations.vllm.stats import READ_EVERY_S, Differences, HeadwaterStats, PoolFigures, Reporter
from headwater.kv.topology import whole_shard
from headwater.pool.pool import Pool, open_pool
from headwater.stores.stats import StoreStats

from metric_cases import AWAY, NEAR, STORE, TIMES, TRANSFER, samples, shown_name
from support import WAIT_S, empty_tiles, gqa, identity, local_tiles, wait_until

LABELNAMES = ["model_name", "engine"]
ENGINES: dict[int, list[object]] = {0: ["m", "0"], 1: ["m", "1"]}
TRANSFER_CONFIG = KVTransferConfig(
    kv_connector="HeadwaterConnector", kv_connector_module_path="headwater.integrations.vllm", kv_role="kv_both"
)


@pytest.fixture
def prom() -> Iterator[KVConnectorProm]:
    """vLLM's own registration of a connector's metrics, for two engines."""
    yield KVConnectorProm(SimpleNamespace(kv_transfer_config=TRANSFER_CONFIG), LABELNAMES, ENGINES)
    stats_module._unregister()


class Fixed:
    """A pool whose figures are set."""

    def __init__(self, store: StoreStats) -> None:
        self.store = store
        self.num_reads = 0

    def stats(self) -> Any:
        self.num_reads += 1
        return SimpleNamespace(store=self.store)


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def page(engine: int = 0) -> dict[str, float]:
    """What /metrics shows of one engine, without vLLM's labels."""
    labels = {"model_name": "m", "engine": str(engine)}
    return samples(generate_latest(REGISTRY).decode(), only=labels, start="headwater_")


def wire(stats: KVConnectorStats) -> dict[str, Any]:
    """As it arrives where /metrics is answered."""
    sent = MsgpackEncoder().encode(SchedulerStats(kv_connector_stats=stats.to_dict()))
    arrived = MsgpackDecoder(SchedulerStats).decode(sent).kv_connector_stats
    assert arrived is not None
    return arrived


def all_of_an_engine() -> HeadwaterStats:
    """One step of two ranks and a scheduler, each in a process of its own, through vLLM's aggregation."""
    pools = [PoolFigures(Fixed(STORE)) for _ in range(3)]
    of_ranks = {field: TIMES[field] for field in ("load_times", "save_times")}
    ranks = [Reporter().worker(TRANSFER, of_ranks, pool) for pool in pools[:2]]
    outputs = [
        ModelRunnerOutput(
            req_ids=[], req_id_to_index={}, kv_connector_output=KVConnectorOutput(kv_connector_stats=pickled(rank))
        )
        for rank in ranks
    ]
    merged = KVOutputAggregator(expected_finished_count=2).aggregate(outputs, output_rank=0)
    assert merged is not None
    assert merged.kv_connector_output is not None
    workers = merged.kv_connector_output.kv_connector_stats
    scheduler = Reporter().scheduler(TRANSFER, {"fetch_times": TIMES["fetch_times"]}, pools[2])
    assert workers is not None
    assert scheduler is not None
    total = workers.aggregate(scheduler)
    assert isinstance(total, HeadwaterStats)
    return total


def pickled(stats: HeadwaterStats | None) -> Any:
    return pickle.loads(pickle.dumps(stats))


# ---- the page ---------------------------------------------------------------------------------------------------
def test_the_page_has_exactly_what_is_declared(prom: KVConnectorProm) -> None:
    families = {family.name: family for family in REGISTRY.collect() if family.name.startswith("headwater_")}
    declared = (*POOL_METRICS, *PEER_METRICS)
    assert families.keys() == {shown_name(metric) for metric in declared}
    for metric in declared:
        family = families[shown_name(metric)]
        assert (family.type, family.documentation) == (metric.kind, metric.help)
    for engine in ENGINES:
        names = {name.removesuffix("_count") for name in page(engine)}
        assert {metric.name for metric in POOL_METRICS if metric.starts_at_zero} <= names
        assert not [name for name in names if name.startswith(("headwater_store", "headwater_tier", "headwater_peer"))]


def test_what_all_processes_of_an_engine_report_is_on_its_page(prom: KVConnectorProm) -> None:
    prom.observe(wire(all_of_an_engine()), 1)
    shown = page(1)
    for metric in POOL_METRICS:
        match metric.source:
            case Source.WORKER | Source.SCHEDULER if metric.kind == "histogram":
                times = TIMES[metric.field] * (2 if metric.source is Source.WORKER else 1)
                assert shown[f"{metric.name}_count"] == len(times)
                assert shown[f"{metric.name}_sum"] == pytest.approx(sum(times))
            case Source.WORKER:
                assert shown[metric.name] == 2 * getattr(TRANSFER, metric.field)
            case Source.SCHEDULER:
                assert shown[metric.name] == getattr(TRANSFER, metric.field)
            case Source.STORE:
                assert shown[metric.name] == getattr(STORE, metric.field), "the host's figures were added up"
            case Source.TIER:
                for tier in (NEAR, AWAY):
                    value = getattr(tier, metric.field)
                    if not tier.shares(metric.field) and metric.name != "headwater_tier_breaker_open":
                        value *= 3
                    assert shown[f'{metric.name}{{tier="{tier.name}"}}'] == value, metric.name
    assert shown['headwater_pool_load_duration_seconds_bucket{le="0.0025"}'] == 2
    assert page(0)["headwater_pool_loaded_bytes_total"] == 0, "another engine's"


class FixedReceiver:
    """A receiver whose figures are set."""

    def __init__(self, **stats: float) -> None:
        self.stats: dict[str, Any] = {"address": "127.0.0.1:7700", **stats}
        self.num_restarts = 0


def test_what_a_receiver_says_is_on_the_page_and_begins_anew_with_it(prom: KVConnectorProm) -> None:
    clock, reporter = Clock(), Reporter()
    receiver = FixedReceiver(connections=2, pending_bytes=10, share_bytes=100, bytes=7)
    reporter.watch(receiver, clock)

    def step() -> None:
        clock.now_s += READ_EVERY_S
        report = reporter.scheduler(TransferStats(), {}, None)
        assert report is not None
        assert reporter.scheduler(TransferStats(), {}, None) is None, "at most once a second"
        prom.observe(wire(report), 0)

    step()
    shown = page()
    peers = {name: shown[name] for name in shown if name.startswith("headwater_peer") and "_created" not in name}
    assert peers == {
        "headwater_peer_connections": 2,
        "headwater_peer_pending_bytes": 10,
        "headwater_peer_share_bytes": 100,
        "headwater_peer_received_bytes_total": 7,
        "headwater_peer_received_chunks_total": 0,
        "headwater_peer_restarts_total": 0,
    }
    receiver.stats, receiver.num_restarts = {"connections": 0, "bytes": 5, "chunks_stored": 3}, 1
    step()
    shown = page()
    assert shown["headwater_peer_connections"] == 0
    assert shown["headwater_peer_received_bytes_total"] == 7 + 5
    assert shown["headwater_peer_received_chunks_total"] == 3
    assert shown["headwater_peer_restarts_total"] == 1


def test_gauges_are_what_was_said_last_by_each_process(prom: KVConnectorProm) -> None:
    name = "headwater_tier_waiting_chunks"
    prom.observe({name: {"redis://h": {"a": 5.0, "b": 2.0}}}, 0)
    prom.observe({name: {"redis://h": {"a": 1.0}}}, 0)
    assert page()[f'{name}{{tier="redis://h"}}'] == 3, "the first process has 1 now, the second still 2"
    name = "headwater_tier_breaker_open"
    prom.observe({name: {"redis://h": {"a": 1.0, "b": 0.0}}}, 0)
    assert page()[f'{name}{{tier="redis://h"}}'] == 1
    prom.observe({name: {"redis://h": {"a": 0.0}}}, 0)
    assert page()[f'{name}{{tier="redis://h"}}'] == 0


def test_another_engine_in_the_same_process_begins_anew(prom: KVConnectorProm) -> None:
    """vLLM makes room in the registry for its own names only."""
    prom.observe({"headwater_pool_saved_bytes_total": {"": 7.0}}, 0)
    assert page()["headwater_pool_saved_bytes_total"] == 7
    KVConnectorProm(SimpleNamespace(kv_transfer_config=TRANSFER_CONFIG), LABELNAMES, ENGINES)
    assert page()["headwater_pool_saved_bytes_total"] == 0


def test_inside_multiconnector_the_page_is_the_same() -> None:
    own = {name: getattr(TRANSFER_CONFIG, name) for name in ("kv_connector", "kv_connector_module_path", "kv_role")}
    outer = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={"connectors": [own]}
    )
    prom = KVConnectorProm(SimpleNamespace(kv_transfer_config=outer), LABELNAMES, ENGINES)
    try:
        step = MultiKVConnectorStats(data={"HeadwaterConnector": all_of_an_engine()})
        total = MultiConnector.build_kv_connector_stats(wire(step))
        assert total is not None
        prom.observe(total.to_dict(), 0)
        assert page()["headwater_pool_saved_bytes_total"] == 2 * TRANSFER.saved_bytes
        assert page()["headwater_store_used_bytes"] == STORE.used_bytes
    finally:
        stats_module._unregister()


# ---- adding up --------------------------------------------------------------------------------------------------
def test_intervals_add_up_and_gauges_do_not() -> None:
    one = HeadwaterStats(
        data={
            "headwater_pool_saved_bytes_total": {"": 5.0},
            "headwater_store_used_bytes": {"": {"a": 100.0}},
            "headwater_pool_load_duration_seconds": {"": [0.5]},
        }
    )
    later = HeadwaterStats(
        data={
            "headwater_pool_saved_bytes_total": {"": 6.0},
            "headwater_store_used_bytes": {"": {"a": 90.0}},
            "headwater_pool_load_duration_seconds": {"": [0.25]},
            "headwater_tier_hits_total": {"redis://h": 2.0},
        }
    )
    before = pickled(later)
    total = one.aggregate(later).aggregate(HeadwaterStats(data={"headwater_tier_hits_total": {"redis://h": 3.0}}))
    assert total.data == {
        "headwater_pool_saved_bytes_total": {"": 11.0},
        "headwater_store_used_bytes": {"": {"a": 90.0}},
        "headwater_pool_load_duration_seconds": {"": [0.5, 0.25]},
        "headwater_tier_hits_total": {"redis://h": 5.0},
    }
    assert later == before, "adding changed what was added"


def test_counters_that_begin_anew_lose_nothing() -> None:
    differences = Differences()
    assert differences.since({"x": {"": 5.0, "t": 1.0}}) == {"x": {"": 5.0, "t": 1.0}}
    assert differences.since({"x": {"": 5.0, "t": 4.0}}) == {"x": {"t": 3.0}}
    assert differences.since({"x": {"": 2.0, "t": 4.0}}) == {"x": {"": 2.0}}
    assert differences.since({"x": {"": 2.0, "t": 4.0}}) == {}
    first = Differences(shows_zero=True)
    assert first.since({"x": {"": 0.0}}) == {"x": {"": 0.0}}
    assert first.since({"x": {"": 0.0}}) == {}


def test_the_log_says_what_happened_in_short() -> None:
    logging = KVConnectorLogging(TRANSFER_CONFIG)
    said: list[str] = []
    for _ in range(2):
        logging.observe(wire(all_of_an_engine()))
    logging.log(lambda text, *values: said.append(text % values))
    (line,) = said
    parts = dict(part.rsplit("=", 1) for part in line.removeprefix("KV Transfer metrics: ").split(", "))
    assert parts["saved_bytes"] == str(4 * TRANSFER.saved_bytes)
    assert parts[f"tier_hits[{AWAY.name}]"] == str(6 * AWAY.hits)
    assert parts["store_fill"] == str(round(STORE.used_bytes / STORE.data_bytes, 3))
    assert float(parts["load_duration_seconds"]) == pytest.approx(0.151)
    assert not [name for name in parts if name.startswith("store_") and name != "store_fill"]


def test_nothing_is_said_where_nothing_happened() -> None:
    reporter = Reporter()
    assert reporter.worker(TransferStats(), {"load_times": []}, None) is None
    assert reporter.worker(TransferStats(saved_bytes=4), {}, None) is not None
    assert reporter.worker(TransferStats(saved_bytes=4), {}, None) is None


def test_whether_the_connector_is_up_is_told_when_it_changes(prom: KVConnectorProm) -> None:
    name, reporter = "headwater_connector_up", Reporter()
    assert name not in page(), "0 would be an alarm before the first step"
    for up in (1, 0):
        told = reporter.scheduler(TransferStats(is_up=up, num_asked_tokens=5), {}, None)
        assert told is not None
        prom.observe(wire(told), 0)
        assert page()[name] == up
        assert reporter.scheduler(TransferStats(is_up=up, num_asked_tokens=5), {}, None) is None, "a message each step"
    assert page()["headwater_pool_asked_tokens_total"] == 5


def test_a_connector_that_is_off_says_so(prom: KVConnectorProm) -> None:
    connector = HeadwaterConnector.__new__(HeadwaterConnector)
    vars(connector).update(_role=KVConnectorRole.SCHEDULER, _reporter=Reporter(), _member=None, _steps=None)
    told = connector.get_kv_connector_stats()
    assert told is not None
    prom.observe(wire(told), 0)
    assert page()["headwater_connector_up"] == 0
    assert connector.get_kv_connector_stats() is None, "once is enough"


# ---- the pool's own figures -------------------------------------------------------------------------------------
def test_the_pool_is_read_at_most_once_a_second() -> None:
    clock, pool = Clock(), Fixed(STORE)
    figures = PoolFigures(pool, clock)
    assert figures.take(host_wide=True)
    for _ in range(20):
        assert figures.take(host_wide=True) == {}
        assert figures.take(host_wide=False) == {}
        clock.now_s += READ_EVERY_S / 25
    assert pool.num_reads == 1
    clock.now_s += READ_EVERY_S
    again = figures.take(host_wide=True)
    assert pool.num_reads == 2
    assert all(isinstance(value, dict) for series in again.values() for value in series.values()), "gauges alone"


def test_both_sides_in_one_process_report_each_difference_once() -> None:
    """The worker's side may be the first to ask, and takes nothing from the scheduler's."""
    clock = Clock()
    figures = PoolFigures(Fixed(STORE), clock)
    own, host = figures.take(host_wide=False), figures.take(host_wide=True)
    assert series_of(own) == series_of(own_values(STORE))
    assert series_of(host) == series_of(host_values(STORE))


def series_of(found: dict[str, dict[str, Any]]) -> dict[str, set[str]]:
    return {name: set(series) for name, series in found.items()}


def test_a_pool_that_cannot_be_read_is_only_silent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    pool = open_pool(f"file://{tmp_path}/pool?capacity=4MiB")
    figures = PoolFigures(pool, clock)
    assert figures.take(host_wide=True)
    pool.close()
    for _ in range(3):
        clock.now_s += READ_EVERY_S
        assert figures.take(host_wide=True) == {}
    assert sum("are not reported any more" in record.message for record in caplog.records) == 1


def test_several_threads_report_each_difference_once(tmp_path: Path) -> None:
    """A real pool of two tiers, written while four threads ask for figures all the time."""
    url = f"file://{tmp_path}/a?capacity=8MiB&deadline=60,file://{tmp_path}/b?capacity=8MiB&deadline=60"
    clock, done, found, lock = Clock(), threading.Event(), HeadwaterStats(), threading.Lock()
    is_alone = list[bool]()

    def now() -> float:
        is_alone.append(figures._lock.locked())
        return clock()

    def ask(figures: PoolFigures, host_wide: bool) -> None:
        while not done.is_set():
            clock.now_s += READ_EVERY_S
            data = figures.take(host_wide=host_wide)
            with lock:
                found.aggregate(HeadwaterStats(data=data))

    with open_pool(url) as pool:
        figures = PoolFigures(pool, now)
        threads = [threading.Thread(target=ask, args=(figures, number == 0)) for number in range(4)]
        for thread in threads:
            thread.start()
        try:
            num_chunks = write_and_read(pool)
            assert pool.flush(WAIT_S)
            wait_until(lambda: pool.tiers()[1].stored == num_chunks, what="the copier counts")
        finally:
            done.set()
            for thread in threads:
                thread.join(60)
        clock.now_s += READ_EVERY_S
        found.aggregate(HeadwaterStats(data=figures.take(host_wide=True)))
        store = pool.stats().store
    assert all(is_alone), "two threads may find the same difference"
    assert found.data["headwater_tier_hits_total"] == {store.tiers[0].name: num_chunks, store.tiers[1].name: 0}
    assert found.data["headwater_tier_stored_total"] == {tier.name: num_chunks for tier in store.tiers}
    assert found.data["headwater_store_stored_total"] == {"": num_chunks}
    assert [*found.data["headwater_store_used_bytes"][""].values()] == [store.used_bytes]


def write_and_read(pool: Pool) -> int:
    """Some chunks, one after another."""
    spec = gqa()
    shard = whole_shard(spec)
    space = pool.space(identity(), spec, chunk_tokens=16)
    chunks = space.keys([*range(1, 16 * 12 + 1)]).chunks()
    for chunk in chunks:
        space.write([chunk], shard, [local_tiles(spec, chunk, shard)])
        space.read([chunk], shard, [empty_tiles(spec, chunk, shard)])
    return len(chunks)
