"""Events of a pool: in order, from every process, and honest about what was missed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headwater.kv.topology import whole_shard
from headwater.pool import open_pool
from headwater.pool.space import Space
from headwater.stores.events import NUM_SLOTS, EventKind, EventRing, Follower

from support import gqa, identity, local_tiles, temporary_url

SPEC = gqa()
SHARD = whole_shard(SPEC)
STORED, REMOVED, CLEARED, LOST = EventKind.STORED, EventKind.REMOVED, EventKind.CLEARED, EventKind.LOST


def write(space: Space, first: int, num_tokens: int) -> list[bytes]:
    chunks = space.keys(range(first, first + num_tokens)).chunks()
    space.write(chunks, SHARD, [local_tiles(SPEC, c, SHARD) for c in chunks])
    return [chunk.key for chunk in chunks]


@pytest.mark.parametrize("scheme", ["memory", "shm", "file"])
def test_stored_removed_and_cleared(scheme: str, tmp_path: Path) -> None:
    with temporary_url(scheme, tmp_path) as url, open_pool(url) as pool:
        space = pool.space(identity(), SPEC, chunk_tokens=8)
        write(space, 500, 8)  # before anybody follows: no event
        follower = pool.follow()
        keys = write(space, 0, 20)
        events = follower.poll()
        assert [(e.kind, e.tier, e.key, e.number, e.num_tokens) for e in events] == [
            (STORED, scheme, keys[0], 0, 8),
            (STORED, scheme, keys[1], 1, 8),
            (STORED, scheme, keys[2], 2, 4),
        ]
        assert [e.sequence for e in events] == [1, 2, 3]
        pool._store.remove(space.root(), [keys[2]])
        assert [(e.kind, e.key) for e in follower.poll()] == [(REMOVED, keys[2])]
        pool.clear()
        kinds = [e.kind for e in follower.poll()]
        assert kinds.count(CLEARED) == 1
        assert kinds.count(REMOVED) == 3
        assert [e.kind for e in pool.follow(since=0).poll()][:3] == [STORED] * 3


def test_evictions_are_events() -> None:
    with open_pool("memory://?capacity=2MiB") as pool:
        space = pool.space(identity(), SPEC, chunk_tokens=64)
        follower = pool.follow()
        for number in range(200):
            write(space, 1000 * number, 64)
        events = follower.poll(10_000)
        evicted = pool.stats().store.evicted
        assert evicted > 0
        assert sum(e.kind == REMOVED for e in events) == evicted
        assert sum(e.kind == STORED for e in events) == 200


WRITER = """
import sys
sys.path[:0] = sys.argv[2:]
from test_events import SPEC, write
from headwater.pool import open_pool
from support import identity
with open_pool(sys.argv[1]) as pool:
    print(write(pool.space(identity(), SPEC, chunk_tokens=8), 0, 16)[-1].hex())
"""


def test_a_follower_hears_writers_of_other_processes(tmp_path: Path) -> None:
    here = Path(__file__).resolve()
    paths = [str(here.parent), str(here.parents[1]), str(here.parents[2] / "src")]
    with temporary_url("shm", tmp_path) as url, open_pool(url) as pool:
        follower = pool.follow()
        command = [sys.executable, "-c", WRITER, url, *paths]
        written = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
        events = follower.wait(10)
        assert [e.kind for e in events] == [STORED] * 2
        assert events[-1].key.hex() == written


def test_who_falls_behind_is_told() -> None:
    ring = EventRing.private()
    follower = Follower(ring)
    for number in range(NUM_SLOTS + 10):
        ring.append(STORED, "t", bytes([1]) * 32, number)
    events = follower.poll(10 * NUM_SLOTS)
    assert events[0].kind == LOST
    assert {e.kind for e in events[1:]} == {STORED}
    assert events[-1].number == NUM_SLOTS + 9
    assert [e.number for e in events[1:]] == list(range(events[1].number, NUM_SLOTS + 10))
    ring.close()


def test_noise_in_a_slot_is_a_loss_and_not_an_event() -> None:
    ring = EventRing.private()
    follower = Follower(ring)
    for number in range(3):
        ring.append(STORED, "t", bytes([7]) * 32, number)
    ring._map[64 + 2 * 80 + 5] ^= 1
    assert [e.kind for e in follower.poll()] == [STORED, LOST, STORED]
    ring.close()
