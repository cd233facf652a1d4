"""A table of where the milliseconds of one pool hit go, from the events that `watch` took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Moment(NamedTuple):
    """One line of the table."""

    what: str
    ms: float
    """Since the request was added."""


def moments(events: Sequence[Sequence[Any]], load_seconds: float = 0.0) -> list[Moment]:
    """The moments of one request, in order of time. Those that did not come are left out.

    `load_seconds` is the worker's own clock of the load: with it the end of the load is known more closely than by the
    step that noticed it.
    """
    if not events:
        return []
    ordered = sorted(events, key=lambda event: event[1])
    origin = next((at for name, at, _ in ordered if name == "request begins"), ordered[0][1])
    found: list[Moment] = []

    def add(what: str, at: float | None) -> float | None:
        if at is not None:
            found.append(Moment(what, (at - origin) * 1000))
        return at

    add("request added", origin)
    add("prompt hashed", _first(ordered, "hash ends"))
    asked = [event for event in ordered if event[0] == "match ends"]
    later = f" (asked {len(asked)} times)" if len(asked) > 1 else ""
    add(f"matched{later}", next((at for _, at, number in asked if number > 0), None))
    allocated = add("blocks allocated, load ordered", _first(ordered, "allocation ends"))
    begun = add("load begins on the worker", _first(ordered, "load call begins", allocated)) if allocated else None
    add("load call returns", _first(ordered, "load call ends", begun) if begun else None)
    if begun is not None and load_seconds:
        add("load ends, by the worker's clock", begun + load_seconds)
    arrived = add("load seen by the engine", _first(ordered, "arrival ends", begun) if begun else None)
    num_empty = sum(1 for name, _, count in ordered if name == "schedule ends" and not count)
    scheduled = _first_step(ordered, "schedule ends", arrived or allocated or origin)
    if scheduled is not None:
        begins = [at for name, at, _ in ordered if name == "schedule begins" and at <= scheduled]
        add("step that computes: scheduling begins", begins[-1] if begins else None)
        add("step that computes: scheduled", scheduled)
        add("step that computes: model begins", _first_step(ordered, "execute begins", scheduled))
        add("step that computes: model launched", _first_step(ordered, "execute ends", scheduled))
        add("sampling launched", _first(ordered, "sample ends", scheduled))
    add(f"first token out ({num_empty} steps without work)", _last(ordered, "answer ends"))
    return sorted(found, key=lambda moment: moment.ms)


def steps_between(timeline: Sequence[Moment]) -> list[tuple[str, float, float]]:
    """(what, ms since the request, ms since the line before)."""
    rows, before = [], 0.0
    for moment in timeline:
        rows.append((moment.what, moment.ms, moment.ms - before))
        before = moment.ms
    return rows


def _first(events: Sequence[Sequence[Any]], name: str, since: float | None = None) -> float | None:
    return next((at for found, at, _ in events if found == name and (since is None or at >= since)), None)


def _first_step(events: Sequence[Sequence[Any]], name: str, since: float) -> float | None:
    """The first of these that had tokens to compute."""
    return next((at for found, at, count in events if found == name and count and at >= since), None)


def _last(events: Sequence[Sequence[Any]], name: str) -> float | None:
    return next((at for found, at, _ in reversed(events) if found == name), None)
