"""The matrix of the data path (see `data_path`): a sample that covers every pair of values, or all of it.

`HEADWATER_ALL_CELLS=1` runs every cell; the matrix is printed at the end in any case.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

pytest.importorskip("torch", reason="the transfer needs torch")

from covering import covering_array
from data_path import (
    MODES,
    MOVERS,
    PACKINGS,
    POOLS,
    STATES,
    TOPOLOGIES,
    Cell,
    Places,
    all_cells,
    matrix_text,
    run_cell,
    why_not,
)
from servers import mooncake_master, redis_server

FACTORS = {"mover": MOVERS, "pool": POOLS, "state": STATES, "packing": PACKINGS, "mode": MODES, "topology": TOPOLOGIES}
_results: dict[Cell, str] = {}


def _may_be(row: dict[str, str]) -> bool:
    """Whether some cell with these values means something."""
    return any(all(getattr(cell, name) == value for name, value in row.items()) for cell in MEANINGFUL)


MEANINGFUL = [cell for cell in all_cells() if not why_not(cell)]
SAMPLE = [Cell(**row) for row in covering_array(FACTORS, _may_be)]
CELLS = all_cells() if os.environ.get("HEADWATER_ALL_CELLS") else SAMPLE


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Places]:
    folder = tmp_path_factory.mktemp("data-path")
    with redis_server() as redis:
        try:
            import mooncake.store  # noqa: F401
        except ImportError:
            yield Places(folder, f"redis://127.0.0.1:{redis.port}/0")
            return
        with mooncake_master() as master:
            yield Places(folder, f"redis://127.0.0.1:{redis.port}/0", f"mooncake://127.0.0.1:{master.port}")


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_cell(cell: Cell, places: Places) -> None:
    _results[cell] = "FAILED"
    _results[cell] = run_cell(cell, places)


def test_the_matrix_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    for cell in all_cells():
        if reason := why_not(cell):
            _results.setdefault(cell, f"n/a, {reason}")
    ordered = {cell: _results[cell] for cell in all_cells() if cell in _results}
    with capsys.disabled():
        print(f"\n{matrix_text(ordered)}\n{len(CELLS)} cells were run; those with · were not")
