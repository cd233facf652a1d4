"""Choosing a row's experts in Triton: scores, groups, the best, their weights, in one launch with a program per row.

A rule's fields are compile-time arguments, so that a family's rule is one kernel without branches.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# ruff: noqa: N803 - compile-time arguments are in capitals, as is the custom in Triton

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.kernels.dispatch import require
from headwater.kernels.moe_reference import ExpertRows, check_route
from headwater.kernels.routing import RoutingRule


def route_triton(
    logits: Tensor, rule: RoutingRule, bias: Tensor | None = None, rows: ExpertRows | None = None
) -> tuple[Tensor, Tensor]:
    """`moe.route`, the best expert of a row first; among equal scores the lower expert wins."""
    check_route(logits, rule, bias, rows)
    require(logits.stride(1) == 1, "logits contiguous in the last dimension", logits=logits)
    num_rows, num_experts = logits.shape
    ids = torch.empty(num_rows, rule.top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_rows, rule.top_k, dtype=torch.float32, device=logits.device)
    if num_rows:
        _route_kernel[(num_rows,)](
            logits,
            logits if bias is None else bias,
            ids,
            weights,
            ids if rows is None else rows.counts,
            ids if rows is None else rows.live,
            rule.scaling,
            logits.stride(0),
            NUM_EXPERTS=num_experts,
            BLOCK=triton.next_power_of_2(num_experts),
            TOP_K=rule.top_k,
            BLOCK_K=triton.next_power_of_2(rule.top_k),
            GROUPS=rule.num_groups,
            BLOCK_GROUPS=triton.next_power_of_2(rule.num_groups),
            KEPT=rule.groups_kept,
            SOFTMAX=rule.scores == "softmax",
            TOP2=rule.group_score == "top2",
            BIAS=bias is not None,
            COUNTED=rows is not None,
            RENORMALISE=rule.renormalise,
            num_warps=1,
        )
    return ids, weights


@triton.jit
def _route_kernel(
    logits,
    bias,
    ids,
    weights,
    counts,
    live,
    scaling,
    logits_row,
    NUM_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    SOFTMAX: tl.constexpr,
    TOP2: tl.constexpr,
    BIAS: tl.constexpr,
    COUNTED: tl.constexpr,
    RENORMALISE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    inside = expert < NUM_EXPERTS
    logit = tl.load(logits + row * logits_row + expert, mask=inside, other=float("-inf"))
    if SOFTMAX:
        score = tl.exp(logit - tl.max(logit, axis=0))
        score = score / tl.sum(score, axis=0)
    else:
        score = 1.0 / (1.0 + tl.exp(-logit))
    choice = score
    if BIAS:
        choice += tl.load(bias + expert, mask=inside, other=0.0)
    choice = tl.where(inside, choice, float("-inf"))

    if KEPT < GROUPS:
        group = expert // (NUM_EXPERTS // GROUPS)
        groups = tl.arange(0, BLOCK_GROUPS)
        group_scores = tl.full([BLOCK_GROUPS], float("-inf"), tl.float32)
        for number in tl.static_range(GROUPS):
            own = tl.where(group == number, choice, float("-inf"))
            best = tl.max(own, axis=0)
            if TOP2:
                best += tl.max(tl.where(expert == tl.argmax(own, axis=0), float("-inf"), own), axis=0)
            group_scores = tl.where(groups == number, best, group_scores)
        kept = tl.zeros([BLOCK], tl.int32)
        for _ in tl.static_range(KEPT):
            number = tl.argmax(group_scores, axis=0)
            kept = tl.where(group == number, 1, kept)
            group_scores = tl.where(groups == number, float("-inf"), group_scores)
        choice = tl.where(kept == 1, choice, float("-inf"))

    place = tl.arange(0, BLOCK_K)
    chosen = tl.zeros([BLOCK_K], tl.int32)
    weight = tl.zeros([BLOCK_K], tl.float32)
    for number in tl.static_range(TOP_K):
        best = tl.argmax(choice, axis=0)
        chosen = tl.where(place == number, best, chosen)
        weight = tl.where(place == number, tl.sum(tl.where(expert == best, score, 0.0), axis=0), weight)
        choice = tl.where(expert == best, float("-inf"), choice)
    if RENORMALISE:
        weight = weight / (tl.sum(weight, axis=0) + 1e-20)
    at = row * TOP_K + place
    tl.store(ids + at, chosen, mask=place < TOP_K)
    tl.store(weights + at, weight * scaling, mask=place < TOP_K)
    if COUNTED:
        num_counted = tl.where(row < tl.load(live), TOP_K, 0)
        tl.atomic_add(counts + chosen, tl.full([BLOCK_K], 1, tl.int64), mask=place < num_counted, sem="relaxed")
