"""The gated activation between the two matrix products of an MLP."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812 - the name that torch's own documentation uses
from torch import Tensor

from headwater.kernels.dispatch import require, runs_triton


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of `gate_up` [rows, 2 * n], gate first; a new [rows, n] in the same dtype, with float32
    arithmetic on CUDA. One launch."""
    if runs_triton(gate_up):
        from headwater.kernels.activation_triton import silu_and_mul_triton

        return silu_and_mul_triton(gate_up)
    return silu_and_mul_torch(gate_up)


def silu_and_mul_torch(gate_up: Tensor) -> Tensor:
    """`silu_and_mul` in plain torch."""
    check_gate_up(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def check_gate_up(gate_up: Tensor) -> None:
    """What `silu_and_mul` asks of its argument; host data only."""
    require(
        gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0 and gate_up.stride(1) == 1,
        "gate_up [rows, 2 * n], contiguous in the last dimension",
        gate_up=gate_up,
    )
