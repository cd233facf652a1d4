"""Another host's pool as a lower tier, over real sockets: what it has is found, read and kept, and it is only read."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import peer_cases as pc
from headwater.errors import ConfigError, InvalidArgumentError, UrlError, WireError
from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import WHOLE, Shard, Topology
from headwater.peers import pull_wire
from headwater.peers.channels import PeerChannel
from headwater.peers.reader import PeerStore, open_source
from headwater.peers.receiver import Receiver
from headwater.peers.wire import Type, encode_frame
from headwater.pool import Pool, Space, open_pool
from headwater.stores.base import Form, Piece, Status
from headwater.stores.tiers.lower import SourceTier
from headwater.stores.url import parse_url, parse_urls

from source_cases import CHUNK, SPEC, WHOLE_SHARD, check, commit, fill, reserved, space_of, write
from support import empty_tiles, local_tiles, temporary_url, wait_until

PATIENT = "lookup=20&deadline=30"


@pytest.fixture
def front() -> Iterator[Space]:
    with open_pool("memory://?capacity=32MiB") as pool:
        yield space_of(pool)


@contextlib.contextmanager
def peer(
    scheme: str = "memory", folder: object = None, options: str = "capacity=16MiB"
) -> Iterator[tuple[Receiver, Space]]:
    """Another host: its receiver, and a space of its pool."""
    with temporary_url(scheme, folder, options) as url, open_pool(url) as pool, pc.receiving(pool) as receiver:
        yield receiver, space_of(pool)


def url_of(receiver: Receiver, options: str = PATIENT) -> str:
    return f"peer://{receiver.address}?{options}"


@contextlib.contextmanager
def tier_of(receiver: Receiver, space: Space, options: str = PATIENT) -> Iterator[SourceTier]:
    url = parse_url(url_of(receiver, options))
    store = open_source(url)
    store.check_space(space.ref)
    try:
        yield SourceTier(url, store)
    finally:
        store.close()


def published(space: Space) -> set[int]:
    store: Any = space._store
    return set(store._core.members.published())


@pytest.mark.parametrize("scheme", ["memory", "shm", "file"])
@pytest.mark.parametrize("topology", [Topology(), Topology(tp=8, dcp=2, interleave=3)], ids=["whole", "parts"])
def test_chunks_come_into_extents(scheme: str, topology: Topology, front: Space, tmp_path: Path) -> None:
    with peer(scheme, tmp_path) as (receiver, there), tier_of(receiver, there) as tier:
        chunks = there.keys(range(CHUNK * 40 + 5)).chunks()
        write(there, chunks, topology)
        assert tier.forms(chunks) == [Form()] * 41
        with reserved(front, chunks, WHOLE) as (reservations, extents):
            fillings = fill(tier, front, chunks, extents)
            for filling, chunk, extent in zip(fillings, chunks, extents, strict=True):
                check(filling, chunk, extent)
            assert set(commit(front, reservations, fillings)) == {Status.OK}
        wait_until(lambda: not published(there), what="the peer holds nothing any longer")
        ages = tier.store.ages([chunk.key for chunk in chunks])
        assert all(abs(time.time_ns() - age) < 60e9 for age in ages)


def test_what_is_not_there_is_a_miss(front: Space) -> None:
    with peer() as (receiver, there), tier_of(receiver, there) as tier:
        chunks = there.keys(range(CHUNK * 6)).chunks()
        write(there, chunks[:2])
        pending = there.write(chunks[2:3], next(Topology(tp=2).shards(SPEC)), [np.zeros((4, 2, 1024), np.uint8)])
        assert pending == [Status.OK]
        assert tier.forms(chunks) == [Form(), Form(), None, None, None, None]
        with reserved(front, chunks, WHOLE) as (_, extents):
            fillings = fill(tier, front, chunks, extents)
            assert [filling.status for filling in fillings] == [Status.OK] * 2 + [Status.MISS] * 4
            assert all((extent == 0xA5).all() for extent in extents[2:])


@contextlib.contextmanager
def with_peer(receiver: Receiver, options: str = PATIENT) -> Iterator[Pool]:
    """A pool of this host with the other one as its second tier."""
    with open_pool(f"memory://?capacity=16MiB,{url_of(receiver, options)}") as pool:
        yield pool


def test_a_prompt_is_found_fetched_and_kept_and_the_peer_stays_as_it_is() -> None:
    with peer() as (receiver, there), with_peer(receiver) as pool:
        here, keys = space_of(pool), there.keys(range(CHUNK * 9 + 7))
        write(there, keys.chunks())
        before = [(info.key, info.num_bytes) for info in there._store.scan()]
        match = here.match(here.keys(range(CHUNK * 9 + 7)))
        assert match.num_tokens == CHUNK * 9 + 7
        assert here.lease(match, "request").held
        pc_read(here, match.chunks)
        assert all(here.exists(match.chunks)), "kept in the first tier"
        mine = here.keys([9, *range(1, CHUNK * 2)])
        write(here, mine.chunks())
        assert pool.flush(5), "nothing waits to be copied to a peer"
        assert [(info.key, info.num_bytes) for info in there._store.scan()] == before
        tier = pool.tiers()[1]
        assert (tier.write, tier.fetched, tier.stored, tier.waiting) == ("never", 10, 0, 0)
        assert pool.clear() > 0
        assert [(info.key, info.num_bytes) for info in there._store.scan()] == before


def pc_read(space: Space, chunks: Any, shard: Shard = WHOLE_SHARD, *, keep: bool = True) -> None:
    out = [empty_tiles(SPEC, chunk, shard) for chunk in chunks]
    assert set(space.read(chunks, shard, out, deadline_s=30, keep=keep)) == {Status.OK}
    for chunk, tiles in zip(chunks, out, strict=True):
        assert np.array_equal(tiles, local_tiles(SPEC, chunk, shard))


@pytest.mark.parametrize("stored", [Topology(), Topology(tp=8, dcp=2, interleave=3)], ids=["whole", "parts"])
@pytest.mark.parametrize("asked", [Topology(tp=2), Topology(pp=2, tp=4), Topology(tp=8, dcp=2, interleave=5)], ids=str)
def test_ranges_of_any_topology_are_read_where_they_are(stored: Topology, asked: Topology) -> None:
    with peer() as (receiver, there), with_peer(receiver) as pool:
        chunks = there.keys(range(CHUNK * 5 + 3)).chunks()
        write(there, chunks, stored)
        for shard in asked.shards(SPEC):
            pc_read(space_of(pool), chunks, shard, keep=False)
        assert not any(space_of(pool).exists(chunks)), "nothing was brought"


def test_one_question_for_a_whole_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    ask = PeerChannel.ask

    def note(self: PeerChannel, kind: Any, meta: bytes, deadline: float) -> Any:
        asked.append(kind.name)
        return ask(self, kind, meta, deadline)

    with peer() as (receiver, there), with_peer(receiver) as pool:
        keys = there.keys(range(CHUNK * 100))
        write(there, keys.chunks())
        monkeypatch.setattr(PeerChannel, "ask", note)
        assert space_of(pool).match(keys).num_tokens == CHUNK * 100
        assert asked == ["RUN"]


def test_a_first_tier_is_served_and_not_what_is_below_it() -> None:
    """Two hosts that read from each other would ask in circles otherwise."""
    with peer() as (far, furthest), with_peer(far) as middle, pc.receiving(middle) as receiver:
        keys = furthest.keys(range(CHUNK * 3))
        write(furthest, keys.chunks())
        with with_peer(receiver) as pool:
            assert space_of(middle).match(keys).num_tokens == CHUNK * 3
            assert space_of(pool).match(keys).num_tokens == 0
            pc_read(space_of(middle), keys.chunks())
            wait_until(lambda: space_of(pool).match(keys).num_tokens == CHUNK * 3, what="what is near is served")


def test_damage_at_the_peer_is_found_removed_there_and_never_used() -> None:
    with peer() as (receiver, there), with_peer(receiver) as pool:
        chunks = there.keys(range(CHUNK * 3)).chunks()
        write(there, chunks)
        place = there.lend(chunks, WHOLE_SHARD).places[1]
        assert place is not None
        place.segment[place.offset + 100] ^= 1
        out = [empty_tiles(SPEC, chunk, WHOLE_SHARD) for chunk in chunks]
        statuses = space_of(pool).read(chunks, WHOLE_SHARD, out, deadline_s=30, keep=False)
        assert statuses == [Status.OK, Status.DAMAGED, Status.OK]
        assert there.exists(chunks) == [True, False, False]
        assert pool.tiers()[1].damaged == 1


def test_damage_that_was_fetched_is_found_where_it_is_used() -> None:
    with peer() as (receiver, there), with_peer(receiver) as pool:
        chunks = there.keys(range(CHUNK * 3)).chunks()
        write(there, chunks)
        place = there.lend(chunks, WHOLE_SHARD).places[1]
        assert place is not None
        place.segment[place.offset + 100] ^= 1
        out = [empty_tiles(SPEC, chunk, WHOLE_SHARD) for chunk in chunks]
        statuses = space_of(pool).read(chunks, WHOLE_SHARD, out, deadline_s=30)
        assert statuses[:2] == [Status.OK, Status.DAMAGED]
        wait_until(lambda: there.exists(chunks) == [True, False, False], what="the peer looks at its own copy")


def test_a_peer_that_evicts_never_gives_bytes_of_another_chunk() -> None:
    """A pool of ten chunks in which two hundred come and go, read from another host all the while."""
    options = f"capacity={(2 << 20) + 10 * SPEC.extent_bytes(CHUNK)}&index=1MiB"
    with peer(options=options) as (receiver, there), tier_of(receiver, there) as tier:
        store: Any = tier.store
        good, choose = 0, random.Random(0)
        for number in range(200):
            write(there, there.keys([number, *range(1, 3 * CHUNK)]).chunks())
            older = there.keys([max(0, number - choose.randrange(6)), *range(1, 3 * CHUNK)]).chunks()
            pieces = [Piece(chunk, WHOLE_SHARD, empty_tiles(SPEC, chunk, WHOLE_SHARD)) for chunk in older]
            for piece, status in zip(pieces, store.read(there.root(), pieces, 30), strict=True):
                assert status in (Status.OK, Status.MISS)
                if status == Status.OK:
                    good += 1
                    assert np.array_equal(piece.tiles, local_tiles(SPEC, piece.chunk, WHOLE_SHARD))
        assert 100 < good < 600, "some are there, and some were evicted"
        assert store.counts()["damaged"] == 0


@pytest.mark.parametrize("other", ["weights", "spec", "chunk size", "tenant secret"])
def test_another_model_is_refused_and_the_peer_stays_in_use(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with peer() as (receiver, there):
        write(there, there.keys(range(CHUNK * 2)).chunks())
        scopes = (there.root().key,)
        receiver.settings = type(receiver.settings)(scopes=scopes)
        if other == "tenant secret":
            monkeypatch.setenv("HEADWATER_TENANT_SECRET", "another secret for tenants")
        with with_peer(receiver) as pool:
            spec = pc.gqa(layers=5, heads=4, dim=16) if other == "spec" else SPEC
            size = 2 * CHUNK if other == "chunk size" else CHUNK
            stranger = pool.space(pc.identity(int(other == "weights")), spec, chunk_tokens=size)
            assert stranger.match(stranger.keys(range(CHUNK * 2))).num_tokens == 0
            assert receiver.counts["refused_space"] == 1
            store: Any = pool._store
            assert store._tiers[0].store.counts()["refused"] == 1
            assert pool.tiers()[1].breaker == "closed"


def test_a_secret_is_needed_and_must_be_the_same(tmp_path: Path) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_bytes(pc.SECRET)
    wrong.write_bytes(b"some other secret of the kind")
    with open_pool("memory://?capacity=16MiB") as pool, pc.receiving(pool, secret=pc.SECRET) as receiver:
        there = space_of(pool)
        keys = there.keys(range(CHUNK * 2))
        write(there, keys.chunks())
        for options, found in ((f"secret_file={right}", 2), (f"secret_file={wrong}", 0), ("connections=1", 0)):
            with with_peer(receiver, f"{options}&{PATIENT}") as near:
                assert space_of(near).match(keys).num_tokens == found * CHUNK, options
        assert receiver.counts["refused_secret"] >= 2
    with pytest.raises(ConfigError, match="secret_file"):
        open_source(parse_url("peer://192.0.2.1:7700"))
    with pytest.raises(ConfigError, match="cannot be read"):
        open_source(parse_url(f"peer://192.0.2.1:7700?secret_file={tmp_path}/none"))


def test_urls_say_what_a_peer_is() -> None:
    url = parse_url("peer://host?secret_file=/run/secrets/peers&connections=2")
    assert (url.host, url.port, url.is_remote, url.is_read_only) == ("host", 7700, True, True)
    assert str(url) == "peer://host:7700?secret_file=/run/secrets/peers&connections=2"
    for wrong, what in (
        ("peer://host:7700?write=back", "only read"),
        ("peer://host:7700/3", "peer://HOST:PORT"),
        ("peer://user:password@host:7700", "peer://HOST:PORT"),
        ("peer://host:7700?tls=maybe", "on or off"),
        ("peer://host:7700?ttl=3", "unknown option"),
    ):
        with pytest.raises(UrlError, match=what) as raised:
            parse_url(wrong)
        assert "password" not in str(raised.value)
    assert [u.scheme for u in parse_urls("shm:///a,peer://b:1,redis://c,peer://d:2")] == [
        "shm",
        "peer",
        "redis",
        "peer",
    ]
    with pytest.raises(UrlError, match="fastest first"):
        parse_urls("peer://b:1,shm:///a")


def test_a_peer_alone_can_be_looked_at_and_not_written_to() -> None:
    with peer() as (receiver, there):
        chunks = there.keys(range(CHUNK * 3 + 1)).chunks()
        write(there, chunks)
        with open_pool(url_of(receiver)) as pool:
            listed = {info.key: info for info in pool.scan()}
            assert set(listed) == {chunk.key for chunk in chunks}
            local = {info.key: info for info in there._store.scan()}
            for key, info in listed.items():
                assert info._replace(last_used_ns=0) == local[key]._replace(last_used_ns=0)
                assert abs(info.last_used_ns - local[key].last_used_ns) < 5e9
            assert pool.stats().store.chunks == 4
            space = space_of(pool)
            assert space.match(there.keys(range(CHUNK * 3 + 1))).num_tokens == CHUNK * 3 + 1
            pc_read(space, chunks)
            with pytest.raises(InvalidArgumentError, match="only read"):
                space.write(chunks, WHOLE_SHARD, [local_tiles(SPEC, chunk, WHOLE_SHARD) for chunk in chunks])


def test_a_read_that_is_too_large_or_out_of_bounds_closes_the_connection() -> None:
    with peer() as (receiver, there), tier_of(receiver, there) as tier:
        store: Any = tier.store
        assert isinstance(store, PeerStore)
        (chunk,) = there.keys(range(CHUNK)).chunks()
        before = receiver.counts["refused_not_ours"]
        for layers, heads in ((range(5), range(4)), (range(4), range(5)), (range(0), range(1))):
            read = pull_wire.Read((chunk,), Shard(range(4), range(4)), 1000)
            meta = bytearray(read.encode())
            meta[76:96] = np.array([layers.start, layers.stop, 1, heads.start, heads.stop], "<u4").tobytes()
            with pytest.raises(WireError):
                pull_wire.Read.decode(bytes(meta), CHUNK, 4, 4)
        with contextlib.suppress(Exception), store._channels.use(there.ref, time.monotonic() + 5) as channel:
            channel.ask(Type.READ, bytes(meta), time.monotonic() + 5)
        wait_until(lambda: receiver.counts["refused_not_ours"] == before + 1, what="it is refused")


def read_of(count: int, takes: int = 0) -> pull_wire.Read:
    chunk = ChunkRef(bytes(32), bytes(32), 0, 0, CHUNK, bytes(32))
    return pull_wire.Read((chunk,) * count, Shard(range(3), range(1)), 1, (takes,) * count if takes else ())


@given(st.binary(max_size=400), st.integers(0, 5))
def test_noise_is_never_more_than_a_wire_error(noise: bytes, count: int) -> None:
    for decode in (
        pull_wire.decode_run,
        pull_wire.Exists.decode,
        pull_wire.decode_events,
        pull_wire.PageReader().decode,
        pull_wire.EventPlace.decode,
        lambda meta: pull_wire.decode_run_answer(meta, count),
        lambda meta: pull_wire.decode_ages(meta, count),
        lambda meta: pull_wire.decode_ages(meta, count, has_encodings=True),
        lambda meta: pull_wire.decode_read_answer(meta, read_of(count)),
        lambda meta: pull_wire.decode_read_answer(meta, read_of(count, takes=3)),
        lambda meta: pull_wire.Read.decode(meta, 16, 4, 4),
    ):
        with contextlib.suppress(WireError):
            decode(noise)


def test_a_tier_between_gets_copies_and_the_peer_none(tmp_path: Path) -> None:
    with (
        peer() as (receiver, there),
        temporary_url("file", tmp_path, "capacity=16MiB") as file,
        open_pool(f"memory://?capacity=16MiB,{file},{url_of(receiver)}") as pool,
    ):
        chunks = space_of(pool).keys(range(CHUNK * 3)).chunks()
        write(space_of(pool), chunks)
        assert pool.flush(20)
        below = [(tier.write, tier.stored, tier.full) for tier in pool.tiers()[1:]]
        assert below == [("back", 3, 0), ("never", 0, 0)]
        assert not any(there.exists(chunks))


def test_what_is_being_sent_cannot_be_evicted() -> None:
    """A reader that takes nothing for a while: the chunks stay where they are until it has them."""
    spec, size = pc.gqa(layers=8, heads=8, dim=128), 256
    shard = Shard(range(8), range(8))
    with open_pool("memory://?capacity=64MiB&deadline=30") as pool, pc.receiving(pool) as receiver:
        there = pool.space(pc.identity(), spec, chunk_tokens=size)

        def save(seed: int, num_chunks: int) -> list[Any]:
            chunks = there.keys([seed, *range(1, num_chunks * size)]).chunks()
            tiles = [np.full(shard.local_shape(spec, 0, size), seed, np.uint8) for _ in chunks]
            return list(zip(chunks, there.write(chunks, shard, tiles, deadline_s=30), strict=True))

        chunks = [chunk for chunk, status in save(1, 2) if status.stored]
        assert len(chunks) == 2
        store = open_source(parse_url(url_of(receiver)))
        deadline = time.monotonic() + 60
        try:
            with store._channels.use(there.ref, deadline) as channel:
                read = pull_wire.Read(tuple(chunks), shard, 60_000)
                channel.connection.send(encode_frame(Type.READ, read.encode(), number=7), deadline)
                wait_until(lambda: bool(published(there)), what="the peer sends")
                for seed in range(2, 20):
                    save(seed, 1)
                assert pool.stats().store.evicted > 0
                assert all(there.exists(chunks)), "they are held"
                header, meta = channel.connection.receive(deadline)
                out = np.zeros(header.data_bytes, np.uint8)
                channel.connection.receive_into([out.data], deadline)
                assert pull_wire.decode_read_answer(meta, read).statuses == [Status.OK] * 2
                assert (out == 1).all()
        finally:
            store.close()
        wait_until(lambda: not published(there), what="nothing is held any longer")
        for seed in range(20, 40):
            save(seed, 1)
        assert not all(there.exists(chunks))


def test_a_look_up_does_not_wait_for_reads() -> None:
    """All connections may be busy with a large fetch: a scheduler asks beside them, and the breaker stays closed."""
    with peer() as (receiver, there), with_peer(receiver, "lookup=2&deadline=30&connections=2") as pool:
        keys = there.keys(range(CHUNK * 3))
        write(there, keys.chunks())
        store: Any = pool._store
        channels, deadline = store._tiers[0].store._channels, time.monotonic() + 60
        with channels.use(there.ref, deadline), channels.use(there.ref, deadline):
            assert space_of(pool).match(keys).num_tokens == CHUNK * 3
        assert (pool.tiers()[1].breaker, pool.tiers()[1].failed) == ("closed", 0)
