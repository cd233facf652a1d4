"""The sparse MLP of a decoder layer: a router chooses a few of many experts for each token, and shared experts see all.

Experts are stacked in two tensors, so that one launch runs all of them; checkpoints name them one by one. The width of
every expert is divided over the ranks, and one sum over the ranks ends the layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the name that torch's own documentation uses
from torch import Tensor

from headwater.errors import ModelError
from headwater.kernels.moe import route, run_experts
from headwater.kernels.moe_reference import ExpertRows
from headwater.models.config import DenseConfig, ModelConfig, SparseConfig
from headwater.models.layers import ParameterPlacement, Targets
from headwater.models.mlp import GatedMLP
from headwater.models.weights import WeightTarget


class ExpertNames(NamedTuple):
    """The names of an expert's matrices, and of the shared experts, in a checkpoint."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_experts"


NAMES: dict[str, ExpertNames] = {
    "mixtral": ExpertNames("w1", "w3", "w2"),
    "qwen2_moe": ExpertNames(shared="shared_expert"),
}
"""Families whose names are not the usual ones."""


def layer_mlp(config: ModelConfig, layer: int, place: ParameterPlacement) -> GatedMLP | SparseMLP:
    """The MLP of one layer, dense or sparse."""
    shape = config.mlp_of(layer)
    if isinstance(shape, DenseConfig):
        return GatedMLP(config.hidden_size, shape, place)
    return SparseMLP(config.hidden_size, shape, NAMES.get(config.family, ExpertNames()), place)


class ExpertRouter:
    """Rows to experts and weights. The product and everything after it are float32: close scores decide."""

    def __init__(self, hidden_size: int, shape: SparseConfig, place: ParameterPlacement) -> None:
        wide = replace(place, dtype=torch.float32)
        self.weight = wide.matrix(shape.num_experts, hidden_size)
        self.bias = wide.vector(shape.num_experts) if shape.biased else None
        self._rule = shape.routing
        self.rows: ExpertRows | None = None

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return route(F.linear(x.float(), self.weight), self._rule, self.bias, self.rows)

    def targets(self, prefix: str) -> Targets:
        """One matrix, and the bias of the choice."""
        experts, hidden = self.weight.shape
        yield f"{prefix}.weight", WeightTarget(self.weight, (experts, hidden), 0, range(experts))
        if self.bias is not None:
            yield f"{prefix}.e_score_correction_bias", WeightTarget(self.bias, (experts,), 0, range(experts))


class Experts:
    """The matrices of all experts, each rank holding a part of every expert's width."""

    def __init__(self, hidden_size: int, shape: SparseConfig, names: ExpertNames, place: ParameterPlacement) -> None:
        self._width = shape.expert_size
        self._part = place.ranks.tp.share(shape.expert_size)
        self._names = names
        self.gate_up = place.stack(shape.num_experts, 2 * len(self._part), hidden_size)
        self.down = place.stack(shape.num_experts, hidden_size, len(self._part))

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """This rank's part of the sum."""
        return run_experts(x, ids, weights, self.gate_up, self.down)

    def targets(self, prefix: str) -> Targets:
        """Three matrices for each expert, straight into the stacks."""
        width, part, names = self._width, self._part, self._names
        here, hidden = len(part), self.down.shape[1]
        for number, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            expert = f"{prefix}.{number}"
            yield f"{expert}.{names.gate}.weight", WeightTarget(gate_up[:here], (width, hidden), 0, part)
            yield f"{expert}.{names.up}.weight", WeightTarget(gate_up[here:], (width, hidden), 0, part)
            yield f"{expert}.{names.down}.weight", WeightTarget(down, (hidden, width), 1, part)


class SparseMLP:
    """Routed experts and, where the family has them, shared ones, which may have a gate of their own."""

    def __init__(self, hidden_size: int, shape: SparseConfig, names: ExpertNames, place: ParameterPlacement) -> None:
        _check_widths(shape, place)
        self.router = ExpertRouter(hidden_size, shape, place)
        self.experts = Experts(hidden_size, shape, names, place)
        shared = DenseConfig(intermediate_size=shape.shared_size) if shape.shared_size else None
        self.shared = GatedMLP(hidden_size, shared, place) if shared is not None else None
        self.shared_gate = place.matrix(1, hidden_size) if shape.shared_gate else None
        self._shared_name = names.shared
        self._tp = place.ranks.tp

    def __call__(self, x: Tensor) -> Tensor:
        ids, weights = self.router(x)
        out = self.experts(x, ids, weights)
        if self.shared is not None:
            shared = self.shared.partial(x)
            if self.shared_gate is not None:
                shared = shared * F.linear(x, self.shared_gate).sigmoid()
            out = out.add_(shared)
        return self._tp.all_reduce(out)

    def targets(self, prefix: str) -> Targets:
        """The router, every expert, the shared ones and their gate."""
        yield from self.router.targets(f"{prefix}.gate")
        yield from self.experts.targets(f"{prefix}.experts")
        if self.shared is not None:
            yield from self.shared.targets(f"{prefix}.{self._shared_name}")
        if self.shared_gate is not None:
            shape = tuple(self.shared_gate.shape)
            yield f"{prefix}.{self._shared_name}_gate.weight", WeightTarget(self.shared_gate, shape, 0, range(1))


def count_rows(mlps: Iterable[object], num_experts: int, device: torch.device) -> ExpertRows:
    """Have every sparse MLP among these count its rows; the counts of all, int64 [sparse layers, experts]."""
    routers = [mlp.router for mlp in mlps if isinstance(mlp, SparseMLP)]
    counts = torch.zeros(len(routers), num_experts, dtype=torch.int64, device=device)
    live = torch.zeros(1, dtype=torch.int32, device=device)
    for router, own in zip(routers, counts, strict=True):
        router.rows = ExpertRows(own, live)
    return ExpertRows(counts, live)


def _check_widths(shape: SparseConfig, place: ParameterPlacement) -> None:
    """Any width can be divided unevenly, but each rank must have a part of it."""
    width = min(shape.expert_size, shape.shared_size or shape.expert_size)
    if width < place.ranks.tp.size:
        raise ModelError(
            f"experts of width {width} cannot be divided over tensor_parallel_size={place.ranks.tp.size}; it must not "
            "be larger than the width"
        )
