"""The calling end of a connection: connect, hear the greeting, say hello, check the welcome."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headwater.errors import PeerRefusedError, WireError
from headwater.peers.address import PeerAddress, is_loopback
from headwater.peers.carriers import tcp
from headwater.peers.hello import NONCE_BYTES, Greeting, Hello, Role, Welcome
from headwater.peers.wire import Refusal, Type, encode_frame

if TYPE_CHECKING:
    from headwater.peers.link import LinkSettings


@dataclass(frozen=True)
class Caller:
    """Who calls, and about which KV."""

    role: Role
    server: int
    rank: int
    scope: bytes = bytes(32)
    space: bytes = b""

    def call(
        self, address: PeerAddress, session: bytes, settings: LinkSettings, lane: int = 0
    ) -> tuple[tcp.Connection, Welcome]:
        """A connection of a session, ready for requests. Raises PeerError where there is none to be had in time."""
        secret = settings.secret
        if secret is None and not is_loopback(address.host):
            raise PeerRefusedError(f"{address} is another host, and there is no secret to prove to it", Refusal.SECRET)
        connection = tcp.connect(address, settings.connect_s, settings.tls)
        try:
            deadline = time.monotonic() + settings.io_s
            header, greeting = connection.receive(deadline)
            if header.type != Type.GREETING or header.data_bytes:
                raise WireError(f"a {header.type.name} frame instead of a greeting")
            Greeting.decode(greeting)
            nonce = secrets.token_bytes(NONCE_BYTES)
            hello = Hello(self.role, session, self.server, self.rank, lane, nonce, self.scope, self.space)
            said = hello.encode(greeting, secret)
            connection.send(encode_frame(Type.HELLO, said), deadline)
            header, meta = connection.receive(deadline)
            if header.type != Type.WELCOME or header.data_bytes:
                raise WireError(f"a {header.type.name} frame instead of a welcome")
            return connection, Welcome.decode(meta, greeting, said, secret)
        except BaseException:
            connection.close()
            raise
