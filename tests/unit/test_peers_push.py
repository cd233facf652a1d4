"""Pushes from one pool into another, over real sockets within one process."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from headwater.errors import InvalidArgumentError, PeerRefusedError
from headwater.kv.hashing import ChunkRef
from headwater.kv.spec import KVSpec
from headwater.kv.topology import Topology, whole_shard
from headwater.peers import wire
from headwater.peers.address import PeerAddress, parse_address
from headwater.peers.caller import LinkSettings, PeerCaller
from headwater.peers.carriers.tcp import Connection
from headwater.peers.hello import Hello, PeerRole, describe_space, new_greeting, scope_of
from headwater.peers.options import server_tls
from headwater.peers.receiver import Receiver
from headwater.peers.sender import PeerSender, transfer_name
from headwater.pool.pool import Pool, open_pool
from headwater.pool.space import Space
from headwater.stores import open_store
from headwater.stores.base import Status
from peer_cases import (
    CHUNK,
    SECRET,
    check_arrived,
    nothing_pending,
    open_space,
    prompt,
    receiving,
    save,
    sending,
    transfer_id,
    two_pools,
    visible_layers,
)

from support import gqa, local_tiles, wait_until

MLA = KVSpec.mla(num_layers=6, latent_dim=24, rope_dim=8, dtype="float16")
SPECS = {"gqa": gqa(layers=6, heads=4, dim=8), "mla": MLA}


def test_a_prompt_arrives_whole() -> None:
    with two_pools() as (one, other), receiving(other) as receiver:
        here, there = open_space(one), open_space(other)
        chunks = prompt(here, 5, tail=7)
        save(here, chunks, whole_shard(here.spec))
        transfer = transfer_id()
        with sending(here) as (sender,):
            assert sender.push(transfer, str(receiver.address), chunks)
            assert sender.flush(transfer, 10.0) == 5 * 16 + 7
        check_arrived(there, chunks)
        nothing_pending(other)
        assert receiver.landing.pending_bytes == 0


@pytest.mark.parametrize("count", [2, 4])
def test_a_push_over_several_connections(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group of layers is divided among them; they are one session, and go together."""
    monkeypatch.setattr("headwater.peers.link._DIVIDED_BYTES", 1)
    with two_pools() as (one, other), receiving(other) as receiver:
        here, there = open_space(one), open_space(other)
        chunks, shard = prompt(here, 9, tail=7), whole_shard(here.spec)
        with sending(here, connections=count, eager_bytes=0) as (sender,):
            transfer = transfer_id()
            assert sender.push(transfer, str(receiver.address), chunks)
            for first in range(0, 6, 2):
                save(here, chunks, shard, range(first, first + 2))
                sender.noted(chunks, range(first, first + 2))
                _wait_for_layers(there, chunks, first + 2)
            assert sender.flush(transfer, 10.0) == 9 * CHUNK + 7
            assert (receiver.stats()["connections"], receiver.stats()["sessions"]) == (count, 1)
            assert sender.counts["extra_connection_bytes"] > sender.counts["bytes"] // 3
            check_arrived(there, chunks)
            more = prompt(here, 9, seed=1)
            save(here, more, shard, range(3))
            assert sender.push(transfer_id(), str(receiver.address), more)
            sender.noted(more, range(3))
            _wait_for_layers(there, more, 3)
        wait_until(lambda: receiver.stats()["connections"] == 0, 10.0)
        nothing_pending(other)


@pytest.mark.parametrize(
    ("kind", "topology", "reader"),
    [
        ("gqa", Topology(tp=2), Topology(tp=4)),
        ("gqa", Topology(tp=4), Topology(tp=1)),
        ("gqa", Topology(tp=8), Topology(tp=2)),
        ("gqa", Topology(pp=2), Topology(pp=1)),
        ("gqa", Topology(), Topology(pp=2, tp=2)),
        ("mla", Topology(tp=4), Topology(tp=2)),
        ("mla", Topology(tp=8), Topology()),
    ],
    ids=lambda value: value if isinstance(value, str) else f"tp{value.tp}pp{value.pp}",
)
def test_ranks_of_any_layout_fill_chunks_together(kind: str, topology: Topology, reader: Topology) -> None:
    """Also: replicated ranks (more ranks than heads, MLA) send every byte once."""
    spec = SPECS[kind]
    with two_pools() as (one, other), receiving(other) as receiver:
        here, there = open_space(one, spec), open_space(other, spec)
        chunks = prompt(here, 4, tail=3)
        with sending(here, topology) as senders:
            transfer = transfer_id()
            for rank, sender in enumerate(senders):
                assert sender.push(transfer, str(receiver.address), chunks)
                save(here, chunks, list(topology.shards(spec))[rank])
            for sender, shard in zip(senders, topology.shards(spec), strict=True):
                sender.noted(chunks, shard.layers)
            assert {sender.flush(transfer, 10.0) for sender in senders} == {4 * CHUNK + 3}
            sent = sum(sender.counts["bytes"] for sender in senders)
        for shard in reader.shards(spec):
            check_arrived(there, chunks, shard)
        assert sent == receiver.landing.counts["bytes"] == spec.extent_bytes(4 * CHUNK + 3)
        nothing_pending(other)


def _wait_for_layers(there: Space, chunks: list[ChunkRef], count: int) -> None:
    heads = range(there.spec.num_kv_heads)
    wait_until(lambda: visible_layers(there, chunks, heads) == [count] * len(chunks), 20.0, f"{count} layers are there")


def test_a_group_of_layers_can_be_read_before_the_next_is_sent() -> None:
    with two_pools() as (one, other), receiving(other) as receiver:
        here, there = open_space(one), open_space(other)
        chunks, shard = prompt(here, 3), whole_shard(here.spec)
        with sending(here) as (sender,):
            transfer = transfer_id()
            assert sender.push(transfer, str(receiver.address), chunks)
            for first in range(0, 6, 2):
                group = range(first, first + 2)
                save(here, chunks, shard, group)
                sender.noted(chunks, group)
                _wait_for_layers(there, chunks, group.stop)
                assert there.exists(chunks) == [group.stop == 6] * 3
            assert sender.flush(transfer, 10.0) == 3 * CHUNK
        check_arrived(there, chunks)


def test_layers_noted_before_the_peer_has_answered_are_sent_all_the_same() -> None:
    with two_pools() as (one, other), receiving(other) as receiver:
        here, there = open_space(one), open_space(other)
        chunks, shard = prompt(here, 2), whole_shard(here.spec)
        save(here, chunks, shard, range(2))
        with sending(here) as (sender,):
            transfer = transfer_id()
            assert sender.push(transfer, str(receiver.address), chunks)
            sender.noted(chunks, range(2))
            save(here, chunks, shard, range(2, 6))
            sender.noted(chunks, range(2, 6))
            assert sender.flush(transfer, 10.0) == 2 * CHUNK
        check_arrived(there, chunks)


@pytest.mark.parametrize("eager_bytes", [0, 1 << 20])
def test_what_the_peer_has_is_not_stored_again(eager_bytes: int) -> None:
    """Nor sent, unless it is so little that asking first would take longer."""
    with two_pools() as (one, other), receiving(other) as receiver:
        here, there = open_space(one), open_space(other)
        chunks = prompt(here, 4)
        save(here, chunks, whole_shard(here.spec))
        save(there, chunks[:3], whole_shard(here.spec))
        with sending(here, eager_bytes=eager_bytes) as (sender,):
            transfer = transfer_id()
            assert sender.push(transfer, str(receiver.address), chunks)
            assert sender.flush(transfer, 10.0) == 4 * CHUNK
            assert sender.counts["bytes"] == here.spec.extent_bytes(CHUNK) * (4 if eager_bytes else 1)
            assert sender.counts["chunks_sent"] == 1
            assert sender.counts["connected"] == 1
        check_arrived(there, chunks)
        assert receiver.landing.counts["chunks_exists"] == 3
        assert receiver.landing.counts["chunks_stored"] == 1


def test_all_that_is_pushed_is_there_already() -> None:
    with two_pools() as (one, other), receiving(other) as receiver:
        here, there = open_space(one), open_space(other)
        chunks = prompt(here, 4)
        for space in (here, there):
            save(space, chunks, whole_shard(here.spec))
        with sending(here) as (sender,):
            for _ in range(3):
                transfer = transfer_id()
                assert sender.push(transfer, str(receiver.address), chunks)
                assert sender.flush(transfer, 10.0) == 4 * CHUNK
            assert sender.counts["connected"] == 1
            assert sender.counts["failures"] == 0
        nothing_pending(other)


def test_two_servers_push_one_prompt_and_one_of_them_is_busy() -> None:
    with two_pools() as (one, other), receiving(other) as receiver:
        here, there = open_space(one), open_space(other)
        chunks, shard = prompt(here, 3), whole_shard(here.spec)
        save(here, chunks, shard, range(3))
        with sending(here, server=1) as (first,), sending(here, server=2) as (second,):
            names = transfer_id(), transfer_id()
            assert first.push(names[0], str(receiver.address), chunks)
            wait_until(lambda: receiver.landing.counts["chunks_begun"] == 3, 10.0)
            began = time.monotonic()
            assert second.push(names[1], str(receiver.address), chunks)
            assert second.flush(names[1], 10.0) == 3 * CHUNK  # somebody brings it
            assert time.monotonic() - began < 5
            assert receiver.landing.counts["chunks_busy"] == 3
            assert second.counts["bytes"] == 0
            save(here, chunks, shard, range(3, 6))
            first.noted(chunks, range(6))
            assert first.flush(names[0], 10.0) == 3 * CHUNK
        check_arrived(there, chunks)


def test_ranks_of_two_servers_never_fill_one_chunk() -> None:
    """Each has tiles that the other has not: together they would be a chunk of two prefills."""
    with two_pools() as (one, other), receiving(other) as receiver:
        here = open_space(one)
        chunks = prompt(here, 3)
        save(here, chunks, whole_shard(here.spec))
        two = Topology(tp=2)
        with sending(here, two, server=1) as (first, _), sending(here, two, server=2) as (_, second):
            names = transfer_id(), transfer_id()
            assert first.push(names[0], str(receiver.address), chunks)
            assert first.flush(names[0], 10.0) == 3 * CHUNK
            assert second.push(names[1], str(receiver.address), chunks)
            second.flush(names[1], 10.0)
            assert receiver.landing.counts["chunks_busy"] == 3
            assert second.counts["chunks_sent"] == 0
            assert receiver.landing.counts["chunks_stored"] == 0


def test_a_full_pool_refuses_and_nothing_waits() -> None:
    """Peers have a share of the pending room of their own: local saves find the rest of it free."""
    with two_pools("capacity=4MiB&segment=1MiB") as (one, other), receiving(other, share=0.1) as receiver:
        here, there = open_space(one), open_space(other)
        fits = receiver.landing.share_bytes // here.spec.extent_bytes(CHUNK)
        chunks, shard = prompt(here, fits + 3), whole_shard(here.spec)
        assert 0 < fits < len(chunks)
        save(here, chunks, shard, range(3))
        with sending(here) as (sender,):
            transfer = transfer_id()
            began = time.monotonic()
            assert sender.push(transfer, str(receiver.address), chunks)
            wait_until(lambda: sender.counts["chunks_refused"] == 3, 10.0)
            assert time.monotonic() - began < 5
            assert receiver.landing.pending_bytes <= receiver.landing.share_bytes
            mine = prompt(there, fits + 3, seed=9)
            save(there, mine, shard)
            save(here, chunks, shard, range(3, 6))
            sender.noted(chunks, range(6))
            assert sender.flush(transfer, 10.0) == fits * CHUNK
        check_arrived(there, chunks[:fits])
        check_arrived(there, mine)
        nothing_pending(other)


@pytest.mark.parametrize("how", ["closed", "cancelled", "lost", "end"])
def test_whatever_is_not_finished_is_given_back(how: str) -> None:
    with two_pools() as (one, other), receiving(other) as receiver:
        here, there = open_space(one), open_space(other)
        chunks, shard = prompt(here, 4), whole_shard(here.spec)
        save(here, chunks, shard, range(3))
        with sending(here) as (sender,):
            transfer = transfer_id()
            assert sender.push(transfer, str(receiver.address), chunks)
            sender.noted(chunks, range(3))
            wait_until(lambda: visible_layers(there, chunks, shard.heads) == [3] * 4, 20.0)
            assert other.stats().store.pending_bytes == receiver.landing.pending_bytes > 0
            if how == "closed":
                sender.close()
            elif how == "cancelled":
                sender.cancel(transfer)
            elif how == "lost":
                sender.lost(chunks[1:])
            else:
                assert sender.flush(transfer, 0.2) == 0
            left = here.spec.extent_bytes(CHUNK) if how == "lost" else 0
            wait_until(lambda: other.stats().store.pending_bytes == left, 10.0)
            wait_until(lambda: receiver.landing.pending_bytes == left, 10.0)
            if how == "lost":
                save(here, chunks, shard, range(3, 6))
                sender.noted(chunks[:1], range(3, 6))
                assert sender.flush(transfer, 10.0) == CHUNK
                check_arrived(there, chunks[:1])
        nothing_pending(other)


def test_a_rank_that_fails_ends_the_chunk_for_all_and_the_next_try_is_right() -> None:
    with two_pools() as (one, other), receiving(other) as receiver:
        here, there = open_space(one), open_space(other)
        chunks, shards = prompt(here, 3), list(Topology(tp=2).shards(here.spec))
        with sending(here, Topology(tp=2)) as senders:
            transfer = transfer_id()
            for sender, shard in zip(senders, shards, strict=True):
                assert sender.push(transfer, str(receiver.address), chunks)
                save(here, chunks, shard, range(3))
                sender.noted(chunks, range(3))
            wait_until(lambda: visible_layers(there, chunks, range(4)) == [3] * 3, 20.0)
            senders[1].cancel(transfer)
            wait_until(lambda: other.stats().store.pending_bytes == 0, 10.0)
            save(here, chunks, shards[0], range(3, 6))
            save(here, chunks, shards[1], range(3, 6))
            senders[0].noted(chunks, range(3, 6))
            assert senders[0].flush(transfer, 10.0) == 0
            again = transfer_id()
            for sender in senders:
                assert sender.push(again, str(receiver.address), chunks)
            assert {sender.flush(again, 10.0) for sender in senders} == {3 * CHUNK}
        check_arrived(there, chunks)


def test_a_chunk_that_is_taken_away_under_a_push_leaves_no_limbo() -> None:
    with two_pools() as (one, other), receiving(other) as receiver:
        here, there = open_space(one), open_space(other)
        chunks, shard = prompt(here, 3), whole_shard(here.spec)
        save(here, chunks, shard, range(3))
        with sending(here) as (sender,):
            transfer = transfer_id()
            assert sender.push(transfer, str(receiver.address), chunks)
            sender.noted(chunks, range(3))
            _wait_for_layers(there, chunks, 3)
            other.clear()
            save(here, chunks, shard, range(3, 6))
            sender.noted(chunks, range(3, 6))
            assert sender.flush(transfer, 10.0) == 0
            assert sender.counts["chunks_lost"] == 3
        wait_until(lambda: other.stats().store.used_bytes == 0, 10.0, "nothing is in limbo")
        assert receiver.landing.pending_bytes == 0


def test_a_rank_that_never_comes_is_not_waited_for() -> None:
    with two_pools() as (one, other), receiving(other, join_s=0.5) as receiver:
        here = open_space(one)
        chunks = prompt(here, 3)
        save(here, chunks, whole_shard(here.spec))
        with sending(here, Topology(tp=2)) as (sender, _):
            transfer = transfer_id()
            assert sender.push(transfer, str(receiver.address), chunks)
            assert sender.flush(transfer, 10.0) == 3 * CHUNK
            wait_until(lambda: other.stats().store.pending_bytes == 0, 10.0)
        assert receiver.landing.counts["chunks_orphaned"] == 3


# ---- dead peers -------------------------------------------------------------------------------------------------
def test_a_peer_that_is_not_there_costs_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    with open_pool("memory://?capacity=16MiB") as pool:
        here = open_space(pool)
        chunks = prompt(here, 2)
        save(here, chunks, whole_shard(here.spec))
        with sending(here, dead_s=60.0) as (sender,):
            transfer = transfer_id()
            assert sender.push(transfer, address, chunks)
            assert sender.flush(transfer, 10.0) == 0
            began = time.monotonic()
            for _ in range(1000):
                assert not sender.push(transfer_id(), address, chunks)
            assert time.monotonic() - began < 10  # 10 ms each would be a wait
            assert sender.counts["chunks_dropped"] == 2002


def test_a_peer_that_takes_nothing_is_dropped_at_its_deadline() -> None:
    """It accepts and says nothing: the engine is not held, and `flush` is back by its deadline."""
    with open_pool("memory://?capacity=16MiB") as pool, socket.create_server(("127.0.0.1", 0)) as mute:
        here = open_space(pool)
        chunks = prompt(here, 2)
        save(here, chunks, whole_shard(here.spec))
        with sending(here, io_s=0.3) as (sender,):
            transfer, began = transfer_id(), time.monotonic()
            assert sender.push(transfer, f"127.0.0.1:{mute.getsockname()[1]}", chunks)
            assert time.monotonic() - began < 2.0
            assert sender.flush(transfer, 10.0) == 0
            assert time.monotonic() - began < 5
            assert sender.counts["timeouts"] == 1


def test_a_restarted_peer_gets_the_next_push() -> None:
    with two_pools() as (one, other):
        here, there = open_space(one), open_space(other)
        with sending(here) as (sender,):
            port = 0
            for seed in range(3):
                receiver = Receiver(other, PeerAddress("127.0.0.1", port))
                receiver.start()
                port = receiver.address.port
                chunks = prompt(here, 2, seed=seed)
                save(here, chunks, whole_shard(here.spec))
                transfer = transfer_id()
                assert sender.push(transfer, str(receiver.address), chunks)
                assert sender.flush(transfer, 10.0) == 2 * CHUNK
                check_arrived(there, chunks)
                receiver.close()
            assert sender.counts["chunks_dropped"] == 0


def test_a_queue_that_is_full_drops_and_counts() -> None:
    with two_pools() as (one, other), receiving(other) as receiver:
        here = open_space(one)
        chunks = prompt(here, 2)
        with sending(here, max_queued=0) as (sender,):
            assert not sender.push(transfer_id(), str(receiver.address), chunks)
            sender.noted(chunks, range(1))
            assert (sender.counts["chunks_dropped"], sender.counts["notes_dropped"]) == (2, 1)


# ---- strangers --------------------------------------------------------------------------------------------------
def call(receiver: Receiver, space: Space, settings: LinkSettings | None = None, **changes: object) -> Connection:
    caller = PeerCaller(PeerRole.PUSH, 5, 0, scope_of(space), describe_space(space))
    return replace(caller, **changes).call(receiver.address, os.urandom(16), settings or LinkSettings())[0]  # type: ignore[arg-type]


def test_callers_of_another_model_or_secret_are_refused_at_their_first_frame() -> None:
    """Other weights, dtype, chunk size, tenant secret, peer secret; each closed, counted, and nothing allocated."""
    store = open_store("memory://?capacity=16MiB")
    with two_pools() as (one, other), Pool(store, tenant_secret=b"t" * 32) as salted:
        scope = scope_of(open_space(other))
        index_bytes = other.stats().store.index_used_bytes
        with receiving(other, secret=SECRET, scopes=(scope,)) as receiver:
            call(receiver, open_space(one), LinkSettings(secret=SECRET)).close()
            others = {
                "weights": open_space(one, tag=1),
                "dtype": open_space(one, gqa(layers=6, heads=4, dim=8, dtype="float32")),
                "chunk": open_space(one, chunk_tokens=32),
                "tenants": open_space(salted),
            }
            for space in others.values():
                with pytest.raises(PeerRefusedError) as refused:
                    call(receiver, space, LinkSettings(secret=SECRET))
                assert refused.value.code == wire.Refusal.SPACE
            for secret in (None, SECRET[:-1] + b"?"):
                with pytest.raises(PeerRefusedError) as refused:
                    call(receiver, open_space(one), LinkSettings(secret=secret))
                assert refused.value.code == wire.Refusal.SECRET
            wait_until(lambda: receiver.counts["refused_space"] == 4, 10.0)
            wait_until(lambda: receiver.counts["refused_secret"] == 2, 10.0)
            wait_until(lambda: receiver.stats()["connections"] == 0, 10.0)
            assert receiver.stats()["sessions"] == 0
        with receiving(other) as receiver:
            with pytest.raises(PeerRefusedError) as refused:
                call(receiver, open_space(salted))
            assert refused.value.code == wire.Refusal.TENANTS
        assert other.stats().store.index_used_bytes == index_bytes


def test_no_secret_no_other_hosts() -> None:
    with open_pool("memory://?capacity=16MiB") as pool:
        with pytest.raises(InvalidArgumentError, match="secret"):
            Receiver(pool, PeerAddress("0.0.0.0", 0))
        with pytest.raises(PeerRefusedError, match="secret"):
            PeerCaller(PeerRole.PUSH, 1, 0).call(parse_address("192.0.2.1:7700"), bytes(16), LinkSettings())


def frames(space: Space) -> dict[str, bytes]:
    """Frames that a caller who was welcomed must not send."""
    chunks, shard = tuple(prompt(space, 2)), whole_shard(space.spec)
    put = wire.Put(1, bytes(16), chunks, shard, space.describe(chunks[0].root))
    sums = local_tiles(space.spec, chunks[0], shard).reshape(-1)[:24].astype("<u8")
    size = space.spec.extent_bytes(CHUNK)
    good = wire.encode_frame(wire.Type.PUT, put.encode(), number=1)
    data = wire.Data(1, range(6), [0], sums)
    flipped = bytearray(good)
    flipped[90] ^= 1
    heads = replace(put, shard=replace(shard, heads=range(5)))
    return {
        "noise": os.urandom(200),
        "a flipped bit": bytes(flipped),
        "heads out of bounds": wire.encode_frame(wire.Type.PUT, heads.encode()),
        "another encoding": wire.encode_frame(wire.Type.PUT, replace(put, encodings=(3,) * len(put.chunks)).encode()),
        "a put twice": good + good,
        "data without a put": wire.encode_frame(wire.Type.DATA, data.encode(), data_bytes=size),
        "too few bytes": good + wire.encode_frame(wire.Type.DATA, data.encode(), data_bytes=size - 1),
        "too many bytes": good + wire.encode_frame(wire.Type.DATA, data.encode(), data_bytes=size + 1),
        "too few sums": good
        + wire.encode_frame(wire.Type.DATA, replace(data, sums=sums[:-1]).encode(), data_bytes=size),
        "a chunk beyond": good + wire.encode_frame(wire.Type.DATA, replace(data, chunks=[7]).encode(), data_bytes=size),
        "a layer beyond": good
        + wire.encode_frame(wire.Type.DATA, replace(data, layers=range(7)).encode(), data_bytes=size),
        "a frame of another role": wire.encode_frame(wire.Type.RUN),
        "a frame of the listener": wire.encode_frame(wire.Type.WELCOME),
        "a length out of bounds": wire.HEADER.pack(wire.MAGIC, wire.Type.PUT, 0, 1 << 31, 0, 0, 0, 0),
        "a type that is none": wire.HEADER.pack(wire.MAGIC, 200, 0, 0, 0, 0, 0, 0),
    }


def _hear_to_the_end(connection: Connection) -> None:
    while True:
        connection.receive(time.monotonic() + 10)


def test_frames_out_of_bounds_close_the_connection_and_leave_nothing() -> None:
    with two_pools() as (one, other), receiving(other) as receiver:
        here = open_space(one)
        before = other.stats().store.used_bytes
        for count, (name, frame) in enumerate(frames(here).items(), 1):
            connection = call(receiver, here)
            connection.send(frame, time.monotonic() + 5)
            with pytest.raises(PeerRefusedError, match="refused"):
                _hear_to_the_end(connection)
            connection.close()
            assert receiver.counts["refused_not_ours"] == count, name
        nothing_pending(other)
        wait_until(lambda: receiver.stats()["connections"] == 0, 10.0)
        assert other.stats().store.used_bytes == before
        assert receiver.counts["failed"] == 0


def test_noise_cut_frames_and_silence_before_the_hello(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.peers.receiver.HELLO_S", 0.5)
    with two_pools() as (one, other), receiving(other, secret=SECRET) as receiver:
        here = open_space(one)
        hello = Hello(PeerRole.PUSH, bytes(16), 5, scope=scope_of(here), space=describe_space(here), nonce=bytes(32))
        good = wire.encode_frame(wire.Type.HELLO, hello.encode(new_greeting(SECRET).encode(), SECRET))
        for noise in (b"", os.urandom(500), b"GET / HTTP/1.1\r\n\r\n" * 3, good[:20], good[:-1], good):
            with socket.create_connection(receiver.address, 5) as sock:
                sock.sendall(noise)
                sock.settimeout(10)
                with contextlib.suppress(ConnectionError):
                    while sock.recv(4096):
                        pass
        wait_until(lambda: receiver.stats()["connections"] == 0, 10.0)
        assert receiver.counts["welcomed"] == 0
        assert receiver.counts["failed"] == 0
        assert receiver.stats()["sessions"] == 0


def test_a_flipped_bit_in_a_tile_is_never_used() -> None:
    """The receiver hashes nothing: the checksum that came with the tile meets it where it is read."""
    with two_pools() as (one, other), receiving(other) as receiver, socket.create_server(("127.0.0.1", 0)) as server:
        here, there = open_space(one), open_space(other)
        chunks = prompt(here, 2)
        save(here, chunks, whole_shard(here.spec))
        relay = threading.Thread(target=_flip_one_bit, args=(server, receiver.address, 3000), daemon=True)
        relay.start()
        with sending(here) as (sender,):
            transfer = transfer_id()
            assert sender.push(transfer, f"127.0.0.1:{server.getsockname()[1]}", chunks)
            assert sender.flush(transfer, 10.0) == 2 * CHUNK
        out = [there.empty(chunk, whole_shard(there.spec)) for chunk in chunks]
        statuses = there.read(chunks, whole_shard(there.spec), out, deadline_s=10.0)
        assert sorted(statuses) in ([Status.OK, Status.DAMAGED], [Status.MISS, Status.DAMAGED])
        assert other.stats().store.damaged == 1
        relay.join(10)


def _flip_one_bit(server: socket.socket, to: PeerAddress, at: int) -> None:
    """Pass bytes on in both directions; one bit of what comes from the caller, in the first large run, is flipped."""
    caller, _ = server.accept()
    listener = socket.create_connection(to)

    def back() -> None:
        with contextlib.suppress(OSError):
            while got := listener.recv(1 << 16):
                caller.sendall(got)

    answers = threading.Thread(target=back, daemon=True)
    answers.start()
    seen = 0
    with contextlib.suppress(OSError):
        while got := caller.recv(1 << 16):
            passed = bytearray(got)
            # Hello and put are shorter than this; checksums lie at the beginning of the data frame.
            if seen <= at + 2000 < seen + len(passed):
                passed[at + 2000 - seen] ^= 4
            seen += len(passed)
            listener.sendall(passed)
    for sock in (caller, listener):
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
    answers.join(5)
    caller.close()
    listener.close()


def test_a_silent_caller_that_has_begun_something_is_given_up() -> None:
    with two_pools() as (one, other), receiving(other, silence_s=0.5) as receiver:
        here = open_space(one)
        chunks = tuple(prompt(here, 2))
        idle, connection = call(receiver, here), call(receiver, here, rank=1)
        put = wire.Put(1, bytes(16), chunks, whole_shard(here.spec), here.describe(chunks[0].root))
        connection.send(wire.encode_frame(wire.Type.PUT, put.encode(), number=1), time.monotonic() + 5)
        assert connection.receive(time.monotonic() + 5)[1] == bytes([Status.OK, Status.OK])
        assert other.stats().store.pending_bytes > 0
        nothing_pending(other)
        wait_until(lambda: receiver.counts["refused_silence"] == 1, 10.0)
        idle.send(wire.encode_frame(wire.Type.PING), time.monotonic() + 5)  # nothing begun: it may be silent
        assert idle.receive(time.monotonic() + 5)[0].type == wire.Type.ANSWER
        idle.close()
        connection.close()


def test_bad_arguments_are_said() -> None:
    with open_pool("memory://?capacity=16MiB") as pool:
        here = open_space(pool, gqa(layers=6, heads=1, dim=8))
        with pytest.raises(InvalidArgumentError, match="context parallelism"):
            PeerSender(here, Topology(tp=2, dcp=2).shard(here.spec))
        with sending(here) as (sender,):
            strange = [chunk._replace(root=b"r" * 32) for chunk in prompt(here, 2)]
            with pytest.raises(InvalidArgumentError, match=r"Space\.root"):
                sender.push(transfer_id(), "127.0.0.1:1", strange)
        for bad in ("", "xyz", "00" * 17):
            with pytest.raises(InvalidArgumentError, match="id of a transfer"):
                transfer_name(bad)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make certificates with")
def test_a_push_over_tls_and_none_without(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    made += ["-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", "/CN=localhost"]
    made += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run(made, check=True, capture_output=True)
    context = ssl.create_default_context(cafile=str(cert))
    with two_pools() as (one, other), receiving(other, tls=server_tls(str(cert), str(key), None)) as receiver:
        here, there = open_space(one), open_space(other)
        chunks = prompt(here, 5, tail=7)
        save(here, chunks, whole_shard(here.spec))
        transfer = transfer_id()
        with sending(here, tls=context) as (sender,), sending(here, server=78, io_s=0.5) as (plain,):
            assert plain.push(transfer, str(receiver.address), chunks)
            assert plain.flush(transfer, 10.0) == 0
            assert sender.push(transfer, str(receiver.address), chunks)
            assert sender.flush(transfer, 10.0) == 5 * CHUNK + 7
        check_arrived(there, chunks)
        nothing_pending(other)
        assert receiver.counts["welcomed"] == 1
