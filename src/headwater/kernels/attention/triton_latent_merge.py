"""Joining partial results of latent attention over disjoint spans, any of which may be empty, with the log-sum-exp.

`triton_merge` joins those of other attention: narrower, without empty rows, and so with less work.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# ruff: noqa: N803 - compile-time arguments are in capitals, as is the custom in Triton

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_MAX_COLS = 128
"""Columns of one program: 64 spans of them are what its registers hold."""


def merge_latent_splits(partials: Tensor, log_sums: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
    """`partials` float32 [rows, heads, splits, v_dim], each normalised over its own span; `log_sums` float32 [rows,
    heads, splits], the base-2 logarithm of each span's sum of exponentials, -inf for an empty span, whose partial is
    not read. Writes `out` [rows, heads, v_dim], contiguous, and the natural log-sum-exp into `lse` [rows, heads];
    where all spans are empty, 0 and -inf. One launch.
    """
    num_rows, num_heads, num_splits, v_dim = partials.shape
    block_v = min(triton.next_power_of_2(v_dim), _MAX_COLS)
    _latent_merge_kernel[(num_heads, num_rows, triton.cdiv(v_dim, block_v))](
        partials,
        log_sums,
        out,
        log_sums if lse is None else lse,
        num_splits,
        V_DIM=v_dim,
        BLOCK_V=block_v,
        BLOCK_SPLITS=triton.next_power_of_2(num_splits),
        LSE=lse is not None,
        num_warps=4 if num_splits > 4 else 1,
    )


@triton.jit
def _latent_merge_kernel(
    partials,
    log_sums,
    out,
    lse,
    num_splits,
    V_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    LSE: tl.constexpr,
):
    item = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    splits = tl.arange(0, BLOCK_SPLITS)
    cols = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    log_sum = tl.load(log_sums + item * num_splits + splits, mask=splits < num_splits, other=float("-inf"))
    top = tl.max(log_sum, axis=0)
    # Where every span is empty, -inf - -inf would be NaN.
    weights = tl.exp2(log_sum - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weights, axis=0)
    used = log_sum > float("-inf")
    values = tl.load(
        partials + (item * num_splits + splits)[:, None] * V_DIM + cols[None, :],
        mask=used[:, None] & (cols < V_DIM)[None, :],
        other=0.0,
    )
    merged = tl.sum(values * weights[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out + item * V_DIM + cols, merged.to(out.dtype.element_ty), mask=cols < V_DIM)
    if LSE and tl.program_id(2) == 0:
        tl.store(lse + item, (top + tl.log2(tl.where(total > 0.0, total, 1.0))) * 0.6931471805599453)
