"""`apply_rope` and `rope_and_store` in Triton: one kernel, with the norm and the store compiled in or out.

The contracts are in `rope`.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# ruff: noqa: N803, N806 - compile-time arguments are in capitals, as is the custom in Triton

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headwater.kernels.rope import RopeOrder, check_rope, check_rope_and_store
from headwater.kernels.store_triton import copy_heads


def apply_rope_triton(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor, order: RopeOrder = "halves") -> None:
    """`apply_rope`, one program per row and eight heads."""
    check_rope(q, k, cos_sin, positions, order)
    no_pages = k.unsqueeze(1)
    _launch(q, k, k, cos_sin, positions, no_pages, no_pages, positions, None, None, 0.0, order, store=False)


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
    order: RopeOrder = "halves",
) -> None:
    """`rope_and_store`, one program per row and eight heads."""
    check_rope_and_store(q, k, v, cos_sin, positions, k_pages, v_pages, slots, q_norm, k_norm, order)
    _launch(q, k, v, cos_sin, positions, k_pages, v_pages, slots, q_norm, k_norm, eps, order, store=True)


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
    order: RopeOrder,
    *,
    store: bool,
) -> None:
    num_rows, num_heads, dim = q.shape
    num_kv_heads = k.shape[1]
    if num_rows == 0:
        return
    half = cos_sin.shape[1] // 2
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
        HALF=half,
        HALF_BLOCK=triton.next_power_of_2(half),
        REST=dim - 2 * half,
        REST_BLOCK=triton.next_power_of_2(max(dim - 2 * half, 1)),
        PAIRS=order == "pairs",
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
    REST: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
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
        _rotate(
            at, q_head, at, q_head, heads, num_heads, table, q_weight, eps,
            HALF, HALF_BLOCK, REST, REST_BLOCK, PAIRS, NORM, False,
        )  # fmt: skip
    else:
        heads = (group - num_q_groups) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
        at = k + row * k_row
        if STORE:
            slot = tl.load(slots + row)
            page = slot // PAGE_SIZE
            offset = slot % PAGE_SIZE
            k_slot = k_pages + page * kp_page + offset * kp_token
            v_slot = v_pages + page * vp_page + offset * vp_token
            _rotate(
                at, k_head, k_slot, kp_head, heads, num_kv_heads, table, k_weight, eps,
                HALF, HALF_BLOCK, REST, REST_BLOCK, PAIRS, NORM, True,
            )  # fmt: skip
            copy_heads(v + row * v_row, v_head, v_slot, vp_head, heads, num_kv_heads, V_DIM, V_BLOCK)
        else:
            _rotate(
                at, k_head, at, k_head, heads, num_kv_heads, table, k_weight, eps,
                HALF, HALF_BLOCK, REST, REST_BLOCK, PAIRS, NORM, False,
            )  # fmt: skip


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
    REST: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    NORM: tl.constexpr,
    MOVES: tl.constexpr,
):
    """Rotate (after normalising) some heads of one token, from `source` to `target`, which are the same unless MOVES.
    The REST elements behind the rotated ones are normalised and moved, too."""
    STEP: tl.constexpr = 2 if PAIRS else 1  # from one pair's first element to the next pair's
    APART: tl.constexpr = 1 if PAIRS else HALF  # from a pair's first element to its second
    HAS_REST: tl.constexpr = REST > 0 and (NORM or MOVES)
    pair = tl.arange(0, HALF_BLOCK)
    inside = pair < HALF
    cos = tl.load(table + pair, mask=inside, other=0.0)[None, :]
    sin = tl.load(table + HALF + pair, mask=inside, other=0.0)[None, :]
    present = (heads < num_heads)[:, None]
    mask = present & inside[None, :]
    at = source + heads[:, None] * source_head + pair[None, :] * STEP
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + APART, mask=mask, other=0.0).to(tl.float32)
    if HAS_REST:
        col = 2 * HALF + tl.arange(0, REST_BLOCK)
        rest_inside = col < 2 * HALF + REST
        rest_mask = present & rest_inside[None, :]
        rest = tl.load(source + heads[:, None] * source_head + col[None, :], mask=rest_mask, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        if HAS_REST:
            squares += tl.sum(rest * rest, axis=1)
        factor = tl.rsqrt(squares / (2 * HALF + REST) + eps)[:, None]
        first *= factor * tl.load(weight + pair * STEP, mask=inside, other=0.0).to(tl.float32)[None, :]
        second *= factor * tl.load(weight + pair * STEP + APART, mask=inside, other=0.0).to(tl.float32)[None, :]
        if HAS_REST:
            rest *= factor * tl.load(weight + col, mask=rest_inside, other=0.0).to(tl.float32)[None, :]
    to = target + heads[:, None] * target_head + pair[None, :] * STEP
    tl.store(to, (first * cos - second * sin).to(target.dtype.element_ty), mask=mask)
    tl.store(to + APART, (second * cos + first * sin).to(target.dtype.element_ty), mask=mask)
    if HAS_REST:
        to = target + heads[:, None] * target_head + col[None, :]
        tl.store(to, rest.to(target.dtype.element_ty), mask=rest_mask)
