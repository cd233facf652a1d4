"""What the connector tells vLLM's own statistics: sums of what was moved since the last step, in the log and as
Prometheus counters.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

METRICS = {
    "loaded_bytes": "Bytes of KV that came from the pool, on all ranks.",
    "saved_bytes": "Bytes of KV that went to the pool, on all ranks.",
    "load_seconds": "Seconds that loads took, all ranks together.",
    "dropped_chunks": "Chunks that were not saved: staging was full, or the pool failed.",
    "damaged_chunks": "Chunks whose bytes did not verify; they were computed again.",
    "loaded_tokens": "Tokens whose KV was to come from the pool.",
    "failed_loads": "Requests that got less than they were promised, and computed the rest.",
    "step_seconds": "Seconds that the thread which runs the model spent in the connector.",
    "thread_seconds": "Seconds of processor time that the connector's own threads used.",
}
"""Name and meaning of every number; vLLM's metrics are called `vllm:headwater_<name>`."""


@dataclass
class HeadwaterStats(KVConnectorStats):
    """Sums, by the names in `METRICS`; what is 0 is left out."""

    data: dict[str, float] = field(default_factory=dict)

    def reset(self) -> None:
        """Begin again."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another rank's, or another interval's."""
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log."""
        return {name: round(value, 3) for name, value in self.data.items()}

    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not any(self.data.values())


class Differences:
    """Turns counts since the start into counts since the last call."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}

    def since(self, now: dict[str, float]) -> HeadwaterStats | None:
        """What has been added; None where that is nothing."""
        # A new epoch begins its counts anew.
        added = {name: value - self._before.get(name, 0) for name, value in now.items()}
        added = {name: value if value >= 0 else now[name] for name, value in added.items()}
        self._before = now
        found = HeadwaterStats(data={name: value for name, value in added.items() if value})
        return None if found.is_empty() else found


class HeadwaterPromMetrics(KVConnectorPromMetrics):
    """One Prometheus counter for each number, by engine."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, dict[int, Any]] = {}
        for name, meaning in METRICS.items():
            counter = metric_types[Counter](name=f"vllm:headwater_{name}", documentation=meaning, labelnames=labelnames)
            self._counters[name] = {
                engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval."""
        for name, value in transfer_stats_data.items():
            if name in self._counters and value > 0:
                self._counters[name][engine_idx].inc(value)
