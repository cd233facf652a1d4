"""Root-mean-square normalisation, alone and with the residual addition that precedes it in a decoder layer.

Sums are taken in float32 whatever the dtype, and the result is rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwater.kernels.dispatch import require, runs_triton


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x²) + eps) * weight` over the last dimension; a new contiguous tensor in x's dtype. One launch."""
    if runs_triton(x):
        from headwater.kernels.norm_triton import rms_norm_triton

        return rms_norm_triton(x, weight, eps)
    return rms_norm_torch(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`s = x + residual`, rounded to their dtype; returns (rms_norm(s), s), both new tensors. One launch."""
    if runs_triton(x):
        from headwater.kernels.norm_triton import add_rms_norm_triton

        return add_rms_norm_triton(x, residual, weight, eps)
    return add_rms_norm_torch(x, residual, weight, eps)


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` in plain torch: one pass for the norms and one for the result."""
    check_norm(x, weight)
    norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    factors = norms.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
    scaled = x.mul(factors) if x.dtype == torch.float32 else x.float().mul_(factors)
    return scaled.mul_(weight).to(x.dtype).contiguous()


def add_rms_norm_torch(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` in plain torch."""
    check_residual(x, residual)
    total = x + residual
    return rms_norm_torch(total, weight, eps), total


def check_norm(x: Tensor, weight: Tensor) -> None:
    """What `rms_norm` asks of its arguments; host data only."""
    require(
        x.dim() >= 1 and weight.shape == x.shape[-1:] and weight.stride(0) == 1 and x.stride(-1) == 1,
        "x [..., dim] contiguous in the last dimension, and weight [dim]",
        x=x,
        weight=weight,
    )


def check_residual(x: Tensor, residual: Tensor) -> None:
    """What `add_rms_norm` asks of its addends; host data only."""
    require(
        x.shape == residual.shape and x.dtype == residual.dtype and x.stride(-1) == 1 and residual.stride(-1) == 1,
        "x and residual of one shape and dtype, contiguous in the last dimension",
        x=x,
        residual=residual,
    )
