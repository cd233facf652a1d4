"""Pulling from another host's `headwater pool receive`: a real process that is killed, stopped and restarted.

Whatever happens there, a read ends by its deadline with the right bytes or none, and the tier is used again afterwards.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import peer_cases as pc
from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import whole_shard
from headwater.pool import Pool, Space, open_pool
from headwater.stores.base import Status

from faults import FaultProxy, fault_proxy
from support import gqa, identity, local_tiles, temporary_url, wait_until

SPEC = gqa(layers=8, heads=4, dim=32)
CHUNK = 32
WHOLE = whole_shard(SPEC)
NUM_CHUNKS = 24
TOKENS = range(NUM_CHUNKS * CHUNK + 9)
EXTENT = SPEC.extent_bytes(CHUNK)


def space_of(pool: Pool) -> Space:
    return pool.space(identity(), SPEC, chunk_tokens=CHUNK)


def save(pool: Pool, tokens: Sequence[int] = TOKENS) -> list[ChunkRef]:
    chunks = space_of(pool).keys(tokens).chunks()
    tiles = [local_tiles(SPEC, chunk, WHOLE) for chunk in chunks]
    assert all(status.stored for status in space_of(pool).write(chunks, WHOLE, tiles, deadline_s=30))
    return chunks


class Host(NamedTuple):
    """Another host: its pool, its receiver, and the network before it."""

    pool: Pool
    receiver: pc.ReceiverProcess
    proxy: FaultProxy


@contextlib.contextmanager
def other_host(options: str = "capacity=64MiB") -> Iterator[Host]:
    with temporary_url("shm", None, options) as url, open_pool(url) as pool:
        receiver = pc.ReceiverProcess(url)
        try:
            with fault_proxy(int(receiver.address.rpartition(":")[2])) as proxy:
                yield Host(pool, receiver, proxy)
        finally:
            if receiver.process.poll() is None:
                receiver.signal(signal.SIGCONT)
            receiver.close()


@contextlib.contextmanager
def this_host(port: int, options: str = "lookup=0.5&deadline=5", capacity: str = "64MiB") -> Iterator[Pool]:
    with (
        temporary_url("shm", None, f"capacity={capacity}") as url,
        open_pool(f"{url},peer://127.0.0.1:{port}?{options}") as pool,
    ):
        yield pool


def read(pool: Pool, chunks: Sequence[ChunkRef], deadline_s: float = 20.0, *, keep: bool = True) -> list[Status]:
    """Read chunks; whatever is OK must be right."""
    out = [np.empty(WHOLE.local_shape(SPEC, chunk.first_token, chunk.num_tokens), np.uint8) for chunk in chunks]
    statuses = space_of(pool).read(chunks, WHOLE, out, deadline_s=deadline_s, keep=keep)
    for chunk, status, tiles in zip(chunks, statuses, out, strict=True):
        assert status != Status.OK or np.array_equal(tiles, local_tiles(SPEC, chunk, WHOLE)), "wrong bytes"
    return statuses


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    outcome: list[Any] = []
    thread = threading.Thread(target=lambda: outcome.append(work()))
    thread.start()
    return thread, outcome


def breaker(pool: Pool) -> str:
    return pool.tiers()[1].breaker


def num_pending(pool: Pool) -> int:
    return pool.stats().store.pending_bytes


def works_again(pool: Pool, chunks: Sequence[ChunkRef], within_s: float) -> None:
    """Wait until everything is found and read again."""
    pool.clear()
    wait_until(
        lambda: len(space_of(pool).match(space_of(pool).keys(TOKENS)).chunks) == len(chunks), within_s, "a match"
    )
    assert set(read(pool, chunks)) == {Status.OK}


@pytest.mark.parametrize("keep", [True, False], ids=["fetched", "read"])
def test_the_peer_is_killed_in_the_middle_of_a_read(keep: bool) -> None:
    with other_host() as host, this_host(host.proxy.port) as pool:
        chunks = save(host.pool)
        assert len(space_of(pool).match(space_of(pool).keys(TOKENS)).chunks) == len(chunks)
        host.proxy.stall_after = NUM_CHUNKS * EXTENT // 3
        thread, outcome = in_thread(lambda: read(pool, chunks, 20.0, keep=keep))
        wait_until(lambda: host.proxy.stalled, what="a third has come")
        started = time.monotonic()
        host.receiver.kill()
        host.proxy.heal()
        thread.join(15)
        assert not thread.is_alive()
        assert time.monotonic() - started < 10
        assert {Status.MISS} <= set(outcome[0]) <= {Status.OK, Status.MISS, Status.TIMEOUT}
        wait_until(lambda: num_pending(pool) == 0, 5, "reserved bytes are given back")
        url = host.pool.stats().store.url
        again = pc.ReceiverProcess(url, listen=host.receiver.address)
        try:
            works_again(pool, chunks, 15)
            assert breaker(pool) == "closed"
        finally:
            again.close()
        assert pool.verify().clean


def test_a_stopped_peer_costs_a_deadline_and_then_nothing() -> None:
    with other_host() as host, this_host(host.proxy.port, "lookup=0.3&deadline=1") as pool:
        chunks = save(host.pool)
        space = space_of(pool)
        keys = space.keys(TOKENS)
        assert len(space.match(keys).chunks) == len(chunks)
        host.receiver.signal(signal.SIGSTOP)
        started = time.monotonic()
        assert set(read(pool, chunks, 1.0)) <= {Status.MISS, Status.TIMEOUT}
        assert time.monotonic() - started < 4
        while breaker(pool) == "closed":
            assert time.monotonic() - started < 20
            space.match(keys)
        for _ in range(20):
            started = time.monotonic()
            assert space.match(keys).num_tokens == 0
            assert set(read(pool, chunks, 5.0)) == {Status.MISS}
            assert time.monotonic() - started < 2.0, "the breaker is open: nobody waits"
        host.receiver.signal(signal.SIGCONT)
        works_again(pool, chunks, 20)


def test_a_restarted_peer_is_used_again_at_once() -> None:
    with other_host() as host:
        port = int(host.receiver.address.rpartition(":")[2])
        with this_host(port) as pool:
            chunks = save(host.pool)
            assert set(read(pool, chunks)) == {Status.OK}
            host.receiver.kill()
            again = pc.ReceiverProcess(host.pool.stats().store.url, listen=host.receiver.address)
            try:
                started = time.monotonic()
                works_again(pool, chunks, 5)
                assert time.monotonic() - started < 5
                assert pool.tiers()[1].breaker_trips == 0, "an idle connection that ended is no failing peer"
            finally:
                again.close()


def test_a_bit_that_is_flipped_in_flight_is_found() -> None:
    with other_host() as host, this_host(host.proxy.port) as pool:
        chunks = save(host.pool)
        assert len(space_of(pool).match(space_of(pool).keys(TOKENS)).chunks) == len(chunks)
        host.proxy.flip_after = NUM_CHUNKS * EXTENT // 2
        assert set(read(pool, chunks, keep=False)) == {Status.OK}, "asked for once more"
        tier = pool.tiers()[1]
        assert (tier.damaged, tier.breaker) == (1, "closed")
        assert all(space_of(host.pool).exists(chunks)), "the peer's copy was right"
        host.proxy.flip_after = NUM_CHUNKS * EXTENT // 2
        assert set(read(pool, chunks)) == {Status.OK}, "what was kept does not verify, and is read where it came from"
        assert pool.stats().store.damaged == 1
        assert all(space_of(host.pool).exists(chunks))


@pytest.mark.slow
def test_bits_that_are_flipped_anywhere_never_reach_anybody() -> None:
    """Lengths, numbers, checksums and keys too."""
    with other_host() as host, this_host(host.proxy.port, "lookup=5&deadline=5") as pool:
        chunks = save(host.pool)[:3]
        choose = random.Random(0)
        for _ in range(150):
            host.proxy.flip_after = choose.choice([choose.randrange(600), choose.randrange(3 * EXTENT)])
            space_of(pool).match(space_of(pool).keys(TOKENS))
            assert set(read(pool, chunks, keep=choose.random() < 0.5)) <= set(Status)
            host.proxy.flip_after = None
            pool.clear()
            wait_until(lambda: breaker(pool) == "closed", what="the tier is in use")
        host.proxy.heal()
        works_again(pool, save(host.pool), 20)


def test_a_peer_that_evicts_while_it_is_read_never_gives_other_bytes() -> None:
    with other_host(f"capacity={(3 << 20) + 30 * EXTENT}&index=1MiB") as host, this_host(host.proxy.port) as pool:
        stop, end = threading.Event(), time.monotonic() + 6

        def crowd() -> int:
            number = 0
            while not stop.is_set():
                number += 1
                keys = space_of(host.pool).keys([number % 40, *range(1, 4 * CHUNK)])
                tiles = [local_tiles(SPEC, chunk, WHOLE) for chunk in keys.chunks()]
                space_of(host.pool).write(keys.chunks(), WHOLE, tiles, deadline_s=30)
            return number

        thread, outcome = in_thread(crowd)
        good, choose = 0, random.Random(1)
        try:
            while time.monotonic() < end or good < 50:
                chunks = space_of(pool).keys([choose.randrange(40), *range(1, 4 * CHUNK)]).chunks()
                good += read(pool, chunks, keep=False).count(Status.OK)
                assert time.monotonic() < end + 60
        finally:
            stop.set()
            thread.join(30)
        assert outcome[0] > 40
        assert host.pool.stats().store.evicted > 0
        assert host.pool.stats().store.damaged == 0


def test_memory_and_descriptors_stay_where_they_are() -> None:
    with other_host() as host, this_host(host.proxy.port, capacity="16MiB") as pool:
        chunks = save(host.pool)

        def rounds(count: int) -> None:
            for _ in range(count):
                assert set(read(pool, chunks, keep=False)) == {Status.OK}
                pool.clear()
                assert set(read(pool, chunks[:5])) == {Status.OK}

        rounds(5)
        before = host.receiver.num_fds, len(os.listdir("/proc/self/fd")), host.receiver.rss_bytes
        rounds(40)
        assert host.receiver.num_fds <= before[0] + 4
        assert len(os.listdir("/proc/self/fd")) <= before[1] + 8
        assert host.receiver.rss_bytes < before[2] + (16 << 20)


def test_many_processes_load_from_one_peer() -> None:
    script = (
        "import sys, test_peers_pulling as t\n"
        "with t.this_host(int(sys.argv[1]), 'lookup=20&deadline=30') as pool:\n"
        "    chunks = t.space_of(pool).match(t.space_of(pool).keys(t.TOKENS)).chunks\n"
        "    print(len(chunks), [s.name for s in set(t.read(pool, chunks))], flush=True)\n"
    )
    with other_host() as host:
        chunks = save(host.pool)
        paths = [str(Path(__file__).parent), *(path for path in sys.path if path)]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-c", script, str(host.proxy.port)]
        loads = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) for _ in range(3)]
        for load in loads:
            out, _ = load.communicate(timeout=120)
            assert out.strip() == f"{len(chunks)} ['OK']"


# ---- commands ---------------------------------------------------------------------------------------------------
def headwater(*args: str) -> tuple[int, str, str]:
    env = os.environ | {"PYTHONPATH": str(pc.SRC)}
    done = subprocess.run(
        [sys.executable, "-m", "headwater", *args], capture_output=True, text=True, env=env, timeout=120, check=False
    )
    return done.returncode, done.stdout, done.stderr


def test_commands_look_at_a_peer(tmp_path: Path) -> None:
    with other_host() as host:
        chunks, url = save(host.pool), f"peer://{host.receiver.address}"
        code, out, _ = headwater("pool", "stats", url, "--json")
        assert code == 0
        assert json.loads(out.splitlines()[-1])["chunks"] == len(chunks)
        assert headwater("pool", "ls", url, "--json")[0] == 0
        code, out, err = headwater("pool", "stats", f"{host.pool.stats().store.url},{url}")
        assert code == 0, err
        assert "never" in out
        assert "none" in out
        events = [sys.executable, "-m", "headwater", "pool", "events", url, "--seconds", "60", "--json"]
        env = os.environ | {"PYTHONPATH": str(pc.SRC)}
        with subprocess.Popen(events, stdout=subprocess.PIPE, text=True, env=env) as follower:
            assert follower.stdout is not None
            seeds = iter(range(1000, 2000))
            thread, lines = in_thread(follower.stdout.readline)
            while thread.is_alive():
                save(host.pool, [next(seeds), *range(1, CHUNK)])
                thread.join(0.2)
            assert json.loads(lines[0])["kind"] in ("stored", "lost")
            follower.terminate()
        for words in (("pool", "clear", url, "--yes"), ("pool", "verify", url)):
            code, _, err = headwater(*words)
            assert (code, "another host" in err) == (1, True)
        assert all(space_of(host.pool).exists(chunks))
        secret, config = tmp_path / "secret", tmp_path / "pools.toml"
        secret.write_text("a secret of the right length")
        tiers = f'[[pools.fleet.tiers]]\nurl = "shm:///x"\n[[pools.fleet.tiers]]\nurl = "{url}"\n'
        config.write_text(tiers)
        assert headwater("config", "check", str(config), "--connect")[0] == 0
        config.write_text(tiers + f'secret_file = "{tmp_path}/none"\n')
        code, _, err = headwater("config", "check", str(config))
        assert (code, "secret_file" in err) == (1, True)
        config.write_text(tiers + 'write = "back"\n')
        code, _, err = headwater("config", "check", str(config))
        assert (code, "write" in err) == (1, True)
        host.receiver.kill()
        config.write_text(tiers + f'secret_file = "{secret}"\n')
        assert headwater("config", "check", str(config))[0] == 0
        code, _, err = headwater("config", "check", str(config), "--connect")
        assert (code, "peer://" in err) == (1, True)
        assert headwater("pool", "stats", url)[0] != 0


def test_pulls_over_tls_with_certificates_of_both_sides(tmp_path: Path) -> None:
    key, cert = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    made = ["-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", key, "-out", cert]
    subprocess.run(["openssl", "req", *made, *names], check=True, capture_output=True)
    with temporary_url("shm", None, "capacity=64MiB") as url, open_pool(url) as pool:
        chunks = save(pool)
        receiver = pc.ReceiverProcess(url, "--tls-cert", cert, "--tls-key", key, "--tls-ca", cert)
        try:
            port = int(receiver.address.rpartition(":")[2])
            with this_host(port, f"ca={cert}&cert={cert}&key={key}&lookup=10&deadline=30") as near:
                assert set(read(near, chunks)) == {Status.OK}
            with this_host(port, "lookup=1&deadline=2") as near:
                assert set(read(near, chunks, 2.0)) <= {Status.MISS, Status.TIMEOUT}
        finally:
            receiver.close()
