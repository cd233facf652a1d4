"""Events of all hosts: what one does with a shared tier, a follower on another one hears, and nobody hears it twice.

Two pools with first tiers of their own are two hosts; what they share is a real Redis server.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headwater.kv.topology import whole_shard
from headwater.pool import Pool, open_pool
from headwater.pool.space import Space
from headwater.stores.base import Status
from headwater.stores.events import NUM_SLOTS, Event, EventKind, Follower
from headwater.stores.remote import connect
from headwater.stores.remote.announce import LogEvent
from headwater.stores.remote.base import LOG_ENTRIES
from headwater.stores.url import parse_url

from servers import Server, mooncake_master, redis_server
from support import gqa, identity, local_tiles, temporary_url, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.fleet]

SPEC = gqa()
WHOLE = whole_shard(SPEC)
STORED, REMOVED, CLEARED = EventKind.STORED, EventKind.REMOVED, EventKind.CLEARED
HEARD_S = 20.0


@pytest.fixture
def redis() -> Iterator[Server]:
    with redis_server() as server:
        yield server


@contextlib.contextmanager
def host_of(remote: str, tmp_path: Path) -> Iterator[Pool]:
    with temporary_url("shm", tmp_path, "capacity=4MiB") as first, open_pool(f"{first},{remote}") as pool:
        yield pool


def remote_of(server: Server, options: str = "") -> str:
    return f"redis://127.0.0.1:{server.port}?lookup=2{options}"


def open_space(pool: Pool) -> Space:
    return pool.space(identity(), SPEC, chunk_tokens=8)


def write(pool: Pool, first: int, num_chunks: int = 2) -> list[bytes]:
    """Into every tier."""
    space = open_space(pool)
    chunks = space.keys(range(first, first + 8 * num_chunks)).chunks()
    statuses = space.write(chunks, WHOLE, [local_tiles(SPEC, chunk, WHOLE) for chunk in chunks])
    assert set(statuses) == {Status.OK}
    assert pool.flush(HEARD_S)
    return [chunk.key for chunk in chunks]


def listening(pool: Pool) -> Follower:
    """A follower, from the moment on when its host hears the others."""
    ownership = pool._store._listener._ownership  # type: ignore[attr-defined]
    wait_until(lambda: ownership.log_position(0) is not None, HEARD_S, "the host listens")
    return pool.follow()


def hear(follower: Follower, is_enough: Callable[[list[Event]], bool]) -> list[Event]:
    events: list[Event] = []

    def enough() -> bool:
        events.extend(follower.poll())
        return is_enough(events)

    wait_until(enough, HEARD_S, "the events arrive")
    return events


def about(events: list[Event], tier: str = "redis") -> list[tuple[EventKind, bytes]]:
    return [(event.kind, event.key) for event in events if event.tier == tier]


OTHER_HOST = """
import sys
sys.path[:0] = sys.argv[3:]
from pathlib import Path
from test_fleet_events import host_of, open_space, write
with host_of(sys.argv[1], Path(sys.argv[2])) as pool:
    keys = write(pool, 500)
    space = open_space(pool)
    pool._store.remove(space.root(), keys[1:])
    pool.clear()
    print(" ".join(key.hex() for key in keys))
"""


def test_a_follower_hears_writers_of_another_host(redis: Server, tmp_path: Path) -> None:
    here = Path(__file__).resolve()
    paths = [str(here.parent), str(here.parents[1]), str(here.parents[2] / "src")]
    with host_of(remote_of(redis), tmp_path) as pool:
        follower = listening(pool)
        command = [sys.executable, "-c", OTHER_HOST, remote_of(redis), str(tmp_path), *paths]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        first, second = map(bytes.fromhex, done.stdout.split())
        events = hear(follower, lambda found: (CLEARED, b"") in about(found))
        assert about(events) == [(STORED, first), (STORED, second), (REMOVED, second), (CLEARED, b"")]
        assert not about(events, "shm")
        told = [event for event in events if event.kind == STORED]
        assert [(event.number, event.num_tokens) for event in told] == [(0, 8), (1, 8)]
        assert pool.stats().store.tiers[-1].events == "fleet"
        assert pool.stats().store.tiers[-1].heard == 4


def test_both_hosts_hear_each_other_and_nobody_hears_itself_twice(redis: Server, tmp_path: Path) -> None:
    with host_of(remote_of(redis), tmp_path / "a") as a, host_of(remote_of(redis), tmp_path / "b") as b:
        followers = [listening(a), listening(b)]
        ours, theirs = write(a, 0), write(b, 1000)
        last = write(a, 2000, 1)
        want = sorted([(STORED, key) for key in ours + theirs + last])
        for follower in followers:
            events = hear(follower, lambda found: len(about(found)) >= len(want))
            assert sorted(about(events)) == want


def test_processes_of_one_host_are_heard_once(redis: Server, tmp_path: Path) -> None:
    """Whoever writes through to the shared tier tells its own host; the process that listens must not tell it again."""
    remote = remote_of(redis, "&write=through")
    with (
        temporary_url("shm", tmp_path, "capacity=4MiB") as first,
        open_pool(f"{first},{remote}") as owner,
        open_pool(f"{first},{remote}") as other,
        host_of(remote, tmp_path / "far") as far,
    ):
        follower = listening(owner)
        keys = write(other, 0)
        mark = write(far, 1000, 1)  # when this is heard, all before it was
        events = hear(follower, lambda found: (STORED, mark[0]) in about(found))
        assert about(events) == [(STORED, key) for key in [*keys, *mark]]


def test_what_a_reader_finds_damaged_is_told(redis: Server, tmp_path: Path) -> None:
    with host_of(remote_of(redis), tmp_path / "a") as a, host_of(remote_of(redis), tmp_path / "b") as b:
        follower, own = listening(a), listening(b)
        keys = write(b, 0, 1)
        client = connect(parse_url(remote_of(redis)))
        (piece,) = client.scan("hw:p:", time.monotonic() + HEARD_S)
        client.remove([piece], time.monotonic() + HEARD_S)
        client.close()
        b._store._front.clear(None)  # type: ignore[attr-defined]
        space = open_space(b)
        chunks = space.keys(range(8)).chunks()
        assert space.read(chunks, WHOLE, [local_tiles(SPEC, c, WHOLE) for c in chunks]) == [Status.MISS]
        for who in (follower, own):
            events = hear(who, lambda found: len(about(found)) >= 2)
            assert about(events) == [(STORED, keys[0]), (REMOVED, keys[0])]


def test_killed_and_restarted(redis: Server, tmp_path: Path) -> None:
    with host_of(remote_of(redis), tmp_path / "a") as a, host_of(remote_of(redis), tmp_path / "b") as b:
        follower = listening(a)
        before = write(b, 0)
        hear(follower, lambda found: len(about(found)) >= len(before))
        redis.kill()
        redis.start()
        # What had been told is gone with the server, and so may be what nobody has heard.
        events = hear(follower, lambda found: (CLEARED, b"") in about(found))
        after = write(b, 3000)
        hear(follower, lambda found: {(STORED, key) for key in after} <= set(about(events + found)))


def test_noise_in_the_log_is_passed_over(redis: Server, tmp_path: Path) -> None:
    with host_of(remote_of(redis), tmp_path / "a") as a, host_of(remote_of(redis), tmp_path / "b") as b:
        follower = listening(a)
        for words in (
            ["XADD", "hw:e", "*", "v", "noise"],
            ["XADD", "hw:e", "*", "other", "x" * 64],
            ["XADD", "hw:e", "*", "v", "", "w", "more"],
            ["XADD", "hw:e", "*", "v", "x" * 4000],
        ):
            _order(redis, words)
        keys = write(b, 0)
        events = hear(follower, lambda found: len(about(found)) >= len(keys))
        assert about(events) == [(STORED, key) for key in keys]


def test_an_entry_too_long_to_be_read_does_not_end_all_hearing(redis: Server, tmp_path: Path) -> None:
    with host_of(remote_of(redis), tmp_path / "a") as a, host_of(remote_of(redis), tmp_path / "b") as b:
        follower = listening(a)
        before = write(b, 1000, 1)
        hear(follower, lambda found: (STORED, before[0]) in about(found))
        _order(redis, ["XADD", "hw:e", "*", "v", "x" * 100_000])
        hear(follower, lambda found: (CLEARED, b"") in about(found))
        assert _order(redis, ["EXISTS", "hw:e"]) == "0"
        keys = write(b, 0)
        events = hear(follower, lambda found: (STORED, keys[-1]) in about(found))
        assert about(events) == [(STORED, key) for key in keys]
        assert a.stats().store.tiers[-1].breaker == "closed"


def test_something_else_under_the_logs_name_harms_nothing(redis: Server, tmp_path: Path) -> None:
    _order(redis, ["SET", "hw:e", "something else"])
    with host_of(remote_of(redis), tmp_path / "a") as a, host_of(remote_of(redis), tmp_path / "b") as b:
        listener = a._store._listener  # type: ignore[attr-defined]
        wait_until(lambda: bool(listener._refused), HEARD_S, "the host has asked for the log")
        write(b, 0)
        space = open_space(a)
        assert space.match(space.keys(range(16))).num_tokens == 16
        for tier in (a.stats().store.tiers[-1], b.stats().store.tiers[-1]):
            assert (tier.breaker, tier.failed) == ("closed", 0)


def test_the_log_stays_short_and_the_copiers_queue_is_not_flooded(redis: Server, tmp_path: Path) -> None:
    with host_of(remote_of(redis), tmp_path / "a") as a, host_of(remote_of(redis), tmp_path / "b") as b:
        follower = listening(a)
        copier = a._store._copier  # type: ignore[attr-defined]
        hand, held = copier._collect, []

        def held_back() -> None:
            held.append(copier.num_unread)

        copier._collect = held_back  # it has something else to do
        store = b._store._tiers[0].store  # type: ignore[attr-defined]
        for start in range(0, 3 * LOG_ENTRIES, 512):
            told = [LogEvent(STORED, (start + n + 1).to_bytes(32, "little"), 0, 8) for n in range(512)]
            store._client.remove([], time.monotonic() + HEARD_S, store.announcer.notice(told))
        wait_until(lambda: copier.num_unread >= NUM_SLOTS // 4, HEARD_S, "the ring fills")
        ownership = a._store._listener._ownership  # type: ignore[attr-defined]
        noted = ownership.log_position(0)
        count = len(held)
        wait_until(lambda: len(held) > count + 20, HEARD_S, "the copier was asked some times more")
        assert max(held) <= NUM_SLOTS // 2
        copier._collect = hand
        wait_until(lambda: ownership.log_position(0) != noted, HEARD_S, "the host goes on listening")
        assert int(_order(redis, ["XLEN", "hw:e"])) <= 1.1 * LOG_ENTRIES
        events = hear(follower, lambda found: bool(found) and found[-1].key == (3 * LOG_ENTRIES).to_bytes(32, "little"))
        assert EventKind.LOST not in {event.kind for event in events}
        assert (CLEARED, b"") in about(events)  # the log was shorter than what was told


def test_whoever_listens_next_goes_on_where_the_last_one_ended(redis: Server, tmp_path: Path) -> None:
    with temporary_url("shm", tmp_path, "capacity=4MiB") as first, host_of(remote_of(redis), tmp_path / "far") as far:
        url = f"{first},{remote_of(redis)}"
        with open_pool(url) as pool:
            follower = listening(pool)
            heard = write(far, 0)
            hear(follower, lambda found: len(about(found)) >= len(heard))
            position = follower.position
        missed = write(far, 1000)
        with open_pool(url) as pool:
            events = hear(pool.follow(since=position), lambda found: len(about(found)) >= len(missed))
            assert about(events) == [(STORED, key) for key in missed]


def test_mooncake_says_that_it_has_no_log(tmp_path: Path) -> None:
    with mooncake_master() as master, host_of(f"mooncake://127.0.0.1:{master.port}?lookup=5", tmp_path) as pool:
        assert pool.stats().store.tiers[-1].events == "host"
        assert pool._store._listener is None  # type: ignore[attr-defined]


def _order(server: Server, words: list[str]) -> str:
    """What redis-cli would do."""
    done = subprocess.run(
        ["redis-cli", "-p", str(server.port), *words], capture_output=True, text=True, timeout=20, check=True
    )
    return done.stdout.strip()
