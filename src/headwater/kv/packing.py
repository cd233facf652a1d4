"""Packed tiles: bfloat16 KV in three quarters of its bytes, without losing a bit. Here are its sizes, and its CPU code.

The exponents of one channel hardly differ, so a value is stored as its sign and mantissa (8 bits) and a 4-bit code:
how far its exponent lies below the channel's *base*. What lies elsewhere is an *escape*, listed with its exponent. A
tile is packed in blocks of up to 128 channels of one plane; docs/format.md draws one. The size of a block follows from
its rows and channels alone, so that an extent can be reserved before anything is computed; a tile with more escapes
than a block lists does not fit, and its chunk is stored raw.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headwater.kv.spec import KVSpec

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint32]

BLOCK_WIDTH = 128
"""Channels of a plane that are packed together, at most."""
ESCAPE = 15
"""The code of a value that is listed."""
ALIGNMENT = 16
"""Bytes that a block is a multiple of."""

_NOT_FINITE = 255
"""The exponent of infinities and NaNs: no base, unless a channel has nothing else."""


class PackedBlock(NamedTuple):
    """Where the parts of one packed block lie, in bytes, for `num_rows` rows of `width` channels from `first` on.

    count u32 │ escapes: room × u32 │ bases: width │ signs and mantissas: rows × width │ codes: rows × width / 2 │ zeros
    """

    plane: int
    first: int
    """Of its channels, in the plane."""
    width: int
    num_rows: int
    start: int
    """In the packed tile."""
    raw_start: int
    """Of its plane, in the raw tile."""
    row_bytes: int
    """Of its plane, raw."""

    @property
    def room(self) -> int:
        """Escapes that it lists, at most."""
        return escape_room(self.num_rows, self.width)

    @property
    def bases(self) -> int:
        """Where the bases begin, in the block."""
        return 4 + 4 * self.room

    @property
    def signs(self) -> int:
        """Where signs and mantissas begin, in the block."""
        return self.bases + self.width

    @property
    def codes(self) -> int:
        """Where the codes begin, in the block."""
        return self.signs + self.num_rows * self.width

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return packed_block_bytes(self.num_rows, self.width)


def escape_room(num_rows: int, width: int) -> int:
    """Escapes that a block lists, at most: one in 512 values, and three. (Measured: one in 8,000.)"""
    return 3 + 4 * (num_rows * width // 2048)


def packed_block_bytes(num_rows: int, width: int) -> int:
    """Stored bytes of one block."""
    size = 4 + 4 * escape_room(num_rows, width) + width + num_rows * width * 3 // 2
    return -(-size // ALIGNMENT) * ALIGNMENT


@lru_cache(maxsize=512)
def packed_tile_bytes(spec: KVSpec, num_tokens: int) -> int:
    """Stored bytes of a packed tile; 0 where there is none: planes that are not bfloat16 or have an odd width, and
    tiles so short that packing would save nothing."""
    if num_tokens < 1 or any(plane.dtype != "bfloat16" or plane.width % 2 for plane in spec.planes):
        return 0
    last = packed_blocks(_widths(spec), num_tokens)[-1]
    size = last.start + last.num_bytes
    return size if size < spec.tile_bytes(num_tokens) else 0


@lru_cache(maxsize=512)
def packed_blocks(widths: tuple[int, ...], num_rows: int) -> tuple[PackedBlock, ...]:
    """The blocks of a packed tile with planes of these widths, in the order in which they are stored."""
    found, start, raw_start = list[PackedBlock](), 0, 0
    for plane, whole in enumerate(widths):
        for first in range(0, whole, BLOCK_WIDTH):
            width = min(BLOCK_WIDTH, whole - first)
            found.append(PackedBlock(plane, first, width, num_rows, start, raw_start, 2 * whole))
            start += packed_block_bytes(num_rows, width)
        raw_start += num_rows * 2 * whole
    return tuple(found)


def _widths(spec: KVSpec) -> tuple[int, ...]:
    return tuple([plane.width for plane in spec.planes])


def pack_tile(spec: KVSpec, num_tokens: int, raw: Bytes, out: Bytes) -> bool:
    """Pack one contiguous raw tile into `out`; False where it does not fit, and `out` holds garbage."""
    return all(_pack_block(block, raw, out) for block in packed_blocks(_widths(spec), num_tokens))


def unpack_tile(spec: KVSpec, num_tokens: int, packed: Bytes, out: Bytes) -> bool:
    """The inverse, into a contiguous raw tile; False for bytes that `pack_tile` does not write: more escapes than there
    is room for, or escapes of values that do not exist. `out` holds garbage then."""
    return all(_unpack_block(block, packed, out) for block in packed_blocks(_widths(spec), num_tokens))


def fits_packed(spec: KVSpec, num_tokens: int, packed: Bytes) -> npt.NDArray[np.bool_]:
    """Of tiles (…, packed bytes) that a device has packed: whether each fits. The count of escapes says so."""
    good = np.ones(packed.shape[:-1], np.bool_)
    for block in packed_blocks(_widths(spec), num_tokens):
        count = np.ascontiguousarray(packed[..., block.start : block.start + 4]).view(np.uint32)[..., 0]
        good &= count <= block.room
    return good


class _Scratch(threading.local):
    """Memory for the steps between a raw block and a packed one, for each thread: it stays in the processor's cache."""

    def __init__(self) -> None:
        self._words = np.empty((2, 0), np.uint32)
        self._narrow = np.empty(0, np.uint16)

    def words(self, num_rows: int, width: int) -> tuple[Words, Words, npt.NDArray[np.uint16]]:
        """Room for three columns of a block, two channels an element: two of 32 bits and one of 16."""
        size = num_rows * width // 2
        if self._narrow.size < size:
            self._words, self._narrow = np.empty((2, size), np.uint32), np.empty(size, np.uint16)
        shape = (num_rows, width // 2)
        one, two = (words[:size].reshape(shape) for words in self._words)
        return one, two, self._narrow[:size].reshape(shape)


_scratch = _Scratch()


def _pairs(block: PackedBlock, raw: Bytes) -> Words:
    """A block's values in the raw tile, two channels a word."""
    rows = raw[block.raw_start : block.raw_start + block.num_rows * block.row_bytes].reshape(block.num_rows, -1)
    found: Words = rows[:, 2 * block.first : 2 * (block.first + block.width)].view(np.uint32)
    return found


def _pack_block(block: PackedBlock, raw: Bytes, out: Bytes) -> bool:
    rows, width, words = block.num_rows, block.width, _pairs(block, raw)
    target = out[block.start : block.start + block.num_bytes]
    exponents, other, narrow = _scratch.words(rows, width)
    # The exponent of the even channel in bits 0 to 7, that of the odd one in bits 16 to 23.
    np.right_shift(words, 7, out=exponents)
    exponents &= 0x00FF00FF
    values = exponents.view(np.uint16)
    bases = values.max(axis=0)
    if bases.max(initial=0) == _NOT_FINITE:
        finite = np.where(values == _NOT_FINITE, 0, values).max(axis=0)
        bases = np.where((values == _NOT_FINITE).all(axis=0), _NOT_FINITE, finite).astype(np.uint16)
    codes = np.subtract(bases, values, out=other.view(np.uint16))  # wraps where an exponent is above the base
    listed = np.zeros(block.room + 1, np.uint32)
    if codes.max(initial=0) >= ESCAPE:
        escapes = np.flatnonzero(codes >= ESCAPE)
        if len(escapes) > block.room:
            return False
        listed[0] = len(escapes)
        listed[1 : 1 + len(escapes)] = escapes.astype(np.uint32) | values.reshape(-1)[escapes].astype(np.uint32) << 24
        np.minimum(codes, ESCAPE, out=codes)
    target[: block.bases] = listed.view(np.uint8)
    target[block.bases : block.signs] = bases
    end = block.codes + rows * width // 2
    np.right_shift(other, 12, out=exponents)
    exponents |= other
    target[block.codes : end].reshape(rows, -1)[...] = exponents.astype(np.uint8)
    np.right_shift(words, 8, out=exponents)
    exponents &= 0x00800080
    np.bitwise_and(words, 0x007F007F, out=other)
    exponents |= other
    np.right_shift(exponents, 8, out=other)
    exponents |= other
    narrow[...] = exponents
    target[block.signs : block.codes] = narrow.view(np.uint8).reshape(-1)
    target[end:] = 0
    return True


def _unpack_block(block: PackedBlock, packed: Bytes, out: Bytes) -> bool:
    rows, width, words = block.num_rows, block.width, _pairs(block, out)
    source = packed[block.start : block.start + block.num_bytes]
    count = int(source[:4].view(np.uint32)[0])
    if count > block.room:
        return False
    escapes = source[4 : 4 + 4 * count].view(np.uint32)
    places = escapes & 0x00FFFFFF
    if count and int(places.max()) >= rows * width:
        return False
    exponents, signs, _ = _scratch.words(rows, width)
    codes = source[block.codes : block.codes + rows * width // 2].reshape(rows, width // 2)
    np.left_shift(codes, 12, out=exponents, dtype=np.uint32)
    exponents |= codes
    exponents &= 0x000F000F
    bases = source[block.bases : block.signs].astype(np.uint16)
    np.subtract(bases, exponents.view(np.uint16), out=exponents.view(np.uint16))
    exponents &= 0x00FF00FF
    exponents <<= 7
    signs[...] = source[block.signs : block.codes].view(np.uint16).reshape(rows, width // 2)
    np.left_shift(signs, 8, out=words)
    signs |= words
    np.bitwise_and(signs, 0x007F007F, out=words)
    exponents |= words
    signs &= 0x00800080
    signs <<= 8
    np.bitwise_or(exponents, signs, out=words)
    if count:
        plane = out[block.raw_start : block.raw_start + rows * block.row_bytes].view(np.uint16).reshape(rows, -1)
        row, column = np.divmod(places, width)
        at = (row, block.first + column)
        plane[at] = plane[at] & 0x807F | (escapes >> 24 << 7).astype(np.uint16)
    return True
