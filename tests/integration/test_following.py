"""The matrix of loads that follow a process which fills their chunks (see `following`), or a sample of it that covers
every pair of values. `HEADWATER_ALL_CELLS=1` runs every cell; the matrix is printed at the end in any case.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the transfer needs torch")

from following import (
    FATES,
    FIRST_LAYERS,
    MODES,
    MOVERS,
    NUM_CHUNKS,
    NUM_FIRST,
    Cell,
    all_cells,
    half_filled,
    matrix_text,
    run_cell,
)
from headwater.kv.topology import whole_shard
from headwater.pool import open_pool
from headwater.stores.base import NOT_HERE
from transfer_pool_cases import SPEC

from covering import covering_array
from data_path import prompt_chunks, space_of
from support import temporary_url

SAMPLE = [Cell(**row) for row in covering_array({"mover": MOVERS, "mode": MODES, "fate": FATES}, lambda row: True)]
CELLS = all_cells() if os.environ.get("HEADWATER_ALL_CELLS") else SAMPLE
_results: dict[Cell, str] = {}


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_cell(cell: Cell, tmp_path: Path) -> None:
    _results[cell] = "FAILED"
    _results[cell] = run_cell(cell, tmp_path)


def test_a_dead_filler_is_noticed_before_anybody_sweeps(tmp_path: Path) -> None:
    with temporary_url("shm", tmp_path, "capacity=16MiB") as url, open_pool(url) as pool:
        space = space_of(pool)
        chunks, shard = prompt_chunks(space), whole_shard(SPEC)
        with half_filled(url) as filler:
            mine = chunks[NUM_FIRST : NUM_FIRST + 1]
            (before,) = space.arrived(mine, shard)
            assert before.is_announced
            assert (before.num_layers, before.is_complete) == (len(FIRST_LAYERS), False)
            filler.kill()
            assert space.arrived(mine, shard) == [NOT_HERE]
            assert [arrived.is_complete for arrived in space.arrived(chunks, shard)] == [
                number < NUM_FIRST for number in range(NUM_CHUNKS)
            ]


def test_the_matrix_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\nChunks that a load brought which follows a filler that …\n{matrix_text(_results)}")
