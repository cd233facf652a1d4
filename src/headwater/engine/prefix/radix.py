"""The radix prefix cache: trees whose paths are token sequences and whose nodes hold the pages that stand for them.

Each tenant has a tree of its own, all of them share one queue of leaves: tenants find nothing of each other, and the
page that was used longest ago goes first, whoever it belongs to.

Locks count handles on every node up to the root, so what is not locked is always a set of whole subtrees, and
evicting leaves one by one reaches all of it. Recency is a counter, not a clock: equal calls give equal evictions.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from headwater.engine.pages import CACHED, PageId, PagePool
from headwater.engine.prefix.audit import audit
from headwater.engine.prefix.base import Handle, InsertResult, PrefixMatch
from headwater.engine.prefix.tree import LeafQueue, Node
from headwater.errors import EngineError, TokenError

_TOKEN_TYPE = "I"
_TOKEN_BYTES = array(_TOKEN_TYPE).itemsize


class RadixHandle:
    """Pins the path from the root to `node`. Nodes may be split above it; where it ends never changes."""

    __slots__ = ("node", "num_tokens")

    def __init__(self, node: Node, num_tokens: int) -> None:
        self.node: Node | None = node
        self.num_tokens = num_tokens

    @property
    def pages(self) -> list[PageId]:
        if self.node is None:
            raise EngineError("this handle was unlocked, so its pages may be another's by now")
        return _pages_to(self.node)


class RadixPrefixCache:
    """See `PrefixCache`."""

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self._pool = pool
        self._page_size = page_size
        self._page_bytes = page_size * _TOKEN_BYTES
        self._roots: dict[bytes, Node] = {}
        """By tenant, which is also a root's key. A root lives as long as something is below it or pinned."""
        self._leaves = LeafQueue()
        self._handles: dict[RadixHandle, None] = {}
        self._now = 0
        self._num_pages = 0
        self._num_evictable = 0

    @property
    def num_pages(self) -> int:
        return self._num_pages

    @property
    def num_evictable(self) -> int:
        return self._num_evictable

    # ---- looking ------------------------------------------------------------------------------------------------
    def match(self, token_ids: Sequence[int], tenant: bytes = b"") -> PrefixMatch:
        # Most prompts that miss do so on their first page: those cost one page, not the whole prompt.
        first, root = self._encode(token_ids[: self._page_size]), self._roots.get(tenant)
        if root is None or first not in root.children:
            return PrefixMatch(0, [])
        node, inside = self._descend(root, self._encode(token_ids))
        pages = _pages_to(node)
        if inside:
            del pages[len(pages) - len(node.pages) + inside :]
        return PrefixMatch(len(pages) * self._page_size, pages)

    def _descend(self, node: Node, data: bytes) -> tuple[Node, int]:
        """Follow `data` down from below `node`: the last node reached, and how many of its pages agree if not all."""
        position = 0
        while (child := node.children.get(data[position : position + self._page_bytes])) is not None:
            common = child.common_bytes(data, position, self._page_bytes)
            if common < len(child.key):
                return child, common // self._page_bytes
            node, position = child, position + common
        return node, 0

    # ---- locking ------------------------------------------------------------------------------------------------
    def lock(self, token_ids: Sequence[int], num_tokens: int, tenant: bytes = b"") -> Handle:
        self._check_whole_pages(num_tokens)
        data = self._encode(token_ids[:num_tokens])
        root = self._roots.get(tenant) or Node(None, tenant, [], 0)
        node, inside = self._descend(root, data)
        num_cached = sum(len(above.pages) for above in node.path()) * self._page_size
        if inside:
            num_cached -= (len(node.pages) - inside) * self._page_size
        if num_cached != num_tokens:
            raise EngineError(
                f"cannot lock {num_tokens} tokens: {num_cached} of them are cached; match again after evicting"
            )
        if inside:
            node = node.split(inside, self._page_bytes)
        self._roots[tenant] = root
        return self._pin(node, num_tokens)

    def unlock(self, handle: Handle) -> None:
        if not isinstance(handle, RadixHandle):
            raise EngineError(f"{handle!r} is not a handle of this cache")
        if handle.node is None:
            return
        node = self._end_of(handle)
        del self._handles[handle]
        handle.node = None
        node.root.num_locks -= 1
        for above in node.path():
            above.num_locks -= 1
            if not above.num_locks:
                self._num_evictable += len(above.pages)
        self._let_go(node)

    def _pin(self, node: Node, num_tokens: int) -> RadixHandle:
        self._now += 1
        self._leaves.discard(node)
        node.root.num_locks += 1
        for above in node.path():
            if not above.num_locks:
                self._num_evictable -= len(above.pages)
            above.num_locks += 1
            above.last_used = self._now
        handle = RadixHandle(node, num_tokens)
        self._handles[handle] = None
        return handle

    def _end_of(self, handle: Handle) -> Node:
        if not isinstance(handle, RadixHandle) or handle not in self._handles or handle.node is None:
            raise EngineError("the handle was unlocked already (or is another cache's); lock the prefix again")
        return handle.node

    # ---- inserting ----------------------------------------------------------------------------------------------
    def insert(self, token_ids: Sequence[int], pages: Sequence[PageId], handle: Handle, owner: str) -> InsertResult:
        self._check_whole_pages(len(token_ids))
        start = self._end_of(handle)
        num_shared = handle.num_tokens // self._page_size
        if len(pages) * self._page_size != len(token_ids) or num_shared > len(pages):
            raise EngineError(
                f"{len(pages)} pages of {self._page_size} tokens were given for {len(token_ids)} tokens, "
                f"{handle.num_tokens} of them shared; expected one page for each {self._page_size}"
            )
        own = list(pages[num_shared:])
        self._pool.check_owned(owner, own)  # nothing below can fail, so it is all or nothing
        data = self._encode(token_ids[handle.num_tokens :])

        node, inside = self._descend(start, data)
        if inside:
            node = node.split(inside, self._page_bytes)
        cached = _pages_to(node, stop=start)
        new = own[len(cached) :]
        if new:
            node = self._grow(node, start, data[len(cached) * self._page_bytes :], new)
            self._pool.hand_over(new, owner, CACHED)
        pinned = self._pin(node, len(token_ids))
        self.unlock(handle)

        result = InsertResult(pinned, [*pages[:num_shared], *cached, *new], len(cached))
        self._pool.free(owner, own[: len(cached)])
        return result

    def _grow(self, node: Node, start: Node, key: bytes, pages: list[PageId]) -> Node:
        """Add pages below `node`, locked by the caller's handle at `start` or about to be."""
        self._num_pages += len(pages)
        if node is start and node.parent is not None and node.num_locks == 1 and not node.children:
            # Pinned by the handle that is about to be replaced and by nobody else, so no one else's end moves. Thus a
            # request that inserts page after page makes one long node and not a long chain of short ones.
            node.key += key
            node.pages += pages
            return node
        self._leaves.discard(node)
        leaf = Node(node, key, pages, self._now)
        node.children[key[: self._page_bytes]] = leaf
        self._num_evictable += len(pages)
        return leaf

    # ---- evicting -----------------------------------------------------------------------------------------------
    def evict(self, num_pages: int) -> int:
        freed: list[PageId] = []
        while len(freed) < num_pages and (leaf := self._leaves.oldest()) is not None:
            wanted = num_pages - len(freed)
            if wanted < len(leaf.pages):
                kept = len(leaf.pages) - wanted
                freed += leaf.pages[kept:]
                del leaf.pages[kept:]
                leaf.key = leaf.key[: kept * self._page_bytes]
            else:
                freed += leaf.pages
                self._remove(leaf)
        self._num_pages -= len(freed)
        self._num_evictable -= len(freed)
        self._pool.free(CACHED, freed)
        return len(freed)

    def _remove(self, leaf: Node) -> None:
        self._leaves.discard(leaf)
        parent = leaf.parent
        assert parent is not None, "the root is never queued"
        del parent.children[leaf.key[: self._page_bytes]]
        leaf.parent = None
        self._let_go(parent)

    def _let_go(self, node: Node) -> None:
        """Queue a node that nothing needs any more for eviction; a root goes at once."""
        if node.num_locks or node.children or node.ticket:
            return
        if node.parent is None:
            del self._roots[node.key]
        else:
            self._leaves.add(node)

    def reset(self) -> int:
        return self.evict(self._num_evictable)

    def check_integrity(self) -> None:
        ends = [self._end_of(handle) for handle in self._handles]
        for handle, end in zip(self._handles, ends, strict=True):
            if handle.num_tokens != len(_pages_to(end)) * self._page_size:
                raise EngineError(f"a handle of {handle.num_tokens} tokens ends at {len(_pages_to(end))} pages")
        audit(
            self._roots,
            self._leaves,
            ends,
            self._pool,
            page_bytes=self._page_bytes,
            num_pages=self._num_pages,
            num_evictable=self._num_evictable,
        )

    # ---- small things -------------------------------------------------------------------------------------------
    def _encode(self, token_ids: Sequence[int]) -> bytes:
        """Whole pages of token ids as bytes; a last, partial page is left out."""
        whole = len(token_ids) - len(token_ids) % self._page_size
        try:
            return array(_TOKEN_TYPE, token_ids[:whole]).tobytes()
        except (OverflowError, TypeError) as error:
            raise TokenError(f"token ids are integers from 0 to 2^32 - 1: {error}") from error

    def _check_whole_pages(self, num_tokens: int) -> None:
        if num_tokens < 0 or num_tokens % self._page_size:
            raise EngineError(f"{num_tokens} tokens are not whole pages of {self._page_size}")


def _pages_to(node: Node, stop: Node | None = None) -> list[PageId]:
    """The pages from below `stop` (or the root) down to the end of `node`, in order."""
    runs = []
    for above in node.path():
        if above is stop:
            break
        runs.append(above.pages)
    return [page for run in reversed(runs) for page in run]
