"""Loads that follow chunks while somebody else fills them: from a lower tier, or layer by layer by another server."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the transfer needs torch")

from following import Engine
from headwater.connector import finder
from headwater.connector.config import ConnectorConfig
from headwater.connector.finder import NOTHING, LoadPlan
from headwater.connector.scheduler import SchedulerSide
from headwater.connector.transfers import TransferParams
from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import Topology, whole_shard
from headwater.pool import Pool, Space, open_pool
from headwater.stores.base import Filling, Status
from headwater.stores.tiers import fetch as fetching
from transfer_pool_cases import BLOCK, SPEC

from data_path import CHUNK, NUM_CHUNKS, TOKENS, WAIT_S, prompt_chunks, space_of
from support import local_tiles, temporary_url, wait_until

MOVERS = ("cpu", "cuda")
COUNT = NUM_CHUNKS + 1
"""With the tail."""
LAYERS = SPEC.num_layers


def config_of(mode: str = "async") -> ConnectorConfig:
    return ConnectorConfig(pool="memory://", load_mode=mode, min_load_tokens=1, load_deadline_s=WAIT_S)


def transfer(wait_s: float = WAIT_S, start_s: float = WAIT_S) -> TransferParams:
    return TransferParams(id="7", wait_s=wait_s, start_s=start_s)


@contextmanager
def below(tmp_path: Path) -> Iterator[tuple[Pool, Space, list[ChunkRef]]]:
    """A pool whose lower tier has the prompt, and whose first tier is empty."""
    with (
        temporary_url("shm", tmp_path, "capacity=16MiB") as first,
        temporary_url("file", tmp_path, "capacity=16MiB") as lower,
        open_pool(f"{first},{lower}") as pool,
    ):
        space = space_of(pool)
        chunks = prompt_chunks(space)
        fill(space, chunks)
        assert pool.flush(WAIT_S)
        pool._store._front.clear(None)  # type: ignore[attr-defined]
        yield pool, space, chunks


@contextmanager
def empty(tmp_path: Path, scheme: str = "shm") -> Iterator[tuple[Space, list[ChunkRef]]]:
    """A space that has nothing yet, and the prompt's chunks."""
    with temporary_url(scheme, tmp_path, "capacity=16MiB") as url, open_pool(url) as pool:
        space = space_of(pool)
        yield space, prompt_chunks(space)


def fill(space: Space, chunks: list[ChunkRef], first: int = 0, stop: int = LAYERS) -> None:
    """Write some layers of some chunks."""
    shard = replace(whole_shard(SPEC), layers=range(first, stop))
    tiles = [local_tiles(SPEC, chunk, shard) for chunk in chunks]
    before = range(first) if first else None
    statuses = space.write(chunks, shard, tiles, before=before, deadline_s=WAIT_S)
    assert all(status.stored for status in statuses), statuses


@contextmanager
def engine_of(space: Space, mover: str = "cpu", mode: str = "async", **options: Any) -> Iterator[Engine]:
    engine = Engine(space, mover, config_of(mode), **options)
    try:
        yield engine
    finally:
        engine.close()


# ---- a fetch from a lower tier ----------------------------------------------------------------------------------
@pytest.mark.parametrize("mover", MOVERS)
@pytest.mark.parametrize("end", ["completes", "fails"])
def test_chunks_are_placed_while_later_ones_are_still_fetched(
    mover: str, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "WINDOW_BYTES", 1)  # one chunk at a time
    monkeypatch.setattr(finder, "FOLLOW_S", WAIT_S if end == "completes" else 0.5)
    with below(tmp_path) as (pool, space, chunks), engine_of(space, mover) as engine:
        tier, go = pool._store._tiers[0], threading.Event()  # type: ignore[attr-defined]
        real = tier.fill

        def fill_late(root: Any, wanted: Any, extents: Any, deadline: float) -> list[Filling]:
            if wanted[0].number >= 3:
                assert go.wait(WAIT_S)
                if end == "fails":
                    return [Filling(Status.MISS)] * len(wanted)
            return real(root, wanted, extents, deadline)

        tier.fill = fill_late
        if end == "fails":  # however long it takes to get here, it is near
            monkeypatch.setattr(fetching.TierFetch, "left_s", 0.0)
        try:
            assert engine.admit().wait is not None
            wait_until(lambda: engine.has(chunks[:3]))
            assert not engine.has(chunks[3:4])
        finally:
            go.set()
        assert engine.ended().num_tokens == len(TOKENS)
        assert engine.has(chunks), "what could not be fetched was read from further down"
        assert space.exists(chunks).count(True) == (COUNT if end == "completes" else 3)
        assert pool.verify().clean


@pytest.mark.parametrize("mode", ["layerwise", "blocking"])
def test_a_load_that_a_step_waits_for_follows_no_fetch(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with below(tmp_path) as (pool, space, chunks):
        monkeypatch.setattr(fetching.TierFetch, "left_s", 0.0)
        side = SchedulerSide(space, config_of(mode), block_size=BLOCK, num_ranks=1, dummy_block=0)
        tier, go = pool._store._tiers[0], threading.Event()  # type: ignore[attr-defined]
        real = tier.fill

        def fill_late(*args: Any) -> list[Filling]:
            assert go.wait(WAIT_S)
            return real(*args)

        tier.fill = fill_late
        side.add("request", TOKENS, len(TOKENS))
        assert side.match("request", 0) is None
        assert side.match("request", 0) is None
        go.set()
        end = time.monotonic() + WAIT_S
        while (plan := side.match("request", 0)) is None:
            assert time.monotonic() < end
            side.wait_fetch(0.05)
        assert plan.mode == mode
        assert all(space.exists(chunks))
        side.start_load("request", range(1, 100))
        assert side.order([]).loads[0].wait is None
        side.finish("request", 0, [])


# ---- KV that another server is said to send ---------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["async", "layerwise", "blocking", "auto"])
def test_a_request_is_held_without_blocks_until_something_is_announced(mode: str, tmp_path: Path) -> None:
    with empty(tmp_path) as (space, chunks), engine_of(space, mode=mode) as engine:
        engine.add(transfer=transfer())
        assert engine.side.match("request", 0) is None
        assert engine.side.num_fetching == 1, "an engine that is idle may wait for it"
        fill(space, chunks[:4], 0, 1)
        start = time.monotonic()
        engine.side.wait_fetch(WAIT_S)
        assert time.monotonic() - start < WAIT_S / 2, "it waits although something was announced"
        assert engine.plan() == LoadPlan(len(TOKENS) - 1, "async")
        engine.load()
        wait_until(lambda: engine.has(chunks[:4], range(1)))
        assert engine.side.num_fetching == 0
        fill(space, chunks[:4], 1)
        fill(space, chunks[4:])
        assert engine.ended().num_tokens == len(TOKENS)
        assert engine.has(chunks)
        engine.side.finish("request", 0, [])


@pytest.mark.parametrize("scheme", ["shm", "file"])
@pytest.mark.parametrize("num_here", [0, 3])
def test_the_wait_ends_early_where_nothing_is_announced(scheme: str, num_here: int, tmp_path: Path) -> None:
    with empty(tmp_path, scheme) as (space, chunks), engine_of(space) as engine:
        if num_here:
            fill(space, chunks[:num_here])
        engine.add(transfer=transfer(start_s=0.2))
        assert engine.side.match("request", 0) is None
        plan = engine.plan()
        assert plan == (LoadPlan(num_here * CHUNK, "async") if num_here else NOTHING)
        stats = engine.side.counts.stats()
        assert (stats.num_expected, stats.num_followed, stats.num_given_up) == (1, 0, 1)
        engine.side.finish("request", 0, [])
        assert engine.side.num_fetching == 0


def test_a_first_tier_that_is_not_mapped_is_waited_for_until_all_is_there(tmp_path: Path) -> None:
    with empty(tmp_path, "file") as (space, chunks), engine_of(space) as engine:
        engine.add(transfer=transfer())
        assert engine.side.match("request", 0) is None
        fill(space, chunks[:4])
        assert engine.side.match("request", 0) is None
        fill(space, chunks[4:])
        assert engine.plan() == LoadPlan(len(TOKENS) - 1, "async")
        assert engine.load().wait is None
        assert engine.ended().num_tokens == len(TOKENS)
        assert engine.has(chunks)
        engine.side.finish("request", 0, [])


def test_a_tail_of_another_prompt_does_not_hide_what_is_announced(tmp_path: Path) -> None:
    with empty(tmp_path) as (space, chunks), engine_of(space) as engine:
        fill(space, chunks[:1])
        fill(space, [space.keys(TOKENS[: CHUNK + 7]).tail_ref(1, 7)])
        engine.add(transfer=transfer())
        assert engine.side.match("request", 0) is None
        fill(space, chunks[1:2], 0, 1)
        assert engine.plan() == LoadPlan(len(TOKENS) - 1, "async")
        engine.load()
        fill(space, chunks[1:2], 1)
        fill(space, chunks[2:])
        assert engine.ended().num_tokens == len(TOKENS)
        assert engine.has(chunks)


@pytest.mark.parametrize("mode", ["async", "layerwise", "blocking"])
def test_what_is_there_already_is_loaded_as_ever(mode: str, tmp_path: Path) -> None:
    with empty(tmp_path) as (space, chunks), engine_of(space, mode=mode) as engine:
        fill(space, chunks)
        engine.add(transfer=transfer())
        assert engine.plan() == LoadPlan(len(TOKENS) - 1, mode)
        stats = engine.side.counts.stats()
        assert (stats.num_expected, stats.num_followed, stats.num_given_up) == (1, 0, 0)
        engine.side.finish("request", 0, [])


@pytest.mark.parametrize("mover", MOVERS)
def test_every_rank_follows_its_own_heads(mover: str, tmp_path: Path) -> None:
    with empty(tmp_path) as (space, chunks), engine_of(space, mover, topology=Topology(tp=2)) as engine:
        fill(space, chunks[:5], 0, 2)
        engine.admit(transfer())
        wait_until(lambda: engine.has(chunks[:5], range(2)))
        fill(space, chunks[:5], 2)
        for layer in range(LAYERS):
            fill(space, chunks[5:], layer, layer + 1)
        assert engine.ended().num_tokens == len(TOKENS)
        assert engine.has(chunks)
        engine.side.finish("request", 0, [])


@pytest.mark.parametrize("mover", MOVERS)
def test_a_wrong_layer_of_a_pending_chunk_is_never_placed_and_ends_the_load(mover: str, tmp_path: Path) -> None:
    with empty(tmp_path) as (space, chunks), engine_of(space, mover) as engine:
        fill(space, chunks[:3])
        fill(space, chunks[3:], 0, 2)
        with space._store._open() as core:  # type: ignore[attr-defined]
            record = core.index.find(chunks[4].key).record
            core.data.segments[0][record.offset] ^= 1
        engine.admit(transfer())
        fill(space, chunks[3:], 2)
        assert engine.ended().num_tokens in (3 * CHUNK, 4 * CHUNK)
        assert engine.has(chunks[:3])
        assert not engine.has(chunks[4:5], range(1))
        engine.side.finish("request", 0, [])


@pytest.mark.parametrize("mover", MOVERS)
def test_a_request_that_is_aborted_stops_following_at_once(mover: str, tmp_path: Path) -> None:
    with empty(tmp_path) as (space, chunks), engine_of(space, mover) as engine:
        fill(space, chunks[:3], 0, 2)
        engine.admit(transfer())
        wait_until(lambda: engine.has(chunks[:3], range(2)))
        engine.side.finish("request", 0, [])
        engine.step()
        start = time.monotonic()
        assert engine.ended().num_tokens == 0
        assert time.monotonic() - start < WAIT_S / 2
        assert not engine.side.is_loading
        assert engine.side.counts.stats().num_given_up == 0, "nobody waits for it any more"
        members = space._store._core.members  # type: ignore[attr-defined]
        fill(space, chunks[:3], 2)
        assert not members.published(), "something is still held"


def test_an_engine_that_closes_ends_what_it_follows(tmp_path: Path) -> None:
    with empty(tmp_path) as (space, chunks):
        with engine_of(space) as engine:
            fill(space, chunks[:3], 0, 2)
            engine.admit(transfer())
            wait_until(lambda: engine.has(chunks[:3], range(2)))
        assert engine.ended().num_tokens == 0
        fill(space, chunks[:3], 2)
        assert not engine.has(chunks[:1], range(2, 3)), "something was placed after the end"


def test_other_loads_are_not_held_up_by_one_that_follows(tmp_path: Path) -> None:
    with empty(tmp_path) as (space, chunks), engine_of(space) as engine:
        fill(space, chunks[:3], 0, 2)
        engine.admit(transfer())
        wait_until(lambda: engine.has(chunks[:3], range(2)))
        others = list(range(100_000, 100_000 + 3 * CHUNK))
        fill(space, space.keys(others).refs(2))
        engine.side.add("other", others, len(others))
        assert engine.plan("other") == LoadPlan(2 * CHUNK, "async")
        engine.load("other")
        assert engine.ended() == ("other", 2 * CHUNK)
        fill(space, chunks[:3], 2)
        fill(space, chunks[3:])
        assert engine.ended() == ("request", len(TOKENS))


def test_a_chunk_that_is_begun_again_is_followed_from_its_first_layer(tmp_path: Path) -> None:
    with empty(tmp_path) as (space, chunks), engine_of(space) as engine:
        fill(space, chunks[:3], 0, 2)
        engine.admit(transfer())
        wait_until(lambda: engine.has(chunks[:3], range(2)))
        (follow,) = engine.ranks[0].side._loader._follower._follows
        assert [one.num_placed for one in follow.progress[:3]] == [2, 2, 2]
        assert space.abort(chunks[:3]) == 3
        fill(space, chunks[:3], 0, 1)
        wait_until(lambda: [one.num_placed for one in follow.progress[:3]] == [1, 1, 1])
        fill(space, chunks[:3], 1)
        fill(space, chunks[3:])
        assert engine.ended().num_tokens == len(TOKENS)
        assert engine.has(chunks)


def test_layers_of_two_copies_are_never_mixed(tmp_path: Path) -> None:
    """Two servers' results for one prompt may differ in the last bit. A copy that goes between the look at it and its
    load is not continued with another one."""
    with empty(tmp_path) as (space, chunks), engine_of(space) as engine:
        follower = engine.ranks[0].side._loader._follower
        begin, replaced = follower._begin, threading.Event()

        def begin_late(segment: Any) -> None:
            if segment.layers[0] and not replaced.is_set():
                replaced.set()
                space._store.clear(None)
                fill(space, chunks)
            begin(segment)

        follower._begin = begin_late
        _fill_otherwise(space, chunks[:3], range(2))
        engine.admit(transfer())
        (follow,) = follower._follows
        wait_until(lambda: [one.num_placed for one in follow.progress[:3]] == [2, 2, 2])
        _fill_otherwise(space, chunks[:3], range(2, LAYERS))
        assert engine.ended().num_tokens == len(TOKENS)
        assert replaced.is_set()
        assert engine.has(chunks)


def _fill_otherwise(space: Space, chunks: list[ChunkRef], layers: range) -> None:
    """Write some layers of some chunks as another server may have computed them."""
    shard = replace(whole_shard(SPEC), layers=layers)
    tiles = [local_tiles(SPEC, chunk, shard) ^ 1 for chunk in chunks]
    before = range(layers.start) if layers.start else None
    statuses = space.write(chunks, shard, tiles, before=before, deadline_s=WAIT_S)
    assert all(status.stored for status in statuses), statuses
