"""The engine counts the rows that go to each expert, of steps that were asked for and of nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine needs torch")

from headwater.bench.engine_shapes import SHAPES  # noqa: E402
from headwater.engine.config import EngineConfig  # noqa: E402
from headwater.engine.engine import Engine  # noqa: E402
from headwater.engine.params import SamplingParams  # noqa: E402
from headwater.models import moe  # noqa: E402
from headwater.serve.worker import create_engine  # noqa: E402

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [1]}


def make_engine(folder: Path, config: dict[str, Any]) -> Engine:
    (folder / "config.json").write_text(json.dumps(config))
    return Engine(EngineConfig(model=str(folder), load_format="dummy", device="cpu", dtype="float32", max_model_len=64))


def run(engine: Engine, name: str, prompt: list[int], num_tokens: int) -> None:
    engine.add(name, prompt, SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True))
    while engine.has_work:
        engine.step()


def test_rows_are_counted_for_each_sparse_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_engine(tmp_path, SHAPES["qwen3-30b-a3b"] | SMALL | EXPERTS) as engine:
        rows = engine.expert_rows()
        assert rows is not None
        assert (rows.shape, rows.dtype, int(rows.sum())) == ((2, 6), torch.int64, 0)
        seen: list[torch.Tensor] = []
        run_experts = moe.run_experts

        def spy(x: Any, ids: Any, *rest: Any) -> Any:
            seen.append(ids.clone())
            return run_experts(x, ids, *rest)

        monkeypatch.setattr(moe, "run_experts", spy)
        run(engine, "a", list(range(10)), 5)
        after = engine.expert_rows()
        assert after is not None
        assert after.sum(dim=1).tolist() == [2 * (10 + 4)] * 2
        for layer in range(2):
            chosen = torch.cat([ids.flatten() for ids in seen[layer::2]]).long()
            assert after[layer].tolist() == chosen.bincount(minlength=6).tolist()
        assert int(rows.sum()) == 0, "what was read changed afterwards"


def test_the_engine_process_reports_them_by_layer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen3-30b-a3b"] | SMALL | EXPERTS))
    config = EngineConfig(model=str(tmp_path), load_format="dummy", device="cpu", dtype="float32", max_model_len=64)
    running = create_engine(config, lambda done, total: None)
    engine = running.engine
    assert isinstance(engine, Engine)
    with engine:
        run(engine, "a", [1, 2, 3], 2)
        rows, found = engine.expert_rows(), running.stats().expert_rows
        assert rows is not None
        assert found == {0: rows[0].tolist(), 2: rows[1].tolist()}
        assert sum(found[2]) == 2 * 4


def test_a_dense_model_has_none(tmp_path: Path) -> None:
    with make_engine(tmp_path, SHAPES["llama-3-8b"] | SMALL) as engine:
        run(engine, "a", [1, 2, 3], 2)
        assert engine.expert_rows() is None
