"""What happened lately, in few words: a save of forty chunks is one entry, and so is the eviction of a thousand."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from headwater.stores.events import Event, EventKind
from headwater.stores.stats import HitInfo

MAX_ENTRIES = 200
SHORT = 8
"""Hexadecimal digits of a key that are shown."""
MAX_NAME = 240
"""Characters of a tier's name, which is a path or an address."""
_MAX_TEXT = 80

Describe = Callable[[bytes], tuple[dict[str, Any], int] | None]
"""Of a chunk's key: the description of its root, and the bytes of the chunk; None where it is gone."""


@dataclass(frozen=True, kw_only=True)
class ActivityEntry:
    """One line of the list."""

    sequence: int
    time_s: float
    kind: str
    """`saved`, `copied` (to a lower tier), `hit`, `removed`, `cleared`, `lost`, `attached`, `left`, `breaker`."""
    key: str = ""
    """The first digits; empty where it is about no single prefix."""
    tier: str = ""
    model: str = ""
    tenant: str = ""
    num_chunks: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    count: int = 1
    """Of a hit: requests."""
    text: str = ""


class Activity:
    """The newest entries. Not thread-safe."""

    def __init__(self) -> None:
        self._entries: deque[ActivityEntry] = deque(maxlen=MAX_ENTRIES)
        self._sequence = 0

    @property
    def entries(self) -> list[ActivityEntry]:
        """Oldest first."""
        return list(self._entries)

    def add(self, kind: str, time_s: float | None = None, **fields: Any) -> None:
        """Note one entry."""
        self._sequence += 1
        when = time.time() if time_s is None else time_s
        self._entries.append(ActivityEntry(sequence=self._sequence, time_s=when, kind=kind, **fields))

    def add_hits(self, hits: Iterable[HitInfo]) -> None:
        """Prefixes that requests have begun to load."""
        for hit in hits:
            named: dict[str, Any] = {"key": hit.key.hex()[:SHORT], **names(hit.root)}
            self.add("hit", num_tokens=hit.num_tokens, count=hit.num_requests, **named)

    def add_events(self, events: Sequence[Event], describe: Describe, first_tier: str) -> None:
        """What a pool's events say: chunks that were stored one after another are one save. What was stored in another
        tier than the first, which has this name in events, was copied there. A chunk that was fetched into the first
        tier looks like one that was saved: no event says where it came from."""
        run: list[Event] = []
        for event in events:
            if run and not _continues(run[-1], event):
                self._add_run(run, describe, first_tier)
                run = []
            run.append(event)
        if run:
            self._add_run(run, describe, first_tier)

    def _add_run(self, run: list[Event], describe: Describe, first_tier: str) -> None:
        last = run[-1]
        fields: dict[str, Any] = {"tier": short(last.tier), "time_s": last.time_ns / 1e9 if last.time_ns else None}
        if last.kind == EventKind.LOST:
            self.add("lost")
        elif last.kind == EventKind.CLEARED:
            self.add("cleared", num_chunks=len(run), **fields)
        elif last.kind == EventKind.REMOVED:
            fields["num_chunks"], fields["num_tokens"] = len(run), sum(event.num_tokens for event in run)
            self.add("removed", key=last.key.hex()[:SHORT] if len(run) == 1 else "", **fields)
        else:
            found = describe(last.key)
            root, num_bytes = found or ({}, 0)
            tokens = sum(event.num_tokens for event in run)
            size = num_bytes * tokens // max(last.num_tokens, 1)
            named: dict[str, Any] = {"key": last.key.hex()[:SHORT], **names(root)}
            kind = "saved" if last.tier == first_tier else "copied"
            self.add(kind, num_chunks=len(run), num_tokens=tokens, num_bytes=size, **named, **fields)


def names(root: dict[str, Any]) -> dict[str, str]:
    """Model and tenant of a root's description, as short texts."""
    return {"model": short(root.get("label")), "tenant": short(root.get("tenant"))}


def short(value: object, limit: int = _MAX_TEXT) -> str:
    """A text from elsewhere, cut to fit one line, with nothing in it that cannot be printed."""
    text = "" if value is None else str(value)
    text = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _continues(before: Event, event: Event) -> bool:
    """Whether two events are one entry: the next chunk of the same save, or more of the same removal."""
    if (before.kind, before.tier) != (event.kind, event.tier):
        return False
    return event.kind != EventKind.STORED or event.number == before.number + 1
