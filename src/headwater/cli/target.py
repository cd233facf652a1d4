"""Opening the pool that a command is about. Looking at a pool must never make one, nor replace a broken one."""

from __future__ import annotations

import os
import time
from contextlib import closing

from headwater.errors import HeadwaterError, StoreError, StorePermissionError, UrlError
from headwater.stores import open_store
from headwater.stores.base import Store
from headwater.stores.config import find_pool
from headwater.stores.embedded import store_directory
from headwater.stores.remote import connect, open_source
from headwater.stores.url import DEFAULT_URL, StoreUrl

_PATIENCE_S = 5.0


def find_existing(text: str | None) -> StoreUrl:
    """The URL of a pool on this host that exists, readable or not. Raises a StoreError where none does."""
    url, *others = find_pool(DEFAULT_URL if text is None else text).urls
    if others:
        raise UrlError(f"expected one tier, got {len(others) + 1}; name one of: {', '.join(map(str, (url, *others)))}")
    if url.is_remote:
        raise UrlError(f"{url} is on a server; there is nothing to delete on this host")
    if url.scheme == "memory":
        raise UrlError(
            f"{url} is private to the process that created it; only shm:// and file:// pools can be inspected"
        )
    directory = store_directory(url)
    try:
        os.stat(os.path.join(directory, "index"))
    except PermissionError as error:
        raise StorePermissionError(f"{url}: no permission for {directory}") from error
    except OSError as error:
        raise StoreError(f"there is no pool at {url} (no index in {directory})") from error
    return url


def open_existing(text: str | None) -> Store:
    """Open a pool that exists and can be read. A server would replace an unreadable one; a command must not."""
    return open_store(DEFAULT_URL if text is None else text, create=False)


def open_own(text: str | None) -> Store:
    """`open_existing`, for what changes a pool or reads all of it. Raises UrlError for the pool of another host."""
    urls = find_pool(DEFAULT_URL if text is None else text).urls
    if urls[0].is_read_only:
        raise UrlError(f"{urls[0]} is the pool of another host and read-only here; run the command on that host")
    return open_existing(text)


def unreachable(text: str | None) -> dict[str, str]:
    """The remote tiers of a pool that do not answer, and what they say instead."""
    tiers = [tier for tier in find_pool(DEFAULT_URL if text is None else text).urls if tier.is_remote]
    return {str(tier): reason for tier in tiers if (reason := why_unreachable(tier)) is not None}


def why_unreachable(url: StoreUrl) -> str | None:
    """Why a remote store does not answer; None if it does."""
    try:
        if url.is_read_only:
            with closing(open_source(url)) as source:
                source.ping()
            return None
        with closing(connect(url)) as client:
            client.ping(time.monotonic() + _PATIENCE_S)
    except (HeadwaterError, OSError) as error:
        return str(error)
    return None
