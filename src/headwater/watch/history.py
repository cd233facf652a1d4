"""What charts are drawn from: some numbers of each look, for the last minutes. Kept by whoever shows them."""

from __future__ import annotations

from collections import deque
from typing import Any

MAX_POINTS = 450
"""A quarter of an hour, with a look every two seconds."""

_COUNTERS = ("asked_tokens", "matched_tokens", "loaded_bytes", "saved_bytes", "loads", "saves")
WINDOW_S = 30.0
"""A hit rate is that of the last so many seconds: single looks have few requests."""


class PoolHistory:
    """The newest points. Each has a number, so that a page can ask for those it has not seen. Not thread-safe."""

    def __init__(self, max_points: int = MAX_POINTS) -> None:
        self._points: deque[dict[str, Any]] = deque(maxlen=max_points)
        self._number = 0

    def add(self, look: dict[str, Any]) -> dict[str, Any]:
        """Keep what charts need of a look; the point. Rates are per second, since the look before."""
        self._number += 1
        if self._points and look["time_s"] < self._points[-1]["time_s"]:
            self._points.clear()  # the clock was set back: no chart can show what is later than now
        store, totals = look["store"] or {}, look["totals"]
        point: dict[str, Any] = {
            "number": self._number,
            "time_s": look["time_s"],
            "used_bytes": store.get("used_bytes", 0),
            "data_bytes": store.get("data_bytes", 0),
            "chunks": store.get("chunks", 0),
            "evicted": store.get("evicted", 0),
            "pool": look["pool"]["generation"],
            **{name: totals[name] for name in _COUNTERS},
            "tiers": {tier["name"]: [tier["hits"], tier["misses"], tier["hit_bytes"]] for tier in look["tiers"]},
        }
        before = self._points[-1] if self._points else point
        elapsed = max(point["time_s"] - before["time_s"], 1e-3)
        is_same = before["pool"] == point["pool"]  # another pool's figures begin anew
        point["in_bytes_s"] = max(0.0, point["saved_bytes"] - before["saved_bytes"]) / elapsed
        point["out_bytes_s"] = max(0.0, point["loaded_bytes"] - before["loaded_bytes"]) / elapsed
        point["evicted_s"] = max(0, point["evicted"] - before["evicted"]) / elapsed if is_same else 0.0
        self._points.append(point)
        point["hit_rate"], point["tier_rates"] = self._rates(point)
        return point

    def since(self, number: int) -> list[dict[str, Any]]:
        """Points after that one, oldest first."""
        return [point for point in self._points if point["number"] > number]

    @property
    def points(self) -> list[dict[str, Any]]:
        """All of them, oldest first."""
        return list(self._points)

    def _rates(self, point: dict[str, Any]) -> tuple[float | None, dict[str, float | None]]:
        """Of the tokens asked for in the window, the share that the pool had; of the pieces that were to be read from
        each tier, the share that was there. None where nothing was asked."""
        start = next((old for old in self._points if old["time_s"] >= point["time_s"] - WINDOW_S), point)
        asked, matched = (point[name] - start[name] for name in ("asked_tokens", "matched_tokens"))
        rates: dict[str, float | None] = {}
        for name, (hits, misses, _) in point["tiers"].items():
            hits_before, misses_before, _ = start["tiers"].get(name, (0, 0, 0))
            rates[name] = _share(hits - hits_before, hits - hits_before + misses - misses_before)
        return _share(matched, asked), rates


def _share(part: float, whole: float) -> float | None:
    return min(max(part / whole, 0.0), 1.0) if whole > 0 else None
