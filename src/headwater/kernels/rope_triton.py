"""`apply_rope` and `rope_and_store` in Triton: one kernel, with the norm and the store compiled in or out.

The contracts are in `rope`.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# ruff: noqa: N803 - compile-time arguments are in capitals, as is the custom in Triton

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headwater.kernels.dispatch import require
from headwater.kernels.rope import check_rope, check_rope_and_store, rotates_all
from headwater.kernels.store_triton import copy_heads


def apply_rope_triton(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
    """`apply_rope`, one program per row and eight heads."""
    check_rope(q, k, cos_sin, positions)
    no_pages = k.unsqueeze(1)
    _launch(q, k, k, cos_sin, positions, no_pages, no_pages, positions, None, None, 0.0, store=False)


def rope_and_store_triton(
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
) -> None:
    """`rope_and_store`, one program per row and eight heads."""
    check_rope_and_store(q, k, v, cos_sin, positions, k_pages, v_pages, slots, q_norm, k_norm)
    _launch(q, k, v, cos_sin, positions, k_pages, v_pages, slots, q_norm, k_norm, eps, store=True)


def _launch(
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
    eps: float,
    *,
    store: bool,
) -> None:
    require(rotates_all(q, cos_sin), "cos_sin as wide as the heads", q=q, cos_sin=cos_sin)
    num_rows, num_heads, dim = q.shape
    num_kv_heads = k.shape[1]
    if num_rows == 0:
        return
    head_block = min(triton.next_power_of_2(max(num_heads, num_kv_heads)), 8)
    groups = triton.cdiv(num_heads, head_block) + triton.cdiv(num_kv_heads, head_block)
    _rope_kernel[(num_rows, groups)](
        q,
        k,
        v,
        cos_sin,
        positions,
        k_pages,
        v_pages,
        slots,
        cos_sin if q_norm is None else q_norm,
        cos_sin if k_norm is None else k_norm,
        eps,
        num_heads,
        num_kv_heads,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        cos_sin.stride(0),
        *k_pages.stride()[:3],
        *v_pages.stride()[:3],
        PAGE_SIZE=k_pages.shape[1],
        HALF=dim // 2,
        HALF_BLOCK=triton.next_power_of_2(dim // 2),
        V_DIM=v.shape[2],
        V_BLOCK=triton.next_power_of_2(v.shape[2]),
        HEAD_BLOCK=head_block,
        NORM=q_norm is not None,
        STORE=store,
        num_warps=4,
    )


@triton.jit
def _rope_kernel(
    q,
    k,
    v,
    cos_sin,
    positions,
    k_pages,
    v_pages,
    slots,
    q_weight,
    k_weight,
    eps,
    num_heads,
    num_kv_heads,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    table_row,
    kp_page,
    kp_token,
    kp_head,
    vp_page,
    vp_token,
    vp_head,
    PAGE_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    V_DIM: tl.constexpr,
    V_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    STORE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    num_q_groups = tl.cdiv(num_heads, HEAD_BLOCK)
    table = cos_sin + tl.load(positions + row) * table_row
    if group < num_q_groups:
        heads = group * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
        at = q + row * q_row
        _rotate(at, q_head, at, q_head, heads, num_heads, table, q_weight, eps, HALF, HALF_BLOCK, NORM)
    else:
        heads = (group - num_q_groups) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
        at = k + row * k_row
        if STORE:
            slot = tl.load(slots + row)
            page = slot // PAGE_SIZE
            offset = slot % PAGE_SIZE
            k_slot = k_pages + page * kp_page + offset * kp_token
            v_slot = v_pages + page * vp_page + offset * vp_token
            _rotate(at, k_head, k_slot, kp_head, heads, num_kv_heads, table, k_weight, eps, HALF, HALF_BLOCK, NORM)
            copy_heads(v + row * v_row, v_head, v_slot, vp_head, heads, num_kv_heads, V_DIM, V_BLOCK)
        else:
            _rotate(at, k_head, at, k_head, heads, num_kv_heads, table, k_weight, eps, HALF, HALF_BLOCK, NORM)


@triton.jit
def _rotate(
    source,
    source_head,
    target,
    target_head,
    heads,
    num_heads,
    table,
    weight,
    eps,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    NORM: tl.constexpr,
):
    """Rotate (after normalising) some heads of one token, from `source` to `target`, which may be the same."""
    pair = tl.arange(0, HALF_BLOCK)
    inside = pair < HALF
    cos = tl.load(table + pair, mask=inside, other=0.0)[None, :]
    sin = tl.load(table + HALF + pair, mask=inside, other=0.0)[None, :]
    mask = (heads < num_heads)[:, None] & inside[None, :]
    at = source + heads[:, None] * source_head + pair[None, :]
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        mean = (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / (2 * HALF)
        factor = tl.rsqrt(mean + eps)[:, None]
        first *= factor * tl.load(weight + pair, mask=inside, other=0.0).to(tl.float32)[None, :]
        second *= factor * tl.load(weight + HALF + pair, mask=inside, other=0.0).to(tl.float32)[None, :]
    to = target + heads[:, None] * target_head + pair[None, :]
    tl.store(to, (first * cos - second * sin).to(target.dtype.element_ty), mask=mask)
    tl.store(to + HALF, (second * cos + first * sin).to(target.dtype.element_ty), mask=mask)
