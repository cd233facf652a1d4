"""The processes that use a pool, from what they publish beside it, and sums over all that were seen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from headwater.connector.metrics import Values
from headwater.connector.published import Published, all_published
from headwater.connector.stats import Distribution
from headwater.connector.totals import Totals
from headwater.watch.activity import MAX_NAME, Activity, short

_TOTALS = {
    "asked_tokens": "headwater_pool_asked_tokens_total",
    "matched_tokens": "headwater_pool_matched_tokens_total",
    "loaded_tokens": "headwater_pool_loaded_tokens_total",
    "loaded_bytes": "headwater_pool_loaded_bytes_total",
    "saved_bytes": "headwater_pool_saved_bytes_total",
    "failed_loads": "headwater_pool_failed_loads_total",
    "late_fetches": "headwater_pool_late_fetches_total",
    "dropped_chunks": "headwater_pool_dropped_chunks_total",
    "damaged_chunks": "headwater_pool_damaged_chunks_total",
}
_TIMES = {"loads": "headwater_pool_load_duration_seconds", "saves": "headwater_pool_save_duration_seconds"}
_TIER_COUNTERS = {
    name: f"headwater_tier_{name}_total"
    for name in ("hits", "misses", "hit_bytes", "fetched", "stored", "stored_bytes", "failed", "breaker_trips")
}
_BREAKER, _WAITING = "headwater_tier_breaker_open", "headwater_tier_waiting_chunks"
MAX_PROCESSES = 64
Own = tuple[Values, Mapping[str, Distribution]]


class Processes:
    """Who uses one pool. Sums include processes that have ended since the first look. Not thread-safe."""

    def __init__(self) -> None:
        self._sums = Totals()
        self._alive: dict[str, Published] = {}
        self._gauges: list[Values] = []
        self._open_breakers: set[str] = set()
        self._has_looked = False

    def look(self, directory: str | None, own: Own | None, activity: Activity) -> None:
        """Read what is published in a pool's directory; where there is none, take what this process knows itself."""
        found = [] if directory is None else all_published(directory)
        for record in found:
            self._sums.add(record.token, record.values, record.times)
        alive = {record.token: record for record in found if record.is_alive}
        self._sums.keep_only(["", *alive])
        self._gauges = [record.values for record in alive.values()]
        if directory is None and own is not None:
            self._sums.add("", *own)
            self._gauges = [own[0]]
        if self._has_looked:
            for token in alive.keys() - self._alive.keys():
                activity.add("attached", text=_name(alive[token]), model=short(alive[token].model))
            for token in self._alive.keys() - alive.keys():
                activity.add("left", text=_name(self._alive[token]), model=short(self._alive[token].model))
        self._alive, self._has_looked = alive, True
        opened = {tier for values in self._gauges for tier, is_open in values.get(_BREAKER, {}).items() if is_open}
        for tier in sorted(opened ^ self._open_breakers):
            activity.add("breaker", tier=short(tier, MAX_NAME), text="opened" if tier in opened else "closed")
        self._open_breakers = opened

    @property
    def totals(self) -> dict[str, float]:
        """Sums of what engines count."""
        values, times = self._sums.values, self._sums.times
        sums = {name: sum(values.get(metric, {}).values()) for name, metric in _TOTALS.items()}
        return sums | {name: float(sum(times[m].counts)) if m in times else 0.0 for name, m in _TIMES.items()}

    def tiers(self, names: Iterable[str]) -> list[dict[str, Any]]:
        """One row for each tier, in this order, and then whatever else processes name."""
        values = self._sums.values
        said = [tier for metric in _TIER_COUNTERS.values() for tier in values.get(metric, {})]
        rows = []
        for name in dict.fromkeys([*names, *said]):
            row: dict[str, Any] = {key: values.get(m, {}).get(name, 0.0) for key, m in _TIER_COUNTERS.items()}
            row["waiting"] = max([gauges.get(_WAITING, {}).get(name, 0.0) for gauges in self._gauges], default=0.0)
            rows.append({"name": short(name, MAX_NAME), "is_breaker_open": name in self._open_breakers, **row})
        return rows

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The processes that are alive, the longest running first."""
        rows = []
        for record in list(self._alive.values())[:MAX_PROCESSES]:
            sums = {name: sum(record.values.get(_TOTALS[name], {}).values()) for name in _TOTALS}
            who = {"pid": record.pid, "engine": short(record.engine), "role": short(record.role)}
            when = {"started_s": record.started_s, "updated_s": record.updated_s}
            rows.append({**who, "model": short(record.model), **when, **sums})
        return rows


def _name(record: Published) -> str:
    return short(f"{record.engine} {record.role} (pid {record.pid})")
