"""Packing raw tiles by the processor, for those who write them where a slower wire or a disk follows.

Costs some two seconds a gigabyte and core, with a look back at what was packed: not for threads that an engine waits
for.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headwater.kv.encoding import ENCODINGS, PACKED, RAW, stored_tile_bytes
from headwater.kv.format import checksum
from headwater.kv.spec import KVSpec
from headwater.stores.base import Piece, Tiles


def pack_tiles(spec: KVSpec, num_tokens: int, tiles: Tiles, sums: npt.NDArray[np.uint64] | None = None) -> Tiles | None:
    """Raw tiles of some layers and heads as packed ones. None where one of them cannot be packed, or does not come back
    as it was: as its checksum in `sums` says, or else bit for bit. Packed tiles get checksums of their own, which would
    make damage look right."""
    coding, size = ENCODINGS[PACKED], stored_tile_bytes(spec, num_tokens, PACKED)
    if coding.encode is None or coding.decode is None or not size:
        return None
    packed = np.empty((*tiles.shape[:2], size), np.uint8)
    again = np.empty(spec.tile_bytes(num_tokens), np.uint8)
    known = None if sums is None else sums.reshape(-1).tolist()
    for i in range(tiles.shape[0]):
        for j in range(tiles.shape[1]):
            raw, stored = tiles[i, j], packed[i, j]
            if not coding.encode(spec, num_tokens, raw, stored) or not coding.decode(spec, num_tokens, stored, again):
                return None
            if not (np.array_equal(again, raw) if known is None else checksum(again) == known[i * tiles.shape[1] + j]):
                return None
    return packed


def pack_piece(spec: KVSpec, piece: Piece) -> Piece:
    """The piece with its raw tiles packed; as it is where they cannot be."""
    packed = pack_tiles(spec, piece.chunk.num_tokens, piece.tiles) if piece.encoding == RAW else None
    return piece if packed is None else piece._replace(tiles=packed, encoding=PACKED)
