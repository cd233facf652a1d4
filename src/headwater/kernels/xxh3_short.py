"""XXH3-64 of tiles of at most 240 bytes, in Triton: only tiny models have such tiles, so this is right, not fast."""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# ruff: noqa: N803 - compile-time arguments are in capitals, as is the custom in Triton

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headwater.kernels.extent import ceil_div

_TILES = 32

_PRIME64_1 = tl.constexpr(0x9E3779B185EBCA87)
_PRIME64_2 = tl.constexpr(0xC2B2AE3D27D4EB4F)
_PRIME64_3 = tl.constexpr(0x165667B19E3779F9)
_AVALANCHE = tl.constexpr(0x165667919E3779F9)
_RRMXMX = tl.constexpr(0x9FB21C651E98DF25)


def xxh3_short(tiles: Tensor, out: Tensor, secret: Tensor, num_tiles: int, length: int, place: tuple[int, ...]) -> None:
    """One launch. `place` is as in `tile_start`; every length is compiled on its own."""
    grid = (ceil_div(num_tiles, _TILES),)
    _short_kernel[grid](tiles, secret, out, num_tiles, *place, LENGTH=length, TILES=_TILES, num_warps=1)


@triton.jit
def _short_kernel(
    tiles,
    secret,
    out,
    num_tiles,
    size_1,
    size_2,
    stride_0,
    stride_1,
    stride_2,
    LENGTH: tl.constexpr,
    TILES: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64) * TILES + tl.arange(0, TILES)
    mask = tile < num_tiles
    outer = tile // (size_1 * size_2)
    data = tiles + outer * stride_0 + tile // size_2 % size_1 * stride_1 + tile % size_2 * stride_2
    result = tl.zeros((TILES,), tl.uint64)
    if LENGTH == 0:
        result = _finish64(result + (_word(secret + 56, None, 8) ^ _word(secret + 64, None, 8)))
    elif LENGTH <= 3:
        first, last = _word(data, mask, 1), _word(data + LENGTH - 1, mask, 1)
        middle = _word(data + LENGTH // 2, mask, 1)
        combined = (first << 16) | (middle << 24) | last | (LENGTH << 8)
        result = _finish64(combined ^ (_word(secret, None, 4) ^ _word(secret + 4, None, 4)))
    elif LENGTH <= 8:
        both = _word(data + LENGTH - 4, mask, 4) + (_word(data, mask, 4) << 32)
        result = both ^ _word(secret + 8, None, 8) ^ _word(secret + 16, None, 8)
        result ^= ((result << 49) | (result >> 15)) ^ ((result << 24) | (result >> 40))
        result *= _RRMXMX
        result ^= (result >> 35) + LENGTH
        result *= _RRMXMX
        result ^= result >> 28
    elif LENGTH <= 16:
        low = _word(data, mask, 8) ^ _word(secret + 24, None, 8) ^ _word(secret + 32, None, 8)
        high = _word(data + LENGTH - 8, mask, 8) ^ _word(secret + 40, None, 8) ^ _word(secret + 48, None, 8)
        result = _avalanche(_swap_bytes(low) + high + ((low * high) ^ tl.umulhi(low, high)) + LENGTH)
    elif LENGTH <= 128:
        result += LENGTH * _PRIME64_1 % (1 << 64)
        for i in tl.static_range((LENGTH - 1) // 32 + 1):
            result += _mix(data + 16 * i, secret + 32 * i, mask)
            result += _mix(data + LENGTH - 16 * (i + 1), secret + 32 * i + 16, mask)
        result = _avalanche(result)
    else:
        result += LENGTH * _PRIME64_1 % (1 << 64)
        for i in tl.static_range(8):
            result += _mix(data + 16 * i, secret + 16 * i, mask)
        result = _avalanche(result) + _mix(data + LENGTH - 16, secret + 136 - 17, mask)
        for i in tl.static_range(8, LENGTH // 16):
            result += _mix(data + 16 * i, secret + 16 * (i - 8) + 3, mask)
        result = _avalanche(result)
    tl.store(out + tile, result.to(tl.int64), mask=mask)


@triton.jit
def _word(address, mask, BYTES: tl.constexpr):
    """A little-endian number of some bytes, wherever it lies."""
    value = tl.load(address, mask=mask).to(tl.uint64)
    for i in tl.static_range(1, BYTES):
        value |= tl.load(address + i, mask=mask).to(tl.uint64) << (8 * i)
    return value


@triton.jit
def _mix(data, secret, mask):
    """Sixteen bytes, with sixteen of the secret."""
    low = _word(data, mask, 8) ^ _word(secret, None, 8)
    high = _word(data + 8, mask, 8) ^ _word(secret + 8, None, 8)
    return (low * high) ^ tl.umulhi(low, high)


@triton.jit
def _swap_bytes(value):
    swapped = value & 0xFF
    for _ in tl.static_range(7):
        value = value >> 8
        swapped = (swapped << 8) | (value & 0xFF)
    return swapped


@triton.jit
def _avalanche(value):
    value ^= value >> 37
    value *= _AVALANCHE
    return value ^ (value >> 32)


@triton.jit
def _finish64(value):
    """The end of the older XXH64, which the shortest inputs have."""
    value ^= value >> 33
    value *= _PRIME64_2
    value ^= value >> 29
    value *= _PRIME64_3
    return value ^ (value >> 32)
