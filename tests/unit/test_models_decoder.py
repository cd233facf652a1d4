"""The decoder against `transformers`: the same logits for every family and option, whole, in chunks and over ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from headwater.errors import ModelError, TopologyError
from headwater.models.checkpoint import open_checkpoint
from headwater.models.decoder import Decoder, build_model
from headwater.models.parallel import ParallelGroup, Ranks, TensorParallel
from headwater.models.weights import load_weights

from models_support import load_model, run_ranks, run_tokens, save_tiny

NO_GROUP: Any = object()  # shapes alone need no collectives
TOKENS = [(7 * i * i + 3 * i + 5) % 131 for i in range(41)]
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 24}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 50000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied, biases": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama wide heads, MHA": ("llama", {"head_dim": 20, "num_key_value_heads": 6}),
    "llama llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}}),
    "llama yarn, MQA": ("llama", {"rope_parameters": YARN, "num_key_value_heads": 1}),
    "llama dynamic rope": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied, yarn": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3 tied, biases": ("qwen3", {"head_dim": 8, "tie_word_embeddings": True, "attention_bias": True}),
}


@pytest.fixture(scope="module", params=CASES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    family, changes = CASES[request.param]
    path = tmp_path_factory.mktemp("tiny")
    model = save_tiny(path, family, **changes)
    with torch.no_grad():
        return path, model(torch.tensor([TOKENS])).logits[0]


def test_logits_are_those_of_transformers(tiny: tuple[Path, Any]) -> None:
    path, expected = tiny
    model = load_model(path)
    assert expected.abs().max() > 0.5
    for chunk in (None, 7, 1):
        torch.testing.assert_close(run_tokens(model, TOKENS, chunk), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("size", [2, 3, 6])
def test_ranks_together_are_one_model(tiny: tuple[Path, Any], size: int) -> None:
    path, expected = tiny
    config = open_checkpoint(path).config
    if config.attention.num_kv_heads % size and size % config.attention.num_kv_heads:
        with pytest.raises(TopologyError, match=f"tp={size}"):
            load_model(path, TensorParallel(0, size, NO_GROUP))
        return
    for model, found in run_ranks(size, lambda rank: _load_and_run(path, rank)):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
        assert model.num_bytes < build_model(config).num_bytes


def _load_and_run(path: Path, rank: TensorParallel, **options: Any) -> tuple[Decoder, Any]:
    model = load_model(path, rank, **options)
    return model, run_tokens(model, TOKENS, 16)


def test_query_heads_that_cannot_be_divided(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", num_attention_heads=6, num_key_value_heads=2, head_dim=8)
    with pytest.raises(ModelError, match="6 attention heads"):
        load_model(tmp_path, TensorParallel(1, 4, NO_GROUP))


def test_shares_cover_every_width_once() -> None:
    for total in (1, 2, 7, 64, 131):
        for size in (1, 2, 3, 5):
            shares = [TensorParallel(rank, size, NO_GROUP).share(total) for rank in range(size)]
            assert [i for share in shares for i in share] == list(range(total))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_groups_that_the_engine_does_not_have_are_refused() -> None:
    for name in ("ep", "dcp", "pcp"):
        with pytest.raises(ModelError, match=f"{name} has 2 ranks"):
            Ranks(**{name: ParallelGroup(0, 2, NO_GROUP)})


def test_dynamic_rope_only_within_its_trained_length(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    config = open_checkpoint(tmp_path).config
    build_model(config, max_len=96)
    with pytest.raises(ModelError, match="at most 96"):
        build_model(config, max_len=97)


def test_dummy_weights_are_one_model_however_divided(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen2", vocab_size=2500)
    (tmp_path / "model.safetensors").unlink()
    expected = run_tokens(load_model(tmp_path, load_format="dummy"), TOKENS)
    assert torch.isfinite(expected).all()
    assert 0.2 < expected.std() < 5
    again = run_tokens(load_model(tmp_path / "config.json", load_format="dummy"), TOKENS)
    assert torch.equal(again, expected)
    for _, found in run_ranks(3, lambda rank: _load_and_run(tmp_path, rank, load_format="dummy")):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_logits_turned_round_are_the_same(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", tie_word_embeddings=True)
    model = load_model(tmp_path)
    hidden = torch.randn(64, 48)
    whole = model.logits(hidden)
    for rows in (1, 7, 8, 24, 48, 49):
        found = model.logits(hidden[:rows])
        assert found.is_contiguous()
        torch.testing.assert_close(found, whole[:rows], rtol=0, atol=1e-5)


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    checkpoint = open_checkpoint(tmp_path)
    seen: list[tuple[int, int]] = []
    load_weights(build_model(checkpoint.config), checkpoint, lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1] == build_model(checkpoint.config).num_bytes
