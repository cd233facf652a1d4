"""The worker side over a real cache and a real pool: orders are carried out in the right order, and a step that failed
leaves nothing behind that a later one could be stored under."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the connector needs torch")

from headwater.connector.arrivals import Arrivals
from headwater.connector.config import ConnectorConfig
from headwater.connector.idle import IdleWorker
from headwater.connector.orders import FlushOrder, LoadOrder, PushOrder, SaveOrder, StepOrders, StepReport, TransferJob
from headwater.connector.wire import orders_from_wire, orders_to_wire, report_from_wire, report_to_wire
from headwater.connector.worker import WorkerSide
from headwater.errors import InvalidArgumentError
from headwater.kv.hashing import ChunkRef
from headwater.kv.spec import KVSpec
from headwater.kv.topology import whole_shard
from headwater.pool.pool import Pool, open_pool
from headwater.pool.space import Space
from headwater.stores.base import Status
from headwater.transfer.convert import PageSpan
from transfer_layer_cases import held_up

from support import identity, wait_until
from transfer_cases import ORDERS, cache_view, naive_tiles

SPEC = KVSpec.gqa(num_layers=3, num_kv_heads=2, head_dim=8, dtype="float32")
SHARD = whole_shard(SPEC)
CHUNK, BLOCK, NUM_BLOCKS, DUMMY = 16, 4, 64, 63
MEMORY = "memory://?capacity=16MiB"


class Rank:
    """A worker side over a cache of noise, and what is in it."""

    def __init__(self, pool: Pool, space: Space, *, block_size: int = BLOCK, **settings: Any) -> None:
        self.pool = pool
        self.space = space
        self.view, self.data = cache_view(SPEC, SHARD, num_blocks=NUM_BLOCKS, block_size=BLOCK, order=ORDERS[0])
        config = ConnectorConfig(pool=MEMORY, group_bytes=1, **settings)
        self.side = WorkerSide(
            space,
            self.view,
            SHARD,
            config,
            block_size=block_size,
            dummy_block=DUMMY,
            open_space=lambda epoch: pool.space(replace(identity(), epoch=epoch), SPEC, chunk_tokens=CHUNK),
        )

    def chunks(self, seed: int, count: int = 2, space: Space | None = None) -> list[ChunkRef]:
        return (space or self.space).keys([*range(1000 * seed, 1000 * seed + count * CHUNK)]).chunks()

    def job(self, name: str, chunks: Sequence[ChunkRef], blocks: Sequence[int]) -> TransferJob:
        return TransferJob.of(name, chunks, np.array(blocks, np.int32))

    def tiles(self, chunk: ChunkRef, blocks: Sequence[int]) -> np.ndarray:
        """What the cache holds of a chunk."""
        span = PageSpan(np.array(blocks, np.int32), chunk.first_token, chunk.num_tokens)
        return naive_tiles(self.view, self.data, SHARD, span)

    def stored(self, chunk: ChunkRef) -> np.ndarray | None:
        """What the pool holds of it."""
        assert self.side.drain(10)
        out = self.space.empty(chunk, SHARD)
        return out if self.space.read([chunk], SHARD, [out]) == [Status.OK] else None

    def write_layer(self, layer: int) -> None:
        """A step computes one layer of everything."""
        num_bytes = len(self.data) // SPEC.num_layers
        self.data[layer * num_bytes : (layer + 1) * num_bytes].random_(0, 256)

    def fill(self, chunks: Sequence[ChunkRef]) -> list[np.ndarray]:
        tiles = [np.random.randint(0, 256, self.space.empty(chunk, SHARD).shape, np.uint8) for chunk in chunks]
        assert set(self.space.write(chunks, SHARD, tiles)) == {Status.OK}
        return tiles


@contextmanager
def rank(**settings: Any) -> Iterator[Rank]:
    with open_pool(MEMORY) as pool:
        made = Rank(pool, pool.space(identity(), SPEC, chunk_tokens=CHUNK), **settings)
        try:
            yield made
        finally:
            made.side.close()


A, B = [*range(8)], [*range(20, 28)]


@pytest.mark.parametrize("announced", [range(3), range(0), range(2)], ids=["all layers", "none", "some"])
def test_what_a_step_computes_is_saved_layer_by_layer_or_at_its_end(announced: range) -> None:
    with rank() as r:
        chunks = r.chunks(1)
        r.side.start_step(StepOrders(during=(SaveOrder(r.job("a", chunks, A)),)))
        r.side.start_loads(StepOrders())
        assert r.side.follows_layers
        assert not r.side.needs_layers
        for layer in range(SPEC.num_layers):
            r.side.before_layer(layer)
            r.write_layer(layer)
            if layer in announced:
                r.side.after_layer(layer)
        r.side.end_step()
        assert not r.side.follows_layers
        expected = [r.tiles(chunk, A) for chunk in chunks]
        r.write_layer(0)  # the next step may write the blocks
        for chunk, tiles in zip(chunks, expected, strict=True):
            assert np.array_equal(r.stored(chunk), tiles)  # type: ignore[arg-type]
        assert not r.side.take_report()


def test_layers_of_steps_that_save_nothing_cost_nothing() -> None:
    """Also in runs that have no orders at all, as those that warm an engine up."""
    with rank() as r:
        for layer in range(SPEC.num_layers):
            r.side.before_layer(layer)
            r.side.after_layer(layer)
        r.side.end_step()
        assert not r.side.take_report()


@pytest.mark.parametrize("says_so", [True, False], ids=["discarded", "nobody says so"])
@pytest.mark.parametrize("num_layers", [0, 1, 2])
def test_a_step_that_failed_is_not_stored_with_the_next_ones_kv(num_layers: int, says_so: bool) -> None:
    with rank() as r:
        lost, kept = r.chunks(1), r.chunks(2)
        r.side.start_step(StepOrders(during=(SaveOrder(r.job("lost", lost, A)),)))
        for layer in range(num_layers):
            r.write_layer(layer)
            r.side.after_layer(layer)
        if says_so:
            r.side.discard()
        orders = StepOrders(during=(SaveOrder(r.job("kept", kept, A)),))  # the same blocks, another request
        r.side.start_step(orders)
        for layer in range(SPEC.num_layers):
            r.write_layer(layer)
            r.side.after_layer(layer)
        r.side.end_step()
        assert r.stored(lost[0]) is None
        assert np.array_equal(r.stored(kept[0]), r.tiles(kept[0], A))  # type: ignore[arg-type]
        assert r.side.take_report() == StepReport(unsaved={"lost": 0})
        assert r.pool.stats().store.pending_bytes == 0


def test_saves_are_taken_before_loads_write_the_same_blocks() -> None:
    with rank() as r:
        old, new = r.chunks(1), r.chunks(2)
        filled = r.fill(new)
        before = [r.tiles(chunk, A) for chunk in old]
        load = LoadOrder(r.job("new", new, A), mode="blocking")
        orders = StepOrders(before=(SaveOrder(r.job("old", old, A)),), loads=(load,))
        r.side.start_step(orders)
        r.side.start_loads(orders)
        assert all(np.array_equal(r.tiles(chunk, A), tiles) for chunk, tiles in zip(new, filled, strict=True))
        for chunk, tiles in zip(old, before, strict=True):
            assert np.array_equal(r.stored(chunk), tiles)  # type: ignore[arg-type]
        assert r.side.take_report() == StepReport(ended={"new": (2,)})
        assert not r.side.take_finished(), "nobody waits for it outside the batch"
        assert not r.side.take_failed_blocks()


@pytest.mark.parametrize("mode", ["async", "layerwise", "blocking"])
def test_what_did_not_come_is_told_by_block_and_by_chunk(mode: str) -> None:
    with rank() as r:
        chunks = r.chunks(1, 3)
        r.fill(chunks[:1])
        blocks = [DUMMY, DUMMY, *range(2, 12)]
        orders = StepOrders(loads=(LoadOrder(r.job("a", chunks, blocks), 8, mode=mode),), wrong_blocks=frozenset({50}))
        r.side.start_step(orders)
        r.side.start_loads(orders)
        for layer in range(SPEC.num_layers):
            r.side.before_layer(layer)
        r.side.end_step()
        if mode == "async":
            r.side.start_loads(StepOrders(is_idle=True))  # waits for a load, for a moment
        assert r.side.take_report() == StepReport(ended={"a": (1,)})
        assert r.side.take_failed_blocks() == {50, *range(4, 12)}
        assert r.side.take_finished() == ({"a"} if mode == "async" else set())


def test_requests_wait_each_in_its_own_way_in_one_step() -> None:
    with rank() as r:
        modes = {"a": "async", "l": "layerwise", "b": "blocking"}
        loads = []
        for number, (name, mode) in enumerate(modes.items(), 1):
            chunks = r.chunks(number)
            r.fill(chunks)
            loads.append(LoadOrder(r.job(name, chunks, [*range(number * 10, number * 10 + 8)]), mode=mode))
        orders = StepOrders(loads=tuple(loads))
        r.side.start_step(orders)
        r.side.start_loads(orders)
        for layer in range(SPEC.num_layers):
            r.side.before_layer(layer)
        r.side.end_step()
        ended = r.side.take_report().ended
        assert {"l", "b"} <= ended.keys()
        while "a" not in ended:
            r.side.start_loads(StepOrders(is_idle=True))
            ended |= r.side.take_report().ended
        assert set(ended.values()) == {(2,)}
        assert r.side.take_finished() == {"a"}


@pytest.mark.parametrize("how", ["a step without hooks", "a step that failed", "a step that nobody ended"])
def test_kv_that_a_step_did_not_wait_for_counts_as_not_loaded(how: str) -> None:
    with rank() as r:
        chunks = r.chunks(1)
        r.fill(chunks)
        orders = StepOrders(loads=(LoadOrder(r.job("a", chunks, A), mode="layerwise"),))
        r.side.start_step(orders)
        r.side.start_loads(orders)
        assert r.side.needs_layers
        if how == "a step without hooks":
            r.side.end_step()
        elif how == "a step that failed":
            r.side.before_layer(0)
            r.side.discard(orders)
        else:
            r.side.start_step(StepOrders())
        wait_until(lambda: not r.side._arrivals.has())
        assert r.side.take_report() == StepReport(ended={"a": (0,)})
        assert r.side.take_failed_blocks() == set(A)


def test_an_engine_that_skips_hooks_loses_one_load_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    with rank() as r:
        for number, name in enumerate("abc"):
            chunks = r.chunks(number + 1)
            r.fill(chunks)
            orders = StepOrders(loads=(LoadOrder(r.job(name, chunks, A), mode="layerwise"),))
            r.side.start_step(orders)
            r.side.start_loads(orders)
            for layer in range(1, SPEC.num_layers):  # the first says nothing
                r.side.before_layer(layer)
            r.side.end_step()
            assert r.side.take_report() == StepReport(ended={name: (2 if number else 0,)})
    assert caplog.text.count("does not announce all layers") == 1


def test_a_step_without_hooks_waits_for_all_layers_before_it_computes() -> None:
    with rank() as r:
        chunks = r.chunks(1)
        filled = r.fill(chunks)
        orders = StepOrders(loads=(LoadOrder(r.job("a", chunks, A), mode="layerwise"),))
        r.side.start_step(orders)
        r.side.start_loads(orders)
        r.side.wait_layers()
        assert all(np.array_equal(r.tiles(chunk, A), tiles) for chunk, tiles in zip(chunks, filled, strict=True))
        r.side.end_loads()
        assert r.side.take_report() == StepReport(ended={"a": (2,)})
        r.side.end_step()
        assert not r.side.take_report()
        assert not r.side.take_failed_blocks()


def test_loads_of_a_step_that_failed_before_it_began_have_ended() -> None:
    with rank() as r:
        chunks = r.chunks(1)
        r.fill(chunks)
        orders = StepOrders(loads=(LoadOrder(r.job("a", chunks, A)),))
        r.side.discard(orders)
        assert r.side.take_report() == StepReport(ended={"a": (0,)})
        r.side.start_step(orders)
        r.side.start_loads(orders)
        r.side.discard(orders)  # it had begun: its end comes as it comes
        while not (report := r.side.take_report()):
            r.side.start_loads(StepOrders(is_idle=True))
        assert report.ended == {"a": (2,)}


def test_ends_can_be_told_at_once() -> None:
    told, done = [], threading.Event()

    def on_end(name: str, num_chunks: int) -> None:
        told.append((name, num_chunks))
        done.set()

    with rank() as r:
        chunks = r.chunks(1)
        r.fill(chunks)
        r.side._arrivals._on_end = on_end
        r.side.start_loads(StepOrders(loads=(LoadOrder(r.job("a", chunks, A)),)))
        assert done.wait(10)
        assert told == [("a", 2)]
        assert not r.side.take_report()


def test_chunks_that_there_is_no_room_for_are_told() -> None:
    slot = 3 * 2 * CHUNK * 2 * 8 * 4
    with rank(staging_bytes=2 * slot) as r:
        chunks = r.chunks(1, 4)
        with held_up(r.space, "reserve"):  # nothing leaves the staging meanwhile
            r.side.start_step(StepOrders(before=(SaveOrder(r.job("a", chunks, [*range(16)])),)))
        assert r.side.drain(10)
        assert r.side.take_report() == StepReport(unsaved={"a": 2 * CHUNK})
        assert r.stored(chunks[1]) is not None


def test_a_new_epoch_is_another_space() -> None:
    with rank() as r:
        old = r.chunks(1)
        r.fill(old)
        space = r.pool.space(replace(identity(), epoch=5), SPEC, chunk_tokens=CHUNK)
        new = r.chunks(1, space=space)
        orders = StepOrders(epoch=5, before=(SaveOrder(r.job("a", new, A)),))
        r.side.start_step(orders)
        expected = r.tiles(new[0], A)
        assert r.side.drain(10)
        out = space.empty(new[0], SHARD)
        assert space.read([new[0]], SHARD, [out]) == [Status.OK]
        assert np.array_equal(out, expected)


def test_tenants_and_adapters_that_this_process_has_not_seen() -> None:
    with rank() as r, open_pool(MEMORY) as other:
        names = {"tenant": b"somebody", "adapter": b"x" * 32}
        keys = other.space(identity(), SPEC, chunk_tokens=CHUNK).keys([*range(CHUNK)], **names)
        r.side.start_step(StepOrders(before=(SaveOrder(r.job("a", keys.chunks(), A), **names),)))
        assert r.stored(keys.chunks()[0]) is not None


def test_blocks_of_the_engine_may_be_larger_than_those_of_its_kernel() -> None:
    with rank(block_size=2 * BLOCK) as r:
        chunks = r.chunks(1)
        r.side.start_step(StepOrders(before=(SaveOrder(r.job("a", chunks, [3, 1, 7, 5])),)))
        assert np.array_equal(r.stored(chunks[1]), r.tiles(chunks[1], [6, 7, 2, 3, 14, 15, 10, 11]))  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["async", "layerwise"])
def test_a_worker_that_is_left_fails_what_it_had_begun_and_what_follows(mode: str) -> None:
    with rank() as r:
        gate = threading.Event()
        read = r.space.lend
        r.space.lend = lambda *args: (gate.wait(10), read(*args))[1]  # type: ignore[method-assign]
        chunks = r.chunks(1)
        r.fill(chunks)
        r.side.start_loads(StepOrders(loads=(LoadOrder(r.job("a", chunks, A), mode=mode),)))
        gate.set()
        idle = IdleWorker("it does not want to", r.side.leave())
        orders = StepOrders(loads=(LoadOrder(r.job("b", chunks, B), mode=mode),))
        idle.start_step(orders)
        idle.start_loads(orders)
        for layer in range(3):
            idle.before_layer(layer)
            idle.after_layer(layer)
        idle.end_step()
        assert idle.take_report().declined == "it does not want to"
        assert idle.take_failed_blocks() >= set(B)
        assert idle.take_finished() == ({"a", "b"} if mode == "async" else set())


@pytest.mark.parametrize("mode", ["async", "layerwise", "blocking"])
def test_loads_that_are_refused_have_failed_and_the_next_ones_come(mode: str) -> None:
    with rank() as r:
        chunks = r.chunks(1)
        r.fill(chunks)
        r.side.refuse_loads(StepOrders(loads=(LoadOrder(r.job("a", chunks, A), mode=mode),)))
        assert not r.side.follows_layers
        assert r.side.take_report().ended == {"a": (0,)}
        assert r.side.take_failed_blocks() >= set(A)
        assert r.side.take_finished() == ({"a"} if mode == "async" else set())
        r.side.start_loads(StepOrders(loads=(LoadOrder(r.job("b", chunks, B), mode="blocking"),)))
        assert r.side.take_report().ended == {"b": (len(chunks),)}


def test_an_end_that_nobody_expects_is_ignored() -> None:
    arrivals = Arrivals(BLOCK, DUMMY)
    arrivals.end("nobody", 3)
    assert not arrivals.take_report()


# ---- on the wire --------------------------------------------------------------------------------------------------


def make_orders() -> StepOrders:
    with rank() as r:
        names = {"tenant": b"t\xff", "adapter": b"\x00" * 32}
        before = (SaveOrder(r.job("é", r.chunks(1), A), **names), SaveOrder(r.job("b", r.chunks(2)[1:], [])))
        during = (SaveOrder(r.job("c", r.space.keys([*range(21)]).chunks(), B), raw=(1,)),)
        loads = (LoadOrder(r.job("d", r.chunks(3, 3)[1:], A), 17, mode="layerwise", **names),)
        pushes = (
            PushOrder("c", "0f", "host:1", tuple(r.chunks(2)), **names),
            PushOrder("e", "1f", "[::1]:2", tuple(r.chunks(1))),
        )
        flushes = (FlushOrder("c", "0f", 2.5), FlushOrder("e", "1f", 0.0))
        return StepOrders(7, before, during, loads, ("x", "y"), frozenset({5, 3}), True, pushes, flushes)


def same(one: StepOrders, other: StepOrders) -> bool:
    """Equality, arrays included."""

    def plain(orders: StepOrders) -> Any:
        jobs = [order.job for order in (*orders.before, *orders.during, *orders.loads)]
        groups = [[(group.chunks, group.block_ids.tolist()) for group in job.groups] for job in jobs]
        names = [(order.tenant, order.adapter) for order in (*orders.before, *orders.during, *orders.loads)]
        loads = [(load.num_local, load.mode) for load in orders.loads]
        rest = (orders.epoch, orders.cancelled, orders.wrong_blocks, orders.is_idle, orders.pushes, orders.flushes)
        raw = [save.raw for save in (*orders.before, *orders.during)]
        return [job.request_id for job in jobs], groups, names, loads, raw, len(orders.before), len(orders.during), rest

    return bool(plain(one) == plain(other))


def test_orders_and_reports_survive_the_wire() -> None:
    for orders in (make_orders(), StepOrders()):
        assert same(orders_from_wire(*orders_to_wire(orders)), orders)
    report = StepReport({"a": (1, 2), "b": ()}, {"c": 256}, "because", {"d": (7, 9)}, (b"k" * 32, b"l" * 32))
    assert report_from_wire(report_to_wire(report)) == report


def test_the_wire_takes_nothing_else() -> None:
    good = orders_to_wire(make_orders())

    def spoiled(change: Any) -> tuple[dict[str, Any], list[Any]]:
        fields, arrays = orders_to_wire(make_orders())
        change(fields, arrays)
        return fields, arrays

    changes: list[Any] = [
        lambda f, a: f.pop("epoch"),
        lambda f, a: f.update(epoch="seven"),
        lambda f, a: f.update(before=3),
        lambda f, a: f["before"].pop(),
        lambda f, a: f["before"][0].pop("raw"),
        lambda f, a: f["during"][0].update(raw=[2]),
        lambda f, a: f["during"][0].update(raw=[-1]),
        lambda f, a: f["loads"][0].update(mode="pray"),
        lambda f, a: f["pushes"].pop(),
        lambda f, a: f["pushes"][0].pop("peer"),
        lambda f, a: f["flushes"][0].pop(),
        lambda f, a: f.update(flushes=[["c", "0f", -1.0]]),
        lambda f, a: f["loads"][0].update(tenant="zz"),
        lambda f, a: f["loads"][0].update(groups=[]),
        lambda f, a: f["loads"][0]["groups"][0].pop(),
        lambda f, a: f["before"][0]["groups"][0].__setitem__(0, "00"),
        lambda f, a: f["before"][0]["groups"][0].__setitem__(2, -1),
        lambda f, a: f["before"][0]["groups"][0].__setitem__(4, 0),
        lambda f, a: f["before"][0]["groups"][0].__setitem__(4, 1 << 40),
        lambda f, a: f["before"][0]["groups"][0].__setitem__(5, -1),
        lambda f, a: f["before"][0]["groups"][0].__setitem__(2, float("inf")),
        lambda f, a: f["before"][0]["groups"][0].__setitem__(3, 1 << 70),
        lambda f, a: f["loads"][0].update(num_local=-1),
        lambda f, a: f.update(epoch=float("inf")),
        lambda f, a: a.__setitem__(2, a[2].astype(np.float64)),
        lambda f, a: a.__setitem__(3, np.array(["7"])),
        lambda f, a: a.pop(),
        lambda f, a: a.__setitem__(0, a[0][:-1]),
        lambda f, a: a.__setitem__(1, a[1] * 0),
        lambda f, a: a.__setitem__(2, a[2][:-1]),
        lambda f, a: a.__setitem__(1, np.zeros((1 << 20) + 1, np.int32)),
    ]
    assert orders_from_wire(*good)
    for change in changes:
        with pytest.raises(InvalidArgumentError):
            orders_from_wire(*spoiled(change))
    spoiled_reports: list[dict[str, Any]] = [
        {},
        {"ended": 3, "unsaved": {}, "declined": ""},
        {"ended": {"a": ["x"]}, "unsaved": {}},
        {"ended": {"a": [float("inf")]}, "unsaved": {}, "declined": ""},
        {"ended": {"a": [-1]}, "unsaved": {}, "declined": ""},
        {"ended": {}, "unsaved": {"a": 1 << 70}, "declined": ""},
        report_to_wire(StepReport(misfits=(b"short",))),
        report_to_wire(StepReport()) | {"misfits": ["zz" * 32]},
    ]
    for fields in spoiled_reports:
        with pytest.raises(InvalidArgumentError):
            report_from_wire(fields)
