"""`silu_and_mul` in Triton; the contract is in `activation`."""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# ruff: noqa: N803 - compile-time arguments are in capitals, as is the custom in Triton

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headwater.kernels.activation import check_gate_up

_BLOCK = 1024


def silu_and_mul_triton(gate_up: Tensor) -> Tensor:
    """`silu_and_mul`, one program per 1,024 elements of a row."""
    check_gate_up(gate_up)
    num_rows, width = gate_up.shape
    out = gate_up.new_empty(num_rows, width // 2)
    if out.numel():
        grid = (num_rows, triton.cdiv(width // 2, _BLOCK))
        _silu_and_mul_kernel[grid](gate_up, out, gate_up.stride(0), width // 2, BLOCK=_BLOCK, num_warps=4)
    return out


@triton.jit
def _silu_and_mul_kernel(
    gate_up,
    out,
    row_stride,
    num_cols,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < num_cols
    gate = tl.load(gate_up + row * row_stride + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + num_cols + cols, mask=mask, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * num_cols + cols, result.to(out.dtype.element_ty), mask=mask)
