"""Packed chunks in the stores of one host: bit for bit what was written, found damaged where they are, and nobody's who
cannot read them."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from headwater.kv import encoding as encodings
from headwater.kv.encoding import ENCODINGS, PACKED, RAW, stored_extent_bytes, stored_tile_bytes
from headwater.kv.packing import packed_blocks, packed_tile_bytes
from headwater.kv.topology import Shard, Split, Topology, whole_shard
from headwater.pool import Pool, Space, open_pool
from headwater.stores.base import Status
from headwater.stores.encode import pack_tiles
from headwater.stores.remote.plan import tile_sums
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
    store_lie,
    write,
)

from support import empty_tiles, gqa, identity, local_tiles, temporary_url, wait_until

SCHEMES = ("shm", "memory", "file")
PACKED_BYTES = stored_tile_bytes(SPEC, CHUNK, PACKED)
EXTENT = {form: stored_extent_bytes(SPEC, CHUNK, form) for form in (RAW, PACKED)}


@contextmanager
def pool_of(scheme: str, folder: object, options: str = "capacity=4MiB&packing=on") -> Iterator[tuple[Pool, Space]]:
    with temporary_url(scheme, folder, options) as url, open_pool(url) as pool:
        yield pool, space_of(pool)


# ---- what is stored, and what it is for readers -----------------------------------------------------------------
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("packing", ["auto", "on", "off"])
def test_chunks_are_stored_as_the_pool_wants_and_read_as_they_were(packing: str, scheme: str, tmp_path: Path) -> None:
    with pool_of(scheme, tmp_path, f"capacity=4MiB&packing={packing}") as (pool, space):
        chunks = prompt(space, 5, tail=5)
        write(space, chunks)
        form = PACKED if packing == "on" or (packing == "auto" and scheme == "file") else RAW
        assert encodings_of(pool, chunks) == [form] * 6
        for shard in (WHOLE, Shard(range(1, 3), range(1, 2)), *Topology(tp=4, dcp=2, interleave=3).shards(SPEC)):
            check(space, chunks, shard)
        whole = np.full((5, *WHOLE.local_shape(SPEC, 0, CHUNK)), 0xA5, np.uint8)
        assert space.read(chunks[:5], WHOLE, whole) == [Status.OK] * 5
        assert all(np.array_equal(a, local_tiles(SPEC, c, WHOLE)) for a, c in zip(whole, chunks, strict=False))
        stored = sum(stored_extent_bytes(SPEC, chunk.num_tokens, form) for chunk in chunks)
        stats, report = pool.stats().store, pool.verify()
        assert (report.clean, report.chunks, report.bytes) == (True, 6, stored)
        assert (stats.stored_bytes, stats.damaged) == (stored, 0)
        assert stats.stored_raw_bytes == sum(SPEC.extent_bytes(chunk.num_tokens) for chunk in chunks)
        assert sum(info.num_bytes for info in pool.scan()) == stored


@pytest.mark.parametrize("scheme", ["shm", "memory"])
def test_borrowed_tiles_are_raw_and_cannot_be_written_to(scheme: str, tmp_path: Path) -> None:
    with pool_of(scheme, tmp_path) as (pool, space):
        chunks = prompt(space, 2)
        write(space, chunks[:1])
        write(space, chunks[1:], encoding=RAW)
        shard = Shard(range(1, 4), range(2))
        for chunk in chunks:
            with space.borrow(chunk, shard) as view:
                assert view is not None
                assert np.array_equal(view, local_tiles(SPEC, chunk, shard))
                with pytest.raises(ValueError, match="read-only"):
                    view[0, 0, 0] = 1
        flip(pool, chunks[0], 3 * 2 * PACKED_BYTES + 5)
        with space.borrow(chunks[0], shard) as view:
            assert view is None
        assert pool.stats().store.damaged == 1


@pytest.mark.parametrize("scheme", SCHEMES)
def test_any_bits_come_back(scheme: str, tmp_path: Path) -> None:
    """NaNs with payloads, infinities, zeros of both signs and denormals, two in each plane of a tile."""
    with pool_of(scheme, tmp_path) as (pool, space):
        chunks = prompt(space, 3)
        odd = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x7F81, 0x0001, 0x807F, 0x3F80]
        tiles = [local_tiles(SPEC, chunk, WHOLE) for chunk in chunks]
        for number, values in enumerate(tiles):
            words = values.view(np.uint16).reshape(-1, CHUNK * 32)  # a plane of a tile each, which has room for three
            for i, plane in enumerate(words):
                plane[[i + number, 32 * i + 5]] = odd[(i + number) % 10], odd[(3 * i + number + 1) % 10]
        assert space.write(chunks, WHOLE, tiles) == [Status.OK] * 3
        assert encodings_of(pool, chunks) == [PACKED] * 3
        out = [empty_tiles(SPEC, chunk, WHOLE) for chunk in chunks]
        assert space.read(chunks, WHOLE, out) == [Status.OK] * 3
        assert all(np.array_equal(a, b) for a, b in zip(out, tiles, strict=True))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_does_not_pack_is_stored_raw_in_the_same_chain(scheme: str, tmp_path: Path) -> None:
    with pool_of(scheme, tmp_path) as (pool, space):
        chunks = prompt(space, 4)
        tiles = [noise(c) if i % 2 else local_tiles(SPEC, c, WHOLE) for i, c in enumerate(chunks)]
        assert space.write(chunks, WHOLE, tiles) == [Status.OK] * 4
        assert encodings_of(pool, chunks) == [PACKED, RAW, PACKED, RAW]
        out = [empty_tiles(SPEC, chunk, WHOLE) for chunk in chunks]
        assert space.read(chunks, WHOLE, out) == [Status.OK] * 4
        assert all(np.array_equal(a, b) for a, b in zip(out, tiles, strict=True))
        assert space.match(space.keys([0, *range(1, 4 * CHUNK)])).num_tokens == 4 * CHUNK


def test_a_rank_whose_part_does_not_pack_is_busy_where_others_have_packed_theirs(tmp_path: Path) -> None:
    """All parts of a chunk are stored alike; what cannot be complete is given up by whoever wrote it."""
    with pool_of("shm", tmp_path) as (pool, space):
        (chunk,) = prompt(space, 1)
        one, two = Topology(tp=2).shards(SPEC)
        write(space, [chunk], one)
        part = noise(chunk)[:, 1:2]
        assert space.write([chunk], two, [part]) == [Status.BUSY]
        assert space.abort([chunk]) == 1
        assert pool.stats().store.pending_bytes == 0
        write(space, [chunk], one, encoding=RAW)
        assert space.write([chunk], two, [part]) == [Status.OK]
        assert encodings_of(pool, [chunk]) == [RAW]


@pytest.mark.parametrize("topology", [Topology(tp=2), Topology(pp=2), Topology(tp=4)], ids=["tp", "pp", "replicas"])
def test_ranks_fill_packed_chunks_together(topology: Topology, tmp_path: Path) -> None:
    with pool_of("shm", tmp_path) as (pool, space):
        chunks = prompt(space, 3, tail=9)
        for shard in topology.shards(SPEC):
            assert not any(space.exists(chunks))
            write(space, chunks, shard)
        assert encodings_of(pool, chunks) == [PACKED] * 4
        check(space, chunks)
        assert pool.verify().clean


def test_parts_of_tiles_are_stored_raw(tmp_path: Path) -> None:
    with pool_of("shm", tmp_path) as (pool, space):
        chunks = prompt(space, 2)
        for shard in Topology(tp=4, dcp=2, interleave=3).shards(SPEC):
            write(space, chunks, shard)
        assert encodings_of(pool, chunks) == [RAW] * 2
        check(space, chunks)
        with pytest.raises(Exception, match="cannot be stored in encoding 1"):
            space.reserve(prompt(space, 1, seed=1), Shard(range(4), range(1), Split(2, 3), 0), encodings=[PACKED])


def test_more_chunks_fit_into_the_same_bytes(tmp_path: Path) -> None:
    """Until the first one is evicted: a third more, within what the units of the data area round up."""
    counts = {}
    for packing in ("off", "on"):
        with pool_of("shm", tmp_path, f"capacity=4MiB&packing={packing}") as (pool, space):
            seed = 0
            while not pool.stats().store.evicted:
                write(space, prompt(space, 1, seed=seed))
                seed += 1
            counts[packing] = seed - 1
    assert EXTENT[PACKED] < 0.8 * EXTENT[RAW]
    assert counts["on"] > 1.2 * counts["off"]


# ---- damage -----------------------------------------------------------------------------------------------------
def spots() -> list[int]:
    """One byte of each part of a packed tile, of each of its blocks."""
    found = []
    for block in packed_blocks(tuple(plane.width for plane in SPEC.planes), CHUNK):
        end = block.codes + block.num_rows * block.width // 2
        found += [block.start + at for at in (0, 3, 4, block.bases, block.signs, block.codes, end - 1)]
        found += [block.start + end] if end < block.num_bytes else []
    return found


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_flip_anywhere_in_a_packed_tile_is_found(scheme: str, tmp_path: Path) -> None:
    with pool_of(scheme, tmp_path) as (pool, space):
        (chunk,) = prompt(space, 1)
        for number, at in enumerate(spots()):
            write(space, [chunk])
            flip(pool, chunk, 5 * PACKED_BYTES + at, 1 << number % 8)
            assert space.read([chunk], WHOLE, [empty_tiles(SPEC, chunk, WHOLE)]) == [Status.DAMAGED]
            assert pool.stats().store.damaged == number + 1
            assert not space.exists([chunk])[0]
        assert len(spots()) >= 14
        assert pool.verify().clean


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_nobody_reads_is_found_by_verifying(scheme: str, tmp_path: Path) -> None:
    with pool_of(scheme, tmp_path) as (pool, space):
        chunks = prompt(space, 4)
        write(space, chunks)
        flip(pool, chunks[2], 4 * 2 * PACKED_BYTES - 1)
        report = pool.verify()
        assert (report.damaged, report.clean) == (1, False)
        assert space.exists(chunks) == [True, True, False, False]
        check(space, chunks[:2])


def test_a_copy_of_a_lent_tile_that_is_wrong_is_judged_where_it_lies(tmp_path: Path) -> None:
    with pool_of("shm", tmp_path) as (pool, space):
        chunks = prompt(space, 2)
        write(space, chunks)
        assert space.judge(chunks[1], WHOLE) == Status.OK
        flip(pool, chunks[1], 40)
        assert space.judge(chunks[1], WHOLE) == Status.DAMAGED
        assert space.judge(chunks[1], WHOLE) == Status.MISS


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("lie", ["count", "most", "place"])
def test_escapes_that_cannot_be_are_damage_though_the_checksums_are_right(
    scheme: str, lie: str, tmp_path: Path
) -> None:
    """Whoever wrote that was broken: it is never used, and goes."""
    with pool_of(scheme, tmp_path) as (pool, space):
        (chunk,) = prompt(space, 1)
        tiles = packed(chunk)
        words = tiles[3, 1, :8].view(np.uint32)
        block = packed_blocks(tuple(plane.width for plane in SPEC.planes), CHUNK)[0]
        words[0] = {"count": block.room + 1, "most": 0xFFFFFFFF, "place": 1}[lie]
        if lie == "place":
            words[1] = block.num_rows * block.width
        if scheme == "file":
            assert space.write([chunk], WHOLE, [tiles], encodings=[PACKED]) == [Status.OK]
        else:
            store_lie(space, chunk, tiles)
        for shard in (Shard(range(3), range(2)), Shard(range(4), range(1))):
            check(space, [chunk], shard)
        assert space.read([chunk], WHOLE, [empty_tiles(SPEC, chunk, WHOLE)]) == [Status.DAMAGED]
        assert not space.exists([chunk])[0]
        assert pool.stats().store.damaged == 1


def test_packing_does_not_make_damage_look_right() -> None:
    """Packed tiles get checksums of their own: raw ones that do not match theirs are not packed."""
    with open_pool("memory://?capacity=4MiB") as pool:
        (chunk,) = prompt(space_of(pool), 1)
    raw = local_tiles(SPEC, chunk, WHOLE)
    sums = tile_sums(raw)
    again = pack_tiles(SPEC, CHUNK, raw, sums)
    assert again is not None
    assert np.array_equal(again, packed(chunk))
    raw[2, 1, 77] ^= 4
    assert pack_tiles(SPEC, CHUNK, raw, sums) is None
    assert pack_tiles(SPEC, CHUNK, raw, sums.reshape(4, 2)) is None
    assert pack_tiles(SPEC, CHUNK, noise(chunk)) is None


def test_eviction_under_readers_gives_right_bytes_or_none(tmp_path: Path) -> None:
    """A small pool of both kinds, written to and read from at once: extents of one length get the other's chunks."""
    with pool_of("shm", tmp_path, "capacity=2MiB&packing=on") as (pool, space):
        prompts = [prompt(space, 3, seed=seed, tail=seed % 7) for seed in range(60)]
        wrong: list[str] = []
        hits = [0]
        stop = threading.Event()

        def read(seed: int) -> None:
            rnd = random.Random(seed)
            while not stop.is_set():
                chunks = rnd.choice(prompts)
                out = [empty_tiles(SPEC, chunk, WHOLE) for chunk in chunks]
                for chunk, tiles, status in zip(chunks, out, space.read(chunks, WHOLE, out), strict=True):
                    if status == Status.OK:
                        hits[0] += 1
                        if not np.array_equal(tiles, local_tiles(SPEC, chunk, WHOLE)):
                            wrong.append(f"{chunk}")
                    elif status != Status.MISS:
                        wrong.append(status.name)

        readers = [threading.Thread(target=read, args=(seed,)) for seed in range(2)]
        for reader in readers:
            reader.start()
        rnd = random.Random(9)
        for _ in range(300):
            chunks = rnd.choice(prompts)
            form = rnd.choice([RAW, PACKED])
            tiles = [
                packed(c)
                if form == PACKED and stored_tile_bytes(SPEC, c.num_tokens, PACKED)
                else local_tiles(SPEC, c, WHOLE)
                for c in chunks
            ]
            forms = [
                PACKED if form == PACKED and stored_tile_bytes(SPEC, c.num_tokens, PACKED) else RAW for c in chunks
            ]
            space.write(chunks, WHOLE, tiles, encodings=forms)
        wait_until(lambda: hits[0] > 20, what="readers find something")
        stop.set()
        for reader in readers:
            reader.join()
        stats = pool.stats().store
        assert not wrong
        assert (stats.damaged, stats.evicted > 0) == (0, True)
        assert pool.verify().clean


# ---- older software ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("scheme", SCHEMES)
def test_who_does_not_know_packed_tiles_says_so_and_leaves_them_alone(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pool_of(scheme, tmp_path) as (pool, space):
        keys = space.keys([0, *range(1, 4 * CHUNK)])
        chunks = keys.chunks()
        write(space, chunks[:2], encoding=RAW)
        write(space, chunks[2:])
        with monkeypatch.context() as patch:
            patch.delitem(ENCODINGS, PACKED)
            encodings._refused.clear()
            front_of(pool)._reader.forget()
            for _ in range(2):
                assert space.match(keys).num_tokens == 2 * CHUNK
                out = [empty_tiles(SPEC, chunk, WHOLE) for chunk in chunks]
                assert space.read(chunks, WHOLE, out) == [Status.OK] * 2 + [Status.MISS] * 2
                assert all((buffer == 0xA5).all() for buffer in out[2:])
            assert encodings_of(pool, chunks) == [RAW, RAW, None, None]
            assert space.write(chunks[2:3], WHOLE, [local_tiles(SPEC, chunks[2], WHOLE)], encodings=[RAW]) == [
                Status.EXISTS
            ]
            report = pool.verify()
            assert (report.clean, report.damaged) == (True, 0)
        assert sum("encoding 1, which this Headwater cannot read" in message for message in caplog.messages) == 1
        assert pool.stats().store.damaged == 0
        assert space.match(keys).num_tokens == 4 * CHUNK
        check(space, chunks)


# ---- administration ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("scheme", ["shm", "memory"])
def test_pins_leases_and_clearing_do_not_care(scheme: str, tmp_path: Path) -> None:
    with pool_of(scheme, tmp_path) as (pool, space):
        keys = space.keys([0, *range(1, 3 * CHUNK)])
        write(space, keys.chunks())
        match = space.match(keys)
        assert space.pin(match)
        for seed in range(1, 300):
            write(space, prompt(space, 1, seed=seed))
        assert pool.stats().store.evicted > 0
        check(space, keys.chunks())
        assert space.unpin(match)
        assert pool.clear() > 0
        assert pool.stats().store.used_bytes == 0
        assert pool.verify().clean


def test_a_tail_that_can_be_packed_where_whole_chunks_cannot() -> None:
    """Rounding makes a packed tile of 15 rows of 4 channels smaller than a raw one, and one of 16 rows not."""
    spec = gqa(layers=1, heads=1, dim=4, dtype="bfloat16")
    assert packed_tile_bytes(spec, 15) > 0 == packed_tile_bytes(spec, 16)
    with open_pool("memory://?capacity=16MiB&packing=on") as pool:
        space = pool.space(identity(), spec, chunk_tokens=16)
        keys, shard = space.keys(list(range(32))), whole_shard(spec)
        chunks = [keys.tail_ref(0, 15), *keys.refs(2)]
        tiles = [local_tiles(spec, chunk, shard) for chunk in chunks]
        assert space.write(chunks, shard, tiles, deadline_s=30) == [Status.OK] * 3
        assert encodings_of(pool, chunks) == [PACKED, RAW, RAW]
        out = [space.empty(chunk, shard) for chunk in chunks]
        assert space.read(chunks, shard, out, deadline_s=30) == [Status.OK] * 3
        assert all(np.array_equal(got, want) for got, want in zip(out, tiles, strict=True))
