"""`gather_rows` and `scatter_rows` in Triton; the contract is in `extent`.

A gather may leave the first half of its tiles' checksums behind (`Move.sums`): every byte is in its hands once, and to
read all of them again would cost a computation that runs beside it as much as half the gather.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# ruff: noqa: N803 - compile-time arguments are in capitals, as is the custom in Triton

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from headwater.kernels.extent import SUM_BYTES, TABLES, Compact, Move, ceil_div, common_alignment, next_power_of_2
from headwater.kernels.extent_device import DeviceMove, upload_move
from headwater.kernels.pack_triton import PackConfig, UnpackConfig, move_packed_triton
from headwater.kernels.xxh3_triton import add_up, xxh3_keys

_UNITS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}

_MAX_COLUMNS_BYTES = 4096

_TABLES = tl.constexpr(TABLES)

_NUMBERS = [
    "num_spans",
    "token_blocks",
    "staged_layers",
    "first_staged",
    "first_layer",
    "layer_step",
    "num_heads",
    "first_head",
    "token_bytes",
]
"""What differs from call to call. Triton would compile once more for a 1 and for multiples of 16, and whoever saves or
loads would wait for it."""


class CopyConfig(NamedTuple):
    """How the rows are cut into programs."""

    tile_bytes: int = 16384
    heads: int = 1
    """Heads of one token in a tile, at most: side by side in a cache that keeps them so."""
    num_warps: int = 4


# The best on an H200 of what tests/gpu/tune_transfer.py tries: the side that is read in order is the faster one.
GATHER = CopyConfig(heads=1)
SCATTER = CopyConfig(heads=8)


def move_rows_triton(
    move: Move,
    *,
    scatter: bool,
    config: CopyConfig | None = None,
    packing: PackConfig | UnpackConfig | None = None,
) -> None:
    """Either direction: one launch for the raw spans and one for the packed ones, on the current stream."""
    move.check()
    if not move.num_bytes:
        return
    device = upload_move(move)
    if move.spans.has_raw:
        _move_raw(move, device, scatter, config or (SCATTER if scatter else GATHER))
    if move.spans.has_packed:
        move_packed_triton(move, device, scatter=scatter, config=packing)


def _move_raw(move: Move, device: DeviceMove, scatter: bool, config: CopyConfig) -> None:
    pages, spans = move.pages, move.spans
    num_spans, num_heads = len(spans.num_rows), len(move.heads)
    alignment = common_alignment([pages.alignment, device.alignment])
    unit = min(alignment, 8)
    columns = min(next_power_of_2(max(pages.row_bytes)), _MAX_COLUMNS_BYTES) // unit
    sums = None if scatter else move.sums
    heads = min(next_power_of_2(num_heads), config.heads if sums is None else 1)
    tokens = max(1, config.tile_bytes // (columns * unit * heads))
    tokens = min(tokens, next_power_of_2(spans.max_rows))
    has_sums = sums is not None and isinstance(move.staged, Compact) and pages.adds_up
    if has_sums:
        tokens = max(tokens, SUM_BYTES // max(pages.row_bytes))
    token_blocks = ceil_div(spans.max_rows, tokens)
    num_planes = len(pages.row_bytes)
    grid = (num_spans * token_blocks, len(move.layers) * num_planes, ceil_div(num_heads, heads))
    _move_kernel[grid](
        pages.device_table,
        device.spans,
        device.targets,
        device.address,
        sums if has_sums else device.spans,
        xxh3_keys(pages.device) if has_sums else device.spans,
        num_spans,
        token_blocks,
        device.staged_layers,
        device.first_staged,
        move.layers.start,
        move.layers.step,
        num_heads,
        move.heads.start,
        pages.token_bytes,
        NUM_PLANES=num_planes,
        BLOCK_SIZE=pages.block_size,
        UNIT=_UNITS[unit],
        UNIT_BYTES=unit,
        ALIGNMENT=alignment,
        DENSE=pages.dense,
        COMPACT=isinstance(move.staged, Compact),
        SCATTER=scatter,
        ADDS_UP=has_sums,
        TOKENS=tokens,
        HEADS=heads,
        COLUMNS=columns,
        num_warps=config.num_warps,
    )


@triton.jit(do_not_specialize=_NUMBERS)
def _move_kernel(
    planes,
    spans,
    targets,
    address,
    sums,
    keys,
    num_spans,
    token_blocks,
    staged_layers,
    first_staged,
    first_layer,
    layer_step,
    num_heads,
    first_head,
    token_bytes,
    NUM_PLANES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    UNIT_BYTES: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    DENSE: tl.constexpr,
    COMPACT: tl.constexpr,
    SCATTER: tl.constexpr,
    ADDS_UP: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program: some tokens of one raw span, in one plane of one layer, of some heads."""
    span = tl.program_id(0) // token_blocks
    num_rows = tl.load(spans + 2 * num_spans + span)
    first_row = tl.program_id(0) % token_blocks * TOKENS
    is_packed = tl.load(spans + 4 * num_spans + span) > 0
    if (first_row >= num_rows) | is_packed:
        return
    layer = (tl.program_id(1) // NUM_PLANES).to(tl.int64)
    plane = planes + ((first_layer + layer * layer_step) * NUM_PLANES + tl.program_id(1) % NUM_PLANES) * 8
    row_bytes = tl.load(plane + 5)

    pair = tl.arange(0, TOKENS * HEADS)
    row = (first_row + pair // HEADS).to(tl.int64)
    head = (tl.program_id(2) * HEADS + pair % HEADS).to(tl.int64)
    valid = (row < num_rows) & (head < num_heads)

    # Rows may begin in the middle of a block; every row finds its own.
    place = tl.load(spans + num_spans + span) + row
    block_at = tl.load(spans + span) + place // BLOCK_SIZE
    block = tl.load(spans + _TABLES * num_spans + block_at, mask=valid, other=0)
    in_cache = tl.load(plane) + block * tl.load(plane + 1) + place % BLOCK_SIZE * tl.load(plane + 2)
    in_cache += (first_head + head) * tl.load(plane + 3)

    tile_bytes = num_rows * token_bytes
    if COMPACT:
        before = tl.load(spans + 3 * num_spans + span)
        in_staging = before * staged_layers + (first_staged + layer) * tile_bytes
        in_extent = address + in_staging * num_heads + head * tile_bytes
    else:
        target = targets + span * 3
        in_extent = tl.load(target) + layer * tl.load(target + 1) + head * tl.load(target + 2)
    in_extent += tl.load(plane + 6) * num_rows + row * row_bytes

    # The compiler cannot know that numbers from a table are aligned; with this it moves 16 bytes at a time.
    cache_rows = tl.multiple_of(in_cache.to(tl.pointer_type(UNIT)), ALIGNMENT)
    extent_rows = tl.multiple_of(in_extent.to(tl.pointer_type(UNIT)), ALIGNMENT)
    units = tl.multiple_of(row_bytes // UNIT_BYTES, ALIGNMENT // UNIT_BYTES)
    if ADDS_UP:
        # Rows are as wide as the program, and all of them together are whole KiB that lie side by side.
        unit_column = tl.arange(0, COLUMNS)
        here = tl.load(cache_rows[:, None] + unit_column[None, :], mask=valid[:, None], other=0)
        tl.store(extent_rows[:, None] + unit_column[None, :], here, mask=valid[:, None])
        in_tile = tl.load(plane + 6) * num_rows + first_row * row_bytes
        before_tile = tl.load(spans + 3 * num_spans + span) * staged_layers * num_heads
        before_tile += ((first_staged + layer) * num_heads + tl.program_id(2)) * tile_bytes
        kib = tl.arange(0, TOKENS * COLUMNS // 128)
        words = tl.reshape(here, (TOKENS * COLUMNS // 128, 64, 2)).to(tl.uint64, bitcast=True)
        even, odd = add_up(words, in_tile // 1024 + kib, (tile_bytes - 1) // 64, keys)
        is_whole = num_rows * row_bytes % 1024 + before_tile % 1024 == 0
        kept = first_row * row_bytes + kib * 1024 < tl.where(is_whole, num_rows * row_bytes, 0)
        lanes = sums + (((before_tile + in_tile) // 1024 + kib) * 8)[:, None] + tl.arange(0, 4)[None, :]
        tl.store(lanes, even.to(tl.int64), mask=kept[:, None])
        tl.store(lanes + 4, odd.to(tl.int64), mask=kept[:, None])
        return
    for start in range(0, units, COLUMNS):
        column = tl.multiple_of(start, COLUMNS) + tl.arange(0, COLUMNS)
        mask = valid[:, None] & (column < units)[None, :]
        if DENSE:
            cache_column = column.to(tl.int64)
        else:
            element = tl.load(plane + 7)
            byte = column * UNIT_BYTES
            cache_column = (byte // element * tl.load(plane + 4) + byte % element) // UNIT_BYTES
        cache_at = cache_rows[:, None] + cache_column[None, :]
        extent_at = extent_rows[:, None] + column[None, :]
        if SCATTER:
            tl.store(cache_at, tl.load(extent_at, mask=mask), mask=mask)
        else:
            tl.store(extent_at, tl.load(cache_at, mask=mask), mask=mask)
