"""Packed chunks across tiers, processes and networks: copied down packed, brought up as they are stored, found damaged
wherever they are."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import peer_cases as pc
from headwater.kv import encoding as encodings
from headwater.kv.encoding import ENCODINGS, PACKED, RAW, stored_extent_bytes, stored_tile_bytes
from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import Shard, Topology
from headwater.pool import Pool, open_pool
from headwater.stores.base import Form, Piece, Status
from headwater.stores.embedded.store import EmbeddedStore
from headwater.stores.remote.base import NewObject
from headwater.stores.remote.store import RemoteStore
from headwater.stores.tiers import copier
from headwater.stores.tiers.store import TieredStore
from packing_cases import (
    CHUNK,
    SPEC,
    WHOLE,
    check,
    encodings_of,
    flip,
    front_of,
    noise,
    packed,
    prompt,
    space_of,
    write,
)

from faults import FaultProxy, fault_proxy
from servers import Server, redis_server
from support import empty_tiles, local_tiles, temporary_url, wait_until

pytestmark = pytest.mark.slow

LOWER = ("file", "redis")
EXTENT = {form: stored_extent_bytes(SPEC, CHUNK, form) for form in (RAW, PACKED)}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with redis_server() as started:
        yield started


@pytest.fixture
def lower(server: Server, tmp_path: Path) -> Iterator[Callable[..., str]]:
    """URLs of lower tiers, each new."""
    with contextlib.ExitStack() as stack:

        def make(kind: str, options: str = "") -> str:
            if kind == "file":
                return stack.enter_context(temporary_url("file", tmp_path, f"capacity=16MiB{options}"))
            return f"redis://127.0.0.1:{server.port}?prefix=p{os.urandom(5).hex()}&lookup=20&deadline=30{options}"

        yield make


@contextlib.contextmanager
def pool_of(*rest: str, options: str = "capacity=4MiB", folder: object = None) -> Iterator[Pool]:
    with temporary_url("shm", folder, options) as first, open_pool(",".join((first, *rest))) as pool:
        yield pool


def below(pool: Pool, number: int = 0) -> Any:
    """A lower tier's store."""
    assert isinstance(pool._store, TieredStore)
    return pool._store._tiers[number].store


def forms_below(pool: Pool, chunks: list[ChunkRef], number: int = 0) -> list[int | None]:
    return [None if form is None else form.encoding for form in below(pool, number).forms(chunks)]


def empty_front(pool: Pool) -> None:
    front_of(pool).clear(None)


# ---- down, and up again -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["back", "through", "demote"])
@pytest.mark.parametrize("kind", LOWER)
def test_chunks_are_copied_down_packed_and_come_up_as_they_are(kind: str, mode: str, lower: Any) -> None:
    with pool_of(lower(kind, f"&write={mode}")) as pool:
        space = space_of(pool)
        chunks = prompt(space, 6, tail=7)
        write(space, chunks)
        tiles = noise(extra := prompt(space, 1, seed=5)[0])
        assert space.write([extra], WHOLE, [tiles]) == [Status.OK]
        assert encodings_of(pool, [*chunks, extra]) == [RAW] * 8
        if mode == "demote":
            seed = 10
            while pool.stats().store.used_bytes < 0.8 * pool.stats().store.data_bytes:
                write(space, prompt(space, 3, seed=(seed := seed + 1)))
            wait_until(lambda: None not in forms_below(pool, [*chunks, extra]), what="the oldest are demoted")
        assert pool.flush(60)
        assert forms_below(pool, [*chunks, extra]) == [PACKED] * 7 + [RAW]
        tier = pool.tiers()[1]
        if mode != "demote":
            assert tier.stored_bytes == sum(
                stored_extent_bytes(SPEC, c.num_tokens, PACKED) for c in chunks
            ) + SPEC.extent_bytes(CHUNK)
        empty_front(pool)
        check(space, chunks)
        assert encodings_of(pool, chunks) == [PACKED] * 7, "as they are stored"
        out = space.empty(extra, WHOLE)
        assert space.read([extra], WHOLE, [out]) == [Status.OK]
        assert np.array_equal(out, tiles)
        assert pool.verify().clean


@pytest.mark.parametrize("kind", LOWER)
def test_a_tier_that_wants_no_packing_gets_what_there_is(kind: str, lower: Any) -> None:
    with pool_of(lower(kind, "&packing=off")) as pool:
        space = space_of(pool)
        chunks = prompt(space, 4)
        write(space, chunks[:2], encoding=RAW)
        write(space, chunks[2:], encoding=PACKED)
        assert pool.flush(60)
        assert forms_below(pool, chunks) == [RAW, RAW, PACKED, PACKED]
        empty_front(pool)
        check(space, chunks)


def test_three_tiers_keep_what_the_first_has_packed(lower: Any) -> None:
    with pool_of(lower("file"), lower("redis"), options="capacity=4MiB&packing=on") as pool:
        space = space_of(pool)
        chunks = prompt(space, 5)
        write(space, chunks)
        assert pool.flush(60)
        assert forms_below(pool, chunks, 0) == forms_below(pool, chunks, 1) == [PACKED] * 5
        empty_front(pool)
        below(pool, 0).clear(None)
        check(space, chunks)
        assert encodings_of(pool, chunks) == [PACKED] * 5


@pytest.mark.parametrize("kind", LOWER)
def test_a_lower_tier_alone_packs_and_is_read_for_any_shard(kind: str, lower: Any) -> None:
    with open_pool(lower(kind)) as pool:
        space = space_of(pool)
        chunks = prompt(space, 3, tail=6)
        write(space, chunks)
        assert encodings_of(pool, chunks) == [PACKED] * 4
        for shard in (WHOLE, Shard(range(1, 3), range(1, 2)), *Topology(tp=4, dcp=2, interleave=3).shards(SPEC)):
            check(space, chunks, shard)


@pytest.mark.parametrize("kind", LOWER)
def test_parts_of_tiles_and_packed_chunks_share_a_chain(kind: str, lower: Any) -> None:
    """Chunks that context-parallel ranks have filled go down packed where they are copied whole, or raw: either way
    they come back."""
    with pool_of(lower(kind)) as pool:
        space = space_of(pool)
        chunks = prompt(space, 4)
        write(space, chunks[:2], encoding=PACKED)
        for shard in Topology(tp=4, dcp=2, interleave=3).shards(SPEC):
            write(space, chunks[2:], shard)
        assert pool.flush(60)
        empty_front(pool)
        for shard in (*Topology(tp=4, dcp=2, interleave=5).shards(SPEC), WHOLE):
            check(space, chunks, shard)
        assert pool.verify().clean


# ---- damage -----------------------------------------------------------------------------------------------------
def flip_below(store: Any, chunk: ChunkRef, at: int) -> None:
    """Change a bit of a packed chunk in a lower tier."""
    if isinstance(store, EmbeddedStore):
        entry = store._core.index.find(chunk.key)
        assert entry is not None
        byte = np.zeros(1, np.uint8)
        assert store._core.data.load(entry.record.offset + at, [byte], 1e9)
        byte ^= 8
        assert store._core.data.save([(entry.record.offset + at, [byte])], 1e9, lambda: None)
        return
    assert isinstance(store, RemoteStore)
    manifest = store._reader.manifests([chunk.key], set(), 1e9)[chunk.key]
    assert manifest is not None
    name = store._names.piece(manifest, 0)
    value = np.frombuffer(store._client.fetch([name], 1 << 24, 1e9)[0] or b"", np.uint8).copy()
    value[at] ^= 8
    store._client.write([NewObject(name, [value])], 1e9)


@pytest.mark.parametrize("keep", [True, False], ids=["fetched", "read below"])
@pytest.mark.parametrize("kind", LOWER)
def test_a_flip_below_is_found_whichever_way_it_comes(kind: str, keep: bool, lower: Any) -> None:
    with pool_of(lower(kind)) as pool:
        space = space_of(pool)
        chunks = prompt(space, 4)
        write(space, chunks)
        assert pool.flush(60)
        empty_front(pool)
        flip_below(below(pool), chunks[2], stored_tile_bytes(SPEC, CHUNK, PACKED) + 9)
        for _ in range(2):  # a copy that came up damaged may have left one below
            out = [empty_tiles(SPEC, chunk, WHOLE) for chunk in chunks]
            statuses = space.read(chunks, WHOLE, out, keep=keep, deadline_s=30)
            assert statuses[:2] == [Status.OK] * 2
            assert statuses[2] in (Status.DAMAGED, Status.MISS)
            for chunk, tiles, status in zip(chunks, out, statuses, strict=True):
                assert status != Status.OK or np.array_equal(tiles, local_tiles(SPEC, chunk, WHOLE))
        assert forms_below(pool, chunks)[2] is None, "it is gone everywhere"
        assert not space.exists(chunks)[2]


@pytest.mark.parametrize("kind", LOWER)
def test_raw_damage_is_not_packed_into_something_that_looks_right(
    kind: str, lower: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flipped in the first tier before the copier comes: packed tiles would get checksums that match."""
    with pool_of(lower(kind)) as pool:
        space = space_of(pool)
        chunks = prompt(space, 3)
        ready = threading.Event()
        export = copier._export
        monkeypatch.setattr(copier, "_export", lambda *a: (ready.wait(60), export(*a))[1])
        write(space, chunks)
        flip(pool, chunks[1], 3 * SPEC.tile_bytes(CHUNK) + 11)
        ready.set()
        assert pool.flush(60)
        empty_front(pool)
        out = [empty_tiles(SPEC, chunk, WHOLE) for chunk in chunks]
        statuses = space.read(chunks, WHOLE, out, deadline_s=30)
        assert statuses[0] == Status.OK
        assert statuses[1] != Status.OK
        assert np.array_equal(out[0], local_tiles(SPEC, chunks[0], WHOLE))
        assert pool.verify().damaged == 0


def test_a_bit_that_flips_in_flight_is_asked_for_again(server: Server) -> None:
    """Behind a network that flips a bit of the answers: never used; once it is well, everything comes."""
    proxy = FaultProxy(server.port)
    prefix = f"p{os.urandom(5).hex()}"
    try:
        with open_pool(f"redis://127.0.0.1:{server.port}?prefix={prefix}&lookup=20&deadline=30") as writer:
            chunks = prompt(space_of(writer), 3)
            write(space_of(writer), chunks)
            size = 3 * stored_extent_bytes(SPEC, CHUNK, PACKED)
            with pool_of(f"redis://127.0.0.1:{proxy.port}?prefix={prefix}&lookup=20&deadline=30") as pool:
                space = space_of(pool)
                for seed in range(4):
                    proxy.flip_after = 2000 + seed * size // 5
                    out = [empty_tiles(SPEC, chunk, WHOLE) for chunk in chunks]
                    for chunk, tiles, status in zip(
                        chunks, out, space.read(chunks, WHOLE, out, keep=False), strict=True
                    ):
                        assert status != Status.OK or np.array_equal(tiles, local_tiles(SPEC, chunk, WHOLE))
                    proxy.heal()
                write(space_of(writer), chunks)  # what was taken for damaged
                wait_until(lambda: space._store._tiers[0].usable, what="the tier is used again")  # type: ignore[attr-defined]
                check(space, chunks)
    finally:
        proxy.close()


@pytest.mark.parametrize("way", ["pull", "push"])
def test_a_bit_that_flips_between_hosts_is_found(way: str) -> None:
    with (
        open_pool("memory://?capacity=8MiB&packing=on&deadline=30") as one,
        open_pool("memory://?capacity=8MiB&deadline=30") as other,
        pc.receiving(one if way == "pull" else other, silence_s=2.0) as peer,
    ):
        here, there = space_of(one), space_of(other)
        chunks = prompt(here, 4)
        write(here, chunks)
        proxy = FaultProxy(peer.address.port)
        try:
            if way == "pull":
                url = f"memory://?capacity=8MiB,peer://127.0.0.1:{proxy.port}?lookup=5&deadline=30&connections=1"
                with open_pool(url) as pool:
                    space = space_of(pool)
                    for seed in range(3):
                        proxy.flip_after = 3000 + 9000 * seed
                        out = [empty_tiles(SPEC, chunk, WHOLE) for chunk in chunks]
                        for chunk, tiles, status in zip(
                            chunks, out, space.read(chunks, WHOLE, out, keep=False), strict=True
                        ):
                            assert status != Status.OK or np.array_equal(tiles, local_tiles(SPEC, chunk, WHOLE))
                        proxy.heal()
                    wait_until(lambda: space._store._tiers[0].usable, what="the peer is asked again")  # type: ignore[attr-defined]
                    check(space, chunks)
                    assert encodings_of(pool, chunks) == [PACKED] * 4
            else:
                # Answers of the receiver are flipped: the sender must take nothing for sent that is not.
                with pc.sending(here, io_s=1.0) as (sender,):
                    proxy.flip_after = 400
                    name = pc.transfer_id()
                    sender.push(name, f"127.0.0.1:{proxy.port}", chunks)
                    sent = sender.flush(name, 10.0)
                    assert there.match(there.keys([0, *range(1, 4 * CHUNK)])).num_tokens >= sent
                    proxy.heal()
                match = there.match(there.keys([0, *range(1, 4 * CHUNK)]))
                check(there, list(match.chunks))
                pc.nothing_pending(other)
        finally:
            proxy.close()


@pytest.mark.parametrize("at", [20_000, 60_000, 100_000])
def test_a_bit_that_flips_in_a_pushed_tile_is_found_where_it_is_read(at: int) -> None:
    with (
        open_pool("memory://?capacity=8MiB&packing=on&deadline=30") as one,
        open_pool("memory://?capacity=8MiB&deadline=30") as other,
        pc.receiving(other) as peer,
        fault_proxy(peer.address.port) as proxy,
    ):
        here, there = space_of(one), space_of(other)
        chunks = prompt(here, 10)
        write(here, chunks)
        with pc.sending(here) as (sender,):
            proxy.flip_question_after = at
            name = pc.transfer_id()
            sender.push(name, f"127.0.0.1:{proxy.port}", chunks)
            sender.flush(name, 20.0)
            assert proxy.flip_question_after is None
        out = [empty_tiles(SPEC, chunk, WHOLE) for chunk in chunks]
        statuses = there.read(chunks, WHOLE, out)
        assert statuses.count(Status.OK) < 10
        for chunk, tiles, status in zip(chunks, out, statuses, strict=True):
            assert status != Status.OK or np.array_equal(tiles, local_tiles(SPEC, chunk, WHOLE))
        # What is left is right, and the rest can be pushed again.
        with pc.sending(here) as (sender,):
            name = pc.transfer_id()
            sender.push(name, f"127.0.0.1:{proxy.port}", chunks)
            assert sender.flush(name, 20.0) == 10 * CHUNK
        check(there, chunks)


# ---- what travels -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("way", ["pull", "push", "redis"])
def test_a_quarter_of_the_bytes_stays_at_home(way: str, server: Server) -> None:
    """Counted on the wire, in the direction in which tiles travel."""
    moved = {}
    for packing in ("off", "on"):
        with (
            open_pool(f"memory://?capacity=8MiB&packing={packing}&deadline=30") as one,
            open_pool("memory://?capacity=8MiB&deadline=30") as other,
            pc.receiving(other if way == "push" else one) as peer,
            fault_proxy(server.port if way == "redis" else peer.address.port) as proxy,
        ):
            here, there = space_of(one), space_of(other)
            chunks = prompt(here, 20)
            if way == "push":
                write(here, chunks)
                with pc.sending(here) as (sender,):
                    name = pc.transfer_id()
                    sender.push(name, f"127.0.0.1:{proxy.port}", chunks)
                    assert sender.flush(name, 30.0) == 20 * CHUNK
                check(there, chunks)
            else:
                redis = f"prefix=w{os.urandom(5).hex()}&lookup=20&deadline=30&packing={packing}"
                lower = f"peer://127.0.0.1:{proxy.port}?lookup=20&deadline=30"
                if way == "redis":
                    lower = f"redis://127.0.0.1:{proxy.port}?{redis}"
                    with open_pool(f"redis://127.0.0.1:{server.port}?{redis}") as writer:
                        write(space_of(writer), chunks)
                else:
                    write(here, chunks)
                with open_pool(f"memory://?capacity=8MiB&packing=off,{lower}") as pool:
                    check(space_of(pool), chunks)
                    assert all(space_of(pool).exists(chunks))
            moved[packing] = proxy.num_bytes[way == "push"]
    raw, stored = (20 * EXTENT[form] for form in (RAW, PACKED))
    assert raw < moved["off"] < 1.1 * raw
    assert stored < moved["on"] < 1.1 * stored
    assert moved["on"] < 0.85 * moved["off"]


# ---- other software, other processes ----------------------------------------------------------------------------
@pytest.mark.parametrize("kind", LOWER)
def test_older_software_misses_what_is_packed_below_and_leaves_it(
    kind: str, lower: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    url = lower(kind)
    with pool_of(url) as pool:
        space = space_of(pool)
        keys = space.keys([0, *range(1, 4 * CHUNK)])
        write(space, keys.chunks())
        assert pool.flush(60)
    with monkeypatch.context() as patch:
        patch.delitem(ENCODINGS, PACKED)
        encodings._refused.clear()
        with pool_of(url) as pool:
            space = space_of(pool)
            for _ in range(2):
                out = [empty_tiles(SPEC, chunk, WHOLE) for chunk in keys.chunks()]
                assert space.read(keys.chunks(), WHOLE, out, deadline_s=30) == [Status.MISS] * 4
            assert below(pool).verify().clean
            assert pool.tiers()[1].damaged == 0
    assert any("encoding 1, which this Headwater cannot read" in message for message in caplog.messages)
    with pool_of(url) as pool:
        check(space_of(pool), keys.chunks())


WORKER = """
import sys
from headwater.pool import open_pool
from packing_cases import check, prompt, space_of, write
url, mine, theirs = sys.argv[1], *map(int, sys.argv[2:])
with open_pool(url) as pool:
    space = space_of(pool)
    for number in range(15):
        write(space, prompt(space, 2, seed=1000 * mine + number, tail=number % 7))
    print("written", flush=True)
    sys.stdin.readline()
    for number in range(15):
        check(space, prompt(space, 2, seed=1000 * theirs + number, tail=number % 7))
    print("read", flush=True)
    sys.stdin.readline()
"""


@contextlib.contextmanager
def worker(url: str, *numbers: int, program: str = WORKER) -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", program, url, *map(str, numbers)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def hear(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_processes_that_pack_and_that_do_not_read_each_other(tmp_path: Path) -> None:
    with (
        temporary_url("shm", tmp_path, "capacity=16MiB") as url,
        worker(f"{url}&packing=on", 1, 2) as one,
        worker(f"{url}&packing=off", 2, 1) as two,
    ):
        assert [hear(one), hear(two)] == ["written", "written"]
        for process in (one, two):
            go_on(process)
        assert [hear(one), hear(two)] == ["read", "read"]
        with open_pool(url) as pool:
            space = space_of(pool)
            assert encodings_of(pool, prompt(space, 2, seed=1001)) == [PACKED] * 2
            assert encodings_of(pool, prompt(space, 2, seed=2001)) == [RAW] * 2
            assert pool.verify().clean
        for process in (one, two):
            go_on(process)


ENDLESS = """
import itertools, sys
from headwater.kv.encoding import PACKED, RAW
from headwater.pool import open_pool
from packing_cases import prompt, space_of, write
from headwater.stores.base import Status
with open_pool(sys.argv[1]) as pool:
    space = space_of(pool)
    print("begun", flush=True)
    for number in itertools.count():
        write(space, prompt(space, 3, seed=int(sys.argv[2]) + number % 50))
"""


@pytest.mark.parametrize("scheme", ["shm", "file"])
def test_kill_nine_in_the_middle_of_packed_writes(scheme: str, tmp_path: Path) -> None:
    """What is complete is right, what is not goes, and the room comes back."""
    with temporary_url(scheme, tmp_path, "capacity=2MiB&packing=on") as url, open_pool(url) as pool:
        space = space_of(pool)
        for round_number in range(6):
            with worker(url, 100 * round_number, program=ENDLESS) as process:
                assert hear(process) == "begun"
                before = pool.stats().store.stored
                wait_until(lambda before=before: pool.stats().store.stored > before + 20, what="it writes")
                os.kill(process.pid, signal.SIGKILL)
                process.wait(30)
            for number in range(50):
                chunks = prompt(space, 3, seed=100 * round_number + number)
                out = [empty_tiles(SPEC, chunk, WHOLE) for chunk in chunks]
                for chunk, tiles, status in zip(chunks, out, space.read(chunks, WHOLE, out), strict=True):
                    assert status in (Status.OK, Status.MISS)
                    assert status != Status.OK or np.array_equal(tiles, local_tiles(SPEC, chunk, WHOLE))
            write(space, prompt(space, 3, seed=7))
        assert pool.verify().clean
        pool.clear()
        wait_until(lambda: pool.stats().store.used_bytes == 0, what="all room is free again")


def test_a_receiver_that_is_killed_in_the_middle_of_packed_pushes(tmp_path: Path) -> None:
    """Each time it is restarted on its port: what is complete is right, and nothing that was begun stays."""
    with (
        temporary_url("shm", tmp_path, "capacity=16MiB") as url,
        open_pool("memory://?capacity=16MiB&packing=on&deadline=30") as one,
        open_pool(url) as other,
    ):
        here, there = space_of(one), space_of(other)
        prompts = [prompt(here, 8, seed=seed) for seed in range(12)]
        for number, chunks in enumerate(prompts):
            write(here, chunks, encoding=RAW if number % 3 == 2 else PACKED)
        address = "127.0.0.1:0"
        with pc.sending(here, dead_s=0.01) as (sender,):
            for round_number in range(3):
                process = pc.ReceiverProcess(url, listen=address)
                address = process.address
                names = []
                before = other.stats().store.stored
                for chunks in prompts[4 * round_number : 4 * round_number + 4]:
                    names.append(pc.transfer_id())
                    sender.push(names[-1], address, chunks)
                wait_until(lambda before=before: other.stats().store.stored > before, what="the first chunks come")
                process.kill()
                for name in names:
                    sender.flush(name, 1.0)
            wait_until(lambda: not any(link.is_dead for link in sender._links.values()), what="it is tried again")
            process = pc.ReceiverProcess(url, listen=address)
            try:
                for chunks in prompts:
                    name = pc.transfer_id()
                    sender.push(name, address, chunks)
                    assert sender.flush(name, 30.0) == 8 * CHUNK
            finally:
                process.close()
        for number, chunks in enumerate(prompts):
            check(there, chunks)
            assert encodings_of(other, chunks) == [RAW if number % 3 == 2 else PACKED] * 8
        pc.nothing_pending(other)
        assert other.verify().clean


def test_what_is_piece_by_piece_read_from_below_is_raw_for_everybody(lower: Any) -> None:
    """`read_pieces` of packed and raw chunks in one call, of several shards."""
    with open_pool(lower("redis")) as pool:
        space = space_of(pool)
        chunks = prompt(space, 3)
        write(space, chunks[:1], encoding=RAW)
        tiles = [packed(chunk) for chunk in chunks[1:]]
        assert space.write(chunks[1:], WHOLE, tiles, encodings=[PACKED] * 2) == [Status.OK] * 2
        store: Any = pool._store
        assert store.forms(chunks) == [Form(), Form(encoding=PACKED), Form(encoding=PACKED)]
        shards = [WHOLE, Shard(range(2, 4), range(1)), *Topology(tp=4, dcp=2).shards(SPEC)]
        pieces = [Piece(chunk, shard, empty_tiles(SPEC, chunk, shard)) for chunk in chunks for shard in shards]
        assert set(space.read_pieces(pieces)) == {Status.OK}
        assert all(np.array_equal(p.tiles, local_tiles(SPEC, p.chunk, p.shard)) for p in pieces)
