"""Frames over TCP: scattered pieces out by `sendmsg` and in by `recvmsg_into`, every call under a deadline.

Sockets stay in blocking mode with a kernel timeout (a *tick*), so that one call moves as much as the socket gives and
releases the interpreter meanwhile; between ticks the deadline is looked at. `TCP_USER_TIMEOUT` ends connections whose
bytes nobody acknowledges. One thread at a time may use a connection; `shut` may come from any.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Sequence

from headwater.errors import PeerError, PeerGoneError, PeerRefusedError, PeerTimeoutError, WireError
from headwater.peers.address import PeerAddress
from headwater.peers.wire import HEADER, Header, Type, decode_header, decode_refusal

TICK_S = 0.25
MAX_PIECES = 512
"""In one system call; the kernel takes 1,024."""
USER_TIMEOUT_MS = 5000

Pieces = Sequence[memoryview]


class Connection:
    """One TCP connection. After a PeerTimeoutError, PeerGoneError or WireError it can only be closed."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.is_open = True
        _prepare(sock)

    def fileno(self) -> int:
        """For polling."""
        return self._sock.fileno()

    @property
    def has_buffered(self) -> bool:
        """Whether bytes were received that polling does not show."""
        return False

    def is_readable(self, timeout_s: float = 0.0) -> bool:
        """Whether something has come, or the connection has ended."""
        if self.has_buffered:
            return True
        poller = select.poll()
        poller.register(self._sock.fileno(), select.POLLIN)
        return bool(poller.poll(timeout_s * 1000))

    # ---- out ----------------------------------------------------------------------------------------------------
    def send(self, frame: bytes, deadline: float, pieces: Pieces = ()) -> None:
        """Send a frame and what follows it. The pieces may be reused at the return, also by an exception."""
        todo = [memoryview(frame), *pieces]
        first = 0
        while first < len(todo):
            try:
                sent = self._send_some(todo[first : first + MAX_PIECES])
            except (BlockingIOError, TimeoutError):
                sent = 0
            except OSError as error:
                raise PeerGoneError(f"the connection to the peer broke: {error.strerror or error}") from error
            while first < len(todo) and sent >= len(todo[first]):
                sent -= len(todo[first])
                first += 1
            if sent:
                todo[first] = todo[first][sent:]
            if first < len(todo) and time.monotonic() >= deadline:
                raise PeerTimeoutError("the peer stopped reading")

    def _send_some(self, pieces: Pieces) -> int:
        return self._sock.sendmsg(pieces)

    # ---- in -----------------------------------------------------------------------------------------------------
    def receive(self, deadline: float, kind: Type | None = None) -> tuple[Header, bytes]:
        """The next frame's header and meta; its data is the caller's to take. REFUSE is raised as PeerRefusedError.
        With `kind`, nothing of any other frame is taken, and none that has data."""
        raw = bytearray(HEADER.size)
        self.receive_into([memoryview(raw)], deadline)
        return self.receive_meta(bytes(raw), deadline, kind)

    def await_header(self, is_over: Callable[[], bool]) -> bytes:
        """The next header, however long it takes; PeerTimeoutError once `is_over`, asked every tick, says so."""
        raw = bytearray(HEADER.size)
        got = 0
        while got < len(raw):
            try:
                more = self._receive_some([memoryview(raw)[got:]])
                if not more:
                    raise PeerGoneError("the peer closed the connection")
                got += more
            except (BlockingIOError, TimeoutError):
                if is_over():
                    raise PeerTimeoutError("the peer sent nothing in time") from None
            except OSError as error:
                raise PeerGoneError(f"the connection to the peer broke: {error.strerror or error}") from error
        return bytes(raw)

    def receive_meta(self, raw: bytes, deadline: float, kind: Type | None = None) -> tuple[Header, bytes]:
        """The rest of a frame whose header has come."""
        header = decode_header(raw)
        if kind is not None and (header.type not in (kind, Type.REFUSE) or header.data_bytes):
            raise WireError(f"got a {header.type.name} frame; expected {kind.name}")
        meta = bytearray(header.meta_bytes)
        self.receive_into([memoryview(meta)], deadline)
        header.check(meta)
        if header.type == Type.REFUSE:
            code, text = decode_refusal(bytes(meta))
            raise PeerRefusedError(f"the peer refused: {text}", code)
        return header, bytes(meta)

    def receive_into(self, pieces: Pieces, deadline: float) -> None:
        """Fill pieces, one after another."""
        todo, first = list(pieces), 0
        while first < len(todo) and not len(todo[first]):
            first += 1
        while first < len(todo):
            try:
                got = self._receive_some(todo[first : first + MAX_PIECES])
                if not got:
                    raise PeerGoneError("the peer closed the connection")
            except (BlockingIOError, TimeoutError):
                got = 0
            except OSError as error:
                raise PeerGoneError(f"the connection to the peer broke: {error.strerror or error}") from error
            while first < len(todo) and got >= len(todo[first]):
                got -= len(todo[first])
                first += 1
            if got:
                todo[first] = todo[first][got:]
            if first < len(todo) and time.monotonic() >= deadline:
                raise PeerTimeoutError("the peer sent nothing in time")

    def _receive_some(self, pieces: Pieces) -> int:
        return self._sock.recvmsg_into(pieces, 0, socket.MSG_WAITALL)[0]

    def has_ended(self) -> bool:
        """Whether the other side has closed the connection, or cannot be reached any more. Waits for a tick, and throws
        away what comes; not after `shut`, which makes every connection look so."""
        scratch = memoryview(bytearray(1 << 16))
        try:
            return not self._receive_some([scratch])
        except (BlockingIOError, TimeoutError):
            return False
        except OSError:
            return True

    # ---- the end ------------------------------------------------------------------------------------------------
    def shut_out(self) -> None:
        """Say nothing more, and go on listening: the other side sees the end."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def shut(self) -> None:
        """End whatever a thread waits for on this connection. Does not close it."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Idempotent."""
        self.is_open = False
        with contextlib.suppress(OSError):
            self._sock.close()


class TlsConnection(Connection):
    """The same over TLS, piece by piece: there is no scattered write of encrypted bytes."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        super().__init__(sock)
        self._tls = sock
        sock.settimeout(TICK_S)

    @property
    def has_buffered(self) -> bool:
        return self._tls.pending() > 0

    def _send_some(self, pieces: Pieces) -> int:
        return self._tls.send(pieces[0])

    def _receive_some(self, pieces: Pieces) -> int:
        return self._tls.recv_into(pieces[0])


def _prepare(sock: socket.socket) -> None:
    sock.settimeout(None)
    tick = struct.pack("ll", int(TICK_S), int(TICK_S % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tick)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    with contextlib.suppress(OSError):  # not a TCP socket
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)


def connect(address: PeerAddress, timeout_s: float, tls: ssl.SSLContext | None = None) -> Connection:
    """Raises PeerError where nobody answers in time."""
    try:
        sock = socket.create_connection(address, timeout_s)
    except OSError as error:
        raise PeerError(f"{address} cannot be reached: {error.strerror or error}") from error
    return wrap(sock, timeout_s, tls, server_hostname=address.host)


def wrap(
    sock: socket.socket, timeout_s: float, tls: ssl.SSLContext | None, *, server_hostname: str | None = None
) -> Connection:
    """A connected socket as a connection; with TLS, after its handshake. The socket is closed where that fails."""
    try:
        if tls is None:
            return Connection(sock)
        sock.settimeout(timeout_s)
        wrapped = tls.wrap_socket(sock, server_side=server_hostname is None, server_hostname=server_hostname)
        return TlsConnection(wrapped)
    except (OSError, ValueError) as error:
        sock.close()
        raise PeerError(f"TLS with the peer failed: {error}") from error


def listen(address: PeerAddress) -> socket.socket:
    """A listening socket that can be bound again right after a restart. Raises PeerError where it cannot be had."""
    try:
        family, _, _, _, where = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise PeerError(f"cannot listen on {address}: {error.strerror or error}") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
        sock.listen(128)
    except OSError as error:
        sock.close()
        raise PeerError(f"cannot listen on {address}: {error.strerror or error}") from error
    return sock
