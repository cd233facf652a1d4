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
    again = np.empty((tiles.shape[1], spec.tile_bytes(num_tokens)), np.uint8)
    known = None if sums is None else sums.reshape(tiles.shape[:2])
    for i in range(tiles.shape[0]):  # a layer stays in the processor's cache
        if not coding.encode(spec, num_tokens, tiles[i], packed[i]).all():
            return None
        is_back = coding.decode(spec, num_tokens, packed[i], again).all()
        is_same = (
            np.array_equal(again, tiles[i])
            if known is None
            else [checksum(tile) for tile in again] == known[i].tolist()
        )
        if not is_back or not is_same:
            return None
    return packed


def pack_piece(spec: KVSpec, piece: Piece) -> Piece:
    """The piece with its raw tiles packed; as it is where they cannot be."""
    packed = pack_tiles(spec, piece.chunk.num_tokens, piece.tiles) if piece.encoding == RAW else None
    return piece if packed is None else piece._replace(tiles=packed, encoding=PACKED)
