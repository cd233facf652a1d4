"""The /metrics page: Prometheus' text format, counted right."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("msgspec")

from hypothesis import given
from hypothesis import strategies as st

from headwater.serve.messages import Stats, decode_from_engine, encode
from headwater.serve.metrics import Counter, Histogram, Info, ServerMetrics
from headwater.stores.stats import TierStats

SAMPLE = re.compile(r'^([a-z_]+)(\{([a-z]+="(?:[^"\\\n]|\\["\\n])*",?)+\})? (\+Inf|-?[0-9.e+-]+)$')


def test_every_line_of_the_page_is_a_comment_or_a_sample() -> None:
    metrics = ServerMetrics(lambda: Stats(num_pages=3), {"version": "1", "model": 'a "quoted"\n\\name'})
    metrics.http_requests.add(1, "/health", "200")
    metrics.sequences.add(1, "stop")
    metrics.first_token_s.observe(0.3)
    families = set()
    for line in metrics.render().decode().splitlines():
        if line.startswith("# TYPE "):
            families.add(line.split()[2])
        elif not line.startswith("# HELP "):
            match = SAMPLE.match(line)
            assert match, line
            assert re.sub(r"_(bucket|sum|count)$", "", match[1]) in families or match[1] in families
    assert b"headwater_kv_pages 3\n" in metrics.render()


def test_readings_follow_the_engine() -> None:
    stats = Stats()
    metrics = ServerMetrics(lambda: stats, {})
    stats = Stats(num_running=2, num_preemptions=5)
    assert b"headwater_requests_running 2\n" in metrics.render()
    assert b"headwater_preemptions_total 5\n" in metrics.render()


def test_everything_that_is_known_of_the_pool_is_on_the_page() -> None:
    names = [name for name in Stats.__struct_fields__ if name.startswith("pool_")]
    stats = Stats(**{name: number for number, name in enumerate(names, start=1)})
    page = ServerMetrics(lambda: stats, {}).render().decode()
    for number, name in enumerate(names, start=1):
        assert f"headwater_{name}_total {number}\n" in page


def test_each_tier_has_its_own_samples() -> None:
    names = {"hits": 2, "hit_bytes": 3, "stored_bytes": 4, "waiting": 5, "failed": 6, "damaged": 7, "breaker_trips": 8}
    near = TierStats("shm:///a", "first", **names)
    away = TierStats("redis://u:***@h", "back", **{name: 10 * n for name, n in names.items()}, breaker="open")
    stats = decode_from_engine(encode(Stats(tiers=(near, away)))[4:])
    assert isinstance(stats, Stats)
    page = ServerMetrics(lambda: stats, {}).render().decode()
    assert 'headwater_tier_usable{tier="shm:///a"} 1\n' in page
    assert 'headwater_tier_usable{tier="redis://u:***@h"} 0\n' in page
    for name, number in names.items():
        sample = "waiting_chunks" if name == "waiting" else f"{name}_total"
        assert f'headwater_tier_{sample}{{tier="shm:///a"}} {number}\n' in page
        assert f'headwater_tier_{sample}{{tier="redis://u:***@h"}} {10 * number}\n' in page
    assert "headwater_tier_usable{" not in ServerMetrics(Stats, {}).render().decode(), "a pool of one tier has none"


def test_labels_are_escaped() -> None:
    (*_, line) = Info("i", "h", {"a": 'x"\\\n'}).lines()
    assert line == 'i{a="x\\"\\\\\\n"} 1'


def test_counters_without_labels_begin_at_zero_and_with_labels_when_counted() -> None:
    assert list(Counter("c", "h").lines())[2:] == ["c 0"]
    counter = Counter("c", "h", ("l",))
    assert list(counter.lines())[2:] == []
    counter.add(1.5, "v")
    assert list(counter.lines())[2:] == ['c{l="v"} 1.5']


@given(st.lists(st.floats(0, 20, allow_nan=False)))
def test_a_histogram_counts_what_is_at_most_each_bound(values: list[float]) -> None:
    bounds = (0.5, 1.0, 10.0)
    histogram = Histogram("h", "h", bounds)
    for value in values:
        histogram.observe(value)
    lines = list(histogram.lines())[2:]
    expected = [sum(value <= bound for value in values) for bound in (*bounds, float("inf"))]
    assert [int(line.split()[1]) for line in lines[:4]] == expected
    assert lines[3].startswith('h_bucket{le="+Inf"}')
    assert lines[5] == f"h_count {len(values)}"
    assert float(lines[4].split()[1]) == pytest.approx(sum(values))
