"""A search for "same name, other numbers": the families, which fields of their configurations exist, and every change
that is tried. It runs nothing; `with_vllm/vllm_search.py` does.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headwater.models.config_keys import HARMLESS, ONLY_AT

TINY: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "head_dim": 64,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 48,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
GROUP_LIMITED: dict[str, Any] = {"n_group": 2, "topk_group": 1, "topk_method": "group_limited_greedy"}
THETA = {"rope_theta": 10000.0}
ROPES: dict[str, dict[str, Any]] = {
    "linear": THETA | {"rope_type": "linear", "factor": 2.0},
    "dynamic": THETA | {"rope_type": "dynamic", "factor": 2.0},
    "llama3": THETA
    | {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": THETA | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "longrope": THETA
    | {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "short_factor": [1.0] * 16,
        "long_factor": [1.0 + i / 4 for i in range(16)],
    },
}
DEEPSEEK_ROPE = ROPES["yarn"] | {"mscale": 0.7, "mscale_all_dim": 0.9, "beta_fast": 32.0, "beta_slow": 1.0}


EVERY_MODEL = ("config.py", "utils.py", "../../transformers_utils/config.py")
EVERY_MODEL += ("../../transformers_utils/model_arch_config_convertor.py",)
"""Files of vLLM that read the config of any model; one family is enough to try their fields."""


@dataclass(frozen=True)
class SearchFamily:
    """One model: a class of transformers that makes its checkpoint, and the files of vLLM that read its config."""

    name: str
    model_type: str
    sources: tuple[str, ...]
    changes: dict[str, Any] = field(default_factory=dict)
    has_reference: bool = False
    rope_only: bool = False
    """Try only changes of rope: the rest is that of another family."""

    @property
    def config(self) -> dict[str, Any]:
        return copy.deepcopy({**TINY, **self.changes})


def _dense() -> Iterator[SearchFamily]:
    for name in ("llama", "qwen2", "qwen3"):
        sizes = {"hidden_size": 128} if name == "qwen2" else {}  # its heads are hidden_size / heads wide
        sources = (f"{name}.py", *(EVERY_MODEL if name == "llama" else ()))
        yield SearchFamily(name, name, sources, sizes, has_reference=True)
    yield SearchFamily("llama, biases", "llama", ("llama.py",), {"attention_bias": True, "mlp_bias": True}, True)
    for kind, rope in ROPES.items():
        yield SearchFamily(f"llama, {kind}", "llama", (), {"rope_parameters": rope}, has_reference=True, rope_only=True)


FAMILIES: dict[str, SearchFamily] = {
    family.name: family
    for family in (
        *_dense(),
        SearchFamily("mistral", "mistral", ("mistral.py", "llama.py"), {"sliding_window": 24}),
        SearchFamily("mixtral", "mixtral", ("mixtral.py",), {"num_local_experts": 8, "sliding_window": None}, True),
        SearchFamily(
            "qwen2_moe",
            "qwen2_moe",
            ("qwen2_moe.py",),
            EXPERTS | {"shared_expert_intermediate_size": 64, "hidden_size": 128},
            has_reference=True,
        ),
        SearchFamily("qwen3_moe", "qwen3_moe", ("qwen3_moe.py",), EXPERTS, has_reference=True),
        SearchFamily(
            "olmoe",
            "olmoe",
            ("olmoe.py",),
            {"num_experts": 8, "num_experts_per_tok": 2, "hidden_size": 128},
            has_reference=True,
        ),
        SearchFamily(
            "glm4_moe",
            "glm4_moe",
            ("glm4_moe.py",),
            EXPERTS | {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "use_qk_norm": True},
            has_reference=True,
        ),
        SearchFamily(
            "deepseek_v2",
            "deepseek_v2",
            ("deepseek_v2.py",),
            LATENT | GROUP_LIMITED | {"rope_parameters": DEEPSEEK_ROPE},
            has_reference=True,
        ),
        SearchFamily(
            "deepseek_v2, greedy",
            "deepseek_v2",
            ("deepseek_v2.py",),
            LATENT | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_parameters": DEEPSEEK_ROPE},
            has_reference=True,
        ),
        SearchFamily(
            "deepseek_v3",
            "deepseek_v3",
            ("deepseek_v2.py",),
            LATENT
            | {"n_group": 2, "topk_group": 1, "rope_parameters": DEEPSEEK_ROPE}
            | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
            has_reference=True,
        ),
        SearchFamily(
            "glm4_moe_lite",
            "glm4_moe_lite",
            ("glm4_moe_lite.py", "glm4_moe.py", "deepseek_v2.py"),
            LATENT | {"n_group": 2, "topk_group": 1, "rope_parameters": DEEPSEEK_ROPE, "rms_norm_eps": 1e-6},
            has_reference=True,
        ),
        SearchFamily("gemma2", "gemma2", ("gemma2.py",), {"sliding_window": 24, "query_pre_attn_scalar": 32}),
        SearchFamily("gemma3", "gemma3_text", ("gemma3.py",), {"sliding_window": 24, "query_pre_attn_scalar": 32}),
    )
}

SPECIAL: dict[str, list[Any]] = {
    "architectures": [["LlamaForCausalLM"], ["MistralForCausalLM"], ["Qwen3ForCausalLM"]],
    "dual_chunk_attention_config": [{"chunk_size": 32, "local_size": 8}],
    "hidden_act": ["gelu", "swish", "relu2", "gelu_pytorch_tanh"],
    "hidden_activation": ["gelu", "silu"],
    "layer_types": [["sliding_attention"] * 2, ["sliding_attention", "full_attention"], ["full_attention"] * 2],
    "mlp_only_layers": [[0], [1], [0, 1]],
    "model_type": ["llama", "qwen2", "qwen3", "mistral", "mixtral"],
    "moe_layer_freq": [2, [0, 1]],
    "mrope_section": [[4, 6, 6], [16, 0, 0]],
    "per_layer_config": [{"0": {"rms_norm_eps": 1.0}}],
    "quantization_config": [{"quant_method": "fp8", "activation_scheme": "dynamic"}],
    "rope_scaling": list(ROPES.values()),
    "rope_type": ["default", *ROPES, "ntk", "deepseek_yarn", "mrope", "proportional", "openpangu", "bailing_mrope"],
    "type": ["default", *ROPES, "ntk", "su"],
    "scoring_func": ["softmax", "sigmoid"],
    "topk_method": ["greedy", "noaux_tc", "group_limited_greedy"],
    "llama_4_scaling": [{"beta": 0.5, "original_max_position_embeddings": 16}],
}
"""Values that a field could have which are not found by changing the one it has."""

ABSENT: list[Any] = [True, 2, 0.5, None]
"""What a field gets that the configuration does not have. Null is not the same as none: some code asks for the key."""

REMOVED = "<removed>"
"""As the value of a change: the field is taken out."""


def changes_of(value: Any) -> list[Any]:
    """Other values of the same kind, and null."""
    if value is None:
        return ABSENT
    if isinstance(value, bool):
        return [not value, None]
    if isinstance(value, int):
        return [value * 2, value + 1, max(1, value // 2), 0, None]
    if isinstance(value, float):
        return [value * 2, value + 0.5, 0.0, None]
    if isinstance(value, list):
        return [value[::-1], value[:-1], [*value, *value[-1:]], None]
    if isinstance(value, dict):
        return [{}, None]
    return [None]


def read_names(path: Path) -> set[str]:
    """Names of fields that a file of vLLM reads from any config: `config.x`, getattr and the like, and strings that
    index or are looked up in `rope_parameters`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and "config" in ast.unparse(node.value).rsplit(".", 1)[-1]:
            found |= {node.attr} if node.attr.islower() and not callable(getattr(dict, node.attr, None)) else set()
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func).rsplit(".", 1)[-1]
            if called in ("getattr", "hasattr", "getattr_iter", "get"):
                found |= {n.value for a in node.args[:2] for n in ast.walk(a) if _is_name(n)}
        elif isinstance(node, ast.Subscript) and _is_name(node.slice):
            found.add(node.slice.value)
        elif isinstance(node, ast.Compare):
            found |= {n.value for n in ast.walk(node) if _is_name(n)}
    return found


def _is_name(node: ast.AST) -> bool:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        return False
    return node.value.isidentifier() and node.value.islower()


@dataclass(frozen=True)
class Change:
    """One field with one other value; `rope.x` is a field of `rope_parameters`."""

    name: str
    value: Any

    def apply(self, config: dict[str, Any]) -> dict[str, Any]:
        changed = copy.deepcopy(config)
        if self.name.startswith("rope."):
            place = changed.setdefault("rope_parameters", {})
            if place is None:
                place = changed["rope_parameters"] = {}
            _put(place, self.name.removeprefix("rope."), self.value)
        else:
            _put(changed, self.name, self.value)
        return changed


def _put(place: dict[str, Any], name: str, value: Any) -> None:
    if value == REMOVED:
        place.pop(name, None)
    else:
        place[name] = value


def all_changes(family: SearchFamily, config: dict[str, Any], vllm_folder: Path) -> list[Change]:
    """Every change of every field: those in the config, those called harmless, and those that vLLM's code asks for."""
    rope = config.get("rope_parameters") or {}
    rope_names = set(rope) | {name for known in ROPES.values() for name in known}
    for path in (vllm_folder / "model_executor" / "layers" / "rotary_embedding").glob("*.py"):
        rope_names |= read_names(path)
    names = set()
    if not family.rope_only:
        names = set(config) | set(HARMLESS) | set(ONLY_AT)
        for source in family.sources:
            names |= read_names(vllm_folder / "model_executor" / "models" / source)
    found = []
    for place, present in ((names - {"rope_parameters"}, config), ({f"rope.{name}" for name in rope_names}, rope)):
        for name in sorted(place):
            short = name.removeprefix("rope.")
            values = [*SPECIAL.get(short, []), *changes_of(present.get(short)), *[REMOVED] * (short in present)]
            if short.endswith(("_size", "_heads", "_layers")):
                values = [value for value in values if value != 0]  # vLLM's kernels divide by them
            found += [Change(name, value) for value in values if value != present.get(short) or short not in present]
    return found
