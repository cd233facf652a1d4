"""From the declared metrics to the families of a /metrics page, for every server that has one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client import Metric as Family
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from headwater.connector.metrics import POOL_METRICS, Metric, Values
from headwater.connector.stats import Distribution

OPEN_METRICS = "application/openmetrics-text"


def render(registry: CollectorRegistry, accept: str = "") -> tuple[bytes, str]:
    """A page and its content type: OpenMetrics for those who accept it, else Prometheus' text format."""
    kinds = [item.partition(";")[0].strip() for item in accept.split(",")]
    # Its parser fails on versions that are no numbers, and repeats those that are.
    encode, content_type = choose_encoder(OPEN_METRICS if OPEN_METRICS in kinds else "")
    return encode(registry), content_type


def pool_families(values: Values, times: Mapping[str, Distribution]) -> Iterator[Family]:
    """One family for each metric of a pool; those of a store and its tiers are empty where nothing is known of them."""
    for metric in POOL_METRICS:
        if metric.kind == "histogram":
            yield histogram(metric, times.get(metric.name, Distribution()))
        else:
            nothing = {"": 0.0} if metric.starts_at_zero else {}
            yield family(metric, values.get(metric.name, nothing))


def family(metric: Metric, series: Mapping[str, float]) -> Family:
    """A counter or gauge, by the value of its only label (empty where it has none)."""
    make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    made = make(metric.name, metric.help, labels=metric.labels)
    for label, value in series.items():
        made.add_metric([label] if metric.labels else [], value)
    return made


def histogram(metric: Metric, found: Distribution) -> Family:
    """A histogram without labels."""
    counts = found.counts or (0,) * (len(metric.buckets) + 1)
    bounds = [*map(floatToGoString, metric.buckets), "+Inf"]
    made = HistogramMetricFamily(metric.name, metric.help)
    made.add_metric([], [*zip(bounds, map(float, accumulate(counts)), strict=True)], found.sum)
    return made
