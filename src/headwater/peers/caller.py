"""The calling end of a connection: connect, hear the greeting, say hello, check the welcome."""

from __future__ import annotations

import secrets
import ssl
import time
from dataclasses import dataclass, field

from headwater.errors import InvalidArgumentError, PeerRefusedError
from headwater.peers.address import PeerAddress, is_loopback
from headwater.peers.carriers import nixl, tcp
from headwater.peers.hello import NONCE_BYTES, Greeting, Hello, PeerRole, Welcome
from headwater.peers.wire import Refusal, Type, encode_frame

CARRIER_S = 5.0
"""How much longer a welcome may take where the receiver starts a carrier for it: half a second on a quiet host."""


@dataclass(frozen=True)
class LinkSettings:
    """How a rank treats its peers."""

    secret: bytes | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    connect_s: float = 1.0
    io_s: float = 3.0
    """For one frame, beyond the time that its bytes take at 10 MB/s."""
    dead_s: float = 0.25
    """How long a peer is left alone after it failed. One that does not answer costs a deadline each time, so the time
    is doubled with each failure, up to eight times as long."""
    carrier: str = "tcp"
    """Or `nixl`: one-sided writes, where the peer takes them too; otherwise tcp. It uses one connection."""
    connections: int = 1
    """Connections to a peer, up to 4: groups of layers of 8 MiB and more are divided among them."""
    eager_bytes: int = 8 << 20
    """What is present and no larger than this is sent with its announcement: should the peer have it, little is
    wasted."""
    max_queued: int = 4096
    """Things that the thread may have before it; what comes beyond that is dropped."""


def check_carrier(carrier: str, tls: ssl.SSLContext | None) -> None:
    """Raise InvalidArgumentError unless this carrier can be used: there is one of that name, it can be imported, and
    nobody expects it to encrypt."""
    if carrier == "tcp":
        return
    if carrier != "nixl":
        raise InvalidArgumentError(f"there is no carrier {carrier[:40]!r}; expected tcp or nixl")
    if tls is not None:
        raise InvalidArgumentError("NIXL does not encrypt; use the tcp carrier with TLS")
    if (reason := nixl.why_not()) is not None:
        raise InvalidArgumentError(reason)


@dataclass(frozen=True)
class PeerCaller:
    """Who calls, and about which KV."""

    role: PeerRole
    server: int
    rank: int
    scope: bytes = bytes(32)
    space: bytes = b""

    def call(
        self, address: PeerAddress, session: bytes, settings: LinkSettings, number: int = 0, carriers: int = 0
    ) -> tuple[tcp.Connection, Welcome]:
        """A connection of a session, ready for requests. Raises PeerError where there is none to be had in time."""
        secret = settings.secret
        if secret is None and not is_loopback(address.host):
            raise PeerRefusedError(
                f"{address} is another host, and no secret is configured; give both ends a secret file", Refusal.SECRET
            )
        connection = tcp.connect(address, settings.connect_s, settings.tls)
        try:
            deadline = time.monotonic() + settings.io_s + (CARRIER_S if carriers else 0.0)
            _, greeting = connection.receive(deadline, Type.GREETING)
            Greeting.decode(greeting)
            nonce = secrets.token_bytes(NONCE_BYTES)
            hello = Hello(
                self.role, session, self.server, self.rank, number, nonce, self.scope, self.space, carriers=carriers
            )
            said = hello.encode(greeting, secret)
            connection.send(encode_frame(Type.HELLO, said), deadline)
            _, meta = connection.receive(deadline, Type.WELCOME)
            return connection, Welcome.decode(meta, greeting, said, secret)
        except BaseException:
            connection.close()
            raise
