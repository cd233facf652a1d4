"""What the KV of a vLLM server is: the same answers as the reference engine gives for the same checkpoint, so that both
share. Its weights are named in `weights`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headwater.errors import HeadwaterError, ModelError
from headwater.integrations.vllm.declined import DeclinedError
from headwater.integrations.vllm.options import Options
from headwater.integrations.vllm.weights import local_path, server_name
from headwater.kv.checkpoint import checkpoint_label
from headwater.kv.identity import Identity, canonical_rope, canonical_settings
from headwater.kv.spec import KVSpec
from headwater.models.config_hf import config_from_hf
from headwater.models.fields import read_json

_NAMES_OF_FILES = ("_name_or_path", "transformers_version")
"""What a config says of itself: where it lies, and who wrote it."""


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
            quantization=_quantization(model),
            rope=canonical_rope(_rope(model)),
            settings=canonical_settings(_settings(model)),
            epoch=options.epoch,
            label=checkpoint_label(model.model),
        )
    except HeadwaterError as error:
        raise DeclinedError(f"the model cannot be named: {error}") from error


def _quantization(model: Any) -> str:
    """How weights are quantised as they are loaded; what the checkpoint itself says of it is among its bytes."""
    name, given = str(model.quantization or "none"), model.quantization_config
    if given is None:
        return name
    try:
        text = json.dumps(given if isinstance(given, dict) else asdict(given), sort_keys=True, default=str)
    except TypeError as error:
        raise DeclinedError(f"this quantization config cannot be named: {error}") from error
    if " at 0x" in text:
        raise DeclinedError("this quantization config cannot be named: it has parts that only this process knows")
    return f"{name}+{hashlib.sha256(text.encode()).hexdigest()[:32]}"


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


def writer_group(config: Any) -> int:
    """The number that all processes of this server agree on, and no other server has."""
    return int.from_bytes(hashlib.sha256(b"group\0" + server_name(config)).digest()[:8], "little") >> 1 or 1


def _rope(model: Any) -> Mapping[str, Any]:
    """Rope as the reference engine would name it; of models that it does not run, `_settings` names all of the config.

    Overrides of the config on the command line may change activations in any way, so they count as they are.
    """
    try:
        rope: dict[str, Any] = json.loads(json.dumps(asdict(config_from_hf(model.hf_text_config.to_dict()).rope)))
    except ModelError:
        rope = {"architectures": list(model.hf_config.architectures or ())}
    if model.hf_overrides:
        rope["overrides"] = hashlib.sha256(repr(model.hf_overrides).encode()).hexdigest()
    return rope


def _settings(model: Any) -> Mapping[str, Any]:
    """The other settings as the reference engine would name them; of models that it does not run, the whole file of
    their config, of which nobody here knows what changes activations.

    The file: vLLM changes the config of some models while it builds them, in its workers and not in its scheduler.
    A model that is one file has its config among the bytes of its weights.
    """
    try:
        return config_from_hf(model.hf_text_config.to_dict()).settings
    except ModelError:
        given = getattr(model, "hf_config_path", None)
        path = Path(given) if given else local_path(model)
        if path.is_file() and not given:
            return {}
        known = {name: value for name, value in read_json(path / "config.json").items() if name not in _NAMES_OF_FILES}
        return {"config": hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()}
