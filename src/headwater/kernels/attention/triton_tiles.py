"""The inner loop of flash attention over paged KV, shared by the prefill and the decode kernel, and those parts of it
that the latent kernel uses too.

Scores are kept in base 2 (the scale holds log2(e)), so that the exponentials are single instructions.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# ruff: noqa: N803 - compile-time arguments are in capitals, as is the custom in Triton

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class TileConfig:
    """How one attention kernel is cut and compiled."""

    block_rows: int
    """Rows of the score tile: queries × query heads of one KV head."""
    block_tokens: int
    """KV tokens per iteration."""
    num_warps: int
    num_stages: int


@triton.jit
def attend_span(
    acc,
    row_max,
    row_sum,
    q,
    k_head,
    v_head,
    pages,
    positions,
    begin,
    end,
    scale,
    k_page,
    k_token,
    v_page,
    v_token,
    PAGE_SIZE: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Take the tokens `begin` … `end` into the running softmax of `q`'s rows, which stand at `positions`.

    `begin` is a multiple of the block; without MASKED, so is `end`, and every row sees every token. `k_head` and
    `v_head` point at the KV head within page 0, `pages` at the request's row of the page table.
    """
    tokens = tl.arange(0, BLOCK_TOKENS)
    k_cols = tl.arange(0, BLOCK_K)
    v_cols = tl.arange(0, BLOCK_V)
    for start in tl.range(begin, end, BLOCK_TOKENS):
        token = start + tokens
        inside = token < end
        page, offset = find_tokens(pages, start, tokens, inside, PAGE_SIZE, BLOCK_TOKENS, MASKED)
        k_at = k_head + (page * k_page + offset * k_token)[:, None] + k_cols[None, :]
        v_at = v_head + (page * v_page + offset * v_token)[:, None] + v_cols[None, :]
        k = load_tokens(k_at, inside, k_cols < K_DIM, MASKED, K_DIM != BLOCK_K)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        weights, decay, row_max, row_sum = take_scores(
            scores, row_max, row_sum, positions, token, inside, scale, MASKED
        )
        acc = acc * decay[:, None]
        v = load_tokens(v_at, inside, v_cols < V_DIM, MASKED, V_DIM != BLOCK_V)
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, row_max, row_sum


@triton.jit
def find_tokens(
    pages,
    start,
    tokens,
    inside,
    PAGE_SIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """(page, offset within it) of the tokens `start + tokens` of a request; of any valid page where not `inside`."""
    if BLOCK_TOKENS % PAGE_SIZE == 0:  # blocks begin at page boundaries: most of the arithmetic leaves the loop
        page_at = pages + start // PAGE_SIZE + tokens // PAGE_SIZE
        offset = tokens % PAGE_SIZE
    else:
        page_at = pages + (start + tokens) // PAGE_SIZE
        offset = (start + tokens) % PAGE_SIZE
    if MASKED:
        page = tl.load(page_at, mask=inside, other=0).to(tl.int64)
    else:
        page = tl.load(page_at).to(tl.int64)
    return page, offset


@triton.jit
def take_scores(scores, row_max, row_sum, positions, token, inside, scale, MASKED: tl.constexpr):
    """(weights of a block, factor of what was summed before, new maximum, new sum) of the running softmax."""
    if MASKED:
        # The rows' own positions bound the causal part; `end` bounds the last, incomplete block.
        visible = (positions[:, None] >= token[None, :]) & inside[None, :]
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, axis=1) * scale)
    if MASKED:
        # A row that has seen nothing yet would compute inf - inf.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    else:
        shift = new_max
    weights = tl.exp2(scores * scale - shift[:, None])
    decay = tl.exp2(row_max - shift)
    row_sum = row_sum * decay + tl.sum(weights, axis=1)
    return weights, decay, new_max, row_sum


@triton.jit
def load_tokens(
    at,
    token_inside,
    col_inside,
    MASK_TOKENS: tl.constexpr,
    MASK_COLS: tl.constexpr,
):
    """Load a tile; what is outside reads as zero (memory there may hold NaN, and 0 · NaN is NaN)."""
    if MASK_TOKENS and MASK_COLS:
        return tl.load(at, mask=token_inside[:, None] & col_inside[None, :], other=0.0)
    elif MASK_TOKENS:
        return tl.load(at, mask=token_inside[:, None], other=0.0)
    elif MASK_COLS:
        return tl.load(at, mask=col_inside[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def store_rows(
    acc,
    row_max,
    row_sum,
    out,
    log_sums,
    rows,
    heads,
    valid,
    num_heads,
    split,
    num_splits,
    V_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SPLIT: tl.constexpr,
    LSE: tl.constexpr = False,
):
    """Write the finished tile: to `out` [rows, heads, v_dim], or, if SPLIT, as one of its partial results. Without
    SPLIT, LSE writes the natural log-sum-exp of each row into `log_sums` [rows, heads]."""
    cols = tl.arange(0, BLOCK_V)
    item = rows.to(tl.int64) * num_heads + heads
    seen = row_sum > 0.0
    row_sum = tl.where(seen, row_sum, 1.0)
    if SPLIT:
        item = item * num_splits + split
        tl.store(log_sums + item, row_max + tl.log2(row_sum), mask=valid)  # row_max is -inf where nothing was seen
        valid = valid & seen
    elif LSE:
        tl.store(log_sums + item, (row_max + tl.log2(row_sum)) * 0.6931471805599453, mask=valid)
    tile = acc / row_sum[:, None]
    mask = valid[:, None] & (cols < V_DIM)[None, :]
    tl.store(out + item[:, None] * V_DIM + cols[None, :], tile.to(out.dtype.element_ty), mask=mask)
