"""`headwater bench ttft` runs and reports, the GPU's part on a CPU too; how fast that was is not a test's business."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch", reason="the engine needs torch")

from typer.testing import CliRunner  # noqa: E402

from headwater.bench import ttft, ttft_gpu, ttft_side  # noqa: E402
from headwater.bench.ttft_cpu import CPU_FIGURES, CpuBench  # noqa: E402
from headwater.bench.ttft_gpu import GPU_FIGURES  # noqa: E402
from headwater.bench.ttft_peer import Peer  # noqa: E402
from headwater.bench.ttft_side import Side, Unique  # noqa: E402
from headwater.cli.app import app  # noqa: E402
from headwater.engine.config import EngineConfig  # noqa: E402
from headwater.engine.engine import Engine  # noqa: E402
from headwater.errors import EngineError  # noqa: E402


@pytest.fixture(autouse=True)
def _path_of_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peers are processes: they find the package where this one did."""
    path = [str(Path(__file__).parents[2] / "src"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers."""
    transformers = pytest.importorskip("transformers", reason="it makes the checkpoint")
    folder = tmp_path_factory.mktemp("tiny")
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_quick_run_prints_one_json_object_last(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def token_hex(num_bytes: int) -> str:
        name = os.urandom(num_bytes).hex()
        if num_bytes == 6:  # of a pool; processes name their figures, too
            names.append(name)
        return name

    monkeypatch.setattr(secrets, "token_hex", token_hex)
    args = ["bench", "ttft", "--quick", "--json", "--device", "cpu", "--model", str(tiny)]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    assert all(report[name] is not None for name in (*CPU_FIGURES, *GPU_FIGURES)), report
    assert report["cpu_cached_tokens"] == report["cpu_prompt_tokens"] - 1
    assert report["half_cached_tokens"] == 1024
    assert report["gpu_no_reuse_dropped_chunks"] == 0
    assert report["gpu_no_reuse_saved_bytes"] > 0
    assert set(report["bars"]) == {bar.figure for bar in ttft.BARS}
    assert {bar["verdict"] for bar in report["bars"].values()} == {"not judged: too small a run"}
    assert len(names) == 2
    assert not [path for path in os.listdir("/dev/shm") if any(name in path for name in names)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here: the figures are not null")
def test_what_cannot_be_measured_is_null_and_the_reason_is_given() -> None:
    result = CliRunner().invoke(app, ["bench", "ttft", "--no-cpu", "--quick"])
    assert result.exit_code == 0, result.output
    assert "no CUDA device found" in result.stdout
    report = ttft.run(replace(ttft.QUICK, model="/nonexistent", gpu=None))
    assert [report[name] for name in (*CPU_FIGURES, *GPU_FIGURES)] == [None] * 6
    assert "no model '/nonexistent'" in report["cpu_reason"]


@pytest.mark.parametrize(
    ("measured", "noise", "verdict"),
    [(0.02, 0.005, "met"), (0.05, 0.005, "missed"), (0.02, 0.02, "not judged: closer to the bar than the noise")],
)
def test_a_cost_is_judged_by_its_distance_from_the_bar(measured: float, noise: float, verdict: str) -> None:
    (bar,) = (bar for bar in ttft.BARS if bar.figure == "gpu_no_reuse_cost")
    report = {"gpu_no_reuse_cost": measured, "gpu_no_reuse_noise": noise}
    assert ttft._verdict(bar, report, ttft.TtftBench()) == verdict


def test_full_size_is_what_the_issue_asks_for() -> None:
    full = ttft.TtftBench()
    assert full.cpu is not None
    assert full.gpu is not None
    assert (full.cpu.prompt_tokens, full.gpu.prompt_tokens) == (4096, 32768)
    shape = full.gpu.config
    assert (shape["num_hidden_layers"], shape["num_key_value_heads"], shape["head_dim"]) == (32, 8, 128)
    assert full.gpu.num_pages * 16 > 32768 + ttft_gpu.EXTRA_TOKENS
    assert CpuBench().num_pages * 16 > 4096 + 32


@pytest.fixture(scope="module")
def side(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Side]:
    """An engine that serves one request after the other."""
    folder = tmp_path_factory.mktemp("dummy")
    assert ttft.QUICK.gpu is not None
    (folder / "config.json").write_text(json.dumps(ttft.QUICK.gpu.config))
    size: dict[str, Any] = {"num_pages": 64, "max_model_len": 512, "max_num_seqs": 1, "num_threads": 1}
    with Engine(EngineConfig(model=str(folder), load_format="dummy", device="cpu", **size)) as engine:
        yield Side(engine)


def test_a_hit_that_was_none_is_found_out(side: Side) -> None:
    assert side.ask([5, 6, 7], 2, cached=range(1)).num_cached == 0
    with pytest.raises(EngineError, match="0 tokens were cached, and 2 to 3 expected"):
        side.ask([5, 6, 7], 2, cached=range(2, 4))


def test_prompts_that_were_seen_before_are_found_out(side: Side) -> None:
    with pytest.raises(EngineError, match="nobody has seen"):
        side.serve([[5] * 64, [5] * 64], 2)


def test_no_reuse_is_the_part_of_the_throughput_that_is_lost(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(self: Side, prompts: Any, num_outputs: int) -> float:
        return 2.0 if self is on else 1.5

    on = Side(side.engine)
    monkeypatch.setattr(Side, "serve", serve)
    report = ttft_side.measure_no_reuse(Unique(1, 8, 1, pairs=3), side, on, lambda n: [1] * n, "cpu", float("inf"))
    assert report["cpu_no_reuse_cost"] == pytest.approx(0.25)
    assert report["cpu_no_reuse_noise"] == 0
    assert report["cpu_no_reuse_pairs"] == 3


class DroppingSide:
    """A side whose first saves are dropped, and the engine's counter of it."""

    def __init__(self, num_losses: int) -> None:
        self.num_losses, self.asked = num_losses, list[list[int]]()
        self.engine = self

    def stats(self) -> Any:
        return SimpleNamespace(pool=SimpleNamespace(num_dropped=min(len(self.asked), self.num_losses)))

    def ask(self, prompt: list[int], num_outputs: int, *, cached: range) -> ttft_side.Answer:
        self.asked.append(prompt)
        return ttft_side.Answer(float(len(self.asked)), 0.0, 0, [1])

    def drain(self) -> None:
        pass


def test_a_prompt_whose_save_was_dropped_is_replaced_and_counted(tmp_path: Path) -> None:
    assert ttft.QUICK.gpu is not None
    gpu = ttft_gpu._Gpu(ttft.QUICK.gpu, str(tmp_path), "cpu", "shm:///unused", lambda text: None)
    side, hopeless = cast(Any, DroppingSide(2)), cast(Any, DroppingSide(9))
    prompt, answer = gpu._ask_saved(side, 16)
    assert len({tuple(each) for each in side.asked}) == 3
    assert (prompt, answer.first_token_s, gpu._num_repeated) == (side.asked[2], 3.0, 2)
    with pytest.raises(EngineError, match="5 prompts in a row"):
        gpu._ask_saved(hopeless, 16)


@pytest.mark.slow
def test_a_peer_that_cannot_start_says_why() -> None:
    with (
        Peer(EngineConfig(model="/nonexistent/model")) as peer,
        pytest.raises(EngineError, match="no model '/nonexistent/model'"),
    ):
        peer.wait_ready()
