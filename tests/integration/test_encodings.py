"""Encodings beyond one host: manifests name them, and what one Headwater cannot read another one still can."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import pytest

from headwater.kv import encoding
from headwater.kv.encoding import ENCODINGS, RAW, Encoding
from headwater.kv.format import checksum
from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import whole_shard
from headwater.pool import Space, open_pool
from headwater.stores import open_store
from headwater.stores.base import Piece, Status
from headwater.stores.remote.base import NewObject
from headwater.stores.remote.manifest import Manifest
from headwater.stores.remote.store import RemoteStore
from headwater.stores.remote.writer import WholeChunk

from servers import Server, redis_server
from support import MIB, empty_tiles, gqa, identity, local_tiles, wait_until

pytestmark = pytest.mark.slow

SPEC = gqa(layers=4, heads=2, dim=16)
SHARD = whole_shard(SPEC)
PACKED = 7


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with redis_server() as started:
        yield started


@pytest.fixture
def store(server: Server) -> Iterator[RemoteStore]:
    opened = open_store(f"redis://127.0.0.1:{server.port}?deadline=30&lookup=20&piece=1KiB")
    assert isinstance(opened, RemoteStore)
    yield opened
    opened.clear(None)
    opened.close()


@pytest.fixture
def space() -> Iterator[Space]:
    """For names alone."""
    with open_pool(f"memory://?capacity={8 * MIB}") as pool:
        yield pool.space(identity(), SPEC, chunk_tokens=16)


def put_packed(store: RemoteStore, space: Space, chunks: list[ChunkRef], monkeypatch: pytest.MonkeyPatch) -> None:
    """Store noise in an encoding of these tests: three quarters of the bytes."""
    with monkeypatch.context() as patch:
        patch.setitem(ENCODINGS, PACKED, Encoding("packed", lambda spec, n: 3 * spec.tile_bytes(n) // 4))
        noise = np.random.default_rng(1)
        shape = (SPEC.num_layers, SPEC.num_kv_heads, 3 * SPEC.tile_bytes(16) // 4)
        items = []
        for chunk in chunks:
            tiles = noise.integers(0, 256, shape, np.uint8)
            sums = np.array([checksum(tile) for layer in tiles for tile in layer], np.uint64)
            items.append(WholeChunk(space.root(), chunk, tiles, sums, encoding=PACKED))
        assert store._writer.store(items, 1e9) == [Status.OK] * len(chunks)


def read(store: RemoteStore, space: Space, chunks: list[ChunkRef]) -> list[Status]:
    pieces = [Piece(chunk, SHARD, empty_tiles(SPEC, chunk, SHARD)) for chunk in chunks]
    statuses = store.read(space.root(), pieces)
    for piece, status in zip(pieces, statuses, strict=True):
        assert status != Status.OK or np.array_equal(piece.tiles, local_tiles(SPEC, piece.chunk, SHARD))
    return statuses


def manifest_of(store: RemoteStore, chunk: ChunkRef) -> Manifest:
    raw = store._client.fetch([store._names.manifest(chunk.key)], MIB, 1e9)[0]
    assert raw is not None
    manifest = Manifest.decode(chunk.key, raw)
    assert manifest is not None
    return manifest


def test_what_is_stored_in_another_encoding_is_a_miss_and_stays(
    store: RemoteStore, space: Space, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    chunks = space.keys(range(48)).chunks()
    store.write(space.root(), [Piece(chunks[0], SHARD, local_tiles(SPEC, chunks[0], SHARD))])
    put_packed(store, space, chunks[1:], monkeypatch)
    encoding._refused.clear()
    for _ in range(3):
        assert read(store, space, chunks) == [Status.OK, Status.MISS, Status.MISS]
    assert sum(f"encoding {PACKED}" in message for message in caplog.messages) == 1
    stored = [manifest_of(store, chunk) for chunk in chunks]
    assert [m.encoding for m in stored] == [RAW, PACKED, PACKED]
    assert [m.tile_bytes for m in stored] == [SPEC.tile_bytes(16)] + [3 * SPEC.tile_bytes(16) // 4] * 2
    # Checksums are over stored bytes, so they can be verified by those who cannot decode them.
    report = store.verify()
    assert (report.clean, report.chunks, report.bytes) == (True, 3, sum(m.num_bytes for m in stored))
    assert store.counts()["damaged"] == store.counts()["vanished"] == 0
    assert store.exists(space.root(), chunks) == [True] * 3


def test_manifests_of_the_first_version_are_read(store: RemoteStore, space: Space) -> None:
    chunks = space.keys(range(32)).chunks()
    store.write(space.root(), [Piece(chunk, SHARD, local_tiles(SPEC, chunk, SHARD)) for chunk in chunks])
    for chunk in chunks:
        name = store._names.manifest(chunk.key)
        raw = manifest_of(store, chunk).encode()
        body = b"HWMANIF1" + raw[8:148] + raw[160:-8]
        store._client.remove([name], 1e9)
        put_raw(store, name, body + struct.pack("<Q", checksum(body)))
    store._memory.forget()
    assert read(store, space, chunks) == [Status.OK] * 2
    assert store.verify().chunks == 2


def test_manifests_of_a_newer_version_are_misses_and_stay(
    store: RemoteStore, space: Space, caplog: pytest.LogCaptureFixture
) -> None:
    (chunk,) = space.keys(range(16)).chunks()
    store.write(space.root(), [Piece(chunk, SHARD, local_tiles(SPEC, chunk, SHARD))])
    name, raw = store._names.manifest(chunk.key), manifest_of(store, chunk).encode()
    body = b"HWMANIF3" + raw[8:-8]
    store._client.remove([name], 1e9)
    put_raw(store, name, body + struct.pack("<Q", checksum(body)))
    store._memory.forget()
    for _ in range(2):
        assert read(store, space, [chunk]) == [Status.MISS]
        assert store.verify().clean
    assert store.exists(space.root(), [chunk]) == [True]
    assert sum("another version" in message for message in caplog.messages) == 1
    # Noise is another matter.
    store._client.remove([name], 1e9)
    put_raw(store, name, body)
    assert read(store, space, [chunk]) == [Status.MISS]
    wait_until(lambda: store.exists(space.root(), [chunk]) == [False], what="noise is removed")


def put_raw(store: RemoteStore, name: str, value: bytes) -> None:
    assert store._client.write([NewObject(name, [np.frombuffer(value, np.uint8)])], 1e9) == [Status.OK]
