"""Tiers: written to the first, copied down, found and brought up again, for any topology, with real servers."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headwater.errors import InvalidArgumentError
from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import Topology, whole_shard
from headwater.pool import Pool, open_pool
from headwater.pool.space import Space
from headwater.stores.base import Piece, Status
from headwater.stores.events import EventKind
from headwater.stores.remote.redis import RedisClient
from headwater.stores.stats import TierStats
from headwater.stores.tiers import copier
from headwater.stores.tiers.lower import RemoteTier

from servers import mooncake_master, redis_server
from support import empty_tiles, gqa, identity, local_tiles, specs, temporary_url, topologies, wait_until

pytestmark = pytest.mark.slow

SPEC = gqa(layers=4, heads=4, dim=8)
WHOLE = whole_shard(SPEC)


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with redis_server() as server:
        yield f"redis://127.0.0.1:{server.port}"


def open_space(pool: Pool) -> Space:
    return pool.space(identity(), SPEC, chunk_tokens=8)


def write(space: Space, tokens: range, topology: Topology = Topology()) -> list[Status]:  # noqa: B008 - frozen
    chunks = space.keys(tokens).chunks()
    statuses = []
    for shard in topology.shards(SPEC):
        statuses += space.write(chunks, shard, [local_tiles(SPEC, c, shard) for c in chunks])
    return statuses


def read(space: Space, tokens: range, topology: Topology = Topology()) -> list[Status]:  # noqa: B008 - frozen
    """Every rank's part; fails on a wrong byte."""
    chunks, statuses = space.keys(tokens).chunks(), []
    for shard in topology.shards(SPEC):
        buffers = [empty_tiles(SPEC, chunk, shard) for chunk in chunks]
        for chunk, buffer, status in zip(chunks, buffers, space.read(chunks, shard, buffers), strict=True):
            statuses.append(status)
            assert status != Status.OK or np.array_equal(buffer, local_tiles(SPEC, chunk, shard))
    return statuses


def tiers_of(pool: Pool) -> tuple[TierStats, ...]:
    return pool.stats().store.tiers


def empty_local(pool: Pool) -> None:
    """Forget what is on this host, and nothing else."""
    store = pool._store
    store._front.clear(None)  # type: ignore[attr-defined]
    for tier in store._tiers:  # type: ignore[attr-defined]
        if not tier.url.is_remote:
            tier.store.clear(None)


@contextlib.contextmanager
def pool_of(front: str, folder: object, rest: str) -> Iterator[Pool]:
    with temporary_url(front, folder, "capacity=4MiB") as first, open_pool(f"{first},{rest}") as pool:
        yield pool


@pytest.fixture(scope="module")
def mooncake_url() -> Iterator[str]:
    with mooncake_master() as master:
        yield f"mooncake://127.0.0.1:{master.port}"


@pytest.mark.parametrize(
    ("front", "remote", "examples"),
    [
        ("memory", "redis", 25),
        ("shm", "redis", 15),
        ("file", "redis", 10),
        ("memory", "mooncake", 5),
        ("shm", "mooncake", 10),
    ],
)
def test_any_writer_any_reader_through_a_remote_tier(
    front: str, remote: str, examples: int, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("pool")
    place = request.getfixturevalue(f"{remote}_url")
    own = "&segment=32MiB&buffer=16MiB" if remote == "mooncake" else ""

    @settings(max_examples=examples, suppress_health_check=[HealthCheck.too_slow])
    @given(st.data())
    def check(data: st.DataObject) -> None:
        spec = data.draw(specs())
        writer, reader = data.draw(topologies(spec)), data.draw(topologies(spec))
        chunk_tokens = data.draw(st.integers(1, 20))
        tokens = data.draw(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=70))
        piece = data.draw(st.sampled_from([1, 200, 1 << 20]))
        prefix = f"p{os.urandom(6).hex()}"
        with pool_of(front, folder, f"{place}?piece={piece}&prefix={prefix}&lookup=5&deadline=10{own}") as pool:
            space = pool.space(identity(), spec, chunk_tokens=chunk_tokens)
            keys = space.keys(tokens)
            chunks = keys.chunks()
            for shard in data.draw(st.permutations(list(writer.shards(spec)))):
                statuses = space.write(chunks, shard, [local_tiles(spec, chunk, shard) for chunk in chunks])
                assert all(status.stored for status in statuses), statuses
            assert pool.flush(20)
            empty_local(pool)
            match = space.match(keys)
            assert match.num_tokens == len(tokens)
            for shard in reader.shards(spec):
                buffers = [empty_tiles(spec, chunk, shard) for chunk in match.chunks]
                assert space.read(match.chunks, shard, buffers) == [Status.OK] * len(chunks)
                for chunk, buffer in zip(match.chunks, buffers, strict=True):
                    assert np.array_equal(buffer, local_tiles(spec, chunk, shard))
            # Every rank has brought its part up: now it is all in the first tier.
            assert space.exists(chunks) == [True] * len(chunks)
            assert pool.verify().clean
            pool.clear()
            assert space.match(keys).num_tokens == 0

    check()


def test_what_is_read_below_is_in_the_first_tier_afterwards_and_hits_are_counted_by_tier(
    redis_url: str, tmp_path: Path
) -> None:
    folder = f"file://{tmp_path}/below?capacity=4MiB"
    with pool_of("shm", tmp_path, f"{folder},{redis_url}?prefix=hits&lookup=5") as pool:
        space = open_space(pool)
        write(space, range(20), Topology(tp=2))
        assert pool.flush(20)
        assert [tier.stored for tier in tiers_of(pool)] == [3, 3, 3]
        pool._store._front.clear(None)  # type: ignore[attr-defined]
        assert read(space, range(20), Topology(tp=4)) == [Status.OK] * 12  # files
        assert read(space, range(20)) == [Status.OK] * 3  # shared memory
        empty_local(pool)
        assert read(space, range(20)) == [Status.OK] * 3  # Redis
        # A chunk that comes from below counts there once, and in the first tier for every piece that is read of it.
        assert [tier.hits for tier in tiers_of(pool)] == [12 + 3 + 3, 3, 3]
        assert [tier.fetched for tier in tiers_of(pool)] == [0, 3, 3]
        assert read(space, range(1000, 1020)) == [Status.MISS] * 3
        pool.clear()


def test_damage_in_the_first_tier_is_not_made_right_by_copying_it(redis_url: str, tmp_path: Path) -> None:
    """A copy that is hashed anew would carry a valid checksum over wrong bytes."""
    with pool_of("shm", tmp_path, f"file://{tmp_path}/below?capacity=4MiB,{redis_url}?prefix=dama&lookup=5") as pool:
        store = pool._store
        space = open_space(pool)
        front = store._front  # type: ignore[attr-defined]
        usable = [tier.missing for tier in store._tiers]  # type: ignore[attr-defined]
        for tier in store._tiers:  # type: ignore[attr-defined]
            tier.missing = lambda keys: None  # nobody copies yet
        write(space, range(8))
        (chunk,) = space.keys(range(8)).chunks()
        item = front.export(chunk.key)
        item.tiles[1, 1, 5] ^= 4
        item.release()
        for tier, missing in zip(store._tiers, usable, strict=True):  # type: ignore[attr-defined]
            tier.missing = missing
        pool.flush(20)
        buffer = empty_tiles(SPEC, chunk, WHOLE)
        for tier in store._tiers:  # type: ignore[attr-defined]
            assert tier.store.read(space.root(), space_pieces(chunk, buffer)) != [Status.OK]
        assert space.read([chunk], WHOLE, [buffer])[0] in (Status.DAMAGED, Status.MISS)
        pool.clear()


@pytest.mark.parametrize("is_found", ["while it is copied", "afterwards"])
def test_damage_that_was_copied_down_goes_with_the_copy_in_the_first_tier(
    is_found: str, redis_url: str, tmp_path: Path
) -> None:
    """The copier sends bytes from where they lie. A bit flips after its look at them; a reader notices that before the
    copy can be found, or later. In a second tier the chunk is right, so that the reader need not read the third."""
    with pool_of(
        "shm", tmp_path, f"file://{tmp_path}/below?capacity=4MiB,{redis_url}?prefix={is_found[:3]}&lookup=5"
    ) as pool:
        store, space = pool._store, open_space(pool)
        front, tier = store._front, store._tiers[1]  # type: ignore[attr-defined]
        remote, chunks = tier.store, space.keys(range(24)).chunks()
        send, missing = remote._client.write, tier.missing

        def flip_and_send(objects: Any, deadline: float) -> Any:
            remote._client.write = send
            flip_in(front, chunks[1])
            if is_found == "while it is copied":
                assert read(space, range(24)) == [Status.OK] * 3, "from the file"
                wait_until(lambda: not store._fetcher._workers.jobs, 20, "the other copies are looked at")
            return send(objects, deadline)

        tier.missing = lambda keys: None  # nobody copies to Redis yet
        write(space, range(24))
        wait_until(lambda: all(store._tiers[0].store.exists(space.root(), chunks)), 20, "the file has them")
        remote._client.write = flip_and_send
        tier.missing = missing
        assert pool.flush(20)
        assert remote._client.write == send
        if is_found == "afterwards":
            assert remote.exists(space.root(), chunks) == [True] * 3
            assert read(space, range(24)) == [Status.OK] * 3, "from the file"
        wait_until(lambda: remote.exists(space.root(), chunks) == [True, False, True], 20, "the copy is removed")
        assert remote.verify().damaged == 0
        assert front.stats().damaged == 1
        pool.clear()


def test_damage_that_a_fetch_brought_up_is_not_copied_down_to_another_tier(redis_url: str, tmp_path: Path) -> None:
    """A fetch does not verify what it brings, and what it has brought is copied to the tiers that lack it."""
    with pool_of("shm", tmp_path, f"file://{tmp_path}/below?capacity=4MiB,{redis_url}?prefix=spread&lookup=5") as pool:
        store, space = pool._store, open_space(pool)
        front, (files, redis) = store._front, [tier.store for tier in store._tiers]  # type: ignore[attr-defined]
        (chunk,) = space.keys(range(8)).chunks()
        assert files.write(space.root(), [Piece(chunk, WHOLE, local_tiles(SPEC, chunk, WHOLE))]) == [Status.OK]
        flip_in(files, chunk)
        fetch = space.fetch([chunk], deadline_s=20)
        assert fetch is not None
        assert fetch.wait(time.monotonic() + 20)
        fetch.release()
        assert pool.flush(20)
        assert redis.exists(space.root(), [chunk]) == [False]
        assert redis.verify().damaged == 0
        assert not space.exists([chunk])[0], "the copier has seen that it is damaged"
        assert not files.exists(space.root(), [chunk])[0], "and where it came from"
        assert [store.stats().damaged for store in (front, files)] == [1, 1]
        assert pool.verify().clean
        pool.clear()


def test_a_lent_copy_that_is_found_damaged_is_looked_for_below(redis_url: str, tmp_path: Path) -> None:
    """A load layer by layer reads no lower tier: the copy there would be fetched again, and fail again, for ever."""
    with pool_of("shm", tmp_path, f"file://{tmp_path}/below?capacity=4MiB,{redis_url}?prefix=lent&lookup=5") as pool:
        store, space = pool._store, open_space(pool)
        front, (files, redis) = store._front, [tier.store for tier in store._tiers]  # type: ignore[attr-defined]
        write(space, range(8))
        (chunk,) = space.keys(range(8)).chunks()
        assert pool.flush(20)
        flip_in(front, chunk)
        flip_in(files, chunk)
        assert space.judge(chunk, WHOLE) == Status.DAMAGED
        wait_until(lambda: files.stats().damaged == 1, 20, "the copy in the file is removed")
        assert redis.exists(space.root(), [chunk]) == [True], "that one is right"
        assert read(space, range(8)) == [Status.OK]
        pool.clear()


def flip_in(store: Any, chunk: ChunkRef) -> None:
    """Flip a bit of a stored chunk where it lies."""
    core = store._core
    at = core.index.find(chunk.key).record.offset + 77
    if core.data.mapped:
        core.data.view(at, 1)[0] ^= 4
        return
    byte, end = np.zeros(1, np.uint8), time.monotonic() + 20
    assert core.data.load(at, [byte], end)
    byte[0] ^= 4
    core.data.save([(at, [byte])], end, lambda: None)


def space_pieces(chunk: ChunkRef, buffer: np.ndarray) -> list[Piece]:
    return [Piece(chunk, WHOLE, buffer)]


def test_a_prompt_is_one_question(redis_url: str, tmp_path: Path) -> None:
    with pool_of("memory", tmp_path, f"{redis_url}?prefix=asks&lookup=5") as pool:
        space = open_space(pool)
        write(space, range(420))
        assert pool.flush(20)
        empty_local(pool)
        client = pool._store._tiers[0].store._client  # type: ignore[attr-defined]
        asked = []
        connect = client._connection

        @contextlib.contextmanager
        def counted(deadline: float) -> Iterator[object]:
            if threading.current_thread() is threading.main_thread():  # others listen, and copy
                asked.append(deadline)
            with connect(deadline) as connection:
                yield connection

        client._connection = counted
        assert space.match(space.keys(range(416))).num_tokens == 416
        assert len(asked) == 1
        assert space.match(space.keys(range(425))).num_tokens == 420  # the tail is looked at, too
        assert len(asked) == 3
        client._connection = connect
        pool.clear()


def test_write_through_is_there_when_the_write_returns(redis_url: str, tmp_path: Path) -> None:
    with pool_of("shm", tmp_path, f"{redis_url}?prefix=thru&write=through&lookup=5") as pool:
        space = open_space(pool)
        write(space, range(20), Topology(tp=2, pp=2))
        with open_pool(f"{redis_url}?prefix=thru&lookup=5") as bare:
            assert open_space(bare).match(space.keys(range(20))).num_tokens == 20
        pool.clear()


def test_two_batches_are_on_their_way_at_a_time(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each chunk is put once, and all of them are released."""
    monkeypatch.setattr(copier, "_BATCH_BYTES", 1)
    monkeypatch.setattr(RedisClient, "num_writers", 2)
    monkeypatch.setattr(copier.Copier, "_step", lambda self: False)  # only the write itself copies
    put, inside, at_once = RemoteTier.put, set[int](), list[int]()

    def counting(*args: Any) -> Any:
        inside.add(threading.get_ident())
        at_once.append(len(inside))
        time.sleep(0.05)
        try:
            return put(*args)
        finally:
            inside.discard(threading.get_ident())

    monkeypatch.setattr(RemoteTier, "put", counting)
    with pool_of("shm", tmp_path, f"{redis_url}?prefix=two&write=through&lookup=5") as pool:
        space = open_space(pool)
        write(space, range(32))
        assert len(at_once) == 4
        assert max(at_once) == 2
        with open_pool(f"{redis_url}?prefix=two&lookup=5") as bare:
            assert open_space(bare).match(space.keys(range(32))).num_tokens == 32
        assert not any(info.leased for info in pool._store._front.scan())  # type: ignore[attr-defined]
        monkeypatch.undo()  # clearing and closing the pool wait for the copier
        pool.clear()


def test_demotion_saves_what_would_be_evicted(redis_url: str, tmp_path: Path) -> None:
    big = gqa(layers=4, heads=4, dim=64)
    url = f"memory://?capacity=2MiB&index=512KiB,{redis_url}?prefix=demo&write=demote&lookup=5"
    with open_pool(url) as pool:
        space = pool.space(identity(), big, chunk_tokens=8)
        shard = whole_shard(big)
        size = big.extent_bytes(8)
        room = pool.stats().store.data_bytes // size
        prompts = [range(1000 * n, 1000 * n + 8) for n in range(int(room * 0.9))]
        for tokens in prompts:
            chunks = space.keys(tokens).chunks()
            space.write(chunks, shard, [local_tiles(big, c, shard) for c in chunks])
        wait_until(lambda: tiers_of(pool)[1].stored > 0, what="demotion")
        below = tiers_of(pool)[1].stored
        assert below < len(prompts)  # only the oldest went
        with open_pool(f"{redis_url}?prefix=demo&lookup=5") as bare:
            other = bare.space(identity(), big, chunk_tokens=8)
            assert other.match(other.keys(prompts[0])).num_tokens == 8
            assert other.match(other.keys(prompts[-1])).num_tokens == 0
        pool.clear()


WRITER = """
import sys, time
sys.path[:0] = sys.argv[2:]
from test_tiers import open_space, write
from headwater.pool import open_pool
pool = open_pool(sys.argv[1])
space = open_space(pool)
write(space, range(8))
assert pool.flush(20)
print("mine" if pool._store._copier._owner else "another's", flush=True)
sys.stdin.readline()
"""


def test_when_the_process_that_copies_dies_another_takes_over(redis_url: str, tmp_path: Path) -> None:
    here = Path(__file__).resolve()
    paths = [str(here.parent), str(here.parents[1]), str(here.parents[2] / "src")]
    with temporary_url("shm", tmp_path, "capacity=4MiB") as first:
        url = f"{first},{redis_url}?prefix=take&lookup=5"
        pipe = subprocess.PIPE
        child = subprocess.Popen([sys.executable, "-c", WRITER, url, *paths], stdin=pipe, stdout=pipe, text=True)
        try:
            assert child.stdout is not None
            assert child.stdout.readline().strip() == "mine"
            with open_pool(url) as pool:
                space = open_space(pool)
                write(space, range(100, 116))
                assert pool.flush(20)  # copied by the other process
                assert not pool._store._copier._owner  # type: ignore[attr-defined]
                child.kill()
                child.wait(20)
                write(space, range(200, 216))
                assert pool.flush(20)
                assert pool._store._copier._owner  # type: ignore[attr-defined]
                empty_local(pool)
                for tokens in (range(8), range(100, 116), range(200, 216)):
                    assert space.match(space.keys(tokens)).num_tokens == len(tokens)
                    assert set(read(space, tokens)) == {Status.OK}
                pool.clear()
        finally:
            child.kill()
            child.communicate()


def test_events_tell_the_tier(redis_url: str, tmp_path: Path) -> None:
    with pool_of("shm", tmp_path, f"{redis_url}?prefix=even&lookup=5") as pool:
        follower = pool.follow()
        space = open_space(pool)
        write(space, range(8))
        assert pool.flush(20)
        assert [(e.kind, e.tier) for e in follower.poll()] == [(EventKind.STORED, "shm"), (EventKind.STORED, "redis")]
        pool.clear()


def test_two_writers_of_one_chunk_never_mix(redis_url: str) -> None:
    """Their results may differ in the last bit: whoever is second finds the first one's manifest and takes its own
    pieces away again."""
    with open_pool(f"{redis_url}?prefix=race&piece=1&lookup=5") as pool:
        space = open_space(pool)
        (chunk,) = space.keys(range(8)).chunks()
        store = pool._store
        survey = store._client.survey  # type: ignore[attr-defined]
        tiles = local_tiles(SPEC, chunk, WHOLE)
        other = tiles.copy()
        other[0, 0, 0] ^= 1
        state = {"first": True}

        def late(*args: object) -> object:
            found = survey(*args)
            if state.pop("first", False):
                assert space.write([chunk], WHOLE, [tiles]) == [Status.OK]  # between the look and the write
            return found

        store._client.survey = late  # type: ignore[attr-defined]
        assert space.write([chunk], WHOLE, [other]) == [Status.EXISTS]
        store._client.survey = survey  # type: ignore[attr-defined]
        got = empty_tiles(SPEC, chunk, WHOLE)
        assert space.read([chunk], WHOLE, [got]) == [Status.OK]
        assert np.array_equal(got, tiles)
        pieces = list(store._client.scan("race:p:", time.monotonic() + 20))  # type: ignore[attr-defined]
        assert len(pieces) == SPEC.num_layers
        pool.clear()


def test_a_remote_store_alone_takes_whole_chunks_only(redis_url: str) -> None:
    with open_pool(f"{redis_url}?prefix=alone") as pool:
        space = open_space(pool)
        with pytest.raises(InvalidArgumentError, match="local tier"):
            write(space, range(8), Topology(tp=2))


def test_tenants_are_promoted_under_their_own_root(redis_url: str, tmp_path: Path) -> None:
    with pool_of("shm", tmp_path, f"{redis_url}?prefix=tens&lookup=5") as pool:
        space = open_space(pool)
        keys = space.keys(range(16), tenant=b"acme")
        chunks = keys.chunks()
        space.write(chunks, WHOLE, [local_tiles(SPEC, c, WHOLE) for c in chunks])
        assert pool.flush(20)
        empty_local(pool)
        assert space.match(space.keys(range(16))).num_tokens == 0
        assert space.match(keys).num_tokens == 16
        buffers = [empty_tiles(SPEC, c, WHOLE) for c in chunks]
        assert space.read(chunks, WHOLE, buffers) == [Status.OK] * 2
        assert space.exists(chunks) == [True, True]
        assert pool.clear(tenant=b"acme") == 2
        assert space.match(keys).num_tokens == 0
