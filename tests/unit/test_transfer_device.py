"""Saves and loads over CPU tensors with both movers. CUDA's runs there without streams and registration."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the transfer needs torch")

import transfer_pool_cases  # noqa: E402
from headwater.errors import StoreError  # noqa: E402
from headwater.kv.hashing import ChunkRef  # noqa: E402
from headwater.kv.topology import Topology, whole_shard  # noqa: E402
from headwater.pool import Pool, Space  # noqa: E402
from headwater.pool import space as space_module  # noqa: E402
from headwater.stores.base import Status  # noqa: E402
from headwater.transfer import batching, extents  # noqa: E402
from headwater.transfer.copy import Copy, run_copies  # noqa: E402
from headwater.transfer.extents import ExtentPiece, copy_extents  # noqa: E402
from headwater.transfer.load import Loader  # noqa: E402
from headwater.transfer.load_job import Load  # noqa: E402
from headwater.transfer.movers import cuda  # noqa: E402
from headwater.transfer.movers.cpu import CpuPlacer  # noqa: E402
from headwater.transfer.pipeline import Pipeline  # noqa: E402
from headwater.transfer.ring import Room, StagingRing  # noqa: E402
from headwater.transfer.save import Saver  # noqa: E402
from transfer_layer_cases import (  # noqa: E402
    check_abandoned,
    check_deadline,
    check_failed_launch,
    check_full_ring,
    check_layer_damage,
    check_layer_load,
    check_layer_save,
    check_never_computed,
    check_save_in_a_step,
    write_noise,
)
from transfer_pool_cases import (  # noqa: E402
    EXTENT,
    SPEC,
    check_bounds,
    check_damage,
    check_load,
    check_save,
    check_save_together,
    check_several_by_layers,
    flip_byte,
    make_cache,
    make_saver,
    open_space,
    tiles_of,
)

from support import wait_until  # noqa: E402

MAPPED = "memory://?capacity=32MiB"

only_cuda = pytest.mark.parametrize("mover", ["cuda", "cuda, packed"], indirect=True)
"""For what the other mover does not do."""


@pytest.fixture(autouse=True, params=["cpu", "cuda", "cuda, packed"])
def mover(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name, _, packed = request.param.partition(", ")
    monkeypatch.setattr(transfer_pool_cases, "MOVER", name)
    monkeypatch.setattr(space_module, "PACKS_ON_DEVICES", bool(packed))
    return str(name)


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("ring", [2 * EXTENT // 8, 64 * EXTENT])
def test_saves_and_loads(tp: int, ring: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_FIRST_BATCH", "_LAST_BATCH"):
        monkeypatch.setattr(batching, name, 2)  # many batches of few chunks
    check_save(MAPPED, "cpu", tp, ring)
    check_load(MAPPED, "cpu", tp, ring)


@only_cuda
def test_loads_take_the_ring_in_large_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happens to be free would be less and less, and every piece costs the host the same."""
    real, short = StagingRing.take, list[int]()

    def take(ring: StagingRing, unit_bytes: int, count: int, *, least: int = 1) -> Room | None:
        room = real(ring, unit_bytes, count, least=least)
        is_at_end = room is not None and room.start + (room.num_units + 1) * unit_bytes > ring.count * ring.slot_bytes
        if room is not None and room.num_units < count and not is_at_end:
            short.append(room.num_units)
        return room

    monkeypatch.setattr(StagingRing, "take", take)
    check_load(MAPPED, "cpu", 1, 9 * EXTENT)
    assert not short


def test_requests_are_saved_together(tmp_path: Path) -> None:
    check_save_together(MAPPED, "cpu", 64 * EXTENT)
    check_save_together(f"file://{tmp_path}/a?capacity=32MiB", "cpu", 64 * EXTENT)


def test_what_was_copied_before_a_failure_is_stored_with_its_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checksums come when three batches are under way, or all of them; here there is only one."""
    monkeypatch.setattr(batching, "_FIRST_BATCH", 4)
    with open_space(MAPPED) as (pool, space, chunks):
        shard, reserve, num_calls = whole_shard(SPEC), space.reserve, count()

        def fail_later(*args: Any, **options: Any) -> Any:
            if next(num_calls):
                raise StoreError("gone")
            return reserve(*args, **options)

        view, blocks = make_cache(shard, "cpu")
        saver = make_saver(space, view, shard, staging_bytes=64 * EXTENT, deadline_s=10.0)
        monkeypatch.setattr(space, "reserve", fail_later)
        saver.save("r", chunks, blocks)
        assert saver.drain(30)
        saver.close()
        assert saver.statuses == {Status.OK: 4}
        assert saver.num_dropped == len(chunks) - 4
        assert space.exists(chunks) == [True] * 4 + [False] * (len(chunks) - 4)
        out = [space.empty(chunk, shard) for chunk in chunks[:4]]
        assert space.read(chunks[:4], shard, out) == [Status.OK] * 4
        for got, want in zip(out, tiles_of(view, shard, chunks[:4], blocks), strict=True):
            assert np.array_equal(got, want)
        assert pool.verify().clean


def _save_again(saver: Saver, pool: Pool, space: Space, chunks: list[ChunkRef], blocks: np.ndarray) -> None:
    """After a failure nothing is held back, and nothing stands in the way of the next save."""
    assert saver.ring.num_free == saver.ring.count
    saver.save("r", chunks, blocks)
    assert saver.drain(30)
    assert all(space.exists(chunks))
    saver.close()
    assert pool.verify().clean


@only_cuda
def test_without_checksums_nothing_is_stored_and_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_FIRST_BATCH", "_LAST_BATCH"):
        monkeypatch.setattr(batching, name, 3)
    with open_space(MAPPED) as (pool, space, chunks):
        shard = whole_shard(SPEC)
        view, blocks = make_cache(shard, "cpu")
        saver = make_saver(space, view, shard, staging_bytes=64 * EXTENT, deadline_s=10.0)
        with monkeypatch.context() as broken:
            broken.setattr(cuda, "staged_checksums", lambda *args: 1 / 0)
            for num_layers in (0, SPEC.num_layers):
                saver.save("r", chunks, blocks) if not num_layers else saver.begin("r", chunks, blocks)
                for layer in range(num_layers):
                    saver.layer_done(layer)
                assert saver.drain(30)
        assert saver.num_dropped == 2 * len(chunks)
        assert not any(space.exists(chunks))
        _save_again(saver, pool, space, chunks, blocks)


@pytest.mark.parametrize("by_layer", [False, True], ids=["whole", "by layer"])
def test_a_rank_that_is_behind_waits_for_nothing_that_was_given_up(by_layer: bool) -> None:
    with open_space(MAPPED) as (pool, space, chunks):
        savers = list[Saver]()
        for rank in range(2):
            shard = Topology(tp=2).shard(SPEC, tp_rank=rank)
            view, blocks = make_cache(shard, "cpu")
            saver = make_saver(space, view, shard, staging_bytes=64 * EXTENT, deadline_s=10.0)
            savers.append(saver)
            if not rank:  # the first has room for two chunks
                assert saver.ring.take(saver.ring.slot_bytes, saver.ring.count - 2) is not None
            if not by_layer:
                saver.save("r", chunks, blocks)
            else:
                saver.begin("r", chunks, blocks)
                for layer in range(SPEC.num_layers):
                    saver.layer_done(layer)
            assert saver.drain(30)
        assert savers[0].num_dropped == len(chunks) - 2
        wait_until(lambda: pool.stats().store.pending_bytes == 0, 10, "what nobody completes is given up")
        assert space.exists(chunks) == [True] * 2 + [False] * (len(chunks) - 2)
        for saver in savers:
            saver.close()
        assert pool.verify().clean


@only_cuda
@pytest.mark.parametrize("number", range(3))
def test_a_failure_beside_the_copies_loses_nothing_else(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is launched for the batch that was just begun fails: what was begun is stored or given up, each once."""
    for name in ("_FIRST_BATCH", "_LAST_BATCH"):
        monkeypatch.setattr(batching, name, 3)
    with open_space(MAPPED) as (pool, space, chunks):
        shard, num_calls = whole_shard(SPEC), count()

        def fail_once(*args: Any) -> None:
            if next(num_calls) == number:
                raise RuntimeError("no launch")

        view, blocks = make_cache(shard, "cpu")
        saver = make_saver(space, view, shard, staging_bytes=64 * EXTENT, deadline_s=10.0)
        monkeypatch.setattr(cuda, "touch_extents", fail_once)
        saver.save("r", chunks, blocks)
        assert saver.drain(30)
        assert saver.num_dropped + saver.statuses[Status.OK] == len(chunks)
        assert saver.statuses[Status.OK] == sum(space.exists(chunks)) == 3 * (number + 1)
        _save_again(saver, pool, space, chunks, blocks)


@pytest.mark.parametrize("tp", [1, 2, 8, 16])
@pytest.mark.parametrize("ring", [2 * EXTENT // 8, 3 * EXTENT, 64 * EXTENT])
def test_layer_by_layer(tp: int, ring: int) -> None:
    check_layer_save(MAPPED, "cpu", tp, ring)
    check_layer_load(MAPPED, "cpu", tp, ring)


@pytest.mark.parametrize("group_bytes", [2 * EXTENT // 8, 2 * EXTENT, 6 * EXTENT])
@pytest.mark.parametrize("tp", [1, 8])
def test_in_groups_of_layers(tp: int, group_bytes: int) -> None:
    check_layer_save(MAPPED, "cpu", tp, 64 * EXTENT, group_bytes)


def test_layer_by_layer_where_the_store_is_not_mapped(tmp_path: Path) -> None:
    check_layer_save(f"file://{tmp_path}/a?capacity=32MiB", "cpu", 2, 16 * EXTENT)
    check_layer_load(f"file://{tmp_path}/b?capacity=32MiB", "cpu", 2, 4 * EXTENT)


@pytest.mark.parametrize("layer", [0, 2, 3])
def test_a_damaged_tile_ends_a_load_by_layers(layer: int) -> None:
    check_layer_damage(MAPPED, "cpu", layer)


def test_chunks_before_a_damaged_one_are_waited_for(mover: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another request of the same step may share them, and nobody tells it that the load has failed."""
    bring = CpuPlacer.bring

    def bring_late(self: CpuPlacer, load: Load, batch: Any, layers: range) -> None:
        if layers[0]:
            threading.Event().wait(0.05)
        bring(self, load, batch, layers)

    monkeypatch.setattr(CpuPlacer, "bring", bring_late)
    with open_space(MAPPED) as (_, space, chunks):
        shard, done = whole_shard(SPEC), transfer_pool_cases.Done()
        view, blocks = make_cache(shard, "cpu")
        whole = write_noise(space, chunks)
        flip_byte(space, chunks[5], 3)
        loader = transfer_pool_cases.make_loader(
            space, view, shard, staging_bytes=64 * EXTENT, deadline_s=30.0, on_done=done, group_bytes=1
        )
        loader.load("r", chunks, blocks, layerwise=True)
        for number, layer in enumerate(shard.layers):
            loader.wait_layer(layer)
            found = tiles_of(view, shard, chunks[:5], blocks)
            assert all(np.array_equal(mine[number], want[number]) for mine, want in zip(found, whole, strict=False))
        loader.finish_layers()
        assert done.next() == ("r", 5)
        loader.close()


@pytest.mark.parametrize("group_bytes", [1, None])
def test_several_requests_come_along_with_one_step(group_bytes: int | None) -> None:
    check_several_by_layers(MAPPED, "cpu", 4 * EXTENT, group_bytes)


@only_cuda
def test_a_load_that_lost_a_chunk_before_it_was_handed_over_brings_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step gets to its first layer while the loader's thread, which knows of the damage, has not let go of it."""
    start, wait, waits = Pipeline.start_layers, Loader._wait_begun, threading.Event()

    def slow_start(self: Pipeline, load: Load) -> None:
        start(self, load)
        assert waits.wait(5), "the step went on"

    def wait_begun(self: Loader, load: Load, layer: int) -> bool:
        waits.set()
        return wait(self, load, layer)

    monkeypatch.setattr(Pipeline, "start_layers", slow_start)
    monkeypatch.setattr(Loader, "_wait_begun", wait_begun)
    check_layer_damage(MAPPED, "cpu", 0)


@only_cuda
def test_a_full_ring_in_the_middle_of_a_step() -> None:
    check_full_ring(MAPPED, "cpu")


def test_a_step_that_was_not_finished() -> None:
    check_abandoned(MAPPED, "cpu")


def test_a_step_that_was_not_begun() -> None:
    check_never_computed(MAPPED, "cpu")


@pytest.mark.parametrize("layer", [0, 1, 3])
def test_a_launch_that_fails(layer: int) -> None:
    check_failed_launch(MAPPED, "cpu", layer)


def test_a_save_in_the_middle_of_a_step() -> None:
    check_save_in_a_step(MAPPED, "cpu")


def test_nobody_waits_longer_than_the_deadline() -> None:
    check_deadline(MAPPED, "cpu")


def test_stores_that_are_not_mapped(tmp_path: Path) -> None:
    check_save(f"file://{tmp_path}/a?capacity=32MiB", "cpu", 2, 4 * EXTENT)
    check_load(f"file://{tmp_path}/b?capacity=32MiB", "cpu", 2, 4 * EXTENT)


def test_damage() -> None:
    check_damage(MAPPED, "cpu")


def test_bounds() -> None:
    check_bounds(MAPPED, "cpu")


@only_cuda
def test_without_registration_other_ranks_tiles_survive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.transfer.registered.Registered.address", lambda self, segment: None)
    check_save(MAPPED, "cpu", 2, 8 * EXTENT)
    check_load(MAPPED, "cpu", 2, 8 * EXTENT)


@only_cuda
def test_no_copy_crosses_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments may be neighbours in memory, but each is registered by itself."""
    segment_bytes = 4 * EXTENT
    calls: list[Copy] = []

    def spy(copies: Iterable[Copy], device: torch.device) -> None:
        listed = list(copies)
        calls.extend(listed)
        run_copies(listed, device)

    # One registration after another in one stretch of memory: what joins them would show.
    memory = np.zeros(8 * segment_bytes, np.uint8)
    shard, step = whole_shard(SPEC), EXTENT
    starts = [memory.ctypes.data + number * step for number in range(12)]
    staging = np.zeros(12 * EXTENT, np.uint8)
    tile = EXTENT // SPEC.num_tiles
    stored = [(number // 4, start) for number, start in enumerate(starts)]
    staged = [staging.ctypes.data + number * EXTENT for number in range(12)]
    monkeypatch.setattr(extents, "run_copies", spy)
    copy_extents(ExtentPiece(shard, tile), stored, staged, SPEC.num_kv_heads, torch.device("cpu"), to_host=True)
    assert [copy.depth for copy in calls] == [4, 4, 4]
