"""Which keys of a model's configuration count: those this engine interprets, those that cannot change a number, and
those that change none at one value. A key outside these tables is refused, because nobody here knows what it does.

A key is harmless when neither this engine, nor the classes of `transformers`, nor those of vLLM compute with it;
`make test-identity` changes each of them in vLLM's own classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from headwater.errors import ModelError

_SIZES = (
    "model_type architectures vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim max_position_embeddings rms_norm_eps hidden_act tie_word_embeddings layer_types "
    "rope_theta rope_scaling rope_parameters original_max_position_embeddings partial_rotary_factor "
    "eos_token_id bos_token_id dtype torch_dtype quantization_config num_experts num_local_experts n_routed_experts"
)
_WINDOWS = "use_sliding_window sliding_window max_window_layers"
# A window counts only where `use_sliding_window` is true, which `ONLY_AT` refuses.
_QWEN_EXPERTS = (
    "num_experts_per_tok moe_intermediate_size norm_topk_prob decoder_sparse_step mlp_only_layers sliding_window "
    "max_window_layers"
)

_LATENT = (
    "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim qk_head_dim v_head_dim num_experts_per_tok "
    "moe_intermediate_size n_shared_experts routed_scaling_factor n_group topk_group norm_topk_prob "
    "first_k_dense_replace topk_method scoring_func auto_map"
)
# `auto_map` names code of the authors, which this engine never runs; where vLLM may, it names that code.
_DRAFTS = "num_nextn_predict_layers num_mtp_layers"

INTERPRETED: dict[str, frozenset[str]] = {
    "llama": frozenset(f"{_SIZES} attention_bias mlp_bias".split()),
    "qwen2": frozenset(f"{_SIZES} {_WINDOWS}".split()),
    "qwen3": frozenset(f"{_SIZES} {_WINDOWS} attention_bias".split()),
    "mixtral": frozenset(f"{_SIZES} num_experts_per_tok router_jitter_noise".split()),
    "qwen2_moe": frozenset(f"{_SIZES} {_QWEN_EXPERTS} shared_expert_intermediate_size".split()),
    "qwen3_moe": frozenset(f"{_SIZES} {_QWEN_EXPERTS}".split()),
    "olmoe": frozenset(f"{_SIZES} num_experts_per_tok".split()) - {"rms_norm_eps", "tie_word_embeddings"},
    "glm4_moe": frozenset(
        f"{_SIZES} attention_bias use_qk_norm num_experts_per_tok moe_intermediate_size n_shared_experts "
        f"routed_scaling_factor n_group topk_group norm_topk_prob first_k_dense_replace {_DRAFTS}".split()
    )
    - {"tie_word_embeddings"},
    "deepseek_v2": frozenset(f"{_SIZES} {_LATENT}".split()) - {"tie_word_embeddings", "rms_norm_eps"},
    "deepseek_v3": frozenset(f"{_SIZES} {_LATENT} {_DRAFTS}".split()) - {"tie_word_embeddings", "rms_norm_eps"},
    "glm4_moe_lite": frozenset(f"{_SIZES} {_LATENT} {_DRAFTS} mlp_layer_types".split()) - {"tie_word_embeddings"},
}
"""Keys that `config_hf` reads, by family."""

_HARMLESS_FOR: dict[str, str] = {
    "where the config came from, and who wrote it": (
        "_name_or_path name_or_path _commit_hash transformers_version transformers_weights is_llama_config "
        "transformers.js_config unsloth_fixed unsloth_version"
    ),
    "training only": (
        "initializer_range attention_dropout hidden_dropout resid_pdrop embd_pdrop embedding_dropout "
        "attention_probs_dropout_prob hidden_dropout_prob gradient_checkpointing router_aux_loss_coef "
        "output_router_logits aux_loss_alpha seq_aux"
    ),
    "what a call returns, and how it caches": (
        "use_cache return_dict output_attentions output_hidden_states torchscript use_bfloat16 tf_legacy_loss "
        "keys_to_ignore_at_inference"
    ),
    "which of several equal attention codes transformers runs": (
        "_attn_implementation attn_implementation _attn_implementation_autoset _attn_implementation_internal "
        "_experts_implementation experts_implementation _flash_attn_2_enabled"
    ),
    "tokens with a meaning: the tokens of a prompt are in its key": (
        "pad_token_id sep_token_id unk_token_id cls_token_id mask_token_id decoder_start_token_id eos_token_id "
        "bos_token_id tokenizer_class prefix"
    ),
    "lengths that bound requests": "max_length min_length max_sequence_length model_max_length",
    "labels of classifiers, which share no KV": (
        "id2label label2id num_labels problem_type finetuning_task task_specific_params"
    ),
    "sampling": (
        "do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p "
        "repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids "
        "num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id "
        "remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens"
    ),
}
HARMLESS: dict[str, str] = {key: why for why, keys in _HARMLESS_FOR.items() for key in keys.split()}
"""Keys that change no number, and why."""

ONLY_AT: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "attention_bias": (False,),
    "bias": (False,),
    "chunk_size_feed_forward": (0,),
    "is_causal": (True,),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "logit_scale": (1, 1.0),
    "mlp_bias": (False,),
    "pretraining_tp": (1,),
    "pruned_heads": ({},),
    "qk_norm": (False,),
    "rope_interleaved": (False,),
    "tie_encoder_decoder": (False,),
    "use_mrope": (False,),
    "use_sliding_window": (False,),
}
"""Keys that change nothing at these values, for families that do not interpret them."""

_NULL_FOR: dict[str, str] = {
    "transformers puts the default of the family in its place": "num_key_value_heads layer_types head_dim",
    "nothing is stretched": "rope_scaling rope_parameters",
    "no window": "sliding_window",
    "the class follows from model_type": "architectures",
    "weights are run as they are stored, and the dtype that runs is part of the identity": "dtype torch_dtype",
    "not quantised": "quantization_config",
}
NULL_IS_ABSENT: dict[str, str] = {key: why for why, keys in _NULL_FOR.items() for key in keys.split()}
"""Keys for which null means the same as leaving them out, to this engine, `transformers` and vLLM; and what it means.
Elsewhere vLLM may ask whether a key is there, or compute with none: `"truncate": null` is false to it, and true if
left out."""
NULL_IS_A_VALUE = {
    "deepseek_v2": frozenset({"q_lora_rank", "n_group", "topk_group"}),
    "deepseek_v3": frozenset({"q_lora_rank"}),
    "glm4_moe_lite": frozenset({"q_lora_rank"}),
}
"""Keys for which null is a value of its own, by family: queries without a latent, experts without groups."""
_NULL_COUNTS = {"qwen3": frozenset({"head_dim"})}
"""Exceptions, by family: without the key, its heads are 128 wide; with null, hidden_size / heads."""

_LATENT_AT: dict[str, tuple[Any, ...]] = {"tie_word_embeddings": (False,), "moe_layer_freq": (1,), "ep_size": (1,)}
ONLY_AT_IN: dict[str, dict[str, tuple[Any, ...]]] = {
    "qwen2_moe": {"qkv_bias": (True,)},
    "olmoe": {
        "clip_qkv": (None,),
        "norm_topk_prob": (False,),
        "rms_norm_eps": (1e-5,),
        "tie_word_embeddings": (False,),
    },
    "glm4_moe": {"tie_word_embeddings": (False,)},
    "deepseek_v2": _LATENT_AT | {"rms_norm_eps": (1e-6,)},
    "deepseek_v3": _LATENT_AT | {"rms_norm_eps": (1e-6,), "rope_interleave": (True,)},
    "glm4_moe_lite": _LATENT_AT | {"rope_interleave": (True,)},
}
"""Keys of one family that `transformers` computes with and vLLM does not, at the values that vLLM takes for granted."""

_EVERY_ROPE = "rope_type type rope_theta partial_rotary_factor"
_STRETCHED = "factor original_max_position_embeddings"
ROPE_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(_EVERY_ROPE.split()),
    "linear": frozenset(f"{_EVERY_ROPE} factor".split()),
    "dynamic": frozenset(f"{_EVERY_ROPE} factor".split()),
    "llama3": frozenset(f"{_EVERY_ROPE} {_STRETCHED} low_freq_factor high_freq_factor".split()),
    "yarn": frozenset(
        f"{_EVERY_ROPE} {_STRETCHED} beta_fast beta_slow mscale mscale_all_dim truncate attention_factor".split()
    ),
}
"""Keys of `rope_parameters` that each rope type reads."""


def check_keys(config: Mapping[str, Any], family: str, source: str) -> None:
    """Raise ModelError, naming the keys, where a configuration says something that this engine does not know."""
    nulls = sorted(_nulls(config, family))
    if nulls:
        raise ModelError(
            f"{source}: null is the value of {', '.join(nulls)}, which engines read differently. Remove what the model "
            "does not need, or run it in vLLM"
        )
    unknown = sorted(_unknown_keys(config, family))
    if unknown:
        raise ModelError(
            f"{source}: this engine does not know {', '.join(unknown)}, which may change what the model computes. "
            "Run it in vLLM, or remove what is certain to change nothing"
        )


def _unknown_keys(config: Mapping[str, Any], family: str) -> Iterator[str]:
    for key, value in config.items():
        if key in INTERPRETED[family] or key in HARMLESS or (value is None and key in NULL_IS_ABSENT):
            continue
        allowed = ONLY_AT.get(key, ()) + ONLY_AT_IN.get(family, {}).get(key, ())
        if not any(type(value) is type(harmless) and value == harmless for harmless in allowed):
            yield str(key)
    for name, rope in _rope_sections(config):
        kind = rope.get("rope_type") or rope.get("type") or "default"
        known = ROPE_KEYS.get(kind) if isinstance(kind, str) else None
        if known is not None:  # `RopeConfig` refuses other kinds by name
            yield from (f"{name}.{key}" for key in rope if key not in known)


def _nulls(config: Mapping[str, Any], family: str) -> Iterator[str]:
    """Keys that this engine interprets, and those of rope, where null is not the same as leaving them out."""
    absent = (NULL_IS_ABSENT.keys() | HARMLESS.keys()) - _NULL_COUNTS.get(family, frozenset())
    absent |= NULL_IS_A_VALUE.get(family, frozenset())
    yield from (key for key in INTERPRETED[family] - absent if key in config and config[key] is None)
    for name, rope in _rope_sections(config):
        yield from (f"{name}.{key}" for key, value in rope.items() if value is None)


def _rope_sections(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := config.get(name), Mapping):
            yield name, rope
