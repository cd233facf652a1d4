"""Filling an extent: tiles into place with their checksums, and the checksums into place in the record."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from headwater.kv.format import EMPTY_CHECKSUM, checksum
from headwater.kv.hashing import ChunkRef
from headwater.kv.spec import KVSpec
from headwater.kv.topology import Split
from headwater.stores.base import Tiles
from headwater.stores.embedded.data import Sources
from headwater.stores.embedded.index import Entry, Index

Sums = list[int] | npt.NDArray[np.uint64]
"""Checksums in [layer][head] order."""


def fill_mapped(extent: Tiles, layers: range, heads: range, tiles: Tiles) -> list[int]:
    """Copy each tile and hash it while it is in the cache. This loop is the write path's whole cost.

    Views are made where they are used: made ahead, they would have left the cache again.
    """
    memmove, hashed, sums = ctypes.memmove, checksum, list[int]()
    target, (layer_stride, head_stride, size) = extent.ctypes.data, (*extent.strides[:2], extent.shape[2])
    source, (row_stride, tile_stride, _) = tiles.ctypes.data, tiles.strides
    for i, layer in enumerate(layers):
        place, tile = target + layer * layer_stride + heads.start * head_stride, source + i * row_stride
        row = tiles[i]
        for j in range(len(heads)):
            memmove(place, tile, size)
            sums.append(hashed(row[j]))
            place, tile = place + head_stride, tile + tile_stride
    return sums


def put_all_sums(index: Index, spec: KVSpec, entry: Entry, layers: range, heads: range, part: int, sums: Sums) -> bool:
    """Note checksums in [layer][head] order in their record; False if one was noted before with another value."""
    if entry.record.parts == 1 and len(heads) == spec.num_kv_heads and layers.step == 1:
        return index.put_sums(entry, layers.start * len(heads), sums if isinstance(sums, list) else sums.tolist())
    shape, column = (spec.num_layers, spec.num_kv_heads), np.asarray(sums, np.uint64)
    return index.put_block(entry, shape, layers, heads, part, column)


def row_runs(spec: KVSpec, offset: int, part: Tiles, rows: npt.NDArray[np.intp], num_tokens: int) -> list[Sources]:
    """A part's rows as writes of consecutive rows, for data that cannot be addressed."""
    runs: list[Sources] = []
    if not len(rows):
        return runs
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    starts, ends = [0, *breaks.tolist()], [*breaks.tolist(), len(rows)]
    source = 0
    for plane in spec.planes:
        width = plane.row_bytes
        for start, end in zip(starts, ends, strict=True):
            piece = part[source + start * width : source + end * width]
            runs.append((offset + int(rows[start]) * width, [piece]))
        source += len(rows) * width
        offset += num_tokens * width
    return runs


def empty_payload(spec: KVSpec, split: Split, chunk: ChunkRef) -> bytes:
    """Checksums and their flags before anything is written. Parts that hold no row of this chunk are done already."""
    count = spec.num_tiles * split.parts
    payload = bytearray(9 * count)
    if split.parts > 1:
        sums = memoryview(payload)[: 8 * count].cast("Q")
        for part in range(split.parts):
            if not split.count(part, chunk.first_token, chunk.num_tokens):
                for tile in range(spec.num_tiles):
                    sums[tile * split.parts + part] = EMPTY_CHECKSUM
                    payload[8 * count + tile * split.parts + part] = 1
    return bytes(payload)
