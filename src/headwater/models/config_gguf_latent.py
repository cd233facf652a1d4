"""Latent attention as the metadata of a GGUF file describes it: `deepseek2`, llama.cpp's name for DeepSeek-V2, V3 and
GLM-4-MoE-Lite alike.

The file does not say which of them it holds. They differ in how experts are chosen, which it does say, and in the
epsilon of norms with which `transformers` and vLLM compute the same.
"""

from __future__ import annotations

import math

from headwater.errors import ModelError
from headwater.models.config import MAX_LENGTH, MAX_WIDTH, MLAConfig
from headwater.models.config_experts import MAX_EXPERTS
from headwater.models.config_gguf_experts import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GLM_LITE,
    SIGMOID,
    SOFTMAX,
    GGUFExperts,
)
from headwater.models.fields import Fields
from headwater.models.rope import RopeConfig, yarn_mscale

ARCHITECTURE = "deepseek2"
_LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
LATENT_KEYS = frozenset(
    {
        "attention.q_lora_rank",
        "attention.kv_lora_rank",
        "attention.key_length_mla",
        "attention.value_length_mla",
        _LOG_MULTIPLIER,
    }
)
_HUGE = 1e12
_UNSAID_GROUPS = {160: "DeepSeek-V2", 256: "DeepSeek-V3"}
"""By number of experts: models that divide them into groups, of which files of older converters say nothing."""


def latent_experts(fields: Fields, tensor_names: frozenset[str]) -> GGUFExperts:
    """Whose rule it is. Files that do not name the gating function are from before there was a second one."""
    model = _UNSAID_GROUPS.get(fields.integer("expert_count", 1, MAX_EXPERTS))
    if model is not None and "expert_group_count" not in fields:
        raise ModelError(
            f"{fields.source}: expert_group_count is missing, and {model} divides its experts into groups; older "
            "converters leave it out: convert the model again"
        )
    biased = any(name.endswith(".exp_probs_b.bias") for name in tensor_names)
    gating = fields.integer("expert_gating_func", 0, 16, default=SIGMOID if biased else SOFTMAX)
    if gating == SOFTMAX and not biased:
        return DEEPSEEK_V2
    if gating != SIGMOID or not biased:
        raise fields.wrong("expert_gating_func", f"{SOFTMAX} (softmax), or {SIGMOID} (sigmoid) and exp_probs_b tensors")
    eps = fields.number("attention.layer_norm_rms_epsilon", 0.0, 1.0)
    return GLM_LITE if math.isclose(eps, 1e-5, rel_tol=1e-6) else DEEPSEEK_V3


def mla_from_gguf(fields: Fields, num_heads: int) -> MLAConfig:
    """Older files give the widths of a head; newer ones those of the cache, and the head's beside them."""
    latent_dim = fields.integer("attention.kv_lora_rank", 1, MAX_WIDTH)
    rope_dim = fields.integer("rope.dimension_count", 2, MAX_WIDTH)
    is_new = "attention.key_length_mla" in fields
    ending = "_mla" if is_new else ""
    qk_dim = fields.integer(f"attention.key_length{ending}", 2, 2 * MAX_WIDTH)
    v_dim = fields.integer(f"attention.value_length{ending}", 1, MAX_WIDTH)
    if qk_dim <= rope_dim:
        raise fields.wrong(f"attention.key_length{ending}", f"more than the {rope_dim} that are rotated")
    if is_new:
        for name, width in (("key", latent_dim + rope_dim), ("value", latent_dim)):
            if fields.integer(f"attention.{name}_length", 1, 2 * MAX_WIDTH, default=width) != width:
                raise fields.wrong(f"attention.{name}_length", f"{width}, as the latents are wide")
    has_latent = "attention.q_lora_rank" in fields
    return MLAConfig(
        num_heads=num_heads,
        latent_dim=latent_dim,
        rope_dim=rope_dim,
        nope_dim=qk_dim - rope_dim,
        v_dim=v_dim,
        q_latent_dim=fields.integer("attention.q_lora_rank", 1, MAX_WIDTH) if has_latent else None,
        score_factor=yarn_mscale(fields.number("rope.scaling.factor", 1e-3, 1e6), _mscale(fields)) ** 2
        if _is_yarn(fields)
        else 1.0,
    )


def latent_rope(fields: Fields, mla: MLAConfig, max_len: int, *, has_factors: bool) -> RopeConfig:
    """YaRN's first factor is 1: the file has one number for both mscales, as llama.cpp computes."""
    if has_factors:
        raise ModelError(f"{fields.source}: rope_freqs are not expected beside latent attention")
    theta = fields.number("rope.freq_base", 2.0, _HUGE, default=10000.0)
    if not _is_yarn(fields):
        return RopeConfig(dim=mla.rope_dim, theta=theta)
    return RopeConfig(
        dim=mla.rope_dim,
        theta=theta,
        kind="yarn",
        factor=fields.number("rope.scaling.factor", 1e-3, 1e6),
        original_max_len=fields.integer("rope.scaling.original_context_length", 1, MAX_LENGTH, default=max_len),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 1e-3, 1e6, default=32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1e-3, 1e6, default=1.0),
    )


def _is_yarn(fields: Fields) -> bool:
    kind = fields.text("rope.scaling.type", default="none")
    if kind not in ("none", "yarn"):
        raise fields.wrong("rope.scaling.type", "none or yarn: engines read others differently for latent attention")
    if fields.number("rope.scale_linear", 0.0, 1e6, default=1.0) not in (0.0, 1.0):
        raise fields.wrong("rope.scale_linear", "none")
    return kind == "yarn"


def _mscale(fields: Fields) -> float:
    """`mscale_all_dim`. The converter writes a tenth of it, in float32."""
    if _LOG_MULTIPLIER not in fields:
        raise ModelError(f"{fields.source}: {_LOG_MULTIPLIER} is missing; engines differ in what YaRN does without it")
    if fields.number("rope.scaling.attn_factor", 1e-3, 1e3, default=1.0) != 1.0:
        raise fields.wrong("rope.scaling.attn_factor", "1")
    return round(10 * fields.number(_LOG_MULTIPLIER, 1e-4, 10.0), 6)
