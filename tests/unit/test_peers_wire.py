"""The wire between hosts: what is sent is read back, and nothing else is."""

from __future__ import annotations

import socket
import struct
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import PeerGoneError, PeerRefusedError, PeerTimeoutError, WireError
from headwater.kv.topology import Shard
from headwater.peers import hello, wire
from headwater.peers.address import is_loopback, parse_address
from headwater.peers.carriers.tcp import Connection
from headwater.pool.pool import Pool, open_pool
from headwater.pool.space import Space
from headwater.stores import open_store

from support import gqa, identity

CHUNK = 16
SECRET = b"the hosts' own secret, long"


def make_space(pool: Pool, tag: int = 0, **changes: int) -> Space:
    chunk_tokens = changes.pop("chunk_tokens", CHUNK)
    return pool.space(identity(tag), gqa(**changes), chunk_tokens=chunk_tokens)


def frame_of(raw: bytes) -> tuple[wire.Header, bytes]:
    header = wire.decode_header(raw[: wire.HEADER.size])
    meta = raw[wire.HEADER.size :]
    header.check(meta)
    return header, meta


def a_put(space: Space, num_tokens: int = 40) -> wire.Put:
    keys = space.keys(list(range(num_tokens)), tenant=b"somebody")
    chunks = [*keys.refs(num_tokens // CHUNK), keys.tail_ref(num_tokens // CHUNK, num_tokens % CHUNK)]
    shard = Shard(range(1, 3), range(2), replicas=2, replica=1)
    return wire.Put(7, bytes(range(16)), tuple(chunks), shard, space.describe(keys.root))


def test_a_put_is_read_back() -> None:
    with open_pool("memory://?capacity=8MiB") as pool:
        put = a_put(make_space(pool))
        header, meta = frame_of(wire.encode_frame(wire.Type.PUT, put.encode(), number=3))
        assert (header.type, header.number) == (wire.Type.PUT, 3)
        assert wire.Put.decode(meta, CHUNK) == put


def test_encodings_of_a_put_are_read_back() -> None:
    with open_pool("memory://?capacity=8MiB") as pool:
        plain = a_put(make_space(pool))
    put = replace(plain, encodings=(1, 0, 7))
    assert wire.Put.decode(put.encode(), CHUNK) == put
    assert wire.Put.decode(put.encode(), CHUNK).by_chunk == (1, 0, 7)
    # All raw: the very bytes that a peer of the first version reads.
    assert replace(plain, encodings=(0, 0, 0)).encode() == plain.encode()
    assert wire.Put.decode(plain.encode(), CHUNK).by_chunk == (0, 0, 0)
    assert len(put.encode()) == len(plain.encode()) + 3
    for malformed in (put.encode()[:-1], put.encode() + b"\0", plain.encode() + b"\1\0\1"):
        with pytest.raises(WireError):
            wire.Put.decode(malformed, CHUNK)
    at = next(i for i, (a, b) in enumerate(zip(put.encode(), plain.encode(), strict=False)) if a != b)
    for how in (1, 2, 254):
        with pytest.raises(WireError):
            wire.Put.decode(put.encode()[:at] + bytes([how]) + put.encode()[at + 1 :], CHUNK)


def test_a_welcome_of_the_first_version_knows_no_encodings() -> None:
    """Its byte for them was padding."""
    body = struct.pack("<HBxIQ", 1, 1, 5000, 1 << 20)
    known = hello.Welcome.decode(bytes(32) + body, b"", b"", None)
    assert (known.carrier, known.encodings) == (1, 0)
    assert hello.Welcome(5000, 1 << 20, 1, 3).encode(b"", b"", None)[32:] == body[:3] + b"\3" + body[4:]
    assert wire.encoding_bits([0, 1, 1, 7, 8, 255]) == 0b10000011


def test_data_and_stops_are_read_back() -> None:
    sums = np.arange(12, dtype=np.uint64)
    data = wire.Data.decode(wire.Data(4, range(2, 5), [0, 3, 9], sums).encode())
    assert (data.put, data.layers, list(data.chunks)) == (4, range(2, 5), [0, 3, 9])
    assert (data.sums == sums).all()
    assert wire.Stop.decode(wire.Stop(5, [1, 2]).encode()) == wire.Stop(5, [1, 2])
    with pytest.raises(WireError, match="ascend"):
        wire.Data.decode(wire.Data(4, range(2, 5), [3, 3], sums).encode())


@given(st.integers(0, 1 << 30), st.integers(1, 255))
def test_any_flipped_bit_of_a_frame_is_found(where: int, flip: int) -> None:
    raw = bytearray(wire.encode_frame(wire.Type.DATA, wire.Data(4, range(5), [1], np.zeros(5, np.uint64)).encode()))
    raw[where % len(raw)] ^= flip
    with pytest.raises(WireError):
        frame_of(bytes(raw))


@given(st.binary(max_size=300))
def test_noise_is_no_frame_and_no_message(noise: bytes) -> None:
    if len(noise) >= wire.HEADER.size:
        with pytest.raises(WireError):
            wire.decode_header(noise[: wire.HEADER.size]).check(noise[wire.HEADER.size :])
    for decode in (lambda meta: wire.Put.decode(meta, CHUNK), wire.Data.decode, wire.Stop.decode):
        try:
            decode(noise)
        except WireError:
            continue


def test_lengths_out_of_bounds_are_refused_before_anything_is_received() -> None:
    head = wire.HEADER.pack(wire.MAGIC, wire.Type.HELLO, 0, wire.HELLO_BYTES + 1, 0, 0, 0, 0)
    with pytest.raises(WireError, match="out of bounds"):
        wire.decode_header(head)
    with pytest.raises(WireError, match="out of bounds"):
        wire.decode_header(wire.HEADER.pack(wire.MAGIC, wire.Type.DATA, 0, 0, wire.MAX_DATA_BYTES + 1, 0, 0, 0))
    with pytest.raises(WireError, match="unknown frame type"):
        wire.decode_header(wire.HEADER.pack(wire.MAGIC, 99, 0, 0, 0, 0, 0, 0))


# ---- hello ------------------------------------------------------------------------------------------------------
def caller(space: Space, **changes: object) -> hello.Hello:
    made = hello.Hello(hello.PeerRole.PUSH, b"s" * 16, 5, 1, 0, b"n" * 32, hello.scope_of(space))
    return replace(made, space=hello.describe_space(space), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("secret", [None, SECRET])
def test_both_sides_prove_the_secret(secret: bytes | None) -> None:
    with open_pool("memory://?capacity=8MiB") as pool:
        space, greeting = make_space(pool), hello.new_greeting(secret).encode()
        said = caller(space)
        meta = said.encode(greeting, secret)
        heard = hello.Hello.decode(meta, greeting, secret)
        assert heard == said
        welcome = hello.Welcome(5000, 1 << 20).encode(greeting, meta, secret)
        assert hello.Welcome.decode(welcome, greeting, meta, secret) == hello.Welcome(5000, 1 << 20)
        assert secret is None or secret not in meta + welcome + greeting


@pytest.mark.parametrize(("ours", "theirs"), [(SECRET, None), (None, SECRET), (SECRET, SECRET + b"!")])
def test_another_secret_is_refused_by_both(ours: bytes | None, theirs: bytes | None) -> None:
    with open_pool("memory://?capacity=8MiB") as pool:
        greeting = hello.new_greeting(ours).encode()
        meta = caller(make_space(pool)).encode(greeting, theirs)
        with pytest.raises(PeerRefusedError) as refused:
            hello.Hello.decode(meta, greeting, ours)
        assert refused.value.code == wire.Refusal.SECRET
        welcome = hello.Welcome(1, 1).encode(greeting, meta, ours)
        with pytest.raises(PeerRefusedError):
            hello.Welcome.decode(welcome, greeting, meta, theirs)


def test_a_proof_cannot_be_replayed_or_reflected() -> None:
    with open_pool("memory://?capacity=8MiB") as pool:
        first, second = hello.new_greeting(SECRET).encode(), hello.new_greeting(SECRET).encode()
        meta = caller(make_space(pool)).encode(first, SECRET)
        with pytest.raises(PeerRefusedError):
            hello.Hello.decode(meta, second, SECRET)
        with pytest.raises(PeerRefusedError):
            hello.Welcome.decode(meta, first, b"", SECRET)


def test_another_version_is_refused_first() -> None:
    with open_pool("memory://?capacity=8MiB") as pool:
        greeting = hello.new_greeting(None).encode()
        meta = caller(make_space(pool), version=2).encode(greeting, None)
        with pytest.raises(PeerRefusedError) as refused:
            hello.Hello.decode(meta, greeting, SECRET)
        assert refused.value.code == wire.Refusal.VERSION


def test_the_space_is_checked_against_what_is_accepted() -> None:
    with open_pool("memory://?capacity=8MiB") as here, open_pool("memory://?capacity=8MiB") as there:
        mine = hello.scope_of(make_space(here))
        assert hello.open_space(here, caller(make_space(there)), [mine]).ref == make_space(here).ref
        others = [make_space(there, tag=1), make_space(there, dtype="float32"), make_space(there, chunk_tokens=32)]  # type: ignore[arg-type]
        for other in others:
            assert hello.open_space(here, caller(other)).ref == other.ref  # whoever takes all, takes this
            with pytest.raises(PeerRefusedError) as refused:
                hello.open_space(here, caller(other), [mine])
            assert refused.value.code == wire.Refusal.SPACE
        assert here.stats().store.index_used_bytes == there.stats().store.index_used_bytes


def test_another_tenant_secret_is_refused() -> None:
    store = open_store("memory://?capacity=8MiB")
    with Pool(store, tenant_secret=b"t" * 32) as salted, open_pool("memory://?capacity=8MiB") as plain:
        with pytest.raises(PeerRefusedError) as refused:
            hello.open_space(plain, caller(make_space(salted)))
        assert refused.value.code == wire.Refusal.TENANTS


@pytest.mark.parametrize("noise", [b"", b"[]", b"{}", b"null", b"\xff", b'{"identity": 3, "spec": {}}', b"[" * 5000])
def test_a_description_that_is_none_is_refused(noise: bytes) -> None:
    with open_pool("memory://?capacity=8MiB") as pool, pytest.raises(PeerRefusedError):
        hello.open_space(pool, replace(caller(make_space(pool)), space=noise))


# ---- addresses and connections ----------------------------------------------------------------------------------
def test_addresses() -> None:
    assert parse_address("node-1:7700") == ("node-1", 7700)
    assert str(parse_address("[::1]:7700")) == "[::1]:7700"
    for bad in ("", "7700", ":7700", "a:b", "::1:7700", "a:70000", "a:-1", "a:٣"):
        with pytest.raises(ValueError, match="HOST:PORT"):
            parse_address(bad)
    assert all(map(is_loopback, ["127.0.0.1", "::1", "localhost"]))
    assert not any(map(is_loopback, ["10.0.0.1", "0.0.0.0", "::"]))


def test_a_frame_and_its_pieces_travel_and_deadlines_hold() -> None:
    one, other = (Connection(end) for end in socket.socketpair())
    pieces = [memoryview(bytes([i % 251]) * (i * 7)) for i in range(600)]
    into = [memoryview(bytearray(len(piece))) for piece in pieces]
    total = sum(len(piece) for piece in pieces)
    sender = threading.Thread(
        target=one.send, args=(wire.encode_frame(wire.Type.DATA, b"x", data_bytes=total), time.monotonic() + 20, pieces)
    )
    sender.start()
    header, meta = other.receive(time.monotonic() + 20)
    other.receive_into(into, time.monotonic() + 20)
    sender.join()
    assert (header.data_bytes, meta) == (total, b"x")
    assert into == pieces
    began = time.monotonic()
    with pytest.raises(PeerTimeoutError):
        other.receive(began + 0.3)
    with pytest.raises(PeerTimeoutError):  # nobody reads
        one.send(wire.encode_frame(wire.Type.PING), began + 0.6, [memoryview(bytes(64 << 20))])
    assert time.monotonic() - began < 5
    one.close()
    drained = memoryview(bytearray(128 << 20))
    with pytest.raises(PeerGoneError):
        other.receive_into([drained], time.monotonic() + 20)
    other.close()


def test_a_refusal_is_raised_with_its_reason() -> None:
    one, other = (Connection(end) for end in socket.socketpair())
    one.send(wire.encode_refusal(wire.Refusal.SPACE, "another\x1b[31m model"), time.monotonic() + 5)
    with pytest.raises(PeerRefusedError, match=r"another\?\[31m model") as refused:
        other.receive(time.monotonic() + 5)
    assert refused.value.code == wire.Refusal.SPACE
    one.close()
    other.close()
    assert struct.calcsize("<HBBIQIIQ") == wire.HEADER.size == 32
