"""Addresses of peers: `HOST:PORT`, and whether a host is this one."""

from __future__ import annotations

import ipaddress
import socket
from typing import NamedTuple

from headwater.errors import InvalidArgumentError


class PeerAddress(NamedTuple):
    """Where a receiver listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> PeerAddress:
    """Read `HOST:PORT` or `[IPV6]:PORT`. Raises InvalidArgumentError, saying what was expected."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not colon or not host or len(host) > 255 or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise InvalidArgumentError(f"{text[:300]!r} is not the address of a peer; expected HOST:PORT or [IPV6]:PORT")
    return PeerAddress(host, int(port))


def is_loopback(host: str) -> bool:
    """Whether an address, or everything that a name stands for, is reached by this host alone."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return bool(found) and all(is_loopback(str(entry[4][0])) for entry in found)
