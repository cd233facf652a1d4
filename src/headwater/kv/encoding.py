"""Tile encodings: how the bytes of a tile are stored, and how many there are.

A record or manifest names its chunk's encoding and stored length. Neither is part of the chunk's key: the same KV under
another encoding is the same chunk. Checksums are over the stored bytes. docs/format.md lists the encodings.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from headwater.kv.spec import KVSpec

log = logging.getLogger("headwater")

RAW = 0
"""Tiles as `[plane][token][dim]`, nothing added and nothing left out."""


class Encoding(NamedTuple):
    """One way to store a tile. Every tile of a chunk takes the same number of bytes, known before it is filled."""

    name: str
    tile_bytes: Callable[[KVSpec, int], int]
    """Stored bytes of one tile of that many tokens. All but `raw` take fewer than `raw`: software that does not look at
    the encoding finds that the length does not fit, and misses."""


ENCODINGS: dict[int, Encoding] = {RAW: Encoding("raw", KVSpec.tile_bytes)}
"""By number: 0 to 255."""

_refused: set[tuple[int, str]] = set()


def stored_tile_bytes(spec: KVSpec, num_tokens: int, encoding: int = RAW) -> int:
    """Stored bytes of one tile; 0 for an encoding that this Headwater does not know."""
    known = ENCODINGS.get(encoding)
    return 0 if known is None else known.tile_bytes(spec, num_tokens)


def stored_extent_bytes(spec: KVSpec, num_tokens: int, encoding: int = RAW) -> int:
    """Stored bytes of a whole chunk; 0 for an encoding that this Headwater does not know."""
    return spec.num_tiles * stored_tile_bytes(spec, num_tokens, encoding)


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
