"""The whole invariant of the radix cache in one function, derived from scratch and compared with what is kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from headwater.engine.pages import CACHED, PageId, PagePool
from headwater.engine.prefix.tree import LeafQueue, Node
from headwater.errors import EngineError


def audit(
    roots: Mapping[bytes, Node],
    leaves: LeafQueue,
    handle_ends: Sequence[Node],
    pool: PagePool,
    *,
    page_bytes: int,
    num_pages: int,
    num_evictable: int,
) -> None:
    """Raise EngineError at the first thing that is wrong. Walks the trees, the queue, the handles and the pool."""
    nodes = [node for root in roots.values() for node in _walk(root)]
    known = {id(node) for node in (*roots.values(), *nodes)}
    for end in handle_ends:
        _expect(id(end) in known, "a live handle ends at a node that left the tree")

    locks = Counter(id(above) for end in handle_ends for above in (*end.path(), end.root))
    for tenant, root in roots.items():
        _expect(root.key == tenant and root.parent is None, "a root is not filed under its tenant")
        _expect(bool(root.num_locks or root.children), "a root is left that nothing needs")
        num_handles = locks[id(root)]
        _expect(root.num_locks == num_handles, f"{root.num_locks} locks at the root, {num_handles} live handles")
    for node in nodes:
        _check_node(node, page_bytes)
        _expect(
            node.num_locks == locks[id(node)],
            f"node of pages {node.pages[:4]} counts {node.num_locks} locks, but {locks[id(node)]} handles pin it",
        )

    held = [page for node in nodes for page in node.pages]
    _check_pages(held, pool)
    _expect(num_pages == len(held), f"{num_pages} pages are counted, {len(held)} are in the tree")
    unlocked = sum(len(node.pages) for node in nodes if not node.num_locks)
    _expect(num_evictable == unlocked, f"{num_evictable} pages are counted as evictable, {unlocked} are")

    queued = {id(node): last_used for last_used, node in leaves.entries()}
    due = {id(node): node.last_used for node in nodes if not node.num_locks and not node.children}
    _expect(queued == due, f"{len(queued)} leaves are queued for eviction, {len(due)} should be, or their ages differ")
    _expect(len(leaves) == len(leaves.entries()) == len(due), "a leaf is queued twice, or miscounted")
    _expect(leaves.num_entries <= 2 * len(leaves) + LeafQueue.SLACK, "dead entries pile up in the queue of leaves")


def _walk(root: Node) -> list[Node]:
    """All nodes but the root. Not recursive: a tree may be deeper than Python's stack."""
    found: list[Node] = []
    todo = [root]
    while todo:
        node = todo.pop()
        for child in node.children.values():
            _expect(child.parent is node, "a child does not know its parent")
            found.append(child)
            todo.append(child)
    return found


def _check_node(node: Node, page_bytes: int) -> None:
    parent = node.parent
    assert parent is not None
    _expect(bool(node.pages), "a node without pages")
    _expect(len(node.key) == len(node.pages) * page_bytes, f"{len(node.key)} key bytes for {len(node.pages)} pages")
    _expect(parent.children.get(node.key[:page_bytes]) is node, "a node is not filed under its first page")
    if parent.parent is not None:
        _expect(parent.num_locks >= node.num_locks, "a node has more locks than its parent")
        _expect(parent.last_used >= node.last_used, "a node was used after its parent")


def _check_pages(held: list[PageId], pool: PagePool) -> None:
    twice = [page for page, times in Counter(held).items() if times > 1]
    _expect(not twice, f"pages {twice[:8]} are in the tree more than once")
    stray = sorted(set(held) ^ set(pool.pages_of(CACHED)))
    _expect(not stray, f"the tree and the page pool disagree about whether pages {stray[:8]} are cached")


def _expect(fine: bool, message: str) -> None:
    if not fine:
        raise EngineError(f"prefix cache: {message}")
