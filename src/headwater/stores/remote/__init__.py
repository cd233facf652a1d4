"""Stores on other hosts: chunks as objects in somebody else's server. `open_remote` is the factory."""

from __future__ import annotations

from headwater.stores.remote.base import ObjectClient
from headwater.stores.remote.store import RemoteStore
from headwater.stores.url import StoreUrl


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
