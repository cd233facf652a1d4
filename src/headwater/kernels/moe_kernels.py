"""The Triton kernels of many pairs: sorting them by expert, the two grouped products, and the sum of a row's experts.

A product's program computes one tile of rows of one expert by some columns. The columns of a tile of rows are
neighbours in the grid, and so are the tiles of an expert: what they read in common is found in the L2 cache.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# ruff: noqa: N803 - compile-time arguments are in capitals, as is the custom in Triton

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sort_kernel(
    ids,
    order,
    counts,
    tiles,
    num_pairs,
    most_tiles,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """The places of one expert's pairs, and its tiles. `BINS` is more than NUM_EXPERTS: one bin is for foreign ids."""
    expert = tl.program_id(0)
    places = tl.arange(0, BLOCK)
    bins = tl.arange(0, BINS)
    count = tl.zeros([BINS], tl.int32)
    for start in tl.range(0, num_pairs, BLOCK):
        chosen = _load_ids(ids, start + places, num_pairs, NUM_EXPERTS)
        count += tl.histogram(chosen, BINS).to(tl.int32)
    count = tl.where(bins < NUM_EXPERTS, count, 0)
    num_tiles = (count + BLOCK_ROWS - 1) // BLOCK_ROWS
    own = tl.sum(tl.where(bins == expert, count, 0), axis=0)
    first = tl.sum(tl.where(bins < expert, count, 0), axis=0)
    first_tile = tl.sum(tl.where(bins < expert, num_tiles, 0), axis=0)
    tl.store(counts + expert, own)

    next_place = first
    if own > 0:
        for start in tl.range(0, num_pairs, BLOCK):
            chosen = _load_ids(ids, start + places, num_pairs, NUM_EXPERTS)
            mine = (chosen == expert).to(tl.int32)
            rank = tl.cumsum(mine, axis=0) - 1
            tl.store(order + next_place + rank, start + places, mask=mine == 1)
            next_place += tl.sum(mine, axis=0)
        for start in tl.range(0, tl.cdiv(own, BLOCK_ROWS), BLOCK):
            tile = start + places
            at = tiles + first_tile + tile
            inside = tile * BLOCK_ROWS < own
            tl.store(at, tl.zeros([BLOCK], tl.int32) + expert, mask=inside)
            tl.store(at + most_tiles, first + tile * BLOCK_ROWS, mask=inside)
            tl.store(at + 2 * most_tiles, tl.zeros([BLOCK], tl.int32) + first + own, mask=inside)
    if expert == 0:
        for start in tl.range(tl.sum(num_tiles, axis=0), most_tiles, BLOCK):
            tl.store(tiles + start + places, tl.full([BLOCK], -1, tl.int32), mask=start + places < most_tiles)


@triton.jit
def _load_ids(ids, pair, num_pairs, NUM_EXPERTS: tl.constexpr):
    chosen = tl.load(ids + pair, mask=pair < num_pairs, other=NUM_EXPERTS)
    return tl.where((chosen >= 0) & (chosen < NUM_EXPERTS), chosen, NUM_EXPERTS)


@triton.jit
def gate_up_kernel(
    x,
    order,
    tiles,
    gate_up,
    inner,
    most_tiles,
    num_col_tiles,
    x_row,
    w_expert,
    w_row,
    TOP_K: tl.constexpr,
    INNER: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Two products with one tile of gathered rows, and the activation."""
    tile = tl.program_id(0) // num_col_tiles
    expert = tl.load(tiles + tile).to(tl.int64)
    if expert < 0:
        return
    place = tl.load(tiles + most_tiles + tile) + tl.arange(0, BLOCK_ROWS)
    inside = place < tl.load(tiles + 2 * most_tiles + tile)
    row = tl.load(order + place, mask=inside, other=0) // TOP_K  # rows outside are computed as row 0, and not stored
    col = tl.program_id(0) % num_col_tiles * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    k = tl.arange(0, BLOCK_K)
    x_at = x + row.to(tl.int64)[:, None] * x_row + k[None, :]
    gate_at = gate_up + expert * w_expert + (col % INNER)[:, None] * w_row + k[None, :]
    up_at = gate_at + INNER * w_row
    gate = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    up = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    for start in tl.range(0, HIDDEN, BLOCK_K):
        a = _load_k(x_at + start, k + start, HIDDEN, BLOCK_K)
        w_gate = _load_k(gate_at + start, k + start, HIDDEN, BLOCK_K)
        w_up = _load_k(up_at + start, k + start, HIDDEN, BLOCK_K)
        gate = tl.dot(a, tl.trans(w_gate), gate, input_precision=PRECISION)
        up = tl.dot(a, tl.trans(w_up), up, input_precision=PRECISION)
    result = gate / (1.0 + tl.exp(-gate)) * up
    at = inner + place.to(tl.int64)[:, None] * INNER + col[None, :]
    tl.store(at, result.to(inner.dtype.element_ty), mask=inside[:, None] & (col < INNER)[None, :])


@triton.jit
def down_kernel(
    inner,
    order,
    tiles,
    weights,
    down,
    outer,
    most_tiles,
    num_col_tiles,
    w_expert,
    w_row,
    INNER: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The product with sorted rows, weighted, each written to its pair's own place."""
    tile = tl.program_id(0) // num_col_tiles
    expert = tl.load(tiles + tile).to(tl.int64)
    if expert < 0:
        return
    place = tl.load(tiles + most_tiles + tile) + tl.arange(0, BLOCK_ROWS)
    end = tl.load(tiles + 2 * most_tiles + tile)
    inside = place < end
    pair = tl.load(order + place, mask=inside, other=0).to(tl.int64)
    col = tl.program_id(0) % num_col_tiles * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    k = tl.arange(0, BLOCK_K)
    inner_at = inner + tl.minimum(place, end - 1).to(tl.int64)[:, None] * INNER + k[None, :]
    down_at = down + expert * w_expert + (col % HIDDEN)[:, None] * w_row + k[None, :]
    acc = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    for start in tl.range(0, INNER, BLOCK_K):
        a = _load_k(inner_at + start, k + start, INNER, BLOCK_K)
        w = _load_k(down_at + start, k + start, INNER, BLOCK_K)
        acc = tl.dot(a, tl.trans(w), acc, input_precision=PRECISION)
    acc *= tl.load(weights + pair, mask=inside, other=0.0)[:, None]
    at = outer + pair[:, None] * HIDDEN + col[None, :]
    tl.store(at, acc.to(outer.dtype.element_ty), mask=inside[:, None] & (col < HIDDEN)[None, :])


@triton.jit
def _load_k(at, k, LENGTH: tl.constexpr, BLOCK_K: tl.constexpr):
    """A tile along the common dimension, masked only where the blocks do not divide it."""
    if LENGTH % BLOCK_K == 0:
        return tl.load(at)
    else:
        return tl.load(at, mask=(k < LENGTH)[None, :], other=0.0)


@triton.jit
def sum_kernel(
    outer,
    ids,
    out,
    num_experts,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """A row's weighted outputs, in the order of its choices; foreign ones were never written."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    total = tl.zeros([BLOCK_COLS], tl.float32)
    for choice in tl.static_range(TOP_K):
        chosen = tl.load(ids + row * TOP_K + choice)
        num_cols = tl.where((chosen >= 0) & (chosen < num_experts), HIDDEN, 0)
        at = outer + (row * TOP_K + choice) * HIDDEN + col
        total += tl.load(at, mask=col < num_cols, other=0.0).to(tl.float32)
    tl.store(out + row * HIDDEN + col, total.to(out.dtype.element_ty), mask=col < HIDDEN)
