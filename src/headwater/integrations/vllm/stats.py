"""Headwater's metrics in vLLM: counters travel as differences, gauges as values, durations one by one.

vLLM carries them from every process of an engine to the one that answers /metrics, with the outputs of each step; so
they stand still while an engine is idle. The metrics themselves are declared in `headwater.connector.metrics`.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from headwater.connector.metrics import (
    BY_NAME,
    PEER_METRICS,
    POOL_METRICS,
    Kind,
    Metric,
    Source,
    Values,
    host_values,
    merge,
    own_values,
    peer_values,
    transfer_values,
)
from headwater.connector.stats import Times, TransferStats
from headwater.integrations.vllm.declined import LOGGER
from headwater.pool.pool import Pool

log = logging.getLogger(LOGGER)

READ_EVERY_S = 1.0
"""How often the pool's own figures are read: that takes some 50 µs, in a thread that everybody waits for."""

Data = dict[str, dict[str, Any]]
"""By metric and tier: a counter's increase; a gauge's values, by the process that says so; a histogram's durations."""

_HISTOGRAMS = {metric.field: metric.name for metric in POOL_METRICS if metric.kind == "histogram"}
_LOGGED = (Source.WORKER, Source.SCHEDULER, Source.TIER)
"""Of the store, vLLM's log says how full it is and no more."""


@dataclass
class HeadwaterStats(KVConnectorStats):
    """What happened in some interval, in some processes of one engine."""

    data: Data = field(default_factory=dict)

    def reset(self) -> None:
        """Begin again."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another process's, or a later interval's: counters add up, and of each process the last gauge stays."""
        for name, series in other.data.items():
            mine = self.data.setdefault(name, {})
            for tier, value in series.items():
                match BY_NAME[name].kind:
                    case "counter":
                        mine[tier] = mine.get(tier, 0) + value
                    case "gauge":
                        mine[tier] = mine.get(tier, {}) | value
                    case "histogram":
                        mine[tier] = [*mine.get(tier, ()), *value]
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log: what is not 0, by its short name."""
        found: dict[str, int | float] = {}
        for metric in POOL_METRICS:
            for tier, value in self.data.get(metric.name, {}).items() if metric.source in _LOGGED else ():
                match metric.kind:
                    case "counter":
                        number = value
                    case "gauge":
                        number = metric.combine(value.values())
                    case "histogram":
                        number = sum(value) / len(value)
                if number:
                    short = metric.name.removeprefix("headwater_").removeprefix("pool_").removesuffix("_total")
                    found[f"{short}[{tier}]" if tier else short] = (
                        int(number) if number == int(number) else round(number, 3)
                    )
        used, room = (self._gauge(f"headwater_store_{name}_bytes") for name in ("used", "data"))
        if room:
            found["store_fill"] = round(used / room, 3)
        return found

    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not self.data

    def _gauge(self, name: str) -> float:
        return BY_NAME[name].combine(self.data.get(name, {}).get("", {}).values())


class Differences:
    """Turns counts since the start into what was added since the last call."""

    def __init__(self, *, shows_zero: bool = False) -> None:
        """`shows_zero`: a series is in the first answer even where nothing was counted."""
        self._before: Values = {}
        self._shows_zero = shows_zero

    def since(self, now: Values) -> Data:
        """What has been added; series to which nothing was are left out."""
        added: Data = {}
        for name, series in now.items():
            before = self._before.setdefault(name, {})
            for tier, value in series.items():
                # Counts may begin anew: with a new epoch, and in a store whose index was destroyed.
                old = before.get(tier, 0.0)
                more = value - old if value >= old else value
                if more or (self._shows_zero and tier not in before):
                    added.setdefault(name, {})[tier] = more
                before[tier] = value
        return added


class PoolFigures:
    """What one process has to report of its pool: each difference once, whichever side of the connector asks, and at
    most once a second. Thread-safe."""

    def __init__(self, pool: Pool, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool = pool
        self._clock = clock
        self._name = secrets.token_hex(4)
        """Of this process: gauges of several processes must be told apart."""
        self._next_s = {False: 0.0, True: 0.0}
        self._differences = Differences(shows_zero=True)
        self._lock = threading.Lock()
        self._is_broken = False

    def take(self, *, host_wide: bool) -> Data:
        """Figures of this process; with `host_wide`, which one process of an engine asks for, those of the host."""
        with self._lock:
            now = self._clock()
            due = [kind for kind in ((False, True) if host_wide else (False,)) if now >= self._next_s[kind]]
            if not due or self._is_broken:
                return {}
            self._next_s |= dict.fromkeys(due, now + READ_EVERY_S)
            try:
                store = self._pool.stats().store
            except Exception:  # no figures are better than no vLLM
                self._is_broken = True
                log.exception("Headwater: reading the pool's figures failed; they are not reported any more")
                return {}
            values = merge(*((host_values if kind else own_values)(store) for kind in due))
            return self._differences.since(_of_kind(values, "counter")) | _told(_of_kind(values, "gauge"), self._name)


class Received(Protocol):
    """A receiver in a process of its own, as `peers.process.ReceiverChild` is one."""

    @property
    def stats(self) -> dict[str, Any]:
        """What it said last."""

    @property
    def num_restarts(self) -> int:
        """How often it was started again."""


class ReceiverFigures:
    """What an engine's receiver of other servers' pushes has to report, at most once a second."""

    def __init__(self, receiver: Received, clock: Callable[[], float] = time.monotonic) -> None:
        self._receiver = receiver
        self._clock = clock
        self._name = secrets.token_hex(4)
        self._next_s = 0.0
        self._differences = Differences(shows_zero=True)

    def take(self) -> Data:
        """What there is to tell now."""
        now = self._clock()
        if now < self._next_s:
            return {}
        self._next_s = now + READ_EVERY_S
        values = peer_values(self._receiver.stats, self._receiver.num_restarts)
        return self._differences.since(_of_kind(values, "counter")) | _told(_of_kind(values, "gauge"), self._name)


class Reporter:
    """What one connector tells vLLM after each step. Not thread-safe."""

    def __init__(self) -> None:
        self._differences = Differences()
        self._name = secrets.token_hex(4)
        self._gauges: Values = {}
        """What was told last: a gauge that stays as it is makes no message of a step in which nothing happened."""
        self._receiver: ReceiverFigures | None = None

    def watch(self, receiver: Received | None, clock: Callable[[], float] = time.monotonic) -> None:
        """Tell what a receiver says, too, if there is one: on the scheduler's side."""
        self._receiver = None if receiver is None else ReceiverFigures(receiver, clock)

    def worker(self, stats: TransferStats, times: Times, pool: PoolFigures | None) -> HeadwaterStats | None:
        """What a rank has done; None where that is nothing."""
        return self._report(transfer_values(stats, Source.WORKER), times, pool.take(host_wide=False) if pool else {})

    def scheduler(self, stats: TransferStats, times: Times, pool: PoolFigures | None) -> HeadwaterStats | None:
        """What the scheduler's side has done; None where that is nothing."""
        others = (pool.take(host_wide=True) if pool else {}) | (self._receiver.take() if self._receiver else {})
        return self._report(transfer_values(stats, Source.SCHEDULER), times, others)

    def _report(self, values: Values, times: Times, others: Data) -> HeadwaterStats | None:
        durations: Data = {_HISTOGRAMS[field]: {"": seconds} for field, seconds in times.items() if seconds}
        gauges = _of_kind(values, "gauge")
        told = _told(gauges, self._name) if gauges != self._gauges else {}
        self._gauges = gauges
        found = HeadwaterStats(data=self._differences.since(_of_kind(values, "counter")) | told | durations | others)
        return None if found.is_empty() else found


def _of_kind(values: Values, kind: Kind) -> Values:
    return {name: series for name, series in values.items() if BY_NAME[name].kind == kind}


def _told(gauges: Values, process: str) -> Data:
    """Gauges as what one process says of them: those of several processes must be told apart."""
    return {name: {tier: {process: n} for tier, n in series.items()} for name, series in gauges.items()}


_registered: list[Any] = []
"""What the last `HeadwaterPromMetrics` of this process has in Prometheus' registry."""


class HeadwaterPromMetrics(KVConnectorPromMetrics):
    """The declared metrics, in vLLM's own classes and with its labels."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        _unregister()
        self._metrics = {metric.name: self._register(metric) for metric in (*POOL_METRICS, *PEER_METRICS)}
        self._children: dict[tuple[int, str, str], Any] = {}
        self._reported: dict[tuple[int, str, str], dict[str, float]] = {}
        """What each process has said last of a gauge."""
        for engine in per_engine_labelvalues:
            for metric in POOL_METRICS:
                if metric.starts_at_zero:
                    self._child(engine, metric.name, "")

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval."""
        for name, series in transfer_stats_data.items():
            for tier, value in series.items():
                child = self._child(engine_idx, name, tier)
                match BY_NAME[name].kind:
                    case "counter":
                        child.inc(value)
                    case "gauge":
                        said = self._reported.setdefault((engine_idx, name, tier), {})
                        said.update(value)
                        child.set(BY_NAME[name].combine(said.values()))
                    case "histogram":
                        for seconds in value:
                            child.observe(seconds)

    def _register(self, metric: Metric) -> Any:
        classes = {"counter": self._counter_cls, "gauge": self._gauge_cls, "histogram": self._histogram_cls}
        more: dict[str, Any] = {"multiprocess_mode": "mostrecent"} if metric.kind == "gauge" else {}
        if metric.kind == "histogram":
            more["buckets"] = list(metric.buckets)
        labels = [*self._labelnames, *metric.labels]
        made = classes[metric.kind](name=metric.name, documentation=metric.help, labelnames=labels, **more)
        _registered.append(made)
        return made

    def _child(self, engine: int, name: str, tier: str) -> Any:
        key = (engine, name, tier)
        if key not in self._children:
            labels = [*self.per_engine_labelvalues[engine], *([tier] if BY_NAME[name].labels else [])]
            self._children[key] = self._metrics[name].labels(*labels)
        return self._children[key]


def _unregister() -> None:
    """Make room for another engine in this process. vLLM does the same with its own, by their prefix `vllm:`."""
    while _registered:
        try:
            REGISTRY.unregister(_registered.pop())
        except KeyError:
            pass  # somebody else did, or it is one of Ray's
