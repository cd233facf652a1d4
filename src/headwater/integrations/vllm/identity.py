"""What the KV of a vLLM server is: the same answers as the reference engine gives for the same checkpoint, so that both
share. Its weights are named in `weights`.
"""

from __future__ import annotations

import hashlib
from typing import Any

from headwater.errors import HeadwaterError
from headwater.integrations.vllm.declined import DeclinedError
from headwater.integrations.vllm.options import Options
from headwater.integrations.vllm.settings import name_quantization, name_rope, name_settings
from headwater.integrations.vllm.weights import server_name
from headwater.kv.checkpoint import checkpoint_label
from headwater.kv.identity import Identity, canonical_rope, canonical_settings
from headwater.kv.spec import KVSpec


def server_identity(config: Any, options: Options, weights: str) -> Identity:
    """The identity of what this server computes. Raises DeclinedError where it is not certain."""
    model = config.model_config
    dtype = str(model.dtype).removeprefix("torch.")
    if config.cache_config.cache_dtype not in ("auto", dtype):
        raise DeclinedError(f"quantised KV ({config.cache_config.cache_dtype}) is not supported")
    try:
        return Identity(
            weights=weights,
            run_dtype=dtype,
            kv_dtype=dtype,
            quantization=name_quantization(model),
            rope=canonical_rope(name_rope(config)),
            settings=canonical_settings(name_settings(config)),
            epoch=options.epoch,
            label=checkpoint_label(model.model),
        )
    except HeadwaterError as error:
        raise DeclinedError(f"the model cannot be named: {error}") from error


def server_spec(config: Any, cache: Any) -> KVSpec:
    """What one token's KV is. Raises DeclinedError for models whose KV is not one kind of full attention."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    groups = cache.kv_cache_groups
    if len(groups) != 1:
        kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
        raise DeclinedError(
            f"this model has {len(groups)} groups of KV ({', '.join(kinds)}); one of full attention is needed"
        )
    spec = groups[0].kv_cache_spec
    if type(spec) not in (FullAttentionSpec, MLAAttentionSpec):
        raise DeclinedError(f"KV of kind {type(spec).__name__} is not supported")
    windowed = spec.sliding_window is not None or spec.attention_chunk_size is not None
    if windowed or spec.non_causal or spec.tokens_per_state != 1 or spec.kv_quant_mode != 0:
        raise DeclinedError("only causal attention over all tokens, with plain KV, can be shared")
    parallel = config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise DeclinedError("context parallelism is not supported yet")
    if config.speculative_config is not None and not config.speculative_config.method.startswith("ngram"):
        raise DeclinedError("speculative decoding with a draft model is not supported: its KV would be missing")
    model, dtype = config.model_config, str(spec.dtype).removeprefix("torch.")
    num_layers = model.get_total_num_hidden_layers()
    try:
        if type(spec) is MLAAttentionSpec:
            hf = model.hf_text_config
            _check_rotation(config)
            return KVSpec.mla(
                num_layers=num_layers, latent_dim=hf.kv_lora_rank, rope_dim=hf.qk_rope_head_dim, dtype=dtype
            )
        return KVSpec.gqa(
            num_layers=num_layers,
            num_kv_heads=model.get_total_num_kv_heads(),
            head_dim=spec.head_size,
            v_head_dim=spec.head_size_v,
            dtype=dtype,
        )
    except (HeadwaterError, AttributeError) as error:
        raise DeclinedError(f"the shape of this model's KV is not understood: {error}") from error


def _check_rotation(config: Any) -> None:
    """Raise DeclinedError where vLLM rotates the keys of latent attention wrongly, at every position but the first: its
    operation for CPUs overlooks strides. YaRN goes another way."""
    from vllm.platforms import current_platform

    rope = getattr(config.model_config.hf_text_config, "rope_parameters", None) or {}
    names = config.compilation_config.custom_ops
    runs = ("none" not in names or "+rotary_embedding" in names) and "-rotary_embedding" not in names
    if current_platform.is_cpu() and rope.get("rope_type", "default") == "default" and runs:
        raise DeclinedError(
            "vLLM's rotary operation for CPUs gives wrong keys in models with latent attention; start it with "
            '--compilation-config \'{"custom_ops": ["-rotary_embedding"]}\''
        )


def writer_group(config: Any) -> int:
    """The number that all processes of this server agree on, and no other server has."""
    return int.from_bytes(hashlib.sha256(b"group\0" + server_name(config)).digest()[:8], "little") >> 1 or 1
