"""`usage` of an answer: the larger of two servers' counts of cached tokens.

Decode counts what it found and what was pushed in time; prefill counts what it had before. Answers that need no change
pass as they are.
"""

from __future__ import annotations

from typing import Any

import msgspec

MAX_EVENT_BYTES = 1 << 20
"""A longer event of a stream passes as it is."""


def cached_tokens(body: bytes) -> int:
    """Of an answer; 0 where it does not say."""
    try:
        answer = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return 0
    return _cached(answer.get("usage")) if isinstance(answer, dict) else 0


def with_cached_tokens(body: bytes, at_least: int) -> bytes:
    """The answer, or the data of one event, with no smaller count of cached tokens than that, if it has any usage."""
    if not at_least or b'"usage"' not in body:
        return body
    try:
        answer = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        usage = msgspec.json.decode(answer.get("usage", b"null"))
    except (msgspec.MsgspecError, RecursionError):
        return body
    if not isinstance(usage, dict) or _cached(usage) >= at_least:
        return body
    details = usage.get("prompt_tokens_details")
    prompt_tokens = usage.get("prompt_tokens")
    most = prompt_tokens if type(prompt_tokens) is int else at_least
    usage["prompt_tokens_details"] = (details if isinstance(details, dict) else {}) | {
        "cached_tokens": min(at_least, most)
    }
    answer["usage"] = msgspec.Raw(msgspec.json.encode(usage))
    return msgspec.json.encode(answer)


class EventFilter:
    """Server-sent events, piece by piece, with the usage of the last one changed. Holds one unfinished event."""

    def __init__(self) -> None:
        self.at_least = 0
        self._rest = b""
        self._is_foreign = False

    def feed(self, piece: bytes) -> bytes:
        """What can be sent on."""
        data = self._rest + piece
        # Other line ends than all known servers send: better the usage as it is than events that wait.
        self._is_foreign = self._is_foreign or b"\r" in data
        end = -1 if self._is_foreign else data.rfind(b"\n\n")
        if end < 0 and len(data) <= MAX_EVENT_BYTES and not self._is_foreign:
            self._rest = data
            return b""
        whole, self._rest = (data, b"") if end < 0 else (data[: end + 2], data[end + 2 :])
        if not self.at_least or b'"usage"' not in whole:
            return whole
        return b"\n\n".join(self._changed(event) for event in whole.split(b"\n\n"))

    def finish(self) -> bytes:
        """What is left when the stream ends."""
        rest, self._rest = self._rest, b""
        return rest

    def _changed(self, event: bytes) -> bytes:
        if not event.startswith(b"data: {"):
            return event
        return b"data: " + with_cached_tokens(event.removeprefix(b"data: "), self.at_least)


def _cached(usage: Any) -> int:
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    count = details.get("cached_tokens") if isinstance(details, dict) else None
    return count if type(count) is int and count > 0 else 0
