"""The driver of `headwater bench vllm --device cuda` in real vLLM: the same code, with a tiny model on a CPU."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from headwater.bench.vllm_gpu import TRIAL, merge, run


@pytest.mark.matrix
@pytest.mark.timeout(1800)
def test_plain_vllm_and_headwater_take_turns_and_a_hit_is_taken_apart(tmp_path: Path) -> None:
    notes: list[str] = []
    plan = replace(TRIAL, sides=("plain", "headwater"), parts=("local", "burst"), profile=True, out=tmp_path / "out")
    report = run(plan, notes.append)
    assert report["failures"] == [], notes
    assert report["gpu_local_cost"] > 0
    assert report["gpu_cold_cost"] > 0
    assert report["gpu_burst_share"] > 0, report["modes"]["eager"]["notes"]
    profile = report["modes"]["eager"]["profile"]["headwater@profiled"]["1024"]
    moments = [what for what, _ in profile["timeline"]]
    wanted = ["request added", "matched", "blocks allocated, load ordered", "load begins on the worker"]
    wanted += ["load seen by the engine", "step that computes: scheduled"]
    assert [what for what in moments if what in wanted] == wanted
    assert moments[-1].startswith("first token out")
    assert [at for _, at in profile["timeline"]] == sorted(at for _, at in profile["timeline"])
    assert profile["load_ms"] > 0
    assert merge([tmp_path / "out"])["gpu_burst_share"] == report["gpu_burst_share"]
    assert not [name for name in os.listdir("/dev/shm") if f"headwater-bench-gpu-{os.getpid()}" in name]
