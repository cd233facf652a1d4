"""The kernels behind `pack_triton`: packed tiles written and read, two channels in each 32-bit word.

Most instructions work on both halves of a word at once. A thread has four words of a row side by side: 16 bytes in the
cache, 8 of signs and mantissas, 4 of codes.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# ruff: noqa: N803 - compile-time arguments are in capitals, as is the custom in Triton

from __future__ import annotations

import triton
import triton.language as tl

from headwater.kernels.extent import TABLES
from headwater.kernels.xxh3_triton import tile_start

_TABLES = tl.constexpr(TABLES)
_PICKED = tl.constexpr(8)
"""Rows that are searched for escapes together."""
_LANES = tl.constexpr(128)
"""Escapes that are written together."""
_INFINITE = tl.constexpr(0x7F807F80)
"""Two infinities, which do not count for a base. And the bits of two exponents."""

_NUMBERS = [
    "address",
    "num_spans",
    "num_layers",
    "staged_layers",
    "first_staged",
    "first_layer",
    "layer_step",
    "num_heads",
    "first_head",
]
"""As for raw spans: other numbers are no reason to compile again."""


# ---- where things lie -------------------------------------------------------------------------------------------
@triton.jit
def _escape_room(rows, width):
    return 3 + 4 * (rows * width // 2048)


@triton.jit
def _block_start(blocks, block, rows):
    """Where a block begins in its tile, from the sizes of those before it."""
    start = 0
    for before in range(block):
        width = tl.load(blocks + before * 3 + 2)
        size = 4 + 4 * _escape_room(rows, width) + width + rows * width * 3 // 2
        start += (size + 15) // 16 * 16
    return start


@triton.jit
def _tile_address(
    spans, targets, address, span, layer, head, num_spans, staged_layers, first_staged, num_heads, COMPACT: tl.constexpr
):
    if COMPACT:
        tile_bytes = tl.load(spans + 4 * num_spans + span)
        before = tl.load(spans + 3 * num_spans + span) * staged_layers + (first_staged + layer) * tile_bytes
        return address + before * num_heads + head * tile_bytes
    else:
        target = targets + span * 3
        return tl.load(target) + layer * tl.load(target + 1) + head * tl.load(target + 2)


@triton.jit
def _rows_of(spans, num_spans, span, plane, channel, head):
    """What `_row_addresses` needs to know of a span in one plane, from one channel on: loaded once."""
    blocks = spans + _TABLES * num_spans + tl.load(spans + span)
    offset = tl.load(spans + num_spans + span).to(tl.int32)
    start = tl.load(plane) + head * tl.load(plane + 3) + channel * tl.load(plane + 4)
    return blocks, offset, start, tl.load(plane + 1), tl.load(plane + 2), tl.load(plane + 4)


@triton.jit
def _row_addresses(rows_of, row, valid, BLOCK_SIZE: tl.constexpr):
    """Where rows of a span begin in the cache: each finds its own block."""
    blocks, offset, start, block_stride, token_stride, _ = rows_of
    place = (offset + row).to(tl.uint32)
    block = tl.load(blocks + (place // BLOCK_SIZE).to(tl.int64), mask=valid, other=0)
    return start + block * block_stride + (place % BLOCK_SIZE).to(tl.int64) * token_stride


# ---- memory -----------------------------------------------------------------------------------------------------
@triton.jit
def _load_words(base, index, mask, ALIGNMENT: tl.constexpr):
    """32-bit words at an address of any alignment."""
    if ALIGNMENT >= 4:
        return tl.load(base.to(tl.pointer_type(tl.uint32)) + index, mask=mask, other=0)
    else:
        at = base.to(tl.pointer_type(tl.uint8)) + index * 4
        value = tl.load(at, mask=mask, other=0).to(tl.uint32)
        for i in tl.static_range(1, 4):
            value |= tl.load(at + i, mask=mask, other=0).to(tl.uint32) << (8 * i)
        return value


@triton.jit
def _store_words(base, index, value, mask, ALIGNMENT: tl.constexpr):
    if ALIGNMENT >= 4:
        tl.store(base.to(tl.pointer_type(tl.uint32)) + index, value, mask=mask)
    else:
        at = base.to(tl.pointer_type(tl.uint8)) + index * 4
        for i in tl.static_range(4):
            tl.store(at + i, (value >> (8 * i)).to(tl.uint8), mask=mask)


@triton.jit
def _load_halves(base, index, mask, ALIGNMENT: tl.constexpr):
    """16-bit halves, as words."""
    if ALIGNMENT >= 2:
        at = tl.multiple_of(base.to(tl.pointer_type(tl.uint16)), ALIGNMENT)
        return tl.load(at + index, mask=mask, other=0).to(tl.uint32)
    else:
        at = base.to(tl.pointer_type(tl.uint8)) + index * 2
        return tl.load(at, mask=mask, other=0).to(tl.uint32) | tl.load(at + 1, mask=mask, other=0).to(tl.uint32) << 8


@triton.jit
def _store_halves(base, index, value, mask, ALIGNMENT: tl.constexpr):
    if ALIGNMENT >= 2:
        at = tl.multiple_of(base.to(tl.pointer_type(tl.uint16)), ALIGNMENT)
        tl.store(at + index, value.to(tl.uint16), mask=mask)
    else:
        at = base.to(tl.pointer_type(tl.uint8)) + index * 2
        tl.store(at, value.to(tl.uint8), mask=mask)
        tl.store(at + 1, (value >> 8).to(tl.uint8), mask=mask)


@triton.jit
def _load_cache(rows_of, row, valid, column, mask, BLOCK_SIZE: tl.constexpr, CACHE: tl.constexpr):
    """Pairs of channels of some rows, as words; infinities where there are none."""
    rows_at = _row_addresses(rows_of, row, valid, BLOCK_SIZE)
    if CACHE >= 4:
        # The compiler cannot know that numbers from a table are aligned; with this it moves 16 bytes at a time.
        at = tl.multiple_of(rows_at.to(tl.pointer_type(tl.uint32)), CACHE)
        return tl.load(at[:, None] + column[None, :], mask=mask, other=_INFINITE)
    else:
        step = rows_of[5]
        at = rows_at[:, None] + (column * 2).to(tl.int64)[None, :] * step
        even = tl.load(at.to(tl.pointer_type(tl.uint16)), mask=mask, other=_INFINITE & 0xFFFF)
        odd = tl.load((at + step).to(tl.pointer_type(tl.uint16)), mask=mask, other=_INFINITE & 0xFFFF)
        return even.to(tl.uint32) | odd.to(tl.uint32) << 16


@triton.jit
def _store_cache(rows_of, row, valid, column, words, mask, BLOCK_SIZE: tl.constexpr, CACHE: tl.constexpr):
    rows_at = _row_addresses(rows_of, row, valid, BLOCK_SIZE)
    if CACHE >= 4:
        at = tl.multiple_of(rows_at.to(tl.pointer_type(tl.uint32)), CACHE)
        tl.store(at[:, None] + column[None, :], words, mask=mask)
    else:
        step = rows_of[5]
        at = rows_at[:, None] + (column * 2).to(tl.int64)[None, :] * step
        tl.store(at.to(tl.pointer_type(tl.uint16)), words.to(tl.uint16), mask=mask)
        tl.store((at + step).to(tl.pointer_type(tl.uint16)), (words >> 16).to(tl.uint16), mask=mask)


# ---- packing ----------------------------------------------------------------------------------------------------
@triton.jit
def _lifted_tops(words):
    """The largest exponents of two channels, plus one; those of infinities and NaNs count as zero."""
    lifted = ((words & _INFINITE) + 0x00800080) & _INFINITE
    return tl.max(lifted, axis=0), tl.max(lifted & 0x7F80, axis=0)


@triton.jit
def _bases(odd, even):
    """The bases of two channels, in bits 0 to 7 and 16 to 23. A channel without a finite value has 255."""
    return ((odd & 0x7F800000 | even) >> 7) + 0x00FF00FF & 0x00FF00FF


@triton.jit
def _encode(words, bases):
    """Codes (8 bits), and bits 0 and 16 where channels are escapes."""
    # In each half 256 + base - exponent, so that neither borrows; then bit 8 is set where that is below 256.
    below = (bases | 0x01000100)[None, :] - ((words >> 7) & 0x00FF00FF) ^ 0x01000100
    escapes = ((below + 0x7FF17FF1) >> 15) & 0x00010001  # 15 and more
    codes = below & 0x000F000F | escapes * 15
    return codes + (codes >> 12), escapes


@triton.jit
def _pack_rows(
    words,
    bases,
    first_row,
    num_rows,
    count,
    packed,
    rows_of,
    column,
    BLOCK_SIZE: tl.constexpr,
    HALVES: tl.constexpr,
    CACHE: tl.constexpr,
    STAGED: tl.constexpr,
    SIGNS: tl.constexpr,
    CODES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Store some rows of a block, and list their escapes behind the `count` that are listed; how many there are now."""
    block_at, room, width = packed
    half = tl.multiple_of(width // 2, HALVES)
    row = tl.arange(0, ROWS)
    valid = first_row + row < num_rows
    mask = valid[:, None] & (column < half)[None, :]
    index = (first_row + row)[:, None] * half + column[None, :]
    signs_at = block_at + 4 + 4 * room + width
    codes_at = (signs_at + num_rows * width).to(tl.pointer_type(tl.uint8))
    # One after another, so that neither waits in registers for the other.
    signs = (words >> 8) & 0x00800080 | words & 0x007F007F
    _store_halves(signs_at, index, signs + (signs >> 8), mask, SIGNS)
    codes, escapes = _encode(words, bases)
    halves = tl.sum(escapes, axis=1)  # even channels in the lower half
    tl.store(tl.multiple_of(codes_at, CODES) + index, codes.to(tl.uint8), mask=mask)

    found = tl.where(valid, (halves & 0xFFFF) + (halves >> 16), 0)
    # Two sums in one: rows that have any in the lower half, and escapes in the upper one.
    both = tl.where(found > 0, found << 16 | 1, 0)
    sums = tl.sum(both)
    total = count + (sums >> 16).to(tl.int32)
    if (total > count) & (total <= room):
        # The few rows that have any, a handful at a time: they are read again, and their escapes counted through.
        through = tl.cumsum(both, 0)
        rank = tl.where(both > 0, (through & 0xFFFF).to(tl.int32) - 1, -1)
        place = ((through - both >> 16) << 16).to(tl.int32) | row
        num_picked = (sums & 0xFFFF).to(tl.int32)
        for start in range(0, num_picked, _PICKED):
            number = start + tl.arange(0, _PICKED)
            live = number < num_picked
            picked = tl.sum(tl.where(rank[None, :] == number[:, None], place[None, :], 0), axis=1)
            slot = count + (picked >> 16)
            picked = first_row + (picked & 0xFFFF)
            some = live[:, None] & (column < half)[None, :]
            # A word a thread, as their escapes will be stored.
            again = _load_cache(rows_of, picked, live, column, some, BLOCK_SIZE, CACHE if CACHE < 4 else 4)
            _, here = _encode(again, bases)
            even, odd = (here & 1).to(tl.int32), (here >> 16).to(tl.int32)
            listed = slot[:, None] + tl.cumsum(even + odd, 1) - even - odd
            position = (picked[:, None] * width + 2 * column[None, :]).to(tl.uint32)
            word = position | (again >> 7 & 0xFF) << 24
            _store_words(block_at + 4, listed, word, some & (even > 0) & (listed < room), STAGED)
            listed += even
            word = position + 1 | (again >> 23 & 0xFF) << 24
            _store_words(block_at + 4, listed, word, some & (odd > 0) & (listed < room), STAGED)
    return total


@triton.jit(do_not_specialize=_NUMBERS)
def pack_kernel(
    planes,
    spans,
    targets,
    blocks,
    address,
    num_spans,
    num_layers,
    staged_layers,
    first_staged,
    first_layer,
    layer_step,
    num_heads,
    first_head,
    BLOCK_SIZE: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HALVES: tl.constexpr,
    CACHE: tl.constexpr,
    STAGED: tl.constexpr,
    SIGNS: tl.constexpr,
    CODES: tl.constexpr,
    COMPACT: tl.constexpr,
    ROWS: tl.constexpr,
    HELD: tl.constexpr,
):
    """One program: one block of one tile. `HELD`: all its rows at once, so they are read once."""
    program = tl.program_id(0)
    head = (program % num_heads).to(tl.int64)
    block = program // num_heads % NUM_BLOCKS
    layer = (program // (num_heads * NUM_BLOCKS) % num_layers).to(tl.int64)
    span = program // (num_heads * NUM_BLOCKS) // num_layers
    if tl.load(spans + 4 * num_spans + span) == 0:
        return
    num_rows = tl.load(spans + 2 * num_spans + span).to(tl.int32)
    tile_at = _tile_address(
        spans, targets, address, span, layer, head, num_spans, staged_layers, first_staged, num_heads, COMPACT
    )
    block_at = tile_at + _block_start(blocks, block, num_rows)
    plane = planes + ((first_layer + layer * layer_step) * NUM_PLANES + tl.load(blocks + block * 3)) * 8
    channel, width = tl.load(blocks + block * 3 + 1), tl.load(blocks + block * 3 + 2)
    room = _escape_room(num_rows, width)
    column = tl.arange(0, COLUMNS)
    half = tl.multiple_of(width // 2, HALVES)
    rows_of = _rows_of(spans, num_spans, span, plane, channel, head + first_head)
    packed = (block_at, room, width)

    row = tl.arange(0, ROWS)
    valid = row < num_rows
    words = _load_cache(rows_of, row, valid, column, valid[:, None] & (column < half)[None, :], BLOCK_SIZE, CACHE)
    odd, even = _lifted_tops(words)
    if HELD:
        bases = _bases(odd, even)
        count = _pack_rows(
            words, bases, 0, num_rows, 0, packed, rows_of, column, BLOCK_SIZE, HALVES, CACHE, STAGED, SIGNS, CODES, ROWS
        )
    else:
        for first_row in range(ROWS, num_rows, ROWS):
            valid = first_row + row < num_rows
            mask = valid[:, None] & (column < half)[None, :]
            words = _load_cache(rows_of, first_row + row, valid, column, mask, BLOCK_SIZE, CACHE)
            more_odd, more_even = _lifted_tops(words)
            odd, even = tl.maximum(odd, more_odd), tl.maximum(even, more_even)
        bases, count = _bases(odd, even), 0
        for first_row in range(0, num_rows, ROWS):
            valid = first_row + row < num_rows
            mask = valid[:, None] & (column < half)[None, :]
            words = _load_cache(rows_of, first_row + row, valid, column, mask, BLOCK_SIZE, CACHE)
            count = _pack_rows(
                words,
                bases,
                first_row,
                num_rows,
                count,
                packed,
                rows_of,
                column,
                BLOCK_SIZE,
                HALVES,
                CACHE,
                STAGED,
                SIGNS,
                CODES,
                ROWS,
            )

    _store_halves(block_at + 4 + 4 * room, column, bases | bases >> 8, column < half, SIGNS)
    only = tl.arange(0, 1)
    _store_words(block_at, only, (only + count).to(tl.uint32), only == 0, STAGED)
    for start in range(0, room, _LANES):
        slot = start + tl.arange(0, _LANES)
        _store_words(block_at + 4, slot, tl.zeros((_LANES,), tl.uint32), (slot >= count) & (slot < room), STAGED)
    size = 4 + 4 * room + width + num_rows * width * 3 // 2
    pad = tl.arange(0, 16)
    tl.store((block_at + size).to(tl.pointer_type(tl.uint8)) + pad, 0, mask=pad < (-size & 15))


# ---- unpacking --------------------------------------------------------------------------------------------------
@triton.jit
def _decode(signs, codes, bases):
    """Words from 16 bits of signs and mantissas, 8 bits of codes, and bases at the exponents' places."""
    # A bit above the lower exponent keeps it from borrowing; the upper one borrows from the sign, which is masked.
    exponents = (bases | 0x8000)[None, :] - (codes * 0x00080080 & 0x07800780)
    signs = signs | signs << 8
    return exponents & _INFINITE | signs & 0x007F007F | (signs & 0x00800080) << 8


@triton.jit(do_not_specialize=[*_NUMBERS, "parts", "part_rows"])
def unpack_kernel(
    planes,
    spans,
    targets,
    blocks,
    address,
    num_spans,
    num_layers,
    staged_layers,
    first_staged,
    first_layer,
    layer_step,
    num_heads,
    first_head,
    parts,
    part_rows,
    BLOCK_SIZE: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HALVES: tl.constexpr,
    CACHE: tl.constexpr,
    STAGED: tl.constexpr,
    SIGNS: tl.constexpr,
    CODES: tl.constexpr,
    COMPACT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program: some rows of one block of one tile. Whatever the tile says, it writes to no other rows."""
    program = tl.program_id(0)
    head = (program % num_heads).to(tl.int64)
    program = program // num_heads
    block = program % NUM_BLOCKS
    program = program // NUM_BLOCKS
    part = program % parts
    program = program // parts
    layer = (program % num_layers).to(tl.int64)
    span = program // num_layers
    num_rows = tl.load(spans + 2 * num_spans + span).to(tl.int32)
    first_row = part * part_rows
    if (tl.load(spans + 4 * num_spans + span) == 0) | (first_row >= num_rows):
        return
    tile_at = _tile_address(
        spans, targets, address, span, layer, head, num_spans, staged_layers, first_staged, num_heads, COMPACT
    )
    block_at = tile_at + _block_start(blocks, block, num_rows)
    plane = planes + ((first_layer + layer * layer_step) * NUM_PLANES + tl.load(blocks + block * 3)) * 8
    channel, width = tl.load(blocks + block * 3 + 1), tl.load(blocks + block * 3 + 2)
    room = _escape_room(num_rows, width)
    column = tl.arange(0, COLUMNS)
    half = tl.multiple_of(width // 2, HALVES)
    rows_of = _rows_of(spans, num_spans, span, plane, channel, head + first_head)
    last_row = min(first_row + part_rows, num_rows)

    signs_at = block_at + 4 + 4 * room + width
    codes_at = (signs_at + num_rows * width).to(tl.pointer_type(tl.uint8))
    codes_at = tl.multiple_of(codes_at, CODES)
    pair = _load_halves(block_at + 4 + 4 * room, column, column < half, SIGNS)
    bases = (pair & 0xFF) << 7 | (pair >> 8) << 23
    count = tl.sum(_load_words(block_at, tl.arange(0, 1), tl.arange(0, 1) == 0, STAGED))
    for start in range(first_row, last_row, ROWS):
        row = start + tl.arange(0, ROWS)
        valid = row < last_row
        mask = valid[:, None] & (column < half)[None, :]
        index = row[:, None] * half + column[None, :]
        signs = _load_halves(signs_at, index, mask, SIGNS)
        codes = tl.load(codes_at + index, mask=mask, other=0).to(tl.uint32)
        _store_cache(rows_of, row, valid, column, _decode(signs, codes, bases), mask, BLOCK_SIZE, CACHE)

    tl.debug_barrier()  # escapes are written over what is there
    num_escapes = tl.minimum(count, room.to(tl.uint32)).to(tl.int32)
    for start in range(0, num_escapes, _LANES):
        slot = start + tl.arange(0, _LANES)
        word = _load_words(block_at + 4, slot, slot < num_escapes, STAGED)
        position = (word & 0xFFFFFF).to(tl.int32)
        row = position // width
        listed = (slot < num_escapes) & (row >= first_row) & (row < last_row)
        sign = tl.load(signs_at.to(tl.pointer_type(tl.uint8)) + position, mask=listed, other=0).to(tl.uint32)
        at = _row_addresses(rows_of, row, listed, BLOCK_SIZE) + (position % width).to(tl.int64) * rows_of[5]
        value = (sign & 0x80) << 8 | sign & 0x7F | word >> 24 << 7
        tl.store(at.to(tl.pointer_type(tl.uint16)), value.to(tl.uint16), mask=listed)


@triton.jit(do_not_specialize=["num_tiles", "size_1", "size_2", "stride_0", "stride_1", "stride_2", "num_rows"])
def fits_kernel(
    tiles,
    out,
    blocks,
    num_tiles,
    size_1,
    size_2,
    stride_0,
    stride_1,
    stride_2,
    num_rows,
    NUM_BLOCKS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    TILES: tl.constexpr,
):
    """Whether some tiles list no more escapes than there is room for, and only of values that exist."""
    tile = tl.program_id(0).to(tl.int64) * TILES + tl.arange(0, TILES)
    mask = tile < num_tiles
    start = tile_start(tile, size_1, size_2, stride_0, stride_1, stride_2)
    good = tl.full((TILES,), 1, tl.int1)
    for block in range(NUM_BLOCKS):
        block_at, width = (
            tiles.to(tl.int64) + start + _block_start(blocks, block, num_rows),
            tl.load(blocks + block * 3 + 2),
        )
        count, room = _load_words(block_at, 0, mask, ALIGNMENT), _escape_room(num_rows, width).to(tl.uint32)
        good &= count <= room
        listed = tl.minimum(count, room).to(tl.int32)
        for slot in range(tl.max(listed)):  # a handful
            word = _load_words(block_at, slot + 1, mask & (slot < listed), ALIGNMENT)
            good &= (word & 0xFFFFFF).to(tl.int32) < num_rows * width
    tl.store(out + tile, good.to(tl.uint8), mask=mask)
