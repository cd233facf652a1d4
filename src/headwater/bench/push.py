"""A push into another process's pool, against the same bytes over bare sockets into that process's private memory.

Both sides are processes on this host, connected by loopback; both take turns, and a round ends when the other side has
said that everything is in its place. The bare sockets reserve nothing, note no checksums and find nothing again.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from headwater.bench import push_nixl
from headwater.bench.measure import Note, Rounds, Timed, gbps, in_threads, machine, stopwatch, take_turns
from headwater.bench.push_bare import send_all, shuffled
from headwater.bench.push_case import IDENTITY, START_S, PushCase, bench_pool, bench_process, bench_receiver
from headwater.bench.push_layers import LayersCase, bench_layers
from headwater.errors import StoreError
from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import Topology, whole_shard
from headwater.peers.caller import LinkSettings
from headwater.peers.sender import PeerSender
from headwater.pool.space import Space


@dataclass(frozen=True)
class PeersBench:
    """What is measured, and how often."""

    cases: tuple[PushCase, ...] = (
        PushCase("4k", 16, 64, 25, 5),
        PushCase("128k", 256, 128, 25, 5),
        PushCase("1m", 256, 1024, 16, 2),
        PushCase("128k_2ranks", 256, 128, 25, 5, num_ranks=2),
        PushCase("128k_2lanes", 256, 128, 25, 5, num_lanes=2),
    )
    nixl: PushCase = PushCase("nixl", 256, 128, 25, 5, carrier="nixl")  # noqa: RUF009 (frozen)
    layers: LayersCase = LayersCase()  # noqa: RUF009 (frozen)
    rounds: int = 9
    seconds: float = 240.0
    """No case begins after this time."""


QUICK = PeersBench(
    cases=(PushCase("4k", 16, 64, 25, 5), PushCase("128k", 256, 128, 2, 2)),
    nixl=PushCase("nixl", 256, 128, 2, 2, carrier="nixl"),
    layers=LayersCase(PushCase("layers", 64, 32, 16, 2), layer_s=0.002),
    rounds=2,
)


def run(bench: PeersBench, note: Note) -> dict[str, Any]:
    """The report: `push_ratio_NAME` is the push's rate over the bare sockets', each the best of its rounds."""
    report: dict[str, Any] = {"machine": machine()}
    began = time.monotonic()
    for case in bench.cases:
        if time.monotonic() - began > bench.seconds:
            note(f"no time left for {case.name}")
            report[f"push_ratio_{case.name}"] = None
            continue
        note(f"{case.num_tiles} tiles of {case.tile_bytes} bytes, {case.num_ranks} ranks")
        rounds = _measure(case, bench.rounds)
        best = {name: min(seconds) for name, seconds in rounds.seconds.items()}
        report |= {
            f"push_ratio_{case.name}": best["bare"] / best["push"],
            f"push_noise_{case.name}": rounds.noise("bare", "again"),
            f"push_gbps_{case.name}": gbps(case.num_bytes, best["push"]),
            f"bare_gbps_{case.name}": gbps(case.num_bytes, best["bare"]),
            f"push_bytes_{case.name}": case.num_bytes,
        }
    is_late = time.monotonic() - began > bench.seconds
    if (reason := push_nixl.why_not(is_late)) is not None:
        note(f"no NIXL: {reason}")
        report |= dict.fromkeys(push_nixl.FIGURES) | {"nixl_reason": reason}
    else:
        with contextlib.ExitStack() as stack:
            work, pid = _push(stack, bench.nixl)
            report |= push_nixl.bench_nixl(bench.nixl, bench.rounds, work, pid, note)
    is_late = time.monotonic() - began > bench.seconds
    return report | bench_layers(bench.layers, 0 if is_late else bench.rounds, note)


def _measure(case: PushCase, count: int) -> Rounds:
    with contextlib.ExitStack() as stack:
        runs: dict[str, Timed] = {"bare": _bare(stack, case), "push": _push(stack, case)[0]}
        return take_turns({**runs, "again": runs["bare"]}, count)


# ---- bare sockets -----------------------------------------------------------------------------------------------
def _bare(stack: contextlib.ExitStack, case: PushCase) -> Timed:
    """One connection a rank, each with its share of the tiles."""
    share = case.num_tiles // case.num_ranks
    command = [sys.executable, "-m", "headwater.bench.push_bare", str(share), str(case.tile_bytes)]
    socks: list[socket.socket] = []
    for _ in range(case.num_ranks):
        process = stack.enter_context(bench_process(command))
        assert process.stdout is not None
        sock = stack.enter_context(socket.create_connection(("127.0.0.1", int(process.stdout.readline())), START_S))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(None)
        socks.append(sock)
    pieces = shuffled(share, case.tile_bytes, 1)

    def one(sock: socket.socket) -> None:
        send_all(sock, pieces)
        if sock.recv(1) != b"!":
            raise StoreError("the bare receiver is gone")

    if case.num_ranks == 1:
        return stopwatch(lambda: one(socks[0]))
    return lambda: in_threads([partial(one, sock) for sock in socks])


# ---- the push ---------------------------------------------------------------------------------------------------
def _push(stack: contextlib.ExitStack, case: PushCase) -> tuple[Timed, int]:
    """From the first announcement until the peer has noted the last checksum, by every rank; and the receiver's
    process."""
    here, there = (stack.enter_context(bench_pool(case)) for _ in range(2))
    address, pid = stack.enter_context(bench_receiver(there.stats().store.url, "--carrier", case.carrier))
    space = here.space(IDENTITY, case.spec, chunk_tokens=case.chunk_tokens)
    chunks = _fill(space, case)
    senders = [
        PeerSender(
            space, shard, server=1, rank=rank, settings=LinkSettings(carrier=case.carrier, connections=case.num_lanes)
        )
        for rank, shard in enumerate(Topology(tp=case.num_ranks).shards(case.spec))
    ]
    for sender in senders:
        stack.callback(sender.close)

    def work() -> None:
        transfer = secrets.token_hex(8)
        for sender in senders:
            sender.push(transfer, address, chunks)
        if {sender.flush(transfer, 60.0) for sender in senders} != {case.num_chunks * case.chunk_tokens}:
            raise StoreError("a push did not arrive")

    def timed() -> float:
        there.clear()
        return stopwatch(work)()

    for _ in range(6):  # until every page of the pool is mapped, as in a server that has run for a while
        timed()
    if case.carrier == "nixl" and not all(sender.counts["written_bytes"] for sender in senders):
        raise StoreError("the receiver does not take one-sided writes")
    return timed, pid


def _fill(space: Space, case: PushCase) -> list[ChunkRef]:
    chunks = space.keys(range(case.num_chunks * case.chunk_tokens)).refs(case.num_chunks)
    shard, rng = whole_shard(case.spec), np.random.default_rng(3)
    for chunk in chunks:
        tiles = rng.integers(0, 256, space.empty(chunk, shard).shape, np.uint8)
        if not space.write([chunk], shard, [tiles], deadline_s=30.0)[0].stored:
            raise StoreError("the pool to push from could not be filled")
    return chunks
