"""Saves and loads of a device's cache through a pool, against the CPU's own way. Run on a CPU and on a GPU."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from headwater.kv.encoding import PACKED, RAW, stored_extent_bytes
from headwater.kv.hashing import ChunkRef
from headwater.kv.spec import KVSpec
from headwater.kv.topology import Shard, Topology, whole_shard
from headwater.pool import open_pool
from headwater.pool.pool import Pool
from headwater.pool.space import Space
from headwater.stores.base import Status
from headwater.stores.encode import pack_tiles
from headwater.transfer.convert import PageSpan, gather, plan_spans
from headwater.transfer.load import Loader
from headwater.transfer.save import Saver
from headwater.transfer.save_job import SaveRequest
from headwater.transfer.view import PagedView

from support import identity
from transfer_cases import ORDERS, cache_view, make_packable

SPEC = KVSpec.gqa(num_layers=4, num_kv_heads=8, head_dim=16, dtype="bfloat16")
CHUNK, BLOCK, TOKENS = 32, 8, 32 * 12 + 5
BLOCKS = -(-TOKENS // BLOCK)
EXTENT = SPEC.extent_bytes(CHUNK)


MOVER: str | None = None
"""The mover under test; None: that of the cache's device. CUDA's also runs over CPU tensors, all but its streams."""


def make_saver(*args: Any, **options: Any) -> Saver:
    """A saver with the mover under test."""
    return Saver(*args, **{"mover": MOVER, **options})


def make_loader(*args: Any, **options: Any) -> Loader:
    """A loader with the mover under test."""
    return Loader(*args, **{"mover": MOVER, **options})


def has_all_staging(loader: Loader) -> bool:
    """Whether nothing of a loader's staging is taken; the CPU's mover has none."""
    ring = getattr(loader.placer, "ring", None)
    return ring is None or ring.num_free == ring.count


@contextmanager
def open_space(url: str) -> Iterator[tuple[Pool, Space, list[ChunkRef]]]:
    """A pool, and the chunks of one prompt with a tail."""
    with open_pool(url) as pool:
        space = pool.space(identity(), SPEC, chunk_tokens=CHUNK)
        keys = space.keys(list(range(TOKENS)))
        full = TOKENS // CHUNK
        yield pool, space, [*keys.refs(full), keys.tail_ref(full, TOKENS - full * CHUNK)]


def make_cache(shard: Shard, device: str, order: tuple[str, ...] = ORDERS[0]) -> tuple[PagedView, np.ndarray]:
    """A cache full of noise, and a request's blocks in it."""
    view, _ = cache_view(SPEC, shard, num_blocks=BLOCKS + 6, block_size=BLOCK, order=order, device=device)
    return view, np.random.permutation(BLOCKS + 6)[:BLOCKS].astype(np.int32)


def tiles_of(view: PagedView, shard: Shard, chunks: list[ChunkRef], blocks: np.ndarray) -> list[np.ndarray]:
    """What the cache holds of some chunks, in extent order."""
    plan = plan_spans(view, shard, [PageSpan(blocks, chunk.first_token, chunk.num_tokens) for chunk in chunks])
    flat = torch.empty(plan.staged_bytes(len(shard.layers)), dtype=torch.uint8, device=view.device)
    gather(plan, shard.layers, flat)
    return [tiles.cpu().numpy() for group in plan.staged(flat, len(shard.layers)) for tiles in group]


class Done:
    """Collects the ends of loads."""

    def __init__(self) -> None:
        self._ends: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()

    def __call__(self, name: str, count: int) -> None:
        self._ends.put((name, count))

    def next(self) -> tuple[str, int]:
        return self._ends.get(timeout=30)


def save_all(space: Space, device: str, topology: Topology, chunks: list[ChunkRef], ring: int) -> list[np.ndarray]:
    """Save as every rank of a topology; the whole tiles of each chunk, as the caches hold them."""
    whole = [np.empty(whole_shard(SPEC).local_shape(SPEC, c.first_token, c.num_tokens), np.uint8) for c in chunks]
    filled = set()
    for rank in range(topology.tp):
        shard = topology.shard(SPEC, tp_rank=rank)
        view, blocks = make_cache(shard, device, ORDERS[rank % 3])
        if shard.replica and filled:
            continue  # noise differs between replicas, which real KV does not
        saver = make_saver(space, view, shard, staging_bytes=ring, deadline_s=10.0)
        try:
            done = 0
            while done < len(chunks):
                assert saver.wait_for_room(1, 30)
                room = saver.ring.num_free
                saver.save("r", chunks[done : done + room], blocks)
                done += room
            expected = tiles_of(view, shard, chunks, blocks)
            assert saver.drain(30)
            assert saver.num_dropped == 0
            assert saver.statuses == {Status.OK: len(chunks)}, saver.statuses
            assert saver.num_bytes == sum(tiles.nbytes for tiles in expected)
        finally:
            saver.close()
        for target, tiles in zip(whole, expected, strict=True):
            target[shard.layers.start : shard.layers.stop, shard.heads.start : shard.heads.stop] = tiles
        filled.add(rank)
    return whole


def check_save(url: str, device: str, tp: int, ring: int) -> None:
    """Saved on the device by every rank, read on the CPU with other topologies: equal bytes, all visible."""
    with open_space(url) as (pool, space, chunks):
        whole = save_all(space, device, Topology(tp=tp), chunks, ring)
        assert all(space.exists(chunks))
        for other in (1, 2, 4):
            for rank in range(other):
                shard = Topology(tp=other).shard(SPEC, tp_rank=rank)
                out = [space.empty(chunk, shard) for chunk in chunks]
                assert set(space.read(chunks, shard, out, deadline_s=30)) == {Status.OK}
                for got, want in zip(out, whole, strict=True):
                    assert np.array_equal(got, want[:, shard.heads.start : shard.heads.stop])
        assert pool.verify().clean


def check_save_together(url: str, device: str, ring: int) -> None:
    """Three requests, two of which begin alike and one of which has another tenant: saved by two gathers, each chunk
    once and with the bytes of the first that has it."""
    with open_space(url) as (pool, space, chunks):
        shard = whole_shard(SPEC)
        view, _ = cache_view(SPEC, shard, num_blocks=3 * BLOCKS, block_size=BLOCK, order=ORDERS[0], device=device)
        blocks = np.random.permutation(3 * BLOCKS).astype(np.int32).reshape(3, BLOCKS)
        like = [*range(4 * CHUNK), *range(5000, 5000 + CHUNK + 7)]
        keys = space.keys(like)
        alike = [*keys.refs(5), keys.tail_ref(5, 7)]
        other = space.keys(list(range(3 * CHUNK)), tenant=b"another").refs(3)
        assert [chunk.key for chunk in alike[:4]] == [chunk.key for chunk in chunks[:4]]
        saver = make_saver(space, view, shard, staging_bytes=ring, deadline_s=10.0)
        gathers, launch = [], saver._gather
        saver._gather = lambda *args, **more: (gathers.append(args), launch(*args, **more))[1]  # type: ignore[method-assign]
        saver.save_all(
            [
                SaveRequest("a", chunks, blocks[0]),
                SaveRequest("b", alike, blocks[1]),
                SaveRequest("c", other, blocks[2]),
            ]
        )
        assert saver.drain(30)
        expected = tiles_of(view, shard, chunks, blocks[0]) + tiles_of(view, shard, alike[4:], blocks[1])
        expected += tiles_of(view, shard, other, blocks[2])
        every = [*chunks, *alike[4:], *other]
        assert len(gathers) == 2
        assert saver.num_dropped == 0
        assert saver.statuses == {Status.OK: len(every)}
        saver.close()
        for chunk, want in zip(every, expected, strict=True):
            out = [space.empty(chunk, shard)]
            assert space.read([chunk], shard, out, deadline_s=30) == [Status.OK]
            assert np.array_equal(out[0], want)
        assert pool.verify().clean


def write_noise(space: Space, chunks: list[ChunkRef]) -> list[np.ndarray]:
    """Store chunks, every other one packed; their raw tiles."""
    shard = whole_shard(SPEC)
    whole = [space.empty(chunk, shard) for chunk in chunks]
    for number, (chunk, tiles) in enumerate(zip(chunks, whole, strict=True)):
        tiles[...] = np.random.randint(0, 256, tiles.shape, np.uint8)
        make_packable(torch.from_numpy(tiles.reshape(-1)))
        packed = pack_tiles(SPEC, chunk.num_tokens, tiles) if number % 2 else None
        assert packed is not None or not number % 2 or chunk.num_tokens < CHUNK
        given, encoding = (tiles, RAW) if packed is None else (packed, PACKED)
        assert space.write([chunk], shard, [given], encodings=[encoding], deadline_s=30) == [Status.OK]
    return whole


def check_load(url: str, device: str, tp: int, ring: int) -> None:
    """Written by the CPU, loaded on the device by every rank of a topology."""
    with open_space(url) as (_, space, chunks):
        whole = write_noise(space, chunks)
        for rank in range(tp):
            shard = Topology(tp=tp).shard(SPEC, tp_rank=rank)
            view, blocks = make_cache(shard, device, ORDERS[(rank + 1) % 3])
            done = Done()
            loader = make_loader(space, view, shard, staging_bytes=ring, deadline_s=30.0, on_done=done)
            try:
                loader.load("a", chunks, blocks)
                assert done.next() == ("a", len(chunks))
                got = tiles_of(view, shard, chunks, blocks)
                for found, want in zip(got, whole, strict=True):
                    assert np.array_equal(found, want[:, shard.heads.start : shard.heads.stop])
                assert has_all_staging(loader)
                assert loader.statuses == {Status.OK: len(chunks)}
            finally:
                loader.close()


def flip_byte(space: Space, chunk: ChunkRef, offset: int) -> None:
    """Damage one byte of a stored chunk: the one at this offset, or so far into what is packed."""
    loan = space.lend([chunk], whole_shard(SPEC))
    place = loan.places[0]
    assert place is not None
    stored = stored_extent_bytes(SPEC, chunk.num_tokens, loan.encodings[0])
    place.segment[place.offset + offset * stored // SPEC.extent_bytes(chunk.num_tokens)] ^= 0x10
    loan.release()


def pending_extent(space: Space, kind: str = "cpu") -> int:
    """What one full chunk takes in the pool, as the mover under test saves it, or that of this kind."""
    on_device = (MOVER or kind) == "cuda"
    return stored_extent_bytes(SPEC, CHUNK, space.encoding(CHUNK, whole_shard(SPEC), on_device=on_device))


def check_damage(url: str, device: str) -> None:
    """A flipped byte is found where it landed; nothing from there on is reported, and no byte of the damaged chunk is
    written. The processor's copy threads may have written whole chunks behind it by then, which verified."""
    with open_space(url) as (pool, space, chunks):
        stored = save_all(space, device, Topology(), chunks, 64 * EXTENT)
        shard = whole_shard(SPEC)
        flip_byte(space, chunks[5], EXTENT // 2)
        view, blocks = make_cache(shard, device)
        before = tiles_of(view, shard, chunks, blocks)
        done = Done()
        loader = make_loader(space, view, shard, staging_bytes=64 * EXTENT, deadline_s=30.0, on_done=done)
        try:
            loader.load("a", chunks, blocks)
            assert done.next() == ("a", 5)
            assert loader.statuses == {Status.OK: 5, Status.DAMAGED: 1}
            after = tiles_of(view, shard, chunks, blocks)
            assert np.array_equal(before[5], after[5])
            for was, now, good in zip(before[6:], after[6:], stored[6:], strict=True):
                assert np.array_equal(was, now) or (device == "cpu" and np.array_equal(now, good))
            assert not space.exists([chunks[5]])[0], "what is damaged must be forgotten"
            loader.load("b", chunks, blocks)
            assert done.next() == ("b", 5)
        finally:
            loader.close()
        assert pool.stats().store.damaged == 1


def check_several_by_layers(url: str, device: str, ring: int, group_bytes: int | None) -> None:
    """Three requests whose KV comes along with one step: each ends by itself, whatever becomes of the others."""
    shard, full, damaged = whole_shard(SPEC), TOKENS // CHUNK, 5
    with open_pool(url) as pool:
        space = pool.space(identity(), SPEC, chunk_tokens=CHUNK)
        requests = [space.keys(list(range(start, start + TOKENS))).refs(full) for start in (0, 1000, 2000)]
        view, _ = cache_view(SPEC, shard, num_blocks=3 * BLOCKS + 6, block_size=BLOCK, order=ORDERS[0], device=device)
        blocks = np.random.permutation(3 * BLOCKS + 6)[: 3 * BLOCKS].astype(np.int32).reshape(3, BLOCKS)
        saver = make_saver(space, view, shard, staging_bytes=full * EXTENT, deadline_s=10.0)
        for chunks, ids in zip(requests, blocks, strict=True):
            saver.save("r", chunks, ids)
            assert saver.drain(30)
        saver.close()
        expected = [tiles_of(view, shard, chunks, ids) for chunks, ids in zip(requests, blocks, strict=True)]
        flip_byte(space, requests[1][damaged], EXTENT - 3)
        view, _ = cache_view(SPEC, shard, num_blocks=3 * BLOCKS + 6, block_size=BLOCK, order=ORDERS[1], device=device)
        done = Done()
        loader = make_loader(
            space, view, shard, staging_bytes=ring, deadline_s=30.0, on_done=done, group_bytes=group_bytes
        )
        try:
            for number, chunks in enumerate(requests):
                loader.load(str(number), chunks, blocks[number], layerwise=True)
            for layer in shard.layers:
                loader.wait_layer(layer)
            loader.finish_layers()
            assert dict(done.next() for _ in requests) == {"0": full, "1": damaged, "2": full}
            for number, count in ((0, full), (1, damaged), (2, full)):
                found = tiles_of(view, shard, list(requests[number][:count]), blocks[number])
                assert all(np.array_equal(mine, want) for mine, want in zip(found, expected[number], strict=False))
            assert loader.statuses == {Status.OK: 2 * full + damaged, Status.DAMAGED: 1}
        finally:
            loader.close()
        assert has_all_staging(loader)


def check_bounds(url: str, device: str) -> None:
    """More than fits is dropped, counted, and harms nothing; a cancelled load ends; close is idempotent."""
    with open_space(url) as (_, space, chunks):
        shard = whole_shard(SPEC)
        view, blocks = make_cache(shard, device)
        saver = make_saver(space, view, shard, staging_bytes=4 * EXTENT, deadline_s=10.0)
        saver.save("r", chunks, blocks)
        assert saver.drain(30)
        assert saver.num_dropped >= len(chunks) - saver.ring.count - 8
        assert saver.statuses[Status.OK] == len(chunks) - saver.num_dropped
        saver.save("r", chunks[:2], blocks)
        assert saver.drain(30)
        assert saver.statuses[Status.EXISTS] == 2
        saver.close()
        saver.close()
        done = Done()
        loader = make_loader(space, view, shard, staging_bytes=2 * EXTENT, deadline_s=30.0, on_done=done)
        lend = space.lend

        def cancel_first(*args: Any) -> Any:
            loader.cancel("a")
            return lend(*args)

        space.lend = cancel_first  # type: ignore[method-assign]
        loader.load("a", chunks, blocks)
        assert done.next() == ("a", 0)
        space.lend = lend  # type: ignore[method-assign]
        loader.load("b", chunks, blocks)
        assert done.next() == ("b", space.exists(chunks).count(True))
        loader.close()
        loader.close()
