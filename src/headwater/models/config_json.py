"""From a `ModelConfig` to a `config.json`, in the spelling that transformers 4, 5 and the engines built on them read.

What it writes is read again with `config_hf` before it counts: a model that no config.json could name is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from headwater.errors import ModelError
from headwater.models.config import GQAConfig, MLAConfig, ModelConfig, SparseConfig, family_named
from headwater.models.config_hf import config_from_hf
from headwater.models.rope import RopeConfig

Values = dict[str, Any]


def hf_config(config: ModelConfig, dtype: str) -> Values:
    """`config.json`. Raises ModelError for what none could say: rotary factors of no rope type, dense layers where a
    family has none."""
    family = family_named(config.family)
    values: Values = {
        "architectures": [family.architecture],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.attention.num_heads,
        "hidden_act": "silu",
        "rms_norm_eps": _short(config.norm_eps),
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope.theta,
        "rope_scaling": _rope_scaling(config),
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": _one_or_all(config.eos_token_ids),
        "torch_dtype": dtype,
    }
    if config.mlp is not None:
        values["intermediate_size"] = config.mlp.intermediate_size
        if family.mlp_bias is None:
            values["mlp_bias"] = config.mlp.mlp_bias
    values |= _mla(config.attention) if isinstance(config.attention, MLAConfig) else _gqa(config)
    if config.sparse is not None:
        values |= EXPERTS[config.family](config.sparse, config.num_layers)
    found = config_from_hf(values)
    if different := sorted(_differing(config.settings, found.settings)):
        raise ModelError(
            f"no config.json of the family {config.family} describes this model: it would say something else of "
            f"{', '.join(different)}"
        )
    return values


def generation_config(config: ModelConfig) -> Values:
    """`generation_config.json`: how a text begins and ends."""
    return {"bos_token_id": config.bos_token_id, "eos_token_id": _one_or_all(config.eos_token_ids)}


# ---- attention --------------------------------------------------------------------------------------------------
def _gqa(config: ModelConfig) -> Values:
    family, gqa = family_named(config.family), config.gqa
    values: Values = {"num_key_value_heads": gqa.num_kv_heads, "head_dim": gqa.head_dim}
    if family.qkv_bias is None:
        if family.output_bias and gqa.qkv_bias != gqa.output_bias:
            raise ModelError(f"{config.family} models have biases on all attention matrices or on none; this has some")
        values["attention_bias"] = gqa.qkv_bias
    if family.qk_norm is None:
        values["use_qk_norm"] = gqa.qk_norm
    if family.rotary_part != 1.0:
        values["partial_rotary_factor"] = config.rope.dim / gqa.head_dim
    return values


def _mla(mla: MLAConfig) -> Values:
    return {
        "num_key_value_heads": mla.num_heads,
        "kv_lora_rank": mla.latent_dim,
        "q_lora_rank": mla.q_latent_dim,
        "qk_rope_head_dim": mla.rope_dim,
        "qk_nope_head_dim": mla.nope_dim,
        "v_head_dim": mla.v_dim,
    }


def _rope_scaling(config: ModelConfig) -> Values | None:
    rope = config.rope if config.rope.freq_factors is None else _as_llama3(config.rope)
    if rope.kind == "default":
        return None
    values: Values = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.original_max_len is not None:
        values["original_max_position_embeddings"] = rope.original_max_len
    if rope.kind == "llama3":
        values |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        values |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        if isinstance(config.attention, GQAConfig):
            values["attention_factor"] = rope.attention_factor
        else:  # mscale(mscale_all_dim)², and cosines as they are: both mscales are the same
            mscale = round((math.sqrt(config.attention.score_factor) - 1) / (0.1 * math.log(rope.factor)), 6)
            values |= {"type": rope.kind, "mscale": mscale, "mscale_all_dim": mscale}
    return values


def _as_llama3(rope: RopeConfig) -> RopeConfig:
    """The parameters that gave the factors in a GGUF file: those of Llama 3.1 and later, which differ in one number."""
    assert rope.freq_factors is not None
    if rope.kind == "default":
        found = RopeConfig(
            dim=rope.dim,
            theta=rope.theta,
            kind="llama3",
            factor=round(max(rope.freq_factors), 3),
            original_max_len=8192,
        )
        if torch.allclose(found.inverse_frequencies(), rope.inverse_frequencies(), rtol=1e-4, atol=0.0):
            return found
    raise ModelError("the rotary factors of this file are not those of a rope type that a config.json could name")


# ---- experts ----------------------------------------------------------------------------------------------------
def _mixtral(sparse: SparseConfig, num_layers: int) -> Values:
    return {"num_local_experts": sparse.num_experts, "intermediate_size": sparse.expert_size} | _top_k(sparse)


def _olmoe(sparse: SparseConfig, num_layers: int) -> Values:
    counts = {"num_experts": sparse.num_experts, "intermediate_size": sparse.expert_size}
    return counts | _top_k(sparse) | {"norm_topk_prob": sparse.routing.renormalise}


def _qwen(sparse: SparseConfig, num_layers: int) -> Values:
    dense = [layer for layer in range(num_layers) if layer not in sparse.layers]
    values: Values = {"num_experts": sparse.num_experts, "moe_intermediate_size": sparse.expert_size} | _top_k(sparse)
    values |= {"norm_topk_prob": sparse.routing.renormalise, "decoder_sparse_step": 1, "mlp_only_layers": dense}
    return values | ({"shared_expert_intermediate_size": sparse.shared_size} if sparse.shared_size else {})


def _glm(sparse: SparseConfig, num_layers: int) -> Values:
    routing = sparse.routing
    return _top_k(sparse) | {
        "n_routed_experts": sparse.num_experts,
        "moe_intermediate_size": sparse.expert_size,
        "n_shared_experts": sparse.shared_size // sparse.expert_size,
        "n_group": routing.num_groups,
        "topk_group": routing.groups_kept,
        "routed_scaling_factor": _short(routing.scaling),
        "norm_topk_prob": routing.renormalise,
        "first_k_dense_replace": num_layers - len(sparse.layers),
    }


def _glm_lite(sparse: SparseConfig, num_layers: int) -> Values:
    num_dense = num_layers - len(sparse.layers)
    types = ["dense"] * num_dense + ["sparse"] * len(sparse.layers)
    return _glm(sparse, num_layers) | {"mlp_layer_types": types, "topk_method": "noaux_tc"}


def _deepseek_v2(sparse: SparseConfig, num_layers: int) -> Values:
    method = "group_limited_greedy" if sparse.routing.num_groups > 1 else "greedy"
    return _glm(sparse, num_layers) | {"topk_method": method, "scoring_func": "softmax"}


def _deepseek_v3(sparse: SparseConfig, num_layers: int) -> Values:
    return _glm(sparse, num_layers) | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}


def _top_k(sparse: SparseConfig) -> Values:
    return {"num_experts_per_tok": sparse.routing.top_k}


EXPERTS: dict[str, Callable[[SparseConfig, int], Values]] = {
    "mixtral": _mixtral,
    "qwen2_moe": _qwen,
    "qwen3_moe": _qwen,
    "olmoe": _olmoe,
    "glm4_moe": _glm,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "glm4_moe_lite": _glm_lite,
}
"""By family: its experts, given how many layers there are."""


# ---- values -----------------------------------------------------------------------------------------------------
def _short(value: float) -> float:
    """A number of a GGUF file, which has float32, as it was written before: 1e-06 and not 9.99999997e-07."""
    return float(str(np.float32(value)))


def _one_or_all(token_ids: tuple[int, ...]) -> int | list[int] | None:
    return list(token_ids) if len(token_ids) > 1 else next(iter(token_ids), None)


def _differing(wanted: Values, found: Values) -> set[str]:
    return {name for name in wanted.keys() | found.keys() if not _same(wanted.get(name), found.get(name))}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return not _differing(one, other)
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6)
    return bool(one == other)
