"""What an attacker found once: each of these broke a promise."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.errors import BufferMismatchError, InvalidArgumentError, StoreClosedError, StoreError, TopologyError
from headwater.kv.topology import Shard, Split, Topology, whole_shard
from headwater.pool import Pool, Space, open_pool
from headwater.stores.base import Filled, Status

from support import gqa, identity, local_tiles, temporary_url

SPEC = gqa(layers=2, heads=4, dim=8)
SHARD = whole_shard(SPEC)


def space_of(pool: Pool) -> Space:
    return pool.space(identity(), SPEC, chunk_tokens=8)


def write(space: Space, tokens: list[int]) -> Any:
    chunks = space.keys(tokens).chunks()
    space.write(chunks, SHARD, [local_tiles(SPEC, c, SHARD) for c in chunks])
    return chunks


@pytest.mark.parametrize(
    "wrong",
    [
        {"layers": range(1, -1, -1)},
        {"layers": range(-1, 2)},
        {"heads": range(0, 4, 2)},
        {"heads": range(3, -1, -1)},
        {"part": 1},
        {"part": -1},
        {"replicas": 0},
        {"replica": 1},
    ],
)
def test_a_shard_that_no_rank_can_hold(wrong: dict[str, Any]) -> None:
    """Such shards wrote outside their extents, or one head for another."""
    with pytest.raises(TopologyError, match="no rank holds"):
        Shard(**({"layers": range(2), "heads": range(4), "split": Split()} | wrong))


def test_checksums_for_tiles_that_are_not_there() -> None:
    """They were written outside their record."""
    with open_pool("memory://?capacity=2MiB") as pool:
        space = space_of(pool)
        (reservation,) = space.reserve(space.keys([1] * 8).chunks(), SHARD)
        for layers, heads, part, sums in (
            (range(-1, 1), range(4), 0, [0] * 8),
            (range(2), range(4), -1, [0] * 8),
            (range(3), range(4), 0, [0] * 12),
            (range(2), range(4), 0, [0] * 7),
            (range(2), range(4), 0, [-1] * 8),
        ):
            with pytest.raises((InvalidArgumentError, TopologyError)):
                space.commit([Filled(reservation, layers, heads, part, sums)])
        reservation.abort()
        assert pool.verify().clean
        assert pool.stats().store.rebuilds == 0


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_a_tail_among_full_chunks_in_one_array_is_refused_and_survives(scheme: str, tmp_path: Path) -> None:
    """It was read with the wrong size, found damaged, and removed."""
    with temporary_url(scheme, tmp_path, "capacity=2MiB") as url, open_pool(url) as pool:
        space = space_of(pool)
        chunks = write(space, list(range(12)))
        out = np.zeros((2, *SHARD.local_shape(SPEC, 0, 8)), np.uint8)
        for array in (out, out[::-1]):
            with pytest.raises(BufferMismatchError, match="of one size"):
                space.read(chunks, SHARD, array)
        assert space.match(space.keys(range(12))).num_tokens == 12


def test_overlapping_memory_is_refused() -> None:
    with open_pool("memory://?capacity=2MiB") as pool:
        space = space_of(pool)
        chunks = write(space, list(range(16)))
        shape = (2, *SHARD.local_shape(SPEC, 0, 8))
        flat = np.zeros(10_000, np.uint8)
        overlapping = np.lib.stride_tricks.as_strided(flat, shape, (0, 1024, 256, 1))
        with pytest.raises(BufferMismatchError, match="one array"):
            space.read(chunks, SHARD, overlapping)


def test_an_interrupted_clear_leaves_nothing_readable_or_leaked(tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with temporary_url("shm", tmp_path, "capacity=4MiB&index=2MiB") as url:
        with open_pool(url) as pool:
            space = space_of(pool)
            chunks = [c for number in range(1100) for c in write(space, [number])]
            with pytest.raises(KeyboardInterrupt):
                pool.clear(progress=interrupt)
        with open_pool(url) as pool:
            space = space_of(pool)
            assert not any(space.exists(chunks))
            assert pool.stats().store.used_bytes == 0
            assert pool.verify().clean


def test_clear_counts_what_it_cleared() -> None:
    with open_pool("memory://?capacity=8MiB&index=4MiB") as pool:
        space = space_of(pool)
        for number in range(2500):
            write(space, [number])
        assert pool.clear() == 2500


def test_damage_is_judged_even_when_the_record_was_forgotten(tmp_path: Path) -> None:
    with open_pool("memory://?capacity=2MiB") as pool:
        space = space_of(pool)
        (chunk,) = write(space, list(range(8)))
        out = np.zeros((1, *SHARD.local_shape(SPEC, 0, 8)), np.uint8)
        assert space.read([chunk], SHARD, out) == [Status.OK]
        store: Any = space._store
        store._reader._loaded.clear()
        store._core.data.segments[0][100] ^= 1
        assert space.read([chunk], SHARD, out) == [Status.DAMAGED]
        assert space.match(space.keys(range(8))).num_tokens == 0
        assert pool.stats().store.damaged == 1


def test_a_lease_is_on_the_record_and_not_on_its_name() -> None:
    with open_pool("memory://?capacity=2MiB") as pool:
        space = space_of(pool)
        write(space, [1] * 8)
        assert space.lease(space.match(space.keys([1] * 8)), "r").held
        pool.clear()
        write(space, [1] * 8)
        assert space.lease(space.match(space.keys([1] * 8)), "r").held
        for number in range(2, 2000):
            write(space, [number] * 8)
        assert pool.stats().store.evicted > 0
        assert space.match(space.keys([1] * 8)).num_tokens == 8


def test_a_deeper_lease_that_fails_leaves_the_shallower_one() -> None:
    with open_pool("memory://?capacity=2MiB") as pool:
        space = space_of(pool)
        write(space, [1] * 16)
        shallow = space.match(space.keys([1] * 8))
        deep = space.match(space.keys([1] * 16))
        assert space.lease(shallow, "r").held
        space._store.remove(space.root(), [deep.chunks[-1].key])
        assert not space.lease(deep, "r").held
        for number in range(2, 2000):
            write(space, [number] * 8)
        assert space.match(space.keys([1] * 8)).num_tokens == 8


def test_a_forked_child_has_none_of_its_parents_leases_and_reservations(tmp_path: Path) -> None:
    with temporary_url("shm", tmp_path, "capacity=2MiB") as url, open_pool(url) as pool:
        space = space_of(pool)
        write(space, [1] * 8)
        match = space.match(space.keys([1] * 8))
        space.lease(match, "r")
        (reservation,) = space.reserve(space.keys([2] * 8).chunks(), SHARD)
        pid = os.fork()
        if pid == 0:
            store: Any = space._store
            filled = Filled(reservation, range(2), range(4), 0, [0] * 8)
            ok = reservation.tiles is None and space.commit([filled]) == [Status.LOST]
            space.release("r")
            ok = ok and space.lease(match, "r").held and len(store._core.members.published()) == 2
            os._exit(0 if ok else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        reservation.abort()
        assert pool.verify().clean


@pytest.mark.parametrize("scheme", ["memory", "shm"])
def test_a_reservation_outlives_its_store_harmlessly(scheme: str, tmp_path: Path) -> None:
    with temporary_url(scheme, tmp_path, "capacity=2MiB") as url:
        pool = open_pool(url)
        space = space_of(pool)
        (reservation,) = space.reserve(space.keys([2] * 8).chunks(), SHARD)
        pool.close()
        with pytest.raises(StoreClosedError):
            _ = reservation.tiles
        with pytest.raises(StoreClosedError):
            space.commit([Filled(reservation, range(2), range(4), 0, [0] * 8)])
        reservation.abort()
        reservation.close()


def test_deadlines_are_kept_and_checked() -> None:
    with open_pool("memory://?capacity=64MiB") as pool:
        space = space_of(pool)
        chunks = space.keys(range(8 * 2000)).chunks()
        tiles = [np.zeros(SHARD.local_shape(SPEC, 0, 8), np.uint8)] * len(chunks)
        started = time.monotonic()
        assert set(space.write(chunks, SHARD, tiles, deadline_s=0)) == {Status.TIMEOUT}
        assert time.monotonic() - started < 1.0
        assert space.write(chunks[:3], SHARD, tiles[:3], deadline_s=float("inf")) == [Status.OK] * 3
        assert space.read(chunks[:3], SHARD, tiles[:1] * 3, deadline_s=1e300) == [Status.OK] * 3
        for wrong in (float("nan"), -1):
            with pytest.raises(InvalidArgumentError, match="deadline_s"):
                space.read(chunks[:1], SHARD, tiles[:1], deadline_s=wrong)
        assert pool.verify().clean


def test_closing_from_inside_an_operation_is_refused() -> None:
    with open_pool("memory://?capacity=2MiB") as pool:
        space = space_of(pool)
        write(space, [1] * 8)
        with pytest.raises(StoreError, match="from inside"):
            pool.verify(progress=lambda done, total: pool.close())


def test_what_was_leased_while_it_was_being_removed_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that publishes after the record was hidden, and before anybody looked, must find its bytes untouched."""
    with open_pool("memory://?capacity=2MiB") as pool:
        space = space_of(pool)
        (chunk,) = write(space, [1] * 8)
        core: Any = space._store._core  # type: ignore[attr-defined]
        extent = core.index.find(chunk.key).record.id
        real = core.members.published

        def published() -> set[int]:
            if core.index.find(chunk.key) is None and extent not in core.members._touching:
                core.members.publish(extent)
            return real()

        monkeypatch.setattr(core.members, "published", published)
        pool.clear()
        assert pool.stats().store.used_bytes > 0, "bytes were freed under a reader"
        assert space.match(space.keys([1] * 8)).num_tokens == 0
        monkeypatch.undo()
        core.members.retract(extent)
        pool.clear()
        assert pool.stats().store.used_bytes == 0
        assert pool.verify().clean


def test_odd_chunks_are_an_argument_error() -> None:
    with open_pool("memory://?capacity=2MiB") as pool:
        space = space_of(pool)
        (chunk,) = write(space, [1] * 8)
        for wrong in (
            {"key": b"short"},
            {"num_tokens": 2.0},
            {"num_tokens": 9},
            {"number": -1},
            {"number": 1 << 70},
            {"first_token": 3},
        ):
            with pytest.raises(InvalidArgumentError):
                space.read([chunk._replace(**wrong)], SHARD, [space.empty(chunk, SHARD)])  # type: ignore[arg-type]
        assert pool.verify().clean
        assert Topology().shard(SPEC) == SHARD
