"""Pushes between real processes: killed, stopped and restarted at either end."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from headwater.kv.topology import whole_shard
from headwater.peers.carriers import nixl
from headwater.pool.pool import Pool, open_pool
from headwater.pool.space import Space
from headwater.stores.embedded import store_directory
from headwater.stores.url import parse_url
from peer_cases import (
    CHUNK,
    SPEC,
    ReceiverProcess,
    check_arrived,
    nothing_pending,
    open_space,
    prompt,
    save,
    transfer_id,
    visible_layers,
)

from netns import Host, Peer, hosts
from support import temporary_url, wait_until

NUM_CHUNKS = 4
CARRIER = "tcp"
"""Set by a fixture, for both ends."""
STOP_S = 30.0 if os.environ.get("HEADWATER_ALL_STOPS") else 4.0
"""How long a process is stopped. `make test-all` takes the full time."""


@pytest.fixture(autouse=True, params=["tcp", "nixl"])
def carrier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test over both carriers."""
    if request.param == "nixl" and (reason := nixl.why_not()) is not None:
        pytest.skip(reason)
    monkeypatch.setattr(sys.modules[__name__], "CARRIER", request.param)
    return str(request.param)


class LocalHost(Host):
    """This host itself."""

    def __init__(self) -> None:
        self.name, self.address = "here", "127.0.0.1"

    def command(self, words: Sequence[str]) -> list[str]:
        return list(words)


class Decode:
    """A decode host: a pool that tests look into, and its receiver."""

    def __init__(self, url: str, *options: str, listen: str = "127.0.0.1:0", prefix: Sequence[str] = ()) -> None:
        self.url, self._options, self._prefix = url, options, prefix
        self.pool: Pool = open_pool(url)
        self.space: Space = open_space(self.pool)
        self.receiver = ReceiverProcess(url, *options, listen=listen, prefix=prefix)
        self.address = self.receiver.address

    def restart(self) -> None:
        """On the same port."""
        self.receiver = ReceiverProcess(self.url, *self._options, listen=self.address, prefix=self._prefix)

    def layers(self, seed: int) -> list[int]:
        return visible_layers(self.space, prompt(self.space, NUM_CHUNKS, seed), range(SPEC.num_kv_heads))

    def check(self, seed: int) -> None:
        check_arrived(self.space, prompt(self.space, NUM_CHUNKS, seed))

    def close(self) -> dict[str, Any]:
        told = self.receiver.close()
        self.pool.close()
        return told


@contextlib.contextmanager
def decode(tmp_path: Path, *options: str, **more: Any) -> Iterator[Decode]:
    with temporary_url("shm", tmp_path, "capacity=32MiB") as url:
        made = Decode(url, "--carrier", CARRIER, *options, **more)
        try:
            yield made
        finally:
            made.close()


@contextlib.contextmanager
def prefill(tmp_path: Path, host: Host | None = None, url: str | None = None, **options: Any) -> Iterator[Peer]:
    options["settings"] = {"carrier": CARRIER} | options.get("settings", {})
    with temporary_url("shm", tmp_path, "capacity=32MiB") as own:
        made = Peer(host or LocalHost(), url or own, json.dumps(options), script="peer_process")
        try:
            yield made
        finally:
            made.close()


def kill(peer: Peer) -> None:
    peer._process.kill()
    peer._process.wait(30)


def test_tiles_travel_by_the_carrier_that_both_ends_name(tmp_path: Path, carrier: str) -> None:
    with decode(tmp_path) as d, prefill(tmp_path) as p:
        assert p.ask("whole", d.address, 1, NUM_CHUNKS, 20.0)["tokens"] == NUM_CHUNKS * CHUNK
        counts = p.ask("state")["counts"]
        assert counts.get("written_bytes", 0) == (counts["bytes"] if carrier == "nixl" else 0)
        d.check(1)


def test_a_peer_with_the_other_carrier_is_served_over_the_connection(tmp_path: Path, carrier: str) -> None:
    other = {"tcp": "nixl", "nixl": "tcp"}[carrier]
    with decode(tmp_path) as d, prefill(tmp_path, settings={"carrier": other}) as p:
        assert p.ask("whole", d.address, 1, NUM_CHUNKS, 20.0)["tokens"] == NUM_CHUNKS * CHUNK
        assert "written_bytes" not in p.ask("state")["counts"]
        d.check(1)


def test_tensor_parallel_ranks_of_several_servers_push_at_once(tmp_path: Path) -> None:
    """Two ranks of one server fill the same chunks; another server pushes others meanwhile."""
    with (
        decode(tmp_path) as d,
        temporary_url("shm", tmp_path, "capacity=32MiB") as url,
        contextlib.ExitStack() as stack,
    ):
        ranks = [stack.enter_context(prefill(tmp_path, url=url, tp=2, rank=rank, server=9)) for rank in range(2)]
        with prefill(tmp_path, server=11) as other:
            transfer = transfer_id()
            for rank in ranks:
                assert rank.ask("push", transfer, d.address, 1, NUM_CHUNKS)["taken"]
            other.tell("whole", d.address, 2, NUM_CHUNKS, 20.0)
            for first in range(0, 6, 2):
                for rank in ranks:
                    rank.ask("compute", transfer, first, first + 2)
                wait_until(lambda: d.layers(1) == [first + 2] * NUM_CHUNKS, 20.0)  # noqa: B023
            for rank in ranks:
                assert rank.ask("flush", transfer, 20.0)["tokens"] == NUM_CHUNKS * CHUNK
            assert other.hear()["tokens"] == NUM_CHUNKS * CHUNK
        d.check(1)
        d.check(2)
        nothing_pending(d.pool)


@pytest.mark.parametrize("num_layers", [0, 2, 4])
def test_a_killed_prefill_server_leaves_nothing_behind(tmp_path: Path, num_layers: int) -> None:
    """Killed after its put, or after so many layers: everything is back within a second, and others are served."""
    with decode(tmp_path) as d, prefill(tmp_path, server=11) as other:
        assert other.ask("whole", d.address, 2, NUM_CHUNKS, 20.0)["tokens"] == NUM_CHUNKS * CHUNK
        before, used = d.receiver.num_fds, d.pool.stats().store.used_bytes
        with prefill(tmp_path, settings={"connections": 1 + num_layers // 2}) as p:
            transfer = transfer_id()
            assert p.ask("push", transfer, d.address, 1, NUM_CHUNKS)["taken"]
            if num_layers:
                p.ask("compute", transfer, 0, num_layers)
            wait_until(lambda: d.pool.stats().store.pending_bytes > 0, 20.0)
            wait_until(lambda: d.layers(1) == [num_layers] * NUM_CHUNKS, 20.0)
            kill(p)
            killed = time.monotonic()
            nothing_pending(d.pool)
            wait_until(lambda: d.receiver.num_fds == before, 10.0)
            took = time.monotonic() - killed
        assert d.pool.stats().store.used_bytes == used
        assert d.layers(1) == [0] * NUM_CHUNKS
        assert took < 1.0 + 2.0  # a busy machine
        assert other.ask("whole", d.address, 3, NUM_CHUNKS, 20.0)["tokens"] == NUM_CHUNKS * CHUNK
        d.check(2)
        d.check(3)


@pytest.mark.parametrize("num_layers", [0, 2, 4])
def test_a_killed_receiver_costs_the_sender_nothing_and_is_used_again(
    tmp_path: Path, num_layers: int, carrier: str
) -> None:
    with decode(tmp_path) as d, prefill(tmp_path) as p:
        assert p.ask("whole", d.address, 2, NUM_CHUNKS, 20.0)["tokens"] == NUM_CHUNKS * CHUNK
        before = p.ask("state")
        transfer = transfer_id()
        assert p.ask("push", transfer, d.address, 1, NUM_CHUNKS)["taken"]
        if num_layers:
            p.ask("compute", transfer, 0, num_layers)
        wait_until(lambda: d.layers(1) == [num_layers] * NUM_CHUNKS, 20.0)
        d.receiver.kill()
        assert p.ask("compute", transfer, num_layers, 6) < 2.0
        ended = p.ask("flush", transfer, 5.0)
        assert ended["tokens"] == 0
        assert ended["seconds"] < 5.5
        after = p.ask("state")
        assert after["pending"] == 0
        assert after["fds"] == before["fds"] - 1 if carrier == "tcp" else after["fds"] < before["fds"]  # the connection
        d.restart()
        nothing_pending(d.pool)
        began = time.monotonic()
        while p.ask("whole", d.address, 1, NUM_CHUNKS, 5.0)["tokens"] != NUM_CHUNKS * CHUNK:
            assert time.monotonic() - began < 10, "the restarted receiver gets nothing"
        assert time.monotonic() - began < 1.0 + 2.0
        d.check(1)
        assert p.ask("state")["fds"] == before["fds"]


def test_a_prefill_server_that_is_restarted_pushes_again_at_once(tmp_path: Path) -> None:
    """Killed in the middle of a push; another one under its name pushes the same prompt, which nobody holds now."""
    with decode(tmp_path) as d:
        with prefill(tmp_path) as p:
            transfer = transfer_id()
            assert p.ask("push", transfer, d.address, 1, NUM_CHUNKS)["taken"]
            p.ask("compute", transfer, 0, 2)
            wait_until(lambda: d.layers(1) == [2] * NUM_CHUNKS, 20.0)
            kill(p)
        with prefill(tmp_path) as again:
            assert again.ask("whole", d.address, 1, NUM_CHUNKS, 20.0)["tokens"] == NUM_CHUNKS * CHUNK
            assert again.ask("state")["counts"]["chunks_sent"] == NUM_CHUNKS
        d.check(1)
        nothing_pending(d.pool)


def test_restarted_in_the_middle_of_a_push_everything_is_put_again(tmp_path: Path) -> None:
    """The sender finds the connection ended and a receiver that listens: the same push arrives whole."""
    with decode(tmp_path) as d, prefill(tmp_path) as p:
        transfer = transfer_id()
        assert p.ask("push", transfer, d.address, 1, NUM_CHUNKS)["taken"]
        p.ask("compute", transfer, 0, 2)
        wait_until(lambda: d.layers(1) == [2] * NUM_CHUNKS, 20.0)
        p._process.send_signal(signal.SIGSTOP)
        d.receiver.kill()
        d.restart()
        p._process.send_signal(signal.SIGCONT)
        p.ask("compute", transfer, 2, 6)
        assert p.ask("flush", transfer, 20.0)["tokens"] == NUM_CHUNKS * CHUNK
        d.check(1)


def test_a_stopped_receiver_holds_nobody(tmp_path: Path) -> None:
    with decode(tmp_path) as d, prefill(tmp_path, settings={"io_s": 1.0}) as p:
        assert p.ask("whole", d.address, 2, NUM_CHUNKS, 20.0)["tokens"] == NUM_CHUNKS * CHUNK
        d.receiver.signal(signal.SIGSTOP)
        stopped = time.monotonic()
        slowest = 0.0
        try:
            while time.monotonic() - stopped < STOP_S:
                transfer = transfer_id()
                seed = int(time.monotonic() * 1000) % 100000
                slowest = max(slowest, p.ask("push", transfer, d.address, seed, NUM_CHUNKS)["seconds"])
                slowest = max(slowest, p.ask("compute", transfer, 0, 6))
                ended = p.ask("flush", transfer, 0.5)
                assert ended["tokens"] == 0
                assert ended["seconds"] < 0.5 + 1.0
        finally:
            d.receiver.signal(signal.SIGCONT)
        assert slowest < 2.0, "the engine was held"
        goes_on = time.monotonic()
        while p.ask("whole", d.address, 3, NUM_CHUNKS, 5.0)["tokens"] != NUM_CHUNKS * CHUNK:
            assert time.monotonic() - goes_on < 5.0 + 5.0
        d.check(3)
        nothing_pending(d.pool)


def test_a_stopped_receiver_is_left_alone_however_little_is_sent_to_it(tmp_path: Path) -> None:
    """The kernel takes small pushes for it: only the answers are missing."""
    with decode(tmp_path) as d, prefill(tmp_path, settings={"io_s": 2.0, "dead_s": 5.0}) as p:
        assert p.ask("whole", d.address, 2, 1, 20.0)["tokens"] == CHUNK
        d.receiver.signal(signal.SIGSTOP)
        try:
            assert p.ask("whole", d.address, 3, 1, 0.2)["tokens"] == 0
            wait_until(lambda: p.ask("state")["counts"].get("timeouts", 0) == 1, 10.0, "its silence is noticed")
            assert not p.ask("push", transfer_id(), d.address, 4, 1)["taken"]
        finally:
            d.receiver.signal(signal.SIGCONT)
        nothing_pending(d.pool)


def test_a_receiver_ends_when_its_pool_is_removed(tmp_path: Path) -> None:
    """It would fill memory that no engine looks at, and say that all is well."""
    with temporary_url("shm", tmp_path, "capacity=32MiB") as url:
        receiver = ReceiverProcess(url)
        try:
            shutil.rmtree(store_directory(parse_url(url)))
            with open_pool(url):
                assert receiver.process.wait(20) == 1
        finally:
            receiver.close()


def test_a_stopped_sender_is_given_up_and_comes_back(tmp_path: Path) -> None:
    with decode(tmp_path) as d, prefill(tmp_path) as p, prefill(tmp_path, server=11) as other:
        transfer = transfer_id()
        assert p.ask("push", transfer, d.address, 1, NUM_CHUNKS)["taken"]
        p.ask("compute", transfer, 0, 2)
        wait_until(lambda: d.layers(1) == [2] * NUM_CHUNKS, 20.0)
        p._process.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        try:
            assert other.ask("whole", d.address, 2, NUM_CHUNKS, 20.0)["tokens"] == NUM_CHUNKS * CHUNK
            wait_until(lambda: d.pool.stats().store.pending_bytes == 0, 20.0, "the stopped sender is given up")
            # Less than the 30 s after which its own pool forgets what it had begun.
            wait_until(lambda: time.monotonic() - stopped > min(STOP_S, 20.0), 60.0)
        finally:
            p._process.send_signal(signal.SIGCONT)
        p.ask("compute", transfer, 2, 6)
        # The connection has ended: everything is put again over a new one.
        assert p.ask("flush", transfer, 20.0)["tokens"] == NUM_CHUNKS * CHUNK
        d.check(1)
        d.check(2)
        nothing_pending(d.pool)


def _limbo_bytes(pool: Pool) -> int:
    stats = pool.stats().store
    return stats.used_bytes - stats.pending_bytes - stats.chunks * SPEC.extent_bytes(CHUNK)


def test_a_thousand_cancelled_requests_leave_nothing(tmp_path: Path) -> None:
    with decode(tmp_path) as d, prefill(tmp_path) as p:
        assert p.ask("whole", d.address, 1002, NUM_CHUNKS, 20.0)["tokens"] == NUM_CHUNKS * CHUNK
        p.ask("storm", d.address, 200, 64)
        nothing_pending(d.pool)
        fds, rss, mine = d.receiver.num_fds, d.receiver.rss_bytes, p.ask("state")["fds"]
        assert p.ask("storm", d.address, 1000, 64) == {"transfers": 0}
        nothing_pending(d.pool)
        wait_until(lambda: d.receiver.num_fds <= fds, 10.0)
        wait_until(lambda: p.ask("state")["fds"] <= mine, 10.0)
        assert d.receiver.rss_bytes - rss < 16 << 20
        wait_until(lambda: _limbo_bytes(d.pool) == 0, 10.0, "nothing is in limbo")
        assert d.pool.verify().damaged == 0
        assert p.ask("whole", d.address, 1001, NUM_CHUNKS, 20.0)["tokens"] == NUM_CHUNKS * CHUNK
        d.check(1001)


def test_late_writes_are_never_read(tmp_path: Path) -> None:
    """Pushes are ended in flight, their extents reused at once by local saves: no read ever gives wrong bytes."""
    with decode(tmp_path) as d, prefill(tmp_path) as p:
        rounds = 1000 if os.environ.get("HEADWATER_ALL_STOPS") else 150
        shard = whole_shard(SPEC)
        for number in range(rounds):
            transfer = transfer_id()
            p.tell("push", transfer, d.address, number, NUM_CHUNKS)
            p.tell("compute", transfer, 0, 6)
            p.tell("flush", transfer, 0.0005 * (number % 7))
            chunks = prompt(d.space, NUM_CHUNKS, seed=100_000 + number)
            save(d.space, chunks, shard)
            check_arrived(d.space, chunks)
            for _ in range(3):
                p.hear()
            pushed = prompt(d.space, NUM_CHUNKS, seed=number)
            there = [chunk for chunk, found in zip(pushed, d.space.exists(pushed), strict=True) if found]
            check_arrived(d.space, there)
            if number % 50 == 0:
                d.pool.clear()
        nothing_pending(d.pool)
        assert d.pool.stats().store.damaged == 0


# ---- hosts of network namespaces --------------------------------------------------------------------------------
@pytest.mark.fleet
def test_between_hosts_a_secret_is_needed_and_a_pulled_cable_holds_nobody(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret that both hosts have\n")
    down_s = 20.0 if os.environ.get("HEADWATER_ALL_STOPS") else 8.0
    with hosts(2) as (near, far):
        options = ("--secret-file", str(secret))
        listen = f"{far.address}:7700"
        with decode(tmp_path, *options, listen=listen, prefix=far.command([])) as d:
            with prefill(tmp_path, near) as stranger:
                assert stranger.ask("whole", d.address, 5, NUM_CHUNKS, 5.0)["tokens"] == 0
                assert d.layers(5) == [0] * NUM_CHUNKS
            with prefill(tmp_path, near, secret="a secret that both hosts have", settings={"io_s": 2.0}) as p:
                assert p.ask("whole", d.address, 1, NUM_CHUNKS, 20.0)["tokens"] == NUM_CHUNKS * CHUNK
                d.check(1)
                transfer = transfer_id()
                p.ask("push", transfer, d.address, 2, NUM_CHUNKS)
                p.ask("compute", transfer, 0, 2)
                wait_until(lambda: d.layers(2) == [2] * NUM_CHUNKS, 20.0)
                far.unplug()
                pulled = time.monotonic()
                assert p.ask("compute", transfer, 2, 6) < 2.0
                assert p.ask("flush", transfer, 1.0)["seconds"] < 2.0
                wait_until(lambda: d.pool.stats().store.pending_bytes == 0, 20.0, "the receiver gives up")
                while time.monotonic() - pulled < down_s:
                    assert p.ask("whole", d.address, 3, NUM_CHUNKS, 0.5)["seconds"] < 1.5
                far.plug()
                goes_on = time.monotonic()
                while p.ask("whole", d.address, 3, NUM_CHUNKS, 2.0)["tokens"] != NUM_CHUNKS * CHUNK:
                    assert time.monotonic() - goes_on < 10.0
                d.check(3)
                nothing_pending(d.pool)
