"""The /metrics page of `headwater serve`, in a registry of its own: several servers may live in one process.

The server counts its requests itself. Everything else is read from the engine's last snapshot: the engine's own
figures, which are declared here, and those of its pool, which `headwater.connector.metrics` declares for all engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client import Metric as Family
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.registry import Collector

from headwater.connector.metrics import PEER_METRICS, Kind, Metric, Source, peer_values
from headwater.serve.families import family, pool_families, render
from headwater.serve.messages import Stats
from headwater.serve.peers import NO_PEERS, Peers

FIRST_TOKEN_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
INTER_TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
REQUEST_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


def _engine(name: str, kind: Kind, field: str, text: str) -> Metric:
    return Metric(f"headwater_{name}", kind, text, Source.ENGINE, field)


def _server(name: str, text: str, *labels: str, buckets: tuple[float, ...] = ()) -> Metric:
    return Metric(
        f"headwater_{name}",
        "histogram" if buckets else "counter",
        text,
        Source.SERVER,
        labels=labels,
        buckets=buckets,
    )


ENGINE_METRICS = (
    _engine("requests_running", "gauge", "num_running", "Sequences that the engine is computing."),
    _engine("requests_waiting", "gauge", "num_waiting", "Sequences waiting in the queue."),
    _engine("kv_pages", "gauge", "num_pages", "Pages of the KV cache."),
    _engine("kv_pages_used", "gauge", "num_used_pages", "Pages used by running sequences."),
    _engine("kv_pages_cached", "gauge", "num_cached_pages", "Pages held only by the prefix cache."),
    _engine("preemptions_total", "counter", "num_preemptions", "Sequences preempted to free pages."),
    _engine(
        "prefix_cache_queried_tokens_total",
        "counter",
        "num_prompt_tokens",
        "Prompt tokens looked up in the engine's prefix cache and in the pool.",
    ),
    _engine(
        "prefix_cache_hit_tokens_total",
        "counter",
        "num_cached_tokens",
        "Prompt tokens found in the prefix cache or loaded from the pool.",
    ),
    _engine("engine_steps_total", "counter", "num_steps", "Steps of the engine."),
    _engine("draft_tokens_total", "counter", "num_draft_tokens", "Tokens drafted by speculative decoding."),
    _engine("accepted_draft_tokens_total", "counter", "num_accepted_tokens", "Drafted tokens that were right."),
)
EXPERT_ROWS = Metric(
    "headwater_expert_rows_total",
    "counter",
    "Tokens routed to each expert of each sparse layer; no samples for a dense model.",
    Source.ENGINE,
    "expert_rows",
    labels=("layer", "expert"),
)
HTTP_REQUESTS = _server(
    "http_requests_total",
    "HTTP requests. Status 499: the client disconnected before the answer.",
    *("path", "status"),
)
SEQUENCES = _server(
    "sequences_total",
    "Generated sequences by outcome: stop, length, abort (the client disconnected) or error.",
    "outcome",
)
PROMPT_TOKENS = _server("prompt_tokens_total", "Prompt tokens of requests that were started, as reported in usage.")
CACHED_TOKENS = _server("cached_prompt_tokens_total", "Prompt tokens whose KV was cached, as reported in usage.")
GENERATED_TOKENS = _server("generated_tokens_total", "Generated tokens.")
FIRST_TOKEN = _server(
    "time_to_first_token_seconds", "Time from a request's arrival to its first token.", buckets=FIRST_TOKEN_BUCKETS_S
)
INTER_TOKEN = _server(
    "inter_token_seconds", "Time between one token of a sequence and the next.", buckets=INTER_TOKEN_BUCKETS_S
)
SEQUENCE = _server(
    "sequence_seconds", "Time from a request's arrival to the end of a sequence.", buckets=REQUEST_BUCKETS_S
)
ENGINE_SILENT = Metric(
    "headwater_engine_silent_seconds", "gauge", "Time since the engine's last heartbeat.", Source.SERVER
)
SERVER_INFO = Metric(
    "headwater_server_info",
    "gauge",
    "Version and model of the server; always 1.",
    Source.SERVER,
    labels=("version", "model"),
)
SERVER_METRICS = (
    HTTP_REQUESTS,
    SEQUENCES,
    PROMPT_TOKENS,
    CACHED_TOKENS,
    GENERATED_TOKENS,
    FIRST_TOKEN,
    INTER_TOKEN,
    SEQUENCE,
    ENGINE_SILENT,
    SERVER_INFO,
    *PEER_METRICS,
)
"""What the server counts itself, and what its receiver says."""


class ServerMetrics:
    """Everything on the page. `stats` gives the engine's last snapshot, `silent_s` the age of its last sign of life;
    `facts` say what is running."""

    def __init__(
        self,
        stats: Callable[[], Stats],
        facts: dict[str, str],
        silent_s: Callable[[], float] = lambda: 0.0,
        peers: Peers = NO_PEERS,
    ) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Snapshot(stats, peers))
        Info(SERVER_INFO.name.removesuffix("_info"), SERVER_INFO.help, registry=self._registry).info(facts)
        Gauge(ENGINE_SILENT.name, ENGINE_SILENT.help, registry=self._registry).set_function(silent_s)
        self.http_requests = self._counter(HTTP_REQUESTS)
        self.sequences = self._counter(SEQUENCES)
        self.prompt_tokens = self._counter(PROMPT_TOKENS)
        self.cached_tokens = self._counter(CACHED_TOKENS)
        self.generated_tokens = self._counter(GENERATED_TOKENS)
        self.first_token_s = self._histogram(FIRST_TOKEN)
        self.inter_token_s = self._histogram(INTER_TOKEN)
        self.sequence_s = self._histogram(SEQUENCE)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The page and its content type: OpenMetrics for those who accept it, else Prometheus' text format."""
        return render(self._registry, accept)

    def _counter(self, metric: Metric) -> Counter:
        return Counter(metric.name, metric.help, metric.labels, registry=self._registry)

    def _histogram(self, metric: Metric) -> Histogram:
        return Histogram(metric.name, metric.help, metric.labels, buckets=metric.buckets, registry=self._registry)


class _Snapshot(Collector):
    """What the engine process counts: read when the page is made."""

    def __init__(self, stats: Callable[[], Stats], peers: Peers) -> None:
        self._stats = stats
        self._peers = peers

    def collect(self) -> Iterator[Family]:
        """One family for each declared metric; those of a store and its tiers are empty without a pool."""
        stats = self._stats()
        for metric in ENGINE_METRICS:
            yield family(metric, {"": getattr(stats, metric.field)})
        yield _expert_rows(stats.expert_rows)
        peers = peer_values(self._peers.stats, self._peers.num_restarts)
        for metric in PEER_METRICS:
            yield family(metric, peers[metric.name])
        yield from pool_families(stats.pool, stats.pool_times)


def _expert_rows(found: dict[int, list[int]]) -> Family:
    rows = CounterMetricFamily(EXPERT_ROWS.name, EXPERT_ROWS.help, labels=EXPERT_ROWS.labels)
    for layer, counts in found.items():
        for expert, count in enumerate(counts):
            rows.add_metric([str(layer), str(expert)], count)
    return rows
