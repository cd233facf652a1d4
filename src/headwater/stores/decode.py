"""From stored tiles, once their checksums were compared, to what a reader asked for: raw tiles, or its rows of them."""

from __future__ import annotations

import numpy as np

from headwater.kv.encoding import RAW, decode_tiles
from headwater.kv.format import gather_part, part_rows
from headwater.kv.hashing import ChunkRef
from headwater.kv.spec import KVSpec
from headwater.kv.topology import Shard
from headwater.stores.base import Tiles


def takes_stored(shard: Shard, encoding: int) -> bool:
    """Whether stored tiles are what a reader wants, so that they may land in its own memory."""
    return shard.split.parts == 1 and encoding == RAW


def settle_tiles(spec: KVSpec, chunk: ChunkRef, shard: Shard, encoding: int, stored: Tiles, out: Tiles) -> bool:
    """Turn whole stored tiles of a shard, (layers, heads, stored bytes), into what its reader asked for. False where
    they are not readable, whatever their checksums say: nobody could have written them."""
    rows = None
    if shard.split.parts > 1:
        rows = part_rows(shard.split, shard.part, chunk.first_token, chunk.num_tokens)
    whole = np.empty((stored.shape[1], spec.tile_bytes(chunk.num_tokens)), np.uint8) if rows is not None else None
    for i in range(stored.shape[0]):  # a layer stays in the processor's cache
        raw = out[i] if whole is None else whole
        if not decode_tiles(encoding, spec, chunk.num_tokens, stored[i], raw):
            return False
        for j in range(len(raw) if rows is not None else 0):
            assert rows is not None
            gather_part(spec, raw[j], rows, chunk.num_tokens, out[i, j])
    return True
