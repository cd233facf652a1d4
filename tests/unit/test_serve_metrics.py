"""The /metrics page of `headwater serve`: what Prometheus reads there is what was counted."""

from __future__ import annotations

import pytest

pytest.importorskip("msgspec")
pytest.importorskip("prometheus_client")

from prometheus_client import REGISTRY
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from headwater.connector.metrics import POOL_METRICS, distributions, snapshot
from headwater.connector.stats import TRANSFER_BUCKETS_S, Durations, TransferStats
from headwater.serve.messages import Stats, decode_from_engine, encode
from headwater.serve.metrics import ENGINE_METRICS, EXPERT_ROWS, SERVER_METRICS, ServerMetrics
from headwater.stores.stats import StoreStats, TierStats

from metric_cases import STORE, TIMES, TRANSFER, samples, shown_name

FACTS = {"version": "1", "model": 'a "quoted"\n\\name'}


def page(metrics: ServerMetrics) -> dict[str, float]:
    return samples(metrics.render()[0].decode())


def sent(stats: Stats) -> Stats:
    """As it arrives from the engine process."""
    arrived = decode_from_engine(encode(stats)[4:])
    assert isinstance(arrived, Stats)
    return arrived


def test_the_page_has_exactly_what_is_declared_and_documented() -> None:
    metrics = ServerMetrics(Stats, FACTS)
    families = {family.name: family for family in text_string_to_metric_families(metrics.render()[0].decode())}
    declared = {shown_name(metric): metric for metric in (*ENGINE_METRICS, EXPERT_ROWS, *POOL_METRICS, *SERVER_METRICS)}
    # With labels, a counter has a moment of creation only when it is first counted.
    created = {name for name in families if name.endswith("_created")}
    assert families.keys() - created == declared.keys()
    for name, metric in declared.items():
        assert (families[name].type, families[name].documentation) == (metric.kind, metric.help)


@pytest.mark.parametrize("version", ["a", "1.x", "\xb2", "", "0.0.1", "99.0.0", "1.0.0, x"])
@pytest.mark.parametrize("kind", ["application/openmetrics-text", "text/plain"])
def test_no_accept_breaks_the_page_or_gets_into_the_answer(kind: str, version: str) -> None:
    page, content_type = ServerMetrics(Stats, FACTS).render(f"{kind};version={version};escaping=x")
    assert page
    assert content_type.split(";")[0] == kind
    assert "version=0.0.4" in content_type or "version=1.0.0" in content_type


def test_both_formats_can_be_read_and_say_the_same() -> None:
    metrics = ServerMetrics(lambda: Stats(num_pages=3, pool=snapshot(TRANSFER, STORE)), FACTS)
    metrics.http_requests.labels("/health", "200").inc()
    metrics.first_token_s.observe(0.3)
    plain, plain_type = metrics.render("text/html,*/*")
    other, other_type = metrics.render("application/openmetrics-text;version=1.0.0,text/plain;q=0.5")
    assert plain_type.startswith("text/plain; version=0.0.4")
    assert other_type.startswith("application/openmetrics-text; version=1.0.0")
    found = samples(other.decode(), parse_openmetrics)
    for name, value in samples(plain.decode()).items():
        if "_created" not in name:
            assert found[name] == value
    facts = next(f for f in text_string_to_metric_families(plain.decode()) if f.name == "headwater_server_info")
    assert facts.samples[0].labels == FACTS


def test_readings_follow_the_engine() -> None:
    stats = Stats()
    metrics = ServerMetrics(lambda: stats, {})
    stats = Stats(num_running=2, num_preemptions=5, num_steps=7, num_draft_tokens=9, num_accepted_tokens=4)
    assert page(metrics)["headwater_requests_running"] == 2
    assert page(metrics)["headwater_preemptions_total"] == 5
    assert page(metrics)["headwater_engine_steps_total"] == 7
    assert page(metrics)["headwater_draft_tokens_total"] == 9
    assert page(metrics)["headwater_accepted_draft_tokens_total"] == 4


def test_every_figure_of_the_engine_is_on_the_page() -> None:
    apart = ("pool", "pool_times", "num_generated_tokens", "expert_rows")
    fields = [name for name in Stats.__struct_fields__ if name not in apart]
    assert {metric.field for metric in ENGINE_METRICS} == set(fields)
    shown = page(ServerMetrics(lambda: Stats(**{name: i for i, name in enumerate(fields, 1)}), {}))
    for metric in ENGINE_METRICS:
        assert shown[metric.name] == fields.index(metric.field) + 1


def test_rows_of_experts_are_on_the_page_by_layer_and_expert() -> None:
    stats = sent(Stats(expert_rows={1: [5, 0, 2**40], 3: [7, 8, 9]}))
    shown = page(ServerMetrics(lambda: stats, {}))
    assert shown['headwater_expert_rows_total{expert="0",layer="1"}'] == 5
    assert shown['headwater_expert_rows_total{expert="2",layer="1"}'] == 2**40
    assert shown['headwater_expert_rows_total{expert="1",layer="3"}'] == 8
    assert len([name for name in shown if name.startswith("headwater_expert_rows_total")]) == 6


def test_every_figure_of_the_pool_is_on_the_page() -> None:
    stats = sent(Stats(pool=snapshot(TRANSFER, STORE), pool_times=distributions(TRANSFER)))
    shown = page(ServerMetrics(lambda: stats, {}))
    assert shown["headwater_pool_dropped_chunks_total"] == TRANSFER.num_dropped
    assert shown["headwater_pool_wait_seconds_total"] == TRANSFER.wait_seconds
    assert shown["headwater_store_used_bytes"] == STORE.used_bytes
    assert shown["headwater_store_evicted_total"] == STORE.evicted
    for field, times in TIMES.items():
        name = f"headwater_pool_{field.removesuffix('_times')}_duration_seconds"
        assert shown[f"{name}_count"] == len(times)
        assert shown[f"{name}_sum"] == pytest.approx(sum(times))
    near, away = STORE.tiers
    for tier in (near, away):
        label = f'{{tier="{tier.name}"}}'
        assert shown[f"headwater_tier_hits_total{label}"] == tier.hits
        assert shown[f"headwater_tier_waiting_chunks{label}"] == tier.waiting
        assert shown[f"headwater_tier_damaged_total{label}"] == tier.damaged
        assert shown[f"headwater_tier_breaker_open{label}"] == (tier is away)
    names = {name.partition("{")[0] for name in shown}
    for metric in POOL_METRICS:
        assert metric.name in names or f"{metric.name}_count" in names


def test_without_a_pool_nothing_is_said_of_a_store() -> None:
    shown = page(ServerMetrics(lambda: Stats(pool=snapshot(TransferStats(), None)), {}))
    assert shown["headwater_pool_loaded_bytes_total"] == 0
    assert not [name for name in shown if name.startswith(("headwater_store", "headwater_tier"))]


def test_a_pool_of_one_tier_has_no_samples_by_tier() -> None:
    alone = StoreStats("shm:///a", *range(1, 15))
    shown = page(ServerMetrics(lambda: Stats(pool=snapshot(TransferStats(), alone)), {}))
    assert shown["headwater_store_capacity_bytes"] == 1
    assert not [name for name in shown if name.startswith("headwater_tier")]


def test_a_histogram_of_the_engine_process_counts_what_is_at_most_each_bound() -> None:
    times = Durations(TRANSFER_BUCKETS_S)
    for seconds in (0.001, 0.002, 0.1, 0.1, 99.0):
        times.add(seconds)
    stats = sent(Stats(pool_times=distributions(TransferStats(load_times=times.total))))
    shown = page(ServerMetrics(lambda: stats, {}))
    name = "headwater_pool_load_duration_seconds"
    for bound, count in {"0.001": 1, "0.0025": 2, "0.05": 2, "0.1": 4, "10.0": 4, "+Inf": 5}.items():
        assert shown[f'{name}_bucket{{le="{bound}"}}'] == count
    assert shown[f"{name}_count"] == 5
    assert shown[f"{name}_sum"] == pytest.approx(99.203)


def test_two_servers_of_one_process_count_for_themselves() -> None:
    one, other = ServerMetrics(Stats, {}), ServerMetrics(Stats, {})
    one.generated_tokens.inc(3)
    assert page(one)["headwater_generated_tokens_total"] == 3
    assert page(other)["headwater_generated_tokens_total"] == 0
    assert not [family.name for family in REGISTRY.collect() if family.name.startswith("headwater")]


def test_urls_of_tiers_are_escaped() -> None:
    odd = 'file:///a"b\\c'
    store = StoreStats("shm:///a", *range(1, 15), tiers=(TierStats(odd, "back", hits=4),))
    text = ServerMetrics(lambda: Stats(pool=snapshot(TransferStats(), store)), {}).render()[0].decode()
    hits = next(f for f in text_string_to_metric_families(text) if f.name == "headwater_tier_hits")
    assert [(sample.labels["tier"], sample.value) for sample in hits.samples] == [(odd, 4.0)]
