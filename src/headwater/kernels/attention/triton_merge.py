"""Joining partial attention results over disjoint spans of KV, as split decoding and split prefill leave them."""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# ruff: noqa: N803 - compile-time arguments are in capitals, as is the custom in Triton

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def merge_splits(partials: Tensor, log_sums: Tensor, out: Tensor) -> None:
    """`partials` float32 [rows, heads, splits, v_dim], each normalised over its own span; `log_sums` float32 [rows,
    heads, splits], the base-2 logarithm of each span's sum of exponentials, -inf for an empty span, whose partial is
    not read. Writes `out` [rows, heads, v_dim], contiguous. One launch.
    """
    num_rows, num_heads, num_splits, v_dim = partials.shape
    _merge_kernel[(num_heads, num_rows)](
        partials,
        log_sums,
        out,
        num_splits,
        V_DIM=v_dim,
        BLOCK_V=triton.next_power_of_2(v_dim),
        BLOCK_SPLITS=triton.next_power_of_2(num_splits),
        num_warps=4 if num_splits > 4 else 1,
    )


@triton.jit
def _merge_kernel(
    partials,
    log_sums,
    out,
    num_splits,
    V_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    item = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    splits = tl.arange(0, BLOCK_SPLITS)
    cols = tl.arange(0, BLOCK_V)
    log_sum = tl.load(log_sums + item * num_splits + splits, mask=splits < num_splits, other=float("-inf"))
    # At least one span is not empty: every query sees its own token.
    weights = tl.exp2(log_sum - tl.max(log_sum, axis=0))
    used = log_sum > float("-inf")
    values = tl.load(
        partials + (item * num_splits + splits)[:, None] * V_DIM + cols[None, :],
        mask=used[:, None] & (cols < V_DIM)[None, :],
        other=0.0,
    )
    merged = tl.sum(values * weights[:, None], axis=0) / tl.sum(weights, axis=0)
    tl.store(out + item * V_DIM + cols, merged.to(out.dtype.element_ty), mask=cols < V_DIM)
