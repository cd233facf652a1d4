"""Writing new K and V into the pages of a cache, at the slots that the step's plan gives.

A slot is `page * page_size + offset`. Pages may have any strides (layer-first, page-first) as long as the last
dimension is contiguous. Who owns a page is not known here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwater.kernels.dispatch import require, runs_triton


def store_kv(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """Write `k` [rows, kv_heads, dk] and `v` [rows, kv_heads, dv] into `k_pages` and `v_pages` [pages, page_size,
    kv_heads, d] at `slots` (int64 [rows]).

    Rows of k and v may be strided views. If two rows name one slot, one of them wins: only the dummy page may be
    written so. A slot outside the pages is the caller's bug; on CUDA it is not detected. Raises InvalidArgumentError
    for shapes and dtypes that do not fit. One launch.
    """
    if runs_triton(k):
        from headwater.kernels.store_triton import store_kv_triton

        store_kv_triton(k, v, k_pages, v_pages, slots)
    else:
        store_kv_torch(k, v, k_pages, v_pages, slots)


def store_kv_torch(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """`store_kv` in plain torch."""
    check_store(k, v, k_pages, v_pages, slots)
    _store_plane(k, k_pages, slots)
    _store_plane(v, v_pages, slots)


def _store_plane(rows: Tensor, pages: Tensor, slots: Tensor) -> None:
    page_size = pages.shape[1]
    if pages.stride(0) == page_size * pages.stride(1):  # slots are one evenly strided dimension
        pages.flatten(0, 1).index_copy_(0, slots, rows)
    else:
        pages[slots // page_size, slots % page_size] = rows


def check_store(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """What `store_kv` asks of its arguments; host data only."""
    for rows, pages in ((k, k_pages), (v, v_pages)):
        require(
            rows.dim() == 3
            and pages.dim() == 4
            and rows.shape[1:] == pages.shape[2:]
            and rows.dtype == pages.dtype
            and rows.stride(2) == 1
            and pages.stride(3) == 1,
            "rows [rows, kv_heads, dim] and pages [pages, page_size, kv_heads, dim] of one dtype, "
            "contiguous in the last dimension",
            rows=rows,
            pages=pages,
        )
    require(
        k.shape[0] == v.shape[0]
        and k.shape[1] == v.shape[1]
        and k_pages.shape[:2] == v_pages.shape[:2]
        and slots.shape == (k.shape[0],)
        and slots.dtype == torch.int64,
        "as many rows and heads of k as of v, k_pages and v_pages of equal counts, and one int64 slot per row",
        k=k,
        v=v,
        k_pages=k_pages,
        v_pages=v_pages,
        slots=slots,
    )
