"""`gather_rows` and `scatter_rows` in Triton; the contract is in `extent`."""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# ruff: noqa: N803 - compile-time arguments are in capitals, as is the custom in Triton

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.kernels.extent import Compact, Move, ceil_div, common_alignment, next_power_of_2

_UNITS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}

_MAX_COLUMNS_BYTES = 4096


class CopyConfig(NamedTuple):
    """How the rows are cut into programs."""

    tile_bytes: int = 16384
    heads: int = 1
    """Heads of one token in a tile, at most: side by side in a cache that keeps them so."""
    num_warps: int = 4


# The best on an H200 of what tests/gpu/tune_transfer.py tries: the side that is read in order is the faster one.
GATHER = CopyConfig(heads=1)
SCATTER = CopyConfig(heads=8)


def move_rows_triton(move: Move, *, scatter: bool, config: CopyConfig | None = None) -> None:
    """Either direction, in one launch on the current stream."""
    move.check()
    pages, spans, config = move.pages, move.spans, config or (SCATTER if scatter else GATHER)
    if not move.num_bytes:
        return
    num_spans, num_heads = len(spans.num_rows), len(move.heads)
    device_spans = spans.upload(pages.device) if move.device_spans is None else move.device_spans
    if isinstance(move.staged, Compact):
        address, targets = move.staged.address, device_spans
        alignment = common_alignment([pages.alignment, address])
    else:
        table = np.array(move.staged, np.int64)
        address, targets = 0, _upload(table, pages.device)
        alignment = common_alignment([pages.alignment, *table.flatten().tolist()])
    unit = min(alignment, 8)
    columns = min(next_power_of_2(max(pages.row_bytes)), _MAX_COLUMNS_BYTES) // unit
    heads = min(next_power_of_2(num_heads), config.heads)
    tokens = max(1, config.tile_bytes // (columns * unit * heads))
    tokens = min(tokens, next_power_of_2(spans.max_rows))
    token_blocks = ceil_div(spans.max_rows, tokens)
    num_planes = len(pages.row_bytes)
    grid = (num_spans * token_blocks, len(move.layers) * num_planes, ceil_div(num_heads, heads))
    _move_kernel[grid](
        pages.device_table,
        device_spans,
        targets,
        address,
        num_spans,
        token_blocks,
        len(move.layers),
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
        TOKENS=tokens,
        HEADS=heads,
        COLUMNS=columns,
        num_warps=config.num_warps,
    )


def _upload(table, device: torch.device) -> Tensor:
    host = torch.from_numpy(table)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


@triton.jit
def _move_kernel(
    planes,
    spans,
    targets,
    address,
    num_spans,
    token_blocks,
    num_layers,
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
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program: some tokens of one span, in one plane of one layer, of some heads."""
    span = tl.program_id(0) // token_blocks
    num_rows = tl.load(spans + 2 * num_spans + span)
    first_row = tl.program_id(0) % token_blocks * TOKENS
    if first_row >= num_rows:
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
    block = tl.load(spans + 4 * num_spans + block_at, mask=valid, other=0)
    in_cache = tl.load(plane) + block * tl.load(plane + 1) + place % BLOCK_SIZE * tl.load(plane + 2)
    in_cache += (first_head + head) * tl.load(plane + 3)

    tile_bytes = num_rows * token_bytes
    if COMPACT:
        before = tl.load(spans + 3 * num_spans + span)
        in_extent = address + (before * num_layers * token_bytes + layer * tile_bytes) * num_heads + head * tile_bytes
    else:
        target = targets + span * 3
        in_extent = tl.load(target) + layer * tl.load(target + 1) + head * tl.load(target + 2)
    in_extent += tl.load(plane + 6) * num_rows + row * row_bytes

    # The compiler cannot know that numbers from a table are aligned; with this it moves 16 bytes at a time.
    cache_rows = tl.multiple_of(in_cache.to(tl.pointer_type(UNIT)), ALIGNMENT)
    extent_rows = tl.multiple_of(in_extent.to(tl.pointer_type(UNIT)), ALIGNMENT)
    units = tl.multiple_of(row_bytes // UNIT_BYTES, ALIGNMENT // UNIT_BYTES)
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
