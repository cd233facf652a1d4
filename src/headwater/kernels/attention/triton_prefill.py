"""Causal attention of ragged queries over paged KV (prefill, with or without a prefix already in the pages).

A program takes a tile of consecutive queries of one request and all query heads of one KV head, packed into the rows
of one score tile, so that K and V are read once per group of heads. Scores exist only tile by tile.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# ruff: noqa: N803, N806 - compile-time arguments are in capitals, as is the custom in Triton

from __future__ import annotations

import math
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.kernels.attention.triton_merge import merge_splits
from headwater.kernels.attention.triton_tiles import TileConfig, attend_span, store_rows

_HALF_CONFIGS = (TileConfig(128, 128, 8, 5), TileConfig(128, 128, 8, 3), TileConfig(64, 64, 4, 3))
_WIDE_CONFIGS = (TileConfig(64, 32, 4, 3),)
_SMALL_CONFIG = TileConfig(32, 32, 4, 2)


def prefill_config(dtype: torch.dtype, dim: int, group: int, shared_bytes: int) -> TileConfig:
    """The tile shape for these operands: the first, in the order measured on an H200, that fits `shared_bytes` of
    shared memory per block."""
    candidates = () if dtype.itemsize > 2 else _HALF_CONFIGS if dim <= 128 else _WIDE_CONFIGS
    block_k = max(16, triton.next_power_of_2(dim))
    config = _SMALL_CONFIG
    for candidate in candidates:
        # Triton keeps three buffers of K and V at five stages and two below, beside the queries and some room.
        buffers = 3 if candidate.num_stages > 4 else 2
        elements = (candidate.block_rows + 2 * buffers * candidate.block_tokens) * block_k
        if elements * dtype.itemsize + 2048 <= shared_bytes:
            config = candidate
            break
    return replace(config, block_rows=max(config.block_rows, triton.next_power_of_2(group)))


def prefill_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    out: Tensor,
    *,
    row_base: int,
    tiles: Tensor,
    query_starts: Tensor,
    kv_lens: Tensor,
    page_table: Tensor,
    scale: float,
    config: TileConfig,
    num_splits: int,
    split_tokens: int,
) -> None:
    """Attend for the queries that `tiles` (int32 [n, 2]: request, first query within it) names, writing their rows
    of `out`. `q` and `out` begin at the step's row `row_base`; `query_starts` counts from the step's first.

    With `num_splits` > 1 the KV is cut every `split_tokens` (a multiple of the config's block_tokens) and merged by a
    second launch, which is worth it where there are fewer tiles than multiprocessors.
    """
    num_rows, num_heads, dim = q.shape
    num_kv_heads, v_dim = v_pages.shape[2:]
    target, log_sums = out, out
    if num_splits > 1:
        target = q.new_empty(num_rows, num_heads, num_splits, v_dim, dtype=torch.float32)
        log_sums = q.new_empty(num_rows, num_heads, num_splits, dtype=torch.float32)
    _prefill_kernel[(num_kv_heads, tiles.shape[0], num_splits)](
        q,
        k_pages,
        v_pages,
        target,
        log_sums,
        tiles,
        query_starts,
        kv_lens,
        page_table,
        scale * math.log2(math.e),
        split_tokens,
        row_base,
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
def _prefill_kernel(
    q,
    k_pages,
    v_pages,
    out,
    log_sums,
    tiles,
    query_starts,
    kv_lens,
    page_table,
    scale,
    split_tokens,
    row_base,
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
    TILE_QUERIES: tl.constexpr = BLOCK_ROWS // GROUP
    kv_head = tl.program_id(0)
    tile = tl.program_id(1)
    split = tl.program_id(2)
    request = tl.load(tiles + 2 * tile)
    first_query = tl.load(tiles + 2 * tile + 1)
    first_row = tl.load(query_starts + request)
    query_len = tl.load(query_starts + request + 1) - first_row
    kv_len = tl.load(kv_lens + request)
    if first_query >= query_len:
        return

    packed = tl.arange(0, BLOCK_ROWS)
    query = first_query + packed // GROUP
    valid = (packed // GROUP < TILE_QUERIES) & (query < query_len)
    rows = first_row - row_base + query
    heads = kv_head * GROUP + packed % GROUP
    cols = tl.arange(0, BLOCK_K)
    q_at = q + rows.to(tl.int64)[:, None] * q_row + heads[:, None] * q_head + cols[None, :]
    q_tile = tl.load(q_at, mask=valid[:, None] & (cols < K_DIM)[None, :], other=0.0)

    #   0 … whole    every row of the tile sees every token, in whole blocks
    #   whole … end  the diagonal and the last, incomplete block: masked
    first_position = kv_len - query_len + first_query
    positions = kv_len - query_len + query
    begin = 0
    end = tl.minimum(first_position + TILE_QUERIES, kv_len)
    whole = (first_position + 1) // BLOCK_TOKENS * BLOCK_TOKENS
    if SPLIT:
        begin = split * split_tokens
        end = tl.minimum(end, begin + split_tokens)
        whole = tl.maximum(begin, tl.minimum(whole, begin + split_tokens))

    row_max = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_ROWS], tl.float32)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_V], tl.float32)
    k_base = k_pages + kv_head * k_head
    v_base = v_pages + kv_head * v_head
    pages = page_table + request.to(tl.int64) * table_row
    acc, row_max, row_sum = attend_span(
        acc, row_max, row_sum, q_tile, k_base, v_base, pages, positions, begin, whole, scale,
        k_page, k_token, v_page, v_token,
        PAGE_SIZE, K_DIM, V_DIM, BLOCK_K, BLOCK_V, BLOCK_TOKENS, PRECISION, False,
    )  # fmt: skip
    acc, row_max, row_sum = attend_span(
        acc, row_max, row_sum, q_tile, k_base, v_base, pages, positions, whole, end, scale,
        k_page, k_token, v_page, v_token,
        PAGE_SIZE, K_DIM, V_DIM, BLOCK_K, BLOCK_V, BLOCK_TOKENS, PRECISION, True,
    )  # fmt: skip
    store_rows(
        acc, row_max, row_sum, out, log_sums, rows, heads, valid, num_heads, split, tl.num_programs(2),
        V_DIM, BLOCK_V, SPLIT,
    )  # fmt: skip
