"""HTTP/1.1 to one server: requests with bounds on time and size, connections kept for the next one.

Replies are read piece by piece; where their reader is slow, the transport stops reading, so that little is held here.
A reply that is closed before its end closes its connection, which is how a server learns that nobody waits.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import urlsplit

import h11

from headwater.serve.tls import load_trusted

READ_BYTES = 1 << 16
BUFFER_BYTES = 1 << 16
"""What a connection holds unread, about."""
MAX_HEAD_BYTES = 1 << 15
MAX_HEADERS = 100
MAX_IDLE = 64
IDLE_S = 3.0
"""Servers close idle connections after 5 s or more; one that is about to be closed must not be used."""
SEND_TIMEOUT_S = 30.0
HOP_HEADERS = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade "
    b"content-length host expect proxy-connection date".split()
)
"""Headers that concern one connection only, or that every server writes itself."""

Headers = list[tuple[bytes, bytes]]


class UpstreamError(Exception):
    """A server gave no usable reply. `refused`: it refused the connection; `gone`: nothing listens there; `replied`: a
    part of a reply had come."""

    def __init__(self, text: str, *, refused: bool = False, gone: bool = False, replied: bool = False) -> None:
        super().__init__(text)
        self.refused = refused
        self.gone = gone
        self.replied = replied


class _Open(NamedTuple):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    state: h11.Connection


class Upstream:
    """Connections to one server."""

    def __init__(self, url: str, *, connect_timeout_s: float, ca_file: str | None = None) -> None:
        parts = urlsplit(url)
        self.url = url
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._path = parts.path.rstrip("/")
        self._netloc = parts.netloc.encode()
        self._tls = load_trusted(ca_file) if parts.scheme == "https" else None
        self._connect_timeout_s = connect_timeout_s
        self._idle: list[tuple[float, _Open]] = []

    async def request(
        self, method: str, target: str, headers: Iterable[tuple[bytes, bytes]] = (), body: bytes = b""
    ) -> UpstreamReply:
        """Send a request and return the head of its reply. Raises UpstreamError. No time limit but for connecting and
        sending: callers bring their own."""
        sent = [(b"host", self._netloc), *headers]
        if body or method not in ("GET", "HEAD"):
            sent.append((b"content-length", str(len(body)).encode()))
        while True:
            connection, is_reused = await self._connection()
            reply = UpstreamReply(self, connection)
            try:
                await self._send(connection, method, self._path + target, sent, body)
                await reply._read_head()
                return reply
            except UpstreamError as error:
                reply.close()
                # The server closed it as idle when the request was on its way.
                if is_reused and not error.replied:
                    continue
                raise
            except BaseException:
                reply.close()
                raise

    def prune(self) -> None:
        """Close connections that have been idle for too long to be used again."""
        oldest_s = asyncio.get_running_loop().time() - IDLE_S
        while self._idle and self._idle[0][0] < oldest_s:
            self._idle.pop(0)[1].writer.transport.abort()

    def close(self) -> None:
        """Close the connections that are idle."""
        while self._idle:
            self._idle.pop()[1].writer.transport.abort()

    async def _connection(self) -> tuple[_Open, bool]:
        now = asyncio.get_running_loop().time()
        while self._idle:
            since, connection = self._idle.pop()
            if now - since < IDLE_S and not (connection.reader.at_eof() or connection.writer.is_closing()):
                return connection, True
            connection.writer.transport.abort()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                reader, writer = await asyncio.open_connection(
                    self._host, self._port, ssl=self._tls, limit=BUFFER_BYTES
                )
        except TimeoutError:
            text = f"{self.url} accepted no connection within {self._connect_timeout_s:g} s"
            raise UpstreamError(text, refused=True) from None
        except (OSError, ValueError) as error:
            raise UpstreamError(f"{self.url} refused the connection: {error}", refused=True, gone=True) from error
        sock = writer.get_extra_info("socket")
        if sock is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SEND_TIMEOUT_S * 1000))
        state = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
        return _Open(reader, writer, state), False

    async def _send(self, connection: _Open, method: str, target: str, headers: Headers, body: bytes) -> None:
        state, writer = connection.state, connection.writer
        try:
            head = state.send(h11.Request(method=method, target=target, headers=headers))
            writer.write(head or b"")
            if body:
                writer.write(state.send(h11.Data(data=body)) or b"")
            state.send(h11.EndOfMessage())
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await writer.drain()
        except TimeoutError:
            raise UpstreamError(f"{self.url} read nothing of a request for {SEND_TIMEOUT_S:g} s") from None
        except h11.LocalProtocolError as error:
            raise UpstreamError(f"{self.url}: the request cannot be sent: {error}", replied=True) from error
        except OSError:
            pass  # it may have said why before it closed

    def _keep(self, connection: _Open) -> None:
        connection.state.start_next_cycle()
        if len(self._idle) >= MAX_IDLE or connection.writer.is_closing():
            connection.writer.transport.abort()
        else:
            self._idle.append((asyncio.get_running_loop().time(), connection))


class UpstreamReply:
    """A reply whose body is still to come."""

    def __init__(self, upstream: Upstream, connection: _Open) -> None:
        self._upstream = upstream
        self._connection: _Open | None = connection
        self._has_replied = False
        self.status = 0
        self.headers: Headers = []

    def header(self, name: bytes) -> bytes:
        """The first value of a header; empty without one."""
        return next((value for key, value in self.headers if key == name), b"")

    async def read(self) -> bytes:
        """The next piece of the body; empty at its end. Raises UpstreamError where it breaks off."""
        while True:
            event = await self._next_event()
            if isinstance(event, h11.Data):
                return bytes(event.data)
            if isinstance(event, h11.EndOfMessage):
                self.close()
                return b""

    async def read_all(self, most: int) -> bytes:
        """The whole body. Raises UpstreamError where it is larger."""
        body = bytearray()
        while piece := await self.read():
            body += piece
            if len(body) > most:
                self.close()
                raise UpstreamError(f"{self._upstream.url} sent more than {most} bytes", replied=True)
        return bytes(body)

    def close(self) -> None:
        """Keep the connection where the reply was read to its end, else cut it. Idempotent."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if connection.state.our_state is h11.DONE and connection.state.their_state is h11.DONE:
            self._upstream._keep(connection)
        else:
            connection.writer.transport.abort()

    async def _read_head(self) -> None:
        while True:
            event = await self._next_event()
            if isinstance(event, h11.Response):
                break
            if not isinstance(event, h11.InformationalResponse):
                raise UpstreamError(f"{self._upstream.url} sent no reply", replied=True)
        self.status = event.status_code
        self.headers = list(event.headers)
        if len(self.headers) > MAX_HEADERS:
            raise UpstreamError(f"{self._upstream.url} sent more than {MAX_HEADERS} headers", replied=True)

    async def _next_event(self) -> h11.Event | type[h11.PAUSED]:
        connection = self._connection
        if connection is None:
            return h11.EndOfMessage()
        url = self._upstream.url
        try:
            while (event := connection.state.next_event()) is h11.NEED_DATA:
                data = await connection.reader.read(READ_BYTES)
                self._has_replied |= bool(data)
                connection.state.receive_data(data)
                if not data and not self._has_replied:
                    raise UpstreamError(f"{url} closed the connection without a reply")
        except h11.RemoteProtocolError as error:
            raise UpstreamError(f"{url} sent a malformed or incomplete HTTP reply: {error}", replied=True) from error
        except OSError as error:
            raise UpstreamError(f"{url} broke off: {error}", replied=self._has_replied) from error
        if isinstance(event, h11.ConnectionClosed):
            raise UpstreamError(f"{url} closed the connection", replied=self._has_replied)
        return event  # type: ignore[return-value]


def end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Headers that a proxy passes on: those of one connection are left out, also those that `connection` names."""
    pairs = [(name.lower(), value) for name, value in headers]
    named = {item.strip().lower() for name, value in pairs if name == b"connection" for item in value.split(b",")}
    return [(name, value) for name, value in pairs if name not in HOP_HEADERS and name not in named]
