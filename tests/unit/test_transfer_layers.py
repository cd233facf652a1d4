"""Saves and loads on a CPU that go layer by layer, and loads whose store does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import Shard, Topology, whole_shard
from headwater.pool import open_pool
from headwater.stores.base import Status
from headwater.transfer.layers import MAX_GROUPS, layer_groups, save_group_bytes
from headwater.transfer.load import Loader
from headwater.transfer.movers.cpu import CpuPlacer
from headwater.transfer.save import Saver
from transfer_pool_cases import CHUNK, EXTENT, SPEC, Done, make_cache, open_space, tiles_of

from support import identity, wait_until

ONE_LAYER = 1
"""Groups of so few bytes have one layer each."""


@contextmanager
def saver_of(space: Any, view: Any, shard: Shard, staging_bytes: int = 64 * EXTENT) -> Iterator[Saver]:
    saver = Saver(space, view, shard, staging_bytes=staging_bytes, deadline_s=10.0, group_bytes=ONE_LAYER)
    try:
        yield saver
    finally:
        saver.close()


@contextmanager
def loader_of(space: Any, view: Any, shard: Shard, done: Done, deadline_s: float = 30.0) -> Iterator[Loader]:
    loader = Loader(
        space,
        view,
        shard,
        staging_bytes=64 * EXTENT,
        deadline_s=deadline_s,
        on_done=done,
        group_bytes=ONE_LAYER,
    )
    try:
        yield loader
    finally:
        loader.close()


@given(st.integers(0, 9), st.integers(1, 100), st.integers(1, 1 << 24), st.integers(1, 1 << 26))
def test_groups_are_all_layers_in_order_and_large_enough(first: int, count: int, layer_bytes: int, least: int) -> None:
    layers = range(first, first + count)
    groups = layer_groups(layers, layer_bytes, least)
    assert [layer for group in groups for layer in group] == list(layers)
    assert len(groups) <= MAX_GROUPS
    assert len(groups) == 1 or min(map(len, groups)) * layer_bytes >= least - layer_bytes
    assert max(map(len, groups)) - min(map(len, groups)) <= 1


def test_a_save_on_a_gpu_leaves_in_few_groups_of_which_the_ring_holds_three() -> None:
    mib = 1 << 20
    for total, ring, least in ((1024, 512, 170), (1024, 4096, 256), (8192, 1024, 341), (64, 512, 32)):
        assert save_group_bytes(total * mib, ring * mib, 32 * mib) // mib == least


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_saved_layer_by_layer_and_loaded_layer_by_layer(tp: int) -> None:
    with open_space("memory://?capacity=16MiB") as (pool, space, chunks):
        saved = {}
        for rank in range(tp):
            shard = Topology(tp=tp).shard(SPEC, tp_rank=rank)
            view, blocks = make_cache(shard, "cpu")
            with saver_of(space, view, shard) as saver:
                saver.begin("r", chunks, blocks)
                assert saver.has_open
                for layer in shard.layers:
                    assert not space.exists([chunks[0]])[0], "visible before its last layer is there"
                    saver.layer_done(layer)
                assert not saver.has_open
                saved[rank] = tiles_of(view, shard, chunks, blocks)
                assert saver.drain(10)
                assert saver.statuses == {Status.OK: len(chunks)}
        assert all(space.exists(chunks))
        assert pool.verify().clean
        for rank in range(tp):
            shard = Topology(tp=tp).shard(SPEC, tp_rank=rank)
            view, blocks = make_cache(shard, "cpu")
            done = Done()
            with loader_of(space, view, shard, done) as loader:
                loader.load("a", chunks, blocks, layerwise=True)
                for layer in shard.layers:
                    loader.wait_layer(layer)
                    got = tiles_of(view, shard, chunks, blocks)
                    number = shard.layers.index(layer)
                    for found, want in zip(got, saved[rank], strict=True):
                        assert np.array_equal(found[: number + 1], want[: number + 1])
                assert done.next() == ("a", len(chunks))
                assert not loader.has_open
                assert loader.statuses == {Status.OK: len(chunks)}


def test_layers_are_waited_for_in_their_order() -> None:
    """A layer's wait ends when that layer is there, and not before, nor only with the last."""
    with open_space("memory://?capacity=16MiB") as (_, space, chunks):
        shard = whole_shard(SPEC)
        view, blocks = make_cache(shard, "cpu")
        with saver_of(space, view, shard) as saver:
            saver.save("r", chunks, blocks)
            assert saver.drain(10)
        slow = Gated(space)
        done = Done()
        with loader_of(slow, view, shard, done) as loader:
            loader.load("a", chunks, blocks, layerwise=True)
            passed: list[int] = []
            waiter = threading.Thread(target=lambda: [passed.append(n) for n in shard.layers if _wait(loader, n)])
            waiter.start()
            for layer in shard.layers:
                assert slow.asked.acquire(timeout=10)
                assert passed == list(range(layer)), "waited too little"
                slow.gate.release()
                while len(passed) <= layer:
                    threading.Event().wait(0.001)
            waiter.join(10)
            assert done.next() == ("a", len(chunks))


@pytest.mark.parametrize("mover", ["cpu", "cuda"])
@pytest.mark.parametrize("waited", [[], [0], [1, 2, 3], [0, 2, 3]], ids=str)
def test_a_load_whose_layers_a_step_did_not_wait_for_has_failed(waited: list[int], mover: str) -> None:
    """The step may have read them before they came: it was one graph, or its hooks were lost."""
    with loaded_by(mover) as (loader, shard, chunks, blocks, done):
        assert len(shard.layers) == 4
        for name in "ab":
            loader.load(name, chunks, blocks, layerwise=True)
            for layer in waited:
                loader.wait_layer(layer)
            loader.finish_layers()
            assert done.next() == (name, 0)
        loader.load("c", chunks, blocks, layerwise=True)
        for layer in shard.layers:
            loader.wait_layer(layer)
        assert done.next() == ("c", len(chunks))


@pytest.mark.parametrize("mover", ["cpu", "cuda"])
def test_all_layers_can_be_waited_for_at_once(mover: str) -> None:
    with loaded_by(mover) as (loader, shard, chunks, blocks, done):
        saved = tiles_of(loader.placer._view, shard, chunks, blocks)  # type: ignore[attr-defined]
        others = np.roll(blocks, 1)
        loader.load("a", chunks, others, layerwise=True)
        loader.load("b", chunks[:3], blocks, layerwise=True)
        loader.wait_layers()
        got = tiles_of(loader.placer._view, shard, chunks[4:], others)  # type: ignore[attr-defined]
        assert all(np.array_equal(*pair) for pair in zip(got, saved[4:], strict=True))
        assert {done.next(), done.next()} == {("a", len(chunks)), ("b", 3)}
        assert not loader.has_open
        loader.finish_layers()
        assert done._ends.empty()


@pytest.mark.parametrize("num_there", [1, 2, 3, None], ids=lambda count: f"{count or 'all'} there")
def test_a_long_load_begins_before_all_of_it_was_looked_up(
    monkeypatch: pytest.MonkeyPatch, num_there: int | None
) -> None:
    monkeypatch.setattr("headwater.transfer.pipeline._EARLY_CHUNKS", 2)
    with loaded_by("cuda") as (loader, shard, chunks, blocks, done):
        assert len(chunks) > 4
        sizes, lend = list[int](), loader._pipeline._space.lend

        def lend_noted(asked: Sequence[ChunkRef], *args: Any) -> Any:
            sizes.append(len(asked))
            return lend(asked, *args)

        monkeypatch.setattr(loader._pipeline._space, "lend", lend_noted)
        view = loader.placer._view  # type: ignore[attr-defined]
        saved = tiles_of(view, shard, chunks, blocks)
        count = len(chunks) if num_there is None else num_there
        unknown = loader._pipeline._space.keys([7] * (chunks[-1].first_token + CHUNK)).refs(len(chunks))
        others = np.roll(blocks, 1)
        loader.load("a", [*chunks[:count], *unknown[count:]], others, layerwise=True)
        for layer in shard.layers:
            loader.wait_layer(layer)
        assert done.next() == ("a", count)
        got = tiles_of(view, shard, chunks[:count], others)
        assert all(np.array_equal(*pair) for pair in zip(got, saved, strict=False))
        assert sizes[:2] == [2, len(chunks) - 2][: 1 if count < 2 else 2]


def test_a_step_may_take_longer_than_its_loads_deadline() -> None:
    with loaded_by("cpu") as (loader, shard, chunks, blocks, done):
        loader.load("a", chunks, blocks, layerwise=True)
        loader.wait_layer(0)
        (load,) = loader._open
        wait_until(lambda: load.num_settled is not None)
        with loader._changed:
            load.deadline = 0.0
            loader._changed.notify_all()
        for layer in shard.layers[1:]:
            loader.wait_layer(layer)
        assert done.next() == ("a", len(chunks))


@contextmanager
def loaded_by(mover: str) -> Iterator[tuple[Loader, Shard, list[ChunkRef], Any, Done]]:
    """A loader over a pool that has what is in the cache."""
    with open_space("memory://?capacity=16MiB") as (_, space, chunks):
        shard, done = whole_shard(SPEC), Done()
        view, blocks = make_cache(shard, "cpu")
        with saver_of(space, view, shard) as saver:
            saver.save("r", chunks, blocks)
            assert saver.drain(10)
        options = {"staging_bytes": 64 * EXTENT, "deadline_s": 60.0, "on_done": done, "group_bytes": ONE_LAYER}
        loader = Loader(space, view, shard, mover=mover, **options)
        try:
            yield loader, shard, chunks, blocks, done
        finally:
            loader.close()


def _fail(reason: str) -> None:
    raise RuntimeError(reason)


def _wait(loader: Loader, layer: int) -> bool:
    loader.wait_layer(layer)
    return True


class Gated:
    """A space whose reads wait for a gate each."""

    mapped = False  # then there is one read for all chunks of a group of layers

    def __init__(self, space: Any) -> None:
        self._space = space
        self.asked = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._space, name)

    def read(self, chunks: Sequence[ChunkRef], shard: Shard, out: Any, **options: Any) -> Any:
        self.asked.release()
        self.gate.acquire()
        return self._space.read(chunks, shard, out, **options)


@pytest.mark.parametrize("answers", [True, False])
@pytest.mark.parametrize("layerwise", [False, True])
def test_a_load_ends_by_its_deadline_though_the_store_does_not_answer(
    layerwise: bool, answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what comes late is not written: the blocks may have another owner by then. Nor may the device answer."""
    if not answers:
        monkeypatch.setattr(CpuPlacer, "synchronize", lambda self: _fail("the device is lost"))
    with open_space("memory://?capacity=16MiB") as (_, space, chunks):
        shard = whole_shard(SPEC)
        view, blocks = make_cache(shard, "cpu")
        with saver_of(space, view, shard) as saver:
            saver.save("r", chunks, blocks)
            assert saver.drain(10)
        other, other_blocks = make_cache(shard, "cpu")
        before = tiles_of(other, shard, chunks, other_blocks)
        stuck = Gated(space)
        done = Done()
        with loader_of(stuck, other, shard, done, deadline_s=0.1) as loader:
            loader.load("a", chunks, other_blocks, layerwise=layerwise)
            assert stuck.asked.acquire(timeout=10)
            assert done.next() == ("a", 0)
            loader.wait_layer(shard.layers[-1])  # it has ended, so nobody waits for it
            loader.load("b", chunks, other_blocks)
            assert done.next() == ("b", 0)
            assert loader.statuses[Status.TIMEOUT] == 2 * len(chunks)
            for _ in shard.layers:
                stuck.gate.release()
        after = tiles_of(other, shard, chunks, other_blocks)
        assert all(np.array_equal(*pair) for pair in zip(before, after, strict=True))


def test_a_rank_that_drops_a_chunk_gives_its_room_back_at_once() -> None:
    """TP=2: rank 0 has written its half when rank 1 finds its staging full."""
    group = 77
    with open_pool("memory://?capacity=16MiB", group=group) as pool:
        space = pool.space(identity(), SPEC, chunk_tokens=CHUNK)
        chunks = space.keys(list(range(CHUNK * 6))).refs(6)
        first, second = (Topology(tp=2).shard(SPEC, tp_rank=rank) for rank in (0, 1))
        view, blocks = make_cache(first, "cpu")
        with saver_of(space, view, first) as saver:
            saver.save("r", chunks, blocks)
            assert saver.drain(10)
        assert pool.stats().store.pending_bytes >= 6 * EXTENT
        view, blocks = make_cache(second, "cpu")
        with saver_of(space, view, second, staging_bytes=EXTENT) as saver:  # two slots of half an extent
            saver.save("r", chunks, blocks)
            assert saver.drain(10)
            assert saver.num_dropped == 4
        assert pool.stats().store.pending_bytes == 0
        assert space.exists(chunks) == [True, True, False, False, False, False]


def test_a_step_that_failed_leaves_nothing_behind() -> None:
    with open_space("memory://?capacity=16MiB") as (pool, space, chunks):
        shard = whole_shard(SPEC)
        view, blocks = make_cache(shard, "cpu")
        with saver_of(space, view, shard) as saver:
            saver.begin("r", chunks, blocks)
            saver.layer_done(0)
        assert pool.stats().store.pending_bytes == 0
        assert not any(space.exists(chunks))


@pytest.mark.parametrize("ends_by", ["another begin", "another step's first layer"])
def test_a_step_that_was_not_finished_is_not_saved_at_the_end_of_the_next(ends_by: str) -> None:
    """Some of its chunks were to be taken at its end, out of blocks that are others' by then."""
    with open_space("memory://?capacity=16MiB") as (pool, space, chunks):
        shard = whole_shard(SPEC)
        view, blocks = make_cache(shard, "cpu")
        with saver_of(space, view, shard) as saver:
            saver.save("other", chunks[:2], blocks)
            saver._max_pending = lambda: 2  # type: ignore[method-assign]
            saver.begin("dead", chunks[:6], blocks)
            saver.layer_done(0)
            if ends_by == "another begin":
                saver.begin("next", space.keys(range(9000, 9000 + CHUNK)).refs(1), blocks)
            for layer in range(SPEC.num_layers):
                saver.layer_done(layer)
            saver.end_step()
            assert saver.drain(10)
            assert not any(space.exists(chunks[2:]))
            ((name, first_token),) = saver.take_unsaved()
            assert name == "dead"
            assert first_token <= 2 * CHUNK
        assert pool.stats().store.pending_bytes == 0


@pytest.mark.parametrize("mover", ["cpu", "cuda"])
def test_a_loader_closes_at_once_under_a_load_that_nobody_drives_any_more(mover: str) -> None:
    """Its engine has died in the middle of a step: on a GPU the engine's own thread launches the layers."""
    with open_space("memory://?capacity=16MiB") as (pool, space, chunks):
        shard, done = whole_shard(SPEC), Done()
        view, blocks = make_cache(shard, "cpu")
        with saver_of(space, view, shard) as saver:
            saver.save("r", chunks, blocks)
            assert saver.drain(10)
        options = {"staging_bytes": 4 * EXTENT, "deadline_s": 60.0, "on_done": done, "group_bytes": ONE_LAYER}
        loader = Loader(space, view, shard, mover=mover, **options)
        loader.load("r", chunks, blocks, layerwise=True)
        loader.wait_layer(0)
        begin = time.monotonic()
        loader.close(timeout_s=20.0)
        assert time.monotonic() - begin < 10.0
        name, count = done.next()
        assert name == "r"
        assert count in ((0, len(chunks)) if mover == "cpu" else (0,)), "all of it, or nothing"
        assert not loader._thread.is_alive()
        assert not pool._store._core.members.published()  # type: ignore[attr-defined]
