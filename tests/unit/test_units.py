"""The map of units, and scans that trust the map of cells: the same answers as looking everywhere."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.kv.topology import whole_shard
from headwater.pool import open_pool
from headwater.stores.base import Status
from headwater.stores.embedded.index import Index
from headwater.stores.embedded.layout import COMPLETE, LIMBO, PENDING
from headwater.stores.embedded.units import FREE_UNIT, USED_UNIT, UnitMap

from support import gqa, identity, local_tiles

BASE = 5
SPEC = gqa(layers=2, heads=4, dim=64)


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(2, 9)), min_size=1, max_size=8),
    st.integers(1, 6),
    st.integers(4, 9),
    st.integers(0, 3),
)
def test_a_run_crosses_no_boundary(runs: list[tuple[int, int]], need: int, stretch: int, cut: int) -> None:
    values = [value for used, free in runs for value in [USED_UNIT] * used + [FREE_UNIT] * free]
    stop = len(values) - min(cut, len(values))
    units = UnitMap(_mapped(values), BASE, len(values))
    fitting = [
        at
        for at in range(stop - need + 1)
        if not any(values[at : at + need]) and at // stretch == (at + need - 1) // stretch
    ]
    assert units.find_within(need, stretch, stop) == (fitting[0] if fitting else -1)
    assert units.used().tolist() == [at for at, value in enumerate(values) if value]


def test_records_are_found_where_cells_are_used() -> None:
    """Nodes, pending, complete and removed records, and some in limbo because a lease holds them."""
    with open_pool("memory://?capacity=1536KiB") as pool:
        space = pool.space(identity(), SPEC, chunk_tokens=8)
        shard, index = whole_shard(SPEC), pool._store._core.index
        for number in range(40):
            chunks = space.keys([number] * 16).refs(2)
            if number % 3 == 0:
                space.reserve(chunks, shard)
            else:
                space.write(chunks, shard, [local_tiles(SPEC, chunk, shard) for chunk in chunks])
            _compare(index)
        assert {COMPLETE, PENDING} <= set(index.heads().state.tolist())
        with space.lease(space.match(space.keys([38] * 16)), "r"):
            pool.clear(space=space)
            _compare(index)
            assert LIMBO in index.heads().state.tolist()


@pytest.mark.parametrize("part", ["heads", "everything"])
def test_a_full_store_survives_noise_in_the_map_of_cells(part: str) -> None:
    """A record that the map does not show would never be evicted: the index is rebuilt, and goes on."""
    with open_pool("memory://?capacity=1536KiB") as pool:
        space = pool.space(identity(), SPEC, chunk_tokens=8)
        shard, index = whole_shard(SPEC), pool._store._core.index

        def write(number: int) -> set[Status]:
            chunks = space.keys([number] * 16).refs(2)
            return set(space.write(chunks, shard, [local_tiles(SPEC, chunk, shard) for chunk in chunks]))

        numbers = iter(range(1000))
        while not pool.stats().store.evicted:
            assert write(next(numbers)) == {Status.OK}
        pool._store._core.janitor._candidates.clear()
        for cell in index.heads().cell.tolist() if part == "heads" else range(index.geometry.num_cells):
            index.cells.fill(cell, 1, FREE_UNIT)
        for _ in range(50):
            assert write(next(numbers)) == {Status.OK}
        assert pool.stats().store.rebuilds == 1
        assert pool.verify().clean


def _compare(index: Index) -> None:
    everything, used = index.heads(), index.used_heads()
    assert len(used.cell) > 2
    for column, other in zip(everything, used, strict=True):
        assert np.array_equal(column, other)


def _mapped(values: list[int]) -> mmap.mmap:
    mapping = mmap.mmap(-1, BASE + len(values) + 3)
    mapping[BASE : BASE + len(values)] = bytes(values)
    return mapping
