"""A `peer://` tier whose peer lies: whatever it answers, the reader has misses and no errors."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from headwater.errors import PeerError, WireError
from headwater.kv.encoding import PACKED
from headwater.kv.format import checksum
from headwater.kv.topology import Shard, whole_shard
from headwater.peers import pull_wire, wire
from headwater.peers.carriers.tcp import Connection
from headwater.peers.hello import Welcome, new_greeting
from headwater.peers.reader import open_source
from headwater.pool import open_pool
from headwater.stores.base import Piece, Run, Status
from headwater.stores.encode import pack_tiles
from headwater.stores.stats import StoreStats
from headwater.stores.url import parse_url
from peer_cases import CHUNK, check_arrived, nothing_pending, open_space, prompt, two_pools

from support import gqa, local_tiles, wait_until


def test_an_age_before_the_epoch() -> None:
    ages = pull_wire.decode_ages(np.array([0, 1, (1 << 32) - 1], "<u4").tobytes(), 3)[0]
    assert ages[0] == 0
    assert all(0 < age <= time.time_ns() for age in ages[1:])


class Liar:
    """A listener that welcomes everybody, and answers each request with what it is told to: (meta, data)."""

    def __init__(self, answer: Callable[[wire.Header, bytes], tuple[bytes, bytes]], encodings: int = 0) -> None:
        """`encodings`: that it says it knows."""
        self._answer = answer
        self._encodings = encodings
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"peer://127.0.0.1:{self._server.getsockname()[1]}?lookup=5"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._server.accept()
                threading.Thread(target=self._serve, args=(Connection(sock),), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        with contextlib.suppress(PeerError):
            end = time.monotonic() + 30
            greeting = new_greeting(None).encode()
            connection.send(wire.encode_frame(wire.Type.GREETING, greeting), end)
            _, hello = connection.receive(end)
            welcome = Welcome(5000, 1, encodings=self._encodings).encode(greeting, hello, None)
            connection.send(wire.encode_frame(wire.Type.WELCOME, welcome), end)
            while True:
                header, meta = connection.receive(end)
                body, data = self._answer(header, meta)
                frame = wire.encode_frame(wire.Type.ANSWER, body, data_bytes=len(data), number=header.number)
                connection.send(frame, end, [memoryview(data)] if data else ())
        connection.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


@pytest.fixture
def liar() -> Iterator[Callable[..., Liar]]:
    made: list[Liar] = []

    def make(answer: Callable[[wire.Header, bytes], tuple[bytes, bytes]], encodings: int = 0) -> Liar:
        made.append(Liar(answer, encodings))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("figure", [float("inf"), float("nan"), "x", None, []])
def test_figures_that_are_none(figure: object, liar: Callable[..., Liar]) -> None:
    figures = {field.name: figure for field in fields(StoreStats)}
    store = open_source(parse_url(liar(lambda *_: (json.dumps(figures).encode(), b"")).url))
    with pytest.raises(WireError):
        store.stats()
    store.close()


@pytest.mark.parametrize("status", [s for s in Status if s != Status.OK])
def test_a_status_that_is_no_answer_to_a_read_is_none(status: Status, liar: Callable[..., Liar]) -> None:
    """A read is OK or it is not; that something was stored, or is busy, is no answer to it."""
    with two_pools() as (one, _):
        here = open_space(one)
        (chunk,) = prompt(here, 1)
        store = open_source(parse_url(liar(lambda *_: (bytes([status]), b"")).url))
        store.check_space(here.ref)
        shard = whole_shard(here.spec)
        (found,) = store.read(here.root(), [Piece(chunk, shard, here.empty(chunk, shard))], 5.0)
        assert found in (Status.MISS, Status.DAMAGED, Status.TIMEOUT)
        store.close()


@pytest.mark.parametrize("encodings", [0, 3])
def test_a_peer_that_says_anything_costs_misses(encodings: int, liar: Callable[..., Liar]) -> None:
    """Noise for every answer: nothing is found, nothing raised, and what was reserved comes back."""
    noise = random.Random(5)

    def answer(header: wire.Header, meta: bytes) -> tuple[bytes, bytes]:
        return noise.randbytes(noise.choice([0, 1, 4, 8, 9, 12, 64, 200])), noise.randbytes(noise.choice([0, 0, 7]))

    url = f"memory://?capacity=16MiB,{liar(answer, encodings=encodings).url}"
    with open_pool(url) as pool:
        here = open_space(pool)
        for seed in range(30):
            keys = here.keys([seed, *range(1, 3 * CHUNK + 5)])
            chunks = prompt(here, 3, seed=seed)
            here.match(keys)
            out = [here.empty(chunk, whole_shard(here.spec)) for chunk in chunks]
            assert Status.OK not in here.read(chunks, whole_shard(here.spec), out, deadline_s=2.0)
        nothing_pending(pool)


@pytest.mark.parametrize("age", [1, 1 << 31, (1 << 32) - 1])
def test_a_peer_whose_chunks_are_of_any_age(age: int, liar: Callable[..., Liar]) -> None:
    """Right tiles from a peer whose clock is not: they are used."""
    shard = Shard(range(6), range(4))
    with open_pool("memory://?capacity=16MiB") as theirs:
        space = open_space(theirs)
        chunks = prompt(space, 2)

        def answer(header: wire.Header, meta: bytes) -> tuple[bytes, bytes]:
            if header.type == wire.Type.RUN:
                num_keys = len(pull_wire.decode_run(meta)[1])
                return pull_wire.encode_run_answer(Run(min(2, num_keys), (CHUNK, (1 << 32) - 1))), b""
            if header.type == wire.Type.EXISTS:
                pairs = pull_wire.Exists.decode(meta).pairs
                return np.array([age] * len(pairs), "<u4").tobytes(), b""
            if header.type == wire.Type.READ:
                read = pull_wire.Read.decode(meta, CHUNK, 6, 4)
                tiles = [local_tiles(space.spec, chunk, read.shard) for chunk in read.chunks]
                sums = [np.array([checksum(t) for t in one.reshape(-1, one.shape[-1])], "<u8") for one in tiles]
                body = pull_wire.encode_read_answer([Status.OK] * len(tiles), sums)
                return body, b"".join([one.tobytes() for one in tiles])
            return b"", b""

        with open_pool(f"memory://?capacity=16MiB,{liar(answer).url}") as pool:
            here = open_space(pool)
            assert here.match(here.keys([0, *range(1, 2 * CHUNK + 9)])).num_tokens == 2 * CHUNK
            check_arrived(here, chunks, shard)
            nothing_pending(pool)
            wait_until(lambda: pool.stats().store.chunks == 2, 10.0, "they are in the own first tier")


def test_a_tail_without_tokens_ends_no_look_up(liar: Callable[..., Liar]) -> None:
    body = pull_wire.encode_run_answer(Run(1, (0, 3)))
    with open_pool(f"memory://?capacity=16MiB,{liar(lambda *_: (body, b'')).url}") as pool:
        here = open_space(pool)
        assert here.match(here.keys(range(2 * CHUNK + 9))).num_tokens == 0


PACKED_SPEC = gqa(layers=6, heads=4, dim=32, dtype="bfloat16")


def packed_tiles(chunk: Any, shard: Any) -> np.ndarray:
    """Tiles as they are stored when they are packed."""
    raw = local_tiles(PACKED_SPEC, chunk, shard)
    packed = pack_tiles(PACKED_SPEC, chunk.num_tokens, raw)
    assert packed is not None
    return packed


def sums_of(tiles: np.ndarray) -> np.ndarray:
    return np.array([checksum(t) for t in tiles.reshape(-1, tiles.shape[-1])], "<u8")


@pytest.mark.parametrize("encoding", [0, PACKED, 2, 7, 255])
def test_a_peer_that_says_anything_about_encodings_costs_misses(encoding: int, liar: Callable[..., Liar]) -> None:
    """Of float16 tiles, which are never packed: no answer makes a load fail, or reserves what does not come back."""
    with two_pools() as (one, _):
        theirs = open_space(one)
        chunks = prompt(theirs, 3)

        def answer(header: wire.Header, meta: bytes) -> tuple[bytes, bytes]:
            if header.type == wire.Type.RUN:
                return pull_wire.encode_run_answer(Run(len(pull_wire.decode_run(meta)[1]), ())), b""
            if header.type == wire.Type.EXISTS:
                count = len(pull_wire.Exists.decode(meta).pairs)
                return pull_wire.encode_ages([time.time_ns()] * count, [encoding] * count), b""
            if header.type == wire.Type.READ:
                read = pull_wire.Read.decode(meta, CHUNK, 6, 4)
                tiles = [local_tiles(theirs.spec, chunk, read.shard) for chunk in read.chunks]
                body = pull_wire.encode_read_answer(
                    [Status.OK] * len(tiles), [sums_of(one) for one in tiles], [encoding] * len(tiles)
                )
                return body, b"".join([one.tobytes() for one in tiles])
            return b"", b""

        with open_pool(f"memory://?capacity=16MiB,{liar(answer, encodings=3).url}") as pool:
            here = open_space(pool)
            assert here.match(here.keys([0, *range(1, 3 * CHUNK)])).num_tokens == 3 * CHUNK
            out = [here.empty(chunk, whole_shard(here.spec)) for chunk in chunks]
            statuses = here.read(chunks, whole_shard(here.spec), out, deadline_s=5.0)
            assert (statuses == [Status.OK] * 3) == (encoding == 0)
            nothing_pending(pool)
            # The pool is as good as before: what is written is found.
            assert here.write(chunks, whole_shard(here.spec), out)[0].stored
            assert pool.verify().clean


@pytest.mark.parametrize("keep", [True, False], ids=["fetched", "read there"])
def test_a_peer_whose_tiles_are_packed_where_none_can_be_costs_misses(keep: bool, liar: Callable[..., Liar]) -> None:
    """A packed tile of float16 has no bytes, and no bytes have a checksum, too."""
    with two_pools() as (one, _):
        chunks = prompt(open_space(one), 2)

        def answer(header: wire.Header, meta: bytes) -> tuple[bytes, bytes]:
            if header.type == wire.Type.EXISTS:
                count = len(pull_wire.Exists.decode(meta).pairs)
                return pull_wire.encode_ages([time.time_ns()] * count, [0] * count), b""
            if header.type == wire.Type.READ:
                read = pull_wire.Read.decode(meta, CHUNK, 6, 4)
                count, sums = len(read.chunks), np.full(read.shard.num_tiles, checksum(b""), "<u8")
                return pull_wire.encode_read_answer([Status.OK] * count, [sums] * count, [PACKED] * count), b""
            return bytes([Status.OK]), b""

        with open_pool(f"memory://?capacity=16MiB,{liar(answer, encodings=3).url}") as pool:
            here = open_space(pool)
            shard = whole_shard(here.spec)
            out = [here.empty(chunk, shard) for chunk in chunks]
            assert Status.OK not in here.read(chunks, shard, out, deadline_s=5.0, keep=keep)
            nothing_pending(pool)


LIES = {
    "the truth": lambda tiles, sums: (PACKED, tiles, sums),
    "raw tiles said to be packed": lambda tiles, sums: (PACKED, np.zeros((6, 4, 2048), np.uint8), sums),
    "packed tiles said to be raw": lambda tiles, sums: (0, tiles, sums),
    "fewer bytes": lambda tiles, sums: (PACKED, tiles.reshape(-1)[:-16], sums),
    "more bytes": lambda tiles, sums: (PACKED, np.concatenate([tiles.reshape(-1), tiles.reshape(-1)[:16]]), sums),
    "fewer checksums": lambda tiles, sums: (PACKED, tiles, sums[:-1]),
    "other checksums": lambda tiles, sums: (PACKED, tiles, sums[::-1]),
    "counts beyond their room": lambda tiles, sums: (PACKED, *with_count(tiles, 0xFFFFFFFF)),
    "counts of escapes that are nowhere": lambda tiles, sums: (PACKED, *with_count(tiles, 3)),
}


def with_count(tiles: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Another count of escapes in one tile, with checksums that are right, and escapes of values that do not exist."""
    changed = tiles.copy()
    words = changed[2, 1, :16].view(np.uint32)
    words[0], words[1:] = count, 0x00FFFFFF
    return changed, sums_of(changed)


@pytest.mark.parametrize("keep", [True, False], ids=["fetched", "read there"])
@pytest.mark.parametrize("lie", LIES)
def test_a_peer_that_lies_about_packed_tiles_costs_misses(lie: str, keep: bool, liar: Callable[..., Liar]) -> None:
    with two_pools() as (one, _):
        theirs = open_space(one, PACKED_SPEC)
        (chunk,) = prompt(theirs, 1)

        def answer(header: wire.Header, meta: bytes) -> tuple[bytes, bytes]:
            if header.type == wire.Type.RUN:
                return pull_wire.encode_run_answer(Run(len(pull_wire.decode_run(meta)[1]), ())), b""
            if header.type == wire.Type.EXISTS:
                return pull_wire.encode_ages([time.time_ns()], [PACKED]), b""
            if header.type == wire.Type.READ:
                tiles = packed_tiles(chunk, whole_shard(PACKED_SPEC))
                encoding, told, sums = LIES[lie](tiles, sums_of(tiles))
                return pull_wire.encode_read_answer([Status.OK], [sums], [encoding]), told.tobytes()
            return bytes([Status.OK]), b""  # JUDGE: nothing is wrong here

        with open_pool(f"memory://?capacity=16MiB,{liar(answer, encodings=3).url}") as pool:
            here = open_space(pool, PACKED_SPEC)
            shard = whole_shard(here.spec)
            out = here.empty(chunk, shard)
            (status,) = here.read([chunk], shard, [out], deadline_s=5.0, keep=keep)
            assert (status == Status.OK) == (lie == "the truth")
            assert status != Status.OK or np.array_equal(out, local_tiles(here.spec, chunk, shard))
            nothing_pending(pool)
            assert pool.verify().clean


def test_a_form_that_is_not_defined_costs_its_own_chunk_only(liar: Callable[..., Liar]) -> None:
    """The chunks before it are fetched and kept: one lie does not spoil what is reserved beside it. What is stored in a
    way that only the peer knows it sends raw."""
    with two_pools() as (one, _):
        theirs = open_space(one)
        chunks = prompt(theirs, 3)

        def answer(header: wire.Header, meta: bytes) -> tuple[bytes, bytes]:
            if header.type == wire.Type.RUN:
                return pull_wire.encode_run_answer(Run(len(pull_wire.decode_run(meta)[1]), ())), b""
            if header.type == wire.Type.EXISTS:
                pairs = pull_wire.Exists.decode(meta).pairs
                lies = [{chunks[0].key: 7, chunks[1].key: PACKED}.get(key, 0) for key, _ in pairs]
                return pull_wire.encode_ages([time.time_ns()] * len(pairs), lies), b""
            if header.type == wire.Type.READ:
                read = pull_wire.Read.decode(meta, CHUNK, 6, 4)
                tiles = [local_tiles(theirs.spec, chunk, read.shard) for chunk in read.chunks]
                sums = [sums_of(one) for one in tiles]
                body = pull_wire.encode_read_answer([Status.OK] * len(tiles), sums, [0] * len(tiles))
                return body, b"".join([one.tobytes() for one in tiles])
            return b"", b""

        with open_pool(f"memory://?capacity=16MiB,{liar(answer, encodings=3).url}") as pool:
            here = open_space(pool)
            check_arrived(here, chunks)
            assert here.exists(chunks) == [True, False, False]
            nothing_pending(pool)
