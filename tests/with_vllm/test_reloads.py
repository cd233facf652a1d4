"""Weights that are changed while vLLM runs: their KV is not saved under the name of the old ones, and none of the old
ones' is loaded, until an epoch of their own begins."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_hosts import Host
from test_scheduling import make_request, make_step
from vllm import EngineArgs
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.executor import multiproc_executor, uniproc_executor
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from headwater.bench.vllm_engine import SRC, EngineProcess
from headwater.connector.orders import SaveOrder, StepOrders, TransferJob
from headwater.integrations.vllm.declined import DeclinedError
from headwater.integrations.vllm.messages import WorkerMetadata
from headwater.integrations.vllm.reloads import KEEP_WEIGHTS, Freshness, watch_reloads

from vllm_models import hit_tokens, random_tokens, settings_of, wait_for_hits

SAVE = SaveOrder(TransferJob.of("a", [], np.zeros(1, np.int32)))


class Model:
    """As vLLM's models load."""

    def load_weights(self, weights: Any) -> set[str]:
        return set(weights)


def attempt(change: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """One that fails half-way has changed something, too."""
    with suppress(Exception):
        change(*args, **kwargs)


def call(method: Any, *args: Any, **kwargs: Any) -> None:
    """A remote call, as vLLM's executor in one process makes it."""
    attempt(uniproc_executor.run_method, object.__new__(Worker), method, args, kwargs)


def call_process(method: Any, *args: Any, **kwargs: Any) -> None:
    """A remote call, as a worker process receives it."""
    process = object.__new__(multiproc_executor.WorkerProc)
    attempt(process._execute_worker_rpc, (method, args, kwargs, None))


CHANGES: dict[str, Callable[[], None]] = {
    "a reload": lambda: attempt(Worker.reload_weights, object.__new__(Worker), weights_path="other"),
    "a reload by the runner": lambda: attempt(GPUModelRunner.reload_weights, object.__new__(GPUModelRunner)),
    "a session of updates": lambda: attempt(Worker.start_weight_update, object.__new__(Worker)),
    "an update": lambda: attempt(Worker.update_weights, object.__new__(Worker), {}),
    "deep sleep": lambda: attempt(Worker.sleep, object.__new__(Worker), level=2),
    "deep sleep, by position": lambda: attempt(Worker.sleep, object.__new__(Worker), 2),
    "weights are set to zero": lambda: attempt(Worker.reset_weights, object.__new__(Worker)),
    "weights are set to zero, by a call": lambda: call("reset_weights"),
    "weights are set to zero, by a call of a process": lambda: call_process("reset_weights"),
    "a function that is sent": lambda: call(lambda worker: None),
    "a function that is sent to a process": lambda: call_process(b"pickled"),
    "a function for the model": lambda: call("apply_model", lambda model: None),
    "another config": lambda: call("update_config", {"load_config": {"load_format": "dummy"}}),
    "a method that nobody knows": lambda: call_process("merge_something"),
    "deep sleep, by a call": lambda: call("sleep", level=2),
    "weights are thrown away": lambda: call_process("discard", ("weights",)),
    "an extension that loads": lambda: attempt(Model().load_weights, ["w"]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_after_a_change_of_weights_an_epoch_is_over(change: str) -> None:
    for _ in range(2):
        watch_reloads(Model)
    freshness = Freshness(0)
    orders = StepOrders(epoch=0, before=(SAVE,), during=(SAVE,))
    assert freshness.admit(orders) == orders
    attempt(Worker.sleep, object.__new__(Worker), level=1)
    for harmless in ("execute_model", "check_health", "compile_or_warm_up_model", "add_lora", "sleep", "wake_up"):
        call(harmless)
        call_process(harmless)
    call("discard", ("kv_cache",))
    assert freshness.admit(orders) == orders, "these keep the weights"
    CHANGES[change]()
    for _ in range(2):
        assert freshness.admit(orders) == StepOrders(epoch=0)
        assert freshness.is_stale
        assert freshness.epochs() == {0}
    new = StepOrders(epoch=5, before=(SAVE,))
    assert freshness.admit(new) == new
    assert not freshness.is_stale
    assert freshness.epochs() == frozenset()
    CHANGES[change]()
    assert freshness.admit(new) == StepOrders(epoch=5)


def test_an_epoch_that_began_after_the_last_step_of_the_old_weights_is_fresh() -> None:
    watch_reloads(Model)
    freshness = Freshness(0)
    freshness.admit(StepOrders(epoch=0))
    CHANGES["a reload"]()
    new = StepOrders(epoch=7, during=(SAVE,))
    assert freshness.admit(new) == new


def test_calls_that_keep_weights_are_vllms_own() -> None:
    """A name that vLLM does not have is a slip of the pen."""
    assert [name for name in sorted(KEEP_WEIGHTS) if not hasattr(Worker, name)] == []


def test_a_vllm_that_executes_calls_elsewhere_is_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(multiproc_executor.WorkerProc, "_execute_worker_rpc")
    with pytest.raises(DeclinedError, match="not known when it changes weights"):
        watch_reloads(Model)


@pytest.fixture(scope="module")
def config(qwen3: Path) -> VllmConfig:
    transfer = settings_of(qwen3, "shm:///pool?capacity=8MiB")["kv_transfer_config"]
    arguments = EngineArgs(model=str(qwen3), dtype="float32", max_model_len=1024, kv_transfer_config=transfer)
    return arguments.create_engine_config()


def test_the_scheduler_side_hears_of_it_and_stops_asking(
    config: VllmConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(tmp_path / "here", monkeypatch)
    worker = host.connector(config, KVConnectorRole.WORKER)
    scheduler = host.connector(config, KVConnectorRole.SCHEDULER)
    watch_reloads(Model)

    def step() -> bool:
        """Whether the scheduler side asks the pool after a step."""
        asked: list[Any] = []
        assert scheduler._steps is not None
        orders = scheduler._steps.side.order([])
        worker._freshness.admit(orders)
        told: WorkerMetadata | None = pickle.loads(pickle.dumps(worker.build_connector_worker_meta()))
        scheduler.update_connector_output(Output(told))
        monkeypatch.setattr(scheduler._steps, "match", lambda *args: (asked.append(args), (0, False))[1])
        scheduler.get_num_new_matched_tokens(None, 0)  # type: ignore[arg-type]
        return bool(asked)

    assert step()
    CHANGES["a reload"]()
    assert not step()
    assert not step()
    scheduler.bind_gpu_block_pool(BlockPool(num_gpu_blocks=8, enable_caching=True, hash_block_size=128))
    assert scheduler.reset_cache()
    assert step()
    assert step()


def test_an_epoch_that_begins_while_blocks_are_in_use_has_no_pool(
    config: VllmConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM calls the connector although it could not reset its own cache: a request that comes then shares blocks of
    the old weights, which were once saved as those of the new ones."""
    host = Host(tmp_path / "here", monkeypatch)
    scheduler = host.connector(config, KVConnectorRole.SCHEDULER)
    blocks = BlockPool(num_gpu_blocks=8, enable_caching=True, hash_block_size=128)
    scheduler.bind_gpu_block_pool(blocks)

    def saves(name: str) -> bool:
        """Whether anything of a new request is saved."""
        steps, request = scheduler._steps, make_request(name, 600)
        assert steps is not None
        steps.add(request)
        orders = steps.order(make_step(new=[(request, [*range(1, 6)])], scheduled={name: 600}))
        return bool(orders.before or orders.during)

    assert saves("a")
    used = blocks.get_new_blocks(2)
    assert not blocks.reset_prefix_cache()
    assert scheduler.reset_cache() is False
    assert not saves("b")
    blocks.free_blocks(used)
    assert not saves("c"), "the blocks of the old weights are still cached"
    assert blocks.reset_prefix_cache()
    assert scheduler.reset_cache() is True
    assert saves("d")


class Output:
    """As much of vLLM's KVConnectorOutput as is read."""

    def __init__(self, told: WorkerMetadata | None) -> None:
        self.kv_connector_worker_meta = told
        self.invalid_block_ids: set[int] = set()


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.timeout(1800)
def test_weights_reloaded_in_a_running_server(qwen3: Path, qwen3_twin: Path, pool_url: str, log_file: Path) -> None:
    first, second = random_tokens(900, 600), random_tokens(901, 600)
    environment = {"PYTHONPATH": f"{SRC}:{Path(__file__).parent}"}

    def start(model: Path, pool: str | None) -> closing[EngineProcess]:
        settings = settings_of(model, pool, environment=environment)
        return closing(EngineProcess(log_file, settings, command=("reload_process",)))

    def say(engine: EngineProcess, prompt: list[int]) -> tuple[list[int], int]:
        said = engine.ask("generate", prompts=[prompt], max_tokens=12)
        return said["tokens"][0], said["external"]

    with start(qwen3, None) as plain:  # with vLLM's own reload: it leaves parts that it has repacked as they were
        plain.ask("reload", path=str(qwen3_twin))
        twins = [say(plain, prompt)[0] for prompt in (first, second)]
    with start(qwen3, pool_url) as running:
        said = say(running, first)[0]
        assert said != twins[0], "the same answer from both weights tests nothing"
        wait_for_hits(pool_url, [first])
        running.ask("reload", path=str(qwen3_twin))
        assert running.ask("reset")
        assert say(running, first)[0] == twins[0]
        assert say(running, second) == (twins[1], 0)
        assert running.ask("reset", connector=True)
        assert say(running, first) == (twins[0], 0)
        wait_for_hits(pool_url, [first], whose=lambda identity: identity.epoch != 0)
        assert running.ask("reset")
        assert say(running, first) == (twins[0], hit_tokens(first))
    assert "reset_connector=True" in log_file.read_text()
    with start(qwen3, pool_url) as other:
        assert say(other, first) == (said, hit_tokens(first))
        assert say(other, second)[1] == 0, "KV of the other weights was saved under this one's name"
