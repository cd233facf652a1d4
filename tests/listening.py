"""Which sockets of a process, and of all processes below it, wait for others to connect or to send: read from /proc."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_WAITING = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}
"""The state of a socket that has no peer: TCP_LISTEN, and TCP_CLOSE for datagrams."""
_ACCEPTS = 1 << 16
"""The kernel's flag of a unix socket that listens."""


class Door(NamedTuple):
    """One socket that others can reach: its protocol, its address (a name for unix sockets) and its port."""

    protocol: str
    address: str
    port: int
    pid: int

    @property
    def is_local(self) -> bool:
        """Whether only this host can reach it, and over unix sockets only those who may open its file."""
        if self.protocol == "unix":
            return not self.address.startswith("@")
        return ipaddress.ip_address(self.address).is_loopback


def processes(pid: int) -> Iterator[int]:
    """A process and all of its descendants."""
    yield pid
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                yield from processes(int(child))


def doors(root: int) -> list[Door]:
    """All of them, of a process and its descendants. Sorted."""
    return sorted({door for pid in processes(root) for door in _doors_of(pid)})


def _doors_of(pid: int) -> Iterator[Door]:
    inodes = set[str]()
    with suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
                if target.startswith("socket:["):
                    inodes.add(target[len("socket:[") : -1])
    for protocol, waiting in _WAITING.items():
        for fields in _table(pid, protocol):
            host, _, port = fields[1].partition(":")
            # A datagram socket that is bound to no port receives nothing.
            if fields[3] == waiting and fields[9] in inodes and int(port, 16):
                yield Door(protocol, _address(host), int(port, 16), pid)
    for fields in _table(pid, "unix"):
        if fields[6] in inodes and int(fields[3], 16) & _ACCEPTS:
            yield Door("unix", fields[7] if len(fields) > 7 else "@", 0, pid)


def _table(pid: int, name: str) -> list[list[str]]:
    try:
        return [line.split() for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]]
    except OSError:
        return []


def _address(text: str) -> str:
    """The kernel prints 32-bit words in the machine's order."""
    raw = b"".join(int(text[i : i + 8], 16).to_bytes(4, "little") for i in range(0, len(text), 8))
    address = ipaddress.ip_address(raw)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
