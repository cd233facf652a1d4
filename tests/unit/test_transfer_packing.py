"""Packed tiles into the pool and out of it: both movers, all ways to save and load, and what does not fit."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the transfer needs torch")

import transfer_pool_cases  # noqa: E402
from headwater.connector.misfits import Misfits  # noqa: E402
from headwater.kernels.extent import Move, gather_rows, scatter_rows  # noqa: E402
from headwater.kernels.pack import packed_fits  # noqa: E402
from headwater.kernels.pack_check import Coding, agrees, packs_rightly  # noqa: E402
from headwater.kv.encoding import PACKED, RAW, stored_extent_bytes  # noqa: E402
from headwater.kv.hashing import ChunkRef  # noqa: E402
from headwater.kv.packing import packed_blocks  # noqa: E402
from headwater.kv.topology import Shard, Topology, whole_shard  # noqa: E402
from headwater.pool import space as space_module  # noqa: E402
from headwater.pool.space import Space  # noqa: E402
from headwater.stores.base import Status  # noqa: E402
from headwater.transfer import save as save_module  # noqa: E402
from headwater.transfer.convert import PageSpan, plan_spans, scatter  # noqa: E402
from headwater.transfer.movers import cuda as cuda_module  # noqa: E402
from headwater.transfer.save import Saver  # noqa: E402
from headwater.transfer.save_job import SaveRequest  # noqa: E402
from headwater.transfer.view import PagedView  # noqa: E402
from transfer_layer_cases import held_up  # noqa: E402
from transfer_pool_cases import (  # noqa: E402
    CHUNK,
    EXTENT,
    SPEC,
    Done,
    make_cache,
    make_loader,
    make_saver,
    open_space,
    tiles_of,
    write_noise,
)

from support import temporary_url  # noqa: E402

MEMORY = "memory://?capacity=32MiB"
WHOLE = whole_shard(SPEC)

movers = pytest.mark.parametrize("mover", ["cpu", "cuda"], indirect=True)
by_layer = pytest.mark.parametrize("by_layer", [False, True], ids=["whole", "by layer"])


@pytest.fixture(autouse=True)
def mover(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = getattr(request, "param", "cuda")
    monkeypatch.setattr(transfer_pool_cases, "MOVER", name)
    monkeypatch.setattr(space_module, "PACKS_ON_DEVICES", True)
    return name


def save(
    saver: Saver, chunks: Sequence[ChunkRef], blocks: np.ndarray, by_layer: bool, raw: Sequence[bytes] = ()
) -> None:
    if not by_layer:
        saver.save("r", chunks, blocks, frozenset(raw))
    else:
        saver.begin("r", chunks, blocks, frozenset(raw))
        for layer in range(SPEC.num_layers):
            saver.layer_done(layer)
    assert saver.drain(30)


@contextmanager
def one_saver(space: Space, shard: Shard = WHOLE) -> Iterator[tuple[Saver, PagedView, np.ndarray]]:
    view, blocks = make_cache(shard, "cpu")
    saver = make_saver(space, view, shard, staging_bytes=64 * EXTENT, deadline_s=10.0, group_bytes=1)
    try:
        yield saver, view, blocks
    finally:
        saver.close()


def spoil(view: PagedView, chunk: ChunkRef, blocks: np.ndarray, layer: int) -> None:
    """Write noise of all exponents into one layer of a chunk's blocks: none of its tiles can be packed."""
    layers = range(layer, layer + 1)
    plan = plan_spans(view, Shard(layers, view.heads), [PageSpan(blocks, chunk.first_token, chunk.num_tokens)])
    scatter(plan, layers, torch.randint(0, 256, (plan.staged_bytes(1),), dtype=torch.uint8))


def encodings(space: Space, chunks: Sequence[ChunkRef]) -> list[int]:
    loan = space.lend(chunks, WHOLE)
    loan.release()
    assert None not in loan.places
    return loan.encodings


def check_stored(space: Space, view: PagedView, shard: Shard, chunks: list[ChunkRef], blocks: np.ndarray) -> None:
    """What a reader gets is what the cache holds, bit for bit."""
    out = [space.empty(chunk, shard) for chunk in chunks]
    assert set(space.read(chunks, shard, out, deadline_s=30)) == {Status.OK}
    for got, want in zip(out, tiles_of(view, shard, chunks, blocks), strict=True):
        assert np.array_equal(got, want)


@movers
@pytest.mark.parametrize("packing", ["auto", "on", "off"])
def test_who_packs(mover: str, packing: str) -> None:
    """A GPU does unless it is told not to, a CPU where it is told to; never a tail that would not shrink."""
    with open_space(f"{MEMORY}&packing={packing}") as (pool, space, chunks), one_saver(space) as (saver, view, blocks):
        save(saver, chunks, blocks, False)
        is_packed = packing == "on" or (packing == "auto" and mover == "cuda")
        full = PACKED if is_packed else RAW
        assert encodings(space, chunks) == [full] * (len(chunks) - 1) + [RAW]
        check_stored(space, view, WHOLE, chunks, blocks)
        stats, tail = pool.stats().store, SPEC.extent_bytes(chunks[-1].num_tokens)
        assert stats.stored_bytes == (len(chunks) - 1) * stored_extent_bytes(SPEC, CHUNK, full) + tail
        assert stats.stored_raw_bytes == (len(chunks) - 1) * EXTENT + tail
        assert pool.verify().clean


@movers
@by_layer
@pytest.mark.parametrize("scheme", ["shm", "file", "memory"])
@pytest.mark.parametrize("tp", [1, 4])
def test_packed_chunks_come_back(mover: str, by_layer: bool, scheme: str, tp: int, tmp_path: Path) -> None:
    """Saved packed by one topology, loaded by another: the very same bits in the other cache."""
    with temporary_url(scheme, tmp_path, "capacity=32MiB&packing=on") as url, open_space(url) as (pool, space, chunks):
        whole = [np.empty(WHOLE.local_shape(SPEC, c.first_token, c.num_tokens), np.uint8) for c in chunks]
        for rank in range(tp):
            shard = Topology(tp=tp).shard(SPEC, tp_rank=rank)
            with one_saver(space, shard) as (saver, view, blocks):
                save(saver, chunks, blocks, by_layer)
                assert saver.statuses == {Status.OK: len(chunks)}
                for target, tiles in zip(whole, tiles_of(view, shard, chunks, blocks), strict=True):
                    target[:, shard.heads.start : shard.heads.stop] = tiles
        assert all(space.exists(chunks))
        assert pool.stats().store.packed_share < 0.8
        for rank in range(2):
            shard = Topology(tp=2).shard(SPEC, tp_rank=rank)
            view, blocks = make_cache(shard, "cpu")
            done = Done()
            loader = make_loader(space, view, shard, staging_bytes=64 * EXTENT, deadline_s=30.0, on_done=done)
            try:
                loader.load("a", chunks, blocks)
                assert done.next() == ("a", len(chunks))
                assert loader.num_bytes == sum(tiles.nbytes for tiles in tiles_of(view, shard, chunks, blocks))
            finally:
                loader.close()
            for got, want in zip(tiles_of(view, shard, chunks, blocks), whole, strict=True):
                assert np.array_equal(got, want[:, shard.heads.start : shard.heads.stop])
        assert pool.verify().clean


@movers
@by_layer
@pytest.mark.parametrize("scheme", ["shm", "file"])
@pytest.mark.parametrize("layer", [0, 3])
def test_what_does_not_fit_is_stored_raw(mover: str, by_layer: bool, scheme: str, layer: int, tmp_path: Path) -> None:
    """The first try stores what comes before it and says what did not fit; the second, which knows, stores all."""
    with (
        temporary_url(scheme, tmp_path, "capacity=32MiB&packing=on") as url,
        open_space(url) as (pool, space, chunks),
        one_saver(space) as (saver, view, blocks),
    ):
        spoil(view, chunks[3], blocks, layer)
        save(saver, chunks, blocks, by_layer)
        assert space.exists(chunks) == [True] * 3 + [False] * (len(chunks) - 3)
        assert saver.take_misfits() == [chunks[3].key]
        assert saver.take_misfits() == []
        assert saver.take_unsaved() == [("r", chunks[3].first_token)]
        assert saver.num_dropped == len(chunks) - 3
        assert pool.stats().store.pending_bytes == 0
        save(saver, chunks[3:], blocks, by_layer, [chunks[3].key])
        assert all(space.exists(chunks))
        check_stored(space, view, WHOLE, chunks, blocks)
        if scheme == "shm":
            wanted = [PACKED] * 3 + [RAW] + [PACKED] * (len(chunks) - 5) + [RAW]
            assert encodings(space, chunks) == wanted
        assert saver.take_misfits() == []
        assert pool.verify().clean


@movers
@pytest.mark.parametrize("layer", range(4))
def test_what_does_not_fit_is_not_committed_by_batches_that_are_under_way(mover: str, layer: int) -> None:
    """It is found out when the last layers are on their way already, whose end commits whatever is whole."""
    with open_space(f"{MEMORY}&packing=on") as (pool, space, chunks), one_saver(space) as (saver, view, blocks):
        spoil(view, chunks[3], blocks, layer)
        with held_up(space, "reserve") as go:
            saver.begin("r", chunks, blocks)
            for number in range(SPEC.num_layers):
                saver.layer_done(number)
            go.set()
            assert saver.drain(30)
        assert space.exists(chunks) == [True] * 3 + [False] * (len(chunks) - 3)
        assert saver.take_misfits() == [chunks[3].key]
        assert pool.stats().store.pending_bytes == 0
        check_stored(space, view, WHOLE, chunks[:3], blocks)


@movers
@by_layer
def test_no_rank_keeps_what_another_could_not_pack(mover: str, by_layer: bool) -> None:
    """The chunk is aborted for the server; when all ranks know, it is stored raw by all."""
    shards = [Topology(tp=2).shard(SPEC, tp_rank=rank) for rank in range(2)]
    with (
        open_space(f"{MEMORY}&packing=on") as (pool, space, chunks),
        one_saver(space, shards[0]) as (first, first_view, first_blocks),
        one_saver(space, shards[1]) as (other, other_view, other_blocks),
    ):
        spoil(other_view, chunks[2], other_blocks, 1)
        save(first, chunks, first_blocks, by_layer)
        save(other, chunks, other_blocks, by_layer)
        assert space.exists(chunks) == [True] * 2 + [False] * (len(chunks) - 2)
        misfits = [*first.take_misfits(), *other.take_misfits()]
        assert misfits == [chunks[2].key]
        assert pool.stats().store.pending_bytes == 0
        save(first, chunks[2:], first_blocks, by_layer, misfits)
        save(other, chunks[2:], other_blocks, by_layer, misfits)
        assert all(space.exists(chunks))
        assert encodings(space, chunks)[2] == RAW
        check_stored(space, first_view, shards[0], chunks, first_blocks)
        check_stored(space, other_view, shards[1], chunks, other_blocks)
        assert pool.verify().clean


@movers
@by_layer
@pytest.mark.parametrize("scheme", ["shm", "file"])
@pytest.mark.parametrize("is_first", [True, False], ids=["the faster rank is first", "the slower rank is first"])
def test_a_rank_that_packs_what_was_aborted_keeps_nobody_out(
    mover: str, by_layer: bool, scheme: str, is_first: bool, tmp_path: Path
) -> None:
    """It comes to a chunk after another rank has aborted it as a misfit: the raw chunk takes the place of its part."""
    shards = [Topology(tp=2).shard(SPEC, tp_rank=rank) for rank in range(2)]
    with (
        temporary_url(scheme, tmp_path, "capacity=32MiB&packing=on") as url,
        open_space(url) as (pool, space, chunks),
        one_saver(space, shards[0]) as (fast, fast_view, fast_blocks),
        one_saver(space, shards[1]) as (slow, slow_view, slow_blocks),
    ):
        spoil(fast_view, chunks[2], fast_blocks, 1)
        save(fast, chunks, fast_blocks, by_layer)
        assert fast.take_misfits() == [chunks[2].key]
        save(slow, chunks, slow_blocks, by_layer)
        ranks = [(fast, fast_blocks), (slow, slow_blocks)]
        for saver, blocks in ranks if is_first else reversed(ranks):
            save(saver, chunks[2:], blocks, by_layer, [chunks[2].key])
        assert all(space.exists(chunks))
        assert pool.stats().store.pending_bytes == 0
        check_stored(space, fast_view, shards[0], chunks, fast_blocks)
        check_stored(space, slow_view, shards[1], chunks, slow_blocks)


@movers
def test_other_requests_of_a_step_lose_nothing_to_a_misfit(mover: str) -> None:
    with open_space(f"{MEMORY}&packing=on") as (pool, space, chunks), one_saver(space) as (saver, view, blocks):
        other = space.keys(list(range(5000, 5000 + 3 * CHUNK))).refs(3)
        spoil(view, chunks[9], blocks, 2)
        saver.begin("bad", chunks, blocks)
        saver.begin("good", other, blocks)
        for layer in range(SPEC.num_layers):
            saver.layer_done(layer)
        assert saver.drain(30)
        assert all(space.exists(other))
        assert space.exists(chunks) == [True] * 9 + [False] * (len(chunks) - 9)
        assert saver.take_unsaved() == [("bad", chunks[9].first_token)]
        assert pool.stats().store.pending_bytes == 0


class Gate:
    """A sink that holds the saver's thread up before the first layer is stored, until all layers are in the ring."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def wants(self, chunks: Sequence[ChunkRef]) -> bool:
        assert self.opened.wait(30)
        return False

    def noted(self, chunks: Sequence[ChunkRef], layers: range) -> None:
        """Nothing to send."""

    def lost(self, chunks: Sequence[ChunkRef]) -> None:
        """Nothing to send."""


@movers
@pytest.mark.parametrize("spoiled", [[(3, 0), (3, 1), (3, 2)], [(3, 0), (5, 1)], [(5, 0), (3, 1), (4, 2)]])
def test_misfits_in_several_groups_that_are_under_way_together(mover: str, spoiled: list[tuple[int, int]]) -> None:
    """While the first is waited for, the next turn up: nothing of them is committed, or stays pending."""
    with open_space(f"{MEMORY}&packing=on") as (pool, space, chunks):
        view, blocks = make_cache(WHOLE, "cpu")
        for number, layer in spoiled:
            spoil(view, chunks[number], blocks, layer)
        gate = Gate()
        saver = make_saver(space, view, WHOLE, staging_bytes=64 * EXTENT, deadline_s=10.0, group_bytes=1, sink=gate)
        try:
            saver.begin("r", chunks, blocks)
            for layer in range(SPEC.num_layers):
                saver.layer_done(layer)
            gate.opened.set()
            assert saver.drain(30)
            assert space.exists(chunks) == [True] * 3 + [False] * (len(chunks) - 3)
            misfits = saver.take_misfits()
            assert len(misfits) == len(set(misfits))
            assert set(misfits) <= {chunks[number].key for number, _ in spoiled}
            assert saver.take_unsaved() == [("r", chunks[3].first_token)]
            assert pool.stats().store.pending_bytes == 0
            save(saver, chunks, blocks, False, [chunks[number].key for number, _ in spoiled])
            assert saver.statuses == {Status.OK: len(chunks), Status.EXISTS: 3}
            check_stored(space, view, WHOLE, chunks, blocks)
        finally:
            saver.close()


@movers
@pytest.mark.parametrize("scheme", ["shm", "file"])
def test_other_requests_of_a_save_lose_nothing_to_a_misfit(mover: str, scheme: str, tmp_path: Path) -> None:
    """Also where extents are not filled in place."""
    with (
        temporary_url(scheme, tmp_path, "capacity=32MiB&packing=on") as url,
        open_space(url) as (pool, space, chunks),
        one_saver(space) as (saver, view, blocks),
    ):
        other = space.keys(list(range(5000, 5000 + 3 * CHUNK))).refs(3)
        spoil(view, chunks[9], blocks, 2)
        saver.save_all([SaveRequest("bad", chunks, blocks), SaveRequest("good", other, blocks)])
        assert saver.drain(30)
        assert all(space.exists(other))
        assert space.exists(chunks) == [True] * 9 + [False] * (len(chunks) - 9)
        assert saver.take_unsaved() == [("bad", chunks[9].first_token)]
        assert pool.stats().store.pending_bytes == 0


@movers
@by_layer
def test_what_is_stored_raw_is_no_misfit_again(mover: str, by_layer: bool) -> None:
    """Somebody else has stored it, and this server has not heard that it does not fit."""
    with open_space(f"{MEMORY}&packing=on") as (_, space, chunks), one_saver(space) as (saver, view, blocks):
        spoil(view, chunks[1], blocks, 2)
        save(saver, chunks[:2], blocks, by_layer, [chunks[1].key])
        save(saver, chunks, blocks, by_layer)
        assert all(space.exists(chunks))
        assert saver.take_misfits() == []
        assert saver.take_unsaved() == []


@movers
@by_layer
@pytest.mark.parametrize("escapes", [[0xFFFFFFFF], [1, 0x00FFFFFF]], ids=["more than there is room for", "nowhere"])
def test_a_tile_that_nobody_could_have_packed_is_not_placed(mover: str, by_layer: bool, escapes: list[int]) -> None:
    """Its checksum is right, its escapes are not: a writer with a bug, or worse."""
    with open_space(f"{MEMORY}&packing=off") as (_, space, chunks):
        write_noise(space, chunks[:2])
        size = stored_extent_bytes(SPEC, CHUNK, PACKED) // SPEC.num_tiles
        tiles = np.zeros((SPEC.num_layers, SPEC.num_kv_heads, size), np.uint8)
        tiles[..., : 4 * len(escapes)] = np.array(escapes, "<u4").view(np.uint8)
        assert space.write(chunks[2:3], WHOLE, [tiles], encodings=[PACKED]) == [Status.OK]
        view, blocks = make_cache(WHOLE, "cpu")
        before, done = tiles_of(view, WHOLE, chunks[2:3], blocks)[0], Done()
        loader = make_loader(space, view, WHOLE, staging_bytes=64 * EXTENT, deadline_s=30.0, on_done=done)
        try:
            loader.load("a", chunks[:3], blocks, layerwise=by_layer)
            for layer in range(SPEC.num_layers if by_layer else 0):
                loader.wait_layer(layer)
            assert done.next() == ("a", 2)
        finally:
            loader.close()
        if not by_layer:
            assert np.array_equal(tiles_of(view, WHOLE, chunks[2:3], blocks)[0], before)
        assert space.read(chunks[2:3], WHOLE, [space.empty(chunks[2], WHOLE)]) == [Status.MISS]


@pytest.mark.parametrize("what", ["gather", "scatter", "fits", "raises"])
def test_a_device_that_packs_otherwise_is_found_out(what: str, caplog: pytest.LogCaptureFixture) -> None:
    """One bit in one tile, one value of a cache, one tile that is said to fit, or nothing at all."""
    cpu = torch.device("cpu")
    assert agrees(cpu)

    def escapes_end(rows: int, width: int) -> int:
        return packed_blocks((width,), rows)[0].bases

    def gather(move: Move) -> None:
        gather_rows(move)
        unused = move.staged.address + escapes_end(100, 128) - 1  # decodes all the same
        ctypes.c_uint8.from_address(unused).value ^= 1

    def scatter(move: Move) -> None:
        scatter_rows(move)
        ctypes.c_uint8.from_address(move.pages.planes[0][0].address + 16 * 3 * 512).value ^= 1

    def fits(tiles: torch.Tensor, widths: tuple[int, ...], rows: int) -> torch.Tensor:
        return torch.ones_like(packed_fits(tiles, widths, rows))

    wrong = {"gather": Coding(gather=gather), "scatter": Coding(scatter=scatter), "fits": Coding(fits=fits)}
    if what in wrong:
        assert not agrees(cpu, wrong[what])
    else:
        assert not packs_rightly(torch.device("meta"))
        assert "cannot be checked" in caplog.text


@by_layer
def test_where_a_device_does_not_pack_rightly_kv_is_raw(by_layer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It saves raw tiles, and what others have packed is read by the processor."""
    monkeypatch.setattr(save_module, "packs_rightly", lambda device: False)
    monkeypatch.setattr(cuda_module, "packs_rightly", lambda device: False)
    real, placed = cuda_module.CudaPlacer.plan, list[int]()

    def plan(self: Any, chunks: Any, block_ids: Any, encodings: Sequence[int]) -> Any:
        placed.extend(encodings)
        return real(self, chunks, block_ids, encodings)

    monkeypatch.setattr(cuda_module.CudaPlacer, "plan", plan)
    with open_space(f"{MEMORY}&packing=on") as (_, space, chunks):
        whole = write_noise(space, chunks)
        with one_saver(space) as (saver, view, blocks):
            other = space.keys(list(range(7000, 7000 + 3 * CHUNK))).refs(3)
            save(saver, other, blocks, by_layer)
            assert encodings(space, other) == [RAW] * 3
        view, blocks = make_cache(WHOLE, "cpu")
        done = Done()
        loader = make_loader(space, view, WHOLE, staging_bytes=64 * EXTENT, deadline_s=30.0, on_done=done)
        try:
            loader.load("a", chunks, blocks, layerwise=by_layer)
            for layer in range(SPEC.num_layers if by_layer else 0):
                loader.wait_layer(layer)
            assert done.next() == ("a", len(chunks))
        finally:
            loader.close()
        assert set(placed) == {RAW}
        for got, want in zip(tiles_of(view, WHOLE, chunks, blocks), whole, strict=True):
            assert np.array_equal(got, want)


def test_a_model_whose_kv_does_not_fit_is_stored_raw_from_then_on(caplog: pytest.LogCaptureFixture) -> None:
    with open_space(MEMORY) as (_, space, _):
        chunks = space.keys(list(range(40 * CHUNK))).chunks()
    misfits = Misfits()
    assert misfits.raw(chunks) == ()
    misfits.add([chunk.key for chunk in chunks[:31]])
    assert misfits.raw(chunks) == tuple(range(31))
    assert not misfits.is_hopeless
    misfits.add([chunk.key for chunk in chunks[:32]])  # most of them again
    assert misfits.num_chunks == 32
    assert misfits.raw(chunks) == tuple(range(40))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    rare = Misfits()
    for _ in range(100):
        rare.raw(chunks)
    rare.add([chunk.key for chunk in chunks])
    assert not rare.is_hopeless
