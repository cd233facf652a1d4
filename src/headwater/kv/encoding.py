"""Tile encodings: how the bytes of a tile are stored, and how many there are.

A record or manifest names its chunk's encoding and stored length. Neither is part of the chunk's key: the same KV under
another encoding is the same chunk. Checksums are over the stored bytes. docs/format.md lists the encodings.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from headwater.kv.packing import Bools, Bytes, pack_tiles, packed_tile_bytes, unpack_tiles
from headwater.kv.spec import KVSpec

log = logging.getLogger("headwater")

RAW = 0
"""Tiles as `[plane][token][dim]`, nothing added and nothing left out."""
PACKED = 1
"""bfloat16 in three quarters of its bytes: see `packing`."""

Coder = Callable[[KVSpec, int, Bytes, Bytes], Bools]
"""From tiles of so many tokens, (tiles, bytes), to others; of each, whether that can be: else its target holds garbage.
The bytes of a tile are contiguous."""


class Encoding(NamedTuple):
    """One way to store a tile. Every tile of a chunk takes the same number of bytes, known before it is filled."""

    name: str
    tile_bytes: Callable[[KVSpec, int], int]
    """Stored bytes of one tile of that many tokens. All but `raw` take fewer than `raw`: software that does not look at
    the encoding finds that the length does not fit, and misses. 0 for a tile that cannot be stored so."""
    decode: Coder | None = None
    """Stored tiles → raw tiles. None: such tiles can be kept and passed on, and not be used here."""
    encode: Coder | None = None
    """Raw tiles → stored tiles."""


def _copy(spec: KVSpec, num_tokens: int, source: Bytes, target: Bytes) -> Bools:
    np.copyto(target, source)
    return np.ones(len(source), np.bool_)


ENCODINGS: dict[int, Encoding] = {
    RAW: Encoding("raw", KVSpec.tile_bytes, _copy, _copy),
    PACKED: Encoding("packed", packed_tile_bytes, unpack_tiles, pack_tiles),
}
"""By number: 0 to 255."""

_refused: set[tuple[int, str]] = set()


def stored_tile_bytes(spec: KVSpec, num_tokens: int, encoding: int = RAW) -> int:
    """Stored bytes of one tile; 0 for an encoding that this Headwater does not know."""
    known = ENCODINGS.get(encoding)
    return 0 if known is None else known.tile_bytes(spec, num_tokens)


def stored_extent_bytes(spec: KVSpec, num_tokens: int, encoding: int = RAW) -> int:
    """Stored bytes of a whole chunk; 0 for an encoding that this Headwater does not know."""
    return spec.num_tiles * stored_tile_bytes(spec, num_tokens, encoding)


def encoding_of_extent(spec: KVSpec, num_tokens: int, num_bytes: int) -> int | None:
    """The encoding in which a whole chunk takes so many bytes; None where there is none. Lengths differ."""
    sizes = {stored_extent_bytes(spec, num_tokens, number): number for number in ENCODINGS}
    return sizes.get(num_bytes)


def packed_or_raw(spec: KVSpec, num_tokens: int) -> int:
    """PACKED where tiles of so many tokens can be stored so."""
    return PACKED if packed_tile_bytes(spec, num_tokens) else RAW


def can_decode(encoding: int) -> bool:
    """Whether tiles that are stored so can be used here."""
    return encoding in ENCODINGS and ENCODINGS[encoding].decode is not None


def decode_tiles(encoding: int, spec: KVSpec, num_tokens: int, stored: Bytes, out: Bytes) -> bool:
    """Turn stored tiles, (tiles, bytes), whose checksums were compared, into raw ones; False where nobody could have
    written one of them (their encoding is not defined for this model, or their length is another), or they cannot be
    decoded here."""
    decode = ENCODINGS[encoding].decode if encoding in ENCODINGS else None
    is_defined = 0 < stored.shape[-1] == stored_tile_bytes(spec, num_tokens, encoding)
    return decode is not None and is_defined and bool(decode(spec, num_tokens, stored, out).all())


def refuse(encoding: int, where: str) -> None:
    """Log, once for each store, that its tiles are in an encoding which cannot be read here."""
    if (encoding, where) not in _refused:
        _refused.add((encoding, where))
        log.warning(
            "%s holds KV in tile encoding %d, which this Headwater cannot read: those chunks are misses and stay where "
            "they are; upgrade to use them",
            where,
            encoding,
        )
