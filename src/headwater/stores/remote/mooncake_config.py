"""What a Mooncake client must know: from the URL, and from the JSON file that MOONCAKE_CONFIG_PATH names.

The file is the one that other users of Mooncake have; what the URL says goes before what the file says.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from typing import Any

from headwater.errors import ConfigError, UrlError
from headwater.stores.remote.mooncake_master import DEFAULT_METRICS_PORT
from headwater.stores.url import StoreUrl, parse_size

CONFIG_VARIABLE = "MOONCAKE_CONFIG_PATH"
_MOST_BYTES = 1 << 20
_DEFAULT_BUFFER = 64 << 20


@dataclass(frozen=True)
class MooncakeConfig:
    """One client."""

    master: str
    """HOST:PORT."""
    metadata: str
    """P2PHANDSHAKE, or the address of a metadata server."""
    protocol: str
    device: str
    host: str
    """How others reach this host; empty: as the master sees it."""
    segment_bytes: int
    """Memory that this host gives; 0: none, a pure client."""
    buffer_bytes: int
    replicas: int
    prefer_local: bool
    pin_s: float
    """For how long what is written is kept from eviction, if others can go; 0: not at all, except what engines hold."""
    metrics_port: int
    """Where the master says what it has."""

    @classmethod
    def of(cls, url: StoreUrl) -> MooncakeConfig:
        """Read URL and file. Raises UrlError and ConfigError."""
        file = _read_file()
        if not url.host and "master_server_address" not in file:
            raise UrlError(f"{url} names no master, and {CONFIG_VARIABLE} names no file that does")
        option = url.options.get
        segment = url.size("segment")
        return cls(
            master=f"{url.host}:{url.port}" if url.host else str(file["master_server_address"]),
            metadata=option("metadata") or str(file.get("metadata_server", "P2PHANDSHAKE")),
            protocol=option("protocol") or str(file.get("protocol", "tcp")),
            device=option("device") or str(file.get("device_name", "")),
            host=option("host") or str(file.get("local_hostname", "")),
            segment_bytes=_size(file, "global_segment_size", 0) if segment is None else segment,
            buffer_bytes=url.size("buffer") or _size(file, "local_buffer_size", _DEFAULT_BUFFER) or _DEFAULT_BUFFER,
            replicas=url.count("replicas", 1),
            prefer_local=option("prefer", "local") == "local",
            pin_s=url.seconds("pin", 1.0) if "pin" in url.options else 0.0,
            metrics_port=url.port_option("metrics", DEFAULT_METRICS_PORT),
        )

    @property
    def master_place(self) -> tuple[str, int]:
        """Where to knock."""
        host, _, port = self.master.rpartition(":")
        return host.strip("[]"), int(port)


def own_address(towards: tuple[str, int]) -> str:
    """The address with which this host talks to another one. Sends nothing."""
    family = socket.getaddrinfo(*towards, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect(towards)
        return str(sock.getsockname()[0])


def _read_file() -> dict[str, Any]:
    path = os.environ.get(CONFIG_VARIABLE)
    if not path:
        return {}
    try:
        with open(path, "rb") as file:
            data = json.loads(file.read(_MOST_BYTES))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{CONFIG_VARIABLE}: {path!r} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{CONFIG_VARIABLE}: {path!r} does not hold a JSON object")
    master = data.get("master_server_address", "h:1")
    if not isinstance(master, str) or not master.rpartition(":")[2].isdecimal():
        raise ConfigError(f"{CONFIG_VARIABLE}: master_server_address in {path!r} must be HOST:PORT")
    return data


def _size(file: dict[str, Any], name: str, default: int) -> int:
    value = file.get(name, default)
    if isinstance(value, str):
        return parse_size(value)
    if type(value) is not int or value < 0:
        raise ConfigError(f"{CONFIG_VARIABLE}: {name} must be a size, such as 1073741824 or '1GB'")
    return value
