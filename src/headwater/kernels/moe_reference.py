"""Routing and experts in plain torch: the path of a CPU, and the oracle of the Triton kernels; and torch's own grouped
product, to measure against.

A pair is one (row, choice), numbered row * top_k + choice. An id outside 0 … experts is an expert that another rank
holds: its pair counts for nothing here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the name that torch's own documentation uses
from torch import Tensor

from headwater.kernels.activation import silu_and_mul, silu_and_mul_torch
from headwater.kernels.dispatch import require
from headwater.kernels.routing import RoutingRule

_LEAST_SUM = 1e-20
"""Added to a sum of weights: sigmoids of very negative logits are all zero."""


class ExpertRows(NamedTuple):
    """Where `route` counts the rows that go to each expert of one layer. Nobody has to wait for the device."""

    counts: Tensor
    """int64 [experts]; only grows."""
    live: Tensor
    """int32 [1]: rows from this one on are padding, and are not counted."""


def route_torch(
    logits: Tensor, rule: RoutingRule, bias: Tensor | None = None, rows: ExpertRows | None = None
) -> tuple[Tensor, Tensor]:
    """`moe.route` in plain torch."""
    check_route(logits, rule, bias, rows)
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
    if rows is not None:
        _count_rows(ids, rows)
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
    """`moe.run_experts` in plain torch: expert by expert, in their order, so that a row's sum does not depend on other
    rows. It reads the counts of rows per expert on the host."""
    check_experts(x, ids, weights, gate_up, down)
    out = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    pairs, counts = sort_pairs_torch(ids, len(gate_up))
    start = 0
    for expert, count in enumerate(counts.tolist()):
        if not count:
            continue
        here = pairs[start : start + count]
        rows = here // ids.shape[1]
        inner = silu_and_mul_torch(F.linear(x.index_select(0, rows), gate_up[expert]))
        made = F.linear(inner, down[expert]).to(out.dtype)
        out.index_add_(0, rows, made.mul_(weights.flatten().index_select(0, here).unsqueeze(1)))
        start += count
    return out.to(x.dtype)


def run_experts_grouped(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The same with `torch._grouped_mm`, without a loop and without waiting for the device. Every id must be one of
    the experts here. For benchmarks: nothing else calls it."""
    check_experts(x, ids, weights, gate_up, down)
    order, counts = sort_pairs_torch(ids, len(gate_up))
    ends = counts.cumsum(0).int()
    inner = silu_and_mul(torch._grouped_mm(x[order // ids.shape[1]], gate_up.transpose(1, 2), offs=ends))
    outer = torch._grouped_mm(inner, down.transpose(1, 2), offs=ends)
    pairs = torch.empty_like(outer)
    pairs[order] = outer
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.einsum("rk,rkh->rh", weights.to(wide), pairs.view(*ids.shape, -1).to(wide)).to(x.dtype)


def sort_pairs_torch(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """(pairs by expert, those of one expert in their own order; int32 rows per expert). Foreign pairs come last."""
    flat = ids.flatten().long()
    flat = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    counts = torch.zeros(num_experts + 1, dtype=torch.int32, device=ids.device)
    counts.index_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    return flat.argsort(stable=True), counts[:num_experts]


def _count_rows(ids: Tensor, rows: ExpertRows) -> None:
    live = torch.arange(len(ids), device=ids.device).unsqueeze(1) < rows.live
    rows.counts.index_add_(0, ids.flatten(), live.expand_as(ids).flatten().to(torch.int64))


def check_route(logits: Tensor, rule: RoutingRule, bias: Tensor | None, rows: ExpertRows | None = None) -> None:
    """What `route` asks of its arguments; host data only."""
    require(
        logits.dim() == 2
        and logits.dtype == torch.float32
        and logits.shape[1] % rule.num_groups == 0
        and logits.shape[1] // rule.num_groups * rule.groups_kept >= rule.top_k,
        "logits float32 [rows, experts], experts a multiple of the groups, and no fewer than top_k in the groups kept",
        logits=logits,
        rule=rule,
    )
    require(
        bias is None or (bias.shape == logits.shape[1:] and bias.dtype == torch.float32 and bias.is_contiguous()),
        "bias float32 [experts], contiguous, or none",
        logits=logits,
        bias=bias,
    )
    require(
        rows is None
        or (
            rows.counts.shape == logits.shape[1:]
            and rows.counts.dtype == torch.int64
            and rows.counts.is_contiguous()
            and rows.live.dtype == torch.int32
            and rows.live.numel() == 1
        ),
        "counts int64 [experts], contiguous, and live int32 [1], or none",
        logits=logits,
        rows=rows,
    )


def check_experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> None:
    """What `run_experts` asks of its arguments; host data only."""
    require(
        x.dim() == ids.dim() == weights.dim() == 2
        and ids.shape == weights.shape
        and ids.shape[0] == x.shape[0]
        and ids.shape[1] > 0
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
