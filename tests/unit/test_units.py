"""The map of units, and scans that trust the map of cells: the same answers as looking everywhere."""

from __future__ import annotations

import mmap

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headwater.kv.topology import whole_shard
from headwater.pool import open_pool
from headwater.stores.embedded.units import FREE_UNIT, USED_UNIT, UnitMap

from support import gqa, identity

BASE = 5


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
    spec = gqa(layers=2, heads=4, dim=64)
    with open_pool("memory://?capacity=1536KiB") as pool:
        space = pool.space(identity(), spec, chunk_tokens=8)
        shard, index = whole_shard(spec), pool._store._core.index
        for number in range(40):
            reserved = space.reserve(space.keys([number] * 16).refs(2), shard)
            if number % 3:
                for extent in reversed(reserved):
                    extent.abort()
            everything, used = index.heads(), index.heads(index.cells.used())
            assert len(everything.cell) > 2
            for column, other in zip(everything, used, strict=True):
                assert np.array_equal(column, other)


def _mapped(values: list[int]) -> mmap.mmap:
    mapping = mmap.mmap(-1, BASE + len(values) + 3)
    mapping[BASE : BASE + len(values)] = bytes(values)
    return mapping
