"""Configs from outside: both spellings of transformers, GGUF metadata, and everything that must be refused by name."""

import json
import math
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headwater.engine.identity import engine_identity
from headwater.errors import MemoryBudgetError, ModelError
from headwater.kv.identity import canonical_settings
from headwater.models.checkpoint.dummy import DummyCheckpoint
from headwater.models.config import DenseConfig, GQAConfig, ModelConfig
from headwater.models.config_gguf import config_from_gguf
from headwater.models.config_hf import config_from_hf
from headwater.models.config_keys import NULL_IS_ABSENT, ROPE_KEYS
from headwater.models.fields import MAX_JSON_BYTES, read_json
from headwater.models.rope import RopeConfig

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
QWEN = LLAMA | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": LLAMA3,
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn, all set": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.2,
        "truncate": False,
    },
    "yarn, attention factor": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.5},
}


def test_a_plain_config() -> None:
    config = config_from_hf(LLAMA | {"eos_token_id": [5, 2], "bos_token_id": 1}, {"eos_token_id": [7, 2]})
    assert config == ModelConfig(
        family="llama",
        vocab_size=1000,
        hidden_size=64,
        num_layers=2,
        attention=GQAConfig(num_heads=8, num_kv_heads=2, head_dim=8),
        mlp=DenseConfig(intermediate_size=128),
        norm_eps=1e-5,
        rope=RopeConfig(dim=8, theta=500000.0),
        max_position_embeddings=4096,
        eos_token_ids=(2, 5, 7),
        bos_token_id=1,
        stored_dtype="bfloat16",
    )
    spec = config.kv_spec("bfloat16")
    assert (spec.num_layers, spec.num_kv_heads, spec.token_bytes) == (2, 2, 2 * 2 * 8 * 2 * 2)


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_rope_tables_are_those_of_transformers(rope: dict[str, Any]) -> None:
    theirs = transformers.LlamaConfig(
        **{k: v for k, v in LLAMA.items() if k not in ("rope_theta", "architectures", "model_type")},
        rope_parameters=rope | {"rope_theta": 500000.0},
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, device="cpu")
    old = config_from_hf(LLAMA | {"rope_scaling": rope})
    new = config_from_hf({k: v for k, v in LLAMA.items() if k != "rope_theta"} | {"rope_parameters": rope | {"rope_theta": 500000.0}})  # fmt: skip  # noqa: E501
    assert old == new
    torch.testing.assert_close(old.rope.inverse_frequencies(), frequencies, rtol=1e-6, atol=0)
    assert math.isclose(old.rope.attention_factor, factor)
    angles = torch.arange(50)[:, None].float() * frequencies
    expected = torch.cat([angles.cos(), angles.sin()], dim=1) * factor
    torch.testing.assert_close(old.rope.table(50), expected, rtol=0, atol=1e-5)


def test_a_rope_table_that_fits_nowhere_is_a_memory_error_with_its_size() -> None:
    with pytest.raises(MemoryBudgetError, match=r"no memory on cpu for a tensor of 4,194,304\.0 GiB"):
        RopeConfig(dim=1 << 20, theta=1e4).table(1 << 30)


def test_the_old_name_of_the_rope_type() -> None:
    assert config_from_hf(LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}}).rope.kind == "linear"


STORED: list[tuple[dict[str, Any], str, str]] = [
    (
        LLAMA | {"attention_bias": True, "mlp_bias": True, "eos_token_id": [5, 2]},
        '{"family":"llama","head_dim":8.0,"hidden_size":64.0,"intermediate_size":128.0,"mlp_bias":true,'
        '"norm_eps":1e-05,"num_heads":8.0,"num_kv_heads":2.0,"num_layers":2.0,"output_bias":true,"qk_norm":false,'
        '"qkv_bias":true,"tie_embeddings":false,"vocab_size":1000.0}',
        "5797957b449398dbbc92cfb9d8e3d8517edb4be2489b52f71bf7914fd4cc1532",
    ),
    (
        QWEN | {"tie_word_embeddings": True},
        '{"family":"qwen2","head_dim":8.0,"hidden_size":64.0,"intermediate_size":128.0,"mlp_bias":false,'
        '"norm_eps":1e-05,"num_heads":8.0,"num_kv_heads":2.0,"num_layers":2.0,"output_bias":false,"qk_norm":false,'
        '"qkv_bias":true,"tie_embeddings":true,"vocab_size":1000.0}',
        "6a173d67cd06d573d19f321be7101d97212c3c0fee1c2b4520730b40ab9d9ffb",
    ),
    (
        QWEN
        | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "rope_scaling": ROPES["yarn"]},
        '{"family":"qwen3","head_dim":16.0,"hidden_size":64.0,"intermediate_size":128.0,"mlp_bias":false,'
        '"norm_eps":1e-05,"num_heads":8.0,"num_kv_heads":2.0,"num_layers":2.0,"output_bias":false,"qk_norm":true,'
        '"qkv_bias":false,"tie_embeddings":false,"vocab_size":1000.0}',
        "2ff19246909497b53f8fa72648a7812aeb8d6a82b0a33ed393727d1dfce686c1",
    ),
]


@pytest.mark.parametrize(("values", "settings", "random_weights"), STORED, ids=["llama", "qwen2", "qwen3"])
def test_kv_that_was_stored_keeps_its_name(values: dict[str, Any], settings: str, random_weights: str) -> None:
    config = config_from_hf(values)
    assert canonical_settings(config.settings) == settings
    made = DummyCheckpoint(config, Path("x"), "x")
    assert engine_identity(made, "float32", "dummy").digest.hex() == random_weights


def test_families_differ_where_they_should() -> None:
    qwen2 = config_from_hf(QWEN | {"use_sliding_window": False, "sliding_window": 4096})
    assert (
        qwen2.attention.qkv_bias,
        qwen2.attention.output_bias,
        qwen2.attention.qk_norm,
        qwen2.attention.head_dim,
    ) == (True, False, False, 8)
    qwen3 = config_from_hf(
        QWEN | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "attention_bias": True}
    )
    assert (
        qwen3.attention.qkv_bias,
        qwen3.attention.output_bias,
        qwen3.attention.qk_norm,
        qwen3.attention.head_dim,
    ) == (True, True, True, 128)
    llama = config_from_hf(LLAMA | {"attention_bias": True, "mlp_bias": True, "head_dim": 24})
    assert (llama.attention.qkv_bias, llama.attention.output_bias, llama.mlp.mlp_bias, llama.attention.head_dim) == (
        True,
        True,
        True,
        24,
    )


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"model_type": "mamba"}, "'mamba' is not supported; known are llama, qwen2, qwen3"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected silu"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding windows"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope type 'longrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1.0}}, "factor is -1.0"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "below high_freq_factor"),
        ({"rope_scaling": [1]}, "rope_scaling is .1.; expected an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_size": 10**9}, "hidden_size is 1000000000; expected an integer from 1 to"),
        ({"hidden_size": 64.0}, "hidden_size is 64.0"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"hidden_size": 63}, "no multiple of 8 heads"),
        ({"num_key_value_heads": 3}, "8 attention heads cannot share 3"),
        ({"head_dim": 7}, "even number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000"),
        ({"rope_theta": 10**400}, "rope_theta is 1000"),
        ({"architectures": 5}, "architectures is 5; expected LlamaForCausalLM"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
        ({"eos_token_id": "2"}, "eos_token_id is '2'"),
        ({"eos_token_id": 5000}, "outside the vocabulary of 1000"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; expected true or false"),
        ({"vocab_size": None}, "null is the value of vocab_size"),
    ],
)
def test_what_cannot_be_run_is_refused(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ModelError, match=what):
        config_from_hf(LLAMA | changes)


UNKNOWN: list[tuple[dict[str, Any], str]] = [
    ({"bias": True}, "does not know bias"),
    ({"qkv_bias": True}, "does not know qkv_bias"),
    ({"qkv_bias": False}, "does not know qkv_bias"),
    ({"dual_chunk_attention_config": {"chunk_size": 16}}, "does not know dual_chunk_attention_config"),
    ({"logit_scale": 0.5}, "does not know logit_scale"),
    ({"is_causal": False}, "does not know is_causal"),
    ({"sliding_window": 16}, "does not know sliding_window"),
    ({"pretraining_tp": 2}, "does not know pretraining_tp"),
    ({"per_layer_config": {"0": {"rms_norm_eps": 1.0}}}, "does not know per_layer_config"),
    ({"auto_map": {"AutoModel": "x.Y"}}, "does not know auto_map"),
    ({"a_new_key": 0, "another": False}, "does not know a_new_key, another"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "max_trained_positions": 8}}, "rope_scaling.max_trained"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "alpha": 8.0}}, "rope_scaling.alpha"),
    ({"rope_parameters": {"rope_type": "default", "rope_dim": 4}}, "rope_parameters.rope_dim"),
    ({"rope_parameters": {"rope_theta": 500000.0, "use_fope": True}}, "rope_parameters.use_fope"),
    ({"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}, "rope_parameters.mrope_section"),
    ({"rope_scaling": LLAMA3 | {"mscale": 2.0}}, "rope_scaling.mscale"),
]


@pytest.mark.parametrize(("changes", "what"), UNKNOWN, ids=[what for _, what in UNKNOWN])
def test_a_key_that_is_not_known_is_refused_by_name(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ModelError, match=re.escape(what)):
        config_from_hf(LLAMA | changes)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
NULLS: list[tuple[dict[str, Any], str]] = [
    *(({"rope_scaling": YARN | {key: None}}, f"rope_scaling.{key}") for key in sorted(ROPE_KEYS["yarn"])),
    *(({"rope_parameters": {key: None}}, f"rope_parameters.{key}") for key in sorted(ROPE_KEYS["default"])),
    ({"rope_parameters": {"rope_theta": 500000.0, "mrope_section": None}}, "rope_parameters.mrope_section"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "alpha": None}}, "rope_scaling.alpha"),
    *(({key: None}, key) for key in ("rope_theta", "rms_norm_eps", "attention_bias", "mlp_bias", "num_experts")),
    *(({key: None}, key) for key in ("original_max_position_embeddings", "partial_rotary_factor", "hidden_act")),
    *(({key: None}, key) for key in ("tie_word_embeddings", "max_position_embeddings", "model_type")),
    *(({key: None}, f"does not know {key}") for key in ("is_causal", "logit_scale", "qkv_bias", "a_new_key")),
]


@pytest.mark.parametrize(("changes", "what"), NULLS, ids=[what for _, what in NULLS])
def test_null_is_not_the_same_as_absent(changes: dict[str, Any], what: str) -> None:
    """vLLM asks for some keys whether they are there."""
    with pytest.raises(ModelError, match=re.escape(what)):
        config_from_hf(LLAMA | changes)


@pytest.mark.parametrize("key", [*NULL_IS_ABSENT, "eos_token_id", "pad_token_id", "use_cache"])
def test_null_is_absent_where_every_engine_takes_it_so(key: str) -> None:
    base = {name: value for name, value in LLAMA.items() if name != key}
    assert config_from_hf(base | {key: None}) == config_from_hf(base)


def test_null_is_no_width_of_heads_where_the_family_has_one() -> None:
    with pytest.raises(ModelError, match="null is the value of head_dim"):
        config_from_hf(LLAMA | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": None})


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"rope_type": "yarn", "type": "linear", "factor": 2.0}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 10000.0}},
        {"rope_scaling": LLAMA3, "original_max_position_embeddings": 2048},
    ],
)
def test_a_config_that_contradicts_itself_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"expected (none beside|500000|10000|yarn|1024)"):
        config_from_hf(LLAMA | changes)


PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama 2": {
        "_name_or_path": "meta-llama/Llama-2-7b-hf",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "pretraining_tp": 1,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "transformers_version": "4.31.0.dev0",
        "use_cache": True,
    },
    "Llama 3.2": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": 64,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "rope_scaling": LLAMA3 | {"factor": 32.0},
        "tie_word_embeddings": True,
        "eos_token_id": [128, 129],
    },
    "SmolLM2": {
        "is_llama_config": True,
        "rope_interleaved": False,
        "rope_scaling": None,
        "pad_token_id": 2,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    },
    "Qwen2.5": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "max_window_layers": 28,
        "sliding_window": 131072,
        "use_mrope": False,
        "use_sliding_window": False,
        "attention_dropout": 0.0,
    },
    "Qwen2.5, stretched": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
        "use_sliding_window": False,
    },
    "Qwen3": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 128,
        "max_window_layers": 36,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
        "_attn_implementation_autoset": True,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_configs_as_they_are_published_are_accepted(name: str) -> None:
    config_from_hf(LLAMA | PUBLISHED[name])


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_all_that_transformers_writes_by_itself_is_accepted(family: str) -> None:
    config_from_hf(getattr(transformers, f"{family}Config")().to_dict())


def test_a_sliding_window_in_use_is_refused() -> None:
    with pytest.raises(ModelError, match="sliding windows"):
        config_from_hf(QWEN | {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 1})
    config_from_hf(QWEN | {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 2})
    config_from_hf(QWEN | {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 1})
    with pytest.raises(ModelError, match="sliding windows"):
        config_from_hf(QWEN | {"use_sliding_window": True, "max_window_layers": 1})


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff", b'{"a":' * 100_000])
def test_json_that_is_none(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_json(tmp_path / "config.json")


def test_json_that_is_too_large(tmp_path: Path) -> None:
    with open(tmp_path / "config.json", "wb") as file:
        file.truncate(MAX_JSON_BYTES + 1)
    with pytest.raises(ModelError, match="too large"):
        read_json(tmp_path / "config.json")


GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 128,
    "llama.block_count": 2,
    "llama.context_length": 4096,
    "llama.attention.head_count": 8,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 500000.0,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.eot_token_id": 9,
}


def from_gguf(names: tuple[str, ...] = (), factors: tuple[float, ...] | None = None, **changes: Any) -> ModelConfig:
    metadata = GGUF | {key.replace("__", "."): value for key, value in changes.items()}
    return config_from_gguf(
        metadata,
        vocab_size=1000,
        tensor_names=frozenset(names),
        freq_factors=factors,
        stored_dtype="Q8_0",
        source="m.gguf",
    )


def test_gguf_metadata() -> None:
    same = {"eos_token_id": [2, 9], "tie_word_embeddings": True, "torch_dtype": "Q8_0"}
    assert from_gguf() == config_from_hf(LLAMA | same)
    assert not from_gguf(("output.weight",)).tie_embeddings
    assert from_gguf(("blk.0.attn_q.bias",)).attention.qkv_bias
    assert from_gguf(llama__attention__head_count_kv=[2, 2]).attention.num_kv_heads == 2


def test_gguf_rope() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    found = from_gguf(
        llama__rope__scaling__type="yarn",
        llama__rope__scaling__factor=4.0,
        llama__rope__scaling__original_context_length=1024,
    )
    assert found.rope == config_from_hf(LLAMA | {"rope_scaling": yarn}).rope
    llama3 = config_from_hf(LLAMA | {"rope_scaling": LLAMA3}).rope
    plain = RopeConfig(dim=8, theta=500000.0)
    factors = tuple((plain.inverse_frequencies() / llama3.inverse_frequencies()).tolist())
    torch.testing.assert_close(from_gguf(factors=factors).rope.table(9), llama3.table(9), rtol=0, atol=1e-6)
    with pytest.raises(ModelError, match="3 rope factors"):
        from_gguf(factors=(1.0, 2.0, 3.0))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"general__architecture": "gemma"}, "'gemma' is not supported"),
        ({"llama__expert_count": 8}, "expert_count is 8.* a router"),
        ({"llama__attention__sliding_window": 512}, "sliding"),
        ({"split__count": 3}, "join the parts"),
        ({"llama__rope__dimension_count": 4}, "partial rotation"),
        ({"llama__attention__head_count_kv": [2, 4]}, "the same for all layers"),
        ({"llama__attention__value_length": 16}, "width of the keys"),
        ({"llama__rope__scaling__type": "longrope"}, "rope type 'longrope'"),
        ({"llama__block_count": 0}, "block_count is 0"),
        ({"llama__logit_scale": 0.5}, "does not know llama.logit_scale"),
        ({"llama__attention__causal": False}, "does not know llama.attention.causal"),
        ({"llama__rope__dimension_sections": [1, 1]}, "does not know llama.rope.dimension_sections"),
        (
            {"llama__rope__scaling__type": "yarn", "llama__rope__scaling__yarn_log_multiplier": 0.2},
            "does not know llama.rope.scaling.yarn_log_multiplier",
        ),
        ({"llama__rope__scaling__attn_factor": 2.0}, "does not know llama.rope.scaling.attn_factor"),
    ],
)
def test_gguf_that_cannot_be_run(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ModelError, match=what):
        from_gguf(**changes)


@pytest.mark.parametrize("name", ["deepseek", "mixtral", "qwen3_moe", "glm4_moe"])
def test_gguf_with_experts_of_which_no_rule_is_known_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match=f"{name}.*experts are read from safetensors only"):
        from_gguf(general__architecture=name)


def test_a_config_that_transformers_saved(tmp_path: Path) -> None:
    transformers.Qwen3Config(num_hidden_layers=2, vocab_size=500, head_dim=32).save_pretrained(tmp_path)
    config = config_from_hf(json.loads((tmp_path / "config.json").read_text()))
    assert (config.family, config.attention.head_dim, config.num_layers) == ("qwen3", 32, 2)


@pytest.mark.parametrize("freq_factors", [None, (1.0, 0.1, 1 / 3, 2.0)])
def test_a_config_is_the_same_after_a_journey_as_json(freq_factors: tuple[float, ...] | None) -> None:
    """Ranks get it so from the first one."""
    made = config_from_hf(LLAMA | {"rope_scaling": LLAMA3, "eos_token_id": [2, 3]})
    config = replace(made, rope=replace(made.rope, freq_factors=freq_factors))
    assert ModelConfig.from_fields(json.loads(json.dumps(asdict(config)))) == config
