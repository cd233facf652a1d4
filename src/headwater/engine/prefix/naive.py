"""The null object among prefix caches: it never has anything, so every request keeps and frees its own pages."""

from __future__ import annotations

from collections.abc import Sequence

from headwater.engine.pages import CACHED, PageId, PagePool
from headwater.engine.prefix.base import Handle, InsertResult, PrefixMatch
from headwater.errors import EngineError


class _NoHandle:
    """Pins nothing."""

    num_tokens = 0

    @property
    def pages(self) -> list[PageId]:
        return []


class NaivePrefixCache:
    """See `PrefixCache`: nothing is ever matched, taken or evicted."""

    num_pages = 0
    num_evictable = 0

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self._pool = pool

    def match(self, token_ids: Sequence[int], tenant: bytes = b"") -> PrefixMatch:
        return PrefixMatch(0, [])

    def lock(self, token_ids: Sequence[int], num_tokens: int, tenant: bytes = b"") -> Handle:
        if num_tokens:
            raise EngineError(f"cannot lock {num_tokens} tokens: the naive prefix cache holds none")
        return _NoHandle()

    def unlock(self, handle: Handle) -> None:
        pass

    def insert(self, token_ids: Sequence[int], pages: Sequence[PageId], handle: Handle, owner: str) -> InsertResult:
        self._pool.check_owned(owner, pages)
        return InsertResult(handle, list(pages), 0)

    def evict(self, num_pages: int) -> int:
        return 0

    def reset(self) -> int:
        return 0

    def check_integrity(self) -> None:
        cached = self._pool.pages_of(CACHED)
        if cached:
            raise EngineError(f"pages {cached[:8]} are marked as cached, but the naive prefix cache holds none")
