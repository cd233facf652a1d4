"""vLLM's own options as far as they change what a model computes. Options of a model count unless a table here says why
they cannot; of the other groups, those that change more than rounding are listed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from headwater.integrations.vllm.declined import DeclinedError
from headwater.integrations.vllm.variables import HARMLESS_VARIABLES

_HARMLESS: dict[str, frozenset[str]] = {
    reason: frozenset(names.split())
    for reason, names in {
        "named elsewhere: weights, dtype, config files, overrides, quantization": (
            "model model_weights dtype revision hf_config hf_text_config hf_config_path hf_overrides quantization "
            "quantization_config multimodal_config max_model_len"
        ),
        "remote code is named by its files or declined, if a config refers to any": "trust_remote_code code_revision",
        "the tokens of a prompt are in its key": (
            "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init renderer_num_workers "
            "io_processor_plugin interleave_mm_strings"
        ),
        "after the model: sampling, logits, pooling": (
            "seed generation_config override_generation_config return_sampling_mask max_logprobs logprobs_mode "
            "use_fp64_gumbel enable_trace_replay logits_processors pooler_config word_embeddings_untied_by_checkpoint"
        ),
        "how vLLM runs: graphs, memory, names, access": (
            "enforce_eager served_model_name hf_token allowed_local_media_path allowed_media_domains "
            "spec_target_max_model_len allow_deprecated_quantization enable_sleep_mode enable_prompt_embeds "
            "sleep_preserve_parameter_names sleep_mode_backend sleep_mode_offload_cudagraph enable_nccl_comm_suspend "
            "enable_cumem_allocator disable_cascade_attn is_submodel_config"
        ),
        "media: how many, where they are cached and how they travel": (
            "limit_per_prompt enable_mm_embeds mm_processor_cache_gb mm_processor_cache_type mm_hasher_algorithm "
            "mm_shm_cache_max_object_size_mb mm_encoder_tp_mode mm_encoder_attn_backend skip_mm_profiling "
            "mm_tensor_ipc mm_ipc_gpu_memory_gb mm_encoder_fp8_scale_save_margin"
        ),
    }.items()
}
_SAME_AS_DEFAULT: dict[str, object] = {"model_impl": "vllm", "runner": "generate", "convert": "none"}
"""Values that say what `auto` does for the models that can be shared."""

_COUNTED: dict[str, tuple[str, ...]] = {
    "attention_config": (
        "use_prefill_query_quantization",
        "disable_flashinfer_q_quantization",
        "indexer_kv_dtype",
        "indexer_sparse_logits",
        "hisparse_config",
        "use_non_causal",
    ),
    "kernel_config": ("moe_backend", "linear_backend", "linear_backend_per_quant"),
}
"""Options of other groups that count. Which kernel multiplies is rounding for plain weights and may be another
precision for quantised ones; all else in these groups is rounding or speed."""

_FURTHER_VARIABLES: tuple[str, ...] = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
_FURTHER_VARIABLES += ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE", "TRITON_F32_DEFAULT")
"""Environment variables of libraries that let vLLM compute in another precision than the model's."""

_DECLINED_VARIABLES = ("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "VLLM_TEST_FORCE_LOAD_FORMAT")
"""Environment variables that let vLLM run something else than the model."""


def counted_flags(config: Any) -> dict[str, Any]:
    """Every option of this server that changes what it computes and differs from vLLM's default, by name.

    Raises DeclinedError for options whose effect has no name.
    """
    _decline_what_has_no_name(config)
    model = config.model_config
    found = {name: value for name, value in _changed(model).items() if value != _SAME_AS_DEFAULT.get(name, MISSING)}
    found |= {f"mm.{name}": value for name, value in _changed(getattr(model, "multimodal_config", None)).items()}
    for group, names in _COUNTED.items():
        if group == "kernel_config" and model.quantization is None:
            continue
        changed = _changed(getattr(config, group, None))
        found |= {f"{group}.{name}": changed[name] for name in names if name in changed}
    if getattr(config, "additional_config", None):
        found["additional_config"] = config.additional_config
    return found | counted_variables()


def counted_variables() -> dict[str, str]:
    """Environment variables of vLLM that are set and may change numbers: all of its own, but those that are known to
    change none."""
    names = [name for name in os.environ if name in _FURTHER_VARIABLES or _is_vllms(name)]
    return {name: os.environ[name] for name in sorted(names) if name not in HARMLESS_VARIABLES}


def _is_vllms(name: str) -> bool:
    from vllm import envs

    return name.startswith("VLLM_") and name in envs.environment_variables


def _decline_what_has_no_name(config: Any) -> None:
    model = config.model_config
    media = getattr(model, "multimodal_config", None)
    for name in _DECLINED_VARIABLES:
        if os.environ.get(name):
            raise DeclinedError(f"{name} is set, so vLLM may run something else than the model")
    if callable(model.hf_overrides):
        raise DeclinedError("hf_overrides is a function, which has no name that other servers could compare")
    if isinstance(model.hf_overrides, Mapping) and "quantization_config_file" in model.hf_overrides:
        raise DeclinedError("hf_overrides names a file (quantization_config_file); put it beside the weights")
    if getattr(model, "model_class_overrides", None):
        raise DeclinedError("model_class_overrides replaces the model's code")
    if getattr(config.cache_config, "kv_sharing_fast_prefill", False):
        raise DeclinedError("kv_sharing_fast_prefill leaves KV of some layers out")
    if getattr(config, "diffusion_config", None) is not None:
        raise DeclinedError("models that write their KV more than once (diffusion) are not supported")
    if media is None:
        return
    if getattr(media, "mm_encoder_attn_dtype", None) is not None:
        raise DeclinedError("mm_encoder_attn_dtype scales with what the encoder saw before, which has no name")
    if getattr(config, "ec_transfer_config", None) is not None:
        raise DeclinedError("encoder outputs come from another server (ec_transfer_config), whose config is not known")


def _changed(group: Any) -> dict[str, Any]:
    """Fields of one group of options that count and are not at their default."""
    if not is_dataclass(group):
        return {}
    harmless = frozenset().union(*_HARMLESS.values())
    counting = [field for field in fields(group) if field.name not in harmless]
    values = {field.name: (getattr(group, field.name, None), _default(field)) for field in counting}
    return {name: value for name, (value, default) in values.items() if value != default}


def _default(field: Field[Any]) -> Any:
    """A field's default, which pydantic may hold."""
    default = field.default if field.default_factory is MISSING else field.default_factory()
    factory = getattr(default, "default_factory", None)
    return getattr(default, "default", default) if factory is None else factory()
