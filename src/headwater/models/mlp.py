"""The gated feed-forward part of a decoder layer."""

from __future__ import annotations

from torch import Tensor

from headwater.kernels.activation import silu_and_mul
from headwater.models.config import DenseConfig
from headwater.models.layers import FusedLinear, FusedRows, ParameterPlacement, RowLinear, Targets


class GatedMLP:
    """`down(silu(gate(x)) * up(x))`, its width divided over the ranks."""

    def __init__(self, hidden_size: int, shape: DenseConfig, place: ParameterPlacement) -> None:
        width = shape.intermediate_size
        part = place.ranks.tp.share(width)
        rows = (FusedRows("gate_proj", width, part), FusedRows("up_proj", width, part))
        self.gate_up = FusedLinear(hidden_size, rows, bias=shape.mlp_bias, place=place)
        self.down = RowLinear(width, part, hidden_size, bias=shape.mlp_bias, place=place)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(silu_and_mul(self.gate_up(x)))

    def partial(self, x: Tensor) -> Tensor:
        """This rank's term of the sum that a call returns."""
        return self.down.partial(silu_and_mul(self.gate_up(x)))

    def targets(self, prefix: str) -> Targets:
        """Three matrices and their biases."""
        yield from self.gate_up.targets(prefix)
        yield from self.down.targets(f"{prefix}.down_proj")
