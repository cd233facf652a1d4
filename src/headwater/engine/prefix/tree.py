"""The parts of the radix cache: nodes that hold runs of pages, and the queue of leaves that may be evicted.

Neither knows of requests or of the page pool; the rules between them are kept by `radix`.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import count

from headwater.engine.pages import PageId


class Node:
    """A run of pages below one parent. `key` is their token ids, `page_bytes` of them to a page; a root holds no pages,
    and its key is its tenant.

    Bytes, because then comparing a run is one memcmp, and one page of them is a dictionary key as it is.
    """

    __slots__ = ("children", "key", "last_used", "num_locks", "pages", "parent", "ticket")

    def __init__(self, parent: Node | None, key: bytes, pages: list[PageId], last_used: int) -> None:
        self.parent = parent
        self.key = key
        self.pages = pages
        self.children: dict[bytes, Node] = {}
        """By the key of their first page: no two siblings share one, so one look-up decides where to descend."""
        self.num_locks = 0
        """Live handles that end here or below. A node without locks has only descendants without locks."""
        self.last_used = last_used
        """Never older than a child's."""
        self.ticket = 0
        """Of its entry in the queue of leaves; 0 while it is not in there."""

    def path(self) -> Iterator[Node]:
        """This node and those above it, up to but without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    @property
    def root(self) -> Node:
        """The root of its tree, which may be itself."""
        node = self
        while node.parent is not None:
            node = node.parent
        return node

    def common_bytes(self, data: bytes, start: int, page_bytes: int) -> int:
        """How much of `key`, in whole pages, `data` repeats from `start` on. O(length of the key)."""
        if data.startswith(self.key, start):
            return len(self.key)
        same, differs = 0, min(len(self.key), len(data) - start) // page_bytes + 1
        # Invariant: `same` pages agree and `differs` do not. The comparisons halve, so all of them cost one.
        while differs - same > 1:
            middle = (same + differs) // 2
            low, high = same * page_bytes, middle * page_bytes
            if self.key[low:high] == data[start + low : start + high]:
                same = middle
            else:
                differs = middle
        return same * page_bytes

    def split(self, num_pages: int, page_bytes: int) -> Node:
        """Put the first `num_pages` into a new parent and return that. Whoever pins or queues this node still does.

        parent ── [ a b c d ] ── children      becomes      parent ── [ a b ] ── [ c d ] ── children
                    self                                              new        self
        """
        cut = num_pages * page_bytes
        upper = Node(self.parent, self.key[:cut], self.pages[:num_pages], self.last_used)
        # Every handle below also ends below the new node, so its locks are those of this one.
        upper.num_locks = self.num_locks
        assert self.parent is not None, "the root is never split"
        self.parent.children[upper.key[:page_bytes]] = upper
        self.parent, self.key, self.pages = upper, self.key[cut:], self.pages[num_pages:]
        upper.children[self.key[:page_bytes]] = self
        return upper


class LeafQueue:
    """Leaves in order of last use. Leaving is lazy: an entry counts only while the node still holds its ticket."""

    SLACK = 64

    def __init__(self) -> None:
        # (last use, ticket, node): tickets are unique, so that nodes are never compared and ties have an order.
        self._heap: list[tuple[int, int, Node]] = []
        self._tickets = count(1)
        self._num_queued = 0

    def __len__(self) -> int:
        return self._num_queued

    def add(self, node: Node) -> None:
        """Queue a leaf that is not in the queue. O(log n)."""
        node.ticket = next(self._tickets)
        self._num_queued += 1
        heappush(self._heap, (node.last_used, node.ticket, node))

    def discard(self, node: Node) -> None:
        """Take a node out, if it is in there. O(1), amortised: dead entries never outnumber the live by much."""
        if not node.ticket:
            return
        node.ticket = 0
        self._num_queued -= 1
        if len(self._heap) > 2 * self._num_queued + self.SLACK:
            self._heap = [entry for entry in self._heap if entry[2].ticket == entry[1]]
            heapify(self._heap)

    def oldest(self) -> Node | None:
        """The leaf that was used longest ago; it stays in the queue. O(log n), amortised."""
        while self._heap:
            _, ticket, node = self._heap[0]
            if node.ticket == ticket:
                return node
            heappop(self._heap)
        return None

    def entries(self) -> list[tuple[int, Node]]:
        """(last use as queued, node) of every live entry, in no order: for checks."""
        return [(last_used, node) for last_used, ticket, node in self._heap if node.ticket == ticket]

    @property
    def num_entries(self) -> int:
        """Entries with the dead ones: for checks of the bound on their growth."""
        return len(self._heap)
