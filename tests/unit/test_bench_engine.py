"""`headwater bench engine` runs and reports, with its peers and without; how fast that was is not a test's business."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine needs torch")

from typer.testing import CliRunner  # noqa: E402

from headwater.bench import engine, engine_cpu, engine_drafts, engine_gpu, engine_peers, engine_shapes  # noqa: E402
from headwater.cli.app import app  # noqa: E402
from headwater.errors import EngineError  # noqa: E402
from headwater.models.checkpoint import open_checkpoint  # noqa: E402
from headwater.models.config_hf import config_from_hf  # noqa: E402

LABELS = {bar.figure for bar in engine.BARS}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers that both sides can load."""
    transformers = pytest.importorskip("transformers", reason="the peer of this benchmark")
    folder = tmp_path_factory.mktemp("tiny")
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_quick_run_prints_one_json_object_last(tiny: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "engine", "--quick", "--json", "--model", str(tiny)])
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    measured = ["tokens_per_s", "transformers_static_tokens_per_s", "cpu_tput_ratio", "cpu_prefill_ratio", "prefill_s"]
    assert all(report[name] > 0 for name in measured), report
    assert report["transformers_reason"] is None
    assert report["transformers_continuous_tokens_per_s"] or report["transformers_continuous_reason"]
    assert report["cpu_tput_agreement"] == 1.0
    assert report["output_tokens"] > 0
    assert set(report["bars"]) == LABELS
    if not torch.cuda.is_available():
        assert [report[name] for name in engine_gpu.GPU_FIGURES] == [None] * 3
        assert report["gpu_reason"] == "no CUDA device found"


@pytest.mark.slow
def test_without_transformers_the_peers_are_null_and_the_reason_is_given(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(engine_peers, "import_module", missing)
    report = engine.run(engine.EngineBench(str(tiny), engine.QUICK.cpu, gpu=None, is_quick=True))
    assert report["tokens_per_s"] > 0
    assert report["cpu_tput_ratio"] is report["cpu_prefill_ratio"] is None
    assert report["transformers_static_tokens_per_s"] is None
    assert "not installed" in report["transformers_reason"]
    assert report["bars"]["cpu_tput_ratio"]["verdict"] == "not measured"
    assert report["ngram_quote_ratio"] is None
    assert "holds no tokenizer" in report["ngram_reason"]


@pytest.mark.slow
def test_drafts_are_compared_with_none() -> None:
    """With the real model: quoting takes fewer steps, and both sides say the same."""
    bench = engine_drafts.DraftsBench(num_drafts=6, output_tokens=24, pairs=1)
    report = engine_drafts.bench_drafts(bench, open_checkpoint("smollm2"), lambda text: None)
    assert report["ngram_quote_tokens_per_step"] > 1.5
    for task in engine_drafts.TASKS:
        assert report[f"ngram_{task}_same_answer"]
        assert report[f"ngram_{task}_ratio"] > 0
        assert report[f"ngram_{task}_tokens_per_step"] >= 1


@pytest.mark.slow
def test_the_part_for_gpus_measures_every_figure() -> None:
    assert engine.QUICK.gpu is not None
    report = engine_gpu.bench_gpu(engine.QUICK.gpu, lambda text: None, device="cpu")
    assert all(report[name] > 0 for name in engine_gpu.GPU_FIGURES), report


def test_the_same_seed_gives_the_same_requests_within_the_ranges() -> None:
    bench = engine_cpu.CpuBench()
    jobs = bench.jobs(49152)
    assert jobs == engine_cpu.CpuBench().jobs(49152)
    assert len(jobs) == 24
    assert all(64 <= len(job.prompt) <= 1024 and 16 <= job.num_outputs <= 192 for job in jobs)
    assert all(0 <= token < 49152 for job in jobs for token in job.prompt)


def test_a_side_that_says_too_little_is_found_out() -> None:
    with pytest.raises(EngineError, match=r"\[1\] tokens instead of \[2\]"):
        engine_cpu._check_counts([engine_peers.Job([1], 2)], [[5]])


def test_what_a_step_must_read_and_a_prompt_must_compute() -> None:
    config = config_from_hf(engine_shapes.LLAMA_8B)
    assert engine_gpu.layer_params(config) == pytest.approx(6.98e9, rel=0.01)
    # 7.5 billion parameters without the embedding, and 128 KiB of KV a token
    assert engine_gpu.step_bytes(config, 1, 0, 2) == pytest.approx(15.0e9, rel=0.01)
    per_token = engine_gpu.step_bytes(config, 64, 1024, 2) - engine_gpu.step_bytes(config, 64, 1023, 2)
    assert per_token == 64 * 128 * 1024
    assert engine_gpu.prefill_flops(config, 8192) == pytest.approx(2 * 6.98e9 * 8192 + 17.6e12, rel=0.01)
