"""What is ordered, step by step, with real requests of vLLM and no engine: above all that nothing is saved which is not
the KV of the tokens it would be saved for. `tests/unit/test_connector_scheduler.py` has what is not vLLM's.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from headwater.connector.config import ConnectorConfig
from headwater.connector.orders import SaveOrder, StepOrders, StepReport
from headwater.connector.scheduler import SchedulerSide
from headwater.connector.tracker import Inputs
from headwater.errors import TokenError
from headwater.integrations.vllm.connector import HeadwaterConnector
from headwater.integrations.vllm.declined import LOGGER
from headwater.integrations.vllm.messages import StepMetadata, WorkerMetadata
from headwater.integrations.vllm.options import read_options, settle_load_mode
from headwater.integrations.vllm.reloads import Freshness
from headwater.integrations.vllm.steps import IDLE_WAIT_S, NULL_BLOCK, Steps
from headwater.integrations.vllm.takeback import Takeback, why_outside
from headwater.kv.hashing import ChunkKeys, ChunkRef
from headwater.kv.topology import whole_shard
from headwater.pool.pool import open_pool
from headwater.pool.space import Space
from headwater.stores.base import Status

from support import gqa, identity, wait_until

BLOCK = 16
SPEC = gqa(layers=1, heads=1, dim=8)
SHARD = whole_shard(SPEC)
MEMORY = "memory://?capacity=64MiB&deadline=30"


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
    more: Sequence[tuple[Request, list[int]]] = (),
) -> Any:
    cached = SimpleNamespace(
        req_ids=[request.request_id for request, _ in (*resumed, *more)],
        new_block_ids=[(blocks,) for _, blocks in (*resumed, *more)],
        resumed_req_ids={request.request_id for request, _ in resumed},
    )
    return SimpleNamespace(
        preempted_req_ids=set(preempted),
        scheduled_new_reqs=[SimpleNamespace(req_id=r.request_id, block_ids=(blocks,)) for r, blocks in new],
        scheduled_cached_reqs=cached,
        num_scheduled_tokens=scheduled or {},
        total_num_scheduled_tokens=sum((scheduled or {}).values()),
    )


def spans(orders: Sequence[SaveOrder]) -> list[tuple[str, int, int]]:
    """(Request, first token, end) of everything that is to be saved."""
    return [
        (order.job.request_id, chunk.first_token, chunk.first_token + chunk.num_tokens)
        for order in orders
        for chunk in order.job.chunks
    ]


def saved(orders: StepOrders) -> list[tuple[str, int, int]]:
    """What is saved before or in the course of a step."""
    return spans([*orders.before, *orders.during])


def fill(space: Space, num_tokens: int) -> None:
    chunks = space.keys([*range(1, num_tokens + 1)]).chunks()
    tiles = [np.full(space.empty(chunk, SHARD).shape, 7, np.uint8) for chunk in chunks]
    assert set(space.write(chunks, SHARD, tiles)) == {Status.OK}


def make_side(space: Space, mode: str = "async", **settings: Any) -> Steps:
    config = ConnectorConfig(pool=MEMORY, load_mode=mode)
    side = SchedulerSide(space, config, block_size=BLOCK, num_ranks=1, dummy_block=NULL_BLOCK)
    return Steps(side, **settings)


def match(side: Steps, request: Request, num_computed: int = 0) -> int:
    """How much can be loaded, once it has been fetched from where it is."""
    found: list[int] = []

    def is_known() -> bool:
        num_new, _ = side.match(request, num_computed)
        found[:] = [] if num_new is None else [num_new]
        return bool(found)

    wait_until(is_known)
    return found[0]


@pytest.fixture
def space() -> Iterator[Space]:
    with open_pool(MEMORY) as pool:
        yield pool.space(identity(), SPEC)


def begin_loading(side: Steps, request: Request, blocks: list[int], num_more: int) -> StepOrders:
    """The step in which a request loads what the pool has, and computes `num_more` tokens."""
    side.add(request)
    num_external = match(side, request)
    assert num_external
    side.allocated(request, blocks, num_external)
    request.num_computed_tokens = num_external
    orders = side.order(make_step(new=[(request, blocks)], scheduled={request.request_id: num_more}))
    request.num_computed_tokens = num_external + num_more
    return orders


@pytest.mark.parametrize("mode", ["layerwise", "blocking"])
def test_what_is_being_loaded_is_not_saved(mode: str, tmp_path: Path) -> None:
    """Though the tier that saves go to has lost it: others found it damaged, and removed it, after it was matched."""
    name = f"headwater-test-{tmp_path.parent.name}-{tmp_path.name}"
    below = f"file://{tmp_path}/below?capacity=64MiB&deadline=30"
    with open_pool(below) as pool:
        fill(pool.space(identity(), SPEC), 600)
    try:
        with open_pool(f"shm:///{name}?capacity=64MiB&deadline=30,{below}") as pool:
            space = pool.space(identity(), SPEC)
            side, request, blocks = make_side(space, mode), make_request("a", 600), [*range(100, 138)]
            assert match(side, request) == 599
            chunks = space.keys(request.prompt_token_ids).chunks()
            assert space.exists(chunks) == [True] * 3, "it was not fetched"
            assert spoil(space, Path("/dev/shm", name), chunks[1:]) == [Status.DAMAGED, Status.MISS]
            assert space.exists(chunks) == [True, False, False]
            side.allocated(request, blocks, 599)
            request.num_computed_tokens = 599
            orders = side.order(make_step(new=[(request, blocks)], scheduled={"a": 1}))
            assert [load.mode for load in orders.loads] == [mode]
            assert not saved(orders)
            side.handle_report(StepReport(ended={"a": (1,)}), set(blocks[16:]))  # only the first chunk came
            request.num_computed_tokens = 256
            orders = side.order(make_step(scheduled={"a": 344}))
            assert not saved(orders), "its blocks are wrong until this step has ended"
            request.num_computed_tokens = 600
            request.append_output_token_ids(1000)
            orders = side.order(make_step(scheduled={"a": 1}))
            assert spans(orders.before) == [("a", 256, 512), ("a", 512, 600)], "computed in place of what did not come"
            assert not orders.during
    finally:
        shutil.rmtree(f"/dev/shm/{name}", ignore_errors=True)


def spoil(space: Space, directory: Path, chunks: Sequence[ChunkRef]) -> list[Status]:
    """Damage the first tier all over and have these chunks read, which removes them."""
    for segment in directory.glob("data*"):
        with segment.open("r+b") as file:
            file.write(b"\xa5" * segment.stat().st_size)
    return [space.judge(chunk, SHARD) for chunk in chunks]


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
    num_external = match(side, request)
    side.allocated(request, [*range(500, 520)], num_external)
    orders = side.order(make_step(preempted=["a"]))
    (order,) = orders.before
    assert order.job.block_ids.tolist() == [*range(1, 25)]
    assert saved(orders) == [("a", 256, 310)]
    assert orders.loads[0].job.block_ids.tolist()[:20] == [*range(500, 520)]


@pytest.mark.parametrize("mode", ["layerwise", "blocking"])
def test_what_was_computed_from_a_failed_load_is_not_saved(space: Space, mode: str) -> None:
    fill(space, 600)
    side, request, blocks = make_side(space, mode), make_request("a", 700), [*range(100, 144)]
    begin_loading(side, request, blocks, 100)
    side.handle_report(StepReport(ended={"a": (1,)}), set(blocks[16:38]))
    request.num_computed_tokens = 0
    assert saved(side.order(make_step(preempted=["a"]))) == []


def fail_and_abort(side: Steps, blocks: list[int]) -> None:
    """A request whose load fails from its second chunk on, and which is aborted before it has computed that."""
    request = make_request("a", 700)
    begin_loading(side, request, blocks, 100)
    side.handle_report(StepReport(ended={"a": (1,)}), set(blocks[16:38]))
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
    side.handle_report(None, set(orders.wrong_blocks))
    other.num_computed_tokens = 256  # as vLLM does
    orders = side.order(make_step(scheduled={"b": 100}))
    assert not orders.wrong_blocks
    other.num_computed_tokens = 356
    third = make_request("c", 720)
    side.add(third)
    third.num_computed_tokens = 640
    orders = side.order(make_step(new=[(third, [*blocks[:40], *range(400, 405)])], scheduled={"b": 100, "c": 80}))
    assert orders.wrong_blocks == {blocks[28]}, "what is not computed yet, though its beginning is"
    side.handle_report(None, set(orders.wrong_blocks))
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
    assert not side.side._spoiled


def test_in_async_mode_nobody_has_used_what_failed(space: Space) -> None:
    fill(space, 600)
    side, request, blocks = make_side(space), make_request("a", 700), [*range(100, 144)]
    begin_loading(side, request, blocks, 0)
    side.handle_report(StepReport(ended={"a": (1,)}), set(blocks[16:38]))
    assert not side.side._spoiled


def test_loads_are_counted_as_they_end(space: Space) -> None:
    """One comes whole, one in part, and for the third nobody waits any more."""
    fill(space, 600)
    side, ends = make_side(space), {"a": 3, "b": 1, "c": 0}
    for name, num_chunks in ends.items():
        request = make_request(name, 700)
        assert [side.match(request, 0) for _ in range(3)] == [(600, True)] * 3
        side.allocated(request, [*range(100, 144)], 600)
        side.order(make_step())
        if name == "c":
            side.finish(request, [])
        side.handle_report(StepReport(ended={name: (num_chunks,)}), set())
    stats = side.side.counts.stats()
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
    side.handle_report(StepReport(ended={"a": (2,)}), set())
    orders = side.order(make_step(new=[(second, [*range(1, 20)])], scheduled={"a": 300}))
    assert saved(orders) == [("a", 256, 300)], "the pool has the first chunk"
    assert orders.during[0].job.block_ids.tolist() == [*range(1, 20)]


def test_a_request_whose_keys_cannot_be_made_is_served_without_the_pool(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    side, request = make_side(space), make_request("a", 300)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise TokenError("an image that lies outside of the prompt")

    with monkeypatch.context() as patch:
        patch.setattr(space, "keys", lambda tokens=(), **more: refuse() if tokens else ChunkKeys(bytes(32), 256))
        side.add(request)
    assert side.match(request, 0) == (0, False)
    assert not saved(side.order(make_step(new=[(request, [*range(1, 20)])], scheduled={"a": 300})))
    request.num_computed_tokens = 300
    side.finish(request, [*range(1, 20)])
    assert not saved(side.order(make_step()))


def test_images_that_are_only_counted_make_a_request_private(space: Space) -> None:
    request = make_request("a", 300)
    request.mm_features = [SimpleNamespace(identifier="renderer0-mm-3-image-0")]
    side = make_side(space, hashes_inputs=False)
    side.add(request)
    assert side.match(request, 0) == (0, False)
    assert not saved(side.order(make_step(new=[(request, [*range(1, 20)])], scheduled={"a": 300})))


def test_local_hits_of_prompt_embeddings_are_not_saved(space: Space) -> None:
    """vLLM's own cache does not know which embeddings stand for tokens: once it gave one request the KV of another,
    and this was saved under the second one's name."""
    side = make_side(space)
    first, second, third = (make_request(name, 600) for name in "abc")
    for request, mask in ((first, [True] * 600), (second, None), (third, None)):
        request.prompt_embeds, request.prompt_is_token_ids = torch.ones(600, 2), mask
        side.add(request)
    blocks = [*range(1, 39)]
    assert match(side, first) == 0
    assert saved(side.order(make_step(new=[(first, blocks)], scheduled={"a": 600})))
    assert match(side, second, 512) == 0
    second.num_computed_tokens = 512
    assert not saved(side.order(make_step(new=[(second, [*blocks[:32], *range(50, 56)])], scheduled={"b": 88})))
    assert match(side, third) == 0
    assert saved(side.order(make_step(new=[(third, [*range(100, 138)])], scheduled={"c": 600})))


def test_local_hits_of_a_name_that_two_adapters_had_are_not_saved(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own cache knows an adapter by the name that it was given, also after another one got that name."""
    side = make_side(space)
    monkeypatch.setattr(side, "_inputs", lambda request: Inputs(adapter=request.request_id[:1].encode() * 32))

    def saves(name: str, shared: Sequence[int] = ()) -> bool:
        """The first letter is the adapter's, and each number has blocks of its own beside those that it shares."""
        request, num_local = make_request(name, 600), 16 * len(shared)
        request.lora_request = SimpleNamespace(lora_name="summaries")  # type: ignore[assignment]
        assert match(side, request, num_local) == 0
        request.num_computed_tokens = num_local
        first = 1000 * int(name[1:])
        step = make_step(new=[(request, [*shared, *range(first, first + 38)][:38])], scheduled={name: 600 - num_local})
        return bool(saved(side.order(step)))

    assert saves("a1")
    assert saves("a2", range(1000, 1032))
    assert not saves("b3", range(1000, 1032))
    assert saves("b4")
    assert not saves("a5", range(4000, 4032))
    assert saves("b6", range(4000, 4032))


def test_a_new_epoch_takes_back_what_was_not_ordered_yet(space: Space) -> None:
    side, request = make_side(space), make_request("a", 300)
    side.add(request)
    side.order(make_step(new=[(request, [*range(1, 25)])], scheduled={"a": 300}))
    request.num_computed_tokens = 340
    request.append_output_token_ids([*range(1000, 1041)])
    side.finish(request, [*range(1, 25)])
    side.start_epoch(space)
    assert not saved(side.order(make_step()))


@pytest.mark.parametrize("mode", ["auto", "layerwise", "blocking"])
def test_loads_go_along_with_steps_only_where_these_can_be_taken_back(
    mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = read_options({"load_mode": mode}, "kv_both")
    assert settle_load_mode(options, "") == options
    with caplog.at_level("INFO", LOGGER):
        assert settle_load_mode(options, "it has pipeline stages").connector.load_mode == "async"
    assert f"async instead of {mode} in this vLLM: it has pipeline stages" in caplog.text


@pytest.mark.parametrize(
    ("stages", "replicas", "num_batches", "wanted"),
    [
        (1, 1, 1, {"auto": "", "layerwise": ""}),
        (1, 1, 2, {"auto": "", "layerwise": ""}),
        (2, 1, 2, {"auto": "pipeline stages", "layerwise": "pipeline stages"}),
        (1, 1, 3, {"auto": "3 steps ahead", "layerwise": "3 steps ahead"}),
        (1, 4, 2, {"auto": "data-parallel ranks", "layerwise": ""}),
    ],
)
def test_when_requests_always_wait_outside_the_batch(
    stages: int, replicas: int, num_batches: int, wanted: dict[str, str]
) -> None:
    parallel = SimpleNamespace(pipeline_parallel_size=stages, data_parallel_size=replicas)
    config = SimpleNamespace(parallel_config=parallel, max_concurrent_batches=num_batches)
    for mode, reason in wanted.items():
        said = why_outside(config, mode)
        assert reason in said
        assert bool(reason) == bool(said)


# ---- in the step that computes ------------------------------------------------------------------------------------


def test_a_prompt_is_saved_in_the_step_that_computes_it(space: Space) -> None:
    side, request = make_side(space), make_request("a", 600)
    side.add(request)
    assert match(side, request) == 0
    orders = side.order(make_step(new=[(request, [*range(1, 33)])], scheduled={"a": 512}))
    assert not orders.before
    assert spans(orders.during) == [("a", 0, 256), ("a", 256, 512)]
    request.num_computed_tokens = 512
    orders = side.order(make_step(more=[(request, [*range(33, 39)])], scheduled={"a": 88}))
    assert not orders.before
    assert spans(orders.during) == [("a", 512, 600)]
    assert orders.during[0].job.block_ids.tolist() == [*range(1, 39)]
    for token in range(1000, 1180):
        request.num_computed_tokens = token - 400
        request.append_output_token_ids(token)
        orders = side.order(make_step(scheduled={"a": 1}))
        assert not orders.during, "the token that is computed was sampled a moment ago"
        assert spans(orders.before) == ([("a", 512, 768)] if request.num_computed_tokens == 768 else [])


def test_two_equal_prompts_of_one_step_are_saved_when_they_are_computed(space: Space) -> None:
    """vLLM lets the second one share blocks that the first computes in the same step: before it, they hold noise."""
    side, first, second = make_side(space), make_request("a", 600), make_request("b", 600)
    for request in (first, second):
        side.add(request)
    assert match(side, first) == 0
    assert match(side, second, 592) == 0
    second.num_computed_tokens = 592
    blocks = [*range(1, 39)]
    new = [(first, blocks), (second, [*blocks[:37], 50])]
    orders = side.order(make_step(new=new, scheduled={"a": 600, "b": 8}))
    assert not orders.before
    assert {name for name, _, _ in spans(orders.during)} == {"a", "b"}


def test_prompt_logprobs_need_no_look_up(space: Space) -> None:
    fill(space, 600)
    side, request = make_side(space), make_request("a", 600)
    request.skip_reading_prefix_cache = True
    side.add(request)
    assert side.match(request, 0) == (0, False)


# ---- fetches ------------------------------------------------------------------------------------------------------


class FakeFetch:
    """Chunks on their way, as the test says."""

    def __init__(self) -> None:
        self.num_kept, self.is_done, self.is_released, self.seconds = 0, False, False, 0.5
        self.left_s = float("inf")

    def release(self) -> None:
        self.is_released = True


@pytest.fixture
def fetch(space: Space, monkeypatch: pytest.MonkeyPatch) -> FakeFetch:
    made = FakeFetch()
    monkeypatch.setattr(space, "fetch", lambda chunks, deadline_s: made)
    return made


@pytest.mark.parametrize("mode", ["async", "layerwise", "blocking"])
@pytest.mark.parametrize("num_kept", [3, 1])
def test_vllm_is_told_to_ask_again_while_kv_is_fetched(
    space: Space, fetch: FakeFetch, mode: str, num_kept: int
) -> None:
    fill(space, 600)
    side, request, blocks = make_side(space, mode), make_request("a", 700), [*range(100, 144)]
    side.add(request)
    for _ in range(3):
        assert side.match(request, 0) == (None, False)
    begin = time.monotonic()
    side.order(make_step())
    assert time.monotonic() - begin >= IDLE_WAIT_S, "an engine with nothing to do spins"
    fetch.is_done, fetch.num_kept = True, num_kept
    is_near = num_kept == 3
    assert side.match(request, 0) == (600, mode == "async" or not is_near)
    side.allocated(request, blocks, 600)
    (load,) = side.order(make_step()).loads
    assert load.mode == (mode if is_near else "async")
    assert not fetch.is_released
    side.handle_report(StepReport(ended={"a": (3,)}), set())
    assert fetch.is_released


def test_an_engine_that_computes_does_not_wait_for_a_fetch(
    space: Space, fetch: FakeFetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(space, 600)
    side, far, near = make_side(space), make_request("a", 700), make_request("b", 20)
    near.prompt_token_ids[:] = [5] * 20
    for request in (far, near):
        side.add(request)
    assert side.match(far, 0) == (None, False)
    waits = list[float]()
    monkeypatch.setattr(side.side, "wait_fetch", waits.append)
    side.order(make_step(new=[(near, [1, 2])], scheduled={"b": 20}))
    near.num_in_flight_tokens = 20
    for _ in range(20):
        side.order(make_step())  # the step before has not been heard of
    assert not waits
    near.num_in_flight_tokens = 0
    side.order(make_step())
    assert waits == [IDLE_WAIT_S], "an engine with nothing to do does not wait: this test tested nothing"


@pytest.mark.parametrize("how", ["aborted", "computed instead"])
def test_a_fetch_is_let_go_of(space: Space, fetch: FakeFetch, how: str) -> None:
    fill(space, 600)
    side, request = make_side(space), make_request("a", 700)
    side.add(request)
    assert side.match(request, 0) == (None, False)
    if how == "aborted":
        side.finish(request, [])
    else:
        side.order(make_step(new=[(request, [*range(1, 50)])], scheduled={"a": 700}))
    assert fetch.is_released


# ---- KV that another server sends ---------------------------------------------------------------------------------


def expecting(name: str, count: int, params: Any) -> Request:
    """A request as vLLM's server makes it from a body with `kv_transfer_params`."""
    extra = {"kv_transfer_params": params}
    return Request(
        request_id=name,
        prompt_token_ids=[*range(1, count + 1)],
        sampling_params=SamplingParams(max_tokens=100, extra_args=extra),
        pooling_params=None,
    )


@pytest.mark.parametrize("mode", ["async", "layerwise", "blocking"])
@pytest.mark.parametrize("num_came", [3, 1])
def test_kv_that_is_expected_is_followed_outside_the_batch(space: Space, mode: str, num_came: int) -> None:
    params = {"headwater": {"transfer": "7", "wait_s": 60.0, "start_s": 60.0}, "do_remote_decode": False}
    side, request, blocks = make_side(space, mode), expecting("a", 700, params), [*range(100, 144)]
    side.add(request)
    assert side.match(request, 0) == (None, False)
    begin = time.monotonic()
    side.order(make_step())
    assert time.monotonic() - begin >= IDLE_WAIT_S, "an engine with nothing to do spins"
    chunk = space.keys([*range(1, 701)]).ref(0)
    (reservation,) = space.reserve([chunk], SHARD)
    assert side.match(request, 0) == (699, True)
    side.allocated(request, blocks, 699)
    (load,) = side.order(make_step()).loads
    assert load.mode == "async"
    assert load.wait is not None
    assert 0 < load.wait.wait_s <= 60
    assert [chunk.num_tokens for chunk in load.job.chunks] == [256, 256, 188]
    side.handle_report(StepReport(ended={"a": (num_came,)}), set())
    stats = side.side.counts.stats()
    assert (stats.num_expected, stats.num_followed, stats.num_given_up) == (1, 1, int(num_came < 3))
    assert side.match(request, 256 * num_came) == (0, False), "it is computed from here on"
    reservation.close()


@pytest.mark.parametrize("params", [None, {}, {"headwater": {"wait_s": "soon", "transfer": "7"}}, {"headwater": 7}])
def test_parameters_that_say_nothing_cost_nothing(space: Space, params: Any) -> None:
    side, request = make_side(space), expecting("a", 700, params)
    side.add(request)
    assert side.match(request, 0) == (0, False)
    assert side.side.counts.stats().num_expected == 0


# ---- KV that goes to another server -------------------------------------------------------------------------------

PUSH = {"headwater": {"push_to": "127.0.0.1:7", "transfer": "0a"}, "do_remote_decode": True}


def test_a_prompt_is_announced_with_its_steps_and_its_answer_says_so(space: Space) -> None:
    side, request = make_side(space), expecting("a", 700, PUSH)
    side.add(request)
    assert side.match(request, 0) == (0, False), "what goes elsewhere is not waited for"
    blocks = [*range(1, 50)]
    orders = side.order(make_step(new=[(request, blocks)], scheduled={"a": 300}))
    assert [[c.num_tokens for c in push.chunks] for push in orders.pushes] == [[256, 256]]
    assert [push.peer for push in orders.pushes] == ["127.0.0.1:7"]
    request.num_computed_tokens = 300
    orders = side.order(make_step(scheduled={"a": 400}))
    assert [[c.num_tokens for c in push.chunks] for push in orders.pushes] == [[188]]
    request.num_computed_tokens = 700
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    assert side.finish(request, blocks) == {"headwater": {"transfer": "0a", "sent_tokens": 700}}
    assert side.side.pushes.has_orders
    ((name, transfer, deadline_s),) = side.order(make_step()).flushes
    assert (name, transfer) == ("a", "0a")
    assert deadline_s > 0
    side.handle_report(StepReport(pushed={"a": (700,)}), set())


def test_a_prompt_that_is_aborted_is_not_pushed_any_more(space: Space) -> None:
    side, request = make_side(space), expecting("a", 700, PUSH)
    side.add(request)
    side.order(make_step(new=[(request, [*range(1, 50)])], scheduled={"a": 300}))
    request.status = RequestStatus.FINISHED_ABORTED
    assert side.finish(request, []) == {"headwater": {"transfer": "0a", "sent_tokens": 0}}
    assert [flush.deadline_s for flush in side.order(make_step()).flushes] == [0.0]


def test_an_answer_without_a_push_says_nothing(space: Space) -> None:
    side, request = make_side(space), expecting("a", 700, {"headwater": {"transfer": "0a"}})
    side.add(request)
    assert side.finish(request, []) is None


# ---- vLLM's hooks -------------------------------------------------------------------------------------------------


class Recorder:
    """A worker side that notes what it is told."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.calls.append((name, *args))


def make_connector(worker: Any, *, saves_layers: bool = True) -> Any:
    connector = HeadwaterConnector.__new__(HeadwaterConnector)
    vars(connector).update(_worker=worker, _saves_layers=saves_layers, _layers={}, step_seconds=0.0)
    vars(connector).update(_takeback=None, _steps=None, _left=None)
    vars(connector).update(_member=None, _has_told_home=False, _epoch=0, _stale_epoch=None, _freshness=Freshness(0))
    return connector


def test_layers_are_announced_by_their_number() -> None:
    connector = make_connector(worker := Recorder())
    for layer in (0, 11):
        connector.wait_for_layer_load(f"model.layers.{layer}.self_attn.attn")
        connector.save_kv_layer(f"model.layers.{layer}.self_attn.attn", None, None)
    connector.wait_for_save()
    assert worker.calls == [
        ("before_layer", 0),
        ("after_layer", 0),
        ("before_layer", 11),
        ("after_layer", 11),
        ("end_step",),
    ]


METADATA = {"model.layers.0.self_attn.attn": object()}


@pytest.mark.parametrize(
    ("context", "saves_layers", "waits_at_once"),
    [
        (SimpleNamespace(cudagraph_runtime_mode=CUDAGraphMode.NONE, attn_metadata=METADATA), True, False),
        (SimpleNamespace(cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE, attn_metadata=METADATA), True, False),
        (SimpleNamespace(cudagraph_runtime_mode=CUDAGraphMode.FULL, attn_metadata=METADATA), True, True),
        (SimpleNamespace(cudagraph_runtime_mode=CUDAGraphMode.NONE, attn_metadata=None), True, True),
        (SimpleNamespace(attn_metadata=METADATA), True, True),
        (SimpleNamespace(cudagraph_runtime_mode=CUDAGraphMode.NONE, attn_metadata=METADATA), False, True),
    ],
    ids=["eager", "pieces", "one graph", "one graph of the second runner", "unknown", "micro-batches"],
)
def test_a_step_without_hooks_waits_for_its_loads_before_it_computes(
    context: Any, saves_layers: bool, waits_at_once: bool
) -> None:
    for has_loads in (True, False):
        connector = make_connector(worker := Recorder(), saves_layers=saves_layers)
        worker.needs_layers = has_loads
        connector._connector_metadata = StepMetadata(StepOrders())
        connector.start_load_kv(context)
        calls = [name for name, *_ in worker.calls]
        assert calls == ["start_loads", *(["wait_layers"] if waits_at_once and has_loads else [])]


def test_loads_of_a_step_have_ended_when_vllm_asks_for_them() -> None:
    """With speculative decoding it asks before it says that the step is over."""
    connector = make_connector(worker := Recorder())
    worker.take_finished = set
    connector.get_transfer_results(set())
    assert worker.calls == [("end_loads",)]


@pytest.mark.parametrize(
    "lacks", ["", "nothing made it", "evict_blocks", "drop_stale_output", "num_stale_output_tokens"]
)
def test_a_vllm_that_schedules_ahead_and_cannot_take_steps_back_loads_outside_the_batch(
    lacks: str, space: Space, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Manager:
        def get_block_ids(self, request_id: str) -> tuple[list[int]]:
            return ([],)

        block_pool = None

        def evict_blocks(self, block_ids: set[int]) -> None:
            pass

    class Scheduler:
        def __init__(self) -> None:
            self.running, self.requests, self.prev_step_scheduled_req_ids = [], {}, set()
            self.kv_cache_manager = Manager()

        def _preempt_request(self, request: Any, timestamp: float, drop_stale_output: bool = False) -> None:
            pass

    scheduler = Scheduler()
    if lacks == "evict_blocks":
        monkeypatch.delattr(Manager, lacks)
    elif lacks == "drop_stale_output":
        monkeypatch.setattr(Scheduler, "_preempt_request", lambda self, request, timestamp: None)
    elif lacks == "num_stale_output_tokens":
        monkeypatch.setattr(Request, "__init__", lambda self: None)
    connector = make_connector(None)
    connector._steps, connector._options = make_side(space, "auto"), read_options({}, "kv_both")
    connector._steps.side.loads_in_step = False
    connector._takeback = None if lacks == "nothing made it" else Takeback(scheduler)
    with caplog.at_level("INFO", LOGGER):
        connector.bind_kv_cache_manager(scheduler.kv_cache_manager)
    assert connector._steps.side.loads_in_step == (not lacks)
    assert ("async instead of auto" in caplog.text) == bool(lacks)


def test_wrong_blocks_are_taken_back_although_the_pool_is_off(space: Space) -> None:
    """A worker that fails in the middle of a step gives its reason, and the blocks that it did not fill."""
    taken = list[set[int]]()
    connector = make_connector(None)
    connector._steps = make_side(space, "auto")
    connector._takeback = SimpleNamespace(take_back=taken.append, drop_output=taken.append)
    told = KVConnectorOutput(
        invalid_block_ids={3, 4}, kv_connector_worker_meta=WorkerMetadata(StepReport(declined="it is broken"))
    )
    connector.update_connector_output(told)
    assert connector._steps is None
    connector.update_connector_output(told)
    connector.build_connector_meta(make_step(preempted=["a"]))
    assert taken == [None, None, ["a"]]


def test_layers_that_run_twice_in_a_step_are_saved_at_its_end() -> None:
    connector = make_connector(worker := Recorder(), saves_layers=False)
    connector.save_kv_layer("model.layers.0.self_attn.attn", None, None)
    connector.wait_for_save()
    assert worker.calls == [("end_step",)]


def test_a_forward_pass_that_fails_saves_nothing() -> None:
    """vLLM ends the step in a `finally`."""
    connector = make_connector(worker := Recorder())

    @contextmanager
    def step() -> Iterator[None]:
        try:
            yield
        finally:
            connector.wait_for_save()

    def forward() -> None:
        with step():
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        forward()
    assert worker.calls == [("discard",)]
    connector.wait_for_save()
    assert worker.calls[1:] == [("end_step",)]


def test_a_worker_that_fails_in_a_step_is_left_and_vllm_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Recorder):
        def after_layer(self, layer: int) -> None:
            raise RuntimeError("no room for a gather")

    connector = make_connector(Failing())
    groups = [SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=BLOCK))]
    connector._kv_cache_config = SimpleNamespace(kv_cache_groups=groups)
    connector.save_kv_layer("model.layers.0.self_attn.attn", None, None)
    connector.save_kv_layer("model.layers.1.self_attn.attn", None, None)
    connector.wait_for_save()
    told = connector.build_connector_worker_meta()
    assert told.report.declined == "RuntimeError: no room for a gather"


def test_reports_of_ranks_become_one() -> None:
    one = WorkerMetadata(StepReport({"a": (3,)}, {"x": 512}))
    other = WorkerMetadata(StepReport({"a": (2,), "b": (1,)}, {"x": 256}, "off"))
    assert one.aggregate(other).report == StepReport({"a": (3, 2), "b": (1,)}, {"x": 256}, "off")
