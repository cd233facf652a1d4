"""Two and three hosts: what one writes the others read, whatever their topology, and whatever the network does.

The bounds that are asserted: a look-up takes at most LOOKUP_S, a rank's read at most DEADLINE_S, each plus SLACK_S for
a busy machine.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.stores.embedded import destroy
from headwater.stores.url import parse_url

from netns import Daemon, Host, Peer, hosts
from support import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.fleet]

LOOKUP_S, DEADLINE_S, SLACK_S = 0.4, 1.0, 1.5
CHUNKS = 6
OPTIONS = f"lookup={LOOKUP_S}&deadline={DEADLINE_S}&piece=16KiB"
PORT = 6399


@pytest.fixture
def network() -> Iterator[list[Host]]:
    with hosts(4) as made:
        yield made


@contextlib.contextmanager
def redis_on(host: Host, tmp_path: Path) -> Iterator[Daemon]:
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        pytest.skip("no redis-server or valkey-server on the PATH")
    fixed = ["--port", str(PORT), "--bind", host.address, "--protected-mode", "no", "--save", ""]
    daemon = Daemon(host, [binary, *fixed, "--dir", str(tmp_path)], PORT)
    daemon.start()
    try:
        yield daemon
    finally:
        daemon.kill()


@contextlib.contextmanager
def mooncake_on(host: Host) -> Iterator[Daemon]:
    pytest.importorskip("mooncake.store", reason="mooncake-transfer-engine is not installed")
    binary = Path(sys.executable).with_name("mooncake_master")
    if not binary.exists():
        pytest.skip("no mooncake_master beside the interpreter")
    fixed = [f"--rpc_port={PORT}", f"--rpc_address={host.address}", f"--metrics_host={host.address}"]
    daemon = Daemon(host, [str(binary), *fixed, "--eviction_high_watermark_ratio=0.9"], PORT)
    daemon.start()
    try:
        yield daemon
    finally:
        daemon.kill()


@contextlib.contextmanager
def server_on(host: Host, remote: str, tp: int, pp: int = 1) -> Iterator[Peer]:
    """A server with shared memory of its own, as on a host of its own."""
    local = f"shm:///hwtest-{os.getpid()}-{secrets.token_hex(4)}?capacity=8MiB"
    peer = Peer(host, f"{local},{remote}", str(tp), str(pp))
    try:
        yield peer
    finally:
        peer.close()
        destroy(parse_url(local))


def written(peer: Peer, number: int) -> None:
    assert peer.ask("write", number, CHUNKS) in (["OK"], ["EXISTS", "OK"])
    assert peer.ask("flush", 20)


def hits(peer: Peer, number: int, ranks: int) -> None:
    """Everything is found and read, and right. A first look-up may come before the client is set up: that is a miss."""
    wait_until(lambda: peer.ask("match", number, CHUNKS)["chunks"] == CHUNKS, 20, "a match")
    outcome = peer.ask("read", number, CHUNKS, DEADLINE_S * 10)
    assert outcome["statuses"] == {"OK": ranks * CHUNKS}
    assert outcome["wrong"] == 0


def bounded(peer: Peer, number: int) -> dict[str, int]:
    """Whatever is found, it is right and it is in time."""
    found = peer.ask("match", number, CHUNKS)
    assert found["seconds"] < LOOKUP_S + SLACK_S
    outcome = peer.ask("read", number, CHUNKS, DEADLINE_S)
    assert outcome["wrong"] == 0
    assert outcome["seconds"] < DEADLINE_S + SLACK_S
    assert set(outcome["statuses"]) <= {"OK", "MISS", "TIMEOUT"}
    return dict(outcome["statuses"])


def test_three_hosts_share_through_redis(network: list[Host], tmp_path: Path) -> None:
    store, one, two, three = network
    with redis_on(store, tmp_path):
        remote = f"redis://{store.address}:{PORT}?{OPTIONS}"
        with server_on(one, remote, 4) as a, server_on(two, remote, 2, 2) as b, server_on(three, remote, 1) as c:
            written(a, 1)
            hits(b, 1, 4)
            hits(c, 1, 1)
            written(b, 2)
            hits(a, 2, 4)
            hits(c, 2, 1)
            assert b.ask("tier")["hits"] > 0


def test_the_cable_is_pulled_in_the_middle_of_loads_and_saves(network: list[Host], tmp_path: Path) -> None:
    store, one, two, _ = network
    with redis_on(store, tmp_path):
        remote = f"redis://{store.address}:{PORT}?{OPTIONS}"
        with server_on(one, remote, 2) as a, server_on(two, remote, 2) as b:
            for number in range(4):
                written(a, number)
            hits(b, 0, 2)
            two.unplug()
            for number in (1, 2, 3, 11, 12):
                assert set(bounded(b, number)) <= {"MISS", "TIMEOUT"}
            assert bounded(b, 0) == {"OK": 2 * CHUNKS}  # what this host has
            assert b.ask("write", 20, CHUNKS) == ["OK"]  # it goes on saving
            assert b.ask("tier")["breaker"] != "closed"
            written(a, 5)  # the other host does not notice
            two.plug()
            wait_until(lambda: b.ask("tier")["breaker"] == "closed", 30, "the breaker closes")
            assert b.ask("flush", 30)
            hits(b, 5, 2)
            hits(a, 20, 2)  # what was saved meanwhile has arrived


def test_a_slow_link_costs_the_deadline_and_no_more(network: list[Host], tmp_path: Path) -> None:
    store, one, two, _ = network
    with redis_on(store, tmp_path):
        remote = f"redis://{store.address}:{PORT}?{OPTIONS}"
        with server_on(one, remote, 1) as a, server_on(two, remote, 1) as b:
            for number in range(3):
                written(a, number)
            two.limit("400kbit")  # a prompt has 768 KiB
            for number in range(3):
                bounded(b, number)
            two.limit(None)
            wait_until(lambda: b.ask("tier")["breaker"] == "closed", 30, "the breaker closes")
            hits(b, 0, 1)


def test_the_server_dies_and_comes_back_empty(network: list[Host], tmp_path: Path) -> None:
    store, one, two, _ = network
    with redis_on(store, tmp_path) as daemon:
        remote = f"redis://{store.address}:{PORT}?{OPTIONS}"
        with server_on(one, remote, 2) as a, server_on(two, remote, 4) as b:
            written(a, 1)
            daemon.kill()
            for number in (1, 2, 3):
                assert set(bounded(b, number)) == {"MISS"}
            assert a.ask("write", 2, CHUNKS) == ["OK"]
            daemon.start()
            for peer in (a, b):
                wait_until(lambda peer=peer: peer.ask("tier")["breaker"] == "closed", 30, "the breaker closes")
            assert a.ask("flush", 30)
            # The copier compares when its own breaker closes; it may not have been in use while the server was away.
            wait_until(lambda: b.ask("match", 2, CHUNKS)["chunks"] == CHUNKS, 30, "what was written meanwhile")
            hits(b, 2, 4)


def test_two_hosts_share_through_mooncake(network: list[Host]) -> None:
    store, one, two, three = network
    with mooncake_on(store) as master:
        remote = f"mooncake://{store.address}:{PORT}?segment=64MiB&buffer=16MiB&{OPTIONS}"
        guest = remote.replace("segment=64MiB&", "")
        with server_on(one, remote, 4) as a, server_on(two, remote, 2, 2) as b, server_on(three, guest, 1) as c:
            written(a, 1)
            hits(b, 1, 4)
            hits(c, 1, 1)  # a pure client
            written(c, 2)  # into the memory of others
            hits(a, 2, 4)
            two.unplug()
            for number in (2, 3, 4, 5, 6):
                bounded(b, number)
            two.plug()
            wait_until(lambda: b.ask("tier")["breaker"] == "closed", 60, "the breaker closes")
            wait_until(lambda: b.ask("match", 2, CHUNKS)["chunks"] == CHUNKS, 60, "what another host wrote")
            master.kill()
            for peer in (a, b, c):
                for number in (7, 8, 9, 10):
                    assert set(bounded(peer, number)) <= {"MISS", "TIMEOUT"}
            master.start()
            for peer in (a, b, c):
                wait_until(lambda peer=peer: peer.ask("tier")["breaker"] == "closed", 60, "the breaker closes")
            assert a.ask("write", 30, CHUNKS) == ["OK"]
            wait_until(lambda: a.ask("flush", 5), 60, "the copier catches up")
            wait_until(lambda: b.ask("match", 30, CHUNKS)["chunks"] == CHUNKS, 60, "a match")
            hits(b, 30, 4)
