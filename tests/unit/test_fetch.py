"""Fetching from lower tiers into reserved extents of the first one: all of it, in order, held, and nothing leaked."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import Topology, whole_shard
from headwater.pool import Pool, Space, open_pool
from headwater.stores.base import Filling, Status
from headwater.stores.embedded import reserver
from headwater.stores.embedded.layout import MIN_CAPACITY
from headwater.stores.tiers import fetch as fetching
from headwater.stores.tiers.fetch import TierFetch

from support import empty_tiles, gqa, identity, local_tiles, temporary_url, wait_until

SPEC, CHUNK, COUNT = gqa(layers=2, heads=4, dim=8), 16, 12
EXTENT = SPEC.extent_bytes(CHUNK)
ONE_RANK = Topology()


def tiers_of(pool: Pool) -> Any:
    return pool._store._tiers  # type: ignore[attr-defined]


def front_of(pool: Pool) -> Any:
    return pool._store._front  # type: ignore[attr-defined]


@contextmanager
def two_tiers(
    tmp_path: Path, topology: Topology = ONE_RANK, num_lower: int = 1, first: str = "shm", capacity: str = "8MiB"
) -> Iterator[tuple[Pool, Space, list[ChunkRef]]]:
    """A pool whose lower tiers have a prompt, and whose first one is empty."""
    lower = [f"file://{tmp_path}/lower-{number}?capacity=8MiB&deadline=30" for number in range(num_lower)]
    with temporary_url(first, tmp_path, f"capacity={capacity}") as url, open_pool(",".join([url, *lower])) as pool:
        space = pool.space(identity(), SPEC, chunk_tokens=CHUNK)
        chunks = space.keys(range(COUNT * CHUNK + 3)).chunks()
        for shard in topology.shards(SPEC):
            tiles = [local_tiles(SPEC, chunk, shard) for chunk in chunks]
            assert all(status.stored for status in space.write(chunks, shard, tiles, deadline_s=30))
        assert pool.flush(30)
        front_of(pool).clear(None)
        yield pool, space, chunks


def fetch_of(space: Space, chunks: Sequence[ChunkRef], deadline_s: float = 30.0) -> TierFetch:
    fetch = space.fetch(chunks, deadline_s=deadline_s)
    assert isinstance(fetch, TierFetch)
    return fetch


def check(space: Space, chunks: Sequence[ChunkRef]) -> None:
    shard = whole_shard(SPEC)
    out = [empty_tiles(SPEC, chunk, shard) for chunk in chunks]
    assert space.read(chunks, shard, out, deadline_s=30) == [Status.OK] * len(chunks)
    for chunk, got in zip(chunks, out, strict=True):
        assert np.array_equal(got, local_tiles(SPEC, chunk, shard))


@pytest.mark.parametrize("first", ["shm", "file", "memory"])
@pytest.mark.parametrize("topology", [Topology(), Topology(tp=8, dcp=2, interleave=3)], ids=["whole", "in parts"])
@pytest.mark.parametrize("window", [1, 5 * EXTENT, 1 << 30])
def test_everything_comes_in_order_and_is_held(
    first: str, topology: Topology, window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if first == "file" and topology.dcp > 1:
        pytest.skip("a first tier that is not mapped takes whole tiles; parts are read from further down")
    monkeypatch.setattr(fetching, "WINDOW_BYTES", window)
    with two_tiers(tmp_path, topology, first=first) as (pool, space, chunks):
        fetch = fetch_of(space, chunks)
        assert fetch.wait(time.monotonic() + 30)
        assert fetch.is_done
        assert fetch.num_kept == len(chunks)
        assert all(space.exists(chunks))
        front = front_of(pool)
        assert front.stats().pending_bytes == 0
        published = front._core.members.published()
        assert len(published) == 1, "the last chunk, and so all before it, is held"
        check(space, chunks)
        fetch.release()
        fetch.release()
        assert not front._core.members.published()
        assert fetch.num_kept == 0
        assert space.fetch(chunks, deadline_s=1) is None, "all of it is there"
        assert pool.verify().clean
        assert tiers_of(pool)[0].counts.now()["fetched"] == len(chunks)


def test_one_read_of_a_lower_tier_makes_nothing_young(tmp_path: Path) -> None:
    with two_tiers(tmp_path) as (pool, space, chunks):
        lower, front = tiers_of(pool)[0].store, front_of(pool)
        lower.redate({chunk.key: 1_000_000 + chunk.number for chunk in chunks})
        fetch = fetch_of(space, chunks)
        assert fetch.wait(time.monotonic() + 30)
        check(space, chunks)
        fetch.release()
        assert front.ages([chunk.key for chunk in chunks]) == [1_000_000 + chunk.number for chunk in chunks]
        check(space, chunks)  # the second use counts
        assert min(front.ages([chunk.key for chunk in chunks])) > 1_000_000_000


@pytest.mark.parametrize("lost", [0, 4, COUNT])
def test_a_chunk_that_one_tier_lost_comes_from_the_next(lost: int, tmp_path: Path) -> None:
    with two_tiers(tmp_path, num_lower=2) as (pool, space, chunks):
        near = tiers_of(pool)[0]
        real = near.fill

        def fill(root: Any, wanted: Any, extents: Any, deadline: float) -> list[Filling]:
            """It said that it has them, and has lost one of them since."""
            fillings = real(root, wanted, extents, deadline)
            return [
                Filling(Status.MISS) if chunk.number == lost else filling
                for chunk, filling in zip(wanted, fillings, strict=True)
            ]

        near.fill = fill
        fetch = fetch_of(space, chunks)
        assert fetch.wait(time.monotonic() + 30)
        assert fetch.num_kept == len(chunks)
        check(space, chunks)
        fetch.release()
        assert [tier.counts.now()["fetched"] for tier in tiers_of(pool)] == [len(chunks) - 1, 1]


@pytest.mark.parametrize("lost", [0, 4, COUNT])
def test_what_no_tier_has_any_more_ends_a_fetch_and_leaks_nothing(lost: int, tmp_path: Path) -> None:
    with two_tiers(tmp_path) as (pool, space, chunks):
        near = tiers_of(pool)[0]
        real = near.fill

        def fill(root: Any, wanted: Any, extents: Any, deadline: float) -> list[Filling]:
            found = zip(wanted, real(root, wanted, extents, deadline), strict=True)
            return [Filling(Status.TIMEOUT) if chunk.number == lost else filling for chunk, filling in found]

        near.fill = fill
        fetch = fetch_of(space, chunks)
        assert fetch.wait(time.monotonic() + 30)
        assert fetch.num_kept == lost
        fetch.release()
        front = front_of(pool)
        assert front.exists(space._roots.any, chunks) == [i < lost for i in range(len(chunks))]
        assert front.stats().chunks == lost, "chunks that nobody can find take room"
        assert front.stats().pending_bytes == 0
        assert not front._core.members.published()
        assert pool.verify().clean


def test_damage_below_is_found_when_it_is_used_and_the_next_tier_helps(tmp_path: Path) -> None:
    """A fetch believes the checksums that it is given; whoever uses the bytes does not."""
    with two_tiers(tmp_path, num_lower=2) as (pool, space, chunks):
        near = tiers_of(pool)[0]
        real = near.fill

        def fill(root: Any, wanted: Any, extents: Any, deadline: float) -> list[Filling]:
            fillings: list[Filling] = real(root, wanted, extents, deadline)
            extents[0][1, 2, 3] ^= 0x40
            return fillings

        near.fill = fill
        damaged = pool.stats().store.damaged
        check(space, chunks)
        assert pool.stats().store.damaged == damaged + 1


def test_a_saver_and_a_fetch_never_fill_one_extent(tmp_path: Path) -> None:
    """Both are of one server; still, each meets the other's pending chunk as somebody else's."""
    with two_tiers(tmp_path) as (pool, space, chunks):
        shard = whole_shard(SPEC)
        extents = space.reserve(chunks[:3], shard, deadline_s=5)
        assert [extent.status for extent in extents] == [Status.OK] * 3
        fetch = fetch_of(space, chunks)
        assert fetch.wait(time.monotonic() + 30)
        assert fetch.num_kept == 0, "three chunks are being filled by a rank that does not go on"
        fetch.release()
        for extent in reversed(extents):
            extent.abort()
        near, begun, go = tiers_of(pool)[0], threading.Event(), threading.Event()
        real = near.fill

        def fill(*args: Any) -> list[Filling]:
            begun.set()
            assert go.wait(30)
            return real(*args)

        near.fill = fill
        fetch = fetch_of(space, chunks)
        assert begun.wait(30)
        tiles = [local_tiles(SPEC, chunk, shard) for chunk in chunks]
        assert space.write(chunks[:3], shard, tiles[:3]) == [Status.BUSY] * 3
        go.set()
        assert fetch.wait(time.monotonic() + 30)
        assert fetch.num_kept == len(chunks)
        fetch.release()
        check(space, chunks)


def test_two_fetches_of_the_same_chunks_are_both_served(tmp_path: Path) -> None:
    with two_tiers(tmp_path) as (pool, space, chunks):
        near, both = tiers_of(pool)[0], threading.Barrier(2, timeout=30)
        real, first = near.fill, threading.Event()

        def fill(*args: Any) -> list[Filling]:
            if not first.is_set():
                first.set()
                both.wait()  # the other one has begun
            return real(*args)

        near.fill = fill
        one = fetch_of(space, chunks)
        assert first.wait(30)
        other = fetch_of(space, chunks)
        both.wait()
        for fetch in (one, other):
            assert fetch.wait(time.monotonic() + 30)
        assert one.num_kept == len(chunks)
        wait_until(lambda: all(space.exists(chunks)), 30, "all are kept")
        one.release()
        other.release()
        check(space, chunks)
        assert front_of(pool).stats().pending_bytes == 0
        assert pool.verify().clean


def test_a_fetch_that_is_released_or_late_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "WINDOW_BYTES", 1)  # one chunk at a time
    with two_tiers(tmp_path) as (pool, space, chunks):
        near, begun, go = tiers_of(pool)[0], threading.Event(), threading.Event()
        real = near.fill

        def fill(*args: Any) -> list[Filling]:
            begun.set()
            assert go.wait(30)
            return real(*args)

        near.fill = fill
        fetch = fetch_of(space, chunks)
        assert begun.wait(30)
        fetch.release()
        go.set()
        assert fetch.wait(time.monotonic() + 30)
        assert fetch.num_kept == 0
        assert not front_of(pool)._core.members.published(), "a lease outlives its fetch"
        late = fetch_of(space, chunks, deadline_s=0.0)
        assert late.wait(time.monotonic() + 30)
        assert late.num_kept <= 2, "two windows were under way"
        late.release()
        assert front_of(pool).stats().pending_bytes == 0


def test_a_fetch_may_be_released_while_it_notes_ages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "WINDOW_BYTES", 1)  # one chunk at a time
    with two_tiers(tmp_path) as (pool, space, chunks):
        near, front, begun, go = tiers_of(pool)[0], front_of(pool), threading.Event(), threading.Event()
        real, calls = near.fill, list[int]()

        def fill(*args: Any) -> list[Filling]:
            calls.append(1)
            if len(calls) == 4:
                begun.set()
                assert go.wait(30)
            return real(*args)

        near.fill = fill
        fetch = fetch_of(space, chunks)
        assert begun.wait(30)
        redate = front.redate

        def redate_meanwhile(ages: Any) -> None:
            """The thread notes another chunk's age while this one goes through those that there are."""
            left = iter(ages.items())
            next(left)
            go.set()
            assert fetch.wait(time.monotonic() + 30)
            redate(dict(left))

        monkeypatch.setattr(front, "redate", lambda ages: redate(ages) if go.is_set() else redate_meanwhile(ages))
        fetch.release()
        assert len(calls) in (4, 5), "the other window that was under way has ended too, and no more were begun"
        assert not front._core.members.published(), "a lease outlives its fetch"


def test_a_fetch_may_be_released_after_its_pool_was_closed(tmp_path: Path) -> None:
    with two_tiers(tmp_path) as (_, space, chunks):
        fetch = fetch_of(space, chunks)
        assert fetch.wait(time.monotonic() + 30)
    fetch.release()
    assert fetch.num_kept == 0


def test_a_pool_with_tiers_is_closed_once_however_often_it_is_told(tmp_path: Path) -> None:
    with two_tiers(tmp_path) as (pool, _, _):
        pool.close()
        others = [
            os.open(os.devnull, os.O_RDONLY) for _ in range(64)
        ]  # one of them may have the number of a file of it
        pool.close()
    for fd in others:
        os.close(fd)


def test_what_cannot_be_kept_is_said_at_once(tmp_path: Path) -> None:
    with two_tiers(tmp_path) as (pool, space, chunks):
        suffix = fetch_of(space, chunks[5:])
        assert suffix.is_done
        assert suffix.num_kept == 0, "its parents are not in the first tier"
        suffix.release()
    with two_tiers(tmp_path, capacity=str(MIN_CAPACITY)) as (pool, space, chunks):
        long = space.keys(range(COUNT * CHUNK, COUNT * CHUNK + 40 * CHUNK)).chunks()
        shard = whole_shard(SPEC)
        for chunk in long:  # more than the first tier holds: it must go down as it comes
            assert space.write([chunk], shard, [local_tiles(SPEC, chunk, shard)], deadline_s=30)[0].stored
            assert pool.flush(30)
        assert front_of(pool).data_bytes < 2 * 40 * EXTENT
        front_of(pool).clear(None)
        fetch = fetch_of(space, long)
        assert fetch.is_done
        assert fetch.num_kept == 0, "it would sweep the first tier clean"
        fetch.release()
        check(space, long)  # and is read all the same


def test_a_forked_child_fetches_with_threads_of_its_own(tmp_path: Path) -> None:
    with two_tiers(tmp_path) as (_, space, chunks):
        fetch_of(space, chunks[:2]).wait(time.monotonic() + 30)
        pid = os.fork()
        if not pid:
            try:
                fetch = space.fetch(chunks, deadline_s=20)
                is_done = fetch is not None and fetch.wait(time.monotonic() + 20)
                os._exit(0 if is_done else 1)
            except BaseException:
                os._exit(2)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0


def test_two_windows_that_do_not_fit_at_a_time_come_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "WINDOW_BYTES", 3 * EXTENT)
    with two_tiers(tmp_path) as (pool, space, chunks):
        # Room for one window and a third.
        monkeypatch.setattr(reserver, "PENDING_SHARE", front_of(pool).data_bytes // (4 * EXTENT))
        fetch = fetch_of(space, chunks)
        assert fetch.wait(time.monotonic() + 30)
        assert fetch.num_kept == len(chunks)
        check(space, chunks)
        fetch.release()
