"""Attention of one query per request over paged KV (decode), with the KV cut into spans that run in parallel.

The number of spans is fixed when the kernel is launched, their length is computed on the device from `kv_lens`: a
captured CUDA graph stays right for every length that its page table can hold.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# ruff: noqa: N803 - compile-time arguments are in capitals, as is the custom in Triton

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.kernels.attention.triton_merge import merge_splits
from headwater.kernels.attention.triton_tiles import TileConfig, attend_span, store_rows


def decode_config(dtype: torch.dtype, dim: int, group: int, *, deep: bool) -> TileConfig:
    """The tile shape for these operands; tl.dot wants at least 16 rows, so small groups are padded.

    `deep` keeps more loads in flight per program, in twice the shared memory (72 KiB): for two programs per
    multiprocessor or fewer. With more of them, each other's loads hide the latency.
    """
    rows = max(16, triton.next_power_of_2(group))
    if dtype.itemsize > 2 or dim > 128:
        return TileConfig(rows, 32, 4, 3)
    return TileConfig(rows, 64, 4, 5 if deep else 3)


def decode_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    out: Tensor,
    *,
    kv_lens: Tensor,
    page_table: Tensor,
    scale: float,
    config: TileConfig,
    num_splits: int,
    min_split_tokens: int,
) -> None:
    """Attend for `q` [n, heads, dim], row i being request i's only query. One launch, or two with `num_splits` > 1;
    no span is shorter than `min_split_tokens`, so short requests leave some of the splits empty."""
    num_rows, num_heads, dim = q.shape
    num_kv_heads, v_dim = v_pages.shape[2:]
    target, log_sums = out, out
    if num_splits > 1:
        target = q.new_empty(num_rows, num_heads, num_splits, v_dim, dtype=torch.float32)
        log_sums = q.new_empty(num_rows, num_heads, num_splits, dtype=torch.float32)
    _decode_kernel[(num_kv_heads, num_rows, num_splits)](
        q,
        k_pages,
        v_pages,
        target,
        log_sums,
        kv_lens,
        page_table,
        scale * math.log2(math.e),
        triton.cdiv(min_split_tokens, config.block_tokens),
        num_heads,
        page_table.stride(0),
        *q.stride()[:2],
        *k_pages.stride()[:3],
        *v_pages.stride()[:3],
        GROUP=num_heads // num_kv_heads,
        PAGE_SIZE=k_pages.shape[1],
        K_DIM=dim,
        V_DIM=v_dim,
        BLOCK_K=max(16, triton.next_power_of_2(dim)),
        BLOCK_V=max(16, triton.next_power_of_2(v_dim)),
        BLOCK_ROWS=config.block_rows,
        BLOCK_TOKENS=config.block_tokens,
        SPLIT=num_splits > 1,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if num_splits > 1:
        merge_splits(target, log_sums, out)


@triton.jit
def _decode_kernel(
    q,
    k_pages,
    v_pages,
    out,
    log_sums,
    kv_lens,
    page_table,
    scale,
    min_split_blocks,
    num_heads,
    table_row,
    q_row,
    q_head,
    k_page,
    k_token,
    k_head,
    v_page,
    v_token,
    v_head,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    kv_head = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    kv_len = tl.load(kv_lens + request)
    begin = 0
    end = kv_len
    if SPLIT:
        blocks = tl.cdiv(tl.cdiv(kv_len, BLOCK_TOKENS), tl.num_programs(2))
        split_tokens = tl.maximum(blocks, min_split_blocks) * BLOCK_TOKENS
        begin = split * split_tokens
        end = tl.minimum(begin + split_tokens, kv_len)

    packed = tl.arange(0, BLOCK_ROWS)
    valid = packed < GROUP
    heads = kv_head * GROUP + packed
    rows = tl.zeros([BLOCK_ROWS], tl.int64) + request
    if SPLIT and begin >= end:
        empty = (rows * num_heads + heads) * tl.num_programs(2) + split
        tl.store(log_sums + empty, tl.full([BLOCK_ROWS], float("-inf"), tl.float32), mask=valid)
        return
    cols = tl.arange(0, BLOCK_K)
    q_at = q + request * q_row + heads[:, None] * q_head + cols[None, :]
    q_tile = tl.load(q_at, mask=valid[:, None] & (cols < K_DIM)[None, :], other=0.0)
    positions = tl.zeros([BLOCK_ROWS], tl.int32) + kv_len - 1

    row_max = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_ROWS], tl.float32)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_V], tl.float32)
    acc, row_max, row_sum = attend_span(
        acc, row_max, row_sum, q_tile, k_pages + kv_head * k_head, v_pages + kv_head * v_head,
        page_table + request * table_row, positions, begin, end, scale, k_page, k_token, v_page, v_token,
        PAGE_SIZE, K_DIM, V_DIM, BLOCK_K, BLOCK_V, BLOCK_TOKENS, PRECISION, True,
    )  # fmt: skip
    store_rows(
        acc, row_max, row_sum, out, log_sums, rows, heads, valid, num_heads, split, tl.num_programs(2),
        V_DIM, BLOCK_V, SPLIT,
    )  # fmt: skip
