"""`headwater bench transfer` runs and reports; how fast that was is not a test's business."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the transfer needs torch")

from typer.testing import CliRunner  # noqa: E402

from headwater.bench import transfer  # noqa: E402
from headwater.cli.app import app  # noqa: E402

LABELS = {bar.figure for bar in transfer.BARS}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here: the figures are not null")
def test_without_a_gpu_the_figures_are_null_and_the_reason_is_given() -> None:
    result = CliRunner().invoke(app, ["bench", "transfer", "--quick", "--json"])
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    assert [report[name] for name in transfer.FIGURES] == [None] * len(transfer.FIGURES)
    assert report["gpu_reason"] == "no CUDA device found"
    assert {bar["verdict"] for bar in report["bars"].values()} == {"not measured"}
    table = CliRunner().invoke(app, ["bench", "transfer", "--quick"])
    assert table.exit_code == 0, table.output
    assert "no CUDA device found" in table.stdout


@pytest.mark.slow
def test_a_quick_run_on_a_cpu_measures_everything_and_leaves_nothing() -> None:
    before = set(os.listdir("/dev/shm"))
    report = transfer.run(transfer.QUICK, device="cpu")
    assert set(report["bars"]) == LABELS
    assert all(report[name] is not None for name in transfer.FIGURES), report
    assert all(report[name] > 0 for name in LABELS), report
    assert {bar["verdict"] for bar in report["bars"].values()} == {"not judged: too small a run"}
    assert not [name for name in set(os.listdir("/dev/shm")) - before if f"-{os.getpid()}" in name]
