"""What happens when the remote tier fails: right bytes or a miss, a bounded wait, bounded memory, and then it is back.

The bounds that are asserted: a look-up takes at most LOOKUP_S, a read at most DEADLINE_S, each plus SLACK_S for a busy
machine; and once the breaker is open, neither waits at all.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from headwater.kv.topology import Topology, whole_shard
from headwater.pool import Pool, open_pool
from headwater.pool.space import Space
from headwater.stores.base import Status
from headwater.stores.stats import TierStats

from faults import FaultProxy, fault_proxy
from servers import Server, free_port, listens, mooncake_master, redis_server
from support import empty_tiles, gqa, identity, local_tiles, temporary_url, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.fleet]

SPEC = gqa(layers=4, heads=4, dim=32)
WHOLE = whole_shard(SPEC)
CHUNK = 16
LOOKUP_S, DEADLINE_S, SLACK_S = 0.3, 0.6, 0.7
OPTIONS = f"lookup={LOOKUP_S}&deadline={DEADLINE_S}&piece=4KiB"


class Host:
    """A pool as one host has it: shared memory, then the remote tier."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.space: Space = pool.space(identity(), SPEC, chunk_tokens=CHUNK)

    def write(self, number: int, num_chunks: int = 4) -> None:
        chunks = self.space.keys(prompt(number, num_chunks)).chunks()
        for shard in Topology(tp=2).shards(SPEC):
            assert all(s.stored for s in self.space.write(chunks, shard, [local_tiles(SPEC, c, shard) for c in chunks]))

    def read(self, number: int, num_chunks: int = 4) -> list[Status]:
        """Fails on a wrong byte, and on one that comes too late."""
        chunks = self.space.keys(prompt(number, num_chunks)).chunks()
        buffers = [empty_tiles(SPEC, chunk, WHOLE) for chunk in chunks]
        start = time.monotonic()
        statuses = self.space.read(chunks, WHOLE, buffers, deadline_s=DEADLINE_S)
        assert time.monotonic() - start < DEADLINE_S + SLACK_S
        for chunk, buffer, status in zip(chunks, buffers, statuses, strict=True):
            assert status != Status.OK or np.array_equal(buffer, local_tiles(SPEC, chunk, WHOLE))
        return statuses

    def match(self, number: int, num_chunks: int = 4) -> int:
        start = time.monotonic()
        matched = self.space.match(self.space.keys(prompt(number, num_chunks))).num_tokens
        assert time.monotonic() - start < LOOKUP_S + SLACK_S
        return matched // CHUNK

    def forget_local(self) -> None:
        self.pool._store._front.clear(None)  # type: ignore[attr-defined]

    @property
    def tier(self) -> TierStats:
        return self.pool.stats().store.tiers[1]

    def until_open(self) -> None:
        """Use it until it is left alone; each use is bounded."""
        for number in range(1000, 1020):
            if self.tier.breaker != "closed":
                return
            assert self.match(number) == 0
        assert self.tier.breaker != "closed"

    def is_quick(self) -> None:
        """While the breaker is open, nobody waits."""
        start = time.monotonic()
        for number in range(2000, 2020):
            assert self.match(number) == 0
            assert self.read(number) == [Status.MISS] * 4
        assert time.monotonic() - start < SLACK_S

    def until_back(self, number: int) -> None:
        """The tier is used again, and what was written meanwhile is there."""
        wait_until(lambda: self.tier.breaker == "closed", 30, "the breaker closes")
        assert self.pool.flush(30)
        self.forget_local()
        assert self.match(number) == 4
        assert self.read(number) == [Status.OK] * 4


def prompt(number: int, num_chunks: int = 4) -> list[int]:
    return [number] * (CHUNK * num_chunks)


@contextlib.contextmanager
def host_of(remote: str, tmp_path: Path) -> Iterator[Host]:
    with temporary_url("shm", tmp_path, "capacity=8MiB") as first, open_pool(f"{first},{remote}") as pool:
        yield Host(pool)


@pytest.fixture
def redis() -> Iterator[Server]:
    with redis_server() as server:
        yield server


@pytest.fixture
def proxy(redis: Server) -> Iterator[FaultProxy]:
    with fault_proxy(redis.port) as proxy:
        yield proxy


@pytest.fixture
def host(proxy: FaultProxy, tmp_path: Path) -> Iterator[Host]:
    with host_of(f"redis://127.0.0.1:{proxy.port}?{OPTIONS}", tmp_path) as host:
        yield host


def stall(proxy: FaultProxy) -> None:
    proxy.stalled = True


def answer_after_30_s(proxy: FaultProxy) -> None:
    proxy.delay_s = 30.0


def half_open(proxy: FaultProxy) -> None:
    proxy.one_way = True


def refuse(proxy: FaultProxy) -> None:
    proxy.refusing = True
    proxy.reset()


def talk_nonsense(proxy: FaultProxy) -> None:
    proxy.garbage = True


@pytest.mark.parametrize("fault", [stall, answer_after_30_s, half_open, refuse, talk_nonsense])
def test_a_fault_costs_a_bounded_time_and_recovery_needs_no_restart(
    fault: Callable[[FaultProxy], None], host: Host, proxy: FaultProxy
) -> None:
    host.write(1)
    assert host.pool.flush(20)
    fault(proxy)
    host.until_open()
    host.is_quick()
    assert host.match(1) == 4  # from the first tier
    assert host.read(1) == [Status.OK] * 4
    host.write(2)  # the engine goes on saving
    assert host.tier.breaker_trips >= 1
    assert host.tier.breaker_reason
    proxy.heal()
    host.until_back(2)
    assert host.read(1) == [Status.OK] * 4


@pytest.mark.parametrize("cut_after", [1, 300, 5000, 20000])
def test_a_connection_that_breaks_in_the_middle_of_a_load(cut_after: int, host: Host, proxy: FaultProxy) -> None:
    host.write(1, 8)
    assert host.pool.flush(20)
    host.forget_local()
    assert host.match(1, 8) == 8
    proxy.cut_after = cut_after
    assert host.read(1, 8) == [Status.OK] * 8  # reading again is safe, and is done once
    assert host.tier.breaker == "closed"


def test_a_connection_that_breaks_in_the_middle_of_a_save(host: Host, proxy: FaultProxy) -> None:
    for number in range(5):
        proxy.cut_after = 1 + 7 * number
        host.write(number)
        wait_until(lambda: proxy.cut_after is None, what="a cut")
    host.until_back(3)
    for number in range(5):
        host.forget_local()
        assert host.read(number) == [Status.OK] * 4


def test_killed_and_restarted_empty(tmp_path: Path, redis: Server) -> None:
    with host_of(f"redis://127.0.0.1:{redis.port}?{OPTIONS}", tmp_path) as host:
        host.write(1)
        assert host.pool.flush(20)
        host.forget_local()
        assert host.read(1) == [Status.OK] * 4  # its manifests are known now
        redis.kill()
        host.until_open()
        host.is_quick()
        host.write(2)
        redis.start()
        host.until_back(2)
        host.forget_local()
        assert host.read(1) == [Status.OK] * 4  # it was in the first tier, and was copied again


def test_what_the_first_tier_has_is_copied_again_though_nothing_new_was_written(tmp_path: Path, redis: Server) -> None:
    with host_of(f"redis://127.0.0.1:{redis.port}?{OPTIONS}", tmp_path) as host:
        host.write(1)
        assert host.pool.flush(20)
        redis.kill()
        host.until_open()
        redis.start()
        host.until_back(1)


def test_restarted_empty_without_being_missed(tmp_path: Path, redis: Server) -> None:
    """Nobody used it while it was away: manifests that are remembered promise what is gone."""
    with host_of(f"redis://127.0.0.1:{redis.port}?{OPTIONS}", tmp_path) as host:
        host.write(1)
        assert host.pool.flush(20)
        host.forget_local()
        assert host.read(1) == [Status.OK] * 4
        host.forget_local()
        redis.kill()
        redis.start()
        assert host.read(1) == [Status.MISS] * 4
        assert host.match(1) == 0


def test_stopped_in_the_middle_of_loads_and_saves(tmp_path: Path, redis: Server) -> None:
    with host_of(f"redis://127.0.0.1:{redis.port}?{OPTIONS}", tmp_path) as host:
        host.write(1)
        assert host.pool.flush(20)
        redis.send(signal.SIGSTOP)
        host.write(2)
        host.until_open()
        host.is_quick()
        redis.send(signal.SIGCONT)
        host.until_back(2)


def test_out_of_memory_is_no_failure(tmp_path: Path) -> None:
    with (
        redis_server("--maxmemory", "2mb", "--maxmemory-policy", "noeviction") as redis,
        host_of(f"redis://127.0.0.1:{redis.port}?{OPTIONS}", tmp_path) as host,
    ):
        for number in range(60):
            host.write(number)
        wait_until(lambda: host.tier.full > 0, what="FULL")
        host.pool.flush(5)
        assert host.tier.breaker == "closed"
        assert host.tier.breaker_trips == 0
        stored = host.tier.stored
        assert 0 < stored < 240
        host.forget_local()
        found = sum(host.match(number) for number in range(60))
        assert 0 < found <= stored
        for number in range(60):
            for status in host.read(number):
                assert status in (Status.OK, Status.MISS)


def test_what_the_server_evicts_is_a_miss(tmp_path: Path) -> None:
    with (
        redis_server("--maxmemory", "3mb", "--maxmemory-policy", "allkeys-random") as redis,
        host_of(f"redis://127.0.0.1:{redis.port}?{OPTIONS}", tmp_path) as host,
    ):
        seen = set()
        for number in range(60):
            host.write(number)
        host.pool.flush(10)
        host.forget_local()
        for number in range(60):
            seen |= set(host.read(number))
        assert seen == {Status.OK, Status.MISS}
        assert host.tier.breaker_trips == 0
        # What was found to be incomplete is not promised again.
        host.forget_local()
        for number in range(60):
            matched = host.match(number)
            assert host.read(number)[:matched] == [Status.OK] * matched


def test_a_flipped_byte_below_is_found_and_removed(tmp_path: Path, redis: Server) -> None:
    import redis as peer

    with (
        host_of(f"redis://127.0.0.1:{redis.port}?{OPTIONS}", tmp_path) as host,
        peer.Redis(port=redis.port) as client,
    ):
        host.write(1)
        assert host.pool.flush(20)
        host.forget_local()
        name = sorted(client.keys("hw:p:*"))[0]
        value = bytearray(client.get(name))
        value[len(value) // 2] ^= 1
        client.set(name, bytes(value))
        statuses = host.read(1)
        assert statuses.count(Status.DAMAGED) == 1
        assert statuses.count(Status.OK) == 3
        assert host.tier.damaged == 1
        assert client.exists(name) == 0


def test_nothing_piles_up_while_the_tier_is_away(host: Host, proxy: FaultProxy) -> None:
    refuse(proxy)
    host.until_open()
    copier = host.pool._store._copier  # type: ignore[attr-defined]
    for number in range(100, 220):
        host.write(number, 2)
    wait_until(lambda: copier.num_waiting == 0, 20, "an empty queue")
    proxy.heal()
    wait_until(lambda: host.tier.breaker == "closed", 30, "the breaker closes")
    assert host.pool.flush(30)
    present = [number for number in range(100, 220) if host.match(number, 2) == 2]
    host.forget_local()
    assert all(host.match(number, 2) == 2 for number in present)  # all that the first tier still had


def test_a_wrong_password_is_said_without_the_password(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    secret = "s3cret-pässword"
    with (
        caplog.at_level(logging.DEBUG, "headwater"),
        redis_server("--requirepass", "another") as redis,
        host_of(f"redis://me:{secret}@127.0.0.1:{redis.port}?{OPTIONS}", tmp_path) as host,
    ):
        host.until_open()
        assert "WRONGPASS" in host.tier.breaker_reason
        shown = caplog.text + str(host.pool.stats().as_dict()) + host.tier.url
        assert secret not in shown
        assert "pässword" not in shown
        assert "//***@" in host.tier.url


def test_the_right_password_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text("open sesame\n")
    with (
        redis_server("--requirepass", "open sesame") as redis,
        host_of(f"redis://127.0.0.1:{redis.port}/3?{OPTIONS}&password_file={path}", tmp_path) as host,
    ):
        host.write(1)
        assert host.pool.flush(20)
        host.forget_local()
        assert host.match(1) == 4


def test_tls(tmp_path: Path) -> None:
    names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext {names}"
    made = subprocess.run(
        [*command.split(), "-keyout", "key.pem", "-out", "cert.pem"], cwd=tmp_path, capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("openssl makes no certificate")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    port = free_port()
    settings = ["--tls-port", str(port), "--tls-cert-file", str(cert), "--tls-key-file", str(key)]
    with redis_server(*settings, "--tls-auth-clients", "no"):
        wait_until(lambda: listens(port), what="TLS")
        with host_of(f"rediss://localhost:{port}?{OPTIONS}&ca={cert}", tmp_path) as host:
            host.write(1)
            assert host.pool.flush(20)
            host.forget_local()
            assert host.match(1) == 4
            assert host.read(1) == [Status.OK] * 4
        with host_of(f"rediss://localhost:{port}?{OPTIONS}", tmp_path) as host:  # a certificate nobody vouches for
            host.until_open()


def test_a_full_disk_below(tmp_path: Path, redis: Server) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", folder], check=False).returncode
    ):
        pytest.skip("no file system can be mounted here")
    try:
        below = f"file://{folder}/pool?capacity=8MiB&segment=1MiB"
        with host_of(f"{below},redis://127.0.0.1:{redis.port}?{OPTIONS}", tmp_path) as host:
            (folder / "ballast").write_bytes(bytes(8 << 20))  # not all of the capacity is backed yet
            for number in range(40):
                host.write(number)
            host.pool.flush(20)
            host.forget_local()
            for number in range(40):  # what the files have no room for comes from Redis
                assert host.match(number) == 4
                assert host.read(number) == [Status.OK] * 4
            assert host.pool._store._front.verify().clean  # type: ignore[attr-defined]
    finally:
        subprocess.run(["umount", "-l", folder], check=False)


# ---- Mooncake ---------------------------------------------------------------------------------------------------
def test_the_master_is_killed_and_restarted(tmp_path: Path) -> None:
    with mooncake_master() as master:
        remote = f"mooncake://127.0.0.1:{master.port}?segment=64MiB&buffer=16MiB&{OPTIONS}"
        with host_of(remote, tmp_path) as host:
            host.write(1)
            assert host.pool.flush(20)
            host.forget_local()
            assert host.match(1) == 4
            assert host.read(1) == [Status.OK] * 4
            master.kill()
            host.until_open()
            host.is_quick()
            assert host.read(1) == [Status.OK] * 4  # from the first tier
            host.write(2)
            master.start()
            # A restarted master knows nothing; its clients give their memory again when they notice.
            host.until_back(2)
            host.forget_local()
            assert host.read(1) == [Status.OK] * 4


def test_a_master_that_hangs(tmp_path: Path) -> None:
    with mooncake_master() as master:
        remote = f"mooncake://127.0.0.1:{master.port}?segment=64MiB&buffer=16MiB&{OPTIONS}"
        with host_of(remote, tmp_path) as host:
            host.write(1)
            assert host.pool.flush(20)
            master.send(signal.SIGSTOP)
            host.until_open()
            host.is_quick()
            host.write(2)
            master.send(signal.SIGCONT)
            host.until_back(2)


def test_a_master_that_was_never_there(tmp_path: Path) -> None:
    with host_of(f"mooncake://127.0.0.1:{free_port()}?segment=64MiB&{OPTIONS}", tmp_path) as host:
        host.until_open()
        host.is_quick()
        host.write(1)
        assert host.match(1) == 4
