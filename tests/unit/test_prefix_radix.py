"""The radix cache by example: the defects it must not have, what it costs, and what its own check sees."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from headwater.engine.pages import CACHED, FREE, PageId, PagePool
from headwater.engine.prefix import Handle, create_prefix_cache
from headwater.engine.prefix.radix import RadixPrefixCache
from headwater.engine.prefix.tree import LeafQueue, Node
from headwater.errors import EngineConfigError, EngineError, TokenError


def radix(num_pages: int, page_size: int) -> tuple[PagePool, RadixPrefixCache]:
    pool = PagePool(num_pages)
    cache = create_prefix_cache("radix", pool, page_size)
    assert isinstance(cache, RadixPrefixCache)
    return pool, cache


def take(pool: PagePool, owner: str, num_pages: int) -> list[PageId]:
    pages = pool.allocate(owner, num_pages)
    assert pages is not None
    return pages


def put(pool: PagePool, cache: RadixPrefixCache, tokens: list[int], page_size: int, owner: str = "w") -> Handle:
    """Compute and insert `tokens`, as a request without any luck in the cache would."""
    pages = take(pool, owner, len(tokens) // page_size)
    return cache.insert(tokens, pages, cache.lock([], 0), owner).handle


def check(pool: PagePool, cache: RadixPrefixCache) -> None:
    pool.check_integrity()
    cache.check_integrity()


def shape(cache: RadixPrefixCache) -> list[tuple[list[PageId], int, int, int]]:
    """Every node, in order: pages, locks, last use, number of children."""
    found, todo = [], list(cache._roots.values())
    while todo:
        node = todo.pop(0)
        found.append((list(node.pages), node.num_locks, node.last_used, len(node.children)))
        todo.extend(node.children.values())
    return found


# ---- defects of others that must not be ours ------------------------------------------------------------------------
@pytest.mark.parametrize("page_size", [1, 4])
def test_two_identical_prompts_in_one_prefill_do_not_leave_one_pointing_at_freed_pages(page_size: int) -> None:
    pool, cache = radix(8, page_size)
    tokens = list(range(2 * page_size))
    tables, handles = {}, {}
    for name in ("a", "b"):  # both are admitted before either is computed, so neither finds anything
        handles[name] = cache.lock(tokens, cache.match(tokens[:-1]).num_tokens)
        tables[name] = take(pool, name, 2)
    assert not set(tables["a"]) & set(tables["b"])
    duplicates = tables["b"]
    for name in ("a", "b"):
        result = cache.insert(tokens, tables[name], handles[name], name)
        tables[name], handles[name] = result.pages, result.handle
        check(pool, cache)
    assert tables["b"] == tables["a"] == handles["b"].pages
    assert [pool.owner_of(page) for page in tables["b"]] == [CACHED, CACHED]
    assert [pool.owner_of(page) for page in duplicates] == [FREE, FREE]
    # And what a third request now gets is none of theirs.
    assert not set(take(pool, "c", 6)) & set(tables["b"])


@pytest.mark.parametrize("page_size", [1, 4])
def test_abort_in_flight_leaves_no_page_both_free_and_cached(page_size: int) -> None:
    pool, cache = radix(16, page_size)
    tokens = list(range(4 * page_size))
    handle, table = cache.lock(tokens, 0), take(pool, "a", 5)
    # abort
    cache.unlock(handle)
    pool.free("a", table)
    # … and then the result of the step that was running
    with pytest.raises(EngineError, match="unlocked already"):
        cache.insert(tokens, table[:4], handle, "a")
    cache.unlock(handle)
    assert (pool.num_free, cache.num_pages, cache.num_evictable) == (16, 0, 0)
    assert cache.match(tokens).num_tokens == 0
    check(pool, cache)
    # Even with a new handle: the pages are nobody's to offer.
    with pytest.raises(EngineError, match="belongs to the free list, not to request 'a'"):
        cache.insert(tokens, table[:4], cache.lock(tokens, 0), "a")
    assert cache.num_pages == 0
    check(pool, cache)


def test_match_changes_nothing_and_a_partial_hit_that_is_locked_is_recent() -> None:
    pool, cache = radix(8, 1)
    cache.unlock(put(pool, cache, [1, 2, 3, 4], 1))
    cache.unlock(put(pool, cache, [9, 8], 1))
    before = shape(cache)
    assert cache.match([1, 2, 7]).num_tokens == 2
    assert cache.match([1, 2, 3, 4, 5]).num_tokens == 4
    assert shape(cache) == before
    # Locking the part that agrees splits it off and makes it, and only it, the youngest.
    cache.unlock(cache.lock([1, 2, 7], 2))
    check(pool, cache)
    assert cache.evict(2) == 2
    assert (cache.match([1, 2, 3, 4]).num_tokens, cache.match([9, 8]).num_tokens) == (2, 2)
    assert cache.evict(2) == 2
    assert (cache.match([1, 2, 3, 4]).num_tokens, cache.match([9, 8]).num_tokens) == (2, 0)
    check(pool, cache)


# ---- splitting, growing, evicting -----------------------------------------------------------------------------------
def test_a_split_keeps_the_handles_below_it() -> None:
    pool, cache = radix(8, 2)
    deep = put(pool, cache, [1, 1, 2, 2, 3, 3], 2)
    pages = deep.pages
    shallow = cache.lock([1, 1, 5, 5], 2)
    check(pool, cache)
    assert deep.pages == pages
    assert shallow.pages == pages[:1]
    cache.unlock(shallow)
    assert cache.num_evictable == 0
    assert cache.evict(8) == 0
    assert deep.pages == pages
    cache.unlock(deep)
    assert cache.num_evictable == 3
    check(pool, cache)


def test_a_prompt_that_is_inserted_chunk_by_chunk_is_one_node() -> None:
    pool, cache = radix(64, 2)
    tokens = list(range(100))
    handle, table = cache.lock([], 0), take(pool, "a", 50)
    for end in range(2, 101, 2):
        result = cache.insert(tokens[:end], table[: end // 2], handle, "a")
        handle = result.handle
        check(pool, cache)
    assert len(shape(cache)) == 2  # and the root


def test_a_node_that_another_handle_ends_at_does_not_grow() -> None:
    pool, cache = radix(8, 1)
    mine = put(pool, cache, [1, 2], 1, "a")
    other = cache.lock([1, 2], 2)
    result = cache.insert([1, 2, 3], [*mine.pages, *take(pool, "a", 1)], mine, "a")
    assert (other.num_tokens, len(other.pages), len(result.handle.pages)) == (2, 2, 3)
    check(pool, cache)


def test_a_leaf_that_gets_a_child_is_no_longer_up_for_eviction() -> None:
    pool, cache = radix(8, 1)
    late = cache.lock([], 0)
    cache.unlock(put(pool, cache, [1, 2], 1, "b"))
    result = cache.insert([1, 2, 3], take(pool, "a", 3), late, "a")
    check(pool, cache)
    assert (result.num_duplicate, cache.num_evictable, cache.evict(8)) == (2, 0, 0)
    cache.unlock(result.handle)
    assert cache.evict(1) == 1
    assert cache.match([1, 2, 3]).pages == result.pages[:2]
    check(pool, cache)


def test_a_node_with_children_does_not_grow() -> None:
    pool, cache = radix(8, 1)
    cache.unlock(put(pool, cache, [1, 2, 3], 1))
    handle = cache.lock([1, 2], 2)
    result = cache.insert([1, 2, 7], [*handle.pages, *take(pool, "a", 1)], handle, "a")
    check(pool, cache)
    assert cache.match([1, 2, 3]).num_tokens == 3
    assert cache.match([1, 2, 7]).pages == result.pages


def test_eviction_takes_no_more_than_asked_from_the_end_of_the_oldest() -> None:
    pool, cache = radix(8, 1)
    cache.unlock(put(pool, cache, [1, 2, 3, 4, 5], 1))
    cache.unlock(put(pool, cache, [7, 8], 1))
    assert cache.evict(2) == 2
    assert (pool.num_free, cache.match([1, 2, 3, 4, 5]).num_tokens, cache.match([7, 8]).num_tokens) == (3, 3, 2)
    check(pool, cache)
    assert cache.evict(0) == 0
    assert cache.evict(100) == 5
    assert cache.num_pages == 0
    check(pool, cache)


def test_parents_become_leaves_and_go_in_their_turn() -> None:
    pool, cache = radix(8, 1)
    cache.unlock(put(pool, cache, [1, 2], 1))
    handle = cache.lock([1, 2], 1)
    cache.unlock(cache.insert([1, 3], [*handle.pages, *take(pool, "w", 1)], handle, "w").handle)
    pinned = cache.lock([1, 3], 2)
    assert cache.evict(8) == 1  # [2]; the rest is locked
    cache.unlock(pinned)
    check(pool, cache)
    assert cache.evict(8) == 2
    assert pool.num_free == 8
    check(pool, cache)


def test_reset_keeps_what_is_locked() -> None:
    pool, cache = radix(8, 1)
    cache.unlock(put(pool, cache, [1, 2, 3], 1))
    kept = cache.lock([1, 2], 2)
    cache.unlock(put(pool, cache, [5], 1))
    assert cache.reset() == 2
    assert (cache.num_pages, cache.num_evictable, cache.match([1, 2, 3]).pages) == (2, 0, kept.pages)
    check(pool, cache)


def test_the_queue_of_leaves_does_not_grow_with_every_use() -> None:
    pool, cache = radix(8, 1)
    cache.unlock(put(pool, cache, [1], 1))
    for _ in range(1000):
        cache.unlock(cache.lock([1], 1))
    assert cache._leaves.num_entries <= 2 + LeafQueue.SLACK
    check(pool, cache)


# ---- misuse ---------------------------------------------------------------------------------------------------------
def test_misuse_is_an_error_and_changes_nothing() -> None:
    pool, cache = radix(8, 2)
    handle = put(pool, cache, [1, 1, 2, 2], 2, "a")
    own = take(pool, "a", 1)
    theirs = take(pool, "b", 1)
    before = shape(cache)
    with pytest.raises(EngineError, match="3 tokens are not whole pages of 2"):
        cache.lock([1, 1, 2], 3)
    with pytest.raises(EngineError, match="-2 tokens"):
        cache.lock([1, 1, 2], -2)
    with pytest.raises(EngineError, match="2 of them are cached; match again"):
        cache.lock([1, 1, 5, 5], 4)
    with pytest.raises(EngineError, match="not whole pages"):
        cache.insert([1, 1, 2, 2, 3], [*handle.pages, *own], handle, "a")
    with pytest.raises(EngineError, match="expected one page for each 2"):
        cache.insert([1, 1, 2, 2, 3, 3], handle.pages, handle, "a")
    with pytest.raises(EngineError, match="4 of them shared"):
        cache.insert([1, 1], handle.pages[:1], handle, "a")
    with pytest.raises(EngineError, match="belongs to request 'b', not to request 'a'"):
        cache.insert([1, 1, 2, 2, 3, 3, 4, 4], [*handle.pages, *own, *theirs], handle, "a")
    with pytest.raises(TokenError, match="2\\^32"):
        cache.insert([1, 1, 2, 2, 3, -3], [*handle.pages, *own], handle, "a")
    with pytest.raises(TokenError):
        cache.match([1 << 32, 0])
    other = radix(8, 2)[1]
    with pytest.raises(EngineError, match="another cache's"):
        other.unlock(handle)
    with pytest.raises(EngineError, match="not a handle"):
        cache.unlock(create_prefix_cache("naive", pool, 2).lock([], 0))
    assert shape(cache) == before
    assert pool.pages_of("a") == own
    check(pool, cache)


def test_unknown_names_and_page_sizes() -> None:
    with pytest.raises(EngineConfigError, match="radix, naive"):
        create_prefix_cache("fancy", PagePool(1), 1)
    with pytest.raises(EngineConfigError, match="page_size is 0"):
        create_prefix_cache("radix", PagePool(1), 0)


# ---- cost and determinism -------------------------------------------------------------------------------------------
def test_long_prompts_are_matched_in_milliseconds() -> None:
    pool, cache = radix(7000, 16)
    tokens = [(number * 2654435761) % 150_000 for number in range(100_000)]
    put(pool, cache, tokens, 16)
    differs_late = [*tokens[:90_000], *tokens[:10_000]]
    quickest = 1.0
    for _ in range(5):
        begin = time.perf_counter()
        assert cache.match(tokens).num_tokens == 100_000
        assert cache.match(differs_late).num_tokens == 90_000
        quickest = min(quickest, time.perf_counter() - begin)
    assert quickest < 0.05, "a few milliseconds each on an idle machine"


def test_eviction_does_not_look_at_the_whole_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, cache = radix(2000, 1)
    for first in range(2000):
        cache.unlock(put(pool, cache, [first], 1))
    visited = 0
    oldest = LeafQueue.oldest

    def counted(queue: LeafQueue) -> Node | None:
        nonlocal visited
        visited += 1
        return oldest(queue)

    monkeypatch.setattr(LeafQueue, "oldest", counted)
    entries = cache._leaves.num_entries
    assert cache.evict(3) == 3
    assert visited <= 4
    assert entries - cache._leaves.num_entries <= 3
    assert [cache.match([first]).num_tokens for first in range(4)] == [0, 0, 0, 1]


SCRIPT = """
import random
from headwater.engine.pages import PagePool
from headwater.engine.prefix import create_prefix_cache
rng, pool = random.Random(7), PagePool(40)
cache = create_prefix_cache("radix", pool, 2)
ballast = [object() for _ in range(int(__import__("sys").argv[1]))]
for name in map(str, range(300)):
    tokens = [rng.randrange(2) for _ in range(2 * rng.randrange(1, 9))]
    handle = cache.lock(tokens, cache.match(tokens).num_tokens)
    need = len(tokens) // 2 - len(handle.pages)
    cache.evict(need - pool.num_free)
    result = cache.insert(tokens, handle.pages + pool.allocate(name, need), handle, name)
    cache.unlock(result.handle)
    print(result.pages)
"""


def test_processes_with_other_histories_choose_the_same_pages() -> None:
    def run(ballast: int, seed: str) -> str:
        command = [sys.executable, "-c", SCRIPT, str(ballast)]
        environment = {"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": seed}
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

    assert run(0, "1") == run(12345, "2") != ""


# ---- the check itself -----------------------------------------------------------------------------------------------
def miscount_locks(pool: PagePool, cache: RadixPrefixCache, node: Node) -> None:
    node.num_locks += 1


def miscount_pages(pool: PagePool, cache: RadixPrefixCache, node: Node) -> None:
    cache._num_pages += 1


def miscount_evictable(pool: PagePool, cache: RadixPrefixCache, node: Node) -> None:
    cache._num_evictable -= 1


def free_a_cached_page(pool: PagePool, cache: RadixPrefixCache, node: Node) -> None:
    pool.free(CACHED, node.pages[:1])


def hold_a_page_twice(pool: PagePool, cache: RadixPrefixCache, node: Node) -> None:
    node.pages[1] = node.pages[0]


def forget_a_page(pool: PagePool, cache: RadixPrefixCache, node: Node) -> None:
    node.pages.pop()


def misfile_a_child(pool: PagePool, cache: RadixPrefixCache, node: Node) -> None:
    node.key = node.key[::-1]


def forget_a_leaf(pool: PagePool, cache: RadixPrefixCache, node: Node) -> None:
    cache._leaves.discard(node)


def queue_a_leaf_twice(pool: PagePool, cache: RadixPrefixCache, node: Node) -> None:
    cache._leaves._heap.append((node.last_used, node.ticket, node))


def age_a_queued_leaf(pool: PagePool, cache: RadixPrefixCache, node: Node) -> None:
    node.last_used -= 1


def use_a_child_after_its_parent(pool: PagePool, cache: RadixPrefixCache, node: Node) -> None:
    node.split(1, 4).last_used = 0


def forget_the_parent(pool: PagePool, cache: RadixPrefixCache, node: Node) -> None:
    node.parent = node


def move_a_handle(pool: PagePool, cache: RadixPrefixCache, node: Node) -> None:
    next(iter(cache._handles)).num_tokens += 1


def lose_a_handle(pool: PagePool, cache: RadixPrefixCache, node: Node) -> None:
    del cache._handles[next(iter(cache._handles))]


def pile_up_dead_entries(pool: PagePool, cache: RadixPrefixCache, node: Node) -> None:
    cache._leaves._heap += [(0, -1, node)] * 100


@pytest.mark.parametrize(
    "damage",
    [
        miscount_locks,
        miscount_pages,
        miscount_evictable,
        free_a_cached_page,
        hold_a_page_twice,
        forget_a_page,
        misfile_a_child,
        forget_a_leaf,
        queue_a_leaf_twice,
        age_a_queued_leaf,
        use_a_child_after_its_parent,
        forget_the_parent,
        move_a_handle,
        lose_a_handle,
        pile_up_dead_entries,
    ],
)
def test_integrity_check_sees(damage: Callable[[PagePool, RadixPrefixCache, Node], None]) -> None:
    pool, cache = radix(8, 1)
    put(pool, cache, [5], 1)
    cache.unlock(put(pool, cache, [1, 2, 3], 1))
    check(pool, cache)
    node = cache._leaves.oldest()
    assert node is not None
    assert len(node.pages) == 3
    damage(pool, cache, node)
    with pytest.raises(EngineError):
        cache.check_integrity()
