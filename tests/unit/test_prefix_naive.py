"""The null object: same calls as the radix cache, and every page stays its request's own."""

from __future__ import annotations

import pytest

from headwater.engine.pages import CACHED, PagePool
from headwater.engine.prefix import create_prefix_cache
from headwater.errors import EngineError


def test_nothing_is_matched_taken_or_evicted() -> None:
    pool = PagePool(4)
    cache = create_prefix_cache("naive", pool, 2)
    tokens = [1, 2, 3, 4]
    for name in ("a", "b"):
        assert cache.match(tokens) == (0, [])
        handle = cache.lock(tokens, 0)
        pages = pool.allocate(name, 2)
        assert pages is not None
        result = cache.insert(tokens, pages, handle, name)
        assert result.pages == pages
        assert result.pages is not pages
        assert (result.num_duplicate, result.handle.num_tokens, result.handle.pages) == (0, 0, [])
        assert pool.pages_of(name) == pages
        cache.unlock(result.handle)
        cache.unlock(result.handle)
        cache.check_integrity()
    assert (cache.num_pages, cache.num_evictable, cache.evict(4), cache.reset()) == (0, 0, 0, 0)


def test_misuse_is_an_error() -> None:
    pool = PagePool(2)
    cache = create_prefix_cache("naive", pool, 1)
    with pytest.raises(EngineError, match="holds none"):
        cache.lock([1, 2], 1)
    pages = pool.allocate("a", 1)
    assert pages is not None
    with pytest.raises(EngineError, match="belongs to request 'a', not to request 'b'"):
        cache.insert([1], pages, cache.lock([], 0), "b")
    pool.hand_over(pages, "a", CACHED)
    with pytest.raises(EngineError, match="holds none"):
        cache.check_integrity()
