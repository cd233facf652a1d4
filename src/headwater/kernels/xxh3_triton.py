"""`xxh3_tiles` in Triton; the contract is in `xxh3`.

XXH3 adds up sixteen 64-byte stripes, scrambles its eight accumulators, and goes on. The sums do not depend on the
accumulators, only the scrambling does: so a first kernel adds up every kilobyte of every tile in parallel, and a
second, which reads a sixteenth of the bytes, does the sequential rest, eight lanes wide.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# ruff: noqa: N803 - compile-time arguments are in capitals, as is the custom in Triton

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.kernels.extent import SUM_BYTES, ceil_div, common_alignment, next_power_of_2
from headwater.kernels.xxh3 import check_tiles, signed
from headwater.kernels.xxh3_short import xxh3_short

SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
"""XXH3's default secret."""

LONG = 241
"""The shortest input that XXH3 takes in stripes."""

PRIME32_1, PRIME32_2, PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
PRIME64_1, PRIME64_2, PRIME64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
PRIME64_4, PRIME64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5

_SCRAMBLE = tl.constexpr(PRIME32_1)
_LENGTH = tl.constexpr(PRIME64_1)
_AVALANCHE = tl.constexpr(0x165667919E3779F9)

# Where each group of words begins in the table of `xxh3_keys`.
_PLACE = ("size_1", "size_2", "stride_0", "stride_1", "stride_2")
"""Like all numbers here, the same for any value: Triton would compile once more for a 1 and for multiples of 16."""

_ACCUMULATE, _START, _MIX, _LAST, _MERGE = (tl.constexpr(at) for at in (0, 128, 136, 144, 152))


class HashConfig(NamedTuple):
    """How the bytes are cut into programs."""

    blocks: int = 16
    """Kilobytes of a tile that a program of the first kernel adds up."""
    sum_warps: int = 2
    tiles: int = 8
    """Tiles that a program of the second kernel finishes."""


def xxh3_tiles_triton(tiles: Tensor, out: Tensor | None = None, config: HashConfig | None = None) -> Tensor:
    """`xxh3_tiles`, on the current stream."""
    result, config = check_tiles(tiles, out), config or HashConfig()
    out = result if result.is_contiguous() else torch.empty(result.shape, dtype=torch.int64, device=tiles.device)
    length, num_tiles = tiles.shape[-1], out.numel()
    if num_tiles:
        shape, strides = (1, 1, 1, *tiles.shape[:-1])[-3:], (0, 0, 0, *tiles.stride()[:-1])[-3:]
        place = (shape[1], shape[2], *strides)
        alignment = common_alignment([tiles.data_ptr(), *(s for n, s in zip(shape, strides, strict=True) if n > 1)])
        if length < LONG:
            xxh3_short(tiles, out, _secret(tiles.device), num_tiles, length, place)
        else:
            _long(tiles, out, num_tiles, length, place, alignment, config)
    return result if out is result else result.copy_(out)


def _long(
    tiles: Tensor,
    out: Tensor,
    num_tiles: int,
    length: int,
    place: tuple[int, ...],
    alignment: int,
    config: HashConfig,
) -> None:
    keys = xxh3_keys(tiles.device)
    num_blocks = (length - 1) // SUM_BYTES  # whole ones that a scrambling ends; what is left is never empty
    sums = torch.empty((num_tiles, num_blocks + 1, 8), dtype=torch.int64, device=tiles.device)
    blocks = min(config.blocks, next_power_of_2(num_blocks + 1))
    _sum_kernel[(num_tiles, ceil_div(num_blocks + 1, blocks))](
        tiles,
        sums,
        keys,
        *place,
        num_blocks + 1,
        (length - 1) // 64,
        WORD_BYTES=min(alignment, 8),
        ALIGNMENT=alignment,
        BLOCKS=blocks,
        num_warps=config.sum_warps,
    )
    _finish(tiles, sums, out, num_tiles, length, place, alignment, config)


def finish_tiles_triton(tiles: Tensor, sums: Tensor, out: Tensor) -> None:
    """The checksums of contiguous tiles of whole KiB, of which the first half is done: `sums`, int64 [KiB, 8]."""
    length, num_tiles = tiles.shape[-1], out.numel()
    place = (tiles.shape[1], tiles.shape[2], *tiles.stride()[:-1])
    _finish(tiles, sums, out, num_tiles, length, place, common_alignment([tiles.data_ptr(), length]), HashConfig())


def _finish(
    tiles: Tensor,
    sums: Tensor,
    out: Tensor,
    num_tiles: int,
    length: int,
    place: tuple[int, ...],
    alignment: int,
    config: HashConfig,
) -> None:
    _finish_kernel[(ceil_div(num_tiles, config.tiles),)](
        tiles,
        sums,
        xxh3_keys(tiles.device),
        out,
        num_tiles,
        *place,
        (length - 1) // SUM_BYTES,
        length,
        WORD_BYTES=min(common_alignment([alignment, length]), 8),
        TILES=config.tiles,
        UNROLL=16,
        num_warps=1,
    )


@lru_cache(maxsize=16)
def _secret(device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(SECRET), dtype=torch.uint8).to(device)


@lru_cache(maxsize=16)
def xxh3_keys(device: torch.device) -> Tensor:
    """Every word that the kernels need. Words of even and of odd lanes are apart, in groups of four."""

    def word(at: int) -> int:
        return int.from_bytes(SECRET[at : at + 8], "little")

    def lanes(at: int) -> list[int]:
        return [word(at + 16 * pair + 8 * odd) for odd in (0, 1) for pair in range(4)]

    pairs = [(stripe, pair) for stripe in range(16) for pair in range(4)]
    accumulate = [word(8 * stripe + 16 * pair + 8 * odd) for odd in (0, 1) for stripe, pair in pairs]
    start = [PRIME32_3, PRIME64_2, PRIME64_4, PRIME64_5, PRIME64_1, PRIME64_3, PRIME32_2, PRIME32_1]
    return signed(accumulate + start + lanes(128) + lanes(121) + lanes(11)).to(device)


@triton.jit
def tile_start(tile, size_1, size_2, stride_0, stride_1, stride_2):
    """Where a tile begins, in bytes, from its number."""
    outer = tile // (size_1 * size_2)
    return outer * stride_0 + tile // size_2 % size_1 * stride_1 + tile % size_2 * stride_2


@triton.jit
def read_word(address, mask, BYTES: tl.constexpr):
    """Eight bytes, little-endian, from pointers that are multiples of BYTES."""
    if BYTES == 8:
        part = address.to(tl.pointer_type(tl.uint64))
    elif BYTES == 4:
        part = address.to(tl.pointer_type(tl.uint32))
    elif BYTES == 2:
        part = address.to(tl.pointer_type(tl.uint16))
    else:
        part = address
    value = tl.load(part, mask=mask, other=0).to(tl.uint64)
    for i in tl.static_range(1, 8 // BYTES):
        value |= tl.load(part + i, mask=mask, other=0).to(tl.uint64) << (8 * BYTES * i)
    return value


@triton.jit
def multiply_halves(value):
    """The low half times the high half."""
    return (value & 0xFFFFFFFF) * (value >> 32)


@triton.jit
def fold_product(a, b):
    """The two halves of the 128-bit product, xored."""
    return (a * b) ^ tl.umulhi(a, b)


@triton.jit
def load_keys(keys, at):
    return tl.load(keys + at).to(tl.uint64)


@triton.jit
def add_up(words, block, num_stripes, keys):
    """What some blocks of a tile add to the accumulators, from their words [block, pair, even or odd], of which there
    are 128 each: even lanes and odd lanes, each [block, 4]. Stripes from `num_stripes` on do not count."""
    valid = (block * 16)[:, None] + (tl.arange(0, 64) // 4)[None, :] < num_stripes
    even, odd = tl.split(words)
    return _add_pairs(even, odd, valid, keys)


@triton.jit
def _add_pairs(even, odd, valid, keys):
    pair = tl.arange(0, 64)
    # A word goes into its own lane by its product, and into its neighbour's as it is.
    even_sum = multiply_halves(even ^ load_keys(keys, _ACCUMULATE + pair)[None, :]) + odd
    odd_sum = multiply_halves(odd ^ load_keys(keys, _ACCUMULATE + 64 + pair)[None, :]) + even
    even_sum = tl.where(valid, even_sum, 0)
    odd_sum = tl.where(valid, odd_sum, 0)
    even_lanes = tl.sum(tl.reshape(even_sum, (even.shape[0], 16, 4)), axis=1)
    odd_lanes = tl.sum(tl.reshape(odd_sum, (even.shape[0], 16, 4)), axis=1)
    return even_lanes, odd_lanes


@triton.jit(do_not_specialize=[*_PLACE, "num_blocks", "num_stripes"])
def _sum_kernel(
    tiles,
    sums,
    keys,
    size_1,
    size_2,
    stride_0,
    stride_1,
    stride_2,
    num_blocks,
    num_stripes,
    WORD_BYTES: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """What some blocks of one tile add to the accumulators: `sums` [tile, block, even lanes and then odd ones]."""
    tile = tl.program_id(0).to(tl.int64)
    data = tiles + tile_start(tile, size_1, size_2, stride_0, stride_1, stride_2)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    pair = tl.arange(0, 64)
    valid = (block * 16)[:, None] + (pair // 4)[None, :] < num_stripes
    first = (block.to(tl.int64) * 1024)[:, None] + (pair * 16)[None, :]
    if WORD_BYTES == 8:
        # Both words of a pair in one load of 16 bytes, which stays in one thread.
        words = tl.multiple_of(data, ALIGNMENT).to(tl.pointer_type(tl.uint64))
        both = tl.load(words + first[:, :, None] // 8 + tl.arange(0, 2)[None, None, :], mask=valid[:, :, None], other=0)
        even, odd = tl.split(both)
    else:
        even = read_word(data + first, valid, WORD_BYTES)
        odd = read_word(data + first + 8, valid, WORD_BYTES)
    even_lanes, odd_lanes = _add_pairs(even, odd, valid, keys)
    target = sums + (tile * num_blocks + block)[:, None] * 8 + tl.arange(0, 4)[None, :]
    tl.store(target, even_lanes.to(tl.int64), mask=(block < num_blocks)[:, None])
    tl.store(target + 4, odd_lanes.to(tl.int64), mask=(block < num_blocks)[:, None])


@triton.jit(do_not_specialize=[*_PLACE, "num_tiles", "num_blocks", "length"])
def _finish_kernel(
    tiles,
    sums,
    keys,
    out,
    num_tiles,
    size_1,
    size_2,
    stride_0,
    stride_1,
    stride_2,
    num_blocks,
    length,
    WORD_BYTES: tl.constexpr,
    TILES: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """The accumulators of some tiles through all their blocks, the last stripe, and the end."""
    tile = tl.program_id(0).to(tl.int64) * TILES + tl.arange(0, TILES)
    lane = tl.arange(0, 4)
    mask = (tile < num_tiles)[:, None] & (lane < 4)[None, :]
    zero = tl.zeros((TILES, 4), tl.uint64)
    even = zero + load_keys(keys, _START + lane)[None, :]
    odd = zero + load_keys(keys, _START + 4 + lane)[None, :]
    mix_even, mix_odd = load_keys(keys, _MIX + lane)[None, :], load_keys(keys, _MIX + 4 + lane)[None, :]
    row = sums + (tile * (num_blocks + 1) * 8)[:, None] + lane[None, :]
    whole = num_blocks // UNROLL * UNROLL
    for start in range(0, whole, UNROLL):
        # Unrolled, so that the loads of a group are under way together: none of them depends on the accumulators.
        for i in tl.static_range(UNROLL):
            even, odd = _next_block(row + (start + i) * 8, mask, even, odd, mix_even, mix_odd)
    for block in range(whole, num_blocks):
        even, odd = _next_block(row + block * 8, mask, even, odd, mix_even, mix_odd)
    row += num_blocks * 8
    even += tl.load(row, mask=mask, other=0).to(tl.uint64)
    odd += tl.load(row + 4, mask=mask, other=0).to(tl.uint64)

    data = tiles + tile_start(tile, size_1, size_2, stride_0, stride_1, stride_2) + length - 64
    words = data[:, None] + (lane * 16)[None, :]
    even_word, odd_word = read_word(words, mask, WORD_BYTES), read_word(words + 8, mask, WORD_BYTES)
    even += multiply_halves(even_word ^ load_keys(keys, _LAST + lane)[None, :]) + odd_word
    odd += multiply_halves(odd_word ^ load_keys(keys, _LAST + 4 + lane)[None, :]) + even_word

    even ^= load_keys(keys, _MERGE + lane)[None, :]
    odd ^= load_keys(keys, _MERGE + 4 + lane)[None, :]
    result = tl.sum(fold_product(even, odd), axis=1) + length.to(tl.uint64) * _LENGTH
    result ^= result >> 37
    result *= _AVALANCHE
    result ^= result >> 32
    tl.store(out + tile, result.to(tl.int64), mask=tile < num_tiles)


@triton.jit
def _next_block(row, mask, even, odd, mix_even, mix_odd):
    even += tl.load(row, mask=mask, other=0).to(tl.uint64)
    odd += tl.load(row + 4, mask=mask, other=0).to(tl.uint64)
    even = (even ^ (even >> 47) ^ mix_even) * _SCRAMBLE
    odd = (odd ^ (odd >> 47) ^ mix_odd) * _SCRAMBLE
    return even, odd
