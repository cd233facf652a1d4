"""The GPU's part of `headwater bench engine`: every figure runs, alone, and counts the right bytes and products."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine needs torch")

from typer.testing import CliRunner  # noqa: E402

from headwater.bench import engine, engine_gpu  # noqa: E402
from headwater.bench.engine_shapes import SHAPES  # noqa: E402
from headwater.cli.app import app  # noqa: E402
from headwater.errors import EngineError  # noqa: E402
from headwater.models.config import FAMILIES  # noqa: E402
from headwater.models.config_hf import config_from_hf  # noqa: E402

TESTS = Path(__file__).resolve().parent


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: its kernels are not run here")
def test_every_figure_of_a_gpu_is_measured_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS / "interpreted_bench.py")]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(command, cwd=TESTS.parent.parent, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.slow
def test_a_figure_that_fails_says_why_and_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> dict[str, Any]:
        raise EngineError("no such\nluck")

    monkeypatch.setattr(engine, "bench_latent_transfer", fail)
    monkeypatch.setattr(engine_gpu._Gpu, "_prefill", fail)
    told: list[str] = []
    only = frozenset({"mla_save_ratio", "moe_decode_b1_roofline", "moe_prefill_mfu"})
    report = engine.run(replace(engine.QUICK, cpu=None, only=only), told.append, device="cpu")
    assert report["mla_save_ratio"] is report["moe_prefill_mfu"] is None
    assert report["mla_save_ratio_reason"] == report["moe_prefill_mfu_reason"] == "EngineError: no such luck"
    assert report["moe_decode_b1_roofline"] > 0
    assert report["decode_b1_roofline"] is report["moe_decode_b64_roofline"] is report["grouped_gemm_ratio"] is None
    assert "moe_decode_b64_roofline_reason" not in report
    assert report["bars"]["mla_save_ratio"]["verdict"] == "not measured"
    assert any(line.startswith("mla_save_ratio: EngineError") for line in told)


@pytest.mark.parametrize("option", ["--only", "--model-shape"])
def test_an_unknown_name_is_refused_with_the_known_ones(option: str) -> None:
    result = CliRunner().invoke(app, ["bench", "engine", option, "grouped_gemm"], env={"COLUMNS": "400"})
    assert result.exit_code == 2
    assert ("moe_prefill_mfu" if option == "--only" else "mixtral-8x7b") in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here: the figures are not null")
@pytest.mark.parametrize("option", [("--only", "grouped_skew,mla_save_ratio"), ("--model-shape", "olmoe-1b-7b")])
def test_without_a_gpu_a_chosen_figure_is_null_and_nothing_runs_on_the_cpu(option: tuple[str, str]) -> None:
    result = CliRunner().invoke(app, ["bench", "engine", *option])
    assert result.exit_code == 0, result.output
    assert "no CUDA device found" in result.stdout
    assert "tokens a second" not in result.stdout


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_is_a_model_that_the_engine_knows(name: str) -> None:
    if SHAPES[name]["model_type"] not in FAMILIES:
        pytest.skip(f"the engine does not run {SHAPES[name]['model_type']}")
    config = config_from_hf(SHAPES[name])
    billions = {
        "llama-3-8b": 8.03,
        "qwen2.5-7b": 7.62,
        "qwen3-8b": 8.19,
        "mixtral-8x7b": 46.7,
        "qwen1.5-moe-a2.7b": 14.3,
        "qwen3-30b-a3b": 30.5,
        "olmoe-1b-7b": 6.92,
        "deepseek-v2-lite": 15.7,
    }
    if name in billions:
        assert config.num_parameters / 1e9 == pytest.approx(billions[name], rel=0.01)


def test_of_experts_a_step_reads_the_touched_and_a_prompt_computes_with_the_chosen() -> None:
    config = config_from_hf(SHAPES["qwen3-30b-a3b"])
    per_token = 98304
    one = engine_gpu.step_bytes(config, 1, 4096, 2, touched=8)
    assert one == pytest.approx(6.08e9 + 4096 * per_token, rel=0.005)
    many = engine_gpu.step_bytes(config, 64, 4096, 2, touched=125.9)
    assert many == pytest.approx(59.5e9 + 64 * 4096 * per_token, rel=0.005)
    assert engine_gpu.step_bytes(config, 1, 0, 2, touched=128) == engine_gpu.step_bytes(config, 1, 0, 2)
    assert engine_gpu.prefill_flops(config, 8192) == pytest.approx(71.1e12, rel=0.005)
