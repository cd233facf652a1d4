"""What the scheduler's side orders, step by step, with real requests of vLLM and no engine: above all that nothing is
saved which is not the KV of the tokens it would be saved for.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from headwater.connector.config import ConnectorConfig
from headwater.errors import TokenError
from headwater.integrations.vllm.events import NoEvents
from headwater.integrations.vllm.messages import StepOrders, StepReport
from headwater.integrations.vllm.options import read_options, settle_load_mode
from headwater.integrations.vllm.scheduling import Scheduling
from headwater.integrations.vllm.spoiled import Spoiled
from headwater.kv.topology import whole_shard
from headwater.pool.pool import open_pool
from headwater.pool.space import Space

from support import gqa, identity

BLOCK = 16
SPEC = gqa(layers=1, heads=1, dim=8)
SHARD = whole_shard(SPEC)
MEMORY = "memory://?capacity=64MiB"


def make_request(name: str, count: int) -> Request:
    params = SamplingParams(max_tokens=100)
    return Request(
        request_id=name, prompt_token_ids=[*range(1, count + 1)], sampling_params=params, pooling_params=None
    )


def make_step(
    new: Sequence[tuple[Request, list[int]]] = (),
    scheduled: dict[str, int] | None = None,
    preempted: Sequence[str] = (),
    resumed: Sequence[tuple[Request, list[int]]] = (),
) -> Any:
    cached = SimpleNamespace(
        req_ids=[request.request_id for request, _ in resumed],
        new_block_ids=[(blocks,) for _, blocks in resumed],
        resumed_req_ids={request.request_id for request, _ in resumed},
    )
    return SimpleNamespace(
        preempted_req_ids=set(preempted),
        scheduled_new_reqs=[SimpleNamespace(req_id=r.request_id, block_ids=(blocks,)) for r, blocks in new],
        scheduled_cached_reqs=cached,
        num_scheduled_tokens=scheduled or {},
        total_num_scheduled_tokens=sum((scheduled or {}).values()),
    )


def saved(orders: StepOrders) -> list[tuple[str, int, int]]:
    """(Request, first token, end) of everything that is to be saved."""
    return [
        (order.job.request_id, chunk.first_token, chunk.first_token + chunk.num_tokens)
        for order in orders.saves
        for chunk in order.job.chunks
    ]


def fill(space: Space, num_tokens: int) -> None:
    chunks = space.keys([*range(1, num_tokens + 1)]).chunks()
    space.write(chunks, SHARD, [np.full(space.empty(chunk, SHARD).shape, 7, np.uint8) for chunk in chunks])


def make_side(space: Space, mode: str = "async", **settings: Any) -> Scheduling:
    config = ConnectorConfig(pool=MEMORY, load_mode=mode)
    return Scheduling(space, config, NoEvents(), block_size=BLOCK, num_ranks=1, **settings)


@pytest.fixture
def space() -> Iterator[Space]:
    with open_pool(MEMORY) as pool:
        yield pool.space(identity(), SPEC)


def begin_loading(side: Scheduling, request: Request, blocks: list[int], num_more: int) -> StepOrders:
    """The step in which a request loads what the pool has, and computes `num_more` tokens."""
    side.add(request)
    num_external = side.match(request, 0)
    assert num_external
    side.allocated(request, blocks, num_external)
    request.num_computed_tokens = num_external
    orders = side.order(make_step(new=[(request, blocks)], scheduled={request.request_id: num_more}))
    request.num_computed_tokens = num_external + num_more
    return orders


@pytest.mark.parametrize("mode", ["layerwise", "blocking"])
def test_what_is_being_loaded_is_not_saved(mode: str, tmp_path: Path) -> None:
    """Though the tier that saves go to does not have it."""
    name = f"headwater-test-{tmp_path.parent.name}-{tmp_path.name}"
    below = f"file://{tmp_path}/below?capacity=64MiB"
    with open_pool(below) as pool:
        fill(pool.space(identity(), SPEC), 600)
    try:
        with open_pool(f"shm:///{name}?capacity=64MiB,{below}") as pool:
            side = make_side(pool.space(identity(), SPEC), mode)
            request, blocks = make_request("a", 600), [*range(100, 138)]
            orders = begin_loading(side, request, blocks, 1)
            assert orders.loads[0].job.chunks
            assert not saved(orders)
            side.hear(StepReport(num_chunks={"a": [1]}), set(blocks[16:]))  # only the first chunk came
            request.num_computed_tokens = 256
            orders = side.order(make_step(scheduled={"a": 344}))
            assert not saved(orders)
            request.num_computed_tokens = 600
            request.append_output_token_ids(1000)
            orders = side.order(make_step(scheduled={"a": 1}))
            assert saved(orders) == [("a", 256, 512), ("a", 512, 600)], "what was computed in place of it is not saved"
    finally:
        shutil.rmtree(f"/dev/shm/{name}", ignore_errors=True)


def test_drafts_that_were_rejected_are_not_saved(space: Space) -> None:
    side, request = make_side(space), make_request("a", 300)
    side.add(request)
    side.order(make_step(new=[(request, [*range(1, 25)])], scheduled={"a": 300}))
    request.num_computed_tokens = 300
    request.append_output_token_ids(1000)
    side.order(make_step(scheduled={"a": 4}))  # the token, and three drafts
    request.append_output_token_ids(2000)  # none of which was right
    request.num_computed_tokens = 0
    assert saved(side.order(make_step(preempted=["a"]))) == [("a", 256, 301)]


def test_a_request_that_is_preempted_and_resumed_at_once_is_saved_from_its_old_blocks(space: Space) -> None:
    side, request = make_side(space), make_request("a", 300)
    side.add(request)
    side.order(make_step(new=[(request, [*range(1, 25)])], scheduled={"a": 300}))
    request.num_computed_tokens = 300
    request.append_output_token_ids(1000)
    side.order(make_step(scheduled={"a": 1}))
    fill(space, 300)
    for token in range(1001, 1011):
        request.num_computed_tokens += 1
        request.append_output_token_ids(token)
        side.order(make_step(scheduled={"a": 1}))
    request.num_computed_tokens = 0
    num_external = side.match(request, 0)
    side.allocated(request, [*range(500, 520)], num_external)
    orders = side.order(make_step(preempted=["a"]))
    (order,) = orders.saves
    assert order.job.block_ids.tolist() == [*range(1, 25)]
    assert saved(orders) == [("a", 256, 310)]
    assert orders.loads[0].job.block_ids.tolist()[:20] == [*range(500, 520)]


@pytest.mark.parametrize("mode", ["layerwise", "blocking"])
def test_what_was_computed_from_a_failed_load_is_not_saved(space: Space, mode: str) -> None:
    fill(space, 600)
    side, request, blocks = make_side(space, mode), make_request("a", 700), [*range(100, 144)]
    begin_loading(side, request, blocks, 100)
    side.hear(StepReport(num_chunks={"a": [1]}), set(blocks[16:38]))
    request.num_computed_tokens = 0
    assert saved(side.order(make_step(preempted=["a"]))) == []


def fail_and_abort(side: Scheduling, blocks: list[int]) -> None:
    """A request whose load fails from its second chunk on, and which is aborted before it has computed that."""
    request = make_request("a", 700)
    begin_loading(side, request, blocks, 100)
    side.hear(StepReport(num_chunks={"a": [1]}), set(blocks[16:38]))
    request.num_computed_tokens = 256
    side.finish(request, blocks)


def test_who_shares_blocks_of_a_failed_load_is_taken_back(space: Space) -> None:
    """vLLM has them in its prefix cache, the ones that were computed from them too."""
    fill(space, 600)
    side, blocks = make_side(space, "blocking"), [*range(100, 144)]
    fail_and_abort(side, blocks)
    other = make_request("b", 720)
    side.add(other)
    other.num_computed_tokens = 640
    mine = [*blocks[:40], *range(300, 305)]
    orders = side.order(make_step(new=[(other, mine)], scheduled={"b": 80}))
    assert orders.wrong_blocks == {blocks[16]}
    side.hear(None, set(orders.wrong_blocks))
    other.num_computed_tokens = 256  # as vLLM does
    orders = side.order(make_step(scheduled={"b": 100}))
    assert not orders.wrong_blocks
    other.num_computed_tokens = 356
    third = make_request("c", 720)
    side.add(third)
    third.num_computed_tokens = 640
    orders = side.order(make_step(new=[(third, [*blocks[:40], *range(400, 405)])], scheduled={"b": 100, "c": 80}))
    assert orders.wrong_blocks == {blocks[28]}, "what is not computed yet, though its beginning is"
    side.hear(None, set(orders.wrong_blocks))
    other.num_computed_tokens, third.num_computed_tokens = 448, 448
    orders = side.order(make_step(scheduled={"b": 272, "c": 272}))
    assert not orders.wrong_blocks, "it is computed in this very step"


def test_what_was_computed_from_a_failed_load_is_wrong_too(space: Space) -> None:
    """Also when the blocks that failed have been computed since."""
    fill(space, 600)
    side, blocks = make_side(space, "blocking"), [*range(100, 144)]
    fail_and_abort(side, blocks)
    healer, other = make_request("b", 608), make_request("c", 720)
    side.add(healer)
    healer.num_computed_tokens = 256
    assert not side.order(make_step(new=[(healer, blocks[:38])], scheduled={"b": 352})).wrong_blocks
    side.add(other)
    other.num_computed_tokens = 688
    orders = side.order(make_step(new=[(other, [*blocks[:43], 300, 301])], scheduled={"c": 32}))
    assert orders.wrong_blocks == {blocks[38]}


def test_blocks_of_a_failed_load_are_as_good_as_others_once_they_are_written(space: Space) -> None:
    fill(space, 600)
    side, blocks = make_side(space, "blocking"), [*range(100, 144)]
    fail_and_abort(side, blocks)
    other = make_request("b", 704)
    side.add(other)
    backwards = blocks[::-1]
    for start in range(0, 704, 88):
        other.num_computed_tokens = start
        new = [(other, backwards)] if not start else []
        assert not side.order(make_step(new=new, scheduled={"b": 88})).wrong_blocks
    assert not side._spoiled


def test_in_async_mode_nobody_has_used_what_failed(space: Space) -> None:
    fill(space, 600)
    side, request, blocks = make_side(space), make_request("a", 700), [*range(100, 144)]
    begin_loading(side, request, blocks, 0)
    side.hear(StepReport(num_chunks={"a": [1]}), set(blocks[16:38]))
    assert not side._spoiled


def test_loads_are_counted_as_they_end(space: Space) -> None:
    """One comes whole, one in part, and for the third nobody waits any more."""
    fill(space, 600)
    side, ends = make_side(space), {"a": 3, "b": 1, "c": 0}
    for name, num_chunks in ends.items():
        request = make_request(name, 700)
        assert [side.match(request, 0) for _ in range(3)] == [600] * 3
        side.allocated(request, [*range(100, 144)], 600)
        side.order(make_step())
        if name == "c":
            side.finish(request, [])
        side.hear(StepReport(num_chunks={name: [num_chunks]}), set())
    stats = side.counts.stats()
    assert (stats.num_asked_tokens, stats.num_matched_tokens) == (3 * 699, 3 * 600)
    assert (stats.num_loaded_tokens, stats.num_failed_loads) == (600 + 256, 1)
    assert stats.wait_seconds > 0


def test_an_id_that_is_used_again_is_another_request(space: Space) -> None:
    fill(space, 600)
    side, first = make_side(space, "blocking"), make_request("a", 700)
    begin_loading(side, first, [*range(100, 144)], 100)
    side.finish(first, [*range(100, 144)])
    second = make_request("a", 300)
    side.add(second)
    side.hear(StepReport(num_chunks={"a": [2]}), set())
    orders = side.order(make_step(new=[(second, [*range(1, 20)])], scheduled={"a": 300}))
    assert not saved(orders)


def test_a_request_whose_keys_cannot_be_made_is_served_without_the_pool(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    side, request = make_side(space), make_request("a", 300)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise TokenError("an image that lies outside of the prompt")

    monkeypatch.setattr(side._half, "begin", refuse)
    side.add(request)
    assert side.match(request, 0) == 0
    side.finish(request, [])


def test_images_that_are_only_counted_make_a_request_private(space: Space) -> None:
    request = make_request("a", 300)
    request.mm_features = [SimpleNamespace(identifier="renderer0-mm-3-image-0")]
    side = make_side(space, hashes_inputs=False)
    side.add(request)
    assert side._tracked["a"].inputs is None


def test_a_new_epoch_takes_back_what_was_not_ordered_yet(space: Space) -> None:
    side, request = make_side(space), make_request("a", 300)
    side.add(request)
    side.order(make_step(new=[(request, [*range(1, 20)])], scheduled={"a": 300}))
    request.num_computed_tokens = 300
    side.finish(request, [*range(1, 20)])
    side.start_epoch(space)
    assert not side.order(make_step()).saves


def test_loads_that_go_along_with_a_step_need_steps_one_by_one() -> None:
    options = read_options({"load_mode": "layerwise"}, "kv_both")
    assert settle_load_mode(options, 1).connector.load_mode == "layerwise"
    assert settle_load_mode(options, 2).connector.load_mode == "async"


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
