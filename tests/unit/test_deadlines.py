"""Slow disks, many threads: late is a miss, and nobody writes into memory that was given back."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.kv.topology import Topology, whole_shard
from headwater.pool import open_pool
from headwater.stores.base import Status
from headwater.stores.embedded import janitor

from support import empty_tiles, gqa, identity, local_tiles, temporary_url, wait_until

SPEC = gqa(layers=2, heads=4, dim=64)
SHARD = whole_shard(SPEC)


class Gate:
    """Stands in for a system call that hangs until it is opened."""

    def __init__(self, call: Any, *, cached: bool) -> None:
        self.call, self.cached = call, cached
        self.open = threading.Event()
        self.inside = threading.Semaphore(0)
        self.left = threading.Semaphore(0)

    def __call__(self, fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
        if flags and not self.cached:
            raise BlockingIOError
        self.inside.release()
        assert self.open.wait(30)
        try:
            return int(self.call(fd, buffers, offset, flags))
        finally:
            self.left.release()


@pytest.mark.parametrize("nowait", [True, False])
def test_a_read_that_comes_too_late_leaves_the_callers_memory_alone(
    nowait: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with temporary_url("file", tmp_path, "capacity=2MiB") as url, open_pool(url) as pool:
        space = pool.space(identity(), SPEC, chunk_tokens=8)
        chunks = space.keys(range(24)).chunks()
        space.write(chunks, SHARD, [local_tiles(SPEC, c, SHARD) for c in chunks])
        buffers = [empty_tiles(SPEC, c, SHARD) for c in chunks]
        before = [buffer.copy() for buffer in buffers]
        gate = Gate(os.preadv, cached=False)
        if not nowait:
            space._store._core.data._nowait = False  # type: ignore[attr-defined]
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", gate)
            started = time.monotonic()
            assert space.read(chunks, SHARD, buffers, deadline_s=0.2) == [Status.TIMEOUT] * 3
            assert time.monotonic() - started < 1.0
            assert gate.inside.acquire(timeout=5)
            gate.open.set()
            assert gate.left.acquire(timeout=5)
        assert all(np.array_equal(a, b) for a, b in zip(buffers, before, strict=True))
        assert space.read(chunks, SHARD, buffers) == [Status.OK] * 3
        assert np.array_equal(buffers[2], local_tiles(SPEC, chunks[2], SHARD))
        assert pool.stats().store.damaged == 0


def test_a_disk_that_hangs_costs_one_deadline_and_damages_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a read hangs the next ones give up soon, and when all threads hang at once; then the disk is well again."""
    with temporary_url("file", tmp_path, "capacity=2MiB") as url, open_pool(url) as pool:
        space = pool.space(identity(), SPEC, chunk_tokens=8)
        chunks = space.keys(range(24)).chunks()
        space.write(chunks, SHARD, [local_tiles(SPEC, c, SHARD) for c in chunks])
        buffers = [empty_tiles(SPEC, c, SHARD) for c in chunks]
        gate = Gate(os.preadv, cached=False)
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", gate)
            for deadline_s, bound_s in ((0.5, 1.0), *[(20.0, 3.0)] * 3, *[(20.0, 1.0)] * 50):
                started = time.monotonic()
                assert space.read(chunks, SHARD, buffers, deadline_s=deadline_s) == [Status.TIMEOUT] * 3
                assert time.monotonic() - started < bound_s
            gate.open.set()
            wait_until(lambda: not space._store._core.data.busy, what="the late reads")  # type: ignore[attr-defined]
        assert space.read(chunks, SHARD, buffers) == [Status.OK] * 3
        assert pool.stats().store.damaged == 0, "late is not damaged"


def test_a_write_that_comes_too_late_is_dropped_and_its_extent_fenced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with temporary_url("file", tmp_path, "capacity=2MiB") as url, open_pool(url) as pool:
        space = pool.space(identity(), SPEC, chunk_tokens=8)
        (chunk,) = space.keys(range(8)).chunks()
        gate = Gate(os.pwritev, cached=True)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", gate)
            started = time.monotonic()
            assert space.write([chunk], SHARD, [local_tiles(SPEC, chunk, SHARD)], deadline_s=0.2) == [Status.TIMEOUT]
            assert time.monotonic() - started < 1.0
            assert gate.inside.acquire(timeout=5)
            assert space.match(space.keys(range(8))).num_tokens == 0
            stats = pool.stats().store
            assert (stats.pending_bytes, stats.used_bytes) == (0, SPEC.extent_bytes(8)), "in limbo while it is written"
            assert pool.verify().clean
            gate.open.set()
            for _ in range(8):  # one call a tile
                assert gate.left.acquire(timeout=5)
        store = space._store
        wait_until(lambda: not store._core.members.published(), what="retraction")  # type: ignore[attr-defined]
        pool.clear()  # sweeps
        assert pool.stats().store.used_bytes == 0
        assert space.write([chunk], SHARD, [local_tiles(SPEC, chunk, SHARD)]) == [Status.OK]
        assert pool.verify().clean


@pytest.mark.parametrize("scheme", ["memory", "shm", "file"])
def test_many_threads_on_one_pool(scheme: str, tmp_path: Path) -> None:
    wrong: list[str] = []
    with temporary_url(scheme, tmp_path, "capacity=2MiB") as url, open_pool(url) as pool:
        space = pool.space(identity(), SPEC, chunk_tokens=8)
        end = time.monotonic() + 2.0

        def work(seed: int) -> None:
            rng = np.random.default_rng(seed)
            topology = [Topology(), Topology(tp=4), Topology(pp=2), Topology(tp=8, dcp=2)][seed % 4]
            try:
                while time.monotonic() < end:
                    keys = space.keys([int(rng.integers(30))] * int(rng.integers(1, 40)))
                    for shard in topology.shards(SPEC):
                        chunks = keys.chunks()
                        space.write(chunks, shard, [local_tiles(SPEC, c, shard) for c in chunks])
                    match = space.match(keys)
                    with space.lease(match, f"r{seed}"):
                        for shard in topology.shards(SPEC):
                            buffers = [empty_tiles(SPEC, c, shard) for c in match.chunks]
                            for c, b, s in zip(
                                match.chunks, buffers, space.read(match.chunks, shard, buffers), strict=True
                            ):
                                if s == Status.DAMAGED or (
                                    s == Status.OK and not np.array_equal(b, local_tiles(SPEC, c, shard))
                                ):
                                    wrong.append(f"{s!r} for chunk {c.number}")
            except Exception as error:
                wrong.append(repr(error))

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong, wrong[:5]
        assert pool.verify().clean
        assert pool.stats().store.evicted > 0


def test_the_same_prompt_running_twice_with_results_that_differ_in_a_bit() -> None:
    """Two threads of one server fill the same chunks with different bytes: one of them wins, nothing is torn."""
    with open_pool("memory://?capacity=32MiB") as pool:
        space = pool.space(identity(), SPEC, chunk_tokens=8)
        for round_number in range(30):
            keys = space.keys([round_number] * 80)
            chunks = keys.chunks()
            contents = [[np.full((2, 4, 2048), value, np.uint8) for _ in chunks] for value in (1, 2)]
            threads = [threading.Thread(target=space.write, args=(chunks, SHARD, tiles)) for tiles in contents]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            space.write(chunks, SHARD, contents[0])  # what both gave up on because of the other
            match = space.match(keys)
            assert match.num_tokens == 80
            buffers = [empty_tiles(SPEC, c, SHARD) for c in match.chunks]
            assert space.read(match.chunks, SHARD, buffers) == [Status.OK] * 10
            assert all(len(np.unique(buffer)) == 1 for buffer in buffers), "one chunk, two writers' bytes"
        assert pool.stats().store.damaged == 0
        assert pool.verify().clean


def test_a_chunk_that_grows_slowly_is_not_taken_for_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that goes layer by layer lasts as long as the step that computes it; what counts is the last commit."""
    monkeypatch.setattr(janitor, "MAX_PENDING_NS", 10_000_000_000)
    now = [time.time_ns()]
    monkeypatch.setattr(time, "time_ns", lambda: now[0])
    spec = gqa(4, 2, 8)
    with temporary_url("shm", tmp_path, "capacity=4MiB") as url, open_pool(url) as one, open_pool(url) as two:
        spaces = [pool.space(identity(), spec, chunk_tokens=16) for pool in (one, two)]
        chunks = spaces[0].keys(range(16)).chunks()
        whole = whole_shard(spec)
        for layer in range(4):
            shard = replace(whole, layers=range(layer, layer + 1))
            assert spaces[0].write(chunks, shard, [spaces[0].empty(chunks[0], shard)]) == [Status.OK]
            now[0] += 6_000_000_000
            if layer < 3:
                assert spaces[1].write(chunks, whole, [spaces[1].empty(chunks[0], whole)]) == [Status.BUSY]
        assert spaces[0].exists(chunks) == [True]
        more = spaces[0].keys(range(100, 116)).chunks()
        first = replace(whole, layers=range(1))
        assert spaces[0].write(more, first, [spaces[0].empty(more[0], first)]) == [Status.OK]
        now[0] += 11_000_000_000
        assert spaces[1].write(more, whole, [spaces[1].empty(more[0], whole)]) == [Status.OK], "nobody works on it"
