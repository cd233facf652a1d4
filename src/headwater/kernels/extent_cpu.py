"""Paged cache ⇄ extent order on the CPU: the path of CPU engines and the oracle of the Triton kernel.

Everything is a strided copy. Layers that lie evenly spaced, and blocks with consecutive numbers, go together, so that
the number of copies depends on how the cache is cut up and not on its tokens or heads. Tiles of packed spans are packed
and unpacked by `kv.packing`, a layer at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headwater.kernels.extent import ExtentTarget, Move, Pages, Spans, Table
from headwater.kernels.pack import pack_tiles, unpack_tiles

Array = npt.NDArray[Any]

SMALL_PIECE_BYTES = 16 << 10
"""Below this, starting a copy costs more than the bytes, and one indexed copy of all rows is faster."""

_INDEXED_BYTES = 1 << 20
"""Indexed gathers pass through memory of about this size, which stays in the cache."""


class _Piece(NamedTuple):
    """Rows that one strided copy can take: `num_blocks` consecutive blocks, `num_tokens` of each."""

    row: int
    block: int
    token: int
    num_blocks: int
    num_tokens: int


def move_rows_cpu(move: Move, *, scatter: bool) -> None:
    """`gather_rows`, or `scatter_rows`, on memory that the CPU can address."""
    move.check()
    if not move.num_bytes:
        return
    packed = [False] * len(move.targets) if move.spans.packed_bytes is None else (move.spans.packed_bytes > 0).tolist()
    raw = [(span, target) for span, target in enumerate(move.targets) if not packed[span]]
    _move_raw(move.pages, move.spans, raw, move.layers, move.heads, scatter)
    for span, target in enumerate(move.targets):
        if packed[span]:
            for i, layer in enumerate(move.layers):
                _move_packed(move, span, layer, target.address + i * target.layer_stride, target.head_stride, scatter)


def _move_raw(
    pages: Pages, spans: Spans, targets: list[tuple[int, ExtentTarget]], layers: range, heads: range, scatter: bool
) -> None:
    """Copy some spans, each between its rows and raw tiles at its target."""
    before = 0
    for plane, row_bytes in enumerate(pages.row_bytes):
        for start, some in _layer_runs(pages, plane, layers):
            cache = _cache_array(pages, plane, some)[:, :, :, heads.start : heads.stop]
            uniform = cache.strides[1] == pages.block_size * cache.strides[2]
            for span, target in targets:
                rows = int(spans.num_rows[span])
                if rows:
                    extent = _extent_array(target, start, cache.shape, rows, before * rows, cache.dtype)
                    _move_span(cache, extent, spans, span, uniform, pages.block_size, scatter)
        before += row_bytes


def _move_packed(move: Move, span: int, layer: int, address: int, head_stride: int, scatter: bool) -> None:
    """Move one layer of a packed span, through raw tiles that stay in the processor's cache."""
    pages, rows, sizes = move.pages, int(move.spans.num_rows[span]), move.spans.packed_bytes
    assert sizes is not None
    shape = (len(move.heads), int(sizes[span]))
    tiles = _array(address, shape, (head_stride, 1), np.dtype(np.uint8))
    raw = _scratch.tiles(len(move.heads), rows * pages.token_bytes)
    target = ExtentTarget(_address(raw), 0, raw.strides[0])
    if scatter:
        unpack_tiles(pages.widths, rows, tiles, raw)
    _move_raw(pages, move.spans, [(span, target)], range(layer, layer + 1), move.heads, scatter)
    if not scatter:
        pack_tiles(pages.widths, rows, raw, tiles)


def _move_span(
    cache: Array, extent: Array, spans: Spans, span: int, uniform: bool, block_size: int, scatter: bool
) -> None:
    """Copy one span of one plane. `cache` is [layer, block, token, head, dim], `extent` [layer, head, row, dim]."""
    offset, rows, first = int(spans.offset[span]), int(spans.num_rows[span]), int(spans.first_block[span])
    blocks = spans.blocks[first : first - (-(offset + rows) // block_size)]
    edges = [0, *(np.flatnonzero(np.diff(blocks) != 1) + 1).tolist(), len(blocks)]  # of runs of consecutive blocks
    if len(edges) > 2 and extent.nbytes // (len(edges) - 1) < SMALL_PIECE_BYTES:
        _move_indexed(cache, extent, blocks, offset, block_size, scatter)
        return
    for row, block, token, num_blocks, num_tokens in _pieces(blocks, edges, offset, rows, block_size, uniform):
        if num_blocks == 1:
            source = _tokens(cache, block, token, num_tokens)
            target = extent[:, :, row : row + num_tokens].transpose(0, 2, 1, 3)
        else:
            source = cache[:, block : block + num_blocks]
            part = extent[:, :, row : row + num_blocks * num_tokens]
            shape = (*part.shape[:2], num_blocks, num_tokens, part.shape[3])
            strides = (*part.strides[:2], num_tokens * part.strides[2], *part.strides[2:])
            target = _array(_address(part), shape, strides, part.dtype).transpose(0, 2, 3, 1, 4)
        if scatter:
            np.copyto(source, target)
        else:
            np.copyto(target, source)


class _Scratch(threading.local):
    """Memory for raw tiles, for each thread."""

    def __init__(self) -> None:
        self._room = np.empty(0, np.uint8)

    def tiles(self, count: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Room for so many of them."""
        if self._room.size < count * num_bytes:
            self._room = np.empty(count * num_bytes, np.uint8)
        return self._room[: count * num_bytes].reshape(count, num_bytes)


_scratch = _Scratch()


class SpanWriter:
    """Scatters spans piece by piece, some layers and heads at a time, with all but the copies worked out before.

    For callers whose threads share one interpreter: where each piece had to be planned, they would wait for each other.
    """

    def __init__(self, pages: Pages, spans: Spans, layers: range) -> None:
        self._num_rows: list[int] = spans.num_rows.tolist()
        self._packed = spans.packed_bytes
        self._pages = pages
        self._layers = layers
        self._caches = [
            [_cache_array(pages, plane, range(layer, layer + 1))[0] for plane in range(len(pages.row_bytes))]
            for layer in layers
        ]
        self._pieces = [list(_span_pieces(spans, span, pages.block_size)) for span in range(len(self._num_rows))]

    @property
    def max_copies(self) -> int:
        """Copies that one plane of one layer of a span takes at most: many, where its blocks are scattered."""
        return max(map(len, self._pieces))

    def write(self, span: int, layers: range, heads: range, tiles: npt.NDArray[np.uint8]) -> None:
        """Put one span's tiles, bytes of shape (layers, heads, stored bytes of a tile), into the cache. Layers and
        heads are indices into those of the pages."""
        rows, pages = self._num_rows[span], self._pages
        is_packed = self._packed is not None and self._packed[span] > 0
        for layer, stored in zip(layers, tiles, strict=True):
            raw = stored
            if is_packed:
                raw = _scratch.tiles(len(heads), rows * pages.token_bytes)
                unpack_tiles(pages.widths, rows, stored, raw)
            self._write_layer(span, layer, heads, raw)

    def _write_layer(self, span: int, layer: int, heads: range, tiles: npt.NDArray[np.uint8]) -> None:
        rows, before, caches = self._num_rows[span], 0, self._caches[self._layers.index(layer)]
        for cache, row_bytes in zip(caches, self._pages.row_bytes, strict=True):
            part = tiles[:, before * rows : (before + row_bytes) * rows]
            before += row_bytes
            extent = part.view(cache.dtype).reshape(len(heads), rows, cache.shape[3])
            for row, block, token, num_blocks, num_tokens in self._pieces[span]:
                target = cache[block : block + num_blocks, token : token + num_tokens, heads.start : heads.stop]
                source = extent[:, row : row + num_blocks * num_tokens]
                source = source.reshape(len(heads), num_blocks, num_tokens, -1).transpose(1, 2, 0, 3)
                np.copyto(target, source)


def _span_pieces(spans: Spans, span: int, block_size: int) -> Iterator[_Piece]:
    offset, rows, first = int(spans.offset[span]), int(spans.num_rows[span]), int(spans.first_block[span])
    blocks = spans.blocks[first : first - (-(offset + rows) // block_size)]
    edges = [0, *(np.flatnonzero(np.diff(blocks) != 1) + 1).tolist(), len(blocks)]
    return _pieces(blocks, edges, offset, rows, block_size, uniform=False)


def _move_indexed(cache: Array, extent: Array, blocks: Table, offset: int, block_size: int, scatter: bool) -> None:
    rows = np.arange(offset, offset + extent.shape[2])
    block, token = blocks[rows // block_size], rows % block_size
    by_row = extent.transpose(0, 2, 1, 3)
    step = max(1, _INDEXED_BYTES // max(1, extent[0].nbytes))
    for layer in range(0, len(cache), step):
        some = slice(layer, layer + step)
        if scatter:
            cache[some, block, token] = by_row[some]
        else:
            by_row[some] = cache[some, block, token]


def _pieces(
    blocks: Table, edges: list[int], offset: int, num_rows: int, block_size: int, uniform: bool
) -> Iterator[_Piece]:
    """Cut a span at the edges of its runs of consecutive blocks; also where a block is not whole, unless the rows of
    consecutive blocks are evenly spaced (`uniform`), so that a run is one long block."""
    for low, high in pairwise(edges):
        begin, end = max(offset, low * block_size), min(offset + num_rows, high * block_size)
        if uniform:
            yield _Piece(begin - offset, int(blocks[low]), begin - low * block_size, 1, end - begin)
            continue
        while begin < end:
            number, token = divmod(begin, block_size)
            whole = (end - begin) // block_size if token == 0 else 0
            rows = whole * block_size or min(block_size - token, end - begin)
            yield _Piece(begin - offset, int(blocks[number]), token, max(whole, 1), block_size if whole else rows)
            begin += rows


def _layer_runs(pages: Pages, plane: int, layers: range) -> Iterator[tuple[int, range]]:
    """Cut the layers into runs that lie evenly spaced with equal strides: (place of the first, those layers)."""
    planes = [pages.planes[layer][plane] for layer in layers]
    start = 0
    for i in range(1, len(planes) + 1):
        if i < len(planes) and planes[i][1:] == planes[start][1:]:
            step = planes[start + 1].address - planes[start].address
            if planes[i].address - planes[i - 1].address == step:
                continue
        yield start, layers[start:i]
        start = i


def _cache_array(pages: Pages, plane: int, layers: range) -> Array:
    """Evenly spaced layers of the cache as [layer, block, token, head, dim]; a dense row is one item of it, which numpy
    copies faster than as many bytes."""
    first = pages.planes[layers[0]][plane]
    step = pages.planes[layers[1]][plane].address - first.address if len(layers) > 1 else 0
    row_bytes, element = pages.row_bytes[plane], pages.element_bytes[plane]
    dtype = np.dtype(f"V{row_bytes}" if first.dim == element else f"u{element}")
    shape = (len(layers), pages.num_blocks, pages.block_size, pages.num_heads, row_bytes // dtype.itemsize)
    return _array(first.address, shape, (step, first.block, first.token, first.head, first.dim), dtype)


def _extent_array(
    target: ExtentTarget, layer: int, shape: tuple[int, ...], rows: int, plane_start: int, dtype: np.dtype[Any]
) -> Array:
    """One plane of one span as [layer, head, row, dim]."""
    width = shape[4]
    strides = (target.layer_stride, target.head_stride, width * dtype.itemsize, dtype.itemsize)
    address = target.address + layer * target.layer_stride + plane_start
    return _array(address, (shape[0], shape[3], rows, width), strides, dtype)


def _tokens(cache: Array, block: int, token: int, num_tokens: int) -> Array:
    """Rows from (block, token) on, at the token stride, which may lead into the next blocks."""
    if token + num_tokens <= cache.shape[2]:
        return cache[:, block, token : token + num_tokens]
    start = cache[:, block, token]
    shape = (cache.shape[0], num_tokens, *cache.shape[3:])
    return _array(_address(start), shape, (cache.strides[0], *cache.strides[2:]), cache.dtype)


class _Memory:
    """Bytes at an address, as numpy wants to be told of them. Whoever owns them must outlive the array."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "strides": strides,
            "typestr": dtype.str,
            "version": 3,
        }


def _array(address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    return np.asarray(_Memory(address, shape, strides, dtype))


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])
