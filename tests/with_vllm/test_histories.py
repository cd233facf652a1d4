"""vLLM's own scheduler and block manager, with the connector's scheduler side, over a cache whose KV is the history
itself: whatever vLLM shares, preempts, takes back or resumes, no chunk is saved from blocks that hold something else.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from headwater.connector.config import LOAD_MODES, ConnectorConfig
from headwater.connector.events import NoListener
from headwater.connector.orders import StepOrders, StepReport
from headwater.connector.scheduler import SchedulerSide
from headwater.integrations.vllm import steps
from headwater.integrations.vllm.connector import HeadwaterConnector
from headwater.integrations.vllm.messages import StepMetadata, WorkerMetadata
from headwater.integrations.vllm.steps import NULL_BLOCK, Steps
from headwater.integrations.vllm.takeback import Takeback

from histories import EOS, POISON, HistoryCache, HistorySpace, next_token

BLOCK = 4
MAX_LEN = 64
NUM_SCENARIOS = 40


class Connector(HeadwaterConnector):
    """The scheduler side as it is, over a pool of histories."""

    def __init__(self, config: VllmConfig, cache: KVCacheConfig, space: HistorySpace, mode: str, depth: int) -> None:
        KVConnectorBase_V1.__init__(self, config, KVConnectorRole.SCHEDULER, cache)
        connector = ConnectorConfig(pool="memory://", load_mode=mode, min_load_tokens=1)
        self.side = SchedulerSide(space, connector, block_size=BLOCK, num_ranks=1, dummy_block=NULL_BLOCK)  # type: ignore[arg-type]
        self._steps, self._left = Steps(self.side), None
        self._events = NoListener()
        self._member = None
        self._epoch, self._stale_epoch = 0, None
        self._takeback = Takeback.of_caller()
        self.side.loads_in_step = False

    def get_kv_connector_stats(self) -> None:
        return None


class Server:
    """vLLM's scheduler, and workers that do what it says: some steps later, if it schedules ahead."""

    def __init__(self, config: VllmConfig, space: HistorySpace, mode: str, num_blocks: int, depth: int) -> None:
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=config.model_config.dtype)
        cache = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["model.layers.0.self_attn.attn"], spec)])
        config.cache_config.num_gpu_blocks = num_blocks
        assert config.max_concurrent_batches == depth
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                KVConnectorFactory, "create_connector", lambda **options: Connector(config, cache, space, mode, depth)
            )
            make = AsyncScheduler if depth > 1 else Scheduler
            self.scheduler = make(config, cache, StructuredOutputManager(config), BLOCK, log_stats=False)
        assert isinstance(self.scheduler.connector, Connector)
        self.connector = self.scheduler.connector
        assert self.connector.side.loads_in_step
        self.cache = HistoryCache(BLOCK, space)
        self._depth = depth
        self._under_way: list[tuple[Any, ModelRunnerOutput]] = []
        self._block_ids: dict[str, list[int]] = {}
        self._tokens: dict[str, list[int]] = {}
        """As the workers know them, who sample before the scheduler knows."""
        self.said: dict[str, list[int]] = {}
        hasher = get_request_block_hasher(BLOCK, get_hash_fn_by_name("sha256"))
        init_none_hash(get_hash_fn_by_name("sha256"))
        self._make = lambda **fields: Request(pooling_params=None, block_hasher=hasher, **fields)

    def add(self, name: str, prompt: list[int], max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.scheduler.add_request(self._make(request_id=name, prompt_token_ids=prompt, sampling_params=params))
        self._tokens[name] = list(prompt)
        self.said[name] = []

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.has_requests() or self._under_way)

    @property
    def is_loading(self) -> bool:
        """Whether a request waits outside the batch: vLLM cannot reset its prefix cache then."""
        requests = self.scheduler.requests.values()
        return any(request.status == RequestStatus.WAITING_FOR_REMOTE_KVS for request in requests)

    def step(self) -> None:
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self._under_way.append((output, self._execute(output)))
        if self._under_way and (len(self._under_way) >= self._depth or not self.scheduler.has_requests()):
            output, result = self._under_way.pop(0)
            for made in self.scheduler.update_from_output(output, result).values():
                for item in made.outputs:
                    self.said[item.request_id] += item.new_token_ids

    def _execute(self, output: Any) -> ModelRunnerOutput:
        metadata = output.kv_connector_metadata
        assert isinstance(metadata, StepMetadata)
        orders: StepOrders = metadata.orders
        self._note_blocks(output)
        self.cache.start(orders)
        names, sampled = list(output.num_scheduled_tokens), []
        for name in names:
            sampled.append(self._compute(name, output))
        self.cache.end(orders)
        self.cache.land_some()
        ended, self.cache.ended = self.cache.ended, []
        invalid = {block for load, count in ended for block in load.failed_blocks(count, BLOCK, NULL_BLOCK)}
        told = KVConnectorOutput(
            finished_recving={load.job.request_id for load, _ in ended if load.mode == "async"} or None,
            invalid_block_ids=invalid | orders.wrong_blocks,
            kv_connector_worker_meta=WorkerMetadata(self.cache.take_report()),
        )
        return ModelRunnerOutput(
            names, {name: i for i, name in enumerate(names)}, sampled_token_ids=sampled, kv_connector_output=told
        )

    def _note_blocks(self, output: Any) -> None:
        for new in output.scheduled_new_reqs:
            self._block_ids[new.req_id] = list(new.block_ids[0])
            self._computed = getattr(self, "_computed", {}) | {new.req_id: new.num_computed_tokens}
        cached = output.scheduled_cached_reqs
        for name, block_ids, num_computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            more = list(block_ids[0]) if block_ids else []
            self._block_ids[name] = more if name in cached.resumed_req_ids else self._block_ids[name] + more
            # A worker of vLLM has none of a resumed request's tokens.
            assert name in cached.all_token_ids or name not in cached.resumed_req_ids
            self._computed[name] = num_computed

    def _compute(self, name: str, output: Any) -> list[int]:
        request = self.scheduler.requests[name]
        start, count = self._computed[name], output.num_scheduled_tokens[name]
        tokens, known = self._tokens[name], list(request.all_token_ids)
        tokens[: len(known)] = known
        for position in range(start, start + count):
            history = self.cache.compute(self._block_ids[name], position, tokens[position])
        if start + count < len(known) or start + count < request.num_prompt_tokens:
            return []  # a part of a prompt
        del tokens[start + count :]
        tokens.append(EOS if history is POISON else next_token(history))
        return [tokens[-1]]


@pytest.fixture(scope="module")
def configs(qwen3: Path) -> Iterator[dict[tuple[int, int], VllmConfig]]:
    """By (steps ahead, tokens in a step)."""
    made = {}
    for depth in (1, 2):
        for budget in (8, 16, 64):
            args = EngineArgs(
                model=str(qwen3),
                max_model_len=MAX_LEN,
                max_num_batched_tokens=budget,
                max_num_seqs=4,
                async_scheduling=depth > 1,
                enable_prefix_caching=True,
                kv_transfer_config=KVTransferConfig(
                    kv_connector="HeadwaterConnector",
                    kv_connector_module_path="headwater.integrations.vllm",
                    kv_role="kv_both",
                    kv_load_failure_policy="recompute",
                ),
            )
            made[depth, budget] = config = args.create_engine_config()
            config.scheduler_config.async_scheduling = depth > 1  # which the CPU platform switches off
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "IDLE_WAIT_S", 0.0)  # how often a fetch is asked about must not depend on the clock
        yield made


def expected(prompt: list[int], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(min(max_tokens, MAX_LEN - len(prompt))):
        tokens.append(next_token(tuple(tokens)))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("seed", range(12))
def test_any_schedule_of_vllm_gives_the_same_tokens(configs: dict[tuple[int, int], VllmConfig], seed: int) -> None:
    for number in range(NUM_SCENARIOS):
        run_scenario(configs, random.Random(1000 * seed + number))


def run_scenario(configs: dict[tuple[int, int], VllmConfig], rng: random.Random) -> None:
    """Some requests, many of which begin alike, in a cache that may be too small for them."""
    depth, budget = rng.choice(list(configs))
    mode = rng.choice(LOAD_MODES)
    space = HistorySpace(rng.choice([1, 2, 3, 8]), rng)
    space.drop_rate, space.far_rate, space.fail_rate = (rng.choice([0.0, 0.1, 0.5]) for _ in range(3))
    server = Server(configs[depth, budget], space, mode, 2 + MAX_LEN // BLOCK + rng.randrange(24), depth)
    base = [rng.randrange(3, 5) for _ in range(MAX_LEN)]
    prompts: dict[str, tuple[list[int], int]] = {}
    aborted = set[str]()
    for number in range(rng.randint(1, 12)):
        prompt = [*base[: rng.randrange(MAX_LEN - 12)], *[rng.randrange(3, 5) for _ in range(rng.randint(1, 10))]]
        prompts[f"r{number}"] = prompt, rng.randint(1, 12)
        server.add(f"r{number}", *prompts[f"r{number}"])
        for _ in range(rng.choice([0, 1, 2, 3, 30])):
            server.step()
        if rng.random() < 0.3:
            server.scheduler.reset_prefix_cache()
        if rng.random() < 0.2:
            name = f"r{rng.randrange(number + 1)}"
            aborted.add(name)
            server.abort(name)
    check_end(server, prompts, aborted)


@pytest.mark.parametrize("seed", range(12))
def test_nothing_that_a_failed_load_touched_is_told_saved_or_shared(
    configs: dict[tuple[int, int], VllmConfig], seed: int
) -> None:
    """Bursts of requests that begin alike, loads that go along with their steps and often fail, and too few blocks."""
    num_failed = 0
    for number in range(NUM_SCENARIOS):
        num_failed += run_failures(configs, random.Random(1000 * seed + number))
    assert num_failed > NUM_SCENARIOS


def run_failures(configs: dict[tuple[int, int], VllmConfig], rng: random.Random) -> int:
    depth, budget = rng.choice(list(configs))
    space = HistorySpace(rng.choice([2, 4, 8]), rng)
    space.drop_rate, space.far_rate, space.fail_rate = 0.0, 0.0, rng.choice([0.3, 0.8])
    mode = rng.choice(["auto", "layerwise", "blocking"])
    server = Server(configs[depth, budget], space, mode, 2 + MAX_LEN // BLOCK + rng.randrange(16), depth)
    base = [rng.randrange(3, 5) for _ in range(MAX_LEN)]
    prompts: dict[str, tuple[list[int], int]] = {}
    aborted = set[str]()
    for _ in range(rng.randint(2, 6)):
        for chunk in space.keys(base[: rng.randrange(8, MAX_LEN)]).chunks(tail=False):  # as another server saves them
            space.kept[chunk.key] = tuple(base[: chunk.first_token + chunk.num_tokens])
        for _ in range(rng.randint(1, 4)):
            name, start = f"r{len(prompts)}", rng.randrange(16, MAX_LEN - 14)
            prompt = [*base[:start], *[rng.randrange(3, 5) for _ in range(rng.randint(1, 12))]]
            prompts[name] = prompt, rng.randint(1, 9)
            server.add(name, *prompts[name])
        for _ in range(rng.choice([1, 2, 3, 30])):
            server.step()
            if rng.random() < 0.3:
                name = rng.choice(list(prompts))
                aborted.add(name)
                server.abort(name)
        with suppress(RuntimeError):  # blocks that a step may still write are not free; all requests were preempted
            server.scheduler.reset_prefix_cache(reset_running_requests=rng.random() < 0.1 and not server.is_loading)
    check_end(server, prompts, aborted)
    return server.cache.num_failed


@pytest.mark.parametrize("seed", range(20))
def test_what_a_preempted_request_said_is_dropped_while_its_load_is_not_known(
    configs: dict[tuple[int, int], VllmConfig], seed: int
) -> None:
    """Both requests load in the same step, and the next step has no block for the second. (vLLM 0.32 does not preempt a
    request that is in flight, unless it frees blocks at once.)"""
    space = HistorySpace(4, random.Random(seed))
    space.drop_rate, space.far_rate, space.fail_rate = 0.0, 0.0, 1.0
    server = Server(configs[2, 64], space, "auto", num_blocks=1 + 2 * 16 // BLOCK, depth=2)
    server.scheduler.defer_block_free = False
    prompts = {name: ([token] * 16, 8) for name, token in (("a", 3), ("b", 4))}
    for name, (prompt, max_tokens) in prompts.items():
        for chunk in space.keys(prompt).chunks():
            space.kept[chunk.key] = tuple(prompt[: chunk.first_token + chunk.num_tokens])
        server.add(name, prompt, max_tokens)
    server.step()
    assert server.cache.num_loads == 2
    server.step()
    assert server.scheduler.requests["b"].num_preemptions
    check_end(server, prompts, set())


class FailingServer(Server):
    """Its worker leaves the pool in the step whose load fails."""

    has_failed = False

    def _execute(self, output: Any) -> ModelRunnerOutput:
        result = super()._execute(output)
        told = result.kv_connector_output
        assert told is not None
        if told.invalid_block_ids and not self.has_failed:
            self.has_failed = True
            told.kv_connector_worker_meta = WorkerMetadata(StepReport(declined="it is broken"))
        return result


@pytest.mark.parametrize("mode", ["auto", "layerwise", "blocking"])
@pytest.mark.parametrize("is_aborted", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
def test_nobody_shares_wrong_blocks_after_the_pool_is_off(
    configs: dict[tuple[int, int], VllmConfig], depth: int, is_aborted: bool, mode: str
) -> None:
    """A request whose worker failed with its load is aborted, or computes its prompt anew in several steps, and another
    one finds its blocks in vLLM's own cache. Nobody is left who knows which blocks are wrong."""
    space = HistorySpace(4, random.Random(1))
    space.drop_rate, space.far_rate, space.fail_rate = 0.0, 0.0, 1.0
    server = FailingServer(configs[depth, 8], space, mode, 64, depth)
    prompt = [3 + (i * i // 3) % 2 for i in range(40)]
    for chunk in space.keys(prompt).chunks(tail=False):
        space.kept[chunk.key] = tuple(prompt[: chunk.first_token + chunk.num_tokens])
    server.add("first", prompt, 4)
    for _ in range(depth):
        server.step()
    assert server.has_failed
    if is_aborted:
        server.abort("first")
    server.add("second", [*prompt, 3], 4)
    for _ in range(300):
        if server.has_work:
            server.step()
    assert not server.has_work
    assert server.connector._steps is None
    assert server.said["second"] == expected([*prompt, 3], 4)
    assert is_aborted or server.said["first"] == expected(prompt, 4)


@pytest.mark.parametrize("mode", ["auto", "async"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_load_is_made_although_the_side_fails_in_the_same_schedule(
    configs: dict[tuple[int, int], VllmConfig], depth: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM counts on it: without it the request would compute with what lies in its blocks, or wait for ever."""
    space = HistorySpace(4, random.Random(1))
    space.drop_rate = space.far_rate = space.fail_rate = 0.0
    server = Server(configs[depth, 64], space, mode, 64, depth)
    prompts = {name: ([token] * 20, 4) for name, token in (("first", 3), ("second", 4))}
    for prompt, _ in prompts.values():
        for chunk in space.keys(prompt).chunks(tail=False):
            space.kept[chunk.key] = tuple(prompt[: chunk.first_token + chunk.num_tokens])
    match, asked = space.match, list[int]()

    def fail_at_the_second(keys: Any, **options: Any) -> Any:
        asked.append(1)
        if len(asked) == 2:
            raise OSError("the pool is broken")
        return match(keys, **options)

    monkeypatch.setattr(space, "match", fail_at_the_second)
    for name, (prompt, max_tokens) in prompts.items():
        server.add(name, prompt, max_tokens)
    for _ in range(300):
        if server.has_work:
            server.step()
    assert server.connector._steps is None
    assert not server.has_work
    assert server.said == {name: expected(*prompt) for name, prompt in prompts.items()}


def check_end(server: Server, prompts: dict[str, tuple[list[int], int]], aborted: set[str]) -> None:
    for _ in range(3000):
        if not server.has_work:
            break
        server.step()
    assert not server.has_work
    for name, (prompt, max_tokens) in prompts.items():
        wanted = expected(prompt, max_tokens)
        assert server.said[name] == (wanted[: len(server.said[name])] if name in aborted else wanted)
    assert not server.cache.loads
    assert server.cache.space is not None
    assert not server.cache.space.leases
    assert not server.cache.space.fetches
    assert not server.connector.side._tracked
    assert server.connector._steps is not None, "it was switched off"
