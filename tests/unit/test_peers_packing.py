"""Packed tiles between hosts: they travel as they are stored, a peer that does not know them is spoken to in raw, and
whoever lies about encodings is shut out before anything is reserved."""

from __future__ import annotations

import contextlib
import random
import secrets
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

import peer_cases as pc
from headwater.errors import PeerError, WireError
from headwater.kv.encoding import PACKED, RAW, stored_extent_bytes, stored_tile_bytes
from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import Shard, Split, Topology, whole_shard
from headwater.peers import pull_wire, receiver, wire
from headwater.peers import pulling as pulling_module
from headwater.peers.caller import LinkSettings, PeerCaller
from headwater.peers.carriers import nixl
from headwater.peers.hello import PeerRole, describe_space, scope_of
from headwater.peers.reader import PeerStore, open_source
from headwater.peers.sender import PeerSender
from headwater.pool import Pool, Space, open_pool
from headwater.stores.base import Form, Piece, Status
from headwater.stores.encode import pack_tiles
from headwater.stores.url import parse_url
from peer_cases import CHUNK, check_arrived, nothing_pending, prompt, receiving, sending, transfer_id

from support import empty_tiles, gqa, local_tiles, tile, wait_until

SPEC = gqa(layers=6, heads=4, dim=32, dtype="bfloat16")
WHOLE = whole_shard(SPEC)


def open_space(pool: Pool) -> Space:
    return pc.open_space(pool, SPEC)


@contextlib.contextmanager
def two_hosts(packing: str = "on") -> Iterator[tuple[Pool, Pool]]:
    """A host that packs, or not, and one that does not pack by itself."""
    with (
        open_pool(f"memory://?capacity=16MiB&deadline=30&packing={packing}") as one,
        open_pool("memory://?capacity=16MiB&deadline=30&packing=off") as other,
    ):
        yield one, other


def encodings_of(pool: Pool, chunks: Sequence[ChunkRef]) -> list[int | None]:
    """How each chunk is stored in the first tier of a pool."""
    store: Any = pool.first_tier
    return [None if form is None else form.encoding for form in store.forms(chunks)]


def save_as(space: Space, chunks: Sequence[ChunkRef], encoding: int, shard: Shard = WHOLE) -> None:
    """Write chunks raw, or packed, whatever the pool wants."""
    tiles = [local_tiles(SPEC, chunk, shard) for chunk in chunks]
    if encoding == RAW:
        statuses = space.write(chunks, shard, tiles, encodings=[RAW] * len(chunks))
    else:
        assert space.encoding(CHUNK, shard) == PACKED
        statuses = space.write(chunks, shard, tiles)
    assert all(status.stored for status in statuses)


def save_noise(space: Space, chunks: Sequence[ChunkRef]) -> list[np.ndarray]:
    """Write what does not pack."""
    rng = np.random.default_rng(3)
    tiles = [rng.integers(0, 256, WHOLE.local_shape(SPEC, 0, chunk.num_tokens), np.uint8) for chunk in chunks]
    assert space.write(chunks, WHOLE, tiles) == [Status.OK] * len(chunks)
    return tiles


# ---- push -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("connections", [1, 2])
@pytest.mark.parametrize("tail", [0, 5])
def test_packed_chunks_are_pushed_as_they_are_stored(connections: int, tail: int) -> None:
    with two_hosts() as (one, other), receiving(other) as peer:
        here, there = open_space(one), open_space(other)
        chunks = prompt(here, 5, tail=tail)
        pc.save(here, chunks, WHOLE)
        assert encodings_of(one, chunks) == [PACKED] * len(chunks)
        with sending(here, connections=connections) as (sender,):
            name = transfer_id()
            assert sender.push(name, str(peer.address), chunks)
            assert sender.flush(name, 10.0) == 5 * CHUNK + tail
            stored = sum(stored_extent_bytes(SPEC, chunk.num_tokens, PACKED) for chunk in chunks)
            assert sender.counts["bytes"] == peer.landing.counts["bytes"] == stored
            assert sender.counts["chunks_moved"] == 0
        assert encodings_of(other, chunks) == [PACKED] * len(chunks)
        check_arrived(there, chunks)
        nothing_pending(other)
        assert other.verify().clean


@pytest.mark.parametrize(
    "carrier",
    ["tcp", pytest.param("nixl", marks=pytest.mark.skipif(nixl.why_not() is not None, reason=str(nixl.why_not())))],
)
def test_a_chain_of_both_kinds_is_pushed_in_one_put(carrier: str) -> None:
    with two_hosts() as (one, other), receiving(other, carrier=carrier) as peer:
        here, there = open_space(one), open_space(other)
        chunks = prompt(here, 6)
        wanted = [PACKED, RAW, RAW, PACKED, RAW, PACKED]
        for chunk, encoding in zip(chunks, wanted, strict=True):
            save_as(here, [chunk], encoding)
        with sending(here, carrier=carrier) as (sender,):
            name = transfer_id()
            sender.push(name, str(peer.address), chunks)
            assert sender.flush(name, 30.0) == 6 * CHUNK
            assert sender.counts["chunks_moved"] == 0
            stored = sum(stored_extent_bytes(SPEC, CHUNK, encoding) for encoding in wanted)
            assert sender.counts["bytes"] == stored
            assert sender.counts["written_bytes"] == (stored if carrier == "nixl" else 0)
        assert encodings_of(other, chunks) == wanted
        check_arrived(there, chunks)


@pytest.mark.parametrize("topology", [Topology(), Topology(tp=2), Topology(tp=8)], ids=["one", "two", "replicas"])
def test_layers_of_packed_chunks_are_pushed_as_they_are_noted(topology: Topology) -> None:
    """Announced before anything is saved, in the form that the pool wants; each group of layers is sent by itself."""
    with two_hosts() as (one, other), receiving(other) as peer:
        here, there = open_space(one), open_space(other)
        chunks, shards = prompt(here, 3), list(topology.shards(SPEC))
        with sending(here, topology) as senders:
            name = transfer_id()
            for sender in senders:
                sender.push(name, str(peer.address), chunks)
            wait_until(lambda: all(found.is_announced for found in there.arrived(chunks, WHOLE)), 10.0, "announced")
            for layers in (range(2), range(2, 4), range(4, 6)):
                for sender, shard in zip(senders, shards, strict=True):
                    pc.save(here, chunks, shard, layers)
                    sender.noted(chunks, layers)
                wait_until(
                    lambda layers=layers: [a.num_layers for a in there.arrived(chunks, WHOLE)] == [layers.stop] * 3,
                    10.0,
                    "the layers can be lent",
                )
            for sender in senders:
                assert sender.flush(name, 10.0) == 3 * CHUNK
                assert sender.counts["chunks_moved"] == 0
        assert encodings_of(other, chunks) == [PACKED] * 3
        check_arrived(there, chunks)
        nothing_pending(other)


@pytest.mark.parametrize("topology", [Topology(), Topology(tp=2)], ids=["one", "two"])
def test_chunks_that_turn_out_otherwise_are_announced_once_more(topology: Topology) -> None:
    """The pool wants them raw, the saver packs them all the same: a GPU does, and the sender was told of none."""
    with two_hosts("auto") as (one, other), receiving(other) as peer:
        here, there = open_space(one), open_space(other)
        assert here.encoding(CHUNK, WHOLE) == RAW
        chunks = prompt(here, 5)
        with sending(here, topology) as senders:
            name = transfer_id()
            for sender in senders:
                sender.push(name, str(peer.address), chunks)
            wait_until(lambda: all(found.is_announced for found in there.arrived(chunks, WHOLE)), 10.0, "announced")
            assert {found.encoding for found in there.arrived(chunks, WHOLE)} == {RAW}
            with open_pool("memory://?capacity=16MiB&deadline=30&packing=on") as packs:
                packed = _packed_tiles(open_space(packs), chunks)
            for sender, shard in zip(senders, topology.shards(SPEC), strict=True):
                mine = [tiles[:, shard.heads.start : shard.heads.stop] for tiles in packed]
                forms = [RAW if i == 1 else PACKED for i in range(len(chunks))]
                mine[1] = local_tiles(SPEC, chunks[1], shard)
                assert here.write(chunks, shard, mine, encodings=forms) == [Status.OK] * len(chunks)
                sender.noted(chunks, range(6))
            for sender in senders:
                assert sender.flush(name, 10.0) == 5 * CHUNK
                assert sender.counts["chunks_moved"] > 0
        assert encodings_of(other, chunks) == [PACKED, RAW, PACKED, PACKED, PACKED]
        check_arrived(there, chunks)
        nothing_pending(other)
        assert peer.landing.pending_bytes == 0


def _packed_tiles(space: Space, chunks: Sequence[ChunkRef]) -> list[np.ndarray]:
    """Stored tiles of packed chunks."""
    save_as(space, chunks, PACKED)
    loan = space.lend(chunks, WHOLE)
    found = []
    for chunk, place in zip(chunks, loan.places, strict=True):
        assert place is not None
        size = stored_extent_bytes(SPEC, chunk.num_tokens, PACKED)
        found.append(place.segment[place.offset : place.offset + size].copy().reshape(6, 4, -1))
    loan.release()
    return found


def test_noise_where_packed_tiles_were_announced_is_sent_raw() -> None:
    with two_hosts() as (one, other), receiving(other) as peer:
        here, there = open_space(one), open_space(other)
        chunks = prompt(here, 4)
        with sending(here) as (sender,):
            name = transfer_id()
            sender.push(name, str(peer.address), chunks)
            wait_until(lambda: all(found.is_announced for found in there.arrived(chunks, WHOLE)), 10.0, "announced")
            assert {found.encoding for found in there.arrived(chunks, WHOLE)} == {PACKED}
            pc.save(here, chunks[:2], WHOLE)
            noise = save_noise(here, chunks[2:])
            sender.noted(chunks, range(6))
            assert sender.flush(name, 10.0) == 4 * CHUNK
        assert encodings_of(other, chunks) == [PACKED, PACKED, RAW, RAW]
        check_arrived(there, chunks[:2])
        out = [there.empty(chunk, WHOLE) for chunk in chunks[2:]]
        assert there.read(chunks[2:], WHOLE, out) == [Status.OK] * 2
        assert all(np.array_equal(found, wanted) for found, wanted in zip(out, noise, strict=True))


def test_a_rank_that_announces_what_its_server_fills_in_another_form_asks_again() -> None:
    """The first rank announced raw chunks, its pool packs them; the second one sees that sooner."""
    with two_hosts() as (one, other), receiving(other) as peer:
        here, there = open_space(one), open_space(other)
        chunks, topology = prompt(here, 3), Topology(tp=2)
        pc.save(here, chunks, WHOLE)
        put = wire.Put(1, bytes(16), tuple(chunks), topology.shard(SPEC, tp_rank=0), there.describe(chunks[0].root))
        with Pusher(peer, there, server=77) as first, sending(here, topology) as senders:
            assert first.ask(wire.Type.PUT, put.encode()) == bytes(3)
            name = transfer_id()
            senders[1].push(name, str(peer.address), chunks)
            wait_until(lambda: senders[1].counts["chunks_moved"] >= 6, 10.0, "it asks more than once")
            first.ask(wire.Type.ABORT, wire.Stop(1, range(3)).encode())
            senders[0].push(name, str(peer.address), chunks)
            for sender in senders:
                assert sender.flush(name, 10.0) == 3 * CHUNK
        assert encodings_of(other, chunks) == [PACKED] * 3
        check_arrived(there, chunks)


def test_a_chunk_that_stays_in_another_form_is_dropped_in_the_end() -> None:
    with two_hosts() as (one, other), receiving(other, silence_s=60.0) as peer:
        here, there = open_space(one), open_space(other)
        chunks = prompt(here, 3)
        pc.save(here, chunks, WHOLE)
        put = wire.Put(1, bytes(16), tuple(chunks[:1]), WHOLE, there.describe(chunks[0].root))
        with Pusher(peer, there, server=77) as first, sending(here) as (sender,):
            assert first.ask(wire.Type.PUT, put.encode()) == bytes(1)
            name = transfer_id()
            sender.push(name, str(peer.address), chunks)
            wait_until(lambda: sender.push_on(name), 20.0, "nothing more happens to it")
            assert (sender.counts["chunks_moved"], sender.counts["chunks_dropped"]) == (3 * 17, 3)
            assert sender.flush(name, 1.0) == 0
        assert there.match(there.keys([0, *range(1, 3 * CHUNK)])).num_tokens == 0


@pytest.mark.parametrize("bits", [0, 1], ids=["never heard of encodings", "knows raw only"])
def test_a_peer_that_does_not_know_packed_tiles_is_spoken_to_in_raw(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver, "encoding_bits", lambda encodings: bits)
    puts: list[wire.Put] = []
    decode = wire.Put.decode

    def note(meta: bytes, chunk_tokens: int) -> wire.Put:
        puts.append(decode(meta, chunk_tokens))
        return puts[-1]

    monkeypatch.setattr(wire.Put, "decode", note)
    with two_hosts() as (one, other), receiving(other) as peer:
        here, there = open_space(one), open_space(other)
        stored, new = prompt(here, 4), prompt(here, 2, seed=1)
        save_as(here, stored[:2], RAW)
        save_as(here, stored[2:], PACKED)
        with sending(here) as (sender,):
            name = transfer_id()
            sender.push(name, str(peer.address), stored)
            assert sender.flush(name, 10.0) == 2 * CHUNK
            assert sender.counts["chunks_unreadable"] == 2
            name = transfer_id()
            sender.push(name, str(peer.address), new)
            wait_until(lambda: all(found.is_announced for found in there.arrived(new, WHOLE)), 10.0, "announced")
            save_as(here, new, PACKED)
            sender.noted(new, range(6))
            assert sender.flush(name, 10.0) == 0
        assert all(put.encodings == () for put in puts)
        assert encodings_of(other, [*stored, *new]) == [RAW, RAW, None, None, None, None]
        check_arrived(there, stored[:2])
        nothing_pending(other)


def test_what_packs_nothing_is_announced_raw() -> None:
    """A tail of one token is not shorter packed; float16 is not packed at all."""
    with two_hosts() as (one, other), receiving(other) as peer:
        here, there = open_space(one), open_space(other)
        chunks = prompt(here, 2, tail=1)
        pc.save(here, chunks, WHOLE)
        with sending(here) as (sender,):
            name = transfer_id()
            sender.push(name, str(peer.address), chunks)
            assert sender.flush(name, 10.0) == 2 * CHUNK + 1
        assert encodings_of(other, chunks) == [PACKED, PACKED, RAW]
        check_arrived(there, chunks)


class Pusher:
    """A caller that says what it wants to, over one connection."""

    def __init__(self, peer: receiver.Receiver, space: Space, server: int = 9) -> None:
        caller = PeerCaller(PeerRole.PUSH, server, 5, scope_of(space), describe_space(space))
        self.connection, self.welcome = caller.call(peer.address, secrets.token_bytes(16), LinkSettings())
        self._number = 0

    def __enter__(self) -> Pusher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.connection.close()

    def ask(self, kind: wire.Type, meta: bytes, data: bytes = b"") -> bytes:
        """A request and its answer. Raises PeerError where the connection is closed."""
        self._number += 1
        frame = wire.encode_frame(kind, meta, data_bytes=len(data), number=self._number)
        end = time.monotonic() + 10
        self.connection.send(frame, end, [memoryview(data)] if data else ())
        header, body = self.connection.receive(end)
        assert (header.type, header.number) == (wire.Type.ANSWER, self._number)
        return body


def test_lies_about_encodings_end_the_connection_and_reserve_nothing() -> None:
    float16 = pc.SPEC
    with two_hosts() as (_, other), receiving(other) as peer:
        there, plain = open_space(other), pc.open_space(other, float16)
        packing, tail = prompt(there, 2), prompt(there, 1, seed=2, tail=1)
        cases = [
            (there, packing, (2, 2)),
            (there, packing, (PACKED, 200)),
            (there, packing, (255, RAW)),
            (there, tail, (PACKED, PACKED)),
            (plain, prompt(plain, 2), (PACKED, RAW)),
        ]
        for number, (space, chunks, encodings) in enumerate(cases):
            shard, root = whole_shard(space.spec), space.describe(chunks[0].root)
            put = wire.Put(1, bytes(16), tuple(chunks), shard, root, encodings)
            with Pusher(peer, space) as pusher:
                assert pusher.welcome.encodings == 1 << RAW | 1 << PACKED
                with pytest.raises(PeerError):
                    pusher.ask(wire.Type.PUT, put.encode())
            wait_until(lambda number=number: peer.counts["refused_not_ours"] == number + 1, 10.0, "it is refused")
            assert peer.landing.pending_bytes == 0
            assert not any(found.is_announced for found in space.arrived(chunks, shard))
        assert other.stats().store.pending_bytes == 0


def test_data_of_another_length_than_its_encoding_has_ends_the_connection() -> None:
    with two_hosts() as (_, other), receiving(other) as peer:
        there = open_space(other)
        chunks = prompt(there, 2)
        root = there.describe(chunks[0].root)
        for encodings in ((PACKED, PACKED), (RAW, RAW), (PACKED, RAW)):
            right = sum(stored_tile_bytes(SPEC, CHUNK, encoding) for encoding in encodings) * 4
            wrong = [right - 1, right + 1, stored_tile_bytes(SPEC, CHUNK, RAW) * 8 if PACKED in encodings else 4 * 1536]
            for size in wrong:
                with Pusher(peer, there) as pusher:
                    put = wire.Put(1, bytes(16), tuple(chunks), WHOLE, root, encodings)
                    assert pusher.ask(wire.Type.PUT, put.encode()) == bytes(2)
                    data = wire.Data(1, range(1), [0, 1], np.zeros(8, np.uint64))
                    with pytest.raises(PeerError):
                        pusher.ask(wire.Type.DATA, data.encode(), bytes(size))
                nothing_pending(other)
        assert not any(there.exists(chunks))


def test_puts_in_two_forms_from_two_servers_keep_to_themselves() -> None:
    with two_hosts() as (_, other), receiving(other) as peer:
        there = open_space(other)
        chunks = prompt(there, 2)
        mine = peer.landing.reserve(object(), 1, there, chunks, [PACKED] * 2, WHOLE)
        assert [isinstance(part, Status) for part in mine] == [False, False]
        assert peer.landing.pending_bytes == 2 * stored_extent_bytes(SPEC, CHUNK, PACKED)
        assert peer.landing.reserve(object(), 2, there, chunks, [RAW] * 2, WHOLE) == [Status.BUSY] * 2
        assert peer.landing.reserve(object(), 1, there, chunks, [RAW] * 2, WHOLE) == [Status.LOST] * 2
        peer.landing.abort_parts([part for part in mine if not isinstance(part, Status)])
        assert peer.landing.pending_bytes == 0
        nothing_pending(other)


def test_the_peers_share_is_counted_in_stored_bytes() -> None:
    with two_hosts() as (_, other), receiving(other) as peer:
        there = open_space(other)
        chunks = prompt(there, 8)
        peer.landing.share_bytes = 4 * stored_extent_bytes(SPEC, CHUNK, RAW)
        found = peer.landing.reserve(object(), 1, there, chunks, [PACKED] * 8, WHOLE)
        assert [part if isinstance(part, Status) else Status.OK for part in found] == [Status.OK] * 5 + [
            Status.FULL
        ] * 3
        peer.landing.abort_parts([part for part in found if not isinstance(part, Status)])
        nothing_pending(other)


# ---- pull -------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def pulling(pool: Pool) -> Iterator[tuple[receiver.Receiver, str]]:
    with receiving(pool) as peer:
        yield peer, f"peer://{peer.address}?lookup=20&deadline=30"


def test_packed_chunks_are_fetched_as_they_are_stored() -> None:
    with two_hosts() as (one, _), pulling(one) as (_, url), open_pool(f"memory://?capacity=16MiB,{url}") as pool:
        there, here = open_space(one), open_space(pool)
        chunks = prompt(there, 6, tail=5)
        forms = [PACKED, RAW, PACKED, PACKED, RAW, PACKED, PACKED]
        for chunk, encoding in zip(chunks, forms, strict=True):
            save_as(there, [chunk], encoding)
        check_arrived(here, chunks)
        assert all(here.exists(chunks)), "they are kept"
        assert encodings_of(pool, chunks) == forms
        tier = pool.tiers()[1]
        assert tier.fetched == 7
        assert tier.hit_bytes == sum(
            stored_extent_bytes(SPEC, chunk.num_tokens, form) for chunk, form in zip(chunks, forms, strict=True)
        )
        assert pool.verify().clean


@pytest.mark.parametrize(
    "shard",
    [WHOLE, Shard(range(2, 5), range(1, 3)), Shard(range(6), range(1, 2), Split(2, 3), 1)],
    ids=["whole", "some", "parts"],
)
def test_packed_chunks_are_read_where_they_are(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    with two_hosts() as (one, _), pulling(one) as (_, url), open_pool(f"memory://?capacity=16MiB,{url}") as pool:
        there, here = open_space(one), open_space(pool)
        chunks = prompt(there, 4)
        for i, chunk in enumerate(chunks):
            save_as(there, [chunk], PACKED if i % 2 else RAW)
        answers: list[pull_wire.ReadAnswer] = []
        decode = pull_wire.decode_read_answer

        def note(meta: bytes, read: pull_wire.Read) -> pull_wire.ReadAnswer:
            answers.append(decode(meta, read))
            return answers[-1]

        monkeypatch.setattr(pulling_module, "decode_read_answer", note)
        out = [empty_tiles(SPEC, chunk, shard) for chunk in chunks]
        assert here.read(chunks, shard, out, keep=False, deadline_s=30) == [Status.OK] * 4
        assert all(np.array_equal(o, local_tiles(SPEC, c, shard)) for o, c in zip(out, chunks, strict=True))
        assert not any(here.exists(chunks))
        assert sorted(encoding for answer in answers for encoding in answer.encodings) == [RAW, RAW, PACKED, PACKED]


@contextlib.contextmanager
def source(url: str, space: Space) -> Iterator[PeerStore]:
    store = open_source(parse_url(url))
    store.check_space(space.ref)
    try:
        yield store
    finally:
        store.close()


def test_a_caller_that_takes_raw_tiles_gets_raw_ones() -> None:
    with two_hosts() as (one, _), pulling(one) as (_, url):
        there = open_space(one)
        chunks = prompt(there, 2)
        save_as(there, chunks, PACKED)
        end = time.monotonic() + 30
        with source(url, there) as store, store._channels.use(there.ref, end) as channel:
            for takes, form in (((), RAW), ((1, 1), RAW), ((2, 2), PACKED), ((3, 3), PACKED)):
                read = pull_wire.Read(tuple(chunks), WHOLE, 10_000, takes)
                header, meta = channel.ask(wire.Type.READ, read.encode(), end)
                answer = pull_wire.decode_read_answer(meta, read)
                assert (answer.statuses, answer.encodings) == ([Status.OK] * 2, [form] * 2)
                data = bytearray(header.data_bytes)
                channel.connection.receive_into([memoryview(data)], end)
                assert len(data) == 2 * stored_extent_bytes(SPEC, CHUNK, form)
                assert form == PACKED or bytes(data[: SPEC.tile_bytes(CHUNK)]) == tile(SPEC, chunks[0], 0, 0).tobytes()


def test_a_listener_that_knows_no_encodings_is_asked_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take the flag that asks for encodings for a use, and bytes behind the keys for noise."""
    monkeypatch.setattr(receiver, "encoding_bits", lambda encodings: 0)
    seen: list[Any] = []
    for kind in (pull_wire.Read, pull_wire.Exists):
        real = kind.decode

        def note(*args: Any, real: Any = real) -> Any:
            seen.append(real(*args))
            return seen[-1]

        monkeypatch.setattr(kind, "decode", note)
    with two_hosts() as (one, _), pulling(one) as (_, url), open_pool(f"memory://?capacity=16MiB,{url}") as pool:
        there, here = open_space(one), open_space(pool)
        chunks = prompt(there, 3)
        save_as(there, chunks, PACKED)
        check_arrived(here, chunks)
        assert encodings_of(pool, chunks) == [RAW] * 3
    assert {bool(s.takes) for s in seen if isinstance(s, pull_wire.Read)} == {False}
    assert {s.tell_encodings for s in seen if isinstance(s, pull_wire.Exists)} == {False}


def test_a_chunk_in_another_form_than_its_extent_is_a_miss() -> None:
    """It was written anew between the question and the read: nothing that is not of the extent's length is taken."""
    with two_hosts() as (one, other), pulling(one) as (_, url):
        there, here = open_space(one), open_space(other)
        chunks = prompt(there, 2)
        save_as(there, chunks[:1], PACKED)
        save_as(there, chunks[1:], RAW)
        with source(url, there) as store:
            assert store.forms(chunks) == [Form(encoding=PACKED), Form(encoding=RAW)]
            extents = [np.full((6, 4, stored_tile_bytes(SPEC, CHUNK, e)), 0xA5, np.uint8) for e in (RAW, PACKED)]
            got = store.fill(here.root(), chunks, extents, time.monotonic() + 30)
            # Packed tiles are sent raw where those are wanted; raw ones are not packed for anybody.
            assert [filling.status for filling in got] == [Status.OK, Status.MISS]
            assert store.counts()["failed"] == 0, "the connection is as good as before"
            assert np.array_equal(extents[0], local_tiles(SPEC, chunks[0], WHOLE))
            assert (extents[1] == 0xA5).all()
            odd = [np.zeros((6, 4, stored_tile_bytes(SPEC, CHUNK, RAW) - 1), np.uint8)] * 2
            assert [f.status for f in store.fill(here.root(), chunks, odd, time.monotonic() + 30)] == [Status.MISS] * 2


@pytest.mark.parametrize("layer", [0, 5])
def test_a_flip_in_a_packed_tile_of_a_peer_is_found(layer: int) -> None:
    with two_hosts() as (one, _), pulling(one) as (_, url), open_pool(f"memory://?capacity=16MiB,{url}") as pool:
        there, here = open_space(one), open_space(pool)
        chunks = prompt(there, 3)
        save_as(there, chunks, PACKED)
        loan = there.lend(chunks, WHOLE)
        place = loan.places[1]
        assert place is not None
        place.segment[place.offset + (layer * 4 + 2) * stored_tile_bytes(SPEC, CHUNK, PACKED) + 40] ^= 1
        loan.release()
        out = [empty_tiles(SPEC, chunk, WHOLE) for chunk in chunks]
        assert here.read(chunks, WHOLE, out, deadline_s=30) == [Status.OK, Status.DAMAGED, Status.OK]
        assert np.array_equal(out[0], local_tiles(SPEC, chunks[0], WHOLE))
        assert not there.exists(chunks)[1], "it is removed where it was damaged"
        assert one.stats().store.damaged == 1


def test_answers_in_encodings_that_were_not_asked_for_are_refused() -> None:
    chunk = ChunkRef(bytes(32), bytes(32), 0, 0, CHUNK, bytes(32))
    read = pull_wire.Read((chunk,), Shard(range(1), range(1)), 1, (1 << RAW,))
    sums = [np.zeros(1, np.uint64)]
    assert pull_wire.decode_read_answer(pull_wire.encode_read_answer([Status.OK], sums, [RAW]), read).encodings == [RAW]
    for encoding in (PACKED, 7, 8, 255):
        with pytest.raises(WireError):
            pull_wire.decode_read_answer(pull_wire.encode_read_answer([Status.OK], sums, [encoding]), read)
    # What is not sent has no encoding that matters.
    missed = pull_wire.encode_read_answer([Status.MISS], [], [PACKED])
    assert pull_wire.decode_read_answer(missed, read).statuses == [Status.MISS]


def test_parts_of_tiles_are_raw_whatever_a_caller_takes() -> None:
    with two_hosts() as (one, _), pulling(one) as (_, url), open_pool(f"memory://?capacity=16MiB,{url}") as pool:
        there, here = open_space(one), open_space(pool)
        chunks = prompt(there, 2)
        for shard in Topology(tp=8, dcp=2, interleave=3).shards(SPEC):
            tiles = [local_tiles(SPEC, chunk, shard) for chunk in chunks]
            assert all(status.stored for status in there.write(chunks, shard, tiles))
        check_arrived(here, chunks)
        piece = Piece(chunks[0], WHOLE, empty_tiles(SPEC, chunks[0], WHOLE))
        assert here.read_pieces([piece]) == [Status.OK]


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_announcing_and_saving_ends_with_right_bytes(seed: int) -> None:
    """Two ranks, chunks that are stored in either form before or after they are announced, some of them aborted by a
    rank that cannot save its part and saved again in the other form."""
    rnd = random.Random(seed)
    topology = Topology(tp=2)
    shards = list(topology.shards(SPEC))
    with two_hosts(rnd.choice(["auto", "on"])) as (one, other), receiving(other, join_s=1.0) as peer:
        here, there = open_space(one), open_space(other)
        with sending(here, topology) as senders:
            for number in range(12):
                chunks, name = prompt(here, rnd.randint(1, 6), seed=number, tail=rnd.choice([0, 0, 5])), transfer_id()
                forms = [rnd.choice([RAW, PACKED]) for _ in chunks]
                todo = [partial(sender.push, name, str(peer.address), chunks) for sender in senders]
                todo += [
                    partial(_save_part, here, s, shard, chunks, forms) for s, shard in zip(senders, shards, strict=True)
                ]
                is_spoiled = rnd.random() < 0.3
                if is_spoiled:
                    _save_part(here, senders[0], shards[0], chunks, [RAW + PACKED - form for form in forms])
                    here.abort(chunks)
                    todo.append(partial(senders[0].lost, chunks[rnd.randrange(len(chunks)) :]))
                rnd.shuffle(todo)
                for work in todo:
                    work()
                    if rnd.random() < 0.3:
                        wait_until(lambda: not any(link._inbox for s in senders for link in s._links.values()), 10.0)
                sent = min([sender.flush(name, 20.0) for sender in senders])
                num_tokens = chunks[-1].first_token + chunks[-1].num_tokens
                match = there.match(there.keys([number, *range(1, num_tokens)]))
                assert is_spoiled or (sent, match.num_tokens) == (num_tokens, num_tokens)
                check_arrived(there, match.chunks)
                assert encodings_of(other, match.chunks) == encodings_of(one, match.chunks)
        nothing_pending(other)
        assert other.verify().clean
        assert peer.landing.pending_bytes == 0


def _save_part(
    space: Space, sender: PeerSender, shard: Shard, chunks: Sequence[ChunkRef], forms: Sequence[int]
) -> None:
    tiles = []
    for chunk, form in zip(chunks, forms, strict=True):
        raw = local_tiles(SPEC, chunk, shard)
        packed = pack_tiles(SPEC, chunk.num_tokens, raw) if form == PACKED else raw
        assert packed is not None
        tiles.append(packed)
    space.write(chunks, shard, tiles, encodings=forms)
    sender.noted(chunks, range(6))
