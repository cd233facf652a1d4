"""The cells of the data path's matrix that need no server, with the real CUDA mover on a real device."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="Triton is not installed: its kernels are not checked here")

from data_path import Cell, Places, all_cells, matrix_text, run_cell, why_not  # noqa: E402

CELLS = [cell for cell in all_cells(("cuda",)) if not why_not(cell)]
CELLS = [cell for cell in CELLS if "redis" not in cell.pool and "mooncake" not in cell.pool]
_results: dict[Cell, str] = {}


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_cell(cell, tmp_path):
    _results[cell] = "FAILED"
    _results[cell] = run_cell(cell, Places(tmp_path), "cuda")


def test_the_matrix_is_printed(capsys):
    for cell in all_cells(("cuda",)):
        if reason := why_not(cell):
            _results.setdefault(cell, f"n/a, {reason}")
        elif "+redis" in cell.pool or "+mooncake" in cell.pool:
            _results.setdefault(cell, "no server")
    ordered = {cell: _results[cell] for cell in all_cells(("cuda",)) if cell in _results}
    with capsys.disabled():
        print(f"\n{matrix_text(ordered)}\n{len(CELLS)} cells were run")
