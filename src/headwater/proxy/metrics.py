"""The /metrics page of the proxy and the router, in a registry of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client import Metric as Family
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from headwater.proxy.choice import Router
from headwater.proxy.fleet import Fleet, Server
from headwater.serve.families import render

FIRST_BYTE_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
DECISION_BUCKETS_S = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05)


class Row(NamedTuple):
    """One metric, as it is declared and documented."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()


REQUESTS = Row(
    "headwater_proxy_requests_total",
    "counter",
    "Requests of clients. Status 499: the client left before an answer.",
    ("path", "status"),
)
LEGS = Row(
    "headwater_proxy_upstream_requests_total",
    "counter",
    "Requests to servers, by how they ended: ok, status (an error status), failed (no usable reply), broken (ended in "
    "the middle), cancelled (the client left, or nobody needed it any more).",
    ("server", "role", "outcome"),
)
RETRIES = Row(
    "headwater_proxy_retries_total", "counter", "Requests that were sent to another decode server, before a first byte."
)
PREFILLS = Row(
    "headwater_proxy_prefill_total",
    "counter",
    "Prompts by where they were prefilled: remote, short (little was uncached on the decode server), no_peer (it "
    "receives no KV), no_server (no prefill server is up), many (several prompts in one request).",
    ("decision",),
)
PROMPT_TOKENS = Row(
    "headwater_proxy_prompt_tokens_total", "counter", "Tokens of prompts, estimated where there is no tokenizer."
)
EXPECTED_TOKENS = Row(
    "headwater_proxy_expected_cached_tokens_total",
    "counter",
    "Of the prompt tokens: those that the index expected on the chosen decode server.",
)
FIRST_BYTE = Row("headwater_proxy_first_byte_seconds", "histogram", "From a request's arrival to its first byte.")
DECISION = Row("headwater_proxy_decision_seconds", "histogram", "Hashing a prompt and choosing a server.")
COUNTED = (REQUESTS, LEGS, RETRIES, PREFILLS, PROMPT_TOKENS, EXPECTED_TOKENS, FIRST_BYTE, DECISION)

SERVER_UP = Row("headwater_proxy_server_up", "gauge", "1 if the server answers its checks.", ("server", "role"))
SERVER_DRAINING = Row("headwater_proxy_server_draining", "gauge", "1 if the server is drained.", ("server", "role"))
SERVER_REQUESTS = Row(
    "headwater_proxy_server_requests", "gauge", "Requests that the server has not finished.", ("server", "role")
)
SERVER_TOKENS = Row(
    "headwater_proxy_server_queued_tokens",
    "gauge",
    "Uncached prompt tokens that it was sent and has not answered yet.",
    ("server", "role"),
)
INDEX_BLOCKS = Row(
    "headwater_proxy_index_blocks",
    "gauge",
    "Blocks of prompts in the index, from events or history.",
    ("source",),
)
INDEX_DROPPED = Row(
    "headwater_proxy_index_dropped_total", "counter", "Blocks of events that found no room in the index."
)
SNAPSHOT = (SERVER_UP, SERVER_DRAINING, SERVER_REQUESTS, SERVER_TOKENS, INDEX_BLOCKS, INDEX_DROPPED)


class ProxyMetrics:
    """Everything on the page."""

    def __init__(self, fleet: Fleet, router: Router) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Snapshot(fleet, router))
        self.requests = self._counter(REQUESTS)
        self.legs = self._counter(LEGS)
        self.retries = self._counter(RETRIES)
        self.prefills = self._counter(PREFILLS)
        self.prompt_tokens = self._counter(PROMPT_TOKENS)
        self.expected_tokens = self._counter(EXPECTED_TOKENS)
        self.first_byte_s = self._histogram(FIRST_BYTE, FIRST_BYTE_BUCKETS_S)
        self.decision_s = self._histogram(DECISION, DECISION_BUCKETS_S)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The page and its content type: OpenMetrics for those who accept it, else Prometheus' text format."""
        return render(self._registry, accept)

    def _counter(self, row: Row) -> Counter:
        return Counter(row.name, row.help, row.labels, registry=self._registry)

    def _histogram(self, row: Row, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(row.name, row.help, row.labels, buckets=buckets, registry=self._registry)


class _Snapshot(Collector):
    """What is true now: read when the page is made."""

    def __init__(self, fleet: Fleet, router: Router) -> None:
        self._fleet = fleet
        self._router = router

    def collect(self) -> Iterator[Family]:
        """One family for each declared metric."""
        servers = self._fleet.servers
        yield _by_server(SERVER_UP, servers, [server.is_up for server in servers])
        yield _by_server(SERVER_DRAINING, servers, [server.is_draining for server in servers])
        yield _by_server(SERVER_REQUESTS, servers, [server.num_in_flight for server in servers])
        yield _by_server(SERVER_TOKENS, servers, [server.queued_tokens for server in servers])
        blocks = GaugeMetricFamily(INDEX_BLOCKS.name, INDEX_BLOCKS.help, labels=INDEX_BLOCKS.labels)
        blocks.add_metric(["events"], float(len(self._router.table.masks)))
        blocks.add_metric(["history"], float(len(self._router.sent) + len(self._router.recent)))
        yield blocks
        dropped = CounterMetricFamily(INDEX_DROPPED.name, INDEX_DROPPED.help)
        dropped.add_metric([], float(self._router.table.num_dropped))
        yield dropped


def _by_server(row: Row, servers: Sequence[Server], values: Sequence[float]) -> Family:
    family = GaugeMetricFamily(row.name, row.help, labels=row.labels)
    for server, value in zip(servers, values, strict=True):
        family.add_metric([server.name, server.role.value], float(value))
    return family
