"""Where bytes live: the store protocol and its implementations, chosen by URL.

`open_store` is the factory; implementations are imported only when their URL asks for them.
"""

from __future__ import annotations

from headwater.stores.base import Store
from headwater.stores.url import StoreUrl, parse_url


def open_store(url: str | StoreUrl, group: int | None = None, *, create: bool = True) -> Store:
    """Open (or create) the store that `url` names. Raises UrlError, or a StoreError that says what is wrong.

    `group` is the number that the processes of one server share; they fill the same extents together.
    """
    parsed = parse_url(url) if isinstance(url, str) else url
    from headwater.stores.embedded import open_embedded

    return open_embedded(parsed, group, create=create)
