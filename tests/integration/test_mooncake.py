"""What only a Mooncake tier does: its own memory read in place, soft pins, listings by way of the master's metrics."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.errors import BackendError
from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import Topology, whole_shard
from headwater.pool import Pool, open_pool
from headwater.pool.space import Space
from headwater.stores.base import Status
from headwater.stores.remote import mooncake_near, open_remote
from headwater.stores.remote.mooncake import MooncakeClient
from headwater.stores.remote.store import RemoteStore
from headwater.stores.url import parse_url

from servers import Server, mooncake_master
from support import empty_tiles, gqa, identity, local_tiles, temporary_url, wait_until

pytestmark = pytest.mark.slow

SPEC = gqa(layers=4, heads=4, dim=32)
WHOLE = whole_shard(SPEC)
TOKENS = range(64)
PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def master() -> Iterator[Server]:
    with mooncake_master() as server:
        yield server


def url_of(master: Server, prefix: str, options: str) -> str:
    return f"mooncake://127.0.0.1:{master.port}?prefix={prefix}&lookup=5&deadline=10&buffer=16MiB&{options}"


def open_client(master: Server, prefix: str, options: str) -> RemoteStore:
    return open_remote(parse_url(url_of(master, prefix, options)))


def giving(master: Server, prefix: str) -> RemoteStore:
    """A client that gives memory, and has found out where it lies."""
    store = open_client(master, prefix, "segment=32MiB&piece=1")
    store.contribute()
    store.ping()
    wait_until(lambda: near_of(store) is not None, PATIENCE_S, "the memory is given")
    return store


def near_of(store: RemoteStore) -> Any:
    return store._client._near  # type: ignore[attr-defined]


def space_of(store: RemoteStore) -> Space:
    return Pool(store).space(identity(), SPEC, chunk_tokens=16)


def write(space: Space, tenant: bytes = b"") -> None:
    write_chunks(space, space.keys(TOKENS, tenant=tenant).chunks())


def write_chunks(space: Space, chunks: Sequence[ChunkRef]) -> None:
    assert set(space.write(chunks, WHOLE, [local_tiles(SPEC, c, WHOLE) for c in chunks])) == {Status.OK}


def read(
    space: Space,
    topology: Topology = Topology(),  # noqa: B008 - frozen
    tenant: bytes = b"",
) -> list[Status]:
    """As every rank; fails on a wrong byte."""
    statuses, chunks = list[Status](), space.keys(TOKENS, tenant=tenant).chunks()
    for shard in topology.shards(SPEC):
        buffers = [empty_tiles(SPEC, chunk, shard) for chunk in chunks]
        for chunk, buffer, status in zip(chunks, buffers, space.read(chunks, shard, buffers), strict=True):
            statuses.append(status)
            assert status != Status.OK or np.array_equal(buffer, local_tiles(SPEC, chunk, shard))
    return statuses


class Spy:
    """Counts what is read in place and what is not."""

    def __init__(self, store: RemoteStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.near = self.far = 0
        near, client = near_of(store), store._client
        land, read_far = near.land, client._read_far  # type: ignore[attr-defined]

        def landed(spans: Sequence[Any], places: dict[int, int], *rest: Any) -> Any:
            self.near += len(places)
            return land(spans, places, *rest)

        def far(spans: Sequence[Any], *rest: Any) -> Any:
            self.far += len(spans)
            return read_far(spans, *rest)

        monkeypatch.setattr(near, "land", landed)
        monkeypatch.setattr(client, "_read_far", far)


@pytest.mark.parametrize("topology", [Topology(), Topology(tp=2), Topology(tp=4, pp=2)])
def test_what_this_process_gave_is_read_in_place(
    topology: Topology, master: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = giving(master, "near")
    try:
        spy, space = Spy(store, monkeypatch), space_of(store)
        write(space)
        assert set(read(space, topology)) == {Status.OK}
        assert spy.near >= 16  # four chunks of four objects
        assert spy.far == 0
        store.clear(None)
    finally:
        store.close()


def test_large_batches_are_read_in_threads(master: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large for this test: an object a thread."""
    monkeypatch.setattr(mooncake_near, "_ALONE_BELOW", 0)
    store = giving(master, "threads")
    try:
        spy, space = Spy(store, monkeypatch), space_of(store)
        write(space)
        assert set(read(space, Topology(tp=2))) == {Status.OK}
        assert spy.near == 32
        store.clear(None)
    finally:
        store.close()


def test_what_others_gave_comes_the_other_way(master: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where some lies here: both are read by one call."""
    giver, other = giving(master, "far"), giving(master, "far")
    client = open_client(master, "far", "segment=0&piece=1")
    try:
        write(space_of(giver))
        spy = Spy(other, monkeypatch)
        assert set(read(space_of(other))) == {Status.OK}
        assert (spy.near, spy.far) == (0, 16)
        assert near_of(client) is None
        assert set(read(space_of(client), Topology(tp=2))) == {Status.OK}

        half = space_of(giver).keys(TOKENS).chunks()[:2]
        giver.remove(space_of(giver).root(), [chunk.key for chunk in half])
        space = space_of(other)
        assert set(space.write(half, WHOLE, [local_tiles(SPEC, c, WHOLE) for c in half])) == {Status.OK}
        assert set(read(space)) == {Status.OK}
        assert (spy.near, spy.far) == (8, 24)
        other.clear(None)
    finally:
        for store in (client, other, giver):
            store.close()


def test_memory_that_is_being_given_back_is_not_read(master: Server) -> None:
    store = giving(master, "closing")
    try:
        space = space_of(store)
        write(space)
        near = near_of(store)
        with near.in_use() as usable:
            assert usable
            assert not near.close()  # somebody is inside
        assert near.close()
        with near.in_use() as usable:
            assert not usable
        assert set(read(space)) == {Status.OK}  # through the library
        store.clear(None)
    finally:
        store.close()


def test_a_flipped_byte_in_own_memory_is_found(master: Server) -> None:
    store = giving(master, "flip")
    try:
        space = space_of(store)
        write(space)
        near, chunk = near_of(store), space.keys(TOKENS).ref(2)
        manifest = store._reader.manifests([chunk.key], set(), time.monotonic() + PATIENCE_S)[chunk.key]
        assert manifest is not None
        name = store._names.piece(manifest, 1)
        replicas = store._client._call(  # type: ignore[attr-defined]
            lambda library: library.batch_get_replica_desc([name]), time.monotonic() + PATIENCE_S
        )
        place = replicas[name][0].get_memory_descriptor().buffer_descriptor.buffer_address
        near._bytes[place - near._start + 7] ^= 1
        assert read(space) == [Status.OK, Status.OK, Status.DAMAGED, Status.OK]
        assert read(space)[2] == Status.MISS
        store.clear(None)
    finally:
        store.close()


def test_batches_that_are_published_at_once_lose_no_tail(master: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of tails is read, changed and written back."""
    fetch = MooncakeClient.fetch

    def late(*args: Any) -> Any:
        found = fetch(*args)
        time.sleep(0.05)
        return found

    monkeypatch.setattr(MooncakeClient, "fetch", late)
    store = giving(master, "tails")
    try:
        space, parent = space_of(store), TOKENS[:16]
        prompts = [[*parent, *TOKENS[: 1 + i]] for i in range(4)]
        tails = [space.keys(prompt).chunks()[-1] for prompt in prompts]
        write_chunks(space, space.keys(parent).chunks())
        with ThreadPoolExecutor(len(tails)) as threads:
            list(threads.map(lambda tail: write_chunks(space, [tail]), tails))
        assert [space.match(space.keys(prompt)).num_tokens for prompt in prompts] == [len(p) for p in prompts]
    finally:
        store.close()


def soft_pinned(master: Server) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{master.metrics_port}/metrics/summary", timeout=PATIENCE_S) as reply:
        found = re.search(rb"soft-pinned: (\d+)", reply.read())
    assert found is not None
    return int(found[1])


def test_chunks_that_engines_hold_are_pinned_softly(tmp_path: Path) -> None:
    with (
        mooncake_master() as master,
        temporary_url("shm", tmp_path, "capacity=4MiB") as first,
        open_pool(f"{first},{url_of(master, 'pin', 'segment=32MiB&piece=1')}") as pool,
    ):
        space = pool.space(identity(), SPEC, chunk_tokens=16)
        *_, held = chunks = space.keys(TOKENS).chunks()
        copier = pool._store._copier  # type: ignore[attr-defined]
        step, copier._step = copier._step, lambda: False  # it waits until the lease is there
        assert set(space.write(chunks, WHOLE, [local_tiles(SPEC, c, WHOLE) for c in chunks])) == {Status.OK}
        lease = pool._store.lease(space.root(), held.key)
        assert lease is not None
        copier._step = step
        assert pool.flush(PATIENCE_S)
        wait_until(lambda: soft_pinned(master) == 5, PATIENCE_S, "four pieces and a manifest are pinned")
        lease.release()


def test_listing_and_checking_by_way_of_the_masters_metrics(master: Server) -> None:
    store = open_client(master, "list", f"segment=32MiB&piece=1&metrics={master.metrics_port}")
    store.contribute()
    try:
        pool = Pool(store)
        space = pool.space(identity(), SPEC, chunk_tokens=16)
        for tenant in (b"acme", b"other"):
            write(space, tenant)
        assert len(list(store.scan())) == 8
        report = store.verify()
        assert (report.chunks, report.damaged, report.clean) == (8, 0, True)
        assert store.stats().capacity_bytes >= 32 << 20
        assert pool.clear(tenant=b"acme") == 4
        assert set(read(space, tenant=b"acme")) == {Status.MISS}
        assert set(read(space, tenant=b"other")) == {Status.OK}
        store.clear(None)
        assert not list(store.scan())
    finally:
        store.close()


def test_without_the_metrics_port_an_error_says_what_is_missing(master: Server) -> None:
    store = open_client(master, "none", "segment=0&metrics=1")
    try:
        with pytest.raises(BackendError, match="metrics=PORT"):
            list(store.scan())
    finally:
        store.close()
