"""The listening end: one process per host and pool, into which other hosts push, and from which they may pull.

A thread a connection, since a connection's time is spent in the kernel. What a connection may do follows from the role
in its hello: see `ROLES`. A connection that says anything out of order, out of bounds or out of time is closed and
counted, and costs nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

from headwater.errors import (
    HeadwaterError,
    InvalidArgumentError,
    PeerError,
    PeerGoneError,
    PeerRefusedError,
    PeerTimeoutError,
)
from headwater.kv.encoding import ENCODINGS
from headwater.peers.address import PeerAddress, is_loopback
from headwater.peers.caller import check_carrier
from headwater.peers.carriers import tcp
from headwater.peers.event_serving import EventSession
from headwater.peers.hello import (
    CarrierBit,
    Greeting,
    Hello,
    PeerRole,
    Welcome,
    new_greeting,
    open_space,
)
from headwater.peers.landing import Landing
from headwater.peers.push_session import PushSession
from headwater.peers.serving import PullSession
from headwater.peers.wire import Header, Refusal, Type, encode_frame, encode_refusal, encoding_bits
from headwater.pool.pool import Pool
from headwater.pool.space import Space

log = logging.getLogger("headwater")

HELLO_S = 5.0
MAX_CONNECTIONS = 512
MAX_UNPROVEN = 64
"""Connections that have not proved anything yet."""
_SLOWEST_RATE = 10e6
"""Bytes a second below which a peer counts as stopped."""
_SWEEP_S = 0.25


@dataclass(frozen=True)
class ReceiverSettings:
    """How a receiver treats its callers."""

    secret: bytes | None = field(default=None, repr=False)
    scopes: tuple[bytes, ...] = ()
    """The only spaces that are taken (see `hello.scope_of`); all where there are none."""
    share: float = 0.5
    """Of the room that the pool gives to pending chunks: what all peers together may take."""
    silence_s: float = 5.0
    """A caller that has begun chunks and is not heard for so long has failed."""
    join_s: float = 5.0
    """How long a chunk waits for a rank of its server that has not come at all."""
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    carrier: str = "tcp"
    """Or `nixl`: callers that offer it write into extents themselves."""


class Session(Protocol):
    """What a role does with its connections."""

    hello: Hello
    last_frame_s: float

    @property
    def has_begun(self) -> bool:
        """Whether silence is failure now."""

    def join(self, connection: tcp.Connection) -> bool:
        """One more connection; False where the session is over."""

    def end(self) -> None:
        """Give everything up, and end all connections. Idempotent."""

    def handle(self, connection: tcp.Connection, header: Header, meta: bytes, deadline: float) -> None:
        """Do what a frame says, and answer it."""


MakeSession = Callable[["Receiver", Hello, Space | None], Session]
"""No space: the caller named none."""


def _push(receiver: Receiver, hello: Hello, space: Space | None) -> Session:
    if space is None or not space.mapped:
        raise PeerRefusedError("this pool cannot be filled in place", Refusal.ROLE)
    return PushSession(hello, space, receiver.landing)


def _pull(receiver: Receiver, hello: Hello, space: Space | None) -> Session:
    if space is None:
        raise PeerRefusedError("a pull needs a space", Refusal.SPACE)
    return PullSession(hello, space, receiver.pool.first_tier)


def _follow(receiver: Receiver, hello: Hello, space: Space | None) -> Session:
    return EventSession(hello, receiver.pool.first_tier)


ROLES: dict[PeerRole, MakeSession] = {PeerRole.PUSH: _push, PeerRole.PULL: _pull, PeerRole.FOLLOW: _follow}


class Receiver:
    """See the module. `start` returns at once; `close` ends all connections and gives everything back."""

    def __init__(self, pool: Pool, address: PeerAddress, settings: ReceiverSettings | None = None) -> None:
        """Raises InvalidArgumentError where it would listen to other hosts without a secret, PeerError where it cannot
        listen at all."""
        self.settings = settings or ReceiverSettings()
        if self.settings.secret is None and not is_loopback(address.host):
            raise InvalidArgumentError(
                f"{address} can be reached from other hosts, and whoever reaches it could write to the pool; give a "
                "secret that all peers share, or listen on 127.0.0.1"
            )
        check_carrier(self.settings.carrier, self.settings.tls)
        self.pool = pool
        self.landing = Landing(int(pool.max_pending_bytes * self.settings.share))
        self.counts: Counter[str] = Counter()
        self._sock = tcp.listen(address)
        self.address = PeerAddress(address.host, self._sock.getsockname()[1])
        self._spaces: dict[bytes, Space] = {}
        self._sessions: dict[bytes, Session] = {}
        self._connections: dict[int, tcp.Connection] = {}
        self._num_unproven = 0
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Begin to listen."""
        for target in (self._accept, self._keep_house):
            thread = threading.Thread(target=target, name=f"headwater-peers{target.__name__}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """End everything; pending chunks of all peers are aborted. Idempotent."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        with self._lock:
            sessions, connections = list(self._sessions.values()), list(self._connections.values())
        for connection in connections:
            connection.shut()
        for session in sessions:
            session.end()
        for thread in list(self._threads):
            if thread is not threading.current_thread():
                thread.join(5.0)

    def stats(self) -> dict[str, Any]:
        """Figures for people and metrics."""
        with self._lock:
            open_now = {"connections": len(self._connections), "sessions": len(self._sessions)}
        landing = self.landing
        room = {"pending_bytes": landing.pending_bytes, "share_bytes": landing.share_bytes}
        return {"address": str(self.address), **open_now, **room, **self.counts, **landing.counts}

    # ---- threads ------------------------------------------------------------------------------------------------
    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = self._sock.accept()
            except OSError:
                if not self._closing.is_set():
                    time.sleep(0.05)  # out of descriptors, most likely
                continue
            with self._lock:
                is_room = len(self._connections) < MAX_CONNECTIONS and self._num_unproven < MAX_UNPROVEN
                self._num_unproven += is_room
            if not is_room:
                self.counts["refused_too_many"] += 1
                sock.close()
                continue
            self.counts["accepted"] += 1
            try:
                threading.Thread(target=self._serve, args=(sock,), name="headwater-peer", daemon=True).start()
            except RuntimeError as error:  # out of threads: this caller tries again
                log.warning("a peer's connection failed: %s", error)
                with self._lock:
                    self._num_unproven -= 1
                self.counts["refused_too_many"] += 1
                sock.close()

    def _keep_house(self) -> None:
        while not self._closing.wait(_SWEEP_S):
            self.landing.sweep(self.settings.join_s)
            self.landing.tidy()

    def _serve(self, sock: socket.socket) -> None:
        """One connection, from its greeting to its end."""
        session: Session | None = None
        connection: tcp.Connection | None = None
        try:
            try:
                connection = tcp.wrap(sock, HELLO_S, self.settings.tls)
                with self._lock:
                    self._connections[id(connection)] = connection
                session = self._meet(connection)
            finally:
                with self._lock:
                    self._num_unproven -= 1
            while not self._closing.is_set():
                self._next(connection, session)
        except PeerGoneError:
            self.counts["ended"] += 1
        except PeerError as error:
            self._refuse(connection, error)
        except HeadwaterError as error:
            self.counts["failed"] += 1
            log.warning("a peer's connection failed: %s", error)
        except Exception:
            self.counts["failed"] += 1
            log.exception("a peer's connection failed")
        finally:
            if session is not None:
                self._drop(session)
            if isinstance(session, PushSession) and connection is not None:
                session.settle(connection, self._closing.is_set)
            if connection is not None:
                with self._lock:
                    self._connections.pop(id(connection), None)
                connection.close()

    def _next(self, connection: tcp.Connection, session: Session) -> None:
        """The next frame of a connection: it may be long in coming, unless something waits for it."""
        silence_s = self.settings.silence_s
        if isinstance(session, PushSession):
            session.help_on(connection, lambda: self._is_silent(session))
        raw = connection.await_header(lambda: self._is_silent(session))
        session.last_frame_s = time.monotonic()
        header, meta = connection.receive_meta(raw, session.last_frame_s + silence_s)
        session.handle(connection, header, meta, session.last_frame_s + silence_s + header.data_bytes / _SLOWEST_RATE)
        session.last_frame_s = time.monotonic()

    def _is_silent(self, session: Session) -> bool:
        late = time.monotonic() - session.last_frame_s > self.settings.silence_s
        is_over = isinstance(session, PushSession) and session.is_over
        return self._closing.is_set() or is_over or (late and session.has_begun)

    def _refuse(self, connection: tcp.Connection | None, error: PeerError) -> None:
        code = Refusal.SILENCE if isinstance(error, PeerTimeoutError) else Refusal.NOT_OURS
        if isinstance(error, PeerRefusedError) and error.code in list(Refusal):
            code = Refusal(error.code)
        self.counts[f"refused_{code.name.lower()}"] += 1
        log.info("refused a peer: %s", error)
        if connection is not None:
            with contextlib.suppress(PeerError):
                connection.send(encode_refusal(code, str(error)), time.monotonic() + 0.5)

    # ---- meeting ------------------------------------------------------------------------------------------------
    def _meet(self, connection: tcp.Connection) -> Session:
        """Greet, hear the hello, check everything, answer. Raises PeerError; nothing was allocated then."""
        deadline, secret = time.monotonic() + HELLO_S, self.settings.secret
        greeting: Greeting = new_greeting(secret)
        said = greeting.encode()
        connection.send(encode_frame(Type.GREETING, said), deadline)
        _, meta = connection.receive(deadline, Type.HELLO)  # nothing else of a stranger's is taken into memory
        hello = Hello.decode(meta, said, secret)
        session = self._session(hello, connection)
        carrier = 0
        if isinstance(session, PushSession) and self.settings.carrier == "nixl":
            carrier = session.choose_carrier(CarrierBit.NIXL)
            deadline = time.monotonic() + HELLO_S
        silence_ms = int(self.settings.silence_s * 1000)
        welcome = Welcome(silence_ms, self.landing.share_bytes, carrier, encoding_bits(ENCODINGS))
        try:
            connection.send(encode_frame(Type.WELCOME, welcome.encode(said, meta, secret)), deadline)
        except PeerError:
            self._drop(session)
            raise
        self.counts["welcomed"] += 1
        return session

    def _session(self, hello: Hello, connection: tcp.Connection) -> Session:
        make = ROLES.get(hello.role)
        if make is None:
            raise PeerRefusedError(f"{hello.role.name} is not offered here", Refusal.ROLE)
        space = self._space(hello, self.settings.scopes) if hello.space else None
        replaced: list[Session] = []
        with self._lock:
            session = self._sessions.get(hello.session)
            if session is not None and (session.hello.caller, session.hello.scope) != (hello.caller, hello.scope):
                raise PeerRefusedError("that session belongs to another caller", Refusal.NOT_OURS)
            if session is None:
                replaced = [old for old in self._sessions.values() if old.hello.caller == hello.caller]
                session = self._sessions[hello.session] = make(self, hello, space)
        for old in replaced:
            self._drop(old)
        if not session.join(connection):
            raise PeerRefusedError("that session is over", Refusal.NOT_OURS)
        return session

    def _space(self, hello: Hello, accepted: Collection[bytes]) -> Space:
        with self._lock:
            known = self._spaces.get(hello.scope)
        if known is None:
            known = open_space(self.pool, hello, accepted)
            with self._lock:
                known = self._spaces.setdefault(hello.scope, known)
        return known

    def _drop(self, session: Session) -> None:
        with self._lock:
            if self._sessions.get(session.hello.session) is session:
                del self._sessions[session.hello.session]
        session.end()
