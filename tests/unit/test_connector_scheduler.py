"""What the scheduler side orders, step by step, over a real pool and without an engine: above all that nothing is saved
which may not be the KV of its tokens, that a chain is not broken silently, and that a fetch holds no blocks."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the connector needs torch")

from headwater.connector import fetches
from headwater.connector.config import ConnectorConfig
from headwater.connector.orders import SaveOrder, StepOrders, StepReport
from headwater.connector.scheduler import LoadEnd, SchedulerSide
from headwater.connector.spoiled import Spoiled
from headwater.connector.tracker import LOG_EVERY_S, RETRIES, RETRY_STEPS, Inputs, Scheduled
from headwater.connector.uncertain import Uncertain
from headwater.errors import StoreError
from headwater.kv.hashing import ChunkRef, Extra
from headwater.kv.topology import whole_shard
from headwater.pool.pool import open_pool
from headwater.pool.space import Space

from support import gqa, identity, wait_until

BLOCK, CHUNK, DUMMY = 4, 16, 999
SPEC = gqa(layers=1, heads=1, dim=8)
SHARD = whole_shard(SPEC)
MEMORY = "memory://?capacity=16MiB"

Span = tuple[str, int, int]


@pytest.fixture
def space() -> Iterator[Space]:
    with open_pool(MEMORY) as pool:
        yield pool.space(identity(), SPEC, chunk_tokens=CHUNK)


@dataclass
class Request:
    """A request of an engine that does what it is told."""

    name: str
    tokens: list[int]
    blocks: list[int]
    num_prompt: int = 0
    num_computed: int = 0
    is_new: bool = True


@dataclass
class Engine:
    """The scheduler of an engine: tells the side what it schedules."""

    space: Space
    mode: str = "async"
    num_ranks: int = 1
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = ConnectorConfig(pool=MEMORY, load_mode=self.mode, **{"min_load_tokens": 4, **self.settings})
        self.side = SchedulerSide(self.space, config, block_size=BLOCK, num_ranks=self.num_ranks, dummy_block=DUMMY)
        self.next_block = 0

    def add(
        self,
        name: str,
        num_tokens: int,
        *,
        first: int = 1,
        blocks: Sequence[int] = (),
        inputs: Inputs | None = Inputs(),  # noqa: B008
    ) -> Request:
        """A request; `blocks` are shared ones, which come first."""
        tokens = [*range(first, first + num_tokens)]
        more = -(-num_tokens // BLOCK) - len(blocks) + 8
        request = Request(name, tokens, [*blocks, *range(self.next_block, self.next_block + more)], num_tokens)
        self.next_block += more
        self.side.add(name, tokens, num_tokens, inputs)
        return request

    def load(self, request: Request, num_local: int = 0) -> int:
        """Load what the pool has; tokens that come, or may be assumed to."""
        plan = self.side.match(request.name, num_local)
        assert plan is not None
        assert plan.num_tokens
        self.side.start_load(request.name, request.blocks)
        if plan.mode != "async":
            request.num_computed = num_local + plan.num_tokens
        return plan.num_tokens

    def start(self, request: Request, num_local: int = 0) -> None:
        """Admit a request that loads nothing."""
        plan = self.side.match(request.name, num_local)
        assert plan is not None
        assert not plan.num_tokens
        request.num_computed = num_local

    def step(self, *scheduled: tuple[Request, int]) -> StepOrders:
        items = [Scheduled(r.name, r.num_computed, count, r.blocks, r.is_new) for r, count in scheduled]
        orders = self.side.order(items, is_idle=not items)
        for request, count in scheduled:
            request.num_computed += count
            request.is_new = False
            while len(request.tokens) <= request.num_computed and request.num_computed >= request.num_prompt:
                request.tokens.append(5000 + len(request.tokens))  # sampled
        return orders

    def steps(self, request: Request, count: int) -> list[StepOrders]:
        return [self.step((request, 1)) for _ in range(count)]


def spans(orders: Sequence[SaveOrder]) -> list[Span]:
    """(Request, first token, end) of every chunk."""
    return [
        (order.job.request_id, chunk.first_token, chunk.first_token + chunk.num_tokens)
        for order in orders
        for chunk in order.job.chunks
    ]


def fill(space: Space, num_tokens: int, first: int = 1) -> list[ChunkRef]:
    chunks = space.keys([*range(first, first + num_tokens)]).chunks()
    space.write(chunks, SHARD, [np.full(space.empty(chunk, SHARD).shape, 7, np.uint8) for chunk in chunks])
    return chunks


# ---- when something is saved --------------------------------------------------------------------------------------


def test_what_was_found_for_a_step_is_not_looked_for_again_in_it(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that the engine has itself, and the pool too, but for its last chunk: only that one is asked for, and
    saved. In a later step nothing is taken for granted."""
    engine = Engine(space)
    first = engine.add("first", 3 * CHUNK)
    engine.start(first)
    engine.step((first, 3 * CHUNK))
    fill(space, 3 * CHUNK)
    asked = list[int]()
    exists = space.exists
    monkeypatch.setattr(type(space), "exists", lambda self, refs: asked.append(len(refs)) or exists(refs))
    request = engine.add("a", 4 * CHUNK, blocks=first.blocks[: 3 * CHUNK // BLOCK])
    engine.start(request, num_local=3 * CHUNK)
    assert spans(engine.step((request, CHUNK)).during) == [("a", 3 * CHUNK, 4 * CHUNK)]
    assert asked == [1]
    engine.side.handle_report(StepReport(unsaved={"a": 0}))
    engine.steps(request, 8)
    assert asked[1] == 4


def test_a_prompt_is_saved_in_the_steps_that_compute_it(space: Space) -> None:
    engine = Engine(space)
    a = engine.add("a", 45)
    engine.start(a)
    orders = [engine.step((a, count)) for count in (10, 10, 20, 5, 1)]
    assert [spans(step.during) for step in orders] == [
        [],
        [("a", 0, 16)],
        [("a", 16, 32)],
        [("a", 32, 45)],  # a tail that is worth a load
        [],
    ]
    assert not any(step.before for step in orders)
    assert orders[1].during[0].job.block_ids.tolist() == a.blocks


def test_a_tail_that_is_not_worth_a_load_waits_for_its_chunk(space: Space) -> None:
    engine = Engine(space)
    a = engine.add("a", 18)
    engine.start(a)
    assert spans(engine.step((a, 18)).during) == [("a", 0, 16)]
    assert not any(step.before or step.during for step in engine.steps(a, 14))
    assert spans(engine.step((a, 1)).before) == [("a", 16, 32)]


def test_what_is_generated_is_saved_before_a_later_step(space: Space) -> None:
    """Its tokens are not known when the step that computes their KV is scheduled."""
    engine = Engine(space)
    a = engine.add("a", 20)
    engine.start(a)
    assert spans(engine.step((a, 20)).during) == [("a", 0, 16), ("a", 16, 20)]
    saved = {}
    while a.num_computed < 52:
        num_computed, orders = a.num_computed, engine.step((a, 1))
        assert not orders.during
        if orders.before:
            saved[num_computed] = spans(orders.before)
    assert saved == {32: [("a", 16, 32)], 48: [("a", 32, 48)]}
    engine.side.finish("a", a.num_computed, a.blocks)
    assert spans(engine.step().before) == [("a", 48, 52)]


def test_a_short_tail_is_not_saved_at_the_end_either(space: Space) -> None:
    engine = Engine(space)
    a = engine.add("a", 35)
    engine.start(a)
    assert spans(engine.step((a, 35)).during) == [("a", 0, 16), ("a", 16, 32)]
    engine.side.finish("a", a.num_computed, a.blocks)
    assert not engine.step().before, "three tokens are computed faster than loaded"


def test_without_save_decoded_only_prompts_are_saved(space: Space) -> None:
    engine = Engine(space, settings={"save_decoded": False})
    a = engine.add("a", 20)
    engine.start(a)
    engine.step((a, 20))
    assert not any(step.before or step.during for step in engine.steps(a, 40))
    engine.side.finish("a", a.num_computed, a.blocks)
    assert not engine.step().before


def test_a_preempted_request_is_saved_from_its_old_blocks(space: Space) -> None:
    engine = Engine(space)
    a = engine.add("a", 20)
    engine.start(a)
    engine.step((a, 20))
    engine.steps(a, 3)
    old, a.blocks, a.is_new = a.blocks, [*range(500, 520)], True
    engine.side.preempted("a")
    a.num_computed = 0
    plan = engine.side.match("a", 0)
    assert plan is not None
    orders = engine.step((a, 24))
    assert spans(orders.before) == [("a", 16, 23)]
    assert orders.before[0].job.block_ids.tolist() == old


def test_blocks_that_another_request_computes_in_this_step_are_not_taken_before_it(space: Space) -> None:
    """An engine may let the second of two equal prompts share blocks that the first computes in the same step."""
    engine = Engine(space)
    a = engine.add("a", 40)
    b = engine.add("b", 40, blocks=a.blocks[:8])
    engine.start(a)
    engine.start(b, 32)
    orders = engine.step((a, 40), (b, 8))
    assert not orders.before
    assert spans(orders.during) == [(name, *span) for name in "ab" for span in ((0, 16), (16, 32), (32, 40))]


def test_a_request_that_waits_when_an_epoch_begins_belongs_to_it(space: Space) -> None:
    """Nothing of it is computed. Once it was never saved, nor was any request that shared its blocks."""
    engine = Engine(space)
    a = engine.add("a", 40)
    engine.side.start_epoch(space)
    engine.start(a)
    assert spans(engine.step((a, 40)).during) == [("a", 0, 16), ("a", 16, 32), ("a", 32, 40)]
    engine.side.start_epoch(space)
    assert not engine.steps(a, 2 * CHUNK)[-1].before, "computed with other weights"


# ---- KV that another connector brought ----------------------------------------------------------------------------


def bring(engine: Engine, request: Request, num_tokens: int, how: str) -> StepOrders:
    """Another connector loads a request's first tokens, and the engine computes the rest."""
    engine.start(request)
    engine.side.allocated(request.name, request.blocks)
    if how == "outside the batch":
        orders = engine.step()
        assert not orders.before + orders.during
    request.num_computed = num_tokens
    return engine.step((request, len(request.tokens) - num_tokens))


BRINGS = pytest.mark.parametrize("how", ["in the step", "outside the batch"])


@BRINGS
def test_nothing_of_a_request_is_saved_once_another_connector_loaded_for_it(space: Space, how: str) -> None:
    """What that one brought, and so what is computed from it, may be the KV of other weights."""
    engine = Engine(space)
    a = engine.add("a", 40)
    orders = [bring(engine, a, 32, how), *engine.steps(a, 2 * CHUNK)]
    engine.side.preempted("a")
    a.num_computed, a.is_new = 0, True
    engine.start(a)
    orders += [engine.step((a, len(a.tokens))), *engine.steps(a, 2)]
    engine.side.finish("a", a.num_computed, a.blocks)
    orders.append(engine.step())
    assert not [span for order in orders for span in spans(order.before + order.during)]


@BRINGS
def test_a_request_that_is_over_before_it_ran_with_what_another_connector_loaded_is_not_saved(
    space: Space, how: str
) -> None:
    engine = Engine(space)
    a = engine.add("a", 40)
    engine.start(a)
    engine.side.allocated("a", a.blocks)
    if how == "in the step":
        a.num_computed = 32
        engine.step((a, 8))
    else:
        engine.step()
    engine.side.finish("a", 40, a.blocks)
    assert not engine.step().before


@BRINGS
def test_nothing_is_saved_of_requests_that_share_what_another_connector_loaded(space: Space, how: str) -> None:
    """Directly, or by way of a request that computed from it; in the same step, or when the first one is long over."""
    engine = Engine(space)
    a = engine.add("a", 40)
    b = engine.add("b", 64, blocks=a.blocks[:8])
    c = engine.add("c", 80, blocks=b.blocks[:16])
    bring(engine, a, 32, how)
    engine.side.finish("a", a.num_computed, a.blocks)
    engine.start(b, 32)
    engine.start(c, 64)
    orders = [engine.step((b, 32), (c, 16)), *engine.steps(b, 20)]
    for request in (b, c):
        engine.side.finish(request.name, request.num_computed, request.blocks)
    orders.append(engine.step())
    assert not [span for order in orders for span in spans(order.before + order.during)]


@BRINGS
def test_blocks_that_another_connector_filled_are_as_good_as_any_once_they_are_computed(space: Space, how: str) -> None:
    engine = Engine(space)
    a = engine.add("a", 40)
    bring(engine, a, 32, how)
    engine.side.finish("a", a.num_computed, a.blocks)
    again = engine.add("again", 40, blocks=a.blocks)
    engine.start(again)
    assert spans(engine.step((again, 40)).during) == [("again", 0, 16), ("again", 16, 32), ("again", 32, 40)]
    shares = engine.add("shares", 64, blocks=a.blocks[:8])
    engine.start(shares, 32)
    assert spans(engine.step((shares, 32)).during)[-1] == ("shares", 48, 64)


def test_a_request_that_must_not_read_caches_is_saved_as_others_are(space: Space) -> None:
    engine = Engine(space)
    a = engine.add("a", 40)
    engine.side.match_nothing("a", 0)
    engine.side.allocated("a", a.blocks)
    assert spans(engine.step((a, 40)).during) == [("a", 0, 16), ("a", 16, 32), ("a", 32, 40)]


# ---- KV that an engine's prefix cache takes for a request's -------------------------------------------------------

IMAGE, OTHER_IMAGE, LATER_IMAGE = (Extra("mm.image", bytes([n]) * 32, at, 4) for n, at in ((1, 8), (2, 8), (3, 44)))
EMBEDS = [Extra("embeds", bytes([n]) * 32, 0, 40) for n in (1, 2)]
ADAPTERS = [Inputs(adapter=bytes([n]) * 32) for n in (1, 2)]


@pytest.mark.parametrize(
    ("first", "second", "is_saved"),
    [
        pytest.param(Inputs(extras=(EMBEDS[0],)), Inputs(extras=(EMBEDS[1],)), False, id="other embeddings"),
        pytest.param(Inputs(extras=(IMAGE,)), Inputs(extras=(OTHER_IMAGE,)), False, id="another image"),
        pytest.param(Inputs(extras=(IMAGE,)), Inputs(), False, id="no image"),
        pytest.param(*ADAPTERS, False, id="another adapter"),
        pytest.param(Inputs(), Inputs(tenant=b"salt"), False, id="another salt"),
        pytest.param(None, Inputs(), False, id="inputs without a name"),
        pytest.param(ADAPTERS[0], Inputs(adapter=bytes([1]) * 32), True, id="the same adapter"),
        pytest.param(Inputs(extras=(IMAGE,)), Inputs(extras=(LATER_IMAGE, IMAGE)), True, id="a later image"),
    ],
)
def test_a_request_saves_what_it_shares_only_if_that_was_computed_from_its_own_inputs(
    space: Space, first: Inputs | None, second: Inputs, is_saved: bool
) -> None:
    """An engine's prefix cache may not tell two inputs apart that chunk keys tell apart."""
    engine = Engine(space)
    a = engine.add("a", 40, inputs=first)
    engine.start(a)
    engine.step((a, 40))
    engine.side.finish("a", a.num_computed, a.blocks)
    b = engine.add("b", 64, blocks=a.blocks[:8], inputs=second)
    engine.start(b, 32)
    orders = [engine.step((b, 32)), *engine.steps(b, 2 * CHUNK)]
    engine.side.finish("b", b.num_computed, b.blocks)
    orders.append(engine.step())
    found = [span for order in orders for span in spans(order.before + order.during) if span[0] == "b"]
    assert found[:2] == ([("b", 0, 16), ("b", 16, 32)] if is_saved else [])
    alone = engine.add("alone", 64, blocks=b.blocks, inputs=second)
    engine.start(alone)
    assert spans(engine.step((alone, 64)).during)[-1] == ("alone", 48, 64), "computed by itself, it is saved"


# ---- loads that go along with a step ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["layerwise", "blocking"])
def test_nothing_that_is_built_on_a_load_is_saved_in_the_step_that_loads(space: Space, mode: str) -> None:
    """Were the load damaged, what the step computes would be wrong, and stored under a right key."""
    fill(space, 32)
    engine = Engine(space, mode)
    a = engine.add("a", 64)
    shares = engine.add("shares", 64, blocks=a.blocks[:12])
    shares.tokens[48:] = range(900, 916)  # its own end; blocks 8 to 11 are computed by `a` in this very step
    alone = engine.add("alone", 32, first=2000)
    assert engine.load(a) == 32
    engine.side.match("shares", 48)  # the engine says that it has them
    shares.num_computed = 48
    engine.start(alone)
    orders = engine.step((a, 32), (shares, 16), (alone, 32))
    assert [load.mode for load in orders.loads] == [mode]
    assert not orders.before
    assert spans(orders.during) == [("alone", 0, 16), ("alone", 16, 32)]
    # The load fails from its second chunk on: everything that came of it is wrong.
    invalid = set(a.blocks[4:8])
    assert engine.side.handle_report(StepReport(ended={"a": (1,)}), invalid) == [LoadEnd("a", 16)]
    a.num_computed = shares.num_computed = 16
    orders = engine.step((a, 48), (shares, 48))
    assert not orders.before
    assert not orders.during
    orders = engine.step((a, 1), (shares, 1))
    wanted = [("a", 32, 48), ("a", 48, 64)]  # the pool here still has the second chunk
    assert spans(orders.before) == wanted + [("shares", first, end) for _, first, end in wanted]


@pytest.mark.parametrize("mode", ["layerwise", "blocking"])
def test_what_was_loaded_well_is_the_ground_of_saves_from_the_next_step_on(space: Space, mode: str) -> None:
    fill(space, 32)
    engine = Engine(space, mode)
    a = engine.add("a", 64)
    engine.load(a)
    assert not engine.step((a, 16)).during
    engine.side.handle_report(StepReport(ended={"a": (2,)}))
    orders = engine.step((a, 16))
    assert spans(orders.before) == [("a", 32, 48)]
    assert spans(orders.during) == [("a", 48, 64)]


# ---- which loads go along with a step -----------------------------------------------------------------------------


def modes(orders: StepOrders) -> dict[str, str]:
    return {load.job.request_id: load.mode for load in orders.loads}


def test_requests_of_an_idle_engine_load_in_the_step_that_needs_them(space: Space) -> None:
    fill(space, 32)
    engine = Engine(space, "auto")
    cold, a, b = engine.add("cold", 32, first=2000), engine.add("a", 64), engine.add("b", 48)
    engine.start(cold)
    engine.load(a)
    engine.load(b)
    orders = engine.step((cold, 32), (a, 32), (b, 16))
    assert modes(orders) == {"a": "layerwise", "b": "layerwise"}
    assert {name for name, _, _ in spans(orders.during)} == {"cold"}


def test_requests_that_load_much_do_not_wait_for_each_other(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one step, all of them would wait for the last."""
    monkeypatch.setattr("headwater.connector.scheduler.MAX_SHARED_BYTES", space.spec.extent_bytes(1) * 64)
    fill(space, 48)
    engine = Engine(space, "auto")
    requests = [engine.add(name, 64) for name in "abc"]
    for request in requests:
        engine.load(request)
    a, b, _ = requests
    assert modes(engine.step((a, 16), (b, 16))) == {"a": "layerwise", "b": "layerwise", "c": "async"}


@pytest.mark.parametrize("how", ["prefills", "decodes", "was taken back"])
def test_nobody_waits_for_the_load_of_another(space: Space, how: str) -> None:
    fill(space, 32)
    engine = Engine(space, "auto")
    first, second = engine.add("first", 64), engine.add("second", 64)
    engine.load(first)
    engine.step((first, 16 if how == "prefills" else 32))
    num_chunks = 1 if how == "was taken back" else 2
    engine.side.handle_report(StepReport(ended={"first": (num_chunks,)}), first.blocks[4:8] if num_chunks == 1 else ())
    if how == "was taken back":
        first.num_computed = 16
    assert engine.side.match("second", 0) == (32, "async")
    engine.load(second)
    assert modes(engine.step((first, 1))) == {"second": "async"}


@pytest.mark.parametrize("how", ["finished", "preempted"])
def test_an_engine_is_idle_again_when_its_requests_are_gone(space: Space, how: str) -> None:
    fill(space, 32)
    engine = Engine(space, "auto")
    first = engine.add("first", 40, first=3000)
    engine.start(first)
    engine.step((first, 40))
    engine.add("second", 64)
    assert engine.side.match("second", 0) == (32, "async"), "decided each time that the engine asks"
    if how == "finished":
        engine.side.finish("first", 40, first.blocks)
    else:
        engine.side.preempted("first")
    assert engine.side.match("second", 0) == (32, "layerwise")


def test_a_load_outside_the_batch_holds_up_no_step(space: Space) -> None:
    """Loads go one after the other: one that goes along with a step would wait for it."""
    chunks = fill(space, 32)
    far = fetching(space, FakeFetch(num_kept=1, is_done=True), None, None, None)
    engine = Engine(far, "auto")
    a = engine.add("a", 64)
    engine.load(a)
    assert modes(engine.step()) == {"a": "async"}, "its second chunk is not near"
    fill(space, 32, first=5000)
    engine.add("b", 64, first=5000)
    assert engine.side.match("b", 0) == (32, "async")
    engine.side.finish("a", 0, a.blocks)
    assert engine.side.match("b", 0) == (32, "async"), "it has not ended"
    engine.side.handle_report(StepReport(ended={"a": (len(chunks),)}))
    assert engine.side.match("b", 0) == (32, "layerwise")


def test_no_load_outside_the_batch_begins_behind_blocks_that_may_be_wrong(space: Space) -> None:
    """The engine has them from a load in its last step. A request that computed nothing could not be taken back."""
    fill(space, 48)
    engine = Engine(space, "auto")
    a = engine.add("a", 64)
    engine.load(a)
    engine.step((a, 16))
    b = engine.add("b", 64, blocks=a.blocks[:4])
    assert engine.side.match("b", 16) is None
    assert engine.side.match("b", 0) == (48, "async"), "it would share nothing"
    engine.side.handle_report(StepReport(ended={"a": (3,)}))
    assert engine.load(b, 16) == 32
    assert modes(engine.step((a, 1))) == {"b": "async"}


def test_an_engine_that_cannot_take_steps_back_loads_outside_the_batch(space: Space) -> None:
    fill(space, 32)
    for mode in ("auto", "layerwise", "blocking"):
        engine = Engine(space, mode)
        engine.side.loads_in_step = False
        engine.add("a", 64)
        assert engine.side.match("a", 0) == (32, "async")


# ---- loads whose end is heard after the next step was ordered -----------------------------------------------------


def ahead(space: Space) -> tuple[Engine, Request, Request]:
    """Two steps are ordered: `a` loads in the first, and `b` shares its blocks in both."""
    fill(space, 32)
    engine = Engine(space, "layerwise")
    a = engine.add("a", 128)
    b = engine.add("b", 128, blocks=a.blocks[:8])
    b.tokens[48:] = range(900, 980)
    engine.load(a)
    engine.side.match("b", 32)
    b.num_computed = 32
    assert not engine.step((a, 32), (b, 32)).during
    orders = engine.step((a, 32), (b, 32))
    assert not orders.during, "whether the load was right is not known yet"
    assert not orders.before
    return engine, a, b


def test_nothing_is_saved_until_the_load_that_it_builds_on_is_known_to_be_right(space: Space) -> None:
    engine, a, b = ahead(space)
    assert engine.side.match("a", 0) is None, "its load has not ended"
    engine.side.handle_report(StepReport(ended={"a": (2,)}))
    orders = engine.step((a, 32), (b, 32))
    assert spans(orders.before) == [("a", 32, 48), ("a", 48, 64), ("a", 64, 80), ("a", 80, 96)] + [
        ("b", first, first + 16) for first in range(32, 96, 16)
    ]


@pytest.mark.parametrize("num_chunks", [2, 1])
@pytest.mark.parametrize("how", ["finished", "preempted"])
@pytest.mark.parametrize("name", ["a", "b"])
def test_a_request_that_ends_before_its_load_is_known_is_saved_if_that_was_right(
    space: Space, name: str, how: str, num_chunks: int
) -> None:
    engine, a, b = ahead(space)
    gone, stays = (a, b) if name == "a" else (b, a)
    if how == "finished":
        engine.side.finish(name, 96, gone.blocks)
    else:
        engine.side.preempted(name)
    engine.side.handle_report(StepReport(ended={"a": (num_chunks,)}), a.blocks[4:8] if num_chunks == 1 else ())
    stays.num_computed = 96 if num_chunks == 2 else 16
    found = [span for span in spans(engine.step((stays, 16)).before) if span[0] == name]
    is_saved = num_chunks == 2 and how == "finished"  # a request that is preempted computes it again
    assert found == [(name, first, first + 16) for first in range(32, 96, 16) if is_saved]


def test_a_request_that_ends_is_not_saved_when_others_may_have_its_blocks(space: Space) -> None:
    engine, a, b = ahead(space)
    engine.side.finish("a", 96, a.blocks)
    engine.side.finish("b", 96, b.blocks)
    assert not engine.step().before
    engine.side.handle_report(StepReport(ended={"a": (2,)}))
    assert not engine.step().before
    assert not engine.side._tracked
    assert not engine.side._uncertain


def test_blocks_of_requests_that_are_gone_are_wrong_too_when_a_load_was(space: Space) -> None:
    """The engine may share them: they are in its prefix cache."""
    engine, a, b = ahead(space)
    engine.side.finish("b", 96, b.blocks)
    engine.side.preempted("a")
    engine.side.handle_report(StepReport(ended={"a": (1,)}), a.blocks[4:8])
    assert engine.side.wrong_blocks == {*a.blocks[4:], *b.blocks[4:]}


def test_a_request_with_max_tokens_1_counts_as_loaded(space: Space) -> None:
    """It is over before the engine says how its load ended."""
    fill(space, 32)
    engine = Engine(space, "auto")
    a = engine.add("a", 64)
    engine.load(a)
    engine.step((a, 32))
    engine.side.finish("a", 64, a.blocks)
    engine.side.handle_report(StepReport(ended={"a": (2,)}))
    assert engine.side.counts.stats().num_loaded_tokens == 32
    orders = engine.step()
    assert not orders.cancelled
    assert spans(orders.before) == [("a", 32, 48), ("a", 48, 64)]


def test_what_follows_an_uncertain_block_is_uncertain() -> None:
    uncertain = Uncertain()
    uncertain.begin("a", [3, 4])
    uncertain.spread([[1, 2, 3, 4, 5], [9, 5, 6], [7, 1], [6, 8]])
    assert all(uncertain.touches([block]) for block in (3, 4, 5, 6, 8))
    assert not uncertain.touches([1, 2, 7, 9])
    uncertain.begin("b", [20])
    uncertain.end("a")
    assert not uncertain.touches([3, 8])
    assert uncertain.touches([20])


def test_the_shortest_rank_decides(space: Space) -> None:
    fill(space, 48)
    engine = Engine(space, num_ranks=3)
    a = engine.add("a", 64)
    engine.load(a)
    engine.step()
    assert not engine.side.handle_report(StepReport(ended={"a": (3, 2)}))
    assert engine.side.is_loading
    assert engine.side.handle_report(StepReport(ended={"a": (3,)})) == [LoadEnd("a", 32)]
    assert not engine.side.is_loading
    assert engine.side.counts.stats().num_failed_loads == 1
    a.num_computed = 32
    assert spans(engine.step((a, 32)).during) == [("a", 48, 64)], "the pool has the third chunk"


def test_what_did_not_come_is_saved_when_it_is_computed(space: Space) -> None:
    chunks = fill(space, 48)
    engine = Engine(far := fetching(space, None))
    a = engine.add("a", 64)
    engine.load(a)
    engine.step()
    far.lacks = {chunk.key for chunk in chunks[1:]}  # damaged, and removed
    assert engine.side.handle_report(StepReport(ended={"a": (1,)})) == [LoadEnd("a", 16)]
    a.num_computed = 16
    assert spans(engine.step((a, 48)).during) == [("a", 16, 32), ("a", 32, 48), ("a", 48, 64)]


def test_the_last_token_is_never_loaded(space: Space) -> None:
    fill(space, 48)
    engine = Engine(space)
    a = engine.add("a", 48)
    assert engine.load(a) == 47
    (load,) = engine.step().loads
    assert len(load.job.chunks) == 3


def test_blocks_that_the_engine_shares_are_not_written(space: Space) -> None:
    fill(space, 48)
    engine = Engine(space)
    a = engine.add("a", 50)
    assert engine.load(a, num_local=20) == 28
    (load,) = engine.step().loads
    assert load.num_local == 20
    assert load.job.block_ids.tolist()[:5] == [DUMMY] * 5
    assert load.job.block_ids.tolist()[5:13] == a.blocks[5:13]
    assert [chunk.number for chunk in load.job.chunks] == [1, 2]
    assert load.failed_blocks(0, BLOCK, DUMMY) == set(a.blocks[5:])
    assert load.failed_blocks(1, BLOCK, DUMMY) == set(a.blocks[8:])
    assert load.failed_blocks(2, BLOCK, DUMMY) == set()


def test_in_a_server_that_waits_layer_by_layer_a_failed_asynchronous_load_spoils_nothing(space: Space) -> None:
    fill(space, 32)
    fetch = FakeFetch(num_kept=0, is_done=True)
    engine = Engine(fetching(space, fetch), "layerwise")
    a = engine.add("a", 40)
    engine.load(a)
    (load,) = engine.step().loads
    assert load.mode == "async"
    engine.side.handle_report(StepReport(ended={"a": (0,)}), load.failed_blocks(0, BLOCK, DUMMY))
    a.num_computed = 0
    orders = engine.step((a, 40))
    assert not orders.wrong_blocks
    assert spans(orders.during) == [("a", 32, 40)], "the first tier has the others"


def test_an_asynchronous_load_makes_spoiled_blocks_right(space: Space) -> None:
    fill(space, 32)
    engine = Engine(space, "layerwise")
    a = engine.add("a", 40)
    engine.load(a)
    engine.step((a, 8))
    engine.side.handle_report(StepReport(ended={"a": (0,)}), set(a.blocks[:8]))
    engine.side.finish("a", 0, a.blocks)
    engine = Engine(fetching(space, FakeFetch(num_kept=0, is_done=True)), "layerwise")
    b = engine.add("b", 40)
    engine.side._spoiled.add(b.blocks)
    engine.load(b)
    engine.step()
    engine.side.handle_report(StepReport(ended={"b": (2,)}))
    b.num_computed = 32
    assert not engine.step((b, 8)).wrong_blocks


def test_an_aborted_request_waits_for_its_load_and_cancels_it(space: Space) -> None:
    fill(space, 32)
    engine = Engine(space)
    a = engine.add("a", 40)
    engine.load(a)
    engine.step()
    engine.side.finish("a", 0, a.blocks)
    engine.side.finish("a", 0, a.blocks)
    assert engine.step().cancelled == ("a",)
    assert engine.side.is_loading
    assert engine.side.handle_report(StepReport(ended={"a": (1,)})) == [LoadEnd("a", 16)]
    assert not engine.side.is_loading
    assert engine.side.counts.stats().num_failed_loads == 0


def test_spoiled_blocks_become_right_from_their_first_token_on() -> None:
    spoiled = Spoiled(4)
    ids = [7, 8, 9]
    spoiled.add([8])
    assert spoiled.num_right(ids, 12) == 4
    assert spoiled.num_right(ids, 4) == 4
    assert spoiled.wrong(ids, 5) == {8}
    spoiled.rewrite(ids, 6, 12)  # not from its beginning
    assert spoiled.num_right(ids, 12) == 4
    spoiled.rewrite(ids, 3, 6)
    assert spoiled.num_right(ids, 12) == 6
    assert not spoiled.wrong(ids, 6)
    spoiled.rewrite(ids, 6, 7)
    spoiled.rewrite([8], 0, 1)  # somebody else's from now on
    assert spoiled.num_right(ids, 12) == 5
    spoiled.rewrite([8], 1, 4)
    assert not spoiled


# ---- chunks that are not saved ------------------------------------------------------------------------------------


def test_dropped_chunks_are_ordered_again_after_some_steps_and_nothing_behind_them_meanwhile(space: Space) -> None:
    engine = Engine(space)
    a = engine.add("a", 96)
    engine.start(a)
    assert len(spans(engine.step((a, 48)).during)) == 3
    fill(space, 16)
    engine.side.handle_report(StepReport(unsaved={"a": 16}))
    engine.side.handle_report(StepReport(unsaved={"a": 16}))  # from another rank
    held = [engine.step((a, 8)) for _ in range(RETRY_STEPS - 1)]
    assert not any(step.before or step.during for step in held), "chunks behind a dropped one are of no use"
    orders = engine.step((a, 8))
    assert spans(orders.before) == [("a", first, first + 16) for first in (16, 32, 48)]
    assert spans(orders.during) == [("a", 64, 80)]


def test_a_dropped_chunk_is_ordered_again_with_parents_that_nobody_has_saved(space: Space) -> None:
    """Of two requests with one prefix, the first was to save it, had no room, and is over."""
    engine = Engine(space)
    a, b = engine.add("a", 48), engine.add("b", 80)
    for request in (a, b):
        engine.start(request)
    engine.step((a, 48), (b, 80))
    engine.side.finish("a", 48, a.blocks)
    fill(space, 16)
    engine.side.handle_report(StepReport(unsaved={"a": 16, "b": 48}))  # for want of room, and for want of a parent
    found = [spans(step.before) for step in engine.steps(b, RETRY_STEPS)]
    assert [("b", first, first + 16) for first in (16, 32, 48, 64)] in found


def test_chunks_that_cannot_be_packed_are_ordered_again_raw_for_whoever_has_them(space: Space) -> None:
    engine = Engine(space)
    a, b = engine.add("a", 80), engine.add("b", 64)
    engine.start(a)
    (first,) = engine.step((a, 80)).during
    assert first.raw == ()
    keys = [chunk.key for chunk in first.job.chunks]
    fill(space, 32)
    one = StepReport(unsaved={"a": 32}, misfits=(keys[2],))
    engine.side.handle_report(one.merged(StepReport(misfits=(keys[2], keys[3]))))  # two ranks, as one report
    (again,) = [order for step in engine.steps(a, RETRY_STEPS) for order in step.before]
    assert [chunk.key for chunk in again.job.chunks] == keys[2:]
    assert again.raw == (0, 1)
    assert engine.load(b) == 32
    engine.side.handle_report(StepReport(ended={"b": (2,)}))
    b.num_computed = 32
    (other,) = engine.step((b, 32)).during
    assert [other.job.chunks[number].key for number in other.raw] == keys[2:4]


def test_chunks_are_dropped_at_most_so_often(space: Space, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(space)
    a = engine.add("a", 64)
    engine.start(a)
    tries = 1 if engine.step((a, 64)).during else 0
    for _ in range(8 * RETRY_STEPS):
        engine.side.handle_report(StepReport(unsaved={"a": 32}))
        tries += bool(engine.step((a, 1)).before)
    assert tries == 1 + RETRIES
    with caplog.at_level(logging.WARNING):
        engine.side.finish("a", a.num_computed, a.blocks)
        assert not engine.step().before
    (record,) = caplog.records
    assert record.getMessage().startswith("4 chunks of KV were computed and not saved")
    assert "staging" in record.getMessage()
    assert "capacity" in record.getMessage()


@pytest.mark.parametrize("save_decoded", [True, False])
def test_what_was_left_out_on_purpose_is_not_counted_as_lost(
    save_decoded: bool, space: Space, caplog: pytest.LogCaptureFixture
) -> None:
    """Tails that are too short to be worth loading, and answers where only prompts are saved."""
    engine = Engine(space, settings={"save_decoded": save_decoded, "min_load_tokens": 8})
    a = engine.add("a", 36)  # two chunks and a tail of four tokens
    engine.start(a)
    engine.step((a, 36))
    for _ in range(8 * RETRY_STEPS):
        engine.side.handle_report(StepReport(unsaved={"a": 16}))
        engine.step((a, 1))
    assert a.num_computed == 68  # four chunks, and a tail of three: the last token is not known
    engine.side.finish("a", a.num_computed, a.blocks)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{3 if save_decoded else 1} chunks of KV were computed and not saved")


def test_what_is_lost_at_the_end_is_told_once_a_minute(
    space: Space, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(space)
    for number in range(3):
        request = engine.add(str(number), 64, first=1000 * number)
        engine.start(request)
        engine.step((request, 64))
        engine.side.finish(request.name, 64, request.blocks)
        for _ in range(2):  # ranks
            engine.side.handle_report(StepReport(unsaved={request.name: 32}))
    assert [record.getMessage().split()[0] for record in caplog.records] == ["2"]
    now = time.monotonic() + LOG_EVERY_S
    monkeypatch.setattr("headwater.connector.tracker.time.monotonic", lambda: now)
    request = engine.add("later", 64, first=9000)
    engine.start(request)
    engine.step((request, 64))
    engine.side.finish(request.name, 64, request.blocks)
    engine.side.handle_report(StepReport(unsaved={"later": 48}))
    assert [record.getMessage().split()[0] for record in caplog.records] == ["2", "5"]


def test_dropped_chunks_are_tried_once_more_when_their_request_ends(space: Space) -> None:
    engine = Engine(space)
    a = engine.add("a", 48)
    engine.start(a)
    engine.step((a, 48))
    fill(space, 16)
    engine.side.handle_report(StepReport(unsaved={"a": 16}))
    engine.side.finish("a", 48, a.blocks)
    assert spans(engine.step().before) == [("a", 16, 32), ("a", 32, 48)]


def test_a_step_that_failed_is_saved_when_it_is_repeated(space: Space) -> None:
    engine = Engine(space)
    a = engine.add("a", 48)
    engine.start(a)
    orders = engine.step((a, 48))
    engine.side.step_failed(orders)
    a.num_computed, a.tokens[48:] = 0, []
    assert spans(engine.step((a, 48)).during) == spans(orders.during)


# ---- fetches ------------------------------------------------------------------------------------------------------


@dataclass
class FakeFetch:
    """Chunks on their way, as the test says."""

    num_kept: int = 0
    is_done: bool = False
    is_released: bool = False
    seconds: float = 0.0
    left_s: float = float("inf")

    def release(self) -> None:
        assert not self.is_released, "released twice"
        self.is_released = True


class FetchingSpace:
    """A space some of whose chunks are in a lower tier."""

    has_lower_tiers = True

    def __init__(self, space: Space, *results: FakeFetch | None) -> None:
        self._space = space
        self._results = list(results)
        self.wanted: list[list[int]] = []
        self.lacks: set[bytes] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._space, name)

    def fetch(self, chunks: Sequence[ChunkRef], *, deadline_s: float) -> FakeFetch | None:
        self.wanted.append([chunk.number for chunk in chunks])
        return self._results.pop(0)

    def exists(self, chunks: Sequence[ChunkRef]) -> list[bool]:
        return [
            there and chunk.key not in self.lacks
            for chunk, there in zip(chunks, self._space.exists(chunks), strict=True)
        ]


def fetching(space: Space, *results: FakeFetch | None) -> Any:
    return FetchingSpace(space, *results)


@pytest.mark.parametrize("mode", ["async", "layerwise", "blocking"])
@pytest.mark.parametrize("num_kept", [3, 2])
def test_a_request_whose_kv_is_being_fetched_asks_again_and_holds_nothing(
    space: Space, mode: str, num_kept: int
) -> None:
    fill(space, 48)
    fetch = FakeFetch()
    engine = Engine(far := fetching(space, fetch), mode)
    a = engine.add("a", 60)
    for _ in range(3):
        assert engine.side.match("a", 0) is None
        assert not engine.step().loads
    assert engine.side.num_fetching == 1
    assert far.wanted == [[0, 1, 2]], "asked for once"
    fetch.is_done, fetch.num_kept = True, num_kept
    assert engine.side.num_fetching == 0
    plan = engine.side.match("a", 0)
    assert plan == (48, mode if num_kept == 3 else "async"), "a step must not wait for what is further down"
    assert engine.side.match("a", 0) == plan, "while the engine has no blocks"
    assert not fetch.is_released
    engine.side.start_load("a", a.blocks)
    assert [load.mode for load in engine.step().loads] == [plan.mode]
    assert not fetch.is_released, "before its load has ended"
    engine.side.handle_report(StepReport(ended={"a": (3,)}))
    assert fetch.is_released


def test_nothing_is_fetched_that_the_engine_has_or_that_is_not_worth_it(space: Space) -> None:
    fill(space, 48)
    engine = Engine(far := fetching(space, FakeFetch(is_done=True, num_kept=1)))
    engine.add("a", 60)
    assert engine.side.match("a", 46) == (0, "async")
    assert far.wanted == []
    assert engine.side.match("a", 32) == (16, "async")
    assert far.wanted == [[2]]


def test_where_the_first_tier_has_all_nothing_waits(space: Space) -> None:
    fill(space, 48)
    engine = Engine(fetching(space, None), "layerwise")
    engine.add("a", 60)
    assert engine.side.match("a", 0) == (48, "layerwise")


def test_a_fetch_that_is_late_is_not_waited_for(space: Space) -> None:
    """The load goes ahead with what there is."""
    fill(space, 48)
    fetch = FakeFetch(num_kept=2)
    engine = Engine(fetching(space, fetch), "layerwise", settings={"load_deadline_s": 0.05})
    a = engine.add("a", 60)
    assert engine.side.match("a", 0) is None
    engine.side.wait_fetch(10.0)
    assert engine.side.match("a", 0) == (32, "layerwise")
    engine.side.start_load("a", a.blocks)
    (load,) = engine.step().loads
    assert [chunk.number for chunk in load.job.chunks] == [0, 1]
    engine.side.handle_report(StepReport(ended={"a": (2,)}))
    assert fetch.is_released
    assert engine.side.counts.stats().num_failed_loads == 0
    a.num_computed = 32
    assert spans(engine.step((a, 28)).during) == [("a", 48, 60)], "the pool has the third chunk"


def test_a_fetch_that_is_late_with_everything_is_not_begun_again(space: Space) -> None:
    fill(space, 48)
    fetch = FakeFetch()
    engine = Engine(fetching(space, fetch), settings={"load_deadline_s": 0.01})
    engine.add("a", 60)
    assert engine.side.match("a", 0) is None
    engine.side.wait_fetch(10.0)
    for _ in range(3):
        assert engine.side.match("a", 0) == (0, "async")
    assert fetch.is_released


@pytest.mark.parametrize("num_kept", [0, 2])
def test_a_fetch_that_is_late_is_counted_and_logged_once_a_minute(
    num_kept: int, space: Space, caplog: pytest.LogCaptureFixture
) -> None:
    fill(space, 48)
    late = [FakeFetch(num_kept=num_kept) for _ in range(3)]
    engine = Engine(fetching(space, *late), settings={"load_deadline_s": 0.01})
    for number, name in enumerate("abc"):
        engine.add(name, 60)
        assert engine.side.match(name, 0) is None
        engine.side.wait_fetch(10.0)
        wait_until(lambda: engine.side.num_fetching == 0, what="a fetch that is late")
        for _ in range(3):  # an engine without free blocks asks at every step
            assert engine.side.match(name, 0) == (16 * num_kept, "async")
        assert engine.side.counts.stats().num_late_fetches == number + 1
        engine.side.finish(name, 0, ())
        if name == "b":  # as if a minute had passed
            engine.side._finder._late._next_s = 0.0
    assert [record.getMessage() for record in caplog.records] == [
        f"{n * num_kept} of {n * 3} chunks came from lower tiers within 0.01 s (load_deadline_s); the rest is computed"
        for n in (1, 2)
    ]


def test_a_fetch_that_comes_in_time_is_not_late(space: Space, caplog: pytest.LogCaptureFixture) -> None:
    fill(space, 48)
    engine = Engine(fetching(space, FakeFetch(num_kept=3, is_done=True)), settings={"load_deadline_s": 1e-6})
    engine.add("a", 60)
    assert engine.side.match("a", 0) == (48, "async")
    assert engine.side.counts.stats().num_late_fetches == 0
    assert not caplog.records


def test_waiting_for_a_fetch_ends_when_one_is_done(space: Space) -> None:
    fill(space, 48)
    fetch = FakeFetch()
    engine = Engine(fetching(space, fetch))
    engine.side.wait_fetch(60.0)  # nothing to wait for
    engine.add("a", 60)
    assert engine.side.match("a", 0) is None
    begin = time.monotonic()
    engine.side.wait_fetch(0.02)
    assert 0.02 <= time.monotonic() - begin < 1.0
    fetch.is_done = True
    engine.side.wait_fetch(60.0)
    assert time.monotonic() - begin < 10.0


@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("how", ["aborted", "computed instead", "epoch", "the id is used again"])
def test_no_fetch_is_left_behind(space: Space, how: str, is_done: bool) -> None:
    fill(space, 48)
    fetch = FakeFetch(is_done=is_done, num_kept=3 if is_done else 0)
    engine = Engine(fetching(space, fetch))
    a = engine.add("a", 60)
    assert (engine.side.match("a", 0) is not None) == is_done
    if how == "aborted":
        engine.side.finish("a", 0, ())
    elif how == "computed instead":
        engine.step((a, 60))
    elif how == "epoch":
        engine.side.start_epoch(space, is_clean=False)
        assert engine.side.match("a", 0) == (0, "async")
    else:
        engine.add("a", 12)
    assert fetch.is_released
    assert engine.side._finder.fetches.num_open == 0


def test_an_aborted_load_keeps_its_fetch_until_it_has_ended(space: Space) -> None:
    fill(space, 48)
    fetch = FakeFetch(is_done=True, num_kept=3)
    engine = Engine(fetching(space, fetch))
    a = engine.add("a", 60)
    engine.load(a)
    engine.step()
    engine.side.finish("a", 0, a.blocks)
    assert not fetch.is_released
    engine.side.handle_report(StepReport(ended={"a": (0,)}))
    assert fetch.is_released


@pytest.mark.parametrize("is_finished", [True, False])
@pytest.mark.parametrize("is_sent", [True, False])
def test_a_load_of_an_ids_former_owner_is_not_taken_for_the_new_ones(
    space: Space, is_finished: bool, is_sent: bool
) -> None:
    fill(space, 48)
    fill(space, 32, first=700)
    engine = Engine(space, num_ranks=2)
    old = engine.add("a", 60)
    engine.load(old)
    orders = engine.step()
    assert [order.job.request_id for order in orders.loads] == ["a"]
    engine.side.handle_report(StepReport(ended={"a": (3,)}))
    cancelled = list[str]()
    if is_finished:
        engine.side.finish("a", 0, old.blocks)
        cancelled += engine.step().cancelled if is_sent else ()
    new = engine.add("a", 60, first=700)
    engine.start(new)  # workers could not tell the two loads apart
    during = engine.step((new, 60))
    assert [*cancelled, *during.cancelled] == ["a"], "the old load is stopped"
    assert spans(during.during)[0] == ("a", 32, 48)
    assert engine.side.is_loading
    assert engine.side.handle_report(StepReport(ended={"a": (3,)})) == [], "nobody waits for it"
    assert not engine.side.is_loading
    engine.side.finish("a", 60, new.blocks)
    third = engine.add("a", 60, first=700)
    assert engine.load(third) == 32
    engine.step()
    assert engine.side.handle_report(StepReport(ended={"a": (2,)})) == []
    assert engine.side.handle_report(StepReport(ended={"a": (2,)})) == [LoadEnd("a", 32)]


def test_two_requests_that_want_the_same_chunks_share_a_fetch(space: Space) -> None:
    fill(space, 48)
    fetch, other = FakeFetch(), FakeFetch()
    engine = Engine(far := fetching(space, fetch, other))
    a, b, c = (engine.add(name, 60) for name in "abc")
    assert engine.side.match("a", 16) is None
    assert engine.side.match("b", 32) is None
    assert far.wanted == [[1, 2]], "one for both"
    assert engine.side.match("c", 0) is None
    assert far.wanted == [[1, 2], [0, 1, 2]], "the first one does not bring all that this one wants"
    fetch.is_done, fetch.num_kept = True, 2
    for request, num_local in ((a, 16), (b, 32)):
        engine.load(request, num_local)
    engine.step()
    engine.side.handle_report(StepReport(ended={"a": (2,)}))
    assert not fetch.is_released, "the other one's load has not ended"
    engine.side.handle_report(StepReport(ended={"b": (1,)}))
    assert fetch.is_released
    engine.side.finish(c.name, 0, ())
    assert other.is_released


def test_only_so_many_are_fetched_at_a_time(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    """Further requests wait for their turn, but for those that need no fetch."""
    near, far_chunks = fill(space, 32, first=5000), fill(space, 48)
    assert near
    monkeypatch.setattr(fetches.Fetches.__init__, "__defaults__", (1,))
    first, second = FakeFetch(), FakeFetch(is_done=True, num_kept=2)
    engine = Engine(far := fetching(space, first, None, second))
    far.lacks = {chunk.key for chunk in far_chunks}
    engine.add("a", 60)
    engine.add("b", 33)
    engine.add("near", 40, first=5000)
    assert engine.side.match("a", 0) is None
    assert engine.side.match("b", 0) is None
    assert engine.side.match("near", 0) == (32, "async")
    assert engine.side.match("b", 0) is None
    assert far.wanted == [[0, 1, 2], [0, 1]]
    engine.side.finish("a", 0, ())
    assert engine.side.match("b", 0) == (32, "async")


def test_a_pool_that_cannot_fetch_is_loaded_from_as_it_is(space: Space) -> None:
    fill(space, 48)
    engine = Engine(far := fetching(space))

    def fail(*args: Any, **more: Any) -> None:
        raise StoreError("gone")

    far.fetch = fail
    engine.add("a", 60)
    assert engine.side.match("a", 0) == (48, "async")
