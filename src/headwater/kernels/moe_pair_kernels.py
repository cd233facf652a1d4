"""The Triton kernels of few pairs: matrix times vector, bound by reading the chosen experts' weights once.

No sorting: a program reads some rows of one pair's weights (gate and up), or of all of one row's experts (down).
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# ruff: noqa: N803 - compile-time arguments are in capitals, as is the custom in Triton

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pair_gate_up_kernel(
    x,
    ids,
    gate_up,
    inner,
    num_experts,
    x_row,
    w_expert,
    w_row,
    TOP_K: tl.constexpr,
    INNER: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """silu(gate) · up of one pair."""
    pair = tl.program_id(1).to(tl.int64)
    expert = tl.load(ids + pair).to(tl.int64)
    if (expert < 0) | (expert >= num_experts):
        return
    col = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    k = tl.arange(0, BLOCK_K)
    x_at = x + pair // TOP_K * x_row + k
    gate_at = gate_up + expert * w_expert + (col % INNER)[:, None] * w_row + k[None, :]
    up_at = gate_at + INNER * w_row
    gate = tl.zeros([BLOCK_COLS, BLOCK_K], tl.float32)
    up = tl.zeros([BLOCK_COLS, BLOCK_K], tl.float32)
    for start in tl.range(0, HIDDEN, BLOCK_K, num_stages=STAGES):
        inside = k + start < HIDDEN
        a = tl.load(x_at + start, mask=inside, other=0.0).to(tl.float32)[None, :]
        gate += a * tl.load(gate_at + start, mask=inside[None, :], other=0.0).to(tl.float32)
        up += a * tl.load(up_at + start, mask=inside[None, :], other=0.0).to(tl.float32)
    gates = tl.sum(gate, axis=1)
    result = gates / (1.0 + tl.exp(-gates)) * tl.sum(up, axis=1)
    tl.store(inner + pair * INNER + col, result.to(inner.dtype.element_ty), mask=col < INNER)


@triton.jit
def pair_down_sum_kernel(
    inner,
    ids,
    weights,
    down,
    out,
    num_experts,
    w_expert,
    w_row,
    TOP_K: tl.constexpr,
    INNER: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Some columns of one row: its experts one after the other, in one loop, so that loads run ahead of all of them."""
    BLOCKS: tl.constexpr = (INNER + BLOCK_K - 1) // BLOCK_K  # noqa: N806
    row = tl.program_id(1).to(tl.int64)
    col = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    k = tl.arange(0, BLOCK_K)
    w_at = down + (col % HIDDEN)[:, None] * w_row + k[None, :]
    acc = tl.zeros([BLOCK_COLS, BLOCK_K], tl.float32)
    for step in tl.range(0, TOP_K * BLOCKS, num_stages=STAGES):
        pair = row * TOP_K + step // BLOCKS
        start = step % BLOCKS * BLOCK_K
        expert = tl.load(ids + pair).to(tl.int64)
        inside = k + start < tl.where((expert >= 0) & (expert < num_experts), INNER, 0)
        a = tl.load(inner + pair * INNER + start + k, mask=inside, other=0.0).to(tl.float32)
        a *= tl.load(weights + pair)
        w = tl.load(w_at + expert * w_expert + start, mask=inside[None, :], other=0.0).to(tl.float32)
        acc += a[None, :] * w
    tl.store(out + row * HIDDEN + col, tl.sum(acc, axis=1).to(out.dtype.element_ty), mask=col < HIDDEN)
