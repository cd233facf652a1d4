"""Stores on other hosts: chunks as objects in somebody else's server, or the pool of another host. `open_remote` and
`open_source` are the factories."""

from __future__ import annotations

import importlib
from typing import cast

from headwater.stores.base import SourceStore
from headwater.stores.remote.base import ObjectClient
from headwater.stores.remote.store import RemoteStore
from headwater.stores.url import StoreUrl

SOURCES = {"peer": "headwater.peers.reader"}
"""Stores that are only read, by scheme. They live in packages that are built on this one, so they are named and not
imported, as a plug-in's entry point would be: the module has an `open_source`."""


def open_source(url: StoreUrl) -> SourceStore:
    """The store that a URL of one of `SOURCES` names. Asks nothing of the other host: one that is down is met when it
    is used. Raises ConfigError where its secret or its certificates cannot be used."""
    module = importlib.import_module(SOURCES[url.scheme])
    return cast(SourceStore, module.open_source(url))


def open_remote(url: StoreUrl) -> RemoteStore:
    """The store that a remote URL names. Asks nothing of the server: one that is down is met when it is used."""
    return RemoteStore(url, connect(url))


def connect(url: StoreUrl) -> ObjectClient:
    """The client for a remote URL, which connects when it is first used."""
    if url.scheme == "mooncake":
        from headwater.stores.remote.mooncake import MooncakeClient

        return MooncakeClient(url)
    from headwater.stores.remote.redis import RedisClient

    return RedisClient(url)
