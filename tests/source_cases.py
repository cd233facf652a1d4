"""Extents of a first tier to be filled by a source, for tests of every kind of lower tier."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from headwater.kv.format import part_checksums
from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import Shard, Split, Topology, whole_shard
from headwater.pool import Pool, Space
from headwater.stores.base import Filled, Filling, Reservation, Status, Tiles
from headwater.stores.tiers.lower import LowerTier

from support import gqa, identity, local_tiles

SPEC = gqa(layers=4, heads=4, dim=16)
WHOLE_SHARD = whole_shard(SPEC)
CHUNK = 16
PATIENCE_S = 30.0


def space_of(pool: Pool) -> Space:
    return pool.space(identity(), SPEC, chunk_tokens=CHUNK)


def write(space: Space, chunks: Sequence[ChunkRef], topology: Topology = Topology()) -> None:  # noqa: B008 - frozen
    """As all ranks of a server."""
    for shard in topology.shards(SPEC):
        tiles = [local_tiles(SPEC, chunk, shard) for chunk in chunks]
        assert all(status.stored for status in space.write(chunks, shard, tiles, deadline_s=PATIENCE_S))


@contextmanager
def reserved(front: Space, chunks: Sequence[ChunkRef], split: Split) -> Iterator[tuple[list[Reservation], list[Tiles]]]:
    """Extents of the first tier for these chunks, filled with something that is not them."""
    reservations = front.reserve(chunks, Shard(range(4), range(4), split), deadline_s=PATIENCE_S)
    extents = []
    for reservation in reservations:
        assert reservation.status == Status.OK
        tiles = reservation.tiles
        assert tiles is not None
        tiles[...] = 0xA5
        extents.append(tiles)
    try:
        yield reservations, extents
    finally:
        for reservation in reservations:
            reservation.abort()


def fill(tier: LowerTier, space: Space, chunks: Sequence[ChunkRef], extents: Sequence[Tiles]) -> list[Filling]:
    return tier.fill(space.root(), chunks, extents, time.monotonic() + PATIENCE_S)


def check(filling: Filling, chunk: ChunkRef, extent: Tiles) -> None:
    """The whole chunk is in the extent, and what is said of it is true."""
    assert filling.status == Status.OK
    assert np.array_equal(extent, local_tiles(SPEC, chunk, WHOLE_SHARD))
    tiles = [tile for layer in extent for tile in layer]
    sums = [part_checksums(SPEC, filling.form.split, chunk.first_token, chunk.num_tokens, tile) for tile in tiles]
    assert filling.sums is not None
    assert filling.sums.dtype == np.uint64
    assert filling.sums.tolist() == [value for tile in sums for value in tile]


def commit(front: Space, reservations: Sequence[Reservation], fillings: Sequence[Filling]) -> list[Status]:
    """Make the chunks visible with the checksums that came along."""
    filled = []
    for reservation, filling in zip(reservations, fillings, strict=True):
        assert filling.sums is not None
        for part in range(filling.form.split.parts):
            sums = filling.sums.reshape(-1, filling.form.split.parts)[:, part]
            filled.append(Filled(reservation, range(4), range(4), part, sums))
    return front.commit(filled, deadline_s=PATIENCE_S)
