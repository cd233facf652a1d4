"""Child processes for tests: they run a function of this file, speak one line at a time, and die with the test."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from headwater.kv.topology import Topology
from headwater.pool import Space, open_pool
from headwater.stores.base import Filled, Form, Status

from support import WAIT_S, empty_tiles, gqa, identity, local_tiles

SPEC = gqa(layers=2, heads=8, dim=16)
CHUNK = 16
CHAOS_TOPOLOGIES = [
    Topology(),
    Topology(tp=8),
    Topology(tp=4, pp=2),
    Topology(tp=16, dcp=2, interleave=2),
    Topology(tp=2, pcp=2),
    Topology(pp=2),
    Topology(tp=2),
    Topology(tp=32, dcp=4),
]


class Child:
    """One process running `harness.NAME(*args)`."""

    def __init__(self, name: str, *args: object) -> None:
        root = Path(__file__).parents[2]
        path = os.pathsep.join([str(root / "src"), str(root / "tests"), str(root / "tests" / "integration")])
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"import harness, sys; harness.{name}(*sys.argv[1:])", *map(str, args)],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def expect(self, line: str) -> None:
        """Wait for the child to say something."""
        assert self.process.stdout is not None
        got = self.process.stdout.readline().strip()
        assert got == line, f"expected {line!r}, the child said {got!r} (exit {self.process.poll()})"

    def say(self, line: str) -> None:
        """Tell the child something."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def signal(self, number: int) -> None:
        """Send a signal; a stop is waited for."""
        self.process.send_signal(number)
        if number == signal.SIGSTOP:
            self.wait_stopped()

    def wait_stopped(self) -> None:
        """Until the kernel says that it is stopped."""
        end = time.monotonic() + WAIT_S
        while Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
            assert time.monotonic() < end, "the child did not stop"
            time.sleep(0.001)

    def kill(self) -> None:
        """kill -9, and wait until it is dead."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


def say(line: str) -> None:
    print(line, flush=True)


def hear() -> str:
    return sys.stdin.readline().strip()


def open_space(url: str, group: int | None = None) -> Space:
    return open_pool(url, group=group).space(identity(), SPEC, chunk_tokens=CHUNK)


def prompt(number: int) -> list[int]:
    """A few prompts that share prefixes of several lengths; every fourth ends in a tail."""
    shared = [7] * (CHUNK * (number % 3))
    return shared + [100 + number] * (CHUNK * (1 + number % 4) + (5 if number % 4 == 0 else 0))


def read_all(space: Space, number: int, topology: Topology, request: str | None = None) -> int:
    """Match and read one prompt as every rank of a topology. Exits at once on a wrong byte. Chunks read right."""
    match = space.match(space.keys(prompt(number)))
    if request is not None:
        space.lease(match, request)
    good = 0
    for shard in topology.shards(SPEC):
        buffers = [empty_tiles(SPEC, chunk, shard) for chunk in match.chunks]
        statuses = space.read(match.chunks, shard, buffers)
        for chunk, buffer, status in zip(match.chunks, buffers, statuses, strict=True):
            if status == Status.DAMAGED:
                say("DAMAGED")
                os._exit(2)
            if status == Status.OK:
                good += 1
                if not np.array_equal(buffer, local_tiles(SPEC, chunk, shard)):
                    say("WRONG")
                    os._exit(3)
    if request is not None:
        space.release(request)
    return good


# ---- what children do -------------------------------------------------------------------------------------------
def chaos(url: str, seed: str, universe: str) -> None:
    """Write and read at random until killed."""
    rnd = random.Random(int(seed))
    topology = CHAOS_TOPOLOGIES[int(seed) % len(CHAOS_TOPOLOGIES)]
    space = open_space(url)
    say("ready")
    while True:
        number = rnd.randrange(int(universe))
        if rnd.random() < 0.5:
            chunks = space.keys(prompt(number)).chunks()
            for shard in topology.shards(SPEC):
                space.write(chunks, shard, [local_tiles(SPEC, c, shard) for c in chunks], deadline_s=0.3)
        else:
            read_all(space, number, topology, "r" if rnd.random() < 0.5 else None)


def write_heads_then_wait(url: str, ranks: str) -> None:
    """As the first ranks of a TP=8 server, then hang."""
    space = open_space(url)
    chunks = space.keys(prompt(0)).chunks()
    for shard in list(Topology(tp=8).shards(SPEC))[: int(ranks)]:
        space.write(chunks, shard, [local_tiles(SPEC, c, shard) for c in chunks])
    say("written")
    hear()


def write_everything(url: str, tp: str) -> None:
    """As all ranks of a server, on command."""
    space = open_space(url)
    topology = Topology(tp=int(tp))
    say("ready")
    hear()
    for number in range(12):
        chunks = space.keys(prompt(number)).chunks()
        for shard in topology.shards(SPEC):
            for status in space.write(chunks, shard, [local_tiles(SPEC, c, shard) for c in chunks]):
                assert status in (Status.OK, Status.EXISTS, Status.BUSY, Status.NO_PARENT), status
    say("done")
    hear()


def reserve_then_stop(url: str) -> None:
    """Reserve a chunk, stop, and when woken write it as if nothing had happened."""
    from headwater.kv.format import checksum
    from headwater.kv.topology import whole_shard

    space, shard = open_space(url), whole_shard(SPEC)
    chunk = space.keys(prompt(1)).chunks()[0]
    (reservation,) = space.reserve([chunk], shard)
    tiles = reservation.tiles
    assert tiles is not None
    say("reserved")
    os.kill(os.getpid(), signal.SIGSTOP)
    tiles[:] = 0xEE
    sums = [checksum(tiles[i, j]) for i in range(tiles.shape[0]) for j in range(tiles.shape[1])]
    (status,) = space.commit([Filled(reservation, shard.layers, shard.heads, 0, sums)])
    reservation.close()
    say(status.name)
    hear()


def reserve_alone_then_wait(url: str, group: str) -> None:
    """Reserve a prompt's chunks as a fetch does, and hang."""

    space = open_space(url, int(group))
    chunks = space.keys(prompt(1)).chunks()
    tickets = space._store.reserve(space.root(), chunks, [Form()] * len(chunks), exclusive=True)  # type: ignore[attr-defined]
    say(" ".join(ticket.status.name for ticket in tickets))
    hear()


def stop_inside_transaction(url: str) -> None:
    """Take the write lock and stop while holding it."""
    space = open_space(url)
    core = space._store._core  # type: ignore[attr-defined]
    say("ready")
    core.transact(lambda: os.kill(os.getpid(), signal.SIGSTOP), time.monotonic() + 5)
    say("woken")
    hear()


def lease_then_wait(url: str, number: str) -> None:
    """Hold a lease; on command read under it."""
    space = open_space(url)
    match = space.match(space.keys(prompt(int(number))))
    assert space.lease(match, "r").held
    say(f"leased {match.num_tokens}")
    while hear() == "read":
        from headwater.kv.topology import whole_shard

        shard = whole_shard(SPEC)
        buffers = [empty_tiles(SPEC, chunk, shard) for chunk in match.chunks]
        assert space.read(match.chunks, shard, buffers) == [Status.OK] * len(buffers)
        for chunk, buffer in zip(match.chunks, buffers, strict=True):
            assert np.array_equal(buffer, local_tiles(SPEC, chunk, shard))
        say("read")


def fork_readers(url: str, count: str) -> None:
    """Fork children one after another; each takes a lease and is killed while it holds it."""
    space = open_space(url)
    for _ in range(int(count)):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            match = space.match(space.keys(prompt(2)))
            held = space.lease(match, "r").held
            os.write(writer, b"y" if held and match.num_tokens else b"n")
            signal.pause()
        assert os.read(reader, 1) == b"y"
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reader)
        os.close(writer)
    say("done")
    hear()
