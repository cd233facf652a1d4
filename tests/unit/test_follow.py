"""Loads that follow chunks while somebody else fills them: from a lower tier, in another process, layer by layer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the transfer needs torch")

from headwater.connector import finder
from headwater.connector.config import ConnectorConfig
from headwater.connector.orders import LoadOrder
from headwater.connector.scheduler import LoadEnd, SchedulerSide
from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import whole_shard
from headwater.pool import Pool, Space, open_pool
from headwater.stores.base import Filling, Status
from headwater.stores.tiers import fetch as fetching
from transfer_pool_cases import BLOCK, SPEC

from data_path import NUM_CHUNKS, TOKENS, WAIT_S, Rank, prompt_chunks, space_of
from support import local_tiles, temporary_url, wait_until

MOVERS = ("cpu", "cuda")


def config_of(mode: str = "async", **options: Any) -> ConnectorConfig:
    return ConnectorConfig(
        pool="memory://", load_mode=mode, min_load_tokens=1, **{"load_deadline_s": WAIT_S, **options}
    )


class Engine:
    """The two sides of an engine of one rank, step by step."""

    def __init__(self, space: Space, mover: str, config: ConnectorConfig) -> None:
        self.space = space
        self.side = SchedulerSide(space, config, block_size=BLOCK, num_ranks=1, dummy_block=0)
        self.rank = Rank(space, whole_shard(SPEC), config, "cpu", 0, mover)

    def admit(self) -> LoadOrder:
        """Ask until the prompt can be loaded, and begin that."""
        self.side.add("request", TOKENS, len(TOKENS))
        end = time.monotonic() + WAIT_S
        while (plan := self.side.match("request", 0)) is None:
            assert time.monotonic() < end, "it is never admitted"
            self.side.wait_fetch(0.05)
        assert plan.num_tokens == len(TOKENS) - 1
        assert plan.mode == "async"
        self.side.start_load("request", self.rank.blocks)
        orders = self.side.order([], is_idle=False)
        (order,) = orders.loads
        self.rank.blocks = order.job.block_ids
        self.rank.side.start_step(orders)
        self.rank.side.start_loads(orders)
        self.rank.side.end_step()
        return order

    def ended(self) -> LoadEnd:
        """Wait for the end of the load."""
        ends = list[LoadEnd]()

        def hear() -> bool:
            ends.extend(self.side.hear(self.rank.side.take_report()))
            return bool(ends)

        wait_until(hear)
        (end,) = ends
        return end

    def has(self, chunks: list[ChunkRef], layers: range | None = None) -> bool:
        """Whether the cache holds these chunks."""
        try:
            self.rank.check(chunks, layers)
        except AssertionError:
            return False
        return True

    def close(self) -> None:
        self.rank.side.close()


@contextmanager
def below(tmp_path: Path) -> Iterator[tuple[Pool, Space, list[ChunkRef]]]:
    """A pool whose lower tier has the prompt, and whose first tier is empty."""
    with (
        temporary_url("shm", tmp_path, "capacity=16MiB") as first,
        temporary_url("file", tmp_path, "capacity=16MiB") as lower,
        open_pool(f"{first},{lower}") as pool,
    ):
        space = space_of(pool)
        chunks, shard = prompt_chunks(space), whole_shard(SPEC)
        statuses = space.write(chunks, shard, [local_tiles(SPEC, chunk, shard) for chunk in chunks], deadline_s=WAIT_S)
        assert all(status.stored for status in statuses)
        assert pool.flush(WAIT_S)
        pool._store._front.clear(None)  # type: ignore[attr-defined]
        yield pool, space, chunks


@pytest.mark.parametrize("mover", MOVERS)
@pytest.mark.parametrize("end", ["completes", "fails"])
def test_chunks_are_placed_while_later_ones_are_still_fetched(
    mover: str, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "WINDOW_BYTES", 1)  # one chunk at a time
    monkeypatch.setattr(finder, "FOLLOW_S", WAIT_S if end == "completes" else 0.5)
    with below(tmp_path) as (pool, space, chunks):
        tier, go = pool._store._tiers[0], threading.Event()  # type: ignore[attr-defined]
        real = tier.fill

        def fill(root: Any, wanted: Any, extents: Any, deadline: float) -> list[Filling]:
            if wanted[0].number >= 3:
                assert go.wait(WAIT_S)
                if end == "fails":
                    return [Filling(Status.MISS)] * len(wanted)
            return real(root, wanted, extents, deadline)

        tier.fill = fill
        engine = Engine(space, mover, config_of())
        try:
            if end == "fails":  # however long it takes to get here, it is near
                monkeypatch.setattr(fetching.TierFetch, "left_s", 0.0)
            order = engine.admit()
            assert order.wait is not None
            wait_until(lambda: engine.has(chunks[:3]))
            assert not engine.has(chunks[3:4])
            go.set()
            assert engine.ended().num_tokens == len(TOKENS)
            assert engine.has(chunks), "what could not be fetched was read from further down"
            assert space.exists(chunks).count(True) == (NUM_CHUNKS + 1 if end == "completes" else 3)
            assert pool.verify().clean
        finally:
            go.set()
            engine.close()


@pytest.mark.parametrize("mode", ["layerwise", "blocking"])
def test_a_load_that_a_step_waits_for_follows_nobody(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with below(tmp_path) as (pool, space, chunks):
        monkeypatch.setattr(fetching.TierFetch, "left_s", 0.0)
        side = SchedulerSide(space, config_of(mode), block_size=BLOCK, num_ranks=1, dummy_block=0)
        tier, go = pool._store._tiers[0], threading.Event()  # type: ignore[attr-defined]
        real = tier.fill

        def fill(*args: Any) -> list[Filling]:
            assert go.wait(WAIT_S)
            return real(*args)

        tier.fill = fill
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
