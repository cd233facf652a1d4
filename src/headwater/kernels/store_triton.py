"""`store_kv` in Triton; the contract is in `store`."""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# ruff: noqa: N803 - compile-time arguments are in capitals, as is the custom in Triton

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headwater.kernels.store import check_store


def store_kv_triton(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """`store_kv`, one program per row."""
    check_store(k, v, k_pages, v_pages, slots)
    num_rows, num_kv_heads, k_dim = k.shape
    if num_rows == 0:
        return
    v_dim = v.shape[2]
    head_block = min(triton.next_power_of_2(num_kv_heads), 8)
    _store_kernel[(num_rows, triton.cdiv(num_kv_heads, head_block))](
        k,
        v,
        k_pages,
        v_pages,
        slots,
        num_kv_heads,
        *k.stride()[:2],
        *v.stride()[:2],
        *k_pages.stride()[:3],
        *v_pages.stride()[:3],
        PAGE_SIZE=k_pages.shape[1],
        K_DIM=k_dim,
        V_DIM=v_dim,
        K_BLOCK=triton.next_power_of_2(k_dim),
        V_BLOCK=triton.next_power_of_2(v_dim),
        HEAD_BLOCK=head_block,
        num_warps=4,
    )


@triton.jit
def _store_kernel(
    k,
    v,
    k_pages,
    v_pages,
    slots,
    num_kv_heads,
    k_row,
    k_head,
    v_row,
    v_head,
    kp_page,
    kp_token,
    kp_head,
    vp_page,
    vp_token,
    vp_head,
    PAGE_SIZE: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    slot = tl.load(slots + row)
    copy_heads(
        k + row * k_row,
        k_head,
        k_pages + slot // PAGE_SIZE * kp_page + slot % PAGE_SIZE * kp_token,
        kp_head,
        heads,
        num_kv_heads,
        K_DIM,
        K_BLOCK,
    )
    copy_heads(
        v + row * v_row,
        v_head,
        v_pages + slot // PAGE_SIZE * vp_page + slot % PAGE_SIZE * vp_token,
        vp_head,
        heads,
        num_kv_heads,
        V_DIM,
        V_BLOCK,
    )


@triton.jit
def copy_heads(
    source,
    source_head,
    target,
    target_head,
    heads,
    num_heads,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy some heads of one token."""
    cols = tl.arange(0, BLOCK)
    mask = (heads < num_heads)[:, None] & (cols < DIM)[None, :]
    values = tl.load(source + heads[:, None] * source_head + cols[None, :], mask=mask)
    tl.store(target + heads[:, None] * target_head + cols[None, :], values, mask=mask)
