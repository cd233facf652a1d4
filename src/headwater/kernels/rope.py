"""Rotary position embedding, alone and fused with what surrounds it in a layer.

Tables of cosines and sines are the models' business; here they are an argument. The table's width says how much of a
head is rotated, from its first element on; the rest passes through.

    halves    (x0, x_half), (x1, x_half+1), …     Llama, Qwen, Mixtral, GLM
    pairs     (x0, x1), (x2, x3), …               DeepSeek; the order of the `rope` plane of latent attention
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from headwater.kernels.dispatch import require, runs_triton
from headwater.kernels.norm import check_norm, rms_norm_torch
from headwater.kernels.store import check_store, store_kv_torch

RopeOrder = Literal["halves", "pairs"]
"""Which two elements of a head turn together."""


def apply_rope(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor, order: RopeOrder = "halves") -> None:
    """Rotate `q` [rows, heads, dim] and `k` [rows, kv_heads, dim] in place; strided views will do.

    `cos_sin` is float32 [max_len, width], the cosines of the width / 2 angles and then their sines in either order;
    width is at most dim, and elements from width on stay as they are. `positions` is int64 [rows]. A position outside
    the table is the caller's bug; on CUDA it is not detected. One launch.
    """
    if runs_triton(q):
        from headwater.kernels.rope_triton import apply_rope_triton

        apply_rope_triton(q, k, cos_sin, positions, order)
    else:
        apply_rope_torch(q, k, cos_sin, positions, order)


def rope_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    order: RopeOrder = "halves",
) -> None:
    """Everything between a layer's QKV product and its attention, in one launch.

        q  ←  rope(rms_norm(q, q_norm))       in place (no norm where q_norm is None)
        k_pages[slots]  ←  rope(rms_norm(k, k_norm))
        v_pages[slots]  ←  v

    Shapes are those of `apply_rope` and `store_kv`; `q_norm` and `k_norm` are [dim], given together or not at all,
    and apply to each head. What `k` holds afterwards is unspecified. Returns nothing: `q` is ready for attention.
    """
    if runs_triton(q):
        from headwater.kernels.rope_triton import rope_and_store_triton

        rope_and_store_triton(q, k, v, cos_sin, positions, k_pages, v_pages, slots, q_norm, k_norm, eps, order)
    else:
        rope_and_store_torch(q, k, v, cos_sin, positions, k_pages, v_pages, slots, q_norm, k_norm, eps, order)


def apply_rope_torch(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor, order: RopeOrder = "halves") -> None:
    """`apply_rope` in plain torch."""
    check_rope(q, k, cos_sin, positions, order)
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    width = cos_sin.shape[1]
    _rotate(q[..., :width], cos, sin, order)
    _rotate(k[..., :width], cos, sin, order)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, order: RopeOrder) -> None:
    wide = x if x.dtype == torch.float32 else x.float()
    first, second = wide.chunk(2, dim=-1) if order == "halves" else (wide[..., ::2], wide[..., 1::2])
    crossed = first * sin
    first.mul_(cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).add_(crossed)
    if wide is not x:
        x.copy_(wide)


def rope_and_store_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    order: RopeOrder = "halves",
) -> None:
    """`rope_and_store` composed of the simple functions."""
    check_rope_and_store(q, k, v, cos_sin, positions, k_pages, v_pages, slots, q_norm, k_norm, order)
    if q_norm is not None and k_norm is not None:
        q.copy_(rms_norm_torch(q, q_norm, eps))
        k = rms_norm_torch(k, k_norm, eps)
    apply_rope_torch(q, k, cos_sin, positions, order)
    store_kv_torch(k, v, k_pages, v_pages, slots)


def check_rope(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor, order: RopeOrder) -> None:
    """What `apply_rope` asks of its arguments; host data only."""
    require(
        q.dim() == k.dim() == 3
        and q.shape[0] == k.shape[0]
        and q.shape[2] == k.shape[2]
        and q.dtype == k.dtype
        and q.stride(2) == k.stride(2) == 1,
        "q [rows, heads, dim] and k [rows, kv_heads, dim] of one dtype, contiguous in the last dimension",
        q=q,
        k=k,
    )
    require(
        cos_sin.dim() == 2
        and 0 < cos_sin.shape[1] <= q.shape[2]
        and cos_sin.shape[1] % 2 == 0
        and cos_sin.dtype == torch.float32
        and cos_sin.stride(1) == 1
        and positions.shape == (q.shape[0],)
        and positions.dtype == torch.int64,
        "cos_sin float32 [max_len, width], width even and at most dim, and positions int64 [rows]",
        q=q,
        cos_sin=cos_sin,
        positions=positions,
    )
    require(order in get_args(RopeOrder), "an order out of halves, pairs", order=order)


def check_rope_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    order: RopeOrder,
) -> None:
    """What `rope_and_store` asks of its arguments; host data only."""
    check_rope(q, k, cos_sin, positions, order)
    check_store(k, v, k_pages, v_pages, slots)
    require(
        (q_norm is None) == (k_norm is None), "q_norm and k_norm together, or neither", q_norm=q_norm, k_norm=k_norm
    )
    if q_norm is not None and k_norm is not None:
        check_norm(q, q_norm)
        check_norm(k, k_norm)
