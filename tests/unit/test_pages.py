"""The page pool: one owner per page, all or nothing, the same pages for the same calls."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.engine.pages import CACHED, FREE, PageId, PagePool
from headwater.errors import EngineError


def test_pages_come_in_order_and_come_back_last_in_first_out() -> None:
    pool = PagePool(4)
    first = pool.allocate("a", 2)
    assert first == [0, 1]
    assert pool.allocate("b", 2) == [2, 3]
    pool.free("a", first)
    assert pool.allocate("c", 2) == first
    pool.check_integrity()


def test_too_few_pages_gives_none_and_takes_none() -> None:
    pool = PagePool(3)
    pool.allocate("a", 1)
    assert pool.allocate("b", 3) is None
    assert pool.num_free == 2
    assert pool.allocate("b", 0) == []
    assert pool.allocate("b", 2) == [1, 2]
    assert pool.allocate("c", 0) == []
    assert pool.allocate("c", 1) is None
    pool.check_integrity()


def test_freeing_anothers_page_names_both_and_changes_nothing() -> None:
    pool = PagePool(3)
    pool.allocate("a", 1)
    pool.allocate("b", 1)
    with pytest.raises(EngineError, match=r"page 1 belongs to request 'b', not to request 'a'"):
        pool.free("a", [PageId(0), PageId(1)])
    assert pool.owner_of(PageId(0)) == "a"
    with pytest.raises(EngineError, match="page 2 belongs to the free list, not to request 'a'"):
        pool.free("a", [PageId(2)])
    with pytest.raises(EngineError, match="page 0 belongs to request 'a', not to the prefix cache"):
        pool.free(CACHED, [PageId(0)])
    with pytest.raises(EngineError, match="twice"):
        pool.free("a", [PageId(0), PageId(0)])
    with pytest.raises(EngineError, match="there is no page 3"):
        pool.free("a", [PageId(3)])
    with pytest.raises(EngineError, match="there is no page -1"):
        pool.free("a", [PageId(-1)])
    assert pool.num_free == 1
    pool.check_integrity()


def test_double_free_is_an_error() -> None:
    pool = PagePool(2)
    pages = pool.allocate("a", 2)
    assert pages is not None
    pool.free("a", pages)
    with pytest.raises(EngineError, match="free list"):
        pool.free("a", pages)
    pool.check_integrity()


def test_hand_over() -> None:
    pool = PagePool(2)
    pages = pool.allocate("a", 2)
    assert pages is not None
    pool.hand_over(pages[:1], "a", CACHED)
    assert [pool.owner_of(page) for page in pages] == [CACHED, "a"]
    with pytest.raises(EngineError, match="the prefix cache, not to request 'a'"):
        pool.hand_over(pages, "a", "b")
    with pytest.raises(EngineError, match="use free"):
        pool.hand_over(pages[1:], "a", FREE)
    with pytest.raises(EngineError, match="use allocate"):
        pool.hand_over(pages[1:], FREE, "a")
    with pytest.raises(EngineError, match="free list"):
        pool.allocate(FREE, 1)
    pool.free(CACHED, pages[:1])
    pool.check_integrity()


@pytest.mark.parametrize("name", ["FREE", "CACHED", "free", "the free list", "the prefix cache", ""])
def test_no_request_id_is_mistaken_for_the_free_list_or_the_cache(name: str) -> None:
    pool = PagePool(2)
    pages = pool.allocate(name, 1)
    assert pages == [0]
    assert pool.pages_of(FREE) == [1]
    assert pool.pages_of(CACHED) == []
    pool.check_integrity()
    pool.free(name, pages)
    pool.check_integrity()


def test_integrity_check_sees_each_kind_of_damage() -> None:
    def damaged() -> PagePool:
        pool = PagePool(3)
        pool.allocate("a", 1)
        pool.check_integrity()
        return pool

    pool = damaged()
    pool._free.append(PageId(0))
    with pytest.raises(EngineError, match=r"disagree about pages \[0\]"):
        pool.check_integrity()
    pool = damaged()
    pool._free.append(pool._free[0])
    with pytest.raises(EngineError, match="twice"):
        pool.check_integrity()
    pool = damaged()
    pool._free.pop()
    with pytest.raises(EngineError, match="disagree"):
        pool.check_integrity()
    pool = damaged()
    pool._owners[2] = "b"
    with pytest.raises(EngineError, match="disagree"):
        pool.check_integrity()
    pool = damaged()
    pool._owners.append("b")
    with pytest.raises(EngineError, match="4 pages have an owner; there are 3"):
        pool.check_integrity()


def test_a_pool_needs_a_page() -> None:
    with pytest.raises(EngineError, match="at least 1"):
        PagePool(0)
    with pytest.raises(EngineError, match="-1 pages"):
        PagePool(1).allocate("a", -1)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5), st.booleans()), max_size=40))
def test_every_page_has_one_owner_after_every_operation(steps: list[tuple[str, int, bool]]) -> None:
    pool = PagePool(8)
    twin = PagePool(8)
    held: dict[str, list[PageId]] = {"a": [], "b": [], "c": []}
    for owner, number, is_free in steps:
        if is_free:
            pages, held[owner] = held[owner][:number], held[owner][number:]
            pool.free(owner, pages)
            twin.free(owner, pages)
        else:
            got = pool.allocate(owner, number)
            assert got == twin.allocate(owner, number)
            assert (got is None) == (number > 8 - sum(map(len, held.values())))
            held[owner] += got or []
        pool.check_integrity()
        assert pool.num_free == 8 - sum(map(len, held.values()))
        for name, pages in held.items():
            assert sorted(pages) == pool.pages_of(name)
