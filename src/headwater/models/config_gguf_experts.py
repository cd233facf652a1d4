"""The experts that the metadata of a GGUF file describes, for the architectures whose experts this engine reads.

How scores become weights is not always in the file: llama.cpp has it in the code of each architecture.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from headwater.kernels.routing import RoutingRule
from headwater.models.config import MAX_WIDTH, SparseConfig
from headwater.models.config_experts import MAX_EXPERTS
from headwater.models.fields import Fields

SOFTMAX, SIGMOID = 1, 2
"""As `expert_gating_func` numbers them."""
_SHARED_KEYS = frozenset(
    {
        "expert_shared_count",
        "expert_group_count",
        "expert_group_used_count",
        "expert_weights_scale",
        "expert_weights_norm",
        "expert_gating_func",
        "leading_dense_block_count",
        "nextn_predict_layers",
    }
)


def _softmax(*, renormalise: bool) -> Callable[[Fields], RoutingRule]:
    """Whether the weights of the chosen experts are made to sum to 1 is the architecture's."""

    def rule(fields: Fields) -> RoutingRule:
        return RoutingRule(top_k=fields.integer("expert_used_count", 1, MAX_EXPERTS), renormalise=renormalise)

    return rule


def _groups(fields: Fields) -> tuple[int, int]:
    """How many groups there are, and how many are kept."""
    count, kept = ("expert_group_count", "expert_group_used_count")
    return fields.integer(count, 1, MAX_EXPERTS, default=1), fields.integer(kept, 1, MAX_EXPERTS, default=1)


def _greedy(fields: Fields) -> RoutingRule:
    """DeepSeek-V2."""
    if fields.flag("expert_weights_norm", False):
        raise fields.wrong("expert_weights_norm", "false: transformers and vLLM run such models differently")
    groups, kept = _groups(fields)
    return RoutingRule(
        top_k=fields.integer("expert_used_count", 1, MAX_EXPERTS),
        num_groups=groups,
        groups_kept=kept,
        scaling=fields.number("expert_weights_scale", 1e-3, 1e3, default=1.0),
    )


def _sigmoid(fields: Fields) -> RoutingRule:
    """DeepSeek-V3 and GLM: what the file leaves out is as llama.cpp has it."""
    if fields.integer("expert_gating_func", 0, 16, default=SIGMOID) != SIGMOID:
        raise fields.wrong("expert_gating_func", f"{SIGMOID}, sigmoid")
    groups, kept = _groups(fields)
    return RoutingRule(
        top_k=fields.integer("expert_used_count", 1, MAX_EXPERTS),
        scores="sigmoid",
        num_groups=groups,
        groups_kept=kept,
        group_score="top2",
        renormalise=fields.flag("expert_weights_norm", False),
        scaling=fields.number("expert_weights_scale", 1e-3, 1e3, default=1.0),
    )


def _shared_size(fields: Fields) -> int:
    size = fields.integer("expert_feed_forward_length", 1, MAX_WIDTH * 4)
    return fields.integer("expert_shared_count", 1, 64) * size


class GGUFExperts(NamedTuple):
    """An architecture of llama.cpp with experts."""

    family: str
    rule: Callable[[Fields], RoutingRule]
    size: str = "expert_feed_forward_length"
    shared_size: Callable[[Fields], int] = lambda fields: 0
    shared_gate: bool = False
    biased: bool = False
    norm_eps: float | None = None
    """The only one with which `transformers` and vLLM compute the same."""
    keys: frozenset[str] = frozenset()
    """Besides those that all have."""


DEEPSEEK_V2 = GGUFExperts("deepseek_v2", _greedy, shared_size=_shared_size, norm_eps=1e-6, keys=_SHARED_KEYS)
GLM_LITE = GGUFExperts("glm4_moe_lite", _sigmoid, shared_size=_shared_size, biased=True, keys=_SHARED_KEYS)
DEEPSEEK_V3 = GLM_LITE._replace(family="deepseek_v3", norm_eps=1e-6)
WITH_EXPERTS: dict[str, GGUFExperts] = {
    "llama": GGUFExperts("mixtral", _softmax(renormalise=True), size="feed_forward_length"),
    "qwen2moe": GGUFExperts(
        "qwen2_moe",
        _softmax(renormalise=False),
        shared_size=lambda fields: fields.integer("expert_shared_feed_forward_length", 1, MAX_WIDTH * 4),
        shared_gate=True,
        keys=frozenset({"expert_shared_feed_forward_length"}),
    ),
    "qwen3moe": GGUFExperts("qwen3_moe", _softmax(renormalise=True)),
    "olmoe": GGUFExperts("olmoe", _softmax(renormalise=False), size="feed_forward_length", norm_eps=1e-5),
    "glm4moe": GGUFExperts("glm4_moe", _sigmoid, shared_size=_shared_size, biased=True, keys=_SHARED_KEYS),
}
"""By `general.architecture`. Mixtral is a `llama` whose file counts experts; `deepseek2` is any of the three above."""
EXPERT_KEYS = frozenset({"expert_count", "expert_used_count", "expert_feed_forward_length"})


def experts_from_gguf(
    fields: Fields, experts: GGUFExperts, num_layers: int, tensor_names: frozenset[str]
) -> SparseConfig:
    """The sparse layers are those that have a router. Raises ModelError for what is missing or out of bounds."""
    layers = tuple(layer for layer in range(num_layers) if f"blk.{layer}.ffn_gate_inp.weight" in tensor_names)
    if not layers:
        raise fields.wrong("expert_count", "0, or the tensors of a router (ffn_gate_inp) in some layer")
    eps = fields.number("attention.layer_norm_rms_epsilon", 0.0, 1.0)
    if experts.norm_eps is not None and not math.isclose(eps, experts.norm_eps, rel_tol=1e-6):
        raise fields.wrong(
            "attention.layer_norm_rms_epsilon", f"{experts.norm_eps}: with others, engines run this model differently"
        )
    return SparseConfig(
        num_experts=fields.integer("expert_count", 1, MAX_EXPERTS),
        expert_size=fields.integer(experts.size, 1, MAX_WIDTH * 4),
        routing=experts.rule(fields),
        biased=experts.biased,
        shared_size=experts.shared_size(fields),
        shared_gate=experts.shared_gate,
        layers=layers,
    )
