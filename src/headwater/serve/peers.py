"""A server's receiver of other servers' KV, as /health and /metrics see it."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Any, Protocol

from headwater.errors import InvalidArgumentError
from headwater.peers.address import PeerAddress, parse_address


class Peers(Protocol):
    """What is known of the receiver; `peers.process.ReceiverChild` is one."""

    num_restarts: int

    @property
    def address(self) -> str:
        """Where it listens; empty where it does not."""

    @property
    def stats(self) -> Mapping[str, Any]:
        """Its figures."""

    def close(self) -> None:
        """End it. Idempotent."""


class NoPeers:
    """The null object: nobody pushes anything here."""

    num_restarts = 0
    address = ""
    stats: Mapping[str, Any] = {}

    def close(self) -> None:
        """Nothing to do."""


NO_PEERS: Peers = NoPeers()


def reachable(address: str, host: str | None) -> str:
    """A receiver's address for callers who have reached this server at `host`: one that listens everywhere is there."""
    try:
        given = parse_address(address)
        if host is not None and ipaddress.ip_address(given.host).is_unspecified:
            return str(PeerAddress(host, given.port))
    except (InvalidArgumentError, ValueError):
        pass
    return address
