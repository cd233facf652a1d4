"""Adding up what several processes count, some of which begin anew and some of which end.

Counters and histograms never go down, whoever ends. Gauges are those of the processes that are there now. A process
that was out of sight and comes back is counted once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from headwater.connector.metrics import BY_NAME, Values
from headwater.connector.stats import Distribution

Spread = dict[str, Distribution]
"""Histograms by the metric's name."""
MAX_UNSEEN = 4096
"""Of so many processes that are out of sight it is kept what they had counted: more than a directory shows."""


class Totals:
    """Sums over processes. Not thread-safe."""

    def __init__(self) -> None:
        self._counted: Values = {}
        self._spread: Spread = {}
        self._last: dict[str, tuple[Values, Spread]] = {}
        """By process: what it said last."""
        self._unseen: dict[str, tuple[Values, Spread]] = {}
        """The same of those that are out of sight, the longest first."""

    def add(self, process: str, values: Values, times: Mapping[str, Distribution]) -> None:
        """Take what one process has counted since its start. A count that is lower than before has begun anew."""
        old_values, old_times = self._last.get(process) or self._unseen.pop(process, ({}, {}))
        for name, series in values.items():
            if BY_NAME[name].kind == "counter":
                mine, old = self._counted.setdefault(name, {}), old_values.get(name, {})
                for tier, value in series.items():
                    before = old.get(tier, 0.0)
                    mine[tier] = mine.get(tier, 0.0) + (value - before if value >= before else value)
        for name, now in times.items():
            more = _since(now, old_times.get(name, Distribution()))
            self._spread[name] = _plus(self._spread.get(name, Distribution()), more)
        self._last[process] = {name: dict(series) for name, series in values.items()}, dict(times)

    def end(self, process: str) -> None:
        """A process has ended: what it counted stays, its gauges go. The next one of that name begins anew."""
        self._last.pop(process, None)

    def keep_only(self, processes: Iterable[str]) -> None:
        """All others are out of sight: what they counted stays, their gauges go. They may have ended; one that comes
        back (a disk did not answer for a moment) goes on where it was. For names that are never used again."""
        seen = set(processes)
        for name in [name for name in self._last if name not in seen]:
            self._unseen[name] = self._last.pop(name)
        for name in list(self._unseen)[: max(len(self._unseen) - MAX_UNSEEN, 0)]:
            del self._unseen[name]

    @property
    def values(self) -> Values:
        """Counters of all processes that ever were, and gauges of those that are."""
        found = {name: dict(series) for name, series in self._counted.items()}
        said: dict[str, dict[str, list[float]]] = {}
        for values, _ in self._last.values():
            for name, series in values.items():
                if BY_NAME[name].kind == "gauge":
                    for tier, value in series.items():
                        said.setdefault(name, {}).setdefault(tier, []).append(value)
        for name, by_tier in said.items():
            found[name] = {tier: BY_NAME[name].combine(numbers) for tier, numbers in by_tier.items()}
        return found

    @property
    def times(self) -> Spread:
        """Histograms of all processes that ever were."""
        return dict(self._spread)


def _since(now: Distribution, old: Distribution) -> Distribution:
    if len(old.counts) != len(now.counts) or any(n < o for n, o in zip(now.counts, old.counts, strict=True)):
        return now
    counts = tuple(n - o for n, o in zip(now.counts, old.counts, strict=True))
    return Distribution(counts, max(0.0, now.sum - old.sum))


def _plus(one: Distribution, other: Distribution) -> Distribution:
    if not one.counts or not other.counts:
        return other if not one.counts else one
    return Distribution(tuple(map(sum, zip(one.counts, other.counts, strict=True))), one.sum + other.sum)
