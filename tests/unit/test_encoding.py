"""Encodings: what is stored has the length that its encoding gives it, and an encoding nobody knows is a miss."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from headwater.kv import encoding
from headwater.kv.encoding import ENCODINGS, RAW, Encoding, stored_extent_bytes, stored_tile_bytes
from headwater.kv.format import checksum
from headwater.kv.hashing import ChunkRef
from headwater.kv.spec import KVSpec
from headwater.kv.topology import Shard, Topology, whole_shard
from headwater.pool import Pool, Space, open_pool
from headwater.stores.base import Filled, Status
from headwater.stores.embedded.index import Entry
from headwater.stores.embedded.store import EmbeddedStore

from support import empty_tiles, gqa, identity, local_tiles, temporary_url

SPEC = gqa(layers=2, heads=4, dim=16)
SHARD = whole_shard(SPEC)
PACKED = 7
"""An encoding of these tests: three quarters of the bytes."""


def packed_bytes(spec: KVSpec, num_tokens: int) -> int:
    return 3 * spec.tile_bytes(num_tokens) // 4


@pytest.fixture
def pool(tmp_path: object) -> Iterator[Pool]:
    with temporary_url("shm", tmp_path, "capacity=4MiB") as url, open_pool(url) as opened:
        yield opened


@pytest.fixture
def space(pool: Pool) -> Space:
    return pool.space(identity(), SPEC, chunk_tokens=16)


@pytest.fixture
def packing(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another encoding is known: tiles in it can be kept, and not decoded."""
    monkeypatch.setitem(ENCODINGS, PACKED, Encoding("packed", packed_bytes))


def store_of(pool: Pool) -> EmbeddedStore:
    store = pool._store
    assert isinstance(store, EmbeddedStore)
    return store


def entry_of(pool: Pool, chunk: ChunkRef) -> Entry:
    entry = store_of(pool)._core.index.find(chunk.key)
    assert entry is not None
    return entry


def fill(space: Space, chunks: list[ChunkRef]) -> list[np.ndarray]:
    """Put noise into extents as they are stored; what each holds now."""
    rng, stored = np.random.default_rng(1), []
    extents = space.reserve(chunks, SHARD, encodings=[PACKED] * len(chunks))
    for extent in extents:
        tiles = extent.tiles
        assert tiles is not None
        tiles[...] = rng.integers(0, 256, tiles.shape, np.uint8)
        sums = [checksum(tile) for layer in tiles for tile in layer]
        assert space.commit([Filled(extent, SHARD.layers, SHARD.heads, 0, sums)]) == [Status.OK]
        stored.append(tiles.copy())
        extent.close()
    return stored


def test_raw_tiles_are_stored_as_they_are() -> None:
    assert (RAW, ENCODINGS[RAW].name) == (0, "raw")
    assert stored_tile_bytes(SPEC, 16) == SPEC.tile_bytes(16)
    assert stored_extent_bytes(SPEC, 5) == SPEC.extent_bytes(5)
    assert stored_tile_bytes(SPEC, 16, 200) == stored_extent_bytes(SPEC, 16, 200) == 0


def test_what_is_written_is_named_raw(pool: Pool, space: Space) -> None:
    chunks = space.keys(range(20)).chunks()
    space.write(chunks, SHARD, [local_tiles(SPEC, chunk, SHARD) for chunk in chunks])
    for chunk in chunks:
        record = entry_of(pool, chunk).record
        assert (record.encoding, record.tile_bytes) == (RAW, SPEC.tile_bytes(chunk.num_tokens))


@pytest.mark.usefixtures("packing")
def test_lengths_are_those_of_the_encoding(pool: Pool, space: Space) -> None:
    """Extents, what they take, what is exported and what is verified: none of it goes by the spec alone."""
    chunks = space.keys(range(40)).chunks()
    stored = fill(space, chunks)
    for chunk, tiles in zip(chunks, stored, strict=True):
        record = entry_of(pool, chunk).record
        assert tiles.shape == (2, 4, packed_bytes(SPEC, chunk.num_tokens))
        assert (record.encoding, record.length, record.tile_bytes) == (PACKED, tiles.nbytes, tiles.shape[2])
        exported = store_of(pool).export(chunk.key)
        assert exported is not None
        assert (exported.encoding, exported.tiles.tobytes()) == (PACKED, tiles.tobytes())
        exported.release()
    report, stats = pool.verify(), pool.stats().store
    assert (report.clean, report.chunks, report.bytes) == (True, 3, sum(tiles.nbytes for tiles in stored))
    assert stats.stored_bytes == report.bytes
    assert {info.num_bytes for info in pool.scan()} == {tiles.nbytes for tiles in stored}
    pool.clear(space=space)
    assert pool.stats().store.used_bytes == 0
    assert pool.verify().clean


@pytest.mark.usefixtures("packing")
def test_readers_of_plain_tiles_refuse_what_they_cannot_decode(
    pool: Pool, space: Space, caplog: pytest.LogCaptureFixture
) -> None:
    """A checksum over stored bytes is right whatever they mean: nothing may be taken for raw that is not."""
    chunks = space.keys(range(32)).chunks()
    fill(space, chunks)
    ranks: list[Shard] = [SHARD, *Topology(tp=8, dcp=2).shards(SPEC)]
    for shard in ranks:
        buffers = [empty_tiles(SPEC, chunk, shard) for chunk in chunks]
        assert space.read(chunks, shard, buffers) == [Status.MISS] * 2
        assert all((buffer == 0xA5).all() for buffer in buffers)
    assert space.read(chunks, SHARD, np.empty((2, *SHARD.local_shape(SPEC, 0, 16)), np.uint8)) == [Status.MISS] * 2
    loan = space.lend(chunks, SHARD)
    assert loan.places == [None, None]
    loan.release()
    with space.borrow(chunks[0], SHARD) as view:
        assert view is None
    assert sum("cannot read" in message for message in caplog.messages) == 1
    assert space.exists(chunks) == [True, True]
    assert pool.stats().store.damaged == 0


@pytest.mark.usefixtures("packing")
def test_ranks_that_store_in_another_encoding_do_not_fill_the_same_extent(
    space: Space,
) -> None:
    chunks = space.keys(range(32)).chunks()
    extents = space.reserve(chunks, SHARD, encodings=[PACKED] * 2)
    assert {extent.status for extent in space.reserve(chunks, SHARD)} == {Status.BUSY}
    assert {extent.status for extent in space.reserve(chunks, SHARD, encodings=[PACKED] * 2)} == {Status.OK}
    for extent in extents:
        extent.abort()


def test_an_unknown_encoding_is_a_miss_and_no_damage(
    pool: Pool, space: Space, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keys = space.keys(range(48))
    chunks = keys.chunks()
    space.write(chunks[:1], SHARD, [local_tiles(SPEC, chunks[0], SHARD)])
    with monkeypatch.context() as patch:
        patch.setitem(ENCODINGS, PACKED, Encoding("packed", packed_bytes))
        fill(space, chunks[1:])
        assert space.match(keys).num_tokens == 48
    encoding._refused.clear()
    for _ in range(2):
        assert space.match(keys).num_tokens == 16
        assert space.exists(chunks) == [True, False, False]
        buffers = [empty_tiles(SPEC, chunk, SHARD) for chunk in chunks]
        assert space.read(chunks, SHARD, buffers) == [Status.OK, Status.MISS, Status.MISS]
        loan = space.lend(chunks, SHARD)
        assert [place is None for place in loan.places] == [False, True, True]
        loan.release()
        assert store_of(pool).export(chunks[1].key) is None
    assert [f"encoding {PACKED}" in message for message in caplog.messages] == [True]
    # It is somebody's all the same: not written again, not damaged, not in the way of room.
    assert space.write(chunks[1:2], SHARD, [local_tiles(SPEC, chunks[1], SHARD)]) == [Status.EXISTS]
    report = pool.verify()
    assert (report.clean, report.chunks, pool.stats().store.chunks) == (True, 1, 3)
    assert pool.stats().store.damaged == 0


def test_a_length_that_contradicts_the_encoding_does_not_fit(
    pool: Pool, space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    (chunk,) = space.keys(range(16)).chunks()
    with monkeypatch.context() as patch:
        patch.setitem(ENCODINGS, PACKED, Encoding("packed", packed_bytes))
        fill(space, [chunk])
        patch.setitem(
            ENCODINGS, PACKED, Encoding("packed", lambda spec, num_tokens: packed_bytes(spec, num_tokens) - 1)
        )
        assert store_of(pool)._reader.load(SPEC, chunk) is None
        patch.setitem(ENCODINGS, PACKED, Encoding("packed", packed_bytes))
        assert store_of(pool)._reader.load(SPEC, chunk) is not None
