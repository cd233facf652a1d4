"""Connections and their bounds: how many, how long one may take to send a request's head, how many bytes of bodies.

Uvicorn has a time-out for idle connections only: one that sends its headers a byte at a time would stay for ever.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from itertools import chain
from typing import Any

import h11
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from headwater.errors import EngineDeadError, HeadwaterError, RequestError
from headwater.serve.errors import error_reply
from headwater.serve.parsing import BoundedParser

KEEP_ALIVE_S = 5
"""How long a connection may be idle between two requests."""
STALL_S = 1.0
"""A client that reads nothing of its answer for so long makes room for others when there are too many."""
LINGER_S = 1.0
MAX_LINGERING = 64
"""A refused client may take so long to read why, and so many of them at a time."""
SPARE_FILES = 64 + MAX_LINGERING
"""File descriptors that connections must leave to the rest of the process."""
PIECE_BYTES = 1 << 12
BODY_PIECE_BYTES = 1 << 16
"""What the parser gets in one turn of the event loop: of heads and chunks, and of a body with a content-length."""
MAX_UNASKED_BYTES = 1 << 16
"""Of a body whose request is answered already, so much is read to keep the connection; then it is closed."""
FREE_BODY_BYTES = 1 << 16
"""Of every body, so much needs no room in the budget: short requests get through while others fill it."""


class Connections:
    """The connections of one server. When there are too many, those without a whole request, or whose answer is not
    read, make room."""

    def __init__(self, max_connections: int, header_timeout_s: float) -> None:
        num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = max_connections if num_files == resource.RLIM_INFINITY else num_files - SPARE_FILES
        self._max_connections = max(1, min(max_connections, most))
        self.header_timeout_s = header_timeout_s
        self._open: dict[WatchedProtocol, None] = {}
        self._lingering: set[WatchedProtocol] = set()

    @property
    def num_open(self) -> int:
        """Connections that were let in."""
        return len(self._open)

    def has(self, protocol: WatchedProtocol) -> bool:
        """Whether a connection was let in and did not have to make room."""
        return protocol in self._open

    def enter(self, protocol: WatchedProtocol) -> bool:
        """Let a connection in, if need be in place of another. False: there is none that makes room."""
        if len(self._open) >= self._max_connections:
            victim = self._victim()
            if victim is None:
                return False
            self.leave(victim)
            victim.abort()
        self._open[protocol] = None
        return True

    def _victim(self) -> WatchedProtocol | None:
        """The oldest connection without a request, or else the oldest one that is still sending its body, or else the
        oldest one that asks ahead of its answer, or else the one that has read nothing of its answer for the longest
        time."""
        idle = (other for other in self._open if not other.has_request)
        sending = (other for other in self._open if other.cycle.more_body)
        ahead = (other for other in self._open if other.asks_ahead)
        if (victim := next(chain(idle, sending, ahead), None)) is not None:
            return victim
        slowest = max(self._open, key=lambda other: other.unread_s)
        return slowest if slowest.unread_s >= STALL_S else None

    def linger(self, protocol: WatchedProtocol) -> bool:
        """Keep a connection that has nothing more to say for as long as its client may take to read why. False: too
        many are kept already."""
        self._open.pop(protocol, None)
        if protocol not in self._lingering and len(self._lingering) >= MAX_LINGERING:
            return False
        self._lingering.add(protocol)
        return True

    def leave(self, protocol: WatchedProtocol) -> None:
        """The connection is gone. Idempotent."""
        self._open.pop(protocol, None)
        self._lingering.discard(protocol)


class WatchedProtocol(H11Protocol):
    """Uvicorn's protocol, with a time-out for the head of a request and a place among the `Connections`, which it has
    from the moment it is accepted.

    It hands the parser a piece of what came in each turn of the event loop, so that everybody gets a turn.
    """

    conn: BoundedParser

    def __init__(self, connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        self.conn = BoundedParser()
        self.has_arrived = False
        self.arriving: asyncio.Task[None] | None = None
        """Makes the connection, with its TLS handshake."""
        self._siblings = connections
        self._is_ended = False
        self._deadline: asyncio.TimerHandle | None = None
        self._paused_at: float | None = None
        self._unread = bytearray()
        self._reading: asyncio.Handle | None = None
        self._num_unasked = 0

    @property
    def has_request(self) -> bool:
        """Whether a request has come that is not answered yet."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def asks_ahead(self) -> bool:
        """Whether more than one request has come. Clients that wait for an answer, and read it, do not do that."""
        return self.has_request and bool(self._unread or self.conn.trailing_data[0])

    @property
    def unread_s(self) -> float:
        """How long the answer has been waiting for the client to read what came before."""
        return 0.0 if self._paused_at is None else self.loop.time() - self._paused_at

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.has_arrived = True
        self.flow = _Flow(transport, self._read_soon)
        if self._siblings.has(self):
            self._watch()
        else:
            text = f"{self._siblings.num_open} connections are open, which is the limit of this server; try again later"
            self._end(RequestError(text, code="server_busy"))

    def abort(self) -> None:
        """End the connection at once, also one that is still arriving."""
        if self.has_arrived:
            self.transport.abort()
        elif self.arriving is not None:
            self.arriving.cancel()

    def data_received(self, data: bytes) -> None:
        if self._is_ended:
            return
        self._unread += data
        if self._reading is None:
            self._read()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_ended = True
        self._siblings.leave(self)
        self._disarm()
        self._stop_reading()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """The server stops. A request whose body is not whole will not be answered; the others end by themselves."""
        if self.has_request and self.cycle.more_body:
            self._end(EngineDeadError("the server is stopping"))
        else:
            super().shutdown()

    def pause_writing(self) -> None:
        self._paused_at = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._paused_at = None
        super().resume_writing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that the parser refuses, and end the connection."""
        self._end(self.conn.refusal)

    def _should_upgrade(self) -> bool:
        return False

    def _read_soon(self) -> None:
        if self._reading is None and not self._is_ended:
            self._reading = self.loop.call_soon(self._read)

    def _read(self) -> None:
        """Hand the parser the next piece. The transport reads on when there is none left and nobody holds it up."""
        self._reading = None
        if not self._may_read():
            return
        if self._unread:
            is_plain_body = self.conn.their_state is h11.SEND_BODY and not self.conn.is_chunked
            size = BODY_PIECE_BYTES if is_plain_body else PIECE_BYTES
            piece = bytes(self._unread[:size])
            del self._unread[:size]
            super().data_received(piece)
            self._watch()
            self._num_unasked = self._num_unasked + len(piece) if self.conn.reads_unasked else 0
            if self._num_unasked > MAX_UNASKED_BYTES:
                self._end()
        if not self._may_read():
            return
        if self._unread:
            self.transport.pause_reading()
            self._read_soon()
        else:
            self.transport.resume_reading()

    def _may_read(self) -> bool:
        """False while uvicorn holds it up (`_Flow` says when that ends), and when the connection ends."""
        return not (self._is_ended or self.transport.is_closing() or self.flow.read_paused)

    def _stop_reading(self) -> None:
        self._unread.clear()
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _watch(self) -> None:
        """Start the clock for the head of a request, unless one is there or uvicorn's clock for idle ones runs.

        A client that goes on sending a body after it was answered has no request either.
        """
        if self._is_ended:
            return
        if self.has_request or self.timeout_keep_alive_task is not None:
            self._disarm()
        elif self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(self._siblings.header_timeout_s, self._time_out)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _time_out(self) -> None:
        if self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
            text = f"the headers did not arrive within {self._siblings.header_timeout_s:g} s"
            self.transport.write(_raw_reply(RequestError(text, code="request_timeout")))
        self.transport.close()

    def _end(self, error: HeadwaterError | None = None) -> None:
        """Say why, unless an answer has begun, and read nothing more."""
        if self._is_ended:
            return
        self._is_ended = True
        self._stop_reading()
        self._disarm()
        self._unset_keepalive_if_required()
        if self.has_request:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.transport.is_closing():
            return
        if not self._siblings.linger(self):
            self.transport.abort()
            return
        if error is not None and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(_raw_reply(error))
        if self.transport.can_write_eof():
            with suppress(OSError):  # the client has just left
                self.transport.write_eof()
        # Closed at once, with unread data, the client would see a reset instead of the answer.
        self.transport.resume_reading()
        self._deadline = self.loop.call_later(LINGER_S, self.transport.abort)


class _Flow(FlowControl):
    """Uvicorn's flow control. What was received before a pause is read before the transport receives more."""

    def __init__(self, transport: asyncio.Transport, read_soon: Callable[[], None]) -> None:
        super().__init__(transport)
        self._read_soon = read_soon

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self._read_soon()


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
            text = f"requests of more than {self._max_bytes} bytes in total are being read; try again later"
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


def _raw_reply(error: HeadwaterError) -> bytes:
    """An error for a connection that has no request to answer."""
    status, body, headers = error_reply(error)
    fields = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"} | headers
    first = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"
    lines = [first, *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    return "\r\n".join(lines).encode() + body
