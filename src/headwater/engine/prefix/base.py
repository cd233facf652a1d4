"""What the engine asks of a prefix cache, in whole pages. Which pages there are, and who owns them, is in `pages`.

The life of a request's prefix: `match` to see what is there, `lock` to use it, `insert` whenever more pages of it are
computed (each gives a new handle), `unlock` at the end or on abort. Between `lock` and `unlock` nothing that the
handle covers can be evicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from headwater.engine.pages import PageId


class PrefixMatch(NamedTuple):
    """The longest cached prefix of some tokens. True until the next `evict` or `reset`: only a lock makes it last.

    What another tier could add beyond the engine's own pages belongs in a field beside these.
    """

    num_tokens: int
    pages: list[PageId]


class Handle(Protocol):
    """A pinned prefix."""

    @property
    def num_tokens(self) -> int:
        """Tokens that it covers: whole pages. Stays readable after `unlock`."""
        ...

    @property
    def pages(self) -> list[PageId]:
        """Its pages in order, in a list of the caller's own. EngineError after `unlock`: they may be gone."""
        ...


class InsertResult(NamedTuple):
    """What became of the pages that a request offered."""

    handle: Handle
    """Pins everything that was inserted; the handle that was passed in is released."""
    pages: list[PageId]
    """The caller's page table from now on: the cache's page stands where the caller's own was a duplicate."""
    num_duplicate: int
    """Pages of the caller that were freed, because the cache already had them."""


class PrefixCache(Protocol):
    """KV pages by the tokens they stand for. One thread; deterministic; every misuse is an EngineError.

    Tenants share nothing: what one of them inserted, no other one matches. A handle knows its tenant. Token ids are
    0 … 2³² - 1; others are a TokenError.
    """

    @property
    def num_pages(self) -> int:
        """Pages in the cache, locked or not. O(1)."""
        ...

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` could free now. O(1)."""
        ...

    def match(self, token_ids: Sequence[int], tenant: bytes = b"") -> PrefixMatch:
        """The longest prefix of `token_ids` that this tenant has cached. Changes nothing: no lock, no node, no recency.

        Pass a prompt without its last token, so that one is always left to compute. O(tokens).
        """
        ...

    def lock(self, token_ids: Sequence[int], num_tokens: int, tenant: bytes = b"") -> Handle:
        """Pin the first `num_tokens` (whole pages), and make them the most recently used. O(num_tokens).

        EngineError where they are no longer cached: match, lock and only then evict.
        """
        ...

    def unlock(self, handle: Handle) -> None:
        """Release a handle. Idempotent."""
        ...

    def insert(self, token_ids: Sequence[int], pages: Sequence[PageId], handle: Handle, owner: str) -> InsertResult:
        """Give the cache the KV of `token_ids` (whole pages), which lies in `pages`, and pin it.

            pages    [ shared under `handle` | the cache has the same | new to the cache ]
            becomes  [ as they were          | the cache's pages      | as they were     ]
            owner's  [ no                    | freed                  | handed over      ]

        `handle` must pin a prefix of `token_ids`; this is not checked again. The caller must go on with the page
        list in the result, since its duplicates are free from here on. O(tokens beyond the handle + nodes above).
        """
        ...

    def evict(self, num_pages: int) -> int:
        """Free that many pages, the least recently used first, or all that are not locked if they are fewer.

        Returns how many that was. O(log leaves) per leaf that goes.
        """
        ...

    def reset(self) -> int:
        """Free everything that is not locked; returns how many pages that was."""
        ...

    def check_integrity(self) -> None:
        """Verify the whole state, also against the page pool. Walks everything: for tests and debugging."""
        ...
