"""What tests of metrics share: figures in which no two numbers are alike, and reading a page of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from headwater.connector.metrics import Metric
from headwater.connector.stats import TRANSFER_BUCKETS_S, Distribution, Durations, TransferStats
from headwater.stores.stats import StoreStats, TierStats

TIMES = {"load_times": [0.002, 0.3], "save_times": [0.02, 0.04, 0.06], "fetch_times": [0.5]}
"""Seconds one by one, as an engine's processes report them."""


def _spread(field: str) -> Distribution:
    durations = Durations(TRANSFER_BUCKETS_S)
    for seconds in TIMES[field]:
        durations.add(seconds)
    return durations.total


TRANSFER = TransferStats(
    loaded_bytes=101,
    saved_bytes=102,
    load_seconds=103.5,
    load_times=_spread("load_times"),
    save_times=_spread("save_times"),
    num_dropped=104,
    num_damaged=105,
    step_seconds=106.5,
    thread_seconds=107.5,
    num_asked_tokens=108,
    num_matched_tokens=109,
    num_loaded_tokens=110,
    num_failed_loads=111,
    num_late_fetches=113,
    wait_seconds=112.5,
    fetch_times=_spread("fetch_times"),
    is_up=1,
)
NEAR = TierStats(
    "shm:///near",
    "first",
    hits=201,
    hit_bytes=202,
    misses=203,
    stored=204,
    stored_bytes=205,
    damaged=206,
    host_wide=("stored", "stored_bytes", "damaged"),
)
AWAY = TierStats(
    "redis://***@away:6379/0?ttl=60",
    "back",
    hits=301,
    hit_bytes=302,
    misses=303,
    fetched=304,
    stored=305,
    stored_bytes=306,
    waiting=307,
    dropped=308,
    full=309,
    failed=310,
    damaged=311,
    breaker="open",
    breaker_trips=312,
    heard=313,
)
STORE = StoreStats(
    url="shm:///near",
    capacity_bytes=401,
    data_bytes=402,
    used_bytes=403,
    pending_bytes=404,
    index_bytes=405,
    index_used_bytes=406,
    chunks=407,
    members=408,
    stored=204,
    stored_bytes=205,
    evicted=409,
    damaged=206,
    aborted=410,
    rebuilds=411,
    tiers=(NEAR, AWAY),
)


def samples(
    page: str,
    parse: Callable[[str], Iterable[Any]] = text_string_to_metric_families,
    *,
    only: Mapping[str, str] = MappingProxyType({}),
    start: str = "",
) -> dict[str, float]:
    """Every sample of a page as `name{label="value"}`; those that have the labels of `only`, without them."""
    found = {}
    for family in parse(page):
        for sample in family.samples:
            if not sample.name.startswith(start) or not only.items() <= sample.labels.items():
                continue
            labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items() if name not in only)
            name = f"{sample.name}{{{labels}}}" if labels else sample.name
            assert name not in found, f"{name} is there twice"
            found[name] = sample.value
    return found


def shown_name(metric: Metric) -> str:
    """The family's name as the parser of Prometheus' text format gives it."""
    return metric.name.removesuffix("_total")
