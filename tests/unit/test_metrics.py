"""The one declaration of Headwater's metrics: complete, conventional, documented, and read from the right fields."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from headwater.connector.metrics import (
    POOL_METRICS,
    Metric,
    Source,
    host_values,
    merge,
    own_values,
    snapshot,
    transfer_values,
)
from headwater.connector.stats import TransferStats
from headwater.kv.topology import whole_shard
from headwater.pool.pool import open_pool
from headwater.stores.stats import StoreStats, TierStats

from metric_cases import AWAY, NEAR, STORE, TRANSFER
from support import empty_tiles, gqa, identity, local_tiles, wait_until

DOCS = Path(__file__).parents[2] / "docs"
FIGURES = {
    Source.WORKER: TransferStats,
    Source.SCHEDULER: TransferStats,
    Source.STORE: StoreStats,
    Source.TIER: TierStats,
}
WORDS = {
    "url": "the label",
    "write": "configuration",
    "breaker": "shown as is_breaker_open",
    "breaker_reason": "no number",
    "events": "configuration",
    "host_wide": "says what the other figures are",
    "tiers": "shown one by one",
}
"""Fields that are no metric, and why."""


# ---- the declaration --------------------------------------------------------------------------------------------
def test_every_figure_is_declared_once() -> None:
    declared = [(FIGURES[metric.source], metric.field) for metric in POOL_METRICS]
    assert len(set(declared)) == len(declared)
    for figures in set(FIGURES.values()):
        known = {field.name for field in fields(figures)} | {"is_breaker_open"}
        mine = {name for source, name in declared if source is figures}
        assert mine <= known
        missing = {field.name for field in fields(figures)} - mine - WORDS.keys()
        assert not missing, f"{figures.__name__} counts {missing}, and no metric shows them"


def test_names_follow_prometheus_conventions() -> None:
    assert len({metric.name for metric in POOL_METRICS}) == len(POOL_METRICS)
    for metric in POOL_METRICS:
        assert re.fullmatch(r"headwater_(connector|pool|store|tier)(_[a-z]+)+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert bool(metric.buckets) == (metric.kind == "histogram")
        assert metric.labels == (("tier",) if metric.source is Source.TIER else ())
        assert metric.help.endswith(".")
        for unit in ("seconds", "bytes"):
            assert (unit in metric.name) == (unit in metric.field) or metric.kind == "histogram"
        if metric.kind == "histogram":
            assert metric.name.endswith("_seconds")


def test_the_documented_table_of_the_pool_is_the_declaration() -> None:
    assert documented("operations.md") == [row(metric) for metric in POOL_METRICS]


def test_the_documented_table_of_the_server_is_its_declaration() -> None:
    pytest.importorskip("prometheus_client")
    from headwater.serve.metrics import ENGINE_METRICS, EXPERT_ROWS, SERVER_METRICS

    assert documented("serving.md") == [row(metric) for metric in (*ENGINE_METRICS, EXPERT_ROWS, *SERVER_METRICS)]


def row(metric: Metric) -> str:
    labels = f"{{{','.join(metric.labels)}}}" if metric.labels else ""
    return f"| `{metric.name}{labels}` | {metric.kind} | {metric.help} |"


def documented(page: str) -> list[str]:
    """The rows of a page's table of metrics."""
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    start = lines.index("| metric | kind | meaning |") + 2
    end = next(i for i in range(start, len(lines)) if not lines[i].startswith("|"))
    return lines[start:end]


# ---- reading it -------------------------------------------------------------------------------------------------
def test_each_figure_is_read_from_its_own_field() -> None:
    values = snapshot(TRANSFER, STORE)
    for metric in POOL_METRICS:
        match metric.source:
            case Source.WORKER | Source.SCHEDULER if metric.kind != "histogram":
                assert values[metric.name] == {"": getattr(TRANSFER, metric.field)}
            case Source.STORE:
                assert values[metric.name] == {"": getattr(STORE, metric.field)}
            case Source.TIER:
                assert values[metric.name] == {tier.name: getattr(tier, metric.field) for tier in (NEAR, AWAY)}
    assert values["headwater_tier_breaker_open"] == {NEAR.name: 0, AWAY.name: 1}


def test_both_sides_and_both_scopes_say_everything_once() -> None:
    """Ranks, the scheduler and one process of the host: nothing is left out, nothing is said twice."""
    parts = [
        transfer_values(TRANSFER, Source.WORKER),
        transfer_values(TRANSFER, Source.SCHEDULER),
        own_values(STORE),
        host_values(STORE),
    ]
    series = [(name, tier) for part in parts for name, by_tier in part.items() for tier in by_tier]
    assert len(set(series)) == len(series)
    assert merge(*parts) == snapshot(TRANSFER, STORE)
    assert AWAY.name not in host_values(STORE)["headwater_tier_damaged_total"], "each process counts these itself"


def test_two_processes_of_a_host_agree_on_what_is_the_hosts(tmp_path: Path) -> None:
    """Two pools on one pair of tiers stand for two processes: what the first did, only the first reports, except for
    what the store itself counts."""
    url = f"file://{tmp_path}/a?capacity=8MiB,file://{tmp_path}/b?capacity=8MiB"
    spec = gqa()
    shard = whole_shard(spec)
    with open_pool(url) as one, open_pool(url) as other:
        space = one.space(identity(), spec, chunk_tokens=16)
        chunks = space.keys([*range(1, 49)]).chunks()
        space.write(chunks, shard, [local_tiles(spec, chunk, shard) for chunk in chunks])
        space.read(chunks, shard, [empty_tiles(spec, chunk, shard) for chunk in chunks])
        assert one.flush() or other.flush()
        wait_until(lambda: sum(pool.tiers()[1].stored for pool in (one, other)) == 3, 10, "the copier counts")
        a, b = one.stats().store, other.stats().store
        hits = {tier.name: 3.0 if tier.write == "first" else 0.0 for tier in a.tiers}
        assert own_values(a)["headwater_tier_hits_total"] == hits
        assert set(own_values(b)["headwater_tier_hits_total"].values()) == {0.0}
        assert host_values(a)["headwater_store_stored_total"] == host_values(b)["headwater_store_stored_total"]
        assert host_values(a)["headwater_tier_stored_total"] == {a.tiers[0].name: 3.0}
        assert host_values(b)["headwater_tier_stored_total"] == {a.tiers[0].name: 3.0}
