"""A mixture of experts: which experts a row goes to, and the sum of what they make of it.

Expert matrices are stacked, [experts, 2 * n, hidden] (gate above up) and [experts, hidden, n]; `n` is this rank's part
of an expert's width. A rule is a `RoutingRule`. The references are in `moe_reference`.
"""

from __future__ import annotations

from torch import Tensor

from headwater.kernels.dispatch import runs_triton
from headwater.kernels.moe_reference import ExpertRows, route_torch, run_experts_torch
from headwater.kernels.routing import RoutingRule


def route(
    logits: Tensor, rule: RoutingRule, bias: Tensor | None = None, rows: ExpertRows | None = None
) -> tuple[Tensor, Tensor]:
    """The experts of each row, int32 [rows, top_k], and their weights, float32 [rows, top_k].

    `logits` is float32 [rows, experts]; `bias`, float32 [experts], is added to the scores for the choice only. The
    order of a row's experts is not specified, and neither is the choice among experts of equal score. One launch, which
    also counts into `rows`.
    """
    if runs_triton(logits):
        from headwater.kernels.route_triton import route_triton

        return route_triton(logits, rule, bias, rows)
    return route_torch(logits, rule, bias, rows)


def run_experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """`sum(weights[r, j] * expert[ids[r, j]](x[r]))`: a new [rows, hidden] in the dtype of `x`, summed in float32.

    `ids` and `weights` are as `route` returns them; an expert is `down(silu(gate(x)) * up(x))`. Two launches for few
    rows, four for many; without Triton it reads the counts of rows per expert on the host.
    """
    if runs_triton(x):
        from headwater.kernels.moe_triton import run_experts_triton

        return run_experts_triton(x, ids, weights, gate_up, down)
    return run_experts_torch(x, ids, weights, gate_up, down)
