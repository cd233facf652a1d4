"""`rms_norm` and `add_rms_norm` in Triton; the contracts are in `norm`."""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# ruff: noqa: N803 - compile-time arguments are in capitals, as is the custom in Triton

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.kernels.norm import check_norm, check_residual


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm`, one program per row. Copies x first if its leading dimensions cannot be seen as one."""
    check_norm(x, weight)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch(x, None, weight, eps, out, None)
    return out


def add_rms_norm_triton(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`add_rms_norm`, one program per row."""
    check_norm(x, weight)
    check_residual(x, residual)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = torch.empty_like(out)
    _launch(x, residual, weight, eps, out, total)
    return out, total


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor, total: Tensor | None) -> None:
    dim = x.shape[-1]
    rows = x.reshape(-1, dim)
    residual_rows = rows if residual is None else residual.reshape(-1, dim)
    if rows.shape[0] == 0:
        return
    block = triton.next_power_of_2(dim)
    _rms_norm_kernel[(rows.shape[0],)](
        rows,
        residual_rows,
        weight,
        out,
        out if total is None else total,
        eps,
        rows.stride(0),
        residual_rows.stride(0),
        ADD=residual is not None,
        DIM=dim,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
    )


@triton.jit
def _rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    total,
    eps,
    x_row,
    residual_row,
    ADD: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < DIM
    values = tl.load(x + row * x_row + cols, mask=mask, other=0.0).to(tl.float32)
    weights = tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(residual + row * residual_row + cols, mask=mask, other=0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + row * DIM + cols, rounded, mask=mask)
        values = rounded.to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values, axis=0) / DIM + eps)
    tl.store(out + row * DIM + cols, (values * factor * weights).to(out.dtype.element_ty), mask=mask)
