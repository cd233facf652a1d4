"""Absorbed latent attention (MLA) over pages, for decodes and for chunks of several queries: one kernel.

A program takes the heads of some consecutive queries as the rows of a score tile, so that a tile of latents is read
once for up to 64 rows. It is loaded once and used twice, as K (beside the rotary keys, in a product of their own: a
joint width of 576 would be padded to 1024) and as V. The KV is cut on the device: fixed grids, no waiting.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# ruff: noqa: N803, N806 - compile-time arguments are in capitals, as is the custom in Triton

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.kernels.attention.triton_latent_merge import merge_latent_splits
from headwater.kernels.attention.triton_tiles import TileConfig, find_tokens, load_tokens, store_rows, take_scores

_MAX_ROWS = 64
"""More rows of 512 float32 sums than these do not fit the registers of a block."""
_HALF_CONFIGS = {
    16: (TileConfig(16, 64, 4, 2), TileConfig(16, 32, 4, 2), TileConfig(16, 16, 4, 2)),
    32: (TileConfig(32, 32, 4, 3), TileConfig(32, 16, 4, 2)),
    64: (TileConfig(64, 64, 8, 2), TileConfig(64, 32, 8, 3), TileConfig(64, 16, 4, 2)),
}
"""By rows; the first that fits the shared memory is taken. The first of all are the best on an H200 of those that
tests/gpu/tune_moe_mla.py tries."""
_MAX_SPLITS = 64
_MIN_SPLIT = 128
_LONG_SPLIT = 8192
"""A request this long is cut even where there are enough programs to fill the device: it would finish last."""


def latent_config(dtype: torch.dtype, num_rows: int, width: int, shared_bytes: int) -> TileConfig:
    """The tile shape for `num_rows` = heads × the queries that may share a tile; `width` is latent and rope."""
    rows = min(max(triton.next_power_of_2(num_rows), 16), _MAX_ROWS)
    if dtype.itemsize > 2:
        return TileConfig(16, 16, 4, 2)
    for config in _HALF_CONFIGS[rows]:
        # Compiled for sm_90, these keep at most two buffers of latents beside the queries (other stages load pages),
        # and the weights of a block.
        numbers = (config.block_rows + 2 * config.block_tokens) * width + config.block_rows * config.block_tokens
        if numbers * dtype.itemsize <= shared_bytes:
            return config
    return TileConfig(16, 16, 4, 2)


def programs_a_multiprocessor(config: TileConfig) -> int:
    """How many run at once: two hide each other's waiting where the arithmetic is little."""
    return 2 if config.block_rows == 16 else 1


def warps_share_rows(config: TileConfig) -> bool:
    """Whether warps must divide the tokens of a block as well, or each score would be computed twice: a warp takes 16
    rows. (Tiles of fewer than 64 rows are computed by other instructions, where Triton divides the tokens anyway.)"""
    return config.block_rows >= 64 and config.block_rows < 16 * config.num_warps


def latent_splits(num_programs: int, max_kv_len: int, num_sms: int) -> tuple[int, int]:
    """(number of splits, least tokens per split) for `num_programs` = tiles × groups of heads, of which the device runs
    `num_sms` at once: those that keep the last wave full, at the price of a merge."""

    def cost(splits: int) -> float:
        waves = -(-num_programs * splits // num_sms)
        return waves / splits + (0.02 + 0.014 * num_programs * splits / num_sms) * (splits > 1)

    most = min(-(-max_kv_len // _MIN_SPLIT), _MAX_SPLITS if num_programs * 8 <= num_sms else 8)
    wanted = min(range(1, max(most, 1) + 1), key=cost)
    for_long = min(-(-max_kv_len // _LONG_SPLIT), 8)
    if wanted == 1:
        return max(for_long, 1), _LONG_SPLIT
    return max(wanted, for_long), _MIN_SPLIT


def latent_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    latent_pages: Tensor,
    rope_pages: Tensor,
    out: Tensor,
    lse: Tensor | None,
    *,
    tiles: Tensor | None,
    row_base: int,
    query_starts: Tensor,
    kv_lens: Tensor,
    page_table: Tensor,
    scale: float,
    config: TileConfig,
    num_splits: int,
    min_split_tokens: int,
) -> None:
    """Attend, writing `out` and, if given, `lse`. One launch, or two with `num_splits` > 1.

    Without `tiles`, row i is request i's only query. Otherwise `tiles` (int32 [n, 2]: request, first query within it)
    names the tiles of `tile_queries` queries; `q_latent`, `q_rope`, `out` and `lse` begin at the step's row
    `row_base`, while `query_starts` counts from the step's first. No span is shorter than `min_split_tokens`.
    """
    num_rows, num_heads, latent_dim = q_latent.shape
    rope_dim = q_rope.shape[2]
    heads = head_block(num_heads, config)
    target, sums = out, out if lse is None else lse
    if num_splits > 1:
        target = out.new_empty(num_rows, num_heads, num_splits, latent_dim, dtype=torch.float32)
        sums = out.new_empty(num_rows, num_heads, num_splits, dtype=torch.float32)
    num_tiles = num_rows if tiles is None else tiles.shape[0]
    _latent_kernel[(triton.cdiv(num_heads, heads), num_tiles, num_splits)](
        q_latent,
        q_rope,
        latent_pages,
        rope_pages,
        target,
        sums,
        kv_lens if tiles is None else tiles,
        query_starts,
        kv_lens,
        page_table,
        scale * math.log2(math.e),
        triton.cdiv(min_split_tokens, config.block_tokens),
        row_base,
        num_heads,
        page_table.stride(0),
        *q_latent.stride()[:2],
        *q_rope.stride()[:2],
        *latent_pages.stride()[:2],
        *rope_pages.stride()[:2],
        HEAD_BLOCK=heads,
        PAGE_SIZE=latent_pages.shape[1],
        LATENT=latent_dim,
        ROPE=rope_dim,
        BLOCK_LATENT=max(16, triton.next_power_of_2(latent_dim)),
        BLOCK_ROPE=max(16, triton.next_power_of_2(rope_dim)),
        BLOCK_ROWS=config.block_rows,
        BLOCK_TOKENS=config.block_tokens,
        TILED=tiles is not None,
        SPLIT=num_splits > 1,
        LSE=lse is not None,
        PRECISION="ieee" if q_latent.dtype == torch.float32 else "tf32",
        BRANCHED=warps_share_rows(config),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if num_splits > 1:
        merge_latent_splits(target, sums, out, lse)


def head_block(num_heads: int, config: TileConfig) -> int:
    """Heads of one query in a tile."""
    return int(min(triton.next_power_of_2(num_heads), config.block_rows))


def tile_queries(num_heads: int, config: TileConfig) -> int:
    """Queries in a tile."""
    return config.block_rows // head_block(num_heads, config)


@triton.jit
def _latent_kernel(
    q_latent,
    q_rope,
    latent_pages,
    rope_pages,
    out,
    sums,
    tiles,
    query_starts,
    kv_lens,
    page_table,
    scale,
    min_split_blocks,
    row_base,
    num_heads,
    table_row,
    ql_row,
    ql_head,
    qr_row,
    qr_head,
    l_page,
    l_token,
    r_page,
    r_token,
    HEAD_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILED: tl.constexpr,
    SPLIT: tl.constexpr,
    LSE: tl.constexpr,
    PRECISION: tl.constexpr,
    BRANCHED: tl.constexpr,
):
    TILE_QUERIES: tl.constexpr = BLOCK_ROWS // HEAD_BLOCK if TILED else 1
    packed = tl.arange(0, BLOCK_ROWS)
    heads = tl.program_id(0) * HEAD_BLOCK + packed % HEAD_BLOCK
    split = tl.program_id(2)
    if TILED:
        request = tl.load(tiles + 2 * tl.program_id(1)).to(tl.int64)
        first_query = tl.load(tiles + 2 * tl.program_id(1) + 1)
        first_row = tl.load(query_starts + request)
        query_len = tl.load(query_starts + request + 1) - first_row
        first_row -= row_base
        if first_query >= query_len:
            return
    else:
        request = tl.program_id(1).to(tl.int64)
        first_query = 0
        first_row = request
        query_len = 1
    kv_len = tl.load(kv_lens + request)
    query = first_query + packed // HEAD_BLOCK
    valid = (packed // HEAD_BLOCK < TILE_QUERIES) & (query < query_len) & (heads < num_heads)
    positions = kv_len - query_len + query
    rows = (first_row + query).to(tl.int64)

    #   begin … whole    every row of the tile sees every token, in whole blocks
    #   whole … end      the diagonal and the last, incomplete block: masked
    first_position = kv_len - query_len + first_query
    begin = 0
    end = tl.maximum(tl.minimum(first_position + TILE_QUERIES, kv_len), 0)
    whole = tl.maximum(first_position + 1, 0) // BLOCK_TOKENS * BLOCK_TOKENS
    if SPLIT:
        blocks = tl.cdiv(tl.cdiv(end, BLOCK_TOKENS), tl.num_programs(2))
        split_tokens = tl.maximum(blocks, min_split_blocks) * BLOCK_TOKENS
        begin = split * split_tokens
        end = tl.minimum(begin + split_tokens, end)
        whole = tl.maximum(begin, tl.minimum(whole, end // BLOCK_TOKENS * BLOCK_TOKENS))
        if begin >= end:
            empty = (rows * num_heads + heads) * tl.num_programs(2) + split
            tl.store(sums + empty, tl.full([BLOCK_ROWS], float("-inf"), tl.float32), mask=valid)
            return

    l_cols = tl.arange(0, BLOCK_LATENT)
    r_cols = tl.arange(0, BLOCK_ROPE)
    ql = tl.load(
        q_latent + rows[:, None] * ql_row + heads[:, None] * ql_head + l_cols[None, :],
        mask=valid[:, None] & (l_cols < LATENT)[None, :],
        other=0.0,
    )
    qr = tl.load(
        q_rope + rows[:, None] * qr_row + heads[:, None] * qr_head + r_cols[None, :],
        mask=valid[:, None] & (r_cols < ROPE)[None, :],
        other=0.0,
    )
    row_max = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_ROWS], tl.float32)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_LATENT], tl.float32)
    pages = page_table + request * table_row
    if BRANCHED:
        acc, row_max, row_sum = _attend_span(
            acc, row_max, row_sum, ql, qr, latent_pages, rope_pages, pages, positions, begin, whole, end, scale,
            l_page, l_token, r_page, r_token,
            PAGE_SIZE, LATENT, ROPE, BLOCK_LATENT, BLOCK_ROPE, BLOCK_TOKENS, PRECISION, True, True,
        )  # fmt: skip
    else:
        acc, row_max, row_sum = _attend_span(
            acc, row_max, row_sum, ql, qr, latent_pages, rope_pages, pages, positions, begin, whole, whole, scale,
            l_page, l_token, r_page, r_token,
            PAGE_SIZE, LATENT, ROPE, BLOCK_LATENT, BLOCK_ROPE, BLOCK_TOKENS, PRECISION, False, False,
        )  # fmt: skip
        acc, row_max, row_sum = _attend_span(
            acc, row_max, row_sum, ql, qr, latent_pages, rope_pages, pages, positions, whole, whole, end, scale,
            l_page, l_token, r_page, r_token,
            PAGE_SIZE, LATENT, ROPE, BLOCK_LATENT, BLOCK_ROPE, BLOCK_TOKENS, PRECISION, True, False,
        )  # fmt: skip

    store_rows(
        acc, row_max, row_sum, out, sums, rows, heads, valid, num_heads, split, tl.num_programs(2),
        LATENT, BLOCK_LATENT, SPLIT, LSE,
    )  # fmt: skip


@triton.jit
def _attend_span(
    acc,
    row_max,
    row_sum,
    q_latent,
    q_rope,
    latent_pages,
    rope_pages,
    pages,
    positions,
    begin,
    whole,
    end,
    scale,
    l_page,
    l_token,
    r_page,
    r_token,
    PAGE_SIZE: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
    BRANCHED: tl.constexpr,
):
    """Take the tokens `begin` … `end` into the running softmax, as `triton_tiles.attend_span` does.

    BRANCHED takes those before `whole` without the mask of scores. The branch is also what lets the warps divide the
    scores: where one product feeds another directly, Triton gives each warp rows of its own, and warps beyond the rows
    the same ones again. (The two parts of the scores are joined behind it for the same reason.)
    """
    tokens = tl.arange(0, BLOCK_TOKENS)
    l_cols = tl.arange(0, BLOCK_LATENT)
    r_cols = tl.arange(0, BLOCK_ROPE)
    for start in tl.range(begin, end, BLOCK_TOKENS):
        token = start + tokens
        inside = token < end
        page, offset = find_tokens(pages, start, tokens, inside, PAGE_SIZE, BLOCK_TOKENS, MASKED)
        latent_at = latent_pages + (page * l_page + offset * l_token)[:, None] + l_cols[None, :]
        rope_at = rope_pages + (page * r_page + offset * r_token)[:, None] + r_cols[None, :]
        latent = load_tokens(latent_at, inside, l_cols < LATENT, MASKED, LATENT != BLOCK_LATENT)
        rope = load_tokens(rope_at, inside, r_cols < ROPE, MASKED, ROPE != BLOCK_ROPE)
        rope_scores = tl.dot(q_rope, tl.trans(rope), input_precision=PRECISION)
        if BRANCHED:
            scores = tl.dot(q_latent, tl.trans(latent), input_precision=PRECISION)
            if start < whole:
                weights, decay, row_max, row_sum = take_scores(
                    scores + rope_scores, row_max, row_sum, positions, token, inside, scale, False
                )
            else:
                weights, decay, row_max, row_sum = take_scores(
                    scores + rope_scores, row_max, row_sum, positions, token, inside, scale, True
                )
        else:
            scores = tl.dot(q_latent, tl.trans(latent), rope_scores, input_precision=PRECISION)
            weights, decay, row_max, row_sum = take_scores(
                scores, row_max, row_sum, positions, token, inside, scale, MASKED
            )
        acc = acc * decay[:, None]
        acc = tl.dot(weights.to(latent.dtype), latent, acc, input_precision=PRECISION)
    return acc, row_max, row_sum
