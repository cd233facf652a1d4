"""The one declaration of what Headwater shows to Prometheus about a pool, by every engine that uses one.

A metric is declared here once: its name, meaning and kind, and the field it is read from. `headwater serve` and the
connector for vLLM register what is declared and nothing else; docs/operations.md has the same table, which a test
compares. Nothing here imports `prometheus_client`: an engine without it can still be counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from headwater.connector.stats import TRANSFER_BUCKETS_S, Distribution, TransferStats
from headwater.stores.stats import StoreStats, TierStats

Kind = Literal["counter", "gauge", "histogram"]

Values = dict[str, dict[str, float]]
"""Numbers by the metric's name and by tier; the tier is empty where the metric has no such label."""


class Source(Enum):
    """Where a metric's numbers come from."""

    WORKER = "worker side"
    """`TransferStats`, by each rank."""
    SCHEDULER = "scheduler side"
    """`TransferStats`, by the one scheduler of an engine."""
    STORE = "store"
    """`StoreStats`: the first tier, whose figures all processes of a host share."""
    TIER = "tier"
    """`TierStats`, by each process that has the pool open."""
    ENGINE = "engine"
    """The reference engine's own state: only in `headwater serve`."""
    PEER = "receiver"
    """What the receiver of other servers' pushes says, where there is one."""
    SERVER = "server"
    """Requests as clients see them: only in `headwater serve`."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One family of samples."""

    name: str
    """As Prometheus shows it; a counter's ends in `_total`."""
    kind: Kind
    help: str
    source: Source
    field: str = ""
    """The attribute of the source's figures; empty where whoever counts adds to the metric itself."""
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    combine: Callable[[Iterable[float]], float] = sum
    """How the values of a gauge that several processes report make one."""

    @property
    def starts_at_zero(self) -> bool:
        """Whether it is shown before anything was reported. Of a store nothing is known until somebody has looked, nor
        whether a connector is up until it says so."""
        return self.kind != "gauge" and self.source in (Source.WORKER, Source.SCHEDULER)


def _worker(name: str, field: str, text: str) -> Metric:
    return Metric(f"headwater_pool_{name}_total", "counter", text, Source.WORKER, field)


def _scheduler(name: str, field: str, text: str) -> Metric:
    return Metric(f"headwater_pool_{name}_total", "counter", text, Source.SCHEDULER, field)


def _duration(what: str, source: Source, text: str) -> Metric:
    name = f"headwater_pool_{what}_duration_seconds"
    return Metric(name, "histogram", text, source, f"{what}_times", buckets=TRANSFER_BUCKETS_S)


def _store(field: str, kind: Kind, text: str) -> Metric:
    ending = "_total" if kind == "counter" else ""
    return Metric(f"headwater_store_{field}{ending}", kind, text, Source.STORE, field)


def _tier(field: str, text: str) -> Metric:
    return Metric(f"headwater_tier_{field}_total", "counter", text, Source.TIER, field, labels=("tier",))


POOL_METRICS: tuple[Metric, ...] = (
    Metric(
        "headwater_connector_up",
        "gauge",
        "1 while the engine uses its pool, 0 once the connector is off; the engine's log gives the reason.",
        Source.SCHEDULER,
        "is_up",
        combine=min,
    ),
    _scheduler("asked_tokens", "num_asked_tokens", "Prompt tokens looked up in the pool."),
    _scheduler("matched_tokens", "num_matched_tokens", "Tokens looked up that the pool had."),
    _scheduler(
        "loaded_tokens",
        "num_loaded_tokens",
        "Matched tokens that were loaded. The engine already had the others, or they arrived too late.",
    ),
    _scheduler(
        "failed_loads", "num_failed_loads", "Loads that returned less than was matched; the engine recomputes the rest."
    ),
    _scheduler(
        "late_fetches",
        "num_late_fetches",
        "Requests for which lower tiers brought fewer chunks than matched before load_deadline_s; the engine "
        "recomputes the rest.",
    ),
    _scheduler("expected_requests", "num_expected", "Requests that waited for KV from another server."),
    _scheduler("followed_loads", "num_followed", "Loads that began while their chunks were still being written."),
    _scheduler("given_up_requests", "num_given_up", "Expected requests whose KV did not arrive, or not completely."),
    _scheduler("wait_seconds", "wait_seconds", "Time that requests waited for their loads, summed over requests."),
    _worker("loaded_bytes", "loaded_bytes", "Bytes of KV loaded from the pool into the engine's cache."),
    _worker("saved_bytes", "saved_bytes", "Bytes of KV saved to the pool."),
    _worker("load_seconds", "load_seconds", "Time that load threads were busy."),
    _duration("load", Source.WORKER, "Time from the start of a load to its end, one sample per load and rank."),
    _duration(
        "save",
        Source.WORKER,
        "Time from the first copy out of the cache until a rank has stored its part, one sample per batch of chunks "
        "and rank.",
    ),
    _duration("fetch", Source.SCHEDULER, "Time of a fetch from lower tiers into the first tier."),
    _worker(
        "dropped_chunks",
        "num_dropped",
        "Saves of chunks that were dropped because staging was full, or the pool failed, was full or was cleared. "
        "Dropped chunks are retried.",
    ),
    _worker(
        "damaged_chunks", "num_damaged", "Chunks that failed verification when they were loaded, and were recomputed."
    ),
    _worker("pushed_bytes", "pushed_bytes", "Bytes of KV sent to other hosts."),
    _worker("pushed_chunks", "num_pushed", "Chunks sent completely to other hosts, or already there."),
    _worker(
        "dropped_pushes",
        "num_push_drops",
        "Chunks that were not sent to another host because it failed, had no room or was too slow.",
    ),
    _worker("step_seconds", "step_seconds", "Time that the thread that runs the model spent in the connector."),
    _worker("thread_seconds", "thread_seconds", "CPU time of Headwater's own threads."),
    _store("capacity_bytes", "gauge", "Capacity of the first tier, data and index together."),
    _store("data_bytes", "gauge", "Space for chunks in the first tier."),
    _store("used_bytes", "gauge", "Space for chunks that is in use."),
    _store("pending_bytes", "gauge", "Space in use by chunks that are still being written."),
    _store("index_bytes", "gauge", "Space for the index."),
    _store("index_used_bytes", "gauge", "Space for the index that is in use."),
    _store("chunks", "gauge", "Chunks that can be found."),
    _store("members", "gauge", "Processes of this host that have the store open."),
    _store("stored", "counter", "Chunks stored by all processes since the store was created."),
    _store("stored_bytes", "counter", "Bytes of chunks stored by all processes since the store was created."),
    _store("stored_raw_bytes", "counter", "What stored_bytes would be if nothing were packed."),
    _store("evicted", "counter", "Chunks evicted to make room."),
    _store("damaged", "counter", "Chunks that failed verification and were removed."),
    _store("aborted", "counter", "Chunks whose write was aborted."),
    _store("rebuilds", "counter", "Rebuilds of the index after a crash or damage."),
    _tier("hits", "Pieces (one rank's part of one chunk, or some layers of it) read from the tier."),
    _tier("hit_bytes", "Bytes read from the tier."),
    _tier("misses", "Pieces requested from the tier that were missing or too late."),
    _tier("fetched", "Chunks fetched from the tier into the first tier."),
    _tier("stored", "Chunks copied to the tier; for the first tier, chunks stored by all processes."),
    _tier("stored_bytes", "Bytes copied to the tier; for the first tier, bytes stored by all processes."),
    Metric(
        "headwater_tier_waiting_chunks",
        "gauge",
        "Chunks waiting to be copied; all lower tiers share one queue.",
        Source.TIER,
        "waiting",
        labels=("tier",),
    ),
    _tier("dropped", "Chunks that left the first tier before they were copied."),
    _tier("full", "Chunks for which the tier had no space."),
    _tier("failed", "Failed operations of the tier."),
    _tier("damaged", "Chunks of the tier that failed verification."),
    Metric(
        "headwater_tier_breaker_open",
        "gauge",
        "1 while the tier's circuit breaker is open and the tier is not used, otherwise 0.",
        Source.TIER,
        "is_breaker_open",
        labels=("tier",),
        combine=max,
    ),
    _tier("breaker_trips", "Times the circuit breaker opened."),
    _tier("heard", "Events of other hosts received through the tier."),
)
"""In the order in which they are shown."""


def _peer(name: str, kind: Kind, field: str, text: str) -> Metric:
    return Metric(f"headwater_peer_{name}", kind, text, Source.PEER, field)


PEER_METRICS: tuple[Metric, ...] = (
    _peer("connections", "gauge", "connections", "Connections from other servers to the receiver."),
    _peer("pending_bytes", "gauge", "pending_bytes", "Space that other servers have reserved and not yet written."),
    _peer("share_bytes", "gauge", "share_bytes", "Limit on the space reserved by other servers together."),
    _peer("received_bytes_total", "counter", "bytes", "Bytes of KV received from other servers."),
    _peer("received_chunks_total", "counter", "chunks_stored", "Chunks that other servers have completed in the pool."),
    _peer("restarts_total", "counter", "restarts", "Times the receiver died and was restarted."),
)
"""Figures of the receiver; but for the last one, counters begin anew when it is restarted."""

BY_NAME = {metric.name: metric for metric in (*POOL_METRICS, *PEER_METRICS)}
_NUMBERS = {
    source: [(m.name, m.field) for m in POOL_METRICS if m.source is source and m.kind != "histogram"]
    for source in Source
}


def transfer_values(stats: TransferStats, *sources: Source) -> Values:
    """What `TransferStats` says, of the given sources; histograms are not among it. Engines call it at every step."""
    return {name: {"": float(getattr(stats, field))} for source in sources for name, field in _NUMBERS[source]}


def distributions(stats: TransferStats) -> dict[str, Distribution]:
    """The histograms of `TransferStats`, by name."""
    return {metric.name: getattr(stats, metric.field) for metric in POOL_METRICS if metric.kind == "histogram"}


def snapshot(stats: TransferStats, store: StoreStats | None) -> Values:
    """All that one process knows which is rank, scheduler and only reader of its pool, counted since the start."""
    values = transfer_values(stats, Source.WORKER, Source.SCHEDULER)
    if store is None:  # no pool, and so nothing that could be up
        return {name: series for name, series in values.items() if BY_NAME[name].kind != "gauge"}
    return merge(values, own_values(store), host_values(store))


def own_values(store: StoreStats) -> Values:
    """Of a pool's figures: those that are this process's own."""
    return _tier_values(store.tiers, is_host_wide=False)


def host_values(store: StoreStats) -> Values:
    """Of a pool's figures: those that all processes of the host share, so that only one of them should report them."""
    own = {name: {"": float(getattr(store, field))} for name, field in _NUMBERS[Source.STORE]}
    return own | _tier_values(store.tiers, is_host_wide=True)


def peer_values(stats: Mapping[str, Any], num_restarts: int) -> Values:
    """What a receiver has said last, and how often it was started again."""
    said = {**stats, "restarts": num_restarts}
    return {metric.name: {"": float(said.get(metric.field, 0))} for metric in PEER_METRICS}


def merge(*parts: Values) -> Values:
    """All of them in one. No two say something of the same metric and tier."""
    merged: Values = {}
    for part in parts:
        for name, series in part.items():
            merged.setdefault(name, {}).update(series)
    return merged


def _tier_values(tiers: Sequence[TierStats], *, is_host_wide: bool) -> Values:
    found: Values = {}
    for name, field in _NUMBERS[Source.TIER]:
        if series := {t.name: float(getattr(t, field)) for t in tiers if is_host_wide == t.shares(field)}:
            found[name] = series
    return found
