"""`headwater pool events`: what happens to a pool's chunks, line by line."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import closing

import typer

from headwater.cli.target import open_existing
from headwater.stores.base import Store
from headwater.stores.events import Event, EventKind

_WAIT_S = 0.5


def show_events(url: str | None, since: int | None, seconds: float | None, as_json: bool) -> None:
    """Print events as they come, for so many seconds or until Ctrl-C."""
    with closing(open_existing(url)) as store:
        if not as_json:
            for line in _whose(store):
                typer.echo(line, err=True)
        for event in _follow(store, since, seconds):
            print(json.dumps(_fields(event)) if as_json else _line(event))
            sys.stdout.flush()


def _follow(store: Store, since: int | None, seconds: float | None) -> Iterator[Event]:
    follower, end = store.follow(since), None if seconds is None else time.monotonic() + seconds
    while True:
        left = _WAIT_S if end is None else end - time.monotonic()
        yield from follower.poll() if left <= 0 else follower.wait(min(left, _WAIT_S))
        if left <= 0:
            return


def _whose(store: Store) -> Iterator[str]:
    """Which tiers' events are those of all hosts, and which are not."""
    for tier in store.tiers():
        if tier.events == "none":
            yield f"{tier.url}: no events; follow it by itself"
            continue
        told = "all hosts that share it" if tier.events == "fleet" else "the processes of this host"
        yield f"{tier.url}: events of {told}"


def _fields(event: Event) -> dict[str, object]:
    return {
        "sequence": event.sequence,
        "kind": event.kind.name.lower(),
        "tier": event.tier,
        "key": event.key.hex(),
        "number": event.number,
        "num_tokens": event.num_tokens,
        "time_ns": event.time_ns,
    }


def _line(event: Event) -> str:
    if event.kind == EventKind.LOST:
        return f"{event.sequence:>8}  lost      events were overwritten before they could be read; rescan the pool"
    what = f"{event.key.hex()[:16]}  chunk {event.number}, {event.num_tokens} tokens" if event.key else "everything"
    if event.kind == EventKind.CLEARED and event.key:
        what = f"{event.key.hex()[:16]}  a whole root"
    return f"{event.sequence:>8}  {event.kind.name.lower():<8}  {event.tier:<8}  {what}"
