"""The options of `headwater bench vllm --device cuda`, and what it shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headwater.bench import vllm_gpu
from headwater.bench.vllm_gpu import GpuPlan, figures
from headwater.cli import bench_vllm
from headwater.cli.app import app

TIMELINE = {"timeline": [["request added", 0.0], ["matched", 2.5]], "bus_ms": 19.5, "load_ms": 20.0, "local_ms": 30.0}


def write_results(path: Path) -> None:
    """One comparison, one share, one profile, one side that is absent and one failure."""
    mode = {"mode": "eager", "stage": "lmcache"}
    seconds = {
        name: [value] * 9 for name, value in {"headwater": 0.04, "lmcache": 0.05, "again": 0.04, "bus": 0.02}.items()
    }
    lines: list[dict[str, Any]] = [
        {
            "kind": "run",
            "format": 1,
            "run": "a",
            "machine": {"cores": 16},
            "machine_id": "m",
            "versions": {"gpu": "NVIDIA H200", "vllm": "0.32.0"},
            "sizes": {"device": "cuda", "is_quick": False},
            "pairs": 9,
        },
        {
            "kind": "measured",
            "measure": "hits",
            "tokens": 8192,
            "seconds": seconds,
            "found": {"headwater": 8192, "lmcache": 8192},
            **mode,
        },
        {
            "kind": "measured",
            "measure": "share",
            "side": "headwater",
            "hits": {"1024": {"found": 512, "whole": 1024}},
            **mode,
        },
        {"kind": "measured", "measure": "profile", "side": "headwater@profiled", "tokens": 8192, **TIMELINE, **mode},
        {"kind": "absent", "mode": "eager", "side": "offloading", "reason": "Traceback\nno such thing"},
        {"kind": "failed", "measure": "burst", "tokens": 98304, "reason": "it ended", **mode},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_merging_prints_tables_on_stderr_and_one_line_of_json_on_stdout(tmp_path: Path) -> None:
    write_results(tmp_path / "a")
    result = CliRunner().invoke(app, ["bench", "vllm", "--merge", str(tmp_path / "a"), "--json"])
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    report = json.loads(line)
    assert report["gpu_ttft_vs_lmcache"] == 0.8
    assert report["gpu_hit_share"] == 0.5
    assert report["gpu"] == "NVIDIA H200"
    assert set(report["bars"]) == {figure.name for figure in figures.FIGURES}
    assert report["bars"]["gpu_ttft_vs_lmcache"] == {"limit": 1.0, "noise": 0.0, "verdict": "met"}
    for text in ("gpu_hit_share", "missed", "hit 8192", "matched", "without offloading: no such thing", "it ended"):
        assert text in result.stderr
    shown = CliRunner().invoke(app, ["bench", "vllm", "--merge", str(tmp_path / "a")])
    assert "gpu_hit_share" in shown.stdout
    refused = CliRunner().invoke(app, ["bench", "vllm", "--merge", str(tmp_path / "missing")])
    assert refused.exit_code != 0


def test_options_reach_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[GpuPlan] = []
    write_results(tmp_path / "a")
    told = vllm_gpu.merge([tmp_path / "a"])

    def run(plan: GpuPlan, note: Any) -> dict[str, Any]:
        plans.append(plan)
        return told | {"interrupted": plan.seconds == 5}

    monkeypatch.setattr(vllm_gpu, "run", run)
    monkeypatch.setattr(bench_vllm, "find_spec", lambda name: object())

    def call(*options: str) -> int:
        return CliRunner().invoke(app, ["bench", "vllm", "--device", "cuda", *options]).exit_code

    assert call() == 0
    assert plans.pop() == GpuPlan()
    parts = ("--parts", "hits, burst,profile", "--sides", "headwater,lmcache", "--lmcache-path", str(tmp_path))
    assert call("--compiled", *parts, "--layers", "4", "--capacity", "20GiB", "--pairs", "11") == 0
    plan = plans.pop()
    assert (plan.mode, plan.parts, plan.sides) == ("compiled", ("hits", "burst"), ("headwater", "lmcache"))
    assert (plan.profile, plan.shape.num_layers, plan.capacity_bytes, plan.pairs) == (True, 4, 20 << 30, 11)
    assert plan.lmcache_path == tmp_path
    assert call("--quick", "--out", str(tmp_path / "out"), "--again", "--model", str(tmp_path)) == 0
    plan = plans.pop()
    assert (plan.is_quick, plan.out, plan.again, plan.model) == (True, tmp_path / "out", True, tmp_path)
    assert call("--parts", "hit") != 0
    assert call("--seconds", "5") == 1, "what was interrupted is no success"


def test_without_vllm_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_vllm, "find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["bench", "vllm", "--device", "cuda"])
    assert result.exit_code != 0
    assert "vLLM is not installed" in str(result.exception) + result.output


@pytest.mark.slow
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    monkeypatch.setattr(bench_vllm, "find_spec", lambda name: object())
    result = CliRunner().invoke(app, ["bench", "vllm", "--device", "cuda"])
    assert result.exit_code != 0
    assert "torch finds no CUDA device" in str(result.exception) + result.output
