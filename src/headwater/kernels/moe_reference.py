"""The experts of a sparse MLP in plain torch: a loop, which is obviously right, and torch's own grouped product.

Shapes throughout: `x` [rows, hidden], `ids` int32 [rows, k], `weights` float32 [rows, k], `gate_up` [experts, 2 ·
inner, hidden] (gate first), `down` [experts, hidden, inner]. A pair is one (row, choice), numbered row · k + choice.
An id outside 0 … experts is somebody else's expert (another rank's): its pair counts for nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwater.kernels.activation import silu_and_mul
from headwater.kernels.dispatch import require


def run_experts_loop(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """[rows, hidden]: for each row, the weighted sum of its experts' outputs, in float32 (float64 for float64), in
    the order of the experts. Reads the ids on the host."""
    check_experts(x, ids, weights, gate_up, down)
    out = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
    for expert in ids.unique().tolist():
        if 0 <= expert < len(gate_up):
            rows, choices = (ids == expert).nonzero(as_tuple=True)
            inner = silu_and_mul(x[rows] @ gate_up[expert].T)
            outer = (inner @ down[expert].T).to(out.dtype)
            out.index_add_(0, rows, outer * weights[rows, choices, None].to(out.dtype))
    return out.to(x.dtype)


def run_experts_grouped(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The same with `torch._grouped_mm`, without a loop and without waiting for the device. Every id must be one of
    the experts here."""
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
    return flat.argsort(stable=True), torch.zeros(num_experts + 1, dtype=torch.int32, device=ids.device).index_add_(
        0, flat, torch.ones_like(flat, dtype=torch.int32)
    )[:num_experts]


def check_experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> None:
    """What `run_experts` asks of its arguments; host data only."""
    require(
        x.dim() == ids.dim() == 2
        and ids.shape[0] == x.shape[0]
        and ids.shape == weights.shape
        and ids.shape[1] > 0
        and ids.dtype == torch.int32
        and weights.dtype == torch.float32
        and ids.is_contiguous()
        and weights.is_contiguous(),
        "x [rows, hidden], ids int32 [rows, k] and weights float32 [rows, k], both contiguous",
        x=x,
        ids=ids,
        weights=weights,
    )
    require(
        gate_up.dim() == down.dim() == 3
        and gate_up.shape[0] == down.shape[0]
        and gate_up.shape[1] == 2 * down.shape[2]
        and gate_up.shape[2] == down.shape[1] == x.shape[1]
        and x.dtype == gate_up.dtype == down.dtype
        and x.stride(1) == gate_up.stride(2) == down.stride(2) == 1,
        "gate_up [experts, 2 · inner, hidden] and down [experts, hidden, inner] of x's dtype and width, contiguous in "
        "the last dimension",
        x=x,
        gate_up=gate_up,
        down=down,
    )
