"""Pipeline stages share one pool: each worker side knows only its layers, readers cut the model elsewhere.

The engine has no pipeline parallelism of its own, so its one cache is divided among several worker sides, each
registered with some layers (and some heads) of it, as the ranks of such an engine would be.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from headwater.connector.config import ConnectorConfig
from headwater.connector.orders import StepOrders, StepReport
from headwater.connector.stats import TransferStats
from headwater.connector.worker import WorkerSide
from headwater.engine.device import choose_placement
from headwater.engine.engine import Engine
from headwater.engine.executor import Executor
from headwater.engine.identity import engine_identity
from headwater.engine.link import PoolLink
from headwater.kv.topology import Shard, Topology
from headwater.models.checkpoint import open_checkpoint
from headwater.pool import open_pool
from headwater.stores.embedded import destroy
from headwater.stores.url import parse_url
from headwater.transfer.view import PagedView, view_description

from engine_models import Comparison, Reference, greedy_reference, load_transformers
from pool_cases import (
    NUM_TOKENS,
    Oracle,
    check_tokens,
    generate,
    make_oracle,
    nothing_left,
    small_config,
)

pytestmark = pytest.mark.slow

LAYERS = 8
KV_HEADS = 4
CHUNK = 256


def part_of(view: PagedView, shard: Shard) -> PagedView:
    """The view of a rank that holds only these layers and heads of a cache."""
    layers = view.planes[shard.layers.start : shard.layers.stop]
    first = shard.heads.start - view.heads.start
    planes = tuple(
        tuple(replace(plane, address=plane.address + first * plane.strides.head) for plane in layer) for layer in layers
    )
    return replace(view, layers=shard.layers, heads=shard.heads, planes=planes)


class Stages:
    """Worker sides over the parts of one engine's cache: together they are its runner's way to the pool."""

    def __init__(self, executor: Executor, topology: Topology, identity: Any, config: ConnectorConfig) -> None:
        runner: Any = executor._runner
        cache = runner.cache
        view = replace(view_description(runner.spec, cache.view, cache.data), num_blocks=cache.num_pages + 1)
        group = secrets.randbits(62) + 1
        self._pools = []
        self.sides: list[tuple[Shard, WorkerSide]] = []
        for shard in topology.shards(runner.spec):
            pool = open_pool(config.pool, group=group)
            self._pools.append(pool)
            self.space = pool.space(identity, runner.spec)
            side = WorkerSide(self.space, part_of(view, shard), shard, config, dummy_block=cache.num_pages)
            self.sides.append((shard, side))
        runner.pool = self

    def start_step(self, orders: StepOrders) -> None:
        for _, side in self.sides:
            side.start_step(orders)

    def start_loads(self, orders: StepOrders) -> None:
        for _, side in self.sides:
            side.start_loads(orders)

    @property
    def follows_layers(self) -> bool:
        return any(side.follows_layers for _, side in self.sides)

    @property
    def needs_layers(self) -> bool:
        return any(side.needs_layers for _, side in self.sides)

    def before_layer(self, layer: int) -> None:
        for side in self._holders(layer):
            side.before_layer(layer)

    def after_layer(self, layer: int) -> None:
        for side in self._holders(layer):
            side.after_layer(layer)

    def _holders(self, layer: int) -> list[WorkerSide]:
        return [side for shard, side in self.sides if layer in shard.layers]

    def end_step(self) -> None:
        for _, side in self.sides:
            side.end_step()

    def discard(self, orders: StepOrders | None = None) -> None:
        for _, side in self.sides:
            side.discard(orders)

    def take_report(self) -> StepReport:
        report = StepReport()
        for _, side in self.sides:
            report = report.merged(side.take_report())
        return report

    def drain(self, timeout_s: float) -> bool:
        return all(side.drain(timeout_s) for _, side in self.sides)

    def stats(self) -> TransferStats:
        return self.sides[0][1].stats()

    def close(self) -> None:
        for _, side in self.sides:
            side.close()
        for pool in self._pools:
            pool.close()


class StagedEngine:
    """A real engine, and the stages through which it reaches the pool."""

    def __init__(self, path: Path, topology: Topology, url: str, load_mode: str = "async", **settings: Any) -> None:
        config = small_config(path, **settings)
        checkpoint = open_checkpoint(config.model, config.load_format)
        placement = choose_placement(config)
        executor = Executor(checkpoint, config, placement)
        connector = ConnectorConfig(pool=url, load_mode=load_mode, group_bytes=1)
        identity = engine_identity(checkpoint, placement.dtype, config.load_format)
        self.stages = Stages(executor, topology, identity, connector)
        link = PoolLink(
            self.stages.space,
            connector,
            page_size=config.page_size,
            num_ranks=len(self.stages.sides),
            dummy_page=executor.plan.num_pages,
        )
        self.engine = Engine(config, checkpoint=checkpoint, executor=executor, link=link)

    def __enter__(self) -> StagedEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.engine.close()
        self.stages.close()


@cache
def _model(path: Path) -> Any:
    return load_transformers(path)


def next_turn(path: Path, before: Reference) -> Reference:
    """The first prompt with its answer and a few more tokens, and what is said to that."""
    return greedy_reference(_model(path), [*before.prompt, *before.token_ids, 9, 8, 7], NUM_TOKENS)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return make_oracle(tmp_path_factory, num_hidden_layers=LAYERS)


@pytest.fixture
def pool_url() -> Iterator[str]:
    url = f"shm:///headwater-test-{secrets.token_hex(6)}?capacity=64MiB"
    yield url
    destroy(parse_url(url))


@pytest.mark.parametrize(
    ("writer", "readers"),
    [
        (
            Topology(pp=(3, 5)),
            [(Topology(), "async", 16), (Topology(pp=(1, 5, 2)), "blocking", 48), (Topology(pp=3), "layerwise", 16)],
        ),
        (Topology(pp=(2, 5, 1)), [(Topology(), "layerwise", 32), (Topology(pp=(5, 3)), "async", 1)]),
        (
            Topology(tp=2, pp=(3, 5)),
            [(Topology(pp=(7, 1)), "async", 16), (Topology(tp=8, pp=3), "blocking", 16), (Topology(tp=4), "async", 32)],
        ),
    ],
    ids=["PP=2", "PP=3", "PP=2 x TP=2"],
)
def test_stages_write_and_others_read(
    writer: Topology, readers: list[tuple[Topology, str, int]], oracle: Oracle, pool_url: str
) -> None:
    path, references = oracle(KV_HEADS)
    turn = next_turn(path, references[0])
    totals = Comparison()
    with nothing_left():
        with StagedEngine(path, writer, pool_url) as one:
            got, _ = generate(one.engine, references)
            check_tokens(f"writer {writer}", references, got, totals)
            assert one.engine.drain_saves(10.0)
        for topology, load_mode, page_size in readers:
            settings = {
                "page_size": page_size,
                "num_pages": 1920 // page_size,
                "max_model_len": 640,
                "prefix_cache": "naive",
            }
            with StagedEngine(path, topology, pool_url, load_mode, **settings) as other:
                got, cached = generate(other.engine, references)
                check_tokens(f"reader {topology}, {load_mode}", references, got, totals)
                assert cached == [found(len(reference.prompt)) for reference in references]
                # The next turn finds the tail, too: everything but the answer's last token, whose KV nobody needed; and
                # the readers after this one find all of that prompt.
                got, cached = generate(other.engine, [turn])
                check_tokens(f"reader {topology}, {load_mode}, second turn", [turn], got, totals)
                answered = len(references[0].prompt) + NUM_TOKENS - 1
                assert cached[0] in (answered, len(turn.prompt) - 1)
                assert other.engine.stats().pool.num_damaged == 0
        with open_pool(pool_url) as pool:
            assert pool.verify().clean
            assert pool.stats().store.pending_bytes == 0


def found(num_prompt: int) -> int:
    """Whole chunks, and a tail that is worth loading; the last token is computed."""
    tail = num_prompt % CHUNK
    return num_prompt - 1 if tail >= ConnectorConfig.min_load_tokens else num_prompt - tail


def test_a_stage_that_fails_to_load_costs_the_prompt_its_hit(oracle: Oracle, pool_url: str) -> None:
    """What all stages have in place counts: the KV of a chunk that one of them missed is computed again."""
    path, references = oracle(KV_HEADS)
    totals = Comparison()
    with StagedEngine(path, Topology(pp=(3, 5)), pool_url) as one:
        generate(one.engine, references[:1])
        assert one.engine.drain_saves(10.0)
    with StagedEngine(path, Topology(pp=(1, 6, 1)), pool_url) as other:
        last = other.stages.sides[-1][1]
        loader: Any = last._loader._pipeline
        real = loader._space

        class Short:
            """The second chunk is gone when the last stage comes to read it."""

            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)

            def lend(self, chunks: Any, shard: Any) -> Any:
                loan = real.lend(chunks, shard)
                places = zip(chunks, loan.places, strict=True)
                return loan._replace(places=[place if chunk.number < 1 else None for chunk, place in places])

            def read(self, chunks: Any, shard: Any, out: Any, **options: Any) -> Any:
                statuses = real.read(chunks, shard, out, **options)
                return [s if chunk.number < 1 else type(s).MISS for chunk, s in zip(chunks, statuses, strict=True)]

        loader._space = Short()
        got, cached = generate(other.engine, references[:1])
        check_tokens("reader", references[:1], got, totals)
        assert cached == [CHUNK]
