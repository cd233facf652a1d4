"""Pools with packed chunks in them: what the tests of packing have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headwater.kv.encoding import PACKED, stored_tile_bytes
from headwater.kv.format import checksum
from headwater.kv.hashing import ChunkRef
from headwater.kv.packing import pack_tile
from headwater.kv.topology import Shard, whole_shard
from headwater.pool import Pool, Space
from headwater.stores.base import Filled, Status
from headwater.stores.embedded.data import MappedData, segment_path
from headwater.stores.embedded.store import EmbeddedStore

from support import empty_tiles, gqa, identity, local_tiles

CHUNK = 16
SPEC = gqa(layers=4, heads=2, dim=32, dtype="bfloat16")
WHOLE = whole_shard(SPEC)


def space_of(pool: Pool) -> Space:
    """The tests' space in a pool."""
    return pool.space(identity(), SPEC, chunk_tokens=CHUNK)


def prompt(space: Space, num_chunks: int, seed: int = 0, tail: int = 0) -> list[ChunkRef]:
    """The chunks of a prompt that differs by `seed`."""
    return space.keys([seed, *range(1, num_chunks * CHUNK + tail)]).chunks()


def front_of(pool: Pool) -> EmbeddedStore:
    """A pool's first tier."""
    front = pool.first_tier
    assert isinstance(front, EmbeddedStore)
    return front


def encodings_of(pool: Pool, chunks: Sequence[ChunkRef]) -> list[int | None]:
    """How each chunk is stored in the first tier; None where it is not."""
    store: Any = pool.first_tier
    return [None if form is None else form.encoding for form in store.forms(chunks)]


def write(space: Space, chunks: Sequence[ChunkRef], shard: Shard = WHOLE, encoding: int | None = None) -> None:
    """Write chunks in an encoding, or as the pool wants it."""
    tiles = [local_tiles(SPEC, chunk, shard) for chunk in chunks]
    forms = None if encoding is None else [encoding] * len(chunks)
    if encoding == PACKED:
        tiles = [packed(chunk, shard) for chunk in chunks]
    statuses = space.write(chunks, shard, tiles, encodings=forms, deadline_s=30)
    assert all(status.stored for status in statuses), statuses


def packed(chunk: ChunkRef, shard: Shard = WHOLE) -> np.ndarray:
    """A shard's tiles of a chunk as they are stored when they are packed."""
    raw = local_tiles(SPEC, chunk, shard)
    out = np.zeros((*raw.shape[:2], stored_tile_bytes(SPEC, chunk.num_tokens, PACKED)), np.uint8)
    for i in range(raw.shape[0]):
        for j in range(raw.shape[1]):
            assert pack_tile(SPEC, chunk.num_tokens, raw[i, j], out[i, j])
    return out


def noise(chunk: ChunkRef) -> np.ndarray:
    """Tiles that do not pack."""
    shape = WHOLE.local_shape(SPEC, chunk.first_token, chunk.num_tokens)
    return np.random.default_rng(int.from_bytes(chunk.key[:4], "little")).integers(0, 256, shape, np.uint8)


def check(space: Space, chunks: Sequence[ChunkRef], shard: Shard = WHOLE) -> None:
    """Fail unless these chunks are read right, one by one and as one array."""
    out = [empty_tiles(SPEC, chunk, shard) for chunk in chunks]
    assert space.read(chunks, shard, out, deadline_s=30) == [Status.OK] * len(chunks)
    for chunk, tiles in zip(chunks, out, strict=True):
        assert np.array_equal(tiles, local_tiles(SPEC, chunk, shard)), f"chunk {chunk.number} differs"


def flip(pool: Pool, chunk: ChunkRef, at: int, mask: int = 1) -> None:
    """Change bits of a chunk where it is stored in the first tier."""
    core = front_of(pool)._core
    entry = core.index.find(chunk.key)
    assert entry is not None
    offset = entry.record.offset + at
    if isinstance(core.data, MappedData):
        core.data.view(offset, 1)[0] ^= mask
        return
    assert pool.directory is not None
    segment, start = divmod(offset, core.geometry.segment_bytes)
    with open(segment_path(pool.directory, core.geometry, segment), "r+b", buffering=0) as file:
        file.seek(start)
        (byte,) = file.read(1)
        file.seek(start)
        file.write(bytes([byte ^ mask]))


def store_lie(space: Space, chunk: ChunkRef, tiles: np.ndarray) -> None:
    """Store bytes as a packed chunk, with checksums that are right."""
    (extent,) = space.reserve([chunk], WHOLE, encodings=[PACKED])
    stored = extent.tiles
    assert stored is not None
    stored[...] = tiles
    sums = [checksum(tile) for layer in tiles for tile in layer]
    assert space.commit([Filled(extent, WHOLE.layers, WHOLE.heads, 0, sums)]) == [Status.OK]
    extent.close()
