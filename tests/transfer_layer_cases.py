"""Saves and loads that go layer by layer, beside a computation that reads and writes the cache. On a CPU and a GPU.

The "computation" is a stream of its own: it writes a layer's KV just before it says that it is done, and reads a layer
just after it was told that it may. On a GPU it is slow, so that whoever does not wait is caught.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import Shard, Topology, whole_shard
from headwater.stores.base import Status
from headwater.transfer import save
from headwater.transfer.convert import PageSpan, gather, plan_spans, scatter
from headwater.transfer.load import Loader
from headwater.transfer.view import PagedView
from transfer_pool_cases import (
    EXTENT,
    SPEC,
    Done,
    flip_byte,
    has_all_staging,
    make_cache,
    make_loader,
    make_saver,
    open_space,
    pending_extent,
    tiles_of,
    write_noise,
)

from transfer_cases import ORDERS, make_packable

LAYER = EXTENT // SPEC.num_layers
SLOW_CYCLES = 2_000_000


@contextmanager
def computing(device: str) -> Iterator[Any]:
    """On a GPU: a stream of its own, and something slow to run on it."""
    if device == "cpu":
        yield lambda: None
        return
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        yield lambda: torch.cuda._sleep(SLOW_CYCLES)
    torch.cuda.synchronize()


class Step:
    """A step that computes the KV of some chunks, layer by layer: noise, kept for comparison."""

    def __init__(self, view: PagedView, shard: Shard, chunks: Sequence[ChunkRef], blocks: np.ndarray) -> None:
        self.plan = plan_spans(view, shard, [PageSpan(blocks, c.first_token, c.num_tokens) for c in chunks])
        self.shard = shard
        one = self.plan.staged_bytes(1)
        self.layers = [
            torch.randint(0, 256, (one,), dtype=torch.uint8, device=view.device) for _ in range(len(shard.layers))
        ]
        for data in self.layers:
            make_packable(data)

    def write(self, layer: int) -> None:
        scatter(self.plan, range(layer, layer + 1), self.layers[layer - self.shard.layers.start])

    def tiles(self) -> list[np.ndarray]:
        """By chunk: (layers, heads, tile bytes)."""
        found: list[list[np.ndarray]] = [[] for _ in range(self.plan.num_spans)]
        for flat in self.layers:
            spans = [tiles for group in self.plan.staged(flat, 1) for tiles in group]
            for number, tiles in enumerate(spans):
                found[number].append(tiles[0].cpu().numpy())
        return [np.stack(layers) for layers in found]


def check_layer_save(url: str, device: str, tp: int, ring: int, group_bytes: int = 1) -> None:
    """Two requests in one step, saved by every rank; the blocks are overwritten as soon as the stream may."""
    with open_space(url) as (pool, space, chunks):
        other = space.keys(list(range(1000, 1000 + 3 * space.chunk_tokens))).refs(3)
        whole: dict[bytes, np.ndarray] = {
            c.key: np.empty(whole_shard(SPEC).local_shape(SPEC, c.first_token, c.num_tokens), np.uint8)
            for c in (*chunks, *other)
        }
        written: dict[tuple[int, int, int], list[torch.Tensor]] = {}
        for rank in range(tp):
            shard = Topology(tp=tp).shard(SPEC, tp_rank=rank)
            # As much as fits the ring: a full one is another case.
            room = max(1, ring // (EXTENT // min(tp, SPEC.num_kv_heads)))
            saver = None
            for request in ((chunks, 0), (other, 1)):
                done = 0
                while done < len(request[0]):
                    if saver is None:
                        view, blocks = make_cache(shard, device, ORDERS[rank % 3])
                        saver = make_saver(
                            space, view, shard, staging_bytes=ring, group_bytes=group_bytes, deadline_s=10.0
                        )
                    part = request[0][done : done + room]
                    step = Step(view, shard, part, blocks)
                    if (shard.heads.start, shard.replica > 0) == (shard.heads.start, True):
                        # A replica computes the same.
                        step.layers = [
                            layer.clone() for layer in written[(shard.heads.start, part[0].number, request[1])]
                        ]
                    written[(shard.heads.start, part[0].number, request[1])] = step.layers
                    with computing(device) as slow:
                        saver.begin("r", part, blocks)
                        assert saver.has_open
                        for layer in range(SPEC.num_layers):
                            slow()
                            step.write(layer)
                            saver.layer_done(layer)
                        noise = torch.randint(0, 256, (step.plan.staged_bytes(SPEC.num_layers),), dtype=torch.uint8)
                        scatter(step.plan, shard.layers, noise.to(view.device))
                    assert not saver.has_open
                    assert saver.drain(30)
                    for chunk, tiles in zip(part, step.tiles(), strict=True):
                        whole[chunk.key][:, shard.heads.start : shard.heads.stop] = tiles
                    done += len(part)
            assert saver is not None
            saver.close()
            assert saver.num_dropped == 0
            assert saver.statuses == {Status.OK: len(chunks) + len(other)}, saver.statuses
            assert saver.ring.num_free == saver.ring.count
        for part in (chunks, other):
            assert all(space.exists(part))
            out = [space.empty(chunk, whole_shard(SPEC)) for chunk in part]
            assert set(space.read(part, whole_shard(SPEC), out, deadline_s=30)) == {Status.OK}
            assert all(np.array_equal(got, whole[c.key]) for got, c in zip(out, part, strict=True))
        assert pool.verify().clean
        assert pool.stats().store.pending_bytes == 0


def read_layers(
    loader: Loader, view: PagedView, shard: Shard, chunks: Any, blocks: Any, device: str, *, at_once: bool = False
) -> list[Any]:
    """A step that computes with what is loaded: what it sees of each layer, by chunk. `at_once`: it is one graph."""
    plan = plan_spans(view, shard, [PageSpan(blocks, c.first_token, c.num_tokens) for c in chunks])
    seen = [torch.zeros(plan.staged_bytes(1), dtype=torch.uint8, device=view.device) for _ in range(SPEC.num_layers)]
    with computing(device):
        if at_once:
            loader.wait_layers()
        for layer in range(SPEC.num_layers):
            if not at_once:
                loader.wait_layer(layer)
            gather(plan, range(layer, layer + 1), seen[layer])
    return [[tiles[0].cpu().numpy() for group in plan.staged(flat, 1) for tiles in group] for flat in seen]


def check_layer_load(url: str, device: str, tp: int, ring: int) -> None:
    """Every layer is there when the step gets to it; all of it when the end is said."""
    with open_space(url) as (_, space, chunks):
        whole = write_noise(space, chunks)
        for rank in range(tp):
            shard = Topology(tp=tp).shard(SPEC, tp_rank=rank)
            view, blocks = make_cache(shard, device, ORDERS[(rank + 1) % 3])
            done = Done()
            loader = make_loader(space, view, shard, staging_bytes=ring, group_bytes=1, deadline_s=30.0, on_done=done)
            try:
                for name in "ab":
                    loader.load(name, chunks, blocks, layerwise=True)
                    seen = read_layers(loader, view, shard, chunks, blocks, device, at_once=name == "b")
                    assert done.next() == (name, len(chunks))
                    assert not loader.has_open
                    for layer in range(SPEC.num_layers):
                        for got, want in zip(seen[layer], whole, strict=True):
                            assert np.array_equal(got, want[layer, shard.heads.start : shard.heads.stop])
                    for got, want in zip(tiles_of(view, shard, chunks, blocks), whole, strict=True):
                        assert np.array_equal(got, want[:, shard.heads.start : shard.heads.stop])
                    # Noise again, or the second load could not be told from the first.
                    plan = plan_spans(view, shard, [PageSpan(blocks, c.first_token, c.num_tokens) for c in chunks])
                    noise = torch.randint(0, 256, (plan.staged_bytes(SPEC.num_layers),), dtype=torch.uint8)
                    scatter(plan, shard.layers, noise.to(view.device))
                assert has_all_staging(loader)
                assert loader.statuses == {Status.OK: 2 * len(chunks)}
                loader.wait_layer(0)  # nothing is open: nothing to wait for
            finally:
                loader.close()


def check_layer_damage(url: str, device: str, layer: int) -> None:
    """A flipped byte in one layer of one chunk: the chunks before it count, in all layers, and nobody hangs."""
    with open_space(url) as (pool, space, chunks):
        whole, shard = write_noise(space, chunks), whole_shard(SPEC)
        flip_byte(space, chunks[5], layer * LAYER + 3 * LAYER // 4)
        view, blocks = make_cache(shard, device)
        done = Done()
        loader = make_loader(
            space, view, shard, staging_bytes=64 * EXTENT, group_bytes=1, deadline_s=30.0, on_done=done
        )
        try:
            loader.load("a", chunks, blocks, layerwise=True)
            read_layers(loader, view, shard, chunks, blocks, device)
            assert done.next() == ("a", 5)
            assert loader.statuses == {Status.OK: 5, Status.DAMAGED: 1}
            for got, want in zip(tiles_of(view, shard, chunks[:5], blocks), whole, strict=False):
                assert np.array_equal(got, want)
            assert not space.exists([chunks[5]])[0], "what is damaged must be forgotten"
            loader.load("b", chunks, blocks, layerwise=True)
            read_layers(loader, view, shard, chunks, blocks, device)
            assert done.next() == ("b", 5), "what is missing ends a load, too"
            assert has_all_staging(loader)
        finally:
            loader.close()
        assert pool.stats().store.damaged == 1


@contextmanager
def held_up(space: object, name: str) -> Iterator[threading.Event]:
    """A method of the space (or of something else) that does not return before the event is set."""
    go, plain = threading.Event(), getattr(space, name)

    def late(*args: Any, **options: Any) -> Any:
        assert go.wait(30)
        return plain(*args, **options)

    with patch.object(space, name, late):
        try:
            yield go
        finally:
            go.set()


def check_full_ring(url: str, device: str) -> None:
    """A ring that fills up in the middle of a step: the chunks that cannot be complete are given up at once."""
    with open_space(url) as (pool, space, chunks):
        shard = whole_shard(SPEC)
        view, blocks = make_cache(shard, device)
        # Room for twelve layers of chunks, while nothing leaves: six chunks in two layers, say.
        saver = make_saver(space, view, shard, staging_bytes=3 * EXTENT, group_bytes=1, deadline_s=10.0)
        step = Step(view, shard, chunks[:6], blocks)
        with held_up(space, "reserve") as go:
            saver.begin("r", chunks[:6], blocks)
            for layer in range(SPEC.num_layers):
                step.write(layer)
                saver.layer_done(layer)
            assert not saver.has_open
            go.set()
            assert saver.drain(30)
        assert saver.num_dropped == 6
        assert not any(space.exists(chunks))
        assert pool.stats().store.pending_bytes == 0
        assert saver.ring.num_free == saver.ring.count
        # Some fit: four chunks in the first layer of a ring that holds eight of them and is half full.
        held = saver.ring.take(LAYER, 7)
        assert held is not None
        step = Step(view, shard, chunks[:6], blocks)
        with held_up(space, "reserve") as go:
            saver.begin("r", chunks[:6], blocks)
            step.write(0)
            saver.layer_done(0)
            go.set()
            end = time.monotonic() + 30
            while pool.stats().store.pending_bytes != 5 * pending_extent(space, device) or saver.ring.num_free != 1:
                assert time.monotonic() < end, "the first layer has not left"
                time.sleep(0.01)
            assert saver.num_dropped == 6 + 1
            saver.ring.give_back(held.num_bytes)
            for layer in range(1, SPEC.num_layers):
                step.write(layer)
                saver.layer_done(layer)
                assert saver.ring.wait(2, 30)
        assert saver.drain(30)
        saver.close()
        assert space.exists(chunks[:6]) == [True] * 5 + [False]
        out = [space.empty(chunk, shard) for chunk in chunks[:5]]
        assert set(space.read(chunks[:5], shard, out, deadline_s=30)) == {Status.OK}
        assert all(np.array_equal(*pair) for pair in zip(out, step.tiles(), strict=False))
        assert pool.stats().store.pending_bytes == 0


def check_abandoned(url: str, device: str) -> None:
    """A step that fails in the middle: what it began is released by the next one, by `discard` or by `close`."""
    with open_space(url) as (pool, space, chunks):
        shard = whole_shard(SPEC)
        view, blocks = make_cache(shard, device)
        saver = make_saver(space, view, shard, staging_bytes=64 * EXTENT, group_bytes=1, deadline_s=10.0)
        saver.begin("r", chunks[:4], blocks)
        saver.layer_done(0)
        saver.layer_done(1)
        step = Step(view, shard, chunks[:2], blocks)
        saver.begin("r", chunks[:2], blocks)
        for layer in range(SPEC.num_layers):
            step.write(layer)
            saver.layer_done(layer)
        assert saver.drain(30)
        assert saver.num_dropped == 4
        assert space.exists(chunks[:4]) == [True, True, False, False]
        saver.begin("r", chunks[2:4], blocks)
        saver.discard()
        assert not saver.has_open
        saver.begin("r", chunks[2:4], blocks)
        saver.layer_done(0)
        saver.layer_done(2)  # one was skipped: this is another step
        assert not saver.has_open
        saver.begin("r", chunks[2:4], blocks)
        saver.layer_done(0)
        saver.close()
        saver.close()
        assert saver.num_dropped == 10
        assert saver.ring.num_free == saver.ring.count
        assert pool.stats().store.pending_bytes == 0
        out = [space.empty(chunk, shard) for chunk in chunks[:2]]
        assert set(space.read(chunks[:2], shard, out, deadline_s=30)) == {Status.OK}
        assert all(np.array_equal(*pair) for pair in zip(out, step.tiles(), strict=True))


def check_never_computed(url: str, device: str) -> None:
    """A step that fails before its first layer: what the other rank has stored of its chunks is of no use."""
    with open_space(url) as (pool, space, chunks):
        savers = []
        for rank in range(2):
            shard = Topology(tp=2).shard(SPEC, tp_rank=rank)
            view, blocks = make_cache(shard, device)
            savers.append(make_saver(space, view, shard, staging_bytes=64 * EXTENT, group_bytes=1, deadline_s=10.0))
        savers[1].save("r", chunks[:4], blocks)
        assert savers[1].drain(30)
        assert pool.stats().store.pending_bytes == 4 * pending_extent(space, device)
        savers[0].begin("r", chunks[:4], blocks)
        savers[0].discard()
        assert savers[0].drain(30)
        assert savers[0].num_dropped == 4
        assert pool.stats().store.pending_bytes == 0
        for saver in savers:
            saver.close()


def check_failed_launch(url: str, device: str, layer: int) -> None:
    """Two tenants in a step, and a launch for the second one fails: no room is lost, no chunk counted twice."""
    with open_space(url) as (pool, space, chunks):
        shard = whole_shard(SPEC)
        view, blocks = make_cache(shard, device)
        saver = make_saver(space, view, shard, staging_bytes=64 * EXTENT, group_bytes=12 * EXTENT, deadline_s=10.0)
        other = space.keys(list(range(3 * space.chunk_tokens)), tenant=b"another").refs(3)
        step = Step(view, shard, chunks, blocks)
        failing = [False] * (2 * layer + 1) + [True]

        def gather_or_fail(*args: Any, **options: Any) -> None:
            if failing and failing.pop(0):
                raise MemoryError
            gather(*args, **options)

        for number in range(SPEC.num_layers):
            step.write(number)
        saver.begin("r", chunks, blocks)
        saver.begin("r", other, blocks)
        with patch.object(save, "gather", gather_or_fail):
            for number in range(layer):
                saver.layer_done(number)
            with pytest.raises(MemoryError):
                saver.layer_done(layer)
        saver.discard()
        assert not saver.has_open
        assert saver.drain(30)
        is_stored = layer == SPEC.num_layers - 1
        assert space.exists(chunks) == [is_stored] * len(chunks)
        assert not any(space.exists(other))
        assert saver.num_dropped == len(other) + (0 if is_stored else len(chunks))
        assert pool.stats().store.pending_bytes == 0
        # The next step finds everything as it was.
        saver.begin("r", other, blocks)
        for number in range(SPEC.num_layers):
            saver.layer_done(number)
        assert saver.drain(30)
        assert all(space.exists(other))
        assert saver.ring.num_free == saver.ring.count
        saver.close()
        if is_stored:
            out = [space.empty(chunk, shard) for chunk in chunks]
            assert set(space.read(chunks, shard, out, deadline_s=30)) == {Status.OK}
            assert all(np.array_equal(*pair) for pair in zip(out, step.tiles(), strict=True))


def check_save_in_a_step(url: str, device: str) -> None:
    """A save between two layers: the step's own are given up, for the ring's rooms go back in order."""
    with open_space(url) as (pool, space, chunks):
        shard = whole_shard(SPEC)
        view, blocks = make_cache(shard, device)
        saver = make_saver(space, view, shard, staging_bytes=64 * EXTENT, group_bytes=12 * EXTENT, deadline_s=10.0)
        saver.begin("r", chunks, blocks)
        saver.layer_done(0)
        saver.save("r", chunks[:4], blocks)
        assert not saver.has_open
        assert saver.drain(30)
        assert space.exists(chunks) == [True] * 4 + [False] * (len(chunks) - 4)
        assert saver.ring.num_free == saver.ring.count
        assert pool.stats().store.pending_bytes == 0
        saver.close()


def check_late_gathers(url: str) -> None:
    """On a GPU: gathers beside the computation that have not even begun when the last layer is computed."""
    with open_space(url) as (_, space, chunks):
        shard = whole_shard(SPEC)
        view, blocks = make_cache(shard, "cuda")
        saver = make_saver(space, view, shard, staging_bytes=64 * EXTENT, group_bytes=1, deadline_s=10.0)
        # The first one gets all memory that there will be, and leaves the numbers of other blocks in it.
        others = space.keys(list(range(5000, 5000 + space.chunk_tokens * 12))).refs(12)
        for part, where, late in ((others, blocks[::-1].copy(), False), (chunks, blocks, True)):
            step = Step(view, shard, part, where)
            for layer in range(SPEC.num_layers):
                step.write(layer)
            with computing("cuda"):
                if late:
                    with saver._beside.use():
                        torch.cuda._sleep(50 * SLOW_CYCLES)
                saver.begin("r", part, where)
                for layer in range(SPEC.num_layers):
                    saver.layer_done(layer)
            assert saver.drain(30)
        saver.close()
        out = [space.empty(chunk, shard) for chunk in chunks]
        assert set(space.read(chunks, shard, out, deadline_s=30)) == {Status.OK}
        assert all(np.array_equal(*pair) for pair in zip(out, step.tiles(), strict=True))


def check_deadline(url: str, device: str) -> None:
    """A pool that does not answer: the step goes on at the deadline, and what comes afterwards does not count."""
    with open_space(url) as (_, space, chunks):
        write_noise(space, chunks)
        shard = whole_shard(SPEC)
        view, blocks = make_cache(shard, device)
        done = Done()
        loader = make_loader(space, view, shard, staging_bytes=64 * EXTENT, group_bytes=1, deadline_s=0.2, on_done=done)
        try:
            with held_up(space, "lend") as go:
                start = time.monotonic()
                loader.load("a", chunks, blocks, layerwise=True)
                for layer in range(SPEC.num_layers):
                    loader.wait_layer(layer)
                assert time.monotonic() - start < 5
                go.set()
                assert done.next() == ("a", 0)
            # It would have come in time, as far as the loader knows; but the step went on without it.
            with held_up(space, "lend") as go, patch.object(loader._pipeline, "is_over", lambda load: False):
                loader.load("late", chunks, blocks, layerwise=True)
                loader.wait_layer(0)
                go.set()
                assert done.next() == ("late", 0)
            with held_up(space, "lend") as go:
                loader.load("b", chunks, blocks, layerwise=True)
                loader.cancel("b")
                loader.wait_layer(0)
                go.set()
                assert done.next() == ("b", 0)
            assert has_all_staging(loader)
        finally:
            loader.close()
