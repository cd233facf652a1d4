"""Loads on a CPU that copy out of the store's own memory: the same bytes, verified before they touch the cache."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headwater.kernels.extent_cpu import SpanWriter
from headwater.kv.topology import Topology, whole_shard
from headwater.pool import open_pool
from headwater.stores.base import Status
from headwater.transfer.convert import PageSpan, plan_spans, scatter
from headwater.transfer.load import Loader
from transfer_pool_cases import CHUNK, EXTENT, SPEC, Done, flip_byte, open_space, tiles_of

from support import identity
from transfer_cases import ORDERS, cache_view

MAPPED = "memory://?capacity=16MiB"


def write_all(space: Any, chunks: list[Any]) -> list[np.ndarray]:
    whole = [space.empty(chunk, whole_shard(SPEC)) for chunk in chunks]
    for tiles in whole:
        tiles[...] = np.random.randint(0, 256, tiles.shape, np.uint8)
    assert set(space.write(chunks, whole_shard(SPEC), whole, deadline_s=30)) == {Status.OK}
    return whole


def blocks_of(num_tokens: int, block_size: int, spare: int, *, shuffled: bool) -> np.ndarray:
    count = -(-num_tokens // block_size)
    ids = np.random.permutation(count + spare) if shuffled else np.arange(spare, count + spare)
    return ids[:count].astype(np.int32)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("block_size", "shuffled"), [(8, True), (32, True), (64, True), (2, False), (2, True)])
@pytest.mark.parametrize("tp", [1, 2])
def test_what_is_lent_arrives_as_what_is_read(
    order: tuple[str, ...], block_size: int, shuffled: bool, tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_space(MAPPED) as (pool, space, chunks):
        whole = write_all(space, chunks)
        last = chunks[-1]
        blocks = blocks_of(last.first_token + last.num_tokens, block_size, 5, shuffled=shuffled)
        reads: list[int] = []
        read = space.read
        monkeypatch.setattr(space, "read", lambda *args, **named: reads.append(1) or read(*args, **named))
        for rank in range(tp):
            shard = Topology(tp=tp).shard(SPEC, tp_rank=rank)
            view, data = cache_view(SPEC, shard, num_blocks=len(blocks) + 5, block_size=block_size, order=order)
            plan = plan_spans(view, shard, [PageSpan(blocks, c.first_token, c.num_tokens) for c in chunks])
            before, counted = data.clone(), pool.stats().counts.get("read_bytes", 0)
            mine = [np.ascontiguousarray(t[:, shard.heads.start : shard.heads.stop]) for t in whole]
            scatter(plan, shard.layers, mine)
            expected, _ = data.clone(), data.copy_(before)
            done = Done()
            loader = Loader(space, view, shard, staging_bytes=1 << 20, deadline_s=30.0, on_done=done)
            try:
                loader.load("request", chunks, blocks)
                assert done.next() == ("request", len(chunks))
            finally:
                loader.close()
            assert torch.equal(data, expected)
            assert loader.statuses == {Status.OK: len(chunks)}
            assert pool.stats().counts["read_bytes"] - counted == sum(tiles.nbytes for tiles in mine)
        assert not reads, "what can be lent was read"


@pytest.mark.parametrize("number", [0, 5])
def test_a_byte_that_is_not_right_never_reaches_the_cache(number: int) -> None:
    with open_space(MAPPED) as (pool, space, chunks):
        whole, shard, block_size = write_all(space, chunks), whole_shard(SPEC), 32
        blocks = blocks_of(chunks[-1].first_token + chunks[-1].num_tokens, block_size, 5, shuffled=True)
        view, _ = cache_view(SPEC, shard, num_blocks=len(blocks) + 5, block_size=block_size, order=ORDERS[-1])
        before = tiles_of(view, shard, chunks, blocks)
        flip_byte(space, chunks[number], EXTENT // 2)
        done = Done()
        loader = Loader(space, view, shard, staging_bytes=1 << 20, deadline_s=30.0, on_done=done)
        try:
            loader.load("request", chunks, blocks)
            assert done.next() == ("request", number)
        finally:
            loader.close()
        after = tiles_of(view, shard, chunks, blocks)
        assert all(np.array_equal(got, want) for got, want in zip(after[:number], whole[:number], strict=True))
        assert np.array_equal(after[number], before[number]), "some of a damaged piece was written"
        assert loader.statuses[Status.DAMAGED] == 1
        assert pool.stats().counts["read_damaged"] == 1, "the pool was not asked what is wrong with it"
        assert not space.exists([chunks[number]])[0], "what is damaged must be forgotten"


def test_what_the_first_tier_lends_is_counted_as_its_hits(tmp_path: Any) -> None:
    with open_pool(f"memory://?capacity=16MiB,file://{tmp_path}/below?capacity=16MiB") as pool:
        space = pool.space(identity(), SPEC, chunk_tokens=CHUNK)
        chunks = list(space.keys(list(range(3 * CHUNK))).refs(3))
        whole, shard, done = write_all(space, chunks), whole_shard(SPEC), Done()
        view, _ = cache_view(SPEC, shard, num_blocks=9, block_size=CHUNK, order=ORDERS[0])
        loader = Loader(space, view, shard, staging_bytes=1 << 20, deadline_s=30.0, on_done=done)
        try:
            loader.load("request", chunks, np.arange(3, dtype=np.int32))
            assert done.next() == ("request", 3)
        finally:
            loader.close()
        first = pool.tiers()[0]
        assert first.hits == 3
        assert first.hit_bytes == sum(tiles.nbytes for tiles in whole)


@pytest.mark.parametrize("seed", range(20))
def test_a_writer_puts_every_row_where_a_scatter_does(seed: int) -> None:
    rng = random.Random(seed)
    order, block_size = rng.choice(ORDERS), rng.choice([1, 3, 8, 16])
    shard = Topology(tp=2).shard(SPEC, tp_rank=1)
    view, data = cache_view(SPEC, shard, num_blocks=24, block_size=block_size, order=order)
    capacity = 20 * block_size
    blocks = rng.sample(range(24), 20)
    first = rng.randrange(capacity)
    spans = [PageSpan(blocks, first, rng.randint(1, capacity - first)), PageSpan(blocks, 0, max(1, first))]
    plan = plan_spans(view, shard, spans)
    tiles = [
        np.random.randint(0, 256, shard.local_shape(SPEC, span.first_token, span.num_tokens), np.uint8)
        for span in spans
    ]
    before = data.clone()
    scatter(plan, shard.layers, tiles)
    expected = data.clone()
    data.copy_(before)
    layers = range(len(shard.layers))
    writer = SpanWriter(view.pages, plan.spans, layers)
    for number in range(2):
        for start in range(0, len(layers), 3):
            part = layers[start : start + 3]
            for head in range(len(shard.heads)):
                one = range(head, head + 1)
                writer.write(number, part, one, tiles[number][start : start + 3, head : head + 1])
    assert torch.equal(data, expected)


def test_a_load_that_is_cancelled_while_it_is_handed_to_the_lander_ends(tmp_path: Path) -> None:
    """A cancel that comes when the first loader has let go of the load must find it with the second one."""
    with open_space(f"{MAPPED},file://{tmp_path}/below?capacity=16MiB") as (pool, space, chunks):
        write_all(space, chunks)
        assert pool.flush(30)
        pool._store._front.clear(None)  # type: ignore[attr-defined]
        shard, block_size = whole_shard(SPEC), 32
        blocks = blocks_of(chunks[-1].first_token + chunks[-1].num_tokens, block_size, 5, shuffled=True)
        view, _ = cache_view(SPEC, shard, num_blocks=len(blocks) + 5, block_size=block_size, order=ORDERS[0])
        done = Done()
        loader = Loader(space, view, shard, staging_bytes=1 << 20, deadline_s=30.0, on_done=done)
        lander = loader._lander = loader._make_lander()
        cancel = threading.Thread(target=loader.cancel, args=("request",))
        begin = lander._begin

        class Entered:
            """The lander's lock, which the first loader takes to hand over a load: a cancel comes just before that."""

            def __getattr__(self, name: str) -> Any:
                return getattr(changed, name)

            def __enter__(self) -> None:
                if threading.current_thread() is loader._thread and cancel.ident is None:
                    cancel.start()
                    if not loader._changed._is_owned():  # type: ignore[attr-defined]
                        cancel.join(30)
                changed.__enter__()

            def __exit__(self, *exc: Any) -> None:
                changed.__exit__(*exc)

        def begin_after_the_cancel(load: Any) -> None:
            cancel.join(30)
            begin(load)

        changed, lander._changed = lander._changed, Entered()  # type: ignore[assignment]
        lander._begin = begin_after_the_cancel  # type: ignore[method-assign]
        try:
            loader.load("request", chunks, blocks)
            assert done.next() == ("request", 0)
            assert not cancel.is_alive()
        finally:
            loader.close()
