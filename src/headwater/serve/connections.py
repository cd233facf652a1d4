"""Connections and their bounds: how many, how long one may take to send a request's head, how many bytes of bodies.

Uvicorn has a time-out for idle connections only: one that sends its headers a byte at a time would stay for ever.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from headwater.errors import RequestError
from headwater.serve.errors import error_reply

KEEP_ALIVE_S = 5
"""How long a connection may be idle between two requests."""
LINGER_S = 1.0
MAX_LINGERING = 64
"""A refused client may take so long to read why, and so many of them at a time."""
SPARE_FILES = 64
"""File descriptors that connections must leave to the rest of the process."""
FREE_BODY_BYTES = 1 << 16
"""Of every body, so much needs no room in the budget: short requests get through while others fill it."""


class Connections:
    """The connections of one server. When there are too many, those without a whole request make room."""

    def __init__(self, max_connections: int, header_timeout_s: float) -> None:
        num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = max_connections if num_files == resource.RLIM_INFINITY else num_files - SPARE_FILES
        self._max_connections = max(1, min(max_connections, most))
        self.header_timeout_s = header_timeout_s
        self._open: dict[WatchedProtocol, None] = {}
        self.num_lingering = 0

    @property
    def num_open(self) -> int:
        """Connections that were let in."""
        return len(self._open)

    def enter(self, protocol: WatchedProtocol) -> bool:
        """Let a connection in, if need be in place of the oldest one without a request, or else of the oldest one that
        is still sending its body. False: there is none."""
        if len(self._open) >= self._max_connections:
            idle = (other for other in self._open if not other.has_request)
            sending = (other for other in self._open if other.cycle.more_body)
            victim = next(chain(idle, sending), None)
            if victim is None:
                return False
            self.leave(victim)
            victim.transport.abort()
        self._open[protocol] = None
        return True

    def leave(self, protocol: WatchedProtocol) -> None:
        """The connection is gone. Idempotent."""
        self._open.pop(protocol, None)


class WatchedProtocol(H11Protocol):
    """Uvicorn's protocol, with a time-out for the head of a request and a place among the `Connections`."""

    def __init__(self, connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        self._siblings = connections
        self._is_refused = False
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def has_request(self) -> bool:
        """Whether a request has come that is not answered yet."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._siblings.enter(self):
            self._watch()
        else:
            self._refuse()

    def data_received(self, data: bytes) -> None:
        if not self._is_refused:
            super().data_received(data)
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._siblings.leave(self)
        self._siblings.num_lingering -= self._is_refused
        self._is_refused = False
        self._disarm()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def _watch(self) -> None:
        """Start the clock for the head of a request, unless one is there or uvicorn's clock for idle ones runs.

        A client that goes on sending a body after it was answered has no request either.
        """
        if self.has_request or self.timeout_keep_alive_task is not None:
            self._disarm()
        elif self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(self._siblings.header_timeout_s, self._give_up)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        if self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
            text = f"the headers did not arrive within {self._siblings.header_timeout_s:g} s"
            self.transport.write(_raw_reply(RequestError(text, code="request_timeout")))
        self.transport.close()

    def _refuse(self) -> None:
        self._is_refused = True
        self._siblings.num_lingering += 1
        if self._siblings.num_lingering > MAX_LINGERING:
            self.transport.abort()
            return
        text = f"{self._siblings.num_open} connections are open and this server takes no more now; try later"
        self.transport.write(_raw_reply(RequestError(text, code="server_busy")))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        # Closed at once, with unread data, the client would see a reset instead of the answer.
        self._deadline = self.loop.call_later(LINGER_S, self.transport.abort)


class BodyBudget:
    """Bytes that the bodies of all requests may take together, until they are tokenised."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0

    def room(self) -> BodyRoom:
        """The room of one more body, empty so far."""
        return BodyRoom(self)

    def take(self, num_bytes: int) -> None:
        """Raises RequestError ("server_busy") if there are not so many left."""
        if self.num_bytes + num_bytes > self._max_bytes:
            text = f"requests of more than {self._max_bytes} bytes are being read, and no more are taken now; try later"
            raise RequestError(text, code="server_busy")
        self.num_bytes += num_bytes


class BodyRoom:
    """What one body has of the budget."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._num_bytes = 0

    def grow(self, body_bytes: int) -> None:
        """The body has so many bytes now. Raises RequestError ("server_busy") if there is no room for them."""
        needed = max(0, body_bytes - FREE_BODY_BYTES) - self._num_bytes
        if needed > 0:
            self._budget.take(needed)
            self._num_bytes += needed

    def release(self) -> None:
        """Give the room back. Idempotent."""
        self._budget.num_bytes -= self._num_bytes
        self._num_bytes = 0

    @contextmanager
    def released_on_error(self) -> Iterator[None]:
        """Give the room back if the block raises."""
        try:
            yield
        except BaseException:
            self.release()
            raise


def _raw_reply(error: RequestError) -> bytes:
    """An error for a connection that has no request to answer."""
    status, body, headers = error_reply(error)
    fields = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"} | headers
    lines = [f"HTTP/1.1 {status} {_PHRASES[status]}", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    return "\r\n".join(lines).encode() + body


_PHRASES = {408: "Request Timeout", 503: "Service Unavailable"}
