"""GGUF files with experts: the model that they came from, expert by expert, and refused where a rule is not known."""

from __future__ import annotations

import re
from dataclasses import replace
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
from headwater.models.config import DenseConfig
from headwater.models.config_json import hf_config
from headwater.models.convert import convert_gguf

from models_support import assert_same_tensors, load_model, run_tokens, save_tiny

ARCHITECTURES = {"mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "olmoe": "olmoe"}
ARCHITECTURES["glm4_moe"] = "glm4moe"
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
CASES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 32},
    "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 64, "num_key_value_heads": 6},
    "qwen3_moe": _EXPERTS | {"head_dim": 16, "norm_topk_prob": True},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 32, "num_key_value_heads": 6}
    | {"eos_token_id": 130},
    "glm4_moe": {
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_shared_experts": 2,
        "n_group": 3,
        "topk_group": 2,
        "routed_scaling_factor": 1.75,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "head_dim": 16,
        "use_qk_norm": True,
        "attention_bias": True,
        "eos_token_id": 130,
    },
}
PARTS = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_tensors(folder: Path, config: Any) -> dict[str, torch.Tensor]:
    """The tensors of a saved checkpoint under llama.cpp's names, experts stacked, as its converter writes them."""
    found: dict[str, torch.Tensor] = {}
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stem, _, ending = name.rpartition(".")
        if stem in TOP:
            found[f"{TOP[stem]}.{ending}"] = tensor
            continue
        _, _, layer, part = stem.split(".", 3)
        blk = f"blk.{layer}"
        if expert := re.fullmatch(r"\w+\.experts\.(\d+)\.(\w+)", part):
            stacks.setdefault(f"{blk}.ffn_{PARTS[expert[2]]}_exps.weight", {})[int(expert[1])] = tensor
        elif ending == "e_score_correction_bias":
            found[f"{blk}.exp_probs_b.bias"] = tensor
        elif dense := re.fullmatch(r"mlp\.(gate|up|down)_proj", part):
            found[f"{blk}.ffn_{dense[1]}.weight"] = tensor
        elif shared := re.fullmatch(r"mlp\.shared_experts?\.(\w+)", part):
            found[f"{blk}.ffn_{PARTS[shared[1]]}_shexp.weight"] = tensor
        else:
            heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
            if config.model_type == "mixtral" and part in heads:
                tensor = tensor.unflatten(0, (heads[part], 2, -1)).transpose(1, 2).flatten(0, 2)
            new = NAMES[part]
            if config.model_type == "glm4_moe" and new == "ffn_norm":
                new = "post_attention_norm"
            found[f"{blk}.{new}.{ending}"] = tensor.squeeze()  # a gate of one row becomes a vector
    for name, parts in stacks.items():
        found[name] = torch.stack([parts[i] for i in range(len(parts))])
    return found


def write_gguf(path: Path, folder: Path, model: Any, kind: str = "F32", **changes: Any) -> Path:
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(str(path), architecture)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "expert_count": next(
            getattr(config, name)
            for name in ("num_local_experts", "num_experts", "n_routed_experts")
            if hasattr(config, name)
        ),
        "expert_used_count": config.num_experts_per_tok,
    }
    if config.model_type == "glm4_moe":
        sizes |= {"expert_shared_count": config.n_shared_experts, "leading_dense_block_count": 1}
        sizes |= {"expert_group_count": config.n_group, "expert_group_used_count": config.topk_group}
        sizes |= {"expert_gating_func": 2, "rope.dimension_count": head_dim // 2}
        sizes |= {"expert_weights_scale": config.routed_scaling_factor, "expert_weights_norm": config.norm_topk_prob}
    if config.model_type.startswith(("qwen", "glm")):
        sizes["expert_feed_forward_length"] = config.moe_intermediate_size
    if config.model_type == "qwen2_moe":
        sizes["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    floats = {
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    for key, value in (sizes | floats | changes).items():
        if isinstance(value, bool):
            writer.add_bool(f"{architecture}.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{architecture}.{key}", value)
        elif value is not None:
            writer.add_uint32(f"{architecture}.{key}", value)
    _write_tokenizer(writer, config.vocab_size)
    drafts = {"blk.3.nextn.eh_proj.weight": torch.ones(4, 8), "blk.3.attn_norm.weight": torch.ones(4)}
    for name, tensor in (gguf_tensors(folder, config) | (drafts if "nextn_predict_layers" in changes else {})).items():
        quantised = gguf.GGMLQuantizationType[kind if tensor.dim() > 2 else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(tensor.contiguous().numpy(), quantised), raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("family", CASES)
def test_a_file_with_experts_is_the_model_it_came_from(tmp_path: Path, family: str) -> None:
    model = save_tiny(tmp_path / "hf", family, **CASES[family])
    path = write_gguf(tmp_path / "m.gguf", tmp_path / "hf", model)
    ours, theirs = open_checkpoint(path).config, open_checkpoint(tmp_path / "hf").config
    assert (ours.family, ours.sparse, ours.mlp, ours.attention) == (family, theirs.sparse, theirs.mlp, theirs.attention)
    expected = run_tokens(load_model(tmp_path / "hf"), TOKENS)
    torch.testing.assert_close(run_tokens(load_model(path), TOKENS), expected, rtol=0, atol=1e-5)
    with torch.no_grad():
        oracle = model(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(run_tokens(load_model(path), TOKENS), oracle, rtol=0, atol=1e-4)


def test_layers_that_only_draft_are_not_loaded(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "hf", "glm4_moe", **CASES["glm4_moe"])
    path = write_gguf(tmp_path / "m.gguf", tmp_path / "hf", model, block_count=4, nextn_predict_layers=1)
    config = open_checkpoint(path).config
    assert (config.num_layers, config.num_draft_layers) == (3, 1)
    expected = run_tokens(load_model(tmp_path / "hf"), TOKENS)
    torch.testing.assert_close(run_tokens(load_model(path), TOKENS), expected, rtol=0, atol=1e-5)


def test_experts_are_dequantised_each_from_its_place(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "hf", "mixtral", **CASES["mixtral"] | {"hidden_size": 96})
    path = write_gguf(tmp_path / "m.gguf", tmp_path / "hf", model, "Q8_0")
    found = load_model(path).layers[1].mlp.experts
    for name, held in (("gate", found.gate_up[:, :32]), ("up", found.gate_up[:, 32:]), ("down", found.down)):
        stack = gguf_tensors(tmp_path / "hf", model.config)[f"blk.1.ffn_{name}_exps.weight"]
        kind = gguf.GGMLQuantizationType.Q8_0
        exact = gguf.quants.dequantize(gguf.quants.quantize(stack.numpy(), kind), kind)
        assert torch.equal(held, torch.from_numpy(exact.copy()))


def test_some_layers_may_be_dense(tmp_path: Path) -> None:
    changes = CASES["qwen3_moe"] | {"mlp_only_layers": [0]}
    model = save_tiny(tmp_path / "hf", "qwen3_moe", **changes)
    path = write_gguf(tmp_path / "m.gguf", tmp_path / "hf", model)
    config = open_checkpoint(path).config
    assert config.sparse is not None
    assert (config.sparse.layers, config.mlp is not None) == ((1, 2), True)
    expected = run_tokens(load_model(tmp_path / "hf"), TOKENS)
    torch.testing.assert_close(run_tokens(load_model(path), TOKENS), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "changes", "what"),
    [
        ("qwen3_moe", {"expert_weights_scale": 2.0}, "does not know qwen3moe.expert_weights_scale"),
        ("qwen3_moe", {"expert_feed_forward_length": None}, "expert_feed_forward_length"),
        ("qwen3_moe", {"expert_used_count": 7}, "7"),
        ("qwen3_moe", {"expert_count": 0}, "expert_count is 0"),
        ("glm4_moe", {"expert_gating_func": 1}, "expected 2, sigmoid"),
        ("glm4_moe", {"rope.dimension_count": 32}, "an even part of heads of width 16"),
        ("olmoe", {"attention.layer_norm_rms_epsilon": 1e-6}, "engines run this model differently"),
    ],
)
def test_what_is_not_known_is_refused(tmp_path: Path, family: str, changes: dict[str, Any], what: str) -> None:
    model = save_tiny(tmp_path / "hf", family, **CASES[family])
    path = write_gguf(tmp_path / "m.gguf", tmp_path / "hf", model, **changes)
    with pytest.raises(ModelError, match=what):
        open_checkpoint(path)


def test_a_stack_of_another_number_of_experts_is_refused(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "hf", "mixtral", **CASES["mixtral"])
    path = write_gguf(tmp_path / "m.gguf", tmp_path / "hf", model, expert_count=5)
    with pytest.raises(ModelError, match="expected a stack of 5 matrices"):
        dict(open_checkpoint(path).tensors())


CONVERTED = CASES | {
    "qwen3_moe, some layers dense": CASES["qwen3_moe"] | {"mlp_only_layers": [1]},
    "qwen2_moe, the first one dense": CASES["qwen2_moe"] | {"mlp_only_layers": [0]},
}


@pytest.mark.parametrize("case", CONVERTED)
def test_a_converted_model_is_the_one_that_the_file_came_from(tmp_path: Path, case: str) -> None:
    """Tensor for tensor, and in `transformers`, which reads the new config."""
    model = save_tiny(tmp_path / "hf", case.partition(",")[0], **CONVERTED[case])
    path = write_gguf(tmp_path / "m.gguf", tmp_path / "hf", model)
    convert_gguf(path, tmp_path / "out")
    assert_same_tensors(tmp_path / "out", tmp_path / "hf")
    assert open_checkpoint(tmp_path / "out").config.settings == open_checkpoint(tmp_path / "hf").config.settings
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        tokens = torch.tensor([TOKENS])
        torch.testing.assert_close(again(tokens).logits, model(tokens).logits, rtol=0, atol=1e-5)


def test_layers_that_only_draft_are_not_converted(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "hf", "glm4_moe", **CASES["glm4_moe"])
    path = write_gguf(tmp_path / "m.gguf", tmp_path / "hf", model, block_count=4, nextn_predict_layers=1)
    convert_gguf(path, tmp_path / "out")
    assert_same_tensors(tmp_path / "out", tmp_path / "hf")


def test_a_model_that_no_config_describes_is_not_converted(tmp_path: Path) -> None:
    """Mixtral with the first layer dense: the file says so by its tensors, and no config.json of Mixtral could."""
    save_tiny(tmp_path / "hf", "mixtral", **CASES["mixtral"])
    config = replace(open_checkpoint(tmp_path / "hf").config, mlp=DenseConfig(intermediate_size=32))
    assert config.sparse is not None
    odd = replace(config, sparse=replace(config.sparse, layers=(1, 2)))
    with pytest.raises(ModelError, match=r"no config\.json of the family mixtral describes this model: .* sparse"):
        hf_config(odd, "float32")
