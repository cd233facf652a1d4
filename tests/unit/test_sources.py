"""A local tier as a source: its chunks come into the first tier's extents as they are stored, or not at all."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.errors import BufferMismatchError
from headwater.kv.encoding import ENCODINGS, Encoding
from headwater.kv.format import checksum
from headwater.kv.topology import WHOLE, Split, Topology
from headwater.pool import Pool, Space, open_pool
from headwater.stores.base import Filled, Form, Status
from headwater.stores.embedded import store_directory
from headwater.stores.tiers.lower import LocalTier
from headwater.stores.url import parse_url
from headwater.stores.workers import Workers

from source_cases import CHUNK, SPEC, WHOLE_SHARD, check, commit, fill, reserved, space_of, write
from support import empty_tiles, local_tiles, temporary_url, wait_until

SCHEMES = ["file", "shm", "memory"]


@pytest.fixture
def front() -> Iterator[Space]:
    with open_pool("memory://?capacity=32MiB") as pool:
        yield space_of(pool)


@contextmanager
def local_tier(scheme: str, folder: object, options: str = "capacity=16MiB") -> Iterator[tuple[LocalTier, Space]]:
    with temporary_url(scheme, folder, options) as url, open_pool(url) as pool:
        yield tier_of(url, pool), space_of(pool)


def tier_of(url: str, pool: Pool) -> LocalTier:
    store: Any = pool._store
    return LocalTier(parse_url(url), store)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("topology", [Topology(), Topology(tp=8, dcp=2, interleave=3)], ids=["whole", "parts"])
def test_chunks_come_as_they_are_stored(scheme: str, topology: Topology, front: Space, tmp_path: Path) -> None:
    with local_tier(scheme, tmp_path) as (tier, below):
        chunks = below.keys(range(CHUNK * 40 + 5)).chunks()
        write(below, chunks, topology)
        assert tier.forms(chunks) == [Form(topology.split)] * 41
        with reserved(front, chunks, topology.split) as (reservations, extents):
            fillings = fill(tier, front, chunks, extents)
            for filling, chunk, extent in zip(fillings, chunks, extents, strict=True):
                assert filling.form.split == topology.split
                check(filling, chunk, extent)
            assert set(commit(front, reservations, fillings)) == {Status.OK}
        assert all(front.exists(chunks))
        buffers = [empty_tiles(SPEC, chunk, WHOLE_SHARD) for chunk in chunks]
        assert set(front.read(chunks, WHOLE_SHARD, buffers, deadline_s=30)) == {Status.OK}
        store: Any = tier.store
        assert store._core.members.published() == set(), "nothing is held any longer"


def test_what_is_not_there_is_a_miss(front: Space, tmp_path: Path) -> None:
    with local_tier("file", tmp_path) as (tier, below):
        chunks = below.keys(range(CHUNK * 6)).chunks()
        write(below, chunks[:2])
        pending = below.write(chunks[2:3], next(Topology(tp=2).shards(SPEC)), [np.zeros((4, 2, 1024), np.uint8)])
        assert pending == [Status.OK]
        assert tier.forms(chunks) == [Form(), Form(), None, None, None, None]
        with reserved(front, chunks, WHOLE) as (_, extents):
            fillings = fill(tier, front, chunks, extents)
            assert [filling.status for filling in fillings] == [Status.OK] * 2 + [Status.MISS] * 4
            assert all((extent == 0xA5).all() for extent in extents[2:])
            assert all(filling.sums is None for filling in fillings[2:])
            assert fill(tier, front, [], []) == []


def test_nothing_is_verified_and_the_checksums_tell(front: Space, tmp_path: Path) -> None:
    """Whoever places the bytes verifies them: here they come as fast as they can."""
    with local_tier("file", tmp_path) as (tier, below):
        (chunk,) = below.keys(range(CHUNK)).chunks()
        write(below, [chunk])
        core: Any = tier.store._core
        core.data.save([(7, [np.array([0], np.uint8)])], time.monotonic() + 30, lambda: None)
        with reserved(front, [chunk], WHOLE) as (_, extents):
            (filling,) = fill(tier, front, [chunk], extents)
            assert filling.status == Status.OK
            assert filling.sums is not None
            got = [checksum(tile) for layer in extents[0] for tile in layer]
            wrong = [a != b for a, b in zip(got, filling.sums.tolist(), strict=True)]
            assert wrong == [True] + [False] * 15


def test_a_short_segment_is_a_miss_and_its_chunks_go(front: Space, tmp_path: Path) -> None:
    with temporary_url("file", tmp_path, "capacity=16MiB") as url, open_pool(url) as pool:
        tier, below = tier_of(url, pool), space_of(pool)
        chunks = below.keys(range(CHUNK * 3)).chunks()
        write(below, chunks)
        (segment,) = [p for p in Path(store_directory(parse_url(url))).iterdir() if p.name.startswith("data-")]
        os.truncate(segment, 2 * SPEC.extent_bytes(CHUNK) + 100)
        with reserved(front, chunks, WHOLE) as (_, extents):
            statuses = [filling.status for filling in fill(tier, front, chunks, extents)]
            assert statuses == [Status.OK, Status.OK, Status.MISS]
        assert below.exists(chunks) == [True, True, False]
        assert pool.stats().store.damaged == 1


def test_after_the_deadline_nothing_is_begun(front: Space, tmp_path: Path) -> None:
    with local_tier("file", tmp_path) as (tier, below):
        chunks = below.keys(range(CHUNK * 3)).chunks()
        write(below, chunks)
        with reserved(front, chunks, WHOLE) as (_, extents):
            fillings = tier.fill(front.root(), chunks, extents, time.monotonic())
            assert [filling.status for filling in fillings] == [Status.TIMEOUT] * 3
            assert all((extent == 0xA5).all() for extent in extents)


@pytest.mark.parametrize("nowait", [True, False])
def test_a_disk_that_hangs_never_writes_into_an_extent_later(
    nowait: bool, front: Space, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with local_tier("file", tmp_path) as (tier, below):
        chunks = below.keys(range(CHUNK * 8)).chunks()
        write(below, chunks)
        core: Any = tier.store._core
        core.data._nowait = core.data._nowait and nowait
        go_on, read, hanging = threading.Event(), os.preadv, threading.Semaphore(0)

        def hang(fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
            if flags:
                raise BlockingIOError  # not in the page cache
            hanging.release()
            assert go_on.wait(30)
            return read(fd, buffers, offset)

        with reserved(front, chunks, WHOLE) as (_, extents):
            with monkeypatch.context() as patch:
                patch.setattr(os, "preadv", hang)
                started = time.monotonic()
                fillings = tier.fill(front.root(), chunks, extents, started + 0.3)
                assert time.monotonic() - started < 5
                assert [filling.status for filling in fillings] == [Status.TIMEOUT] * 8
                assert hanging.acquire(timeout=5)
                go_on.set()
                wait_until(lambda: not core.data.busy, what="the late reads")
            assert all((extent == 0xA5).all() for extent in extents)
            # Well again.
            for filling, chunk, extent in zip(fill(tier, front, chunks, extents), chunks, extents, strict=True):
                check(filling, chunk, extent)


def test_several_chunks_are_read_at_a_time(front: Space, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with local_tier("file", tmp_path) as (tier, below):
        chunks = below.keys(range(CHUNK * 8)).chunks()
        write(below, chunks)
        core: Any = tier.store._core
        load, together = core.data.load, threading.Barrier(3)

        def meet(offset: int, targets: Any, deadline: float) -> Any:
            assert [target.nbytes for target in targets] == [SPEC.extent_bytes(CHUNK)], "one call for a whole extent"
            if offset < 3 * SPEC.extent_bytes(CHUNK):
                together.wait(20)
            return load(offset, targets, deadline)

        monkeypatch.setattr(core.data, "load", meet)
        with reserved(front, chunks, WHOLE) as (_, extents):
            assert {filling.status for filling in fill(tier, front, chunks, extents)} == {Status.OK}


def test_an_evictor_leaves_alone_what_is_being_copied(
    front: Space, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with local_tier("shm", tmp_path, "capacity=2MiB") as (tier, below):
        (chunk,) = below.keys(range(CHUNK)).chunks()
        write(below, [chunk])
        core: Any = tier.store._core
        load = core.data.load

        def crowd(offset: int, targets: Any, deadline: float) -> Any:
            for number in range(200):
                write(below, below.keys([1000 + number] * CHUNK).chunks())
            assert tier.store.stats().evicted > 0
            return load(offset, targets, deadline)

        monkeypatch.setattr(core.data, "load", crowd)
        with reserved(front, [chunk], WHOLE) as (_, extents):
            (filling,) = fill(tier, front, [chunk], extents)
            check(filling, chunk, extents[0])


def test_extents_of_another_length_stay_empty(front: Space, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk in another encoding does not go into an extent that was reserved for raw tiles, nor the other way
    round; into one of its own length it goes as it is."""
    with local_tier("shm", tmp_path) as (tier, below):
        (chunk,) = below.keys(range(CHUNK)).chunks()
        size = SPEC.tile_bytes(CHUNK) // 2
        monkeypatch.setitem(ENCODINGS, 7, Encoding("half", lambda spec, n: spec.tile_bytes(n) // 2))
        (reservation,) = below.reserve([chunk], WHOLE_SHARD, encodings=[7])
        stored = reservation.tiles
        assert stored is not None
        stored[...] = np.random.default_rng(1).integers(0, 256, stored.shape, np.uint8)
        sums = [checksum(tile) for layer in stored for tile in layer]
        assert below.commit([Filled(reservation, range(4), range(4), 0, sums)]) == [Status.OK]
        reservation.close()
        assert tier.forms([chunk]) == [None]
        with reserved(front, [chunk], WHOLE) as (_, extents):
            assert [f.status for f in fill(tier, front, [chunk], extents)] == [Status.MISS]
            assert (extents[0] == 0xA5).all()
        extent = np.zeros((4, 4, size), np.uint8)
        (filling,) = fill(tier, front, [chunk], [extent])
        assert (filling.status, filling.form.encoding) == (Status.OK, 7)
        assert filling.sums is not None
        assert (filling.sums.tolist(), extent.tobytes()) == (sums, stored.tobytes())


def test_extents_must_be_contiguous_memory(front: Space, tmp_path: Path) -> None:
    with local_tier("memory", tmp_path) as (tier, below):
        chunks = below.keys(range(CHUNK * 2)).chunks()
        write(below, chunks)
        good = local_tiles(SPEC, chunks[0], WHOLE_SHARD)
        frozen = good.copy()
        frozen.flags.writeable = False
        for wrong in ([good], [good, good[:, ::2]], [good, frozen], [good, good.view(np.int8)]):
            with pytest.raises(BufferMismatchError, match="contiguous"):
                fill(tier, front, chunks, wrong)


def test_workers_are_not_used_up_by_a_source_that_is_well(front: Space, tmp_path: Path) -> None:
    """What the page cache has is read by the caller's own threads, which have ended afterwards."""
    with local_tier("file", tmp_path) as (tier, below):
        chunks = below.keys(range(CHUNK * 8)).chunks()
        write(below, chunks)
        with reserved(front, chunks, WHOLE) as (_, extents):
            before = set(threading.enumerate())
            assert {filling.status for filling in fill(tier, front, chunks, extents)} == {Status.OK}
            left = {thread.name for thread in set(threading.enumerate()) - before}
            assert not {name for name in left if "headwater-run" in name}
        core: Any = tier.store._core
        workers: Workers = core.data._workers
        assert workers.jobs == 0


def test_parts_are_told_by_chunk(front: Space, tmp_path: Path) -> None:
    with local_tier("file", tmp_path) as (tier, below):
        first, second = below.keys([1] * CHUNK).chunks(), below.keys([2] * CHUNK).chunks()
        write(below, first, Topology(tp=8, dcp=2, interleave=2))
        write(below, second)
        assert tier.forms([*first, *second]) == [Form(Split(2, 2)), Form()]
