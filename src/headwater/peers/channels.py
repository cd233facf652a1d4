"""Connections to one peer for requests and answers: several at a time, each kept for the next request.

No request takes longer than its deadline. A connection speaks of one space; a request that fails closes its connection,
and where an idle one turns out to have ended (the peer was restarted) the other idle ones go with it.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from headwater.errors import (
    ConfigError,
    DeadlineError,
    InvalidArgumentError,
    PeerGoneError,
    PeerTimeoutError,
    WireError,
)
from headwater.locks import ForkSafeLock
from headwater.peers.address import PeerAddress, is_loopback
from headwater.peers.caller import LinkSettings, PeerCaller
from headwater.peers.carriers.tcp import Connection
from headwater.peers.hello import PeerRole, read_secret
from headwater.peers.options import client_tls as caller_tls
from headwater.peers.wire import Header, Type, encode_frame
from headwater.stores.base import SpaceRef
from headwater.stores.url import StoreUrl

IDLE_S = 30.0
"""A connection that nobody used for so long is closed."""
CONNECT_S = 1.0
HELLO_S = 3.0
"""Of silence in a handshake: a host that accepts connections and says nothing is not waited for as long as a read."""
QUESTIONS = 4
"""Connections beside those for reads, at most."""
DEFAULT_CONNECTIONS = 4


@dataclass(frozen=True)
class ChannelSettings:
    """Where a peer is, and how to be let in."""

    address: PeerAddress
    secret: bytes | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    connections: int = DEFAULT_CONNECTIONS

    @classmethod
    def of(cls, url: StoreUrl) -> ChannelSettings:
        """What a `peer://` URL says. Raises ConfigError where its files cannot be used, or there is no secret although
        the peer is another host."""
        address, path = PeerAddress(url.host, url.port), url.options.get("secret_file")
        if path is None and not is_loopback(address.host):
            raise ConfigError(f"{url}: a peer on another host needs a secret that both know; give secret_file=FILE")
        secret = None if path is None else read_secret(path)
        return cls(address, secret, client_tls(url), url.count("connections", DEFAULT_CONNECTIONS))


def client_tls(url: StoreUrl) -> ssl.SSLContext | None:
    """TLS as a URL asks for it: `tls=on`, or a file with certificates. Raises ConfigError."""
    ca, cert, key = (url.options.get(name) for name in ("ca", "cert", "key"))
    if url.options.get("tls", "on" if ca or cert else "off") == "off":
        return None
    try:
        return caller_tls(cert, key, ca)
    except InvalidArgumentError as error:
        raise ConfigError(f"{url}: {error}") from error


class PeerChannel:
    """One connection. After an error it can only be closed."""

    def __init__(self, connection: Connection, encodings: int = 0) -> None:
        """`encodings`: see `Welcome.encodings`."""
        self.connection = connection
        self.encodings = encodings
        self.is_new = True
        self.used_s = time.monotonic()
        self._number = 0

    def ask(self, kind: Type, meta: bytes, deadline: float) -> tuple[Header, bytes]:
        """Send a request and return its answer's header and meta; the data, if any, is the caller's to take."""
        self._number = (self._number + 1) & 0xFFFFFFFF
        self.connection.send(encode_frame(kind, meta, number=self._number), deadline)
        return self.next(deadline)

    def next(self, deadline: float, kind: Type = Type.ANSWER) -> tuple[Header, bytes]:
        """The next frame that belongs to the last request."""
        self._await_bytes(deadline)
        header, meta = self.connection.receive(deadline)
        if header.type != kind or header.number != self._number:
            raise WireError(f"unexpected {header.type.name} frame")
        return header, meta

    def _await_bytes(self, deadline: float) -> None:
        """Wait for the first byte to the millisecond: what comes after it comes soon, or by the connection's tick."""
        if self.connection.has_buffered:
            return
        poller = select.poll()
        poller.register(self.connection.fileno(), select.POLLIN)
        if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise PeerTimeoutError("the peer does not answer in time")

    def close(self) -> None:
        """Idempotent."""
        self.connection.close()


class Channels:
    """All connections of this process to one peer. Thread-safe; a forked child has its own."""

    def __init__(self, settings: ChannelSettings) -> None:
        self.settings = settings
        self._lock = ForkSafeLock()
        self._begin()
        self._is_closed = False

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._idle: dict[bytes, list[PeerChannel]] = {}
        self._free = threading.BoundedSemaphore(self.settings.connections)
        self._free_to_ask = threading.BoundedSemaphore(QUESTIONS)

    @contextmanager
    def use(self, space: SpaceRef | None, deadline: float, *, is_question: bool = False) -> Iterator[PeerChannel]:
        """A connection for requests about a space (None: about none). Raises PeerError where there is none in time.

        Questions, whose answers are small, have connections of their own: they do not wait for reads.
        """
        if self._pid != os.getpid():
            self._begin()  # its parent's connections are its parent's
        free = self._free_to_ask if is_question else self._free
        if not free.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise DeadlineError(f"all connections to {self.settings.address} are in use")
        try:
            channel = self._take(space, deadline)
            try:
                yield channel
            except BaseException as error:
                channel.close()
                if isinstance(error, PeerGoneError) and not channel.is_new:
                    self._close_idle()
                raise
            self._give(space, channel)
        finally:
            free.release()

    def open(self, space: SpaceRef | None, deadline: float) -> PeerChannel:
        """A new connection, which is the caller's to close."""
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise PeerTimeoutError("there was no time left to connect")
        settings = LinkSettings(
            secret=self.settings.secret,
            tls=self.settings.tls,
            connect_s=min(CONNECT_S, left_s),
            io_s=min(HELLO_S, left_s),
        )
        server = int.from_bytes(secrets.token_bytes(8), "little") | 1
        scope, described = (bytes(32), b"") if space is None else (space.scope, describe(space))
        caller = PeerCaller(PeerRole.FOLLOW if space is None else PeerRole.PULL, server, 0, scope, described)
        connection, welcome = caller.call(self.settings.address, secrets.token_bytes(16), settings)
        return PeerChannel(connection, welcome.encodings)

    def _take(self, space: SpaceRef | None, deadline: float) -> PeerChannel:
        scope, now = b"" if space is None else space.scope, time.monotonic()
        with self._lock:
            idle = self._idle.get(scope, [])
            channel = idle.pop() if idle else None
            stale = [old for others in self._idle.values() for old in others if now - old.used_s > IDLE_S]
            for others in self._idle.values():
                others[:] = [old for old in others if old not in stale]
        for old in stale:
            old.close()
        if channel is not None and now - channel.used_s <= IDLE_S:
            channel.is_new = False
            return channel
        if channel is not None:
            channel.close()
        return self.open(space, deadline)

    def _give(self, space: SpaceRef | None, channel: PeerChannel) -> None:
        channel.used_s = time.monotonic()
        with self._lock:
            if not self._is_closed:
                self._idle.setdefault(b"" if space is None else space.scope, []).append(channel)
                return
        channel.close()

    def _close_idle(self) -> None:
        with self._lock:
            idle, self._idle = [channel for some in self._idle.values() for channel in some], {}
        for channel in idle:
            channel.close()

    def close(self) -> None:
        """Close what is idle; what is in use is closed when it is given back. Idempotent."""
        self._is_closed = True
        if self._pid == os.getpid():
            self._close_idle()


def describe(space: SpaceRef) -> bytes:
    """A space for a HELLO: what `hello.describe_space` says, but for the label, which is no part of an identity."""
    return json.dumps(json.loads(space.payload) | {"chunk_tokens": space.chunk_tokens}, sort_keys=True).encode()
