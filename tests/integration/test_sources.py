"""A remote tier as a source: its chunks come into the first tier's extents as they are stored, or not at all."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from headwater.errors import BackendError
from headwater.kv.encoding import ENCODINGS, Encoding
from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import WHOLE
from headwater.pool import Space, open_pool
from headwater.stores.base import Form, Piece, Status
from headwater.stores.remote import open_remote
from headwater.stores.remote.writer import WholeChunk
from headwater.stores.tiers.lower import RemoteTier
from headwater.stores.url import parse_url

from faults import fault_proxy
from servers import Server, mooncake_master, redis_server
from source_cases import CHUNK, SPEC, WHOLE_SHARD, check, commit, fill, reserved, space_of
from support import empty_tiles, local_tiles

pytestmark = pytest.mark.slow

OPTIONS = "deadline=30&lookup=20&piece=16KiB"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with redis_server() as started:
        yield started


@pytest.fixture(scope="module")
def master() -> Iterator[Server]:
    with mooncake_master() as started:
        yield started


@pytest.fixture
def front() -> Iterator[Space]:
    with open_pool("memory://?capacity=32MiB") as pool:
        yield space_of(pool)


@contextmanager
def remote_tier(address: str, options: str = OPTIONS) -> Iterator[RemoteTier]:
    url = parse_url(f"{address}?{options}")
    store = open_remote(url)
    store.contribute()
    try:
        yield RemoteTier(url, store)
        store.clear(None)
    finally:
        store.close()


@pytest.fixture
def tier(server: Server) -> Iterator[RemoteTier]:
    with remote_tier(f"redis://127.0.0.1:{server.port}") as opened:
        yield opened


def put(tier: RemoteTier, space: Space, chunks: list[ChunkRef]) -> None:
    items = [WholeChunk(space.root(), chunk, local_tiles(SPEC, chunk, WHOLE_SHARD), None) for chunk in chunks]
    assert set(tier.store.store(items, time.monotonic() + 30)) == {Status.OK}
    tier.store._memory.forget()


def statuses_of(tier: RemoteTier, space: Space, chunks: list[ChunkRef]) -> list[Status]:
    """Fill extents of the first tier; what came must be right."""
    with reserved(space, chunks, WHOLE) as (_, extents):
        fillings = fill(tier, space, chunks, extents)
        for filling, chunk, extent in zip(fillings, chunks, extents, strict=True):
            if filling.status == Status.OK:
                check(filling, chunk, extent)
            else:
                assert filling.sums is None
    return [filling.status for filling in fillings]


@pytest.mark.parametrize("backend", ["redis", "mooncake"])
def test_chunks_come_as_they_are_stored(backend: str, front: Space, request: pytest.FixtureRequest) -> None:
    started: Server = request.getfixturevalue("server" if backend == "redis" else "master")
    more = "&segment=64MiB" if backend == "mooncake" else ""
    with remote_tier(f"{backend}://127.0.0.1:{started.port}", OPTIONS + more) as tier:
        chunks = front.keys(range(CHUNK * 20 + 5)).chunks()
        put(tier, front, chunks[:18] + chunks[20:])
        assert tier.forms(chunks) == [Form()] * 18 + [None] * 2 + [Form()]
        with reserved(front, chunks, WHOLE) as (reservations, extents):
            fillings = fill(tier, front, chunks, extents)
            assert [f.status for f in fillings] == [Status.OK] * 18 + [Status.MISS] * 2 + [Status.OK]
            for i in (*range(18), 20):
                check(fillings[i], chunks[i], extents[i])
                assert fillings[i].form == Form()
            assert all((extents[i] == 0xA5).all() for i in (18, 19))
            assert set(commit(front, reservations[:18], fillings[:18])) == {Status.OK}
        assert front.exists(chunks) == [True] * 18 + [False] * 3
        buffers = [empty_tiles(SPEC, chunk, WHOLE_SHARD) for chunk in chunks[:18]]
        assert set(front.read(chunks[:18], WHOLE_SHARD, buffers, deadline_s=30)) == {Status.OK}
        assert (tier.store.counts()["hits"], tier.store.counts()["misses"]) == (19, 2)


def test_a_manifest_that_was_asked_for_is_not_asked_for_again(
    tier: RemoteTier, front: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One question for all that is to be fetched, and none where everything is known."""
    chunks = front.keys(range(CHUNK * 8)).chunks()
    put(tier, front, chunks)
    asked, client = list[int](), tier.store._client
    fetch = client.fetch

    def count(names: Any, limit: int, deadline: float) -> Any:
        asked.append(len(names))
        return fetch(names, limit, deadline)

    monkeypatch.setattr(client, "fetch", count)
    assert tier.forms(chunks) == [Form()] * 8
    assert asked == [8]
    assert tier.forms(chunks) == [Form()] * 8
    assert statuses_of(tier, front, chunks) == [Status.OK] * 8
    assert asked == [8]


def test_a_piece_that_is_gone_or_short_is_a_miss_of_its_chunk_alone(
    tier: RemoteTier, front: Space, server: Server
) -> None:
    import redis as peer

    chunks = front.keys(range(CHUNK * 4)).chunks()
    put(tier, front, chunks)
    with peer.Redis(port=server.port) as client:
        client.delete(sorted(client.keys(f"hw:p:{chunks[1].key.hex()}:*"))[-1])
        name = sorted(client.keys(f"hw:p:{chunks[2].key.hex()}:*"))[0]
        client.set(name, client.get(name)[:-1])
        wanted = [Status.OK, Status.MISS, Status.MISS, Status.OK]
        assert statuses_of(tier, front, chunks) == wanted
        assert client.exists(f"hw:m:{chunks[2].key.hex()}") == 0, "a manifest that promises too much goes"
    assert tier.usable
    assert tier.forms(chunks) == [Form(), None, None, Form()]
    put(tier, front, chunks[1:3])
    pieces = [Piece(chunk, WHOLE_SHARD, empty_tiles(SPEC, chunk, WHOLE_SHARD)) for chunk in chunks]
    assert tier.store.read(front.root(), pieces) == [Status.OK] * 4


def test_a_short_piece_is_a_miss_for_readers_too(tier: RemoteTier, front: Space, server: Server) -> None:
    import redis as peer

    chunks = front.keys(range(CHUNK * 2)).chunks()
    put(tier, front, chunks)
    with peer.Redis(port=server.port) as client:
        name = sorted(client.keys(f"hw:p:{chunks[0].key.hex()}:*"))[0]
        client.set(name, client.get(name)[:100])
    pieces = [Piece(chunk, WHOLE_SHARD, empty_tiles(SPEC, chunk, WHOLE_SHARD)) for chunk in chunks]
    assert tier.store.read(front.root(), pieces) == [Status.MISS, Status.OK]
    assert tier.store.counts()["failed"] == 0


def test_what_was_written_anew_is_read_by_its_new_manifest(tier: RemoteTier, front: Space) -> None:
    (chunk,) = front.keys(range(CHUNK)).chunks()
    put(tier, front, [chunk])
    assert tier.forms([chunk]) == [Form()]
    old = tier.store._memory.manifest(chunk.key)
    assert old is not None
    tier.store.remove(front.root(), [chunk.key])
    put(tier, front, [chunk])
    tier.store._memory.keep(old)
    assert statuses_of(tier, front, [chunk]) == [Status.OK]


def test_a_server_that_does_not_answer_is_late_and_writes_nothing_later(server: Server, front: Space) -> None:
    with fault_proxy(server.port) as proxy, remote_tier(f"redis://127.0.0.1:{proxy.port}") as tier:
        chunks = front.keys(range(CHUNK * 8)).chunks()
        put(tier, front, chunks)
        assert tier.forms(chunks) == [Form()] * 8
        proxy.stall_after = 3 * SPEC.extent_bytes(CHUNK)
        with reserved(front, chunks, WHOLE) as (_, extents):
            started = time.monotonic()
            fillings = tier.fill(front.root(), chunks, extents, started + 0.5)
            assert time.monotonic() - started < 10
            statuses = [filling.status for filling in fillings]
            come = statuses.count(Status.OK)
            assert statuses == [Status.OK] * come + [Status.TIMEOUT] * (8 - come)
            assert 0 < come < 8, "what has come in time counts"
            for i in range(come):
                check(fillings[i], chunks[i], extents[i])
            after = [extent.copy() for extent in extents]
            proxy.heal()
            assert tier.store.read(front.root(), [piece_of(chunks[0])], 30) == [Status.OK]
            assert all((a == b).all() for a, b in zip(after, extents, strict=True))
        assert tier.store.counts()["vanished"] == 0


def piece_of(chunk: ChunkRef) -> Piece:
    return Piece(chunk, WHOLE_SHARD, empty_tiles(SPEC, chunk, WHOLE_SHARD))


def test_a_backend_that_fails_twice_loses_no_chunk(
    tier: RemoteTier, front: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is known of a chunk whose read failed: its manifest was taken away as if its pieces were gone."""
    chunks = front.keys(range(CHUNK * 3)).chunks()
    put(tier, front, chunks)
    client: Any = tier.store._client

    def broken(*_: object) -> None:
        raise BackendError("the connection broke")

    with monkeypatch.context() as patch:
        patch.setattr(client, "read", broken)
        assert statuses_of(tier, front, chunks) == [Status.MISS] * 3
        assert tier.usable, "two failures do not open the breaker"
    assert tier.store.read(front.root(), [piece_of(chunk) for chunk in chunks]) == [Status.OK] * 3
    with monkeypatch.context() as patch:
        patch.setattr(client, "read", broken)
        assert tier.store.read(front.root(), [piece_of(chunk) for chunk in chunks]) == [Status.MISS] * 3
    assert statuses_of(tier, front, chunks) == [Status.OK] * 3
    assert tier.store.counts()["vanished"] == 0


def test_extents_of_another_length_stay_empty_and_the_chunk_where_it_is(
    tier: RemoteTier, front: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = front.keys(range(CHUNK * 2)).chunks()
    put(tier, front, chunks[:1])
    monkeypatch.setitem(ENCODINGS, 7, Encoding("half", lambda spec, n: spec.tile_bytes(n) // 2))
    half = local_tiles(SPEC, chunks[1], WHOLE_SHARD)[:, :, : SPEC.tile_bytes(CHUNK) // 2].copy()
    item = WholeChunk(front.root(), chunks[1], half, None, encoding=7)
    assert tier.store.store([item], time.monotonic() + 30) == [Status.OK]
    assert tier.forms(chunks) == [Form(), None]
    for _ in range(2):
        assert statuses_of(tier, front, chunks) == [Status.OK, Status.MISS]
    extent = half.copy()
    extent[...] = 0
    (filling,) = fill(tier, front, chunks[1:], [extent])
    assert (filling.status, filling.form.encoding, extent.tobytes()) == (Status.OK, 7, half.tobytes())
