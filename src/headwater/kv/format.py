"""The extent: where each tile of a chunk lies, and the checksum that proves it.

An extent is `[layer][head][plane][token][dim]` without headers. A tile is one (layer, head) of it. Where context
parallel ranks each fill some rows of a tile, each of them has its own checksum over its own rows, in token order,
plane after plane. docs/format.md is the specification; this module is its arithmetic.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import xxhash

from headwater.kv.spec import KVSpec
from headwater.kv.topology import Split

Bytes = npt.NDArray[np.uint8]

checksum = xxhash.xxh3_64_intdigest
"""XXH3-64, seed 0, of any contiguous buffer."""

EMPTY_CHECKSUM: int = checksum(b"")


@lru_cache(maxsize=256)
def _rows(split: Split, part: int, phase: int, num_tokens: int) -> npt.NDArray[np.intp]:
    rows = split.rows(part, phase, num_tokens)
    rows.setflags(write=False)
    return rows


def part_rows(split: Split, part: int, first_token: int, num_tokens: int) -> npt.NDArray[np.intp]:
    """Rows, in a chunk that starts at `first_token`, that `part` holds. Depends only on the phase of the cycle."""
    return _rows(split, part, first_token % split.period, num_tokens)


def gather_part(spec: KVSpec, tile: Bytes, rows: npt.NDArray[np.intp], num_tokens: int, out: Bytes) -> None:
    """Copy some rows of a whole tile into a part's own buffer: plane after plane, rows in token order."""
    source, target = 0, 0
    for plane in spec.planes:
        width = plane.row_bytes
        taken = tile[source : source + num_tokens * width].reshape(num_tokens, width)
        out[target : target + len(rows) * width].reshape(len(rows), width)[:] = taken[rows]
        source, target = source + num_tokens * width, target + len(rows) * width


def scatter_part(spec: KVSpec, part: Bytes, rows: npt.NDArray[np.intp], num_tokens: int, tile: Bytes) -> None:
    """The inverse of `gather_part`: put a part's rows where they belong in the whole tile, touching no others."""
    source, target = 0, 0
    for plane in spec.planes:
        width = plane.row_bytes
        put = tile[target : target + num_tokens * width].reshape(num_tokens, width)
        put[rows] = part[source : source + len(rows) * width].reshape(len(rows), width)
        source, target = source + len(rows) * width, target + num_tokens * width


def part_checksums(spec: KVSpec, split: Split, first_token: int, num_tokens: int, tile: Bytes) -> list[int]:
    """Checksums of every part of one whole tile, as a record holds them."""
    if split.parts == 1:
        return [checksum(tile)]
    sums = []
    for part in range(split.parts):
        rows = part_rows(split, part, first_token, num_tokens)
        buffer = np.empty(len(rows) * spec.row_bytes, np.uint8)
        gather_part(spec, tile, rows, num_tokens, buffer)
        sums.append(checksum(buffer))
    return sums
