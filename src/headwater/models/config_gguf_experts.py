"""The experts that the metadata of a GGUF file describes, for the architectures whose experts this engine reads.

How scores become weights is not in the file: llama.cpp has it in the code of each architecture.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from headwater.kernels.routing import RoutingRule
from headwater.models.config import MAX_WIDTH, SparseConfig
from headwater.models.config_experts import MAX_EXPERTS
from headwater.models.fields import Fields


class GGUFExperts(NamedTuple):
    """An architecture of llama.cpp with experts."""

    family: str
    renormalise: bool
    """Whether the weights of the chosen experts are made to sum to 1."""
    size: str = "expert_feed_forward_length"
    shared: bool = False
    norm_eps: float | None = None
    """The only one with which `transformers` and vLLM compute the same."""


WITH_EXPERTS: dict[str, GGUFExperts] = {
    "llama": GGUFExperts("mixtral", True, size="feed_forward_length"),
    "qwen2moe": GGUFExperts("qwen2_moe", False, shared=True),
    "qwen3moe": GGUFExperts("qwen3_moe", True),
    "olmoe": GGUFExperts("olmoe", False, size="feed_forward_length", norm_eps=1e-5),
}
"""By `general.architecture`. Mixtral is a `llama` whose file counts experts."""
EXPERT_KEYS = frozenset(
    ["expert_count", "expert_used_count", "expert_feed_forward_length", "expert_shared_feed_forward_length"]
)


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
    shared = fields.integer("expert_shared_feed_forward_length", 1, MAX_WIDTH * 4) if experts.shared else 0
    return SparseConfig(
        num_experts=fields.integer("expert_count", 1, MAX_EXPERTS),
        expert_size=fields.integer(experts.size, 1, MAX_WIDTH * 4),
        routing=RoutingRule(top_k=fields.integer("expert_used_count", 1, MAX_EXPERTS), renormalise=experts.renormalise),
        shared_size=shared,
        shared_gate=experts.shared,
        layers=layers,
    )
