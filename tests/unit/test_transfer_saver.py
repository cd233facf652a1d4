"""Savers when something goes wrong: a chunk that one rank cannot save is given up by all of them at once, and whatever
fails, every chunk is settled, told of, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the transfer needs torch")

from headwater.errors import StoreError
from headwater.kv.format import checksum
from headwater.kv.hashing import ChunkRef
from headwater.kv.spec import KVSpec
from headwater.kv.topology import Topology, whole_shard
from headwater.pool import Space, open_pool
from headwater.stores.base import Filled, Form, Status
from headwater.transfer import aborts
from headwater.transfer import save as saving
from headwater.transfer.save import Saver
from transfer_layer_cases import held_up

from support import identity, temporary_url, wait_until
from transfer_cases import ORDERS, cache_view

SPEC = KVSpec.gqa(num_layers=3, num_kv_heads=4, head_dim=8, dtype="float32")
CHUNK, BLOCK, CHUNKS = 32, 8, 5
TP = Topology(tp=2)


class Rank:
    """One rank's saver over a cache of noise."""

    def __init__(self, space: Space, number: int, slots: int) -> None:
        self._space = space
        self.shard = TP.shard(SPEC, tp_rank=number)
        num_blocks = CHUNKS * CHUNK // BLOCK
        view, _ = cache_view(SPEC, self.shard, num_blocks=num_blocks, block_size=BLOCK, order=ORDERS[0])
        layers, heads, tile = self.shard.local_shape(SPEC, 0, CHUNK)
        staging = slots * layers * heads * tile
        self.saver = Saver(space, view, self.shard, staging_bytes=staging, deadline_s=5.0, group_bytes=1)
        self._blocks = np.arange(num_blocks, dtype=np.int32)

    def save(self, chunks: list[ChunkRef], *, by_layer: bool, name: str = "r") -> None:
        """Save, in one go or while the layers are computed. Nothing leaves the staging meanwhile."""
        with held_up(self._space, "reserve"), held_up(self._space, "write"):
            if by_layer:
                self.saver.begin(name, chunks, self._blocks)
                for layer in range(SPEC.num_layers):
                    self.saver.layer_done(layer)
            else:
                self.saver.save(name, chunks, self._blocks)


@pytest.mark.parametrize("by_layer", [False, True], ids=["whole", "by layer"])
@pytest.mark.parametrize("first", ["the other", "the one that drops"])
@pytest.mark.parametrize("scheme", ["shm", "file"])
def test_a_part_that_is_dropped_aborts_its_chunk(scheme: str, first: str, by_layer: bool, tmp_path: Path) -> None:
    with temporary_url(scheme, tmp_path, "capacity=4MiB") as url, open_pool(url, group=7) as pool:
        space = pool.space(identity(), SPEC, chunk_tokens=CHUNK)
        chunks = space.keys(range(CHUNKS * CHUNK)).chunks()
        short, roomy = Rank(space, 0, slots=2), Rank(space, 1, slots=CHUNKS)
        order = [roomy, short] if first == "the other" else [short, roomy]
        try:
            for rank in order:
                rank.save(chunks, by_layer=by_layer)
                assert rank.saver.drain(10)
        finally:
            short.saver.close()
            roomy.saver.close()
        assert short.saver.num_dropped == CHUNKS - 2
        assert space.exists(chunks) == [True, True, False, False, False]
        stats = pool.stats().store
        assert stats.pending_bytes == 0, "the other rank's part waits for one that never comes"
        assert stats.chunks == 2
        # Without its peer, a part is stored for nothing, or not at all.
        outcomes = {Status.OK, Status.LOST, Status.BUSY, Status.NO_PARENT}
        assert set(roomy.saver.statuses) <= outcomes, roomy.saver.statuses
        assert pool.verify().clean
        # The next to come saves them: nothing stands in its way.
        again = [Rank(space, number, slots=CHUNKS) for number in range(2)]
        for rank in again:
            rank.save(chunks, by_layer=by_layer)
            assert rank.saver.drain(10)
            rank.saver.close()
        assert all(space.exists(chunks))


@pytest.mark.parametrize("by_layer", [False, True], ids=["whole", "by layer"])
def test_a_repeated_abort_that_meets_the_next_try_is_told_of(
    by_layer: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank drops a chunk, and aborts it again for ranks that are behind. Another one is ahead: it has stored its
    part of the next try, which is lost by that. Without one more try the chunk would wait for it until it expires."""
    monkeypatch.setattr(aborts, "OWED_S", 60.0)
    with temporary_url("shm", tmp_path, "capacity=4MiB") as url, open_pool(url, group=7) as pool:
        space = pool.space(identity(), SPEC, chunk_tokens=CHUNK)
        chunks = space.keys(range(CHUNKS * CHUNK)).chunks()
        behind, ahead = Rank(space, 0, slots=2), Rank(space, 1, slots=CHUNKS)
        try:
            behind.save(chunks[:3], by_layer=by_layer)
            assert behind.saver.drain(10)
            assert behind.saver.take_unsaved() == [("r", 2 * CHUNK)]
            ahead.save(chunks[:3], by_layer=by_layer)
            assert ahead.saver.drain(10)
            wait_until(lambda: pool.stats().store.pending_bytes == 0, 10, "the abort is repeated")
            behind.save(chunks[2:3], by_layer=by_layer)
            assert behind.saver.drain(10)
            assert behind.saver.take_unsaved() == [("r", 2 * CHUNK)], "both ranks take their part for stored"
            for rank in (ahead, behind):
                rank.save(chunks[2:3], by_layer=by_layer)
                assert rank.saver.drain(10)
                assert rank.saver.take_unsaved() == []
            assert all(space.exists(chunks[:3]))
        finally:
            behind.saver.close()
            ahead.saver.close()


def test_the_first_abort_of_a_slow_rank_comes_before_the_next_try_is_ordered(tmp_path: Path) -> None:
    """A rank drops a chunk while its sender is busy. If it told so at once, its peer would find its own part of the
    next try in the extent that is about to be aborted, and the next try would never be complete."""
    with temporary_url("shm", tmp_path, "capacity=4MiB") as url, open_pool(url, group=7) as pool:
        space = pool.space(identity(), SPEC, chunk_tokens=CHUNK)
        chunks = space.keys(range(3 * CHUNK)).chunks()
        slow, ahead = Rank(space, 0, slots=2), Rank(space, 1, slots=CHUNKS)
        try:
            ahead.save(chunks, by_layer=False)
            assert ahead.saver.drain(10)
            with held_up(slow.saver._sender._storer, "copy"):
                slow.save(chunks, by_layer=False)
                for _ in slow.saver.take_unsaved():
                    ahead.save(chunks[2:], by_layer=False)
                    assert ahead.saver.drain(10)
            assert slow.saver.drain(10)
            assert slow.saver.num_dropped == 1
            for _ in slow.saver.take_unsaved():
                ahead.save(chunks[2:], by_layer=False)
            slow.save(chunks[2:], by_layer=False)
            assert ahead.saver.drain(10)
            assert slow.saver.drain(10)
            assert all(space.exists(chunks)), "each rank takes its part for stored"
            assert slow.saver.take_unsaved() == ahead.saver.take_unsaved() == []
        finally:
            slow.saver.close()
            ahead.saver.close()


def test_an_abort_that_meets_another_request_with_the_same_chunk_is_told_of(tmp_path: Path) -> None:
    """The peer has met its own part of the chunk in an extent that is aborted for the first request a moment later."""
    with temporary_url("shm", tmp_path, "capacity=4MiB") as url, open_pool(url, group=7) as pool:
        space = pool.space(identity(), SPEC, chunk_tokens=CHUNK)
        chunks = space.keys(range(3 * CHUNK)).chunks()
        slow, ahead = Rank(space, 0, slots=2), Rank(space, 1, slots=CHUNKS)
        try:
            for name in ("r", "another"):
                ahead.save(chunks, by_layer=False, name=name)
                assert ahead.saver.drain(10)
            slow.save(chunks, by_layer=False)
            assert slow.saver.drain(10)
            assert slow.saver.take_unsaved() == [("r", 2 * CHUNK)]
            slow.save(chunks[2:], by_layer=False, name="another")
            assert slow.saver.drain(10)
            assert slow.saver.take_unsaved() == [("another", 2 * CHUNK)], "both ranks take their part for stored"
            for rank in (ahead, slow):
                rank.save(chunks[2:], by_layer=False, name="another")
                assert rank.saver.drain(10)
                assert rank.saver.take_unsaved() == []
            assert all(space.exists(chunks))
        finally:
            slow.saver.close()
            ahead.saver.close()


def one_rank(space: Space, **options: Any) -> Saver:
    """The only rank of a server, with staging for two chunks."""
    shard = whole_shard(SPEC)
    view, _ = cache_view(SPEC, shard, num_blocks=2 * CHUNKS * CHUNK // BLOCK, block_size=BLOCK, order=ORDERS[0])
    return Saver(space, view, shard, staging_bytes=2 * SPEC.extent_bytes(CHUNK), deadline_s=5.0, **options)


BLOCKS = np.arange(CHUNKS * CHUNK // BLOCK, dtype=np.int32)


@pytest.mark.parametrize("launch", [1, 2, 3])
def test_a_step_whose_gather_fails_settles_all_its_saves(launch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_pool("memory://?capacity=8MiB") as pool:
        space = pool.space(identity(), SPEC, chunk_tokens=CHUNK)
        saver = one_rank(space, patience_s=5.0, mover="cuda")
        chains = {name: space.keys(range(at, at + CHUNKS * CHUNK)).chunks() for name, at in (("a", 0), ("b", 9000))}
        gather, calls = saving.gather, list[int]()

        def failing(*args: Any, **options: Any) -> None:
            calls.append(1)
            if len(calls) == launch:
                raise RuntimeError("no launch")
            gather(*args, **options)

        monkeypatch.setattr(saving, "gather", failing)
        try:
            for name, chunks in chains.items():
                saver.begin(name, chunks, BLOCKS)
            with pytest.raises(RuntimeError, match="no launch"):
                saver.end_step()
            assert not saver.has_open
            assert saver.drain(10)
            told = dict(saver.take_unsaved())
            for name, chunks in chains.items():
                there = space.exists(chunks)
                assert told[name] == chunks[there.index(False)].first_token
            assert saver.ring.num_free == saver.ring.count
            assert pool.stats().store.pending_bytes == 0
            saver.save("a", chains["a"], BLOCKS)  # nothing stands in the way of the next
            assert saver.drain(10)
            assert all(space.exists(chains["a"]))
        finally:
            saver.close()


def test_a_save_whose_gather_fails_tells_of_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_pool("memory://?capacity=8MiB") as pool:
        space = pool.space(identity(), SPEC, chunk_tokens=CHUNK)
        saver = one_rank(space, patience_s=5.0)
        chains = {name: space.keys(range(at, at + 2 * CHUNK)).chunks() for name, at in (("a", 0), ("b", 9000))}

        def failing(*args: Any, **options: Any) -> None:
            raise RuntimeError("no launch")

        monkeypatch.setattr(saving, "gather", failing)
        try:
            with pytest.raises(RuntimeError, match="no launch"):
                saver.save_all([saving.SaveRequest(name, chunks, BLOCKS) for name, chunks in chains.items()])
            assert saver.drain(10)
            assert dict(saver.take_unsaved()) == {"a": 0, "b": 0}
        finally:
            saver.close()


def test_a_commit_that_raises_leaves_nothing_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_pool("memory://?capacity=8MiB") as pool:
        space = pool.space(identity(), SPEC, chunk_tokens=CHUNK)
        chunks = space.keys(range(2 * CHUNK)).chunks()
        saver = one_rank(space)

        def failing(*args: Any, **options: Any) -> list[Status]:
            raise StoreError("no answer")

        try:
            with monkeypatch.context() as patch:
                patch.setattr(space, "commit_shard", failing)
                saver.save("r", chunks, BLOCKS)
                assert saver.drain(10)
            assert saver.take_unsaved() == [("r", 0)]
            assert pool.stats().store.pending_bytes == 0
        finally:
            saver.close()


@pytest.mark.parametrize("fails", [True, False], ids=["fails", "stores it"])
def test_a_chunk_that_another_fills_is_watched_until_it_is_there(fails: bool) -> None:
    """A save skips chunks that somebody else is filling. If that comes to nothing, the chain is broken, and the one who
    skipped them must be told to save them after all."""
    with open_pool("memory://?capacity=8MiB") as pool:
        space = pool.space(identity(), SPEC, chunk_tokens=CHUNK)
        chunks, whole = space.keys(range(2 * CHUNK)).chunks(), whole_shard(SPEC)
        saver = one_rank(space)
        try:
            (other,) = pool._store.reserve(space.root(), chunks[:1], [Form()], exclusive=True)  # type: ignore[attr-defined]
            saver.save("r", chunks, BLOCKS)
            assert saver.drain(10)
            assert saver.statuses == {Status.BUSY: 1, Status.OK: 1}
            assert saver.take_unsaved() == []
            if fails:
                other.abort()
                told = list[tuple[str, int]]()
                wait_until(lambda: bool(told.extend(saver.take_unsaved()) or told), 10, "the saver says so")
                assert told == [("r", 0)]
                saver.save("r", chunks, BLOCKS)
                assert saver.drain(10)
            else:
                sums = [checksum(tile) for layer in other.tiles for tile in layer]
                assert space.commit([Filled(other, whole.layers, whole.heads, 0, sums)]) == [Status.OK]
                other.close()
                wait_until(lambda: not saver.num_watched, 10, "the saver has seen that the chunk is there")
                assert saver.take_unsaved() == []
            assert all(space.exists(chunks))
        finally:
            saver.close()


CLOSED_UNDER_A_SAVE = """
import sys, threading
from test_transfer_saver import BLOCKS, CHUNK, CHUNKS, SPEC, identity, one_rank, open_pool
pool = open_pool(sys.argv[1])
space = pool.space(identity(), SPEC, chunk_tokens=CHUNK)
saver = one_rank(space)
storer, begun, go = saver._sender._storer, threading.Event(), threading.Event()
copy = storer.copy
def held_up(*args, **options):
    begun.set()
    assert go.wait(30)
    return copy(*args, **options)
storer.copy = held_up
saver.save("r", space.keys(range(2 * CHUNK)).chunks(), BLOCKS)
assert begun.wait(30)
pool.close()
go.set()
assert saver.drain(10)
assert saver.take_unsaved() == [("r", 0)]
assert saver.ring.num_free == saver.ring.count
saver.close()
print("survived")
"""


def test_a_pool_that_is_closed_under_a_save_does_not_end_the_process(tmp_path: Path) -> None:
    here = Path(__file__).parent
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(here), str(here.parent)])}
    with temporary_url("shm", tmp_path, "capacity=8MiB") as url:
        command = [sys.executable, "-c", CLOSED_UNDER_A_SAVE, url]
        ended = subprocess.run(command, env=env, text=True, capture_output=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "survived" in ended.stdout


MOMENTS = [
    ("space", "reserve"),
    ("space", "places"),
    ("space", "noted"),
    ("space", "commit_shard"),
    ("space", "close_all"),
    ("storer", "copy"),
    ("storer", "take_sums"),
    ("file", "write"),
]


@pytest.mark.parametrize("by_layer", [False, True], ids=["whole", "by layer"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("whose", "method"), MOMENTS, ids=[method for _, method in MOMENTS])
def test_a_pool_that_is_closed_under_a_save_leaves_nothing_behind(
    whose: str,
    method: str,
    when: str,
    by_layer: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Closed by another thread at any moment of the sender's work, while a second pool has the same store open: what
    was reserved is given up, and what was published is retracted."""
    raised = list[Any]()
    monkeypatch.setattr(threading, "excepthook", raised.append)
    scheme = "file" if whose == "file" else "shm"
    with temporary_url(scheme, tmp_path, "capacity=8MiB") as url, open_pool(url) as other, open_pool(url) as pool:
        space = pool.space(identity(), SPEC, chunk_tokens=CHUNK)
        chunks = space.keys(range(2 * CHUNK)).chunks()
        saver = one_rank(space, group_bytes=1)
        owner = saver._sender._storer if whose == "storer" else space
        plain, calls = getattr(owner, method), list[str]()

        def closing(*args: Any, **options: Any) -> Any:
            calls.append(method)
            if when == "before":
                pool.close()
            outcome = plain(*args, **options)
            pool.close()
            return outcome

        monkeypatch.setattr(owner, method, closing)
        try:
            if by_layer:
                saver.begin("r", chunks, BLOCKS)
                for layer in range(SPEC.num_layers):
                    saver.layer_done(layer)
            else:
                saver.save("r", chunks, BLOCKS)
            assert saver.drain(30)
        finally:
            saver.close()
        assert calls
        assert not raised
        assert [record.message for record in caplog.records if record.exc_info] == []
        assert saver.ring.num_free == saver.ring.count
        there = other.space(identity(), SPEC, chunk_tokens=CHUNK).exists(chunks)
        assert saver.take_unsaved() == ([] if all(there) else [("r", chunks[there.index(False)].first_token)])
        assert other.stats().store.pending_bytes == 0
        assert other._store._core.members.published() == set()  # type: ignore[attr-defined]
        assert other.verify().clean


@pytest.mark.parametrize("method", ["reserve", "commit_shard"])
def test_what_the_last_pool_of_a_process_had_reserved_when_it_was_closed_is_free_for_the_next(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with temporary_url("shm", tmp_path, "capacity=8MiB") as url:
        pool = open_pool(url)
        space = pool.space(identity(), SPEC, chunk_tokens=CHUNK)
        chunks, saver, plain = space.keys(range(2 * CHUNK)).chunks(), one_rank(space), getattr(space, method)

        def closing(*args: Any, **options: Any) -> Any:
            if method == "commit_shard":
                pool.close()
            outcome = plain(*args, **options)
            pool.close()
            return outcome

        monkeypatch.setattr(space, method, closing)
        saver.save("r", chunks, BLOCKS)
        assert saver.drain(30)
        saver.close()
        assert saver.take_unsaved() == [("r", 0)]
        with open_pool(url) as again:
            space = again.space(identity(), SPEC, chunk_tokens=CHUNK)
            saver = one_rank(space)
            saver.save("r", chunks, BLOCKS)
            assert saver.drain(30)
            saver.close()
            assert saver.statuses == {Status.OK: 2}
            assert all(space.exists(chunks))
            assert again.stats().store.pending_bytes == 0
            assert again.verify().clean
