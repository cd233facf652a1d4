"""Opening the pool that a command is about. Looking at a pool must never make one, nor replace a broken one."""

from __future__ import annotations

import os

from headwater.errors import StoreError, StorePermissionError, UrlError
from headwater.stores import open_store
from headwater.stores.base import Store
from headwater.stores.embedded import store_directory
from headwater.stores.url import DEFAULT_URL, StoreUrl, parse_url


def find_existing(text: str | None) -> StoreUrl:
    """The URL of a pool that exists, readable or not. Raises a StoreError where none does."""
    url = parse_url(text or DEFAULT_URL)
    if url.scheme == "memory":
        raise UrlError(f"{url} is private to the process that made it; only shm:// and file:// can be looked at")
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
    return open_store(text or DEFAULT_URL, create=False)
