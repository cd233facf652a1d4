"""The experts that a Hugging Face config.json describes: how many, how wide, in which layers, chosen by which rule.

A family is a row of `EXPERTS`. Defaults are those of `transformers`, because vLLM's side reads configs through its
classes; a key without one must be there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from headwater.kernels.routing import RoutingRule
from headwater.models.config import MAX_LAYERS, MAX_WIDTH, DenseConfig, Family, SparseConfig
from headwater.models.fields import Fields

MAX_EXPERTS = 1 << 14
COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Spellings of the number of experts; a family of dense layers has none of them."""


class ExpertKeys(NamedTuple):
    """How a family's config describes its experts."""

    rule: Callable[[Fields], RoutingRule]
    layers: Callable[[Fields, int], tuple[int, ...]] = lambda fields, num_layers: tuple(range(num_layers))
    size: str = "moe_intermediate_size"
    shared_size: Callable[[Fields], int] = lambda fields: 0
    shared_gate: bool = False
    biased: bool = False


def mlps_from_hf(
    fields: Fields, family: Family, num_layers: int, mlp_bias: bool
) -> tuple[DenseConfig | None, SparseConfig | None]:
    """The MLPs of a model's dense layers and of its sparse ones; None where no layer is of the kind."""
    keys = EXPERTS.get(family.name)
    sparse = None
    if keys is not None and (layers := keys.layers(fields, num_layers)):
        sparse = SparseConfig(
            num_experts=_num_experts(fields),
            expert_size=fields.integer(keys.size, 1, MAX_WIDTH * 4),
            routing=keys.rule(fields),
            biased=keys.biased,
            shared_size=keys.shared_size(fields),
            shared_gate=keys.shared_gate,
            layers=layers,
        )
    if sparse is not None and len(sparse.layers) == num_layers:
        return None, sparse
    width = fields.integer("intermediate_size", 1, MAX_WIDTH * 4)
    return DenseConfig(intermediate_size=width, mlp_bias=mlp_bias), sparse


def _num_experts(fields: Fields) -> int:
    """One number, though a config may spell it in several ways."""
    named = [name for name in COUNT_KEYS if name in fields]
    counts = {fields.integer(name, 1, MAX_EXPERTS) for name in named or COUNT_KEYS[:1]}
    if len(counts) != 1:
        raise fields.wrong(named[0], f"the same number as {' and '.join(named[1:])}")
    return counts.pop()


def _top_k(fields: Fields) -> int:
    return fields.integer("num_experts_per_tok", 1, MAX_EXPERTS)


def _mixtral(fields: Fields) -> RoutingRule:
    return RoutingRule(top_k=_top_k(fields), renormalise=True)


def _softmax(fields: Fields) -> RoutingRule:
    return RoutingRule(top_k=_top_k(fields), renormalise=fields.flag("norm_topk_prob", False))


def _greedy(fields: Fields) -> RoutingRule:
    """DeepSeek-V2, with groups (`group_limited_greedy`) or without (`greedy`). vLLM renormalises where the config says
    so and transformers never does: such a config is refused."""
    if fields.flag("norm_topk_prob", False):
        raise fields.wrong("norm_topk_prob", "false: transformers and vLLM run this model differently where it is true")
    method = fields.text("topk_method", default="greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.wrong("topk_method", "greedy or group_limited_greedy")
    if fields.text("scoring_func", default="softmax") != "softmax":
        raise fields.wrong("scoring_func", "softmax")
    groups, kept = (fields.integer(name, 1, MAX_EXPERTS, default=1) for name in ("n_group", "topk_group"))
    if method == "greedy" and (groups, kept) != (1, 1):
        raise fields.wrong("n_group", "1, or none: vLLM divides experts into groups where transformers does not")
    return RoutingRule(top_k=_top_k(fields), num_groups=groups, groups_kept=kept, scaling=_scaling(fields))


def _noaux(fields: Fields) -> RoutingRule:
    """DeepSeek-V3 and GLM (`noaux_tc`): a bias balances the choice, and groups are judged by their two best experts."""
    if fields.text("topk_method", default="noaux_tc") != "noaux_tc":
        raise fields.wrong("topk_method", "noaux_tc")
    if fields.text("scoring_func", default="sigmoid") != "sigmoid":
        raise fields.wrong("scoring_func", "sigmoid")
    groups, kept = _groups(fields)
    return RoutingRule(
        top_k=_top_k(fields),
        scores="sigmoid",
        num_groups=groups,
        groups_kept=kept,
        group_score="top2",
        renormalise=fields.flag("norm_topk_prob", True),
        scaling=_scaling(fields),
    )


def _deepseek_v3(fields: Fields) -> RoutingRule:
    """transformers writes neither of the two keys, and then vLLM cannot load the model."""
    if "topk_method" in fields and "scoring_func" not in fields:
        raise fields.wrong("scoring_func", "sigmoid: vLLM takes the softmax without it, and transformers never does")
    return _noaux(fields)


def _groups(fields: Fields) -> tuple[int, int]:
    """`topk_group` is the number of groups that are kept."""
    return fields.integer("n_group", 1, MAX_EXPERTS), fields.integer("topk_group", 1, MAX_EXPERTS)


def _scaling(fields: Fields) -> float:
    return fields.number("routed_scaling_factor", 1e-3, 1e3, default=1.0)


def _every_step(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Qwen: the last of every `decoder_sparse_step` layers, but for those in `mlp_only_layers`."""
    step = fields.integer("decoder_sparse_step", 1, MAX_LAYERS, default=1)
    dense = fields.integers("mlp_only_layers", 0, MAX_LAYERS)
    return tuple(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0)


def _after_first(default: int) -> Callable[[Fields, int], tuple[int, ...]]:
    """DeepSeek and GLM: all but the first `first_k_dense_replace`."""

    def layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
        return tuple(range(fields.integer("first_k_dense_replace", 0, MAX_LAYERS, default=default), num_layers))

    return layers


def _typed(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """GLM-4-MoE-Lite: transformers reads `mlp_layer_types`, vLLM `first_k_dense_replace`; they must not differ."""
    first = fields.integer("first_k_dense_replace", 0, MAX_LAYERS, default=1)
    types = fields.values.get("mlp_layer_types")
    dense = num_layers if first > num_layers else first
    if types is None and first != 1:
        raise fields.wrong("first_k_dense_replace", "1, or mlp_layer_types that say the same")
    if types is not None and types != ["dense"] * dense + ["sparse"] * (num_layers - dense):
        raise fields.wrong("mlp_layer_types", f"{first} times dense and then sparse, as first_k_dense_replace says")
    return tuple(range(first, num_layers))


def _shared_size(fields: Fields) -> int:
    """DeepSeek and GLM run their shared experts as one MLP of their widths together."""
    return fields.integer("n_shared_experts", 1, 64) * fields.integer("moe_intermediate_size", 1, MAX_WIDTH * 4)


EXPERTS: dict[str, ExpertKeys] = {
    "mixtral": ExpertKeys(_mixtral, size="intermediate_size"),
    "qwen2_moe": ExpertKeys(
        _softmax,
        _every_step,
        shared_size=lambda fields: fields.integer("shared_expert_intermediate_size", 1, MAX_WIDTH * 4),
        shared_gate=True,
    ),
    "qwen3_moe": ExpertKeys(_softmax, _every_step),
    "olmoe": ExpertKeys(_softmax, size="intermediate_size"),
    "glm4_moe": ExpertKeys(_noaux, _after_first(1), shared_size=_shared_size, biased=True),
    "deepseek_v2": ExpertKeys(_greedy, _after_first(0), shared_size=_shared_size),
    "deepseek_v3": ExpertKeys(_deepseek_v3, _after_first(3), shared_size=_shared_size, biased=True),
    "glm4_moe_lite": ExpertKeys(_noaux, _typed, shared_size=_shared_size, biased=True),
}
"""Families with experts."""
