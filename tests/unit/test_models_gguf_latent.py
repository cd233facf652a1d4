"""GGUF files of models with latent attention (`deepseek2`): the model that they came from, in old files and new ones.

Tensors are named by the `gguf` package's own table, from the names that `transformers` saved.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from safetensors.torch import load_file
from test_models_gguf import TOKENS, _write_tokenizer

from headwater.errors import ModelError
from headwater.models.checkpoint import open_checkpoint
from headwater.models.convert import convert_gguf

from models_support import assert_same_tensors, load_model, run_tokens, save_tiny

ARCHITECTURE = "deepseek2"
_LATENT = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "q_lora_rank": 20,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.75,
    "eos_token_id": 130,
    "rms_norm_eps": 1e-6,
}
_GROUPS = {"n_group": 3, "topk_group": 2}
_YARN = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 24,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }
}
CASES: dict[str, dict[str, Any]] = {
    "deepseek_v2": _LATENT | {"q_lora_rank": None, "n_group": 1, "topk_group": 1},
    "deepseek_v2, groups, yarn": _LATENT | _GROUPS | _YARN | {"topk_method": "group_limited_greedy"},
    "deepseek_v3": _LATENT | _GROUPS | {"norm_topk_prob": True},
    "deepseek_v3, yarn": _LATENT | _GROUPS | _YARN | {"norm_topk_prob": False, "q_lora_rank": None},
    "glm4_moe_lite": _LATENT | {"n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5, "norm_topk_prob": True},
}
LAYOUTS = ("split", "whole", "both")
"""Of `kv_b_proj`: as newer files have it, older ones, and those of a fork."""


def save(folder: Path, case: str) -> Any:
    return save_tiny(folder, case.partition(",")[0], **CASES[case])


def gguf_tensors(folder: Path, config: Any, layout: str) -> dict[str, torch.Tensor]:
    """The tensors of a saved checkpoint as the converter of llama.cpp writes them."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.DEEPSEEK2, config.num_hidden_layers)
    found: dict[str, torch.Tensor] = {}
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if expert := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+\.weight)", name):
            stacks.setdefault(f"{expert[1]}.{expert[3]}", {})[int(expert[2])] = tensor
            continue
        if name.endswith("kv_b_proj.weight") and layout != "whole":
            by_head = tensor.unflatten(0, (config.num_attention_heads, -1))
            keys, values = by_head.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
            found[name.replace("kv_b_proj", "k_b_proj")] = keys.transpose(1, 2)
            found[name.replace("kv_b_proj", "v_b_proj")] = values
            if layout == "split":
                continue
        found[name.replace("e_score_correction_bias", "e_score_correction.bias")] = tensor
    found |= {name: torch.stack([parts[i] for i in range(len(parts))]) for name, parts in stacks.items()}
    renamed = {name: names.get_name(name, try_suffixes=(".weight", ".bias")) for name in found}
    assert all(renamed.values()), [name for name, new in renamed.items() if not new]
    return {str(renamed[name]): tensor.contiguous() for name, tensor in found.items()}


def write_gguf(path: Path, folder: Path, model: Any, layout: str, kind: str = "F32", **changes: Any) -> Path:
    """A file with the keys that the converter writes; `changes` replace some, and None leaves one out."""
    config = model.config
    is_new = layout == "split"
    sigmoid = config.model_type != "deepseek_v2"
    keys: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": 1 if is_new else config.num_attention_heads,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": config.qk_rope_head_dim,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "leading_dense_block_count": 1,
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_shared_count": config.n_shared_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_weights_norm": True if sigmoid and config.norm_topk_prob else None,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
        "expert_gating_func": 2 if sigmoid else 1,
    }
    qk_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    if is_new:
        keys |= {"attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim}
        keys |= {"attention.value_length": config.kv_lora_rank}
        keys |= {"attention.key_length_mla": qk_dim, "attention.value_length_mla": config.v_head_dim}
    else:
        keys |= {"attention.key_length": qk_dim, "attention.value_length": config.v_head_dim}
    rope = config.rope_parameters
    if rope["rope_type"] == "yarn":
        keys |= {"rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"]}
        keys |= {"rope.scaling.original_context_length": rope["original_max_position_embeddings"]}
        keys |= {"rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"]}
    writer = gguf.GGUFWriter(str(path), ARCHITECTURE)
    for key, value in (keys | changes).items():
        if value is None:
            continue
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](f"{ARCHITECTURE}.{key}", value)
    _write_tokenizer(writer, config.vocab_size)
    for name, tensor in gguf_tensors(folder, config, layout).items():
        quantised = gguf.GGMLQuantizationType[kind if name.endswith(("k_b.weight", "v_b.weight")) else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(tensor.numpy(), quantised), raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_a_file_with_latents_is_the_model_it_came_from(tmp_path: Path, case: str, layout: str) -> None:
    model = save(tmp_path / "hf", case)
    path = write_gguf(tmp_path / "m.gguf", tmp_path / "hf", model, layout)
    ours, theirs = open_checkpoint(path).config, open_checkpoint(tmp_path / "hf").config
    assert (ours.family, ours.sparse, ours.mlp) == (theirs.family, theirs.sparse, theirs.mlp)
    assert ours.attention == theirs.attention
    assert ours.rope == theirs.rope
    names = [name for name, _ in open_checkpoint(path).tensors()]
    assert len(names) == len(set(names)), "a matrix that the file has twice is taken once"
    expected = run_tokens(load_model(tmp_path / "hf"), TOKENS)
    torch.testing.assert_close(run_tokens(load_model(path), TOKENS), expected, rtol=0, atol=1e-5)
    with torch.no_grad():
        oracle = model(torch.tensor([TOKENS])).logits[0]
    # transformers has another epsilon in the latents' norms of GLM.
    torch.testing.assert_close(run_tokens(load_model(path), TOKENS), oracle, rtol=0, atol=3e-4)


@pytest.mark.parametrize("block_bytes", [64, 1 << 13])
def test_halves_are_joined_in_pieces_and_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    """However much is read at once, and whichever rows of it a rank wants."""
    model = save(tmp_path / "hf", "deepseek_v3")
    path = write_gguf(tmp_path / "m.gguf", tmp_path / "hf", model, "split")
    for module in ("base", "gguf", "gguf_latent"):
        monkeypatch.setattr(f"headwater.models.checkpoint.{module}.BLOCK_BYTES", block_bytes)
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    whole = load_file(tmp_path / "hf" / "model.safetensors")[name]
    handle = dict(open_checkpoint(path).tensors())[name]
    assert handle.shape == tuple(whole.shape)
    assert handle.num_bytes == whole.nbytes
    for part in (range(len(whole)), range(28, 84), range(5, 61), range(100, 101)):
        found = torch.empty(len(part), whole.shape[1])
        handle.read_into(found, 0, part)
        assert torch.equal(found, whole[part.start : part.stop])


def test_halves_are_dequantised_before_they_are_joined(tmp_path: Path) -> None:
    sizes = {"qk_nope_head_dim": 32, "kv_lora_rank": 64, "hidden_size": 96}
    model = save_tiny(tmp_path / "hf", "deepseek_v3", **CASES["deepseek_v3"] | sizes)
    path = write_gguf(tmp_path / "m.gguf", tmp_path / "hf", model, "split", "Q8_0")
    kind = gguf.GGMLQuantizationType.Q8_0
    found = torch.empty(6 * (32 + 12), 64)
    dict(open_checkpoint(path).tensors())["model.layers.1.self_attn.kv_b_proj.weight"].read_into(
        found, 0, range(len(found))
    )
    halves = gguf_tensors(tmp_path / "hf", model.config, "split")
    keys, values = (
        torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(halves[name].numpy(), kind), kind).copy())
        for name in ("blk.1.attn_k_b.weight", "blk.1.attn_v_b.weight")
    )
    assert torch.equal(found, torch.cat((keys.transpose(1, 2), values), dim=1).flatten(0, 1))


LINEAR = {"rope.scaling.type": "linear", "rope.scaling.original_context_length": None}


@pytest.mark.parametrize(
    ("case", "changes", "what"),
    [
        ("deepseek_v3", {"attention.kv_lora_rank": None}, "kv_lora_rank"),
        ("deepseek_v3", {"attention.key_length": 30}, "attention.key_length is 30; expected 32, as the latents"),
        ("deepseek_v3", {"attention.value_length": 23}, "attention.value_length is 23; expected 24, as the latents"),
        ("deepseek_v3", {"attention.key_length_mla": 8}, "more than the 8 that are rotated"),
        ("deepseek_v3", {"attention.value_length_mla": 11}, "attn_v_b.weight has shape"),
        ("deepseek_v3", {"attention.layer_norm_rms_epsilon": 1e-4}, "engines run this model differently"),
        ("deepseek_v3", {"expert_gating_func": 1}, r"expected 1 \(softmax\), or 2 \(sigmoid\) and exp_probs_b"),
        ("deepseek_v2", {"expert_gating_func": 2}, r"expected 1 \(softmax\), or 2 \(sigmoid\) and exp_probs_b"),
        ("deepseek_v2", {"expert_gating_func": 3}, "expert_gating_func is 3"),
        ("deepseek_v2", {"expert_weights_norm": True}, "transformers and vLLM run such models differently"),
        ("deepseek_v2", {"expert_count": 160, "expert_group_count": None}, "DeepSeek-V2 divides its experts"),
        ("deepseek_v3", {"expert_count": 256, "expert_group_count": None}, "DeepSeek-V3 divides its experts"),
        ("deepseek_v3, yarn", {"rope.scaling.yarn_log_multiplier": None}, "yarn_log_multiplier is missing"),
        ("deepseek_v3, yarn", {"rope.scaling.attn_factor": 1.5}, "rope.scaling.attn_factor is 1.5; expected 1"),
        (
            "deepseek_v3, yarn",
            LINEAR,
            "expected none or yarn",
        ),
        ("deepseek_v3", {"rope.scale_linear": 2.0}, "rope.scale_linear"),
        ("deepseek_v3", {"attention.indexer.top_k": 8}, "does not know deepseek2.attention.indexer.top_k"),
    ],
)
def test_what_is_not_known_is_refused(tmp_path: Path, case: str, changes: dict[str, Any], what: str) -> None:
    model = save(tmp_path / "hf", case)
    path = write_gguf(tmp_path / "m.gguf", tmp_path / "hf", model, "split", **changes)
    with pytest.raises(ModelError, match=what):
        dict(open_checkpoint(path).tensors())


def test_a_half_without_the_other_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save(tmp_path / "hf", "deepseek_v3")
    whole = gguf_tensors(tmp_path / "hf", model.config, "split")
    for missing in ("k", "v"):
        left = {name: tensor for name, tensor in whole.items() if name != f"blk.2.attn_{missing}_b.weight"}
        monkeypatch.setattr("test_models_gguf_latent.gguf_tensors", lambda *_, left=left: left)
        path = write_gguf(tmp_path / "m.gguf", tmp_path / "hf", model, "split")
        with pytest.raises(ModelError, match=f"has no other half, blk.2.attn_{missing}_b.weight"):
            dict(open_checkpoint(path).tensors())


def test_files_of_older_converters_say_less(tmp_path: Path) -> None:
    """Neither groups nor the gating function, where there was only one: DeepSeek-V2-Lite."""
    model = save(tmp_path / "hf", "deepseek_v2")
    left_out = dict.fromkeys(("expert_group_count", "expert_group_used_count", "expert_gating_func"))
    path = write_gguf(tmp_path / "m.gguf", tmp_path / "hf", model, "whole", **left_out)
    assert open_checkpoint(path).config.sparse == open_checkpoint(tmp_path / "hf").config.sparse


@pytest.mark.parametrize("case", CASES)
def test_a_converted_model_is_the_one_that_the_file_came_from(tmp_path: Path, case: str) -> None:
    """Tensor for tensor, and in `transformers`, which reads the new config."""
    model = save(tmp_path / "hf", case)
    path = write_gguf(tmp_path / "m.gguf", tmp_path / "hf", model, "split")
    convert_gguf(path, tmp_path / "out")
    assert_same_tensors(tmp_path / "out", tmp_path / "hf")
    ours, theirs = open_checkpoint(tmp_path / "out").config, open_checkpoint(tmp_path / "hf").config
    assert ours.settings == theirs.settings
    assert ours.rope == theirs.rope
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        tokens = torch.tensor([TOKENS])
        torch.testing.assert_close(again(tokens).logits, model(tokens).logits, rtol=0, atol=1e-5)


def test_what_chooses_experts_is_not_rounded(tmp_path: Path) -> None:
    model = save(tmp_path / "hf", "deepseek_v3")
    path = write_gguf(tmp_path / "m.gguf", tmp_path / "hf", model, "split")
    made = convert_gguf(path, tmp_path / "out", dtype="bfloat16", max_shard_bytes=40_000)
    found = {
        name: tensor for shard in (tmp_path / "out").glob("*.safetensors") for name, tensor in load_file(shard).items()
    }
    assert made.num_bytes == sum(tensor.nbytes for tensor in found.values())
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(found.pop(bias), load_file(tmp_path / "hf" / "model.safetensors")[bias])
    kept = {tensor.dtype for name, tensor in found.items() if not name.endswith(".e_score_correction_bias")}
    assert kept == {torch.bfloat16}
