"""What is evicted, in which order, and what never is."""

from __future__ import annotations

import random
import time

import pytest

from headwater.kv.topology import whole_shard
from headwater.pool import Pool, Space, open_pool
from headwater.stores.base import Filled, Status
from headwater.stores.embedded import janitor
from headwater.stores.embedded.index import Entry

from support import gqa, identity, local_tiles

SPEC = gqa(layers=2, heads=4, dim=64)  # 16 KiB a chunk of 8 tokens
SHARD = whole_shard(SPEC)
FEW, MANY = "1536KiB", "12MiB&index=2MiB"
"""Room for fewer chunks than one scan for victims takes, and for several times as many."""
real_time_ns = time.time_ns


@pytest.fixture
def pool() -> Pool:
    return open_pool("memory://?capacity=1536KiB")


def space_of(pool: Pool) -> Space:
    return pool.space(identity(), SPEC, chunk_tokens=8)


def write(space: Space, tokens: list[int]) -> list[Status]:
    chunks = space.keys(tokens).chunks()
    return space.write(chunks, SHARD, [local_tiles(SPEC, c, SHARD) for c in chunks])


def held(space: Space, tokens: list[int]) -> int:
    return space.match(space.keys(tokens)).num_tokens


def room(pool: Pool) -> int:
    """Chunks that fit."""
    return pool.stats().store.data_bytes // SPEC.extent_bytes(8)


def test_the_least_recently_used_goes_first(pool: Pool) -> None:
    space = space_of(pool)
    for number in range(room(pool)):
        write(space, [number] * 8)
    with space.lease(space.match(space.keys([0] * 8)), "r"):
        pass  # a use
    write(space, [1000] * 8)
    assert held(space, [0] * 8) == 8
    assert held(space, [1] * 8) == 0
    assert pool.stats().store.evicted == 1
    for number in range(2, 5):
        write(space, [1000 + number] * 8)
        assert held(space, [number] * 8) == 0
    assert held(space, [5] * 8) == 8


def use(space: Space, tokens: list[int]) -> None:
    space.lease(space.match(space.keys(tokens)), "r").release()


@pytest.mark.parametrize("capacity", [FEW, MANY])
def test_a_pool_holds_exactly_what_was_used_last(capacity: str) -> None:
    """Also what was used between the scan that listed it for eviction and its turn."""
    pool, rng = open_pool(f"memory://?capacity={capacity}"), random.Random(1)
    space, by_use = space_of(pool), dict[int, None]()
    for number in range(4 * room(pool)):
        assert write(space, [number] * 8) == [Status.OK]
        by_use[number] = None
        used = rng.choice(list(by_use)[-room(pool) :])
        use(space, [used] * 8)
        by_use[used] = by_use.pop(used)
    last = sorted(list(by_use)[-room(pool) :])
    assert [number for number in by_use if held(space, [number] * 8)] == [n for n in by_use if n in last]
    assert pool.stats().store.evicted == 3 * room(pool)


@pytest.mark.parametrize("capacity", [FEW, MANY])
def test_a_chunk_whose_tail_was_evicted_waits_for_its_own_turn(capacity: str) -> None:
    """A tail goes early, for it counts as older than it is; the chunk above it was used just as lately and does not."""
    pool = open_pool(f"memory://?capacity={capacity}")
    space = space_of(pool)
    for number in range(room(pool) - 3):
        write(space, [number] * 8)
    parents = [[1000 + number] * 8 for number in range(2)]
    for parent in parents:
        write(space, [*parent, 1, 2, 3, 4])  # the two tails together take the room of one whole chunk
    for number in range(room(pool) - 4):  # of which the two tails are the first to go
        assert write(space, [2000 + number] * 8) == [Status.OK]
    assert [held(space, [*parent, 1, 2, 3, 4]) for parent in parents] == [8, 8]


@pytest.mark.parametrize("capacity", [FEW, MANY])
def test_when_all_that_was_listed_was_used_since_others_are_looked_for(capacity: str) -> None:
    pool = open_pool(f"memory://?capacity={capacity}")
    space = space_of(pool)
    for number in range(room(pool) + 1):  # the last one makes a list of the 256 oldest and takes the first of them
        write(space, [number] * 8)
    for number in range(1, min(room(pool), 256) + 1):
        use(space, [number] * 8)
    oldest = 257 if room(pool) > 256 else 1
    assert held(space, [oldest] * 8) == 8
    assert write(space, [1000] * 8) == [Status.OK]
    assert held(space, [oldest] * 8) == 0
    assert pool.stats().store.evicted == 2


@pytest.mark.parametrize("capacity", [FEW, MANY])
def test_eviction_ends_though_every_victim_is_used_while_it_is_looked_at(
    capacity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = open_pool(f"memory://?capacity={capacity}")
    space, index, looks = space_of(pool), pool._store._core.index, 0
    for number in range(room(pool) + 1):
        write(space, [number] * 8)
    entry = index.entry

    def used_meanwhile(cell: int, key: bytes | None = None) -> Entry | None:
        nonlocal looks
        looks += 1
        index.touch(cell, time.time_ns())
        return entry(cell, key)

    monkeypatch.setattr(index, "entry", used_meanwhile)
    assert write(space, [1000] * 8) == [Status.OK]
    assert looks < 3 * room(pool)
    monkeypatch.undo()
    assert write(space, [2000] * 8) == [Status.OK]
    assert pool.verify().clean


@pytest.mark.parametrize("policy", ["lru", "fifo"])
def test_a_clock_that_was_set_back_makes_nothing_stay(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks from the future count as used when they are first looked at, not until the clock has caught up."""
    pool = open_pool(f"memory://?capacity={MANY}&policy={policy}")
    space, num_chunks = space_of(pool), room(pool)
    monkeypatch.setattr(time, "time_ns", lambda: real_time_ns() + 3600 * 10**9)
    for number in range(num_chunks):
        write(space, [number] * 8)
    monkeypatch.undo()
    for number in range(num_chunks, 2 * num_chunks):
        assert write(space, [number] * 8) == [Status.OK]
    kept = [number for number in range(2 * num_chunks) if held(space, [number] * 8)]
    assert kept == list(range(num_chunks, 2 * num_chunks))
    assert pool.verify().clean


@pytest.mark.parametrize("capacity", [FEW, MANY])
def test_noise_in_the_ages_makes_nothing_stay(capacity: str) -> None:
    pool = open_pool(f"memory://?capacity={capacity}")
    space, index = space_of(pool), pool._store._core.index
    for number in range(room(pool)):
        write(space, [number] * 8)
    for cell in index.heads().cell.tolist():
        index.touch(cell, (1 << 64) - cell)
    for number in range(room(pool)):
        assert write(space, [1000 + number] * 8) == [Status.OK]
    assert [number for number in range(room(pool)) if held(space, [1000 + number] * 8)] == list(range(room(pool)))


def test_a_prefix_is_as_young_as_its_youngest_user(pool: Pool) -> None:
    space = space_of(pool)
    write(space, [7] * 8)  # the oldest of all
    for number in range(room(pool) - 2):
        write(space, [number + 100] * 8)
    write(space, [7] * 8 + [8] * 8)  # and just used through its child
    for number in range(5):
        write(space, [number + 500] * 8)
    assert held(space, [7] * 8 + [8] * 8) == 16


def test_leaves_go_before_their_parents(pool: Pool) -> None:
    space = space_of(pool)
    long = [7] * (8 * room(pool))
    write(space, long)
    for number in range(4):
        write(space, [number + 100] * 8)
        assert held(space, long) == 8 * (room(pool) - number - 1)
    assert pool.verify().clean


def test_a_tail_goes_before_a_full_chunk_of_its_age(pool: Pool) -> None:
    space = space_of(pool)
    write(space, [1] * 8)
    write(space, [2] * 4)
    write(space, [3] * 4)  # two halves lie side by side and make room for one whole chunk
    number = 0
    while not pool.stats().store.evicted:
        number += 1
        write(space, [100 + number] * 8)
    assert held(space, [1] * 8) == 8
    assert held(space, [2] * 4) == held(space, [3] * 4) == 0


def test_fifo_does_not_care_about_use() -> None:
    pool = open_pool("memory://?capacity=1536KiB&policy=fifo")
    space = space_of(pool)
    for number in range(room(pool)):
        write(space, [number] * 8)
    space.lease(space.match(space.keys([0] * 8)), "r").release()
    write(space, [1000] * 8)
    assert held(space, [0] * 8) == 0
    # The order of arrival, not of addresses: after a while the two have nothing to do with each other.
    for number in range(1001, 1400):
        write(space, [number] * (8 - number % 3))
    kept = [number for number in range(1400) if held(space, [number] * (8 - number % 3)) == 8 - number % 3]
    assert kept == list(range(kept[0], 1400))


def test_what_is_pinned_stays_and_what_is_full_is_said(pool: Pool) -> None:
    space = space_of(pool)
    long = [7] * (8 * room(pool))
    write(space, long)
    match = space.match(space.keys(long))
    assert space.pin(match)
    assert write(space, [1] * 8) == [Status.FULL]
    assert held(space, long) == len(long)
    assert space.unpin(match)
    assert space.unpin(match)
    assert write(space, [1] * 8) == [Status.OK]
    assert held(space, long) == len(long) - 8
    assert not space.pin(match), "what is gone cannot be pinned"
    assert pool.verify().clean


def test_pending_bytes_take_at_most_a_quarter(pool: Pool) -> None:
    space = space_of(pool)
    refs = [space.keys([number] * 8).chunks()[0] for number in range(room(pool))]
    reservations = [space.reserve([ref], SHARD)[0] for ref in refs]
    granted = [r for r in reservations if r.status == Status.OK]
    assert {r.status for r in reservations} == {Status.OK, Status.FULL}
    stats = pool.stats().store
    assert stats.pending_bytes == len(granted) * SPEC.extent_bytes(8) <= stats.data_bytes // 4
    for reservation in granted:
        reservation.abort()
    assert pool.stats().store.pending_bytes == 0
    assert pool.stats().store.used_bytes == 0
    assert pool.verify().clean


def test_an_over_age_reservation_is_given_up(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    space = space_of(pool)
    (chunk,) = space.keys([1] * 8).chunks()
    (old,) = space.reserve([chunk], SHARD)
    monkeypatch.setattr(janitor, "MAX_PENDING_NS", 0)
    (new,) = space.reserve([chunk], SHARD)
    assert (old.status, new.status) == (Status.OK, Status.OK)
    assert space.commit([Filled(old, SHARD.layers, SHARD.heads, 0, [0] * 8)]) == [Status.LOST]
    old.close()
    new.abort()
    assert pool.verify().clean


def test_two_different_contents_for_one_tile_lose_the_chunk(pool: Pool) -> None:
    space = space_of(pool)
    (chunk,) = space.keys([1] * 8).chunks()
    (reservation,) = space.reserve([chunk], SHARD)
    assert space.commit([Filled(reservation, range(1), range(4), 0, [1, 2, 3, 4])]) == [Status.OK]
    assert space.commit([Filled(reservation, range(1), range(4), 0, [1, 2, 3, 4])]) == [Status.OK]
    assert space.commit([Filled(reservation, range(1), range(4), 0, [1, 2, 3, 5])]) == [Status.LOST]
    reservation.close()
    assert pool.stats().store.chunks == 0
    assert pool.verify().clean
