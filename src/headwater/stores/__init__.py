"""Where bytes live: the store protocol and its implementations, chosen by URL or by a configured name.

`open_store` is the factory; implementations are imported only when their URL asks for them.
"""

from __future__ import annotations

from collections.abc import Sequence

from headwater.stores.base import Store
from headwater.stores.config import find_pool
from headwater.stores.url import StoreUrl


def open_store(url: str | StoreUrl, group: int | None = None, *, create: bool = True) -> Store:
    """Open (or create) the store, or the tiers separated by commas, that `url` names; or a pool of the configuration.

    Raises UrlError, ConfigError, or a StoreError that says what is wrong.

    `group` is the number that the processes of one server share; they fill the same extents together.
    """
    urls = find_pool(url).urls if isinstance(url, str) else (url,)
    return open_urls(urls, group, create=create)


def open_urls(urls: Sequence[StoreUrl], group: int | None = None, *, create: bool = True) -> Store:
    """The same for URLs that were parsed before."""
    if len(urls) > 1:
        from headwater.stores.tiers import open_tiers

        return open_tiers(urls, group, create=create)
    if urls[0].is_read_only:
        from headwater.stores.remote import open_source

        return open_source(urls[0])
    if urls[0].is_remote:
        from headwater.stores.remote import open_remote

        store = open_remote(urls[0])
        if create:
            store.contribute()
        return store
    from headwater.stores.embedded import open_embedded

    return open_embedded(urls[0], group, create=create)
