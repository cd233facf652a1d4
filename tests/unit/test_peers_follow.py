"""Events of another host's pool over real sockets: in order, bounded, repaired after interruptions."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import pytest

import peer_cases as pc
from headwater.errors import PeerGoneError, StoreClosedError
from headwater.peers import follow
from headwater.peers.address import PeerAddress
from headwater.peers.receiver import Receiver
from headwater.pool import Pool, open_pool
from headwater.stores.events import Event, EventKind, Follower

from faults import fault_proxy
from source_cases import CHUNK, space_of, write
from support import wait_until


@pytest.fixture
def home() -> Iterator[tuple[Pool, int]]:
    """A host: its pool, and the port of its receiver."""
    with open_pool("memory://?capacity=16MiB") as pool, pc.receiving(pool) as receiver:
        yield pool, receiver.address.port


@contextlib.contextmanager
def following(port: int, options: str = "lookup=20") -> Iterator[tuple[Pool, Follower]]:
    with open_pool(f"peer://127.0.0.1:{port}?{options}") as far:
        yield far, far.follow()


def taken(follower: Follower, enough: Callable[[list[Event]], bool], timeout_s: float = 20.0) -> list[Event]:
    """Events until there are enough."""
    events, end = list[Event](), time.monotonic() + timeout_s
    while not enough(events):
        assert time.monotonic() < end, events
        events += follower.wait(0.05)
    return events


def write_prompt(pool: Pool, seed: int, num_chunks: int = 3) -> list[bytes]:
    chunks = space_of(pool).keys([seed, *range(1, num_chunks * CHUNK)]).chunks()
    write(space_of(pool), chunks)
    return [chunk.key for chunk in chunks]


def test_events_arrive_in_order_as_they_are_at_home(home: tuple[Pool, int]) -> None:
    pool, port = home
    with following(port) as (far, follower):
        at_home = pool.follow()
        keys = write_prompt(pool, 1)
        events = taken(follower, lambda e: len(e) >= 3)
        assert [(e.kind, e.key) for e in events] == [(EventKind.STORED, key) for key in keys]
        pool.clear()
        events += taken(follower, lambda e: any(event.kind == EventKind.CLEARED for event in e))
        local = at_home.poll()
        assert [e._replace(time_ns=0) for e in events] == [e._replace(time_ns=0) for e in local[: len(events)]]
        assert all(abs(a.time_ns - b.time_ns) < 5e9 for a, b in zip(events, local, strict=False))
        assert {info.key for info in far.scan()} == set()
    with pytest.raises(StoreClosedError):
        follower.poll()


def test_a_lost_connection_costs_no_event(home: tuple[Pool, int]) -> None:
    pool, port = home
    with fault_proxy(port) as proxy, following(proxy.port) as (_, follower):
        keys = write_prompt(pool, 1)
        assert len(taken(follower, lambda e: len(e) >= 3)) == 3
        proxy.refusing = True
        proxy.reset()
        keys = write_prompt(pool, 2)
        proxy.refusing = False
        started = time.monotonic()
        events = taken(follower, lambda e: len(e) >= 3)
        assert [(e.kind, e.key) for e in events] == [(EventKind.STORED, key) for key in keys]
        assert time.monotonic() - started < 5


def test_a_slow_follower_is_told_lost_and_reads_the_listing(
    home: tuple[Pool, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "MAX_WAITING", 10)
    pool, port = home
    with following(port) as (far, follower):
        keys = [key for seed in range(6) for key in write_prompt(pool, seed)]
        wait_until(lambda: follower._place.position >= 18, what="the connection has brought them")  # type: ignore[attr-defined]
        events = follower.poll()
        assert events[0].kind == EventKind.LOST
        assert len(events) <= 10
        assert {info.key for info in far.scan()} == set(keys)
        more = write_prompt(pool, 99)
        assert [e.key for e in taken(follower, lambda e: len(e) >= 3)] == more


def test_an_overrun_ring_is_lost_too(home: tuple[Pool, int]) -> None:
    pool, port = home
    with fault_proxy(port) as proxy, following(proxy.port) as (_, follower):
        proxy.refusing = True
        proxy.reset()
        ring = pool.first_tier.journal.ring()  # type: ignore[attr-defined]
        for number in range(5000):
            ring.append(EventKind.STORED, "memory", number.to_bytes(32, "big"))
        proxy.refusing = False
        assert taken(follower, lambda e: bool(e))[0].kind == EventKind.LOST


def test_a_restarted_receiver_with_another_pool_is_lost() -> None:
    """The new pool's events count from one as well: places in the old one's mean nothing there."""
    with open_pool("memory://?capacity=16MiB") as pool:
        write_prompt(pool, 0)
        receiver = Receiver(pool, PeerAddress("127.0.0.1", 0))
        receiver.start()
        port = receiver.address.port
        with following(port) as (far, follower):
            receiver.close()
            with open_pool("memory://?capacity=16MiB") as other:
                keys = [key for seed in range(1, 4) for key in write_prompt(other, seed)]
                receiver = Receiver(other, PeerAddress("127.0.0.1", port))
                receiver.start()
                try:
                    assert taken(follower, lambda e: bool(e))[0].kind == EventKind.LOST
                    assert {info.key for info in far.scan()} == set(keys)
                finally:
                    receiver.close()


def test_a_peer_that_is_away_is_an_error_and_repaired_when_it_is_back(
    home: tuple[Pool, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "SILENCE_S", 0.3)
    pool, port = home
    with fault_proxy(port) as proxy, following(proxy.port) as (_, follower):
        proxy.stalled = True

        def is_gone() -> bool:
            try:
                follower.poll()
            except PeerGoneError:
                return True
            return False

        wait_until(is_gone, what="silence is an error")
        keys = write_prompt(pool, 1)
        proxy.heal()

        def heard() -> list[bytes]:
            try:
                return [event.key for event in follower.poll()]
            except PeerGoneError:
                return []

        got: list[bytes] = []
        wait_until(lambda: got.extend(heard()) or got == keys, what="it goes on where it was")  # type: ignore[func-returns-value]


def test_a_peer_that_is_not_there_is_waited_for_only_so_long(home: tuple[Pool, int]) -> None:
    pool, port = home
    with fault_proxy(port) as proxy:
        proxy.refusing = True
        started = time.monotonic()
        with following(proxy.port, "lookup=0.2") as (_, follower):
            assert time.monotonic() - started < 5
            write_prompt(pool, 1)
            proxy.refusing = False
            assert taken(follower, lambda e: bool(e))[0].kind == EventKind.LOST


def test_events_of_slower_tiers_stay_at_home(home: tuple[Pool, int]) -> None:
    pool, port = home
    with following(port) as (_, follower):
        pool.first_tier.say("redis", [(EventKind.STORED, b"k" * 32, 0, 16)])  # type: ignore[attr-defined]
        keys = write_prompt(pool, 1)
        assert [e.key for e in taken(follower, lambda e: len(e) >= 3)] == keys
