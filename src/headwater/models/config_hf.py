"""From a Hugging Face `config.json` to a `ModelConfig`, for the spellings of transformers 4 and 5.

The values come from outside: each is checked. Code that this engine does not have, and keys that it does not know (see
`config_keys`), are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwater.errors import ModelError
from headwater.models.config import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_LENGTH,
    MAX_VOCAB,
    MAX_WIDTH,
    Family,
    GQAConfig,
    MLAConfig,
    ModelConfig,
    family_named,
)
from headwater.models.config_experts import COUNT_KEYS, EXPERTS, mlps_from_hf
from headwater.models.config_keys import check_keys
from headwater.models.fields import Fields
from headwater.models.rope import RopeConfig, yarn_attention_factor, yarn_mscale

_MAX_TOKEN = MAX_VOCAB - 1
_HUGE = 1e12


def config_from_hf(
    config: Mapping[str, Any], generation: Mapping[str, Any] | None = None, source: str = "config.json"
) -> ModelConfig:
    """Build a ModelConfig from the parsed `config.json` and, where there is one, `generation_config.json`.

    The end-of-sequence ids of both count: a chat model's turn usually ends with one that only the second names.
    Raises ModelError for what is missing, out of bounds or not supported.
    """
    fields = Fields(config, source)
    family = family_named(fields.text("model_type"))
    _refuse_what_cannot_run(fields, family)
    check_keys(config, family.name, source)

    hidden_size = fields.integer("hidden_size", 1, MAX_WIDTH)
    num_heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    num_layers = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
    max_len = fields.integer("max_position_embeddings", 1, MAX_LENGTH)
    vocab_size = fields.integer("vocab_size", 1, MAX_VOCAB)
    attention: GQAConfig | MLAConfig
    if family.q_latent_dim is None:
        attention = _gqa(fields, family, hidden_size, num_heads)
        rope = _rope(fields, family, attention.head_dim, max_len)
    else:
        attention = _mla(fields, family, num_heads)
        rope = _rope(fields, family, attention.rope_dim, max_len)
    mlp_bias = fields.flag("mlp_bias", False) if family.mlp_bias is None else family.mlp_bias
    mlp, sparse = mlps_from_hf(fields, family, num_layers, mlp_bias)
    generated = Fields(generation or {}, f"{source}, generation_config.json")
    eos = {*fields.integers("eos_token_id", -1, _MAX_TOKEN), *generated.integers("eos_token_id", -1, _MAX_TOKEN)}
    bos = fields.integers("bos_token_id", 0, _MAX_TOKEN)
    return ModelConfig(
        family=family.name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        attention=attention,
        mlp=mlp,
        sparse=sparse,
        norm_eps=fields.number("rms_norm_eps", 0.0, 1.0, default=family.norm_eps),
        rope=rope,
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        num_draft_layers=_num_draft_layers(fields, family),
        max_position_embeddings=max_len,
        eos_token_ids=tuple(sorted(token_id for token_id in eos if token_id >= 0)),
        bos_token_id=bos[0] if bos else None,
        stored_dtype=fields.text("dtype", default=fields.text("torch_dtype", default="float32")),
    )


def _gqa(fields: Fields, family: Family, hidden_size: int, num_heads: int) -> GQAConfig:
    attention_bias = family.qkv_bias is None and fields.flag("attention_bias", False)
    return GQAConfig(
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", 1, MAX_HEADS, default=num_heads),
        head_dim=_head_dim(fields, family, hidden_size, num_heads),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=attention_bias and family.output_bias,
        qk_norm=fields.flag("use_qk_norm", False) if family.qk_norm is None else family.qk_norm,
        norms_whole_width=family.norms_whole_width,
    )


def _mla(fields: Fields, family: Family, num_heads: int) -> MLAConfig:
    """`num_key_value_heads` and `head_dim` count for nothing, but transformers stumbles over other values than these:
    as many as heads, and the width of the rotary part."""
    if fields.integer("num_key_value_heads", 1, MAX_HEADS, default=num_heads) != num_heads:
        raise fields.wrong("num_key_value_heads", f"{num_heads}, as num_attention_heads says")
    rope_dim = fields.integer("qk_rope_head_dim", 2, MAX_WIDTH)
    if fields.integer("head_dim", 1, MAX_WIDTH, default=rope_dim) != rope_dim:
        raise fields.wrong("head_dim", f"{rope_dim}, as qk_rope_head_dim says")
    nope_dim = fields.integer("qk_nope_head_dim", 1, MAX_WIDTH)
    if fields.integer("qk_head_dim", 1, 2 * MAX_WIDTH, default=nope_dim + rope_dim) != nope_dim + rope_dim:
        raise fields.wrong("qk_head_dim", f"{nope_dim + rope_dim}: qk_nope_head_dim and qk_rope_head_dim together")
    has_no_latent = fields.values.get("q_lora_rank", 0) is None
    return MLAConfig(
        num_heads=num_heads,
        latent_dim=fields.integer("kv_lora_rank", 1, MAX_WIDTH),
        rope_dim=rope_dim,
        nope_dim=nope_dim,
        v_dim=fields.integer("v_head_dim", 1, MAX_WIDTH),
        q_latent_dim=None if has_no_latent else fields.integer("q_lora_rank", 1, MAX_WIDTH, family.q_latent_dim),
        score_factor=_score_factor(fields),
    )


def _score_factor(fields: Fields) -> float:
    """Of latent attention with YaRN. vLLM takes every other type for YaRN, overlooks `attention_factor` and `truncate`,
    and reads one mscale without the other differently from transformers: such configs are refused."""
    rope = fields.section("rope_parameters" if "rope_parameters" in fields else "rope_scaling")
    kind = rope.text("rope_type", default=rope.text("type", default="default"))
    if kind == "default":
        return 1.0
    if kind != "yarn":
        raise rope.wrong("rope_type", "default or yarn: engines read other types of latent attention differently")
    if "attention_factor" in rope:
        raise rope.wrong("attention_factor", "none: engines read it differently for latent attention")
    if not rope.flag("truncate", True):
        raise rope.wrong("truncate", "true: engines read it differently for latent attention")
    mscale, all_dim = (rope.number(name, 0.0, 100.0, default=0.0) for name in ("mscale", "mscale_all_dim"))
    if bool(mscale) != bool(all_dim) or ("mscale" in rope) != ("mscale_all_dim" in rope):
        raise rope.wrong("mscale_all_dim", "a number above 0 beside mscale, or neither of the two")
    if mscale == 0.0 and "mscale" in rope:
        raise rope.wrong("mscale", "a number above 0")
    factor = rope.number("factor", 1e-3, 1e6)
    return yarn_mscale(factor, all_dim) ** 2 if all_dim else 1.0


def _head_dim(fields: Fields, family: Family, hidden_size: int, num_heads: int) -> int:
    if "head_dim" in fields or family.default_head_dim is not None:
        found = fields.integer("head_dim", 1, MAX_WIDTH, default=family.default_head_dim)
        if not family.has_other_head_dim and found * num_heads != hidden_size:
            raise fields.wrong("head_dim", f"hidden_size {hidden_size} divided by {num_heads} heads")
        return found
    if hidden_size % num_heads:
        raise ModelError(f"{fields.source}: hidden_size {hidden_size} is no multiple of {num_heads} heads")
    return hidden_size // num_heads


def _num_draft_layers(fields: Fields, family: Family) -> int:
    """Transformers 5 has a new name for it; other families than those that have such layers know neither."""
    names = ("num_nextn_predict_layers", "num_mtp_layers")
    if family.name not in ("glm4_moe", "glm4_moe_lite", "deepseek_v3"):
        return 0
    return max(fields.integer(name, 0, MAX_LAYERS, default=0) for name in names)


def _refuse_what_cannot_run(fields: Fields, family: Family) -> None:
    architectures = fields.values.get("architectures")
    if architectures and (not isinstance(architectures, list) or family.architecture not in architectures):
        raise fields.wrong("architectures", f"{family.architecture}: this engine runs language models only")
    if "quantization_config" in fields:
        raise ModelError(
            f"{fields.source}: the weights are quantised (quantization_config), which this engine cannot read from "
            "safetensors; use the unquantised checkpoint, or a GGUF file"
        )
    for name in COUNT_KEYS:
        if family.name not in EXPERTS and fields.values.get(name):
            raise fields.wrong(name, f"none: {family.name} models have no experts")
    if fields.text("hidden_act", default="silu") not in ("silu", "swish"):
        raise fields.wrong("hidden_act", "silu")
    layer_types = fields.values.get("layer_types") or ()
    if not isinstance(layer_types, list | tuple) or any(kind != "full_attention" for kind in layer_types):
        raise fields.wrong("layer_types", "full_attention everywhere: sliding windows are not supported")
    # Old configs of the family carry a window and say that it is off; `layer_types` is how newer ones say it.
    # Without the key, transformers takes a window of 4096 tokens; null is none.
    has_window = fields.values.get("sliding_window", 4096) is not None
    if not layer_types and fields.flag("use_sliding_window", False) and has_window:
        first = fields.integer("max_window_layers", 0, MAX_LENGTH, default=0)
        if first < fields.integer("num_hidden_layers", 1, MAX_LAYERS):
            raise fields.wrong("use_sliding_window", "false: sliding windows are not supported")


def _rope(fields: Fields, family: Family, head_dim: int, max_len: int) -> RopeConfig:
    """Transformers 5 keeps all in `rope_parameters`; 4 had `rope_theta` beside an optional `rope_scaling`.

    Where a config says one thing twice, transformers and vLLM differ in which of the two they take: it is refused.
    """
    both = [fields.values[name] for name in ("rope_parameters", "rope_scaling") if fields.values.get(name)]
    if len(both) == 2 and both[0] != both[1]:
        raise fields.wrong("rope_scaling", "none beside rope_parameters, or the same")
    rope = fields.section("rope_parameters" if "rope_parameters" in fields else "rope_scaling")
    holder = rope if "rope_theta" in rope else fields
    theta = holder.number("rope_theta", 2.0, _HUGE, default=family.rope_theta)
    dim = _rotated_dim((rope, fields), family, head_dim)
    if "rope_theta" in rope and "rope_theta" in fields and fields.number("rope_theta", 2.0, _HUGE) != theta:
        raise fields.wrong("rope_theta", f"{theta:g}, as inside {rope.source}")
    kind = rope.text("rope_type", default=rope.text("type", default="default"))
    if rope.text("type", default=kind) != kind:
        raise rope.wrong("type", f"{kind}, as rope_type says")
    if kind == "default":
        return RopeConfig(dim=dim, theta=theta)
    outer = fields.integer("original_max_position_embeddings", 1, MAX_LENGTH, default=max_len)
    original = rope.integer("original_max_position_embeddings", 1, MAX_LENGTH, default=outer)
    if "original_max_position_embeddings" in fields and outer != original:
        raise fields.wrong("original_max_position_embeddings", f"{original}, as inside {rope.source}")
    if kind == "dynamic":
        original = max_len  # its config gives the trained length; what it can be stretched to is open
    if kind == "yarn" and "factor" not in rope:
        factor = max_len / original
    else:
        factor = rope.number("factor", 1e-3, 1e6)
    llama3 = kind == "llama3"
    inferred = 1.0
    if kind == "yarn":
        mscale = rope.number("mscale", 0.0, 100.0, default=0.0)
        inferred = yarn_attention_factor(factor, mscale, rope.number("mscale_all_dim", 0.0, 100.0, default=0.0))
    return RopeConfig(
        dim=dim,
        theta=theta,
        kind=kind,
        factor=factor,
        original_max_len=original,
        low_freq_factor=rope.number("low_freq_factor", 1e-3, 1e6, default=None if llama3 else 1.0),
        high_freq_factor=rope.number("high_freq_factor", 1e-3, 1e6, default=None if llama3 else 4.0),
        beta_fast=rope.number("beta_fast", 1e-3, 1e6, default=32.0),
        beta_slow=rope.number("beta_slow", 1e-3, 1e6, default=1.0),
        truncate=rope.flag("truncate", True),
        attention_factor=rope.number("attention_factor", 1e-3, 1e3, default=inferred) if kind == "yarn" else 1.0,
    )


def _rotated_dim(places: tuple[Fields, ...], family: Family, head_dim: int) -> int:
    """The width of a head that is rotated; `partial_rotary_factor` may stand in either place, but not differ."""
    factors = {
        place.number("partial_rotary_factor", 0.0, 1.0): place for place in places if "partial_rotary_factor" in place
    }
    if len(factors) > 1:
        raise places[-1].wrong("partial_rotary_factor", f"the same as inside {places[0].source}")
    (factor, place) = next(iter(factors.items()), (family.rotary_part, places[-1]))
    if family.rotary_part == 1.0 and factor != 1.0:
        raise place.wrong("partial_rotary_factor", "1: heads of this family are rotated as a whole")
    dim = int(head_dim * factor)
    if dim < 2 or dim % 2:
        raise place.wrong("partial_rotary_factor", f"an even part of heads of width {head_dim}")
    return dim
