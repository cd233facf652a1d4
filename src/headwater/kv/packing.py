"""Packed tiles: bfloat16 KV in three quarters of its bytes, without losing a bit. Here are its sizes, and its CPU code.

The exponents of one channel hardly differ, so a value is stored as its sign and mantissa (8 bits) and a 4-bit code:
how far its exponent lies below the channel's *base*. What lies elsewhere is an *escape*, listed with its exponent. A
tile is packed in blocks of up to 128 channels of one plane; docs/format.md draws one. The size of a block follows from
its rows and channels alone, so that an extent can be reserved before anything is computed; a tile with more escapes
than a block lists does not fit, and its chunk is stored raw.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headwater.kv.spec import KVSpec

Bytes = npt.NDArray[np.uint8]
Halves = npt.NDArray[np.uint16]
Bools = npt.NDArray[np.bool_]

BLOCK_WIDTH = 128
"""Channels of a plane that are packed together, at most."""
ESCAPE = 15
"""The code of a value that is listed."""
ALIGNMENT = 16
"""Bytes that a block is a multiple of."""

_NOT_FINITE = 255
"""The exponent of infinities and NaNs: no base, unless a channel has nothing else."""
_BATCH = 1 << 18
"""Values in one pass, unless a tile has more: enough to hide what Python costs, few enough for a processor's cache."""


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
    return bool(pack_tiles(spec, num_tokens, raw[None], out[None])[0])


def unpack_tile(spec: KVSpec, num_tokens: int, packed: Bytes, out: Bytes) -> bool:
    """The inverse, into a contiguous raw tile; False for bytes that `pack_tile` does not write: more escapes than there
    is room for, or escapes of values that do not exist. `out` holds garbage then."""
    return bool(unpack_tiles(spec, num_tokens, packed[None], out[None])[0])


def pack_tiles(spec: KVSpec, num_tokens: int, raw: Bytes, out: Bytes) -> Bools:
    """Pack raw tiles (tiles, bytes) into `out`; of each, whether it fits. Tile by tile takes longer: 1.6 times as long
    where a tile has 128 KiB, eight times where it has 10. The bytes of a tile must be contiguous."""
    return _for_all(_pack, spec, num_tokens, raw, out)


def unpack_tiles(spec: KVSpec, num_tokens: int, packed: Bytes, out: Bytes) -> Bools:
    """The inverse; of each tile, whether it can be read."""
    return _for_all(_unpack, spec, num_tokens, out, packed)


def fits_packed(spec: KVSpec, num_tokens: int, packed: Bytes) -> Bools:
    """Of tiles (…, packed bytes): whether each can be read, which one that did not fit when it was packed cannot. Its
    escapes say so."""
    good = np.ones(packed.shape[:-1], np.bool_)
    for block in packed_blocks(_widths(spec), num_tokens):
        words = np.ascontiguousarray(packed[..., block.start : block.start + block.bases]).view(np.uint32)
        counts, escapes = words[..., :1], words[..., 1:]
        is_nowhere = (escapes & 0x00FFFFFF) >= num_tokens * block.width
        good &= (counts[..., 0] <= block.room) & ~(is_nowhere & (np.arange(block.room) < counts)).any(axis=-1)
    return good


class _Run(NamedTuple):
    """Blocks of one shape at equal distances: `across` of them in each of `planes` planes of one width."""

    block: PackedBlock
    """The first of them."""
    planes: int
    across: int
    start: int
    """Of the planes, in the packed tile."""
    plane_bytes: int
    """Of each, packed."""

    @property
    def num_values(self) -> int:
        """Of one tile."""
        return self.planes * self.across * self.block.num_rows * self.block.width

    def values(self, raw: Bytes) -> Halves:
        """In raw tiles: [tile][plane][block][row][channel]."""
        block = self.block
        shape = (len(raw), self.planes, block.num_rows)
        end = block.raw_start + self.planes * block.num_rows * block.row_bytes
        rows = raw[:, block.raw_start : end].reshape(*shape, block.row_bytes)
        channels = rows[..., 2 * block.first : 2 * (block.first + self.across * block.width)].view(np.uint16)
        return channels.reshape(*shape, self.across, block.width).swapaxes(2, 3)

    def blocks(self, packed: Bytes) -> Bytes:
        """In packed tiles: [tile][plane][block][byte]."""
        size, first = self.block.num_bytes, self.block.start - self.start
        planes = packed[:, self.start : self.start + self.planes * self.plane_bytes]
        planes = planes.reshape(len(packed), self.planes, self.plane_bytes)
        return planes[..., first : first + self.across * size].reshape(*planes.shape[:2], self.across, size)


@lru_cache(maxsize=512)
def _runs(widths: tuple[int, ...], num_rows: int) -> tuple[_Run, ...]:
    return tuple(_find_runs(widths, num_rows))


def _find_runs(widths: tuple[int, ...], num_rows: int) -> Iterator[_Run]:
    for _, group in groupby(packed_blocks(widths, num_rows), lambda block: block.row_bytes):
        alike = list(group)
        planes = alike[-1].plane - alike[0].plane + 1
        of_one = alike[: len(alike) // planes]
        plane_bytes = sum(block.num_bytes for block in of_one)
        for _, same in groupby(of_one, lambda block: block.width):
            first, *others = same
            yield _Run(first, planes, 1 + len(others), alike[0].start, plane_bytes)


def _for_all(
    code: Callable[[PackedBlock, Halves, Bytes], Bools], spec: KVSpec, num_tokens: int, raw: Bytes, packed: Bytes
) -> Bools:
    good = np.ones(len(raw), np.bool_)
    for run in _runs(_widths(spec), num_tokens):
        step = max(1, _BATCH // run.num_values)
        for first in range(0, len(raw), step):
            some = slice(first, first + step)
            good[some] &= code(run.block, run.values(raw[some]), run.blocks(packed[some])).all(axis=(1, 2))
    return good


class _Scratch(threading.local):
    """Memory of each thread for the steps between raw and packed. It stays in the processor's cache."""

    def __init__(self) -> None:
        self._wide = np.empty((2, 0), np.uint16)
        self._narrow = np.empty((2, 0), np.uint8)

    def steps(self, size: int) -> tuple[Halves, Halves, Bytes, Bytes]:
        """Twice 16 bits and twice 8 for each of so many values, until the next call."""
        wide, narrow = self._wide, self._narrow
        if wide.shape[1] < size:
            wide, narrow = np.empty((2, size), np.uint16), np.empty((2, size), np.uint8)
            if size <= _BATCH:
                self._wide, self._narrow = wide, narrow
        return wide[0, :size], wide[1, :size], narrow[0, :size], narrow[1, :size]


_scratch = _Scratch()


def _pack(block: PackedBlock, values: Halves, out: Bytes) -> Bools:
    """Blocks of one shape, whatever the axes before row and channel; of each, whether it fits."""
    *shape, rows, width = values.shape
    size, room, at_bases = rows * width, block.room, block.bases
    at_signs = at_bases + width
    at_codes = at_signs + size
    # A pass over 64 KiB takes a microsecond, and as long to call: so few passes, over narrow values, many at once.
    wide, wide_too, narrow, narrow_too = _scratch.steps(values.size)
    np.right_shift(values, 7, out=wide.reshape(values.shape))
    np.copyto(narrow, wide, casting="unsafe")  # without the sign
    exponents, codes = narrow.reshape(values.shape), narrow_too.reshape(values.shape)
    bases = _largest(exponents)
    if bases.max() < _NOT_FINITE:
        np.subtract(bases[..., None, :], exponents, out=codes)
    else:
        bases = _subtract_from_finite(exponents, codes)
    listed = _list_escapes(narrow, narrow_too, size, room)
    out[..., :at_bases] = listed.view(np.uint8).reshape(*shape, at_bases)
    out[..., at_bases:at_signs] = bases
    pairs, bytes_of_two = narrow_too.view(np.uint16), wide[: values.size // 2]
    np.right_shift(pairs, 4, out=bytes_of_two)
    bytes_of_two |= pairs
    np.copyto(out[..., at_codes : at_codes + size // 2], bytes_of_two.reshape(*shape, size // 2), casting="unsafe")
    np.bitwise_and(values, 0x807F, out=wide.reshape(values.shape))
    np.right_shift(wide, 8, out=wide_too)
    wide |= wide_too
    np.copyto(out[..., at_signs:at_codes], wide.reshape(*shape, size), casting="unsafe")
    out[..., at_codes + size // 2 :] = 0
    return (listed[:, 0] <= room).reshape(shape)


def _largest(exponents: Bytes) -> Bytes:
    """Of each channel, over the rows. Halves that overlap by a row where their number is odd do no harm."""
    while (rows := exponents.shape[-2]) > 16:
        half = (rows + 1) // 2
        exponents = np.maximum(exponents[..., :half, :], exponents[..., rows - half :, :])
    found: Bytes = exponents.max(axis=-2)
    return found


def _subtract_from_finite(exponents: Bytes, codes: Bytes) -> Bytes:
    """Bases and codes where some exponents are those of infinities and NaNs."""
    special = exponents == _NOT_FINITE
    bases = _largest(np.where(special, np.uint8(0), exponents))
    bases[special.all(axis=-2)] = _NOT_FINITE
    np.subtract(bases[..., None, :], exponents, out=codes)
    codes[special & (bases[..., None, :] != _NOT_FINITE)] = ESCAPE  # the difference would wrap around
    return bases


def _list_escapes(exponents: Bytes, codes: Bytes, size: int, room: int) -> npt.NDArray[np.uint32]:
    """For each block of `size` values how many escapes it has, and those for which there is room. Their codes are set
    to ESCAPE."""
    listed = np.zeros((len(codes) // size, room + 1), np.uint32)
    found = np.flatnonzero(codes >= ESCAPE)
    if len(found):
        number, position = np.divmod(found, size)
        counts = np.bincount(number, minlength=len(listed))
        listed[:, 0] = counts
        place = 1 + np.arange(len(found)) - (np.cumsum(counts) - counts)[number]
        fits = place <= room
        escapes = position.astype(np.uint32) | exponents[found].astype(np.uint32) << 24
        listed[number[fits], place[fits]] = escapes[fits]
        codes[found] = ESCAPE
    return listed


def _unpack(block: PackedBlock, values: Halves, packed: Bytes) -> Bools:
    """The inverse of `_pack`; of each block, whether it can be read."""
    *shape, rows, width = values.shape
    size, room, at_bases = rows * width, block.room, block.bases
    at_signs = at_bases + width
    at_codes = at_signs + size
    wide, wide_too, narrow, _ = _scratch.steps(values.size)
    bytes_of_two, pairs = wide[: values.size // 2], narrow.view(np.uint16)
    np.copyto(bytes_of_two.reshape(*shape, size // 2), packed[..., at_codes : at_codes + size // 2])
    np.left_shift(bytes_of_two, 4, out=pairs)
    pairs |= bytes_of_two
    pairs &= 0x0F0F
    codes = narrow.reshape(values.shape)
    np.subtract(packed[..., None, at_bases:at_signs], codes, out=codes)
    np.copyto(wide, narrow)
    wide <<= 7
    good = _insert_escapes(packed[..., :at_bases], wide, size, room)
    np.copyto(wide_too.reshape(*shape, size), packed[..., at_signs:at_codes])
    wide_too *= 0x0101  # the sign to the upper byte, and all that does not belong there
    wide_too &= 0x807F
    np.bitwise_or(wide.reshape(values.shape), wide_too.reshape(values.shape), out=values)
    return good.reshape(shape)


def _insert_escapes(packed: Bytes, exponents: Halves, size: int, room: int) -> Bools:
    """Put escapes among the exponents, which are where a bfloat16 has them; of each block, whether that can be."""
    words = np.ascontiguousarray(packed).view(np.uint32).reshape(-1, room + 1)
    counts, escapes = words[:, 0], words[:, 1:]
    good = counts <= room
    if not counts.any():
        return good
    number, entry = np.nonzero((np.arange(room) < counts[:, None]) & good[:, None])
    found = escapes[number, entry]
    position = (found & 0x00FFFFFF).astype(np.intp)
    exists = position < size
    good[number[~exists]] = False
    exponents[(number * size + position)[exists]] = found[exists] >> 24 << 7
    return good
