"""Prefix caches: KV that was computed once is found again by its tokens. Choose one with `create_prefix_cache`."""

from __future__ import annotations

from collections.abc import Callable

from headwater.engine.pages import PagePool
from headwater.engine.prefix.base import Handle, InsertResult, PrefixCache, PrefixMatch
from headwater.engine.prefix.naive import NaivePrefixCache
from headwater.engine.prefix.radix import RadixPrefixCache
from headwater.errors import EngineConfigError

__all__ = ["PREFIX_CACHES", "Handle", "InsertResult", "PrefixCache", "PrefixMatch", "create_prefix_cache"]

PREFIX_CACHES: dict[str, Callable[[PagePool, int], PrefixCache]] = {
    "radix": RadixPrefixCache,
    "naive": NaivePrefixCache,
}
"""Creators by the name that the configuration gives."""


def create_prefix_cache(name: str, pool: PagePool, page_size: int) -> PrefixCache:
    """The prefix cache of that name over the pages of `pool`. Raises EngineConfigError where there is none."""
    if name not in PREFIX_CACHES:
        raise EngineConfigError(f"prefix cache is {name!r}; expected one of {', '.join(PREFIX_CACHES)}")
    if page_size < 1:
        raise EngineConfigError(f"page_size is {page_size}; expected at least 1")
    return PREFIX_CACHES[name](pool, page_size)
