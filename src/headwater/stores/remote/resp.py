"""One connection that speaks Redis' protocol (RESP2), with total deadlines and without copies of large values.

The usual client library answers with fresh `bytes`, bounds the wait for each packet and not for the whole answer, and
believes any length it is told. Here large values leave from and land in the caller's own memory, every call ends by its
deadline, and whatever is longer than it can be is an error.
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from typing import Any

from headwater.errors import BackendError, DeadlineError
from headwater.stores.remote.base import Bytes

_LINE_LIMIT = 1 << 16
_BUFFER = 1 << 16
_IOV = 512
_SEND_ALONE = 1 << 14


class RedisRefusal:
    """An error that the server answered with: `-OOM …`, `-WRONGPASS …`."""

    def __init__(self, text: str) -> None:
        self.text = text[:200]

    @property
    def code(self) -> str:
        """Its first word."""
        return self.text.partition(" ")[0]


Reply = int | bytes | None | list["Reply"] | RedisRefusal


class Command:
    """Commands as they go over the wire: small parts joined, large ones as they lie in the caller's memory."""

    def __init__(self) -> None:
        self._small = bytearray()
        self._parts: list[bytes | Bytes] = []
        self.num_commands = 0

    def add(self, *words: str | bytes | int | Sequence[Bytes]) -> None:
        """One command. A sequence of arrays is one argument."""
        self._small += b"*%d\r\n" % len(words)
        for word in words:
            if isinstance(word, (str, bytes, int)):
                raw = word if isinstance(word, bytes) else str(word).encode()
                self._small += b"$%d\r\n" % len(raw)
                self._small += raw
            else:
                self._small += b"$%d\r\n" % sum(part.nbytes for part in word)
                for part in word:
                    self._append(part)
            self._small += b"\r\n"
        self.num_commands += 1

    def _append(self, part: Bytes) -> None:
        if part.nbytes < _SEND_ALONE:
            self._small += part.tobytes()
            return
        self._parts += [bytes(self._small), part]
        self._small.clear()

    def take(self) -> list[bytes | Bytes]:
        """Everything so far, to be sent; it begins anew."""
        parts = [*self._parts, bytes(self._small)]
        self._parts, self._small, self.num_commands = [], bytearray(), 0
        return parts


class RedisConnection:
    """One connected socket. Not thread-safe. After any exception it must be closed: nobody knows what is on its way."""

    def __init__(self, host: str, port: int, deadline: float, tls: ssl.SSLContext | None) -> None:
        try:
            sock = _connect(host, port, deadline)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if tls is not None:
                sock.settimeout(_left(deadline))
                sock = tls.wrap_socket(sock, server_hostname=host)
        except TimeoutError as error:
            raise DeadlineError(f"no connection to {host}:{port} in time") from error
        except OSError as error:
            raise BackendError(f"no connection to {host}:{port}: {error}") from error
        self._socket = sock
        self._is_tls = tls is not None
        self._buffer = bytearray(_BUFFER)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0

    def close(self) -> None:
        """Drop it."""
        self._socket.close()

    @property
    def is_stale(self) -> bool:
        """Whether an idle connection has something to say: the server closed it, or it is out of step."""
        if self._start != self._end:
            return True
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    # ---- sending ------------------------------------------------------------------------------------------------
    def send(self, parts: Sequence[bytes | Bytes], deadline: float) -> None:
        """Send all of it."""
        views = [memoryview(part).cast("B") for part in parts if len(part)]
        try:
            while views:
                self._socket.settimeout(_left(deadline))
                batch = views[:_IOV]
                sent = self._socket.send(batch[0]) if self._is_tls else self._socket.sendmsg(batch)
                done = 0
                while done < len(batch) and sent >= len(batch[done]):
                    sent -= len(batch[done])
                    done += 1
                del views[:done]
                if sent:
                    views[0] = views[0][sent:]
        except TimeoutError as error:
            raise DeadlineError("the server stopped reading") from error
        except OSError as error:
            raise BackendError(f"the connection broke while sending: {error}") from error

    # ---- receiving ----------------------------------------------------------------------------------------------
    def reply(self, deadline: float, limit: int = _LINE_LIMIT, depth: int = 1) -> Reply:
        """One whole answer. Bulk strings may have `limit` bytes, arrays as many elements."""
        line = self._line(deadline)
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return RedisRefusal(rest.decode("utf-8", "replace"))
        if kind == b":":
            return _number(rest)
        if kind == b"$":
            length = _number(rest)
            if length == -1:
                return None
            if not 0 <= length <= limit:
                raise BackendError(f"the server announced a value of {length} bytes; at most {limit} were expected")
            value = bytearray(length)
            self._fill([memoryview(value)], deadline)
            self._end_of_bulk(deadline)
            return bytes(value)
        if kind == b"*" and depth:
            count = _number(rest)
            if not -1 <= count <= limit:
                raise BackendError(f"the server announced {count} values; at most {limit} were expected")
            return None if count < 0 else [self.reply(deadline, limit, depth - 1) for _ in range(count)]
        raise BackendError(f"the server answered {line[:32]!r}, which is not the Redis protocol")

    def bulk_into(self, targets: Sequence[Bytes], length: int, deadline: float) -> bool:
        """An answer of exactly that length, straight into these targets; False where it is nil, empty or shorter."""
        line = self._line(deadline)
        if line[:1] == b"-":
            raise BackendError(f"the server refused a read: {RedisRefusal(line[1:].decode('utf-8', 'replace')).code}")
        if line[:1] != b"$":
            raise BackendError(f"the server answered {line[:32]!r} instead of a value")
        announced = _number(line[1:])
        if announced == -1:
            return False
        if 0 <= announced < length:
            self._fill([memoryview(bytearray(announced))], deadline)
            self._end_of_bulk(deadline)
            return False
        if announced != length:
            raise BackendError(f"the server announced a value of {announced} bytes instead of {length}")
        self._fill([memoryview(target).cast("B") for target in targets], deadline)
        self._end_of_bulk(deadline)
        return True

    def _fill(self, targets: Sequence[memoryview], deadline: float) -> None:
        for target in targets:
            at = min(len(target), self._end - self._start)
            target[:at] = self._view[self._start : self._start + at]
            self._start += at
            while at < len(target):
                at += self._receive(target[at:], deadline)

    def _line(self, deadline: float) -> bytes:
        searched = self._start
        while (found := self._buffer.find(b"\r\n", searched, self._end)) < 0:
            searched = max(self._start, self._end - 1)
            if self._start:
                waiting = self._end - self._start
                self._view[:waiting] = bytes(self._view[self._start : self._end])
                searched -= self._start
                self._start, self._end = 0, waiting
            if self._end == len(self._buffer):
                raise BackendError(f"the server sent a line of more than {_LINE_LIMIT} bytes")
            self._end += self._receive(self._view[self._end :], deadline)
        line = bytes(self._view[self._start : found])
        self._start = found + 2
        return line

    def _end_of_bulk(self, deadline: float) -> None:
        if self._line(deadline):
            raise BackendError("the server sent more bytes than it had announced")

    def _receive(self, into: memoryview, deadline: float) -> int:
        try:
            self._socket.settimeout(_left(deadline))
            count = self._socket.recv_into(into)
        except TimeoutError as error:
            raise DeadlineError("the server does not answer in time") from error
        except OSError as error:
            raise BackendError(f"the connection broke: {error}") from error
        if not count:
            raise BackendError("the server closed the connection")
        return count


def _connect(host: str, port: int, deadline: float) -> socket.socket:
    """A connection to the first of a host's addresses that takes one. Raises OSError."""
    refused: OSError | None = None
    for family, kind, protocol, _, place in _addresses(host, port, deadline):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(_left(deadline))
            sock.connect(place)
            return sock
        except OSError as error:
            sock.close()
            refused = error
    raise refused or OSError(f"{host} has no address")


def _addresses(host: str, port: int, deadline: float) -> list[Any]:
    """Asking for a name has no deadline, and waits for half a minute where nobody answers: so, in a thread."""
    found: list[Any] = []
    failed: list[OSError] = []

    def ask() -> None:
        try:
            found.extend(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except OSError as error:
            failed.append(error)

    asking = threading.Thread(target=ask, name="headwater-names", daemon=True)
    asking.start()
    asking.join(_left(deadline))
    if failed:
        raise failed[0]
    if asking.is_alive():
        raise TimeoutError(f"the name {host} could not be resolved in time")
    return found


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineError("no time is left")
    return left


def _number(raw: bytes) -> int:
    try:
        if len(raw) > 20:
            raise ValueError
        return int(raw)
    except ValueError as error:
        raise BackendError(f"the server sent {raw[:32]!r} instead of a number") from error
