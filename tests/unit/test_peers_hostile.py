"""Peers that have the secret and do not keep to the rules, and strangers that have not: nothing is damaged or kept."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from headwater.errors import PeerError, PeerRefusedError
from headwater.kv.format import checksum
from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import Shard, whole_shard
from headwater.peers import wire
from headwater.peers.caller import LinkSettings, PeerCaller
from headwater.peers.carriers.tcp import Connection
from headwater.peers.hello import PeerRole, describe_space, scope_of
from headwater.peers.receiver import Receiver
from headwater.pool.space import Space
from headwater.stores.base import Status
from peer_cases import CHUNK, check_arrived, nothing_pending, open_space, prompt, receiving, two_pools

from support import local_tiles, wait_until


def call(receiver: Receiver, space: Space, *, session: bytes = b"", rank: int = 0, server: int = 9) -> Connection:
    """A connection for pushes, welcomed."""
    caller = PeerCaller(PeerRole.PUSH, server, rank, scope_of(space), describe_space(space))
    return caller.call(receiver.address, session or os.urandom(16), LinkSettings())[0]


def put_frame(space: Space, chunks: Sequence[ChunkRef], shard: Shard, number: int = 1, payload: bytes = b"") -> bytes:
    """A PUT of these chunks."""
    put = wire.Put(number, bytes(16), tuple(chunks), shard, payload or space.describe(chunks[0].root))
    return wire.encode_frame(wire.Type.PUT, put.encode(), number=number)


def data_frame(space: Space, chunk: ChunkRef, shard: Shard, number: int = 1, at: int = 0) -> tuple[bytes, bytes]:
    """(frame, bytes) of some layers of a chunk of a put."""
    tiles = local_tiles(space.spec, chunk, shard)
    sums = np.array([checksum(tiles[i, j]) for i in range(tiles.shape[0]) for j in range(tiles.shape[1])], "<u8")
    meta = wire.Data(number, shard.layers, [at], sums).encode()
    return wire.encode_frame(wire.Type.DATA, meta, data_bytes=tiles.nbytes, number=2), tiles.tobytes()


def ask(connection: Connection, frame: bytes, data: bytes = b"") -> list[Status]:
    """Send a frame; the statuses of its answer."""
    connection.send(frame, time.monotonic() + 5, [memoryview(data)] if data else ())
    return [Status(code) for code in connection.receive(time.monotonic() + 10)[1]]


def is_over(receiver: Receiver) -> None:
    """Wait until nothing of any peer is left."""
    wait_until(lambda: receiver.stats()["connections"] == 0 and receiver.landing.pending_bytes == 0, 10.0)
    nothing_pending(receiver.pool)
    assert receiver.counts["failed"] == 0


def test_a_rank_that_says_another_length_for_a_chunk_writes_nothing() -> None:
    """Its tiles would lie beyond the end of the extent, in somebody else's."""
    with two_pools() as (one, other), receiving(other) as receiver:
        here = open_space(one)
        (tail,) = prompt(here, 0, tail=3)
        first, second = Shard(range(3), range(4)), Shard(range(3, 6), range(4))
        connections = [call(receiver, here, rank=rank) for rank in range(2)]
        assert ask(connections[0], put_frame(here, [tail], first)) == [Status.OK]
        longer = tail._replace(num_tokens=CHUNK)
        assert ask(connections[1], put_frame(here, [longer], second)) == [Status.BUSY]
        for connection in connections:
            connection.close()
        is_over(receiver)


def test_a_chunk_twice_in_a_put() -> None:
    with two_pools() as (one, other), receiving(other) as receiver:
        here = open_space(one)
        (chunk,) = prompt(here, 1)
        shard = whole_shard(here.spec)
        for keys in ([chunk.key] * 2, [chunk.root]):
            connection = call(receiver, here)
            refs = [chunk._replace(key=key) for key in keys]
            with pytest.raises(PeerRefusedError, match="refused"):
                ask(connection, put_frame(here, refs, shard))
            connection.close()
        is_over(receiver)


def test_tiles_that_come_over_two_connections_at_once() -> None:
    """The second would be written over the first, which may be in use by then."""
    with two_pools() as (one, other), receiving(other) as receiver:
        here, there = open_space(one), open_space(other)
        (chunk,) = prompt(here, 1)
        shard, session = whole_shard(here.spec), os.urandom(16)
        connections = [call(receiver, here, session=session) for _ in range(2)]
        assert ask(connections[0], put_frame(here, [chunk], shard)) == [Status.OK]
        half = Shard(range(3), shard.heads)
        frame, data = data_frame(here, chunk, half)
        connections[0].send(frame, time.monotonic() + 5, [memoryview(data)[:100]])
        wait_until(lambda: any(f.parts[0].num_users for f in receiver.landing._fillings.values()), 10.0)
        with pytest.raises(PeerError):
            ask(connections[1], frame, data)
        for connection in connections:
            connection.close()
        is_over(receiver)
        assert there.exists([chunk]) == [False]


def test_one_number_for_two_puts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with two_pools() as (one, other), receiving(other) as receiver:
        here = open_space(one)
        session, shard = os.urandom(16), whole_shard(here.spec)
        connections = [call(receiver, here, session=session) for _ in range(2)]
        both, reserve = threading.Barrier(2), receiver.landing.reserve

        def late(*arguments: Any) -> Any:
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(1.0)
            return reserve(*arguments)

        monkeypatch.setattr(receiver.landing, "reserve", late)
        for seed, connection in enumerate(connections):
            connection.send(put_frame(here, prompt(here, 2, seed=seed), shard), time.monotonic() + 5)
        wait_until(lambda: receiver.counts["refused_not_ours"] == 1, 10.0)
        for connection in connections:
            connection.close()
        is_over(receiver)


def test_a_put_that_fails_half_way_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with two_pools() as (one, other), receiving(other) as receiver:
        here = open_space(one)
        chunks, shard = prompt(here, 3), whole_shard(here.spec)
        connection = call(receiver, here)
        assert ask(connection, put_frame(here, chunks[:1], shard)) == [Status.OK]
        frame, data = data_frame(here, chunks[0], shard)
        assert ask(connection, frame, data) == [Status.OK]

        def fail(*_: Any, **__: Any) -> Any:
            raise PeerError("no lease to be had")

        monkeypatch.setattr(Space, "lease", fail)
        with pytest.raises(PeerError):
            ask(connection, put_frame(here, chunks, shard, number=2))
        connection.close()
        is_over(receiver)


@pytest.mark.parametrize("step", ["places", "noted"])
def test_a_reservation_that_cannot_be_used_is_given_back(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with two_pools() as (one, other), receiving(other) as receiver:
        here, there = open_space(one), open_space(other)
        connection = call(receiver, here)

        def fail(*_: Any, **__: Any) -> Any:
            raise PeerError("the pool does not answer")

        monkeypatch.setattr(Space, step, fail)
        with pytest.raises(PeerError):
            ask(connection, put_frame(here, prompt(here, 3), whole_shard(here.spec)))
        connection.close()
        store: Any = there._store
        wait_until(lambda: not list(store._core.members.published()), 10.0, "the extents are let go of")
        assert not receiver.landing.pending_bytes


def test_chunks_of_open_puts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of those that nobody wants."""
    monkeypatch.setattr("headwater.peers.push_session.MAX_OPEN_CHUNKS", 10)
    with two_pools() as (one, other), receiving(other) as receiver:
        here = open_space(one)
        connection = call(receiver, here)
        frames = [put_frame(here, prompt(here, 2), whole_shard(here.spec), number=number) for number in range(1, 8)]
        for frame in frames[:-1]:
            assert len(ask(connection, frame)) == 2
        with pytest.raises(PeerRefusedError) as refused:
            ask(connection, frames[-1])
        assert refused.value.code == wire.Refusal.TOO_MANY
        connection.close()
        is_over(receiver)


def test_a_session_is_joined_by_its_own_caller_alone() -> None:
    with two_pools() as (one, other), receiving(other) as receiver:
        here, another = open_space(one), open_space(one, tag=1)
        session = os.urandom(16)
        connection = call(receiver, here, session=session)
        for joining in (
            lambda: call(receiver, another, session=session),
            lambda: call(receiver, here, session=session, rank=1),
            lambda: call(receiver, here, session=session, server=10),
        ):
            with pytest.raises(PeerRefusedError):
                joining()
        assert ask(connection, wire.encode_frame(wire.Type.PING)) == []
        connection.close()
        is_over(receiver)


def test_a_stranger_cannot_have_memory_filled() -> None:
    """Only a hello is taken before the proof, and its length is bounded; nothing of any other frame is awaited."""
    with two_pools() as (_, other), receiving(other) as receiver:
        for kind in (wire.Type.ANSWER, wire.Type.DATA, wire.Type.PUT):
            with socket.create_connection(receiver.address, 5) as sock:
                size = wire.BOUNDS[kind].meta_bytes
                sock.sendall(wire.HEADER.pack(wire.MAGIC, kind, 0, size, 0, 0, 0, 0))
                start = time.monotonic()
                while sock.recv(4096):
                    pass
                assert time.monotonic() - start < 3.0
        assert receiver.counts["refused_not_ours"] == 3


@pytest.mark.parametrize("payload", [b"\xff\x00noise", b"[1, 2]", b"null", b"7", b"[" * 4000])
def test_a_root_whose_description_is_noise_can_be_listed(payload: bytes) -> None:
    with two_pools() as (one, other), receiving(other) as receiver:
        here, there = open_space(one), open_space(other)
        (chunk,) = prompt(here, 1)
        shard = whole_shard(here.spec)
        connection = call(receiver, here)
        try:
            assert ask(connection, put_frame(here, [chunk], shard, payload=payload)) == [Status.OK]
            assert ask(connection, *data_frame(here, chunk, shard)) == [Status.OK]
            check_arrived(there, [chunk])
        except PeerRefusedError:
            assert not list(other.scan())
        else:
            assert [info.key for info in other.scan()] == [chunk.key]
        connection.close()
        is_over(receiver)


SPACES: list[Callable[[dict[str, Any]], Any]] = [
    lambda d: [d],
    lambda d: None,
    lambda d: d | {"identity": "x"},
    lambda d: d | {"identity": []},
    lambda d: d | {"identity": {"weights": {"a": []}}},
    lambda d: d | {"spec": 7},
    lambda d: d | {"spec": []},
    lambda d: d | {"spec": d["spec"] | {"num_layers": "6"}},
    lambda d: d | {"spec": {k: -1 if isinstance(v, int) else v for k, v in d["spec"].items()}},
    lambda d: d | {"spec": {k: 1 << 70 if isinstance(v, int) else v for k, v in d["spec"].items()}},
    lambda d: d | {"spec": {k: [] for k in d["spec"]}},
    lambda d: d | {"chunk_tokens": "16"},
    lambda d: d | {"chunk_tokens": 16.5},
    lambda d: d | {"chunk_tokens": None},
    lambda d: d | {"chunk_tokens": 1 << 70},
    lambda d: d | {"chunk_tokens": float("inf")},
    lambda d: d | {"chunk_tokens": []},
]


@pytest.mark.parametrize("number", range(len(SPACES)))
def test_a_space_that_cannot_be_is_refused(number: int) -> None:
    with two_pools() as (one, other), receiving(other) as receiver:
        here = open_space(one)
        lying = json.dumps(SPACES[number](json.loads(describe_space(here)))).encode()
        caller = PeerCaller(PeerRole.PUSH, 9, 0, scope_of(here), lying)
        with pytest.raises(PeerRefusedError) as refused:
            caller.call(receiver.address, os.urandom(16), LinkSettings())
        assert refused.value.code in (wire.Refusal.SPACE, wire.Refusal.TENANTS)
        is_over(receiver)


def test_a_thread_that_cannot_be_had_does_not_end_the_receiver(monkeypatch: pytest.MonkeyPatch) -> None:
    with two_pools() as (one, other), receiving(other) as receiver:
        here, failed = open_space(one), threading.Event()
        start = threading.Thread.start

        def once(thread: threading.Thread) -> None:
            if thread.name == "headwater-peer" and not failed.is_set():
                failed.set()
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", once)
        with pytest.raises(PeerError):
            call(receiver, here).close()
        connection = call(receiver, here)
        assert ask(connection, wire.encode_frame(wire.Type.PING)) == []
        connection.close()
        is_over(receiver)
        assert receiver._num_unproven == 0
