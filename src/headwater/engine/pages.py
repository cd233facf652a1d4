"""Who owns each page of the KV cache: nobody, one request, or the prefix cache.

Only numbers are kept here, on the host. What lies in a page is the business of `kvcache`, which tokens a cached page
stands for that of `prefix`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NewType

from headwater.errors import EngineError

PageId = NewType("PageId", int)
"""Number of a page: `page_size` consecutive tokens of one request, in every layer."""

Slot = NewType("Slot", int)
"""Place of one token: `page * page_size + offset`."""


class Holder(Enum):
    """Owners that are not requests. Not strings, so that no request id can be mistaken for one."""

    FREE = "the free list"
    CACHED = "the prefix cache"


FREE = Holder.FREE
CACHED = Holder.CACHED
Owner = str | Holder


class PagePool:
    """A last-in-first-out free list and the owner of every page. Deterministic: equal calls give equal pages.

    Every method either does all that was asked or raises EngineError and changes nothing.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise EngineError(f"num_pages is {num_pages}; expected at least 1")
        self.num_pages = num_pages
        self._owners: list[Owner] = [FREE] * num_pages
        self._free = [PageId(page) for page in reversed(range(num_pages))]

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can give now."""
        return len(self._free)

    def allocate(self, owner: Owner, num_pages: int) -> list[PageId] | None:
        """Give `owner` that many pages, or None (and none at all) where fewer are free. O(1) per page."""
        if owner is FREE or num_pages < 0:
            raise EngineError(f"cannot allocate {num_pages} pages for {_name(owner)}")
        if num_pages > len(self._free):
            return None
        kept = len(self._free) - num_pages
        pages = self._free[kept:][::-1]
        del self._free[kept:]
        for page in pages:
            self._owners[page] = owner
        return pages

    def free(self, owner: Owner, pages: Sequence[PageId]) -> None:
        """Take pages back from `owner`; freeing what it does not own is an EngineError. O(1) per page."""
        self.check_owned(owner, pages)
        for page in pages:
            self._owners[page] = FREE
        self._free.extend(reversed(pages))  # so that the next to allocate gets them in the same order

    def hand_over(self, pages: Sequence[PageId], giver: Owner, taker: Owner) -> None:
        """Make `taker` the owner of pages that `giver` owns. O(1) per page."""
        if taker is FREE:
            raise EngineError("pages are handed over to a request or to the prefix cache; use free to give them back")
        self.check_owned(giver, pages)
        for page in pages:
            self._owners[page] = taker

    def owner_of(self, page: PageId) -> Owner:
        """Who owns that page now."""
        if not 0 <= page < self.num_pages:
            raise EngineError(f"there is no page {page}; this pool has 0 to {self.num_pages - 1}")
        return self._owners[page]

    def pages_of(self, owner: Owner) -> list[PageId]:
        """All pages of one owner, ascending. Looks at every page: for checks and tests."""
        return [PageId(page) for page, holder in enumerate(self._owners) if holder == owner]

    def check_owned(self, owner: Owner, pages: Sequence[PageId]) -> None:
        """Raise EngineError, naming both owners, unless all those pages are `owner`'s and each is named once."""
        if owner is FREE:
            raise EngineError(f"pages {_some(pages)} cannot be given by {_name(FREE)}; use allocate")
        for page in pages:
            holder = self.owner_of(page)
            if holder != owner:
                raise EngineError(f"page {page} belongs to {_name(holder)}, not to {_name(owner)}")
        if len(set(pages)) != len(pages):
            raise EngineError(f"{_name(owner)} names a page twice in {_some(pages)}")

    def check_integrity(self) -> None:
        """Verify that the free list and the owner table agree on every page. Looks at all of them."""
        listed = set(self._free)
        if len(listed) != len(self._free):
            raise EngineError("the free list holds a page twice")
        if len(self._owners) != self.num_pages:
            raise EngineError(f"{len(self._owners)} pages have an owner; there are {self.num_pages}")
        unowned = set(self.pages_of(FREE))
        if listed != unowned:
            raise EngineError(
                f"the free list and the owner table disagree about pages {_some(sorted(listed ^ unowned))}"
            )


def _name(owner: Owner) -> str:
    return owner.value if isinstance(owner, Holder) else f"request {owner!r}"


def _some(pages: Sequence[PageId]) -> str:
    shown = ", ".join(str(page) for page in pages[:8])
    return f"[{shown}, … {len(pages)} in all]" if len(pages) > 8 else f"[{shown}]"
