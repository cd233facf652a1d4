"""One round of a push into another process's pool, and one of the same bytes over bare sockets into private memory.

The bare sockets reserve nothing, note no checksums and find nothing again. Both end when the other side has said that
everything is in its place.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import sys
from functools import partial

import numpy as np

from headwater.bench.measure import Rounds, Timed, in_threads, stopwatch, take_turns
from headwater.bench.push_bare import send_all, shuffled
from headwater.bench.push_case import (
    HERE,
    IDENTITY,
    START_S,
    FarSide,
    PushCase,
    bench_pool,
    bench_process,
    bench_receiver,
)
from headwater.errors import StoreError
from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import Topology, whole_shard
from headwater.peers.caller import LinkSettings
from headwater.peers.hello import read_secret
from headwater.peers.sender import PeerSender
from headwater.pool.space import Space


def measure(case: PushCase, count: int, far: FarSide = HERE) -> Rounds:
    """Rounds of `push`, and of the bare sockets: `bare` and `again`."""
    with contextlib.ExitStack() as stack:
        runs: dict[str, Timed] = {"bare": bare_turn(stack, case, far), "push": push_turn(stack, case, far)[0]}
        return take_turns({**runs, "again": runs["bare"]}, count)


# ---- bare sockets -----------------------------------------------------------------------------------------------
def bare_turn(stack: contextlib.ExitStack, case: PushCase, far: FarSide) -> Timed:
    """One connection a rank, each with its share of the tiles."""
    share = case.num_tiles // case.num_ranks
    arguments = [str(share), str(case.tile_bytes), far.host]
    command = [*far.command, sys.executable, "-m", "headwater.bench.push_bare", *arguments]
    socks: list[socket.socket] = []
    for _ in range(case.num_ranks):
        process = stack.enter_context(bench_process(command))
        assert process.stdout is not None
        sock = stack.enter_context(socket.create_connection((far.host, int(process.stdout.readline())), START_S))
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
def push_turn(stack: contextlib.ExitStack, case: PushCase, far: FarSide = HERE) -> tuple[Timed, int]:
    """From the first announcement until the peer has noted the last checksum, by every rank; and the receiver's
    process."""
    here, there = (stack.enter_context(bench_pool(case)) for _ in range(2))
    address, pid = stack.enter_context(bench_receiver(there.stats().store.url, "--carrier", case.carrier, far=far))
    space = here.space(IDENTITY, case.spec, chunk_tokens=case.chunk_tokens)
    chunks = _fill(space, case)
    secret = None if far.secret_file is None else read_secret(far.secret_file)
    settings = LinkSettings(secret=secret, carrier=case.carrier, connections=case.num_lanes)
    senders = [
        PeerSender(space, shard, server=1, rank=rank, settings=settings)
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
