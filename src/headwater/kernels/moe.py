"""A mixture of experts: which experts a row goes to, and the sum of what they make of it.

Expert matrices are stacked, [experts, 2 * n, hidden] (gate above up) and [experts, hidden, n]; `n` is this rank's part
of an expert's width. A rule is a `RoutingRule`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the name that torch's own documentation uses
from torch import Tensor

from headwater.kernels.activation import silu_and_mul_torch
from headwater.kernels.dispatch import require
from headwater.kernels.routing import RoutingRule

_LEAST_SUM = 1e-20
"""Added to a sum of weights: sigmoids of very negative logits are all zero."""


def route(logits: Tensor, rule: RoutingRule, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The experts of each row, int32 [rows, top_k], and their weights, float32 [rows, top_k].

    `logits` is float32 [rows, experts]; `bias`, float32 [experts], is added to the scores for the choice only. The
    order of a row's experts is not specified, and neither is the choice among experts of equal score.
    """
    return route_torch(logits, rule, bias)


def run_experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """`sum(weights[r, j] * expert[ids[r, j]](x[r]))`: a new [rows, hidden] in the dtype of `x`, summed in float32.

    `ids` and `weights` are as `route` returns them; an expert is `down(silu(gate(x)) * up(x))`.
    """
    return run_experts_torch(x, ids, weights, gate_up, down)


def route_torch(logits: Tensor, rule: RoutingRule, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`route` in plain torch."""
    check_route(logits, rule, bias)
    scores = logits.softmax(dim=-1) if rule.scores == "softmax" else logits.sigmoid()
    choice = scores if bias is None else scores + bias
    if rule.groups_kept < rule.num_groups:
        choice = _keep_groups(choice, rule)
    ids = choice.topk(rule.top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    if rule.renormalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + _LEAST_SUM)
    if rule.scaling != 1.0:
        weights = weights * rule.scaling
    return ids.int(), weights


def _keep_groups(choice: Tensor, rule: RoutingRule) -> Tensor:
    """`choice` with minus infinity for the experts of all but the best groups."""
    grouped = choice.unflatten(1, (rule.num_groups, -1))
    best = grouped.amax(dim=-1) if rule.group_score == "max" else grouped.topk(2, dim=-1).values.sum(dim=-1)
    kept = best.topk(rule.groups_kept, dim=-1).indices
    dropped = torch.ones_like(best, dtype=torch.bool).scatter_(1, kept, False)
    choosable: Tensor = grouped.masked_fill(dropped.unsqueeze(-1), float("-inf")).flatten(1)
    return choosable


def run_experts_torch(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """`run_experts` in plain torch: expert by expert, in their order, so that a row's sum does not depend on other
    rows. It reads the counts of rows per expert on the host."""
    check_run_experts(x, ids, weights, gate_up, down)
    num_experts, top_k = gate_up.shape[0], ids.shape[1]
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    chosen, pairs = ids.flatten().sort(stable=True)
    counts = torch.bincount(chosen, minlength=num_experts).tolist()
    start = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        here = pairs[start : start + count]
        rows = here // top_k
        hidden = silu_and_mul_torch(F.linear(x.index_select(0, rows), gate_up[expert]))
        made = F.linear(hidden, down[expert]).float()
        out.index_add_(0, rows, made.mul_(weights.flatten().index_select(0, here).unsqueeze(1)))
        start += count
    return out.to(x.dtype)


def check_route(logits: Tensor, rule: RoutingRule, bias: Tensor | None) -> None:
    """What `route` asks of its arguments; host data only."""
    require(
        logits.dim() == 2
        and logits.dtype == torch.float32
        and logits.shape[1] % rule.num_groups == 0
        and logits.shape[1] >= rule.top_k,
        "logits float32 [rows, experts], experts a multiple of the groups and no fewer than top_k",
        logits=logits,
        rule=rule,
    )
    require(
        bias is None or (bias.shape == logits.shape[1:] and bias.dtype == torch.float32),
        "bias float32 [experts], or none",
        logits=logits,
        bias=bias,
    )


def check_run_experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> None:
    """What `run_experts` asks of its arguments; host data only."""
    require(
        x.dim() == ids.dim() == weights.dim() == 2
        and ids.shape == weights.shape
        and ids.shape[0] == x.shape[0]
        and ids.dtype == torch.int32
        and weights.dtype == torch.float32,
        "x [rows, hidden], ids int32 and weights float32 [rows, top_k]",
        x=x,
        ids=ids,
        weights=weights,
    )
    require(
        gate_up.dim() == down.dim() == 3
        and gate_up.shape[0] == down.shape[0]
        and gate_up.shape[1] == 2 * down.shape[2]
        and gate_up.shape[2] == down.shape[1] == x.shape[1]
        and gate_up.dtype == down.dtype == x.dtype,
        "gate_up [experts, 2 * n, hidden] and down [experts, hidden, n] in the dtype of x",
        x=x,
        gate_up=gate_up,
        down=down,
    )
