"""From the metadata of a GGUF file to a `ModelConfig`. It sees plain values; `checkpoint.gguf_file` reads them.

A key of the architecture that is not in the tables below is refused, as in `config_keys`. Keys outside it (`general.`,
`tokenizer.`) describe the file and the tokenizer.
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
    DenseConfig,
    Family,
    GQAConfig,
    MLAConfig,
    ModelConfig,
    family_named,
)
from headwater.models.config_experts import EXPERTS
from headwater.models.config_gguf_experts import EXPERT_KEYS, WITH_EXPERTS, experts_from_gguf
from headwater.models.config_gguf_latent import ARCHITECTURE as LATENT
from headwater.models.config_gguf_latent import LATENT_KEYS, latent_experts, latent_rope, mla_from_gguf
from headwater.models.fields import Fields
from headwater.models.rope import RopeConfig, yarn_attention_factor

_HUGE = 1e12

_INTERPRETED = frozenset(
    [
        "embedding_length",
        "feed_forward_length",
        "block_count",
        "context_length",
        "expert_count",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scale_linear",
    ]
)
_ROPE_KEYS: dict[str, frozenset[str]] = {
    "none": frozenset({"type"}),
    "linear": frozenset({"type", "factor"}),
    "yarn": frozenset(["type", "factor", "original_context_length", "attn_factor", "yarn_beta_fast", "yarn_beta_slow"]),
}
"""Keys under `rope.scaling.` that each type reads."""
_HARMLESS = frozenset({"vocab_size", "rope.scaling.finetuned"})
"""The embedding's shape says the first; nothing computes with the second."""
_ONLY_AT: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "expert_used_count": (0,),
    "logit_scale": (1.0,),
    "use_parallel_residual": (False,),
}
"""Keys that change nothing at these values."""

_UNREAD_EXPERTS = ("deepseek",)
"""Architectures whose experts are not read from GGUF files."""


def config_from_gguf(
    metadata: Mapping[str, Any],
    *,
    vocab_size: int,
    tensor_names: frozenset[str],
    freq_factors: tuple[float, ...] | None,
    stored_dtype: str,
    source: str,
) -> ModelConfig:
    """Build a ModelConfig. GGUF says some things only through the tensors that are there: biases, and whether the
    embedding serves as the output too. Raises ModelError for what is missing, out of bounds or not supported."""
    general = Fields(metadata, source)
    architecture = general.text("general.architecture")
    prefix = f"{architecture}."
    fields = Fields({key.removeprefix(prefix): metadata[key] for key in metadata if key.startswith(prefix)}, source)
    is_latent = architecture == LATENT
    experts = latent_experts(fields, tensor_names) if is_latent else WITH_EXPERTS.get(architecture)
    if architecture == "llama" and not fields.values.get("expert_count"):
        experts = None  # not Mixtral
    if architecture in _UNREAD_EXPERTS or (experts is None and architecture in EXPERTS):
        raise general.wrong("general.architecture", "another one: its experts are read from safetensors only")
    family = family_named(architecture if experts is None else experts.family)
    if experts is None and fields.values.get("expert_count"):
        raise fields.wrong("expert_count", "none: an architecture with experts of which this engine knows the rule")
    if fields.values.get("attention.sliding_window"):
        raise fields.wrong("attention.sliding_window", "none: sliding windows are not supported")
    if general.integer("split.count", 0, 1 << 16, default=0) > 1:
        raise general.wrong("split.count", "1: join the parts into one file (llama-gguf-split --merge)")

    also = EXPERT_KEYS | experts.keys if experts is not None else frozenset()
    _check_keys(fields, prefix, also | LATENT_KEYS if is_latent else also)
    hidden_size = fields.integer("embedding_length", 1, MAX_WIDTH)
    num_heads = _same_everywhere(fields, "attention.head_count", None)
    max_len = fields.integer("context_length", 1, MAX_LENGTH)
    attention: GQAConfig | MLAConfig
    if is_latent:
        attention = mla_from_gguf(fields, num_heads)
        rope = latent_rope(fields, attention, max_len, has_factors=freq_factors is not None)
    else:
        attention = _gqa(fields, family, hidden_size, num_heads, tensor_names)
        rope = _rope(fields, _rope_dim(fields, family, attention.head_dim), max_len, freq_factors)
    # Some files name the end of a turn apart from the end of a text; a chat ends with either.
    eos = {
        token_id
        for name in ("eos_token_id", "eot_token_id")
        for token_id in general.integers(f"tokenizer.ggml.{name}", 0, MAX_VOCAB)
    }
    bos = general.integers("tokenizer.ggml.bos_token_id", 0, MAX_VOCAB)
    num_drafts = fields.integer("nextn_predict_layers", 0, MAX_LAYERS, default=0)
    num_layers = fields.integer("block_count", 1 + num_drafts, MAX_LAYERS) - num_drafts
    sparse = None if experts is None else experts_from_gguf(fields, experts, num_layers, tensor_names)
    return ModelConfig(
        family=family.name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        attention=attention,
        mlp=None
        if sparse is not None and len(sparse.layers) == num_layers
        else DenseConfig(
            intermediate_size=fields.integer("feed_forward_length", 1, MAX_WIDTH * 4),
            mlp_bias="blk.0.ffn_gate.bias" in tensor_names,
        ),
        sparse=sparse,
        norm_eps=fields.number("attention.layer_norm_rms_epsilon", 0.0, 1.0),
        rope=rope,
        tie_embeddings="output.weight" not in tensor_names,
        num_draft_layers=num_drafts,
        max_position_embeddings=max_len,
        eos_token_ids=tuple(sorted(token_id for token_id in eos if token_id < vocab_size)),
        bos_token_id=bos[0] if bos and bos[0] < vocab_size else None,
        stored_dtype=stored_dtype,
    )


def _gqa(fields: Fields, family: Family, hidden_size: int, num_heads: int, tensor_names: frozenset[str]) -> GQAConfig:
    return GQAConfig(
        num_heads=num_heads,
        num_kv_heads=_same_everywhere(fields, "attention.head_count_kv", num_heads),
        head_dim=_head_dim(fields, hidden_size, num_heads),
        qkv_bias="blk.0.attn_q.bias" in tensor_names,
        output_bias="blk.0.attn_output.bias" in tensor_names,
        qk_norm="blk.0.attn_q_norm.weight" in tensor_names if family.qk_norm is None else family.qk_norm,
        norms_whole_width=family.norms_whole_width,
    )


def _check_keys(fields: Fields, prefix: str, also: frozenset[str]) -> None:
    kind = fields.values.get("rope.scaling.type") or "linear"
    scaling = _ROPE_KEYS.get(kind) if isinstance(kind, str) else None
    unknown = [
        f"{prefix}{key}"
        for key, value in fields.values.items()
        if key not in _INTERPRETED | _HARMLESS | also and not _is_harmless_at(key, value)
        # `RopeConfig` refuses other kinds by name
        if not key.startswith("rope.scaling.") or (scaling is not None and key[13:] not in scaling)
    ]
    if unknown:
        raise ModelError(
            f"{fields.source}: this engine does not know {', '.join(sorted(unknown))}, which may change what the model "
            "computes"
        )


def _is_harmless_at(key: str, value: object) -> bool:
    return any(type(value) is type(harmless) and value == harmless for harmless in _ONLY_AT.get(key, ()))


def _same_everywhere(fields: Fields, name: str, default: int | None) -> int:
    """A count that GGUF may give once or for each layer; layers that differ are refused."""
    values = set(fields.integers(name, 1, MAX_HEADS)) or ({default} if default is not None else set())
    if len(values) != 1:
        raise fields.wrong(name, "one number, the same for all layers")
    return values.pop()


def _head_dim(fields: Fields, hidden_size: int, num_heads: int) -> int:
    if "attention.key_length" not in fields and hidden_size % num_heads:
        raise ModelError(f"{fields.source}: embedding_length {hidden_size} is no multiple of {num_heads} heads")
    head_dim = fields.integer("attention.key_length", 1, MAX_WIDTH, default=max(1, hidden_size // num_heads))
    if fields.integer("attention.value_length", 1, MAX_WIDTH, default=head_dim) != head_dim:
        raise fields.wrong("attention.value_length", f"the width of the keys, {head_dim}")
    return head_dim


def _rope_dim(fields: Fields, family: Family, head_dim: int) -> int:
    """The width of a head that is rotated."""
    found = fields.integer("rope.dimension_count", 1, MAX_WIDTH, default=head_dim)
    if family.rotary_part == 1.0 and found != head_dim:
        raise fields.wrong("rope.dimension_count", f"the whole head, {head_dim}: partial rotation is not supported")
    if found > head_dim or found % 2:
        raise fields.wrong("rope.dimension_count", f"an even part of heads of width {head_dim}")
    return found


def _rope(fields: Fields, head_dim: int, max_len: int, freq_factors: tuple[float, ...] | None) -> RopeConfig:
    theta = fields.number("rope.freq_base", 2.0, _HUGE, default=10000.0)
    legacy = fields.number("rope.scale_linear", 0.0, 1e6, default=1.0)
    kind = fields.text("rope.scaling.type", default="none" if legacy in (0.0, 1.0) else "linear")
    if kind == "none":
        return RopeConfig(dim=head_dim, theta=theta, freq_factors=freq_factors)
    factor = fields.number("rope.scaling.factor", 1e-3, 1e6, default=legacy)
    if kind == "linear":
        return RopeConfig(dim=head_dim, theta=theta, kind="linear", factor=factor, freq_factors=freq_factors)
    scale = fields.number("rope.scaling.attn_factor", 1e-3, 1e3, default=1.0)
    return RopeConfig(
        dim=head_dim,
        theta=theta,
        kind=kind,
        factor=factor,
        original_max_len=fields.integer("rope.scaling.original_context_length", 1, MAX_LENGTH, default=max_len),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 1e-3, 1e6, default=32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1e-3, 1e6, default=1.0),
        attention_factor=scale * yarn_attention_factor(factor),
        freq_factors=freq_factors,
    )
