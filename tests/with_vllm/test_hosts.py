"""An engine whose ranks do not share one pool is declined at start, with the reason; replicas elsewhere are not."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import ParallelConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput

from headwater.bench.vllm_engine import engine
from headwater.connector.events import NoListener
from headwater.connector.idle import IdleWorker
from headwater.connector.orders import StepReport
from headwater.integrations.vllm import connector as connector_module
from headwater.integrations.vllm import startup
from headwater.integrations.vllm.connector import HeadwaterConnector
from headwater.integrations.vllm.declined import LOGGER, DeclinedError
from headwater.integrations.vllm.options import read_options
from headwater.integrations.vllm.startup import check_hosts, start_scheduling, start_working
from headwater.stores import embedded

from vllm_models import QWEN3, random_tokens, settings_of

OPTIONS = read_options({}, "kv_both")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"nnodes": 2}, "several hosts"),
        ({"nnodes": 4, "data_parallel_size": 2, "data_parallel_size_local": 1}, "several hosts"),
        ({"distributed_executor_backend": "external_launcher"}, "external launcher"),
    ],
)
def test_what_the_configuration_says_is_declined_before_anything_else_is_done(
    settings: dict[str, Any], reason: str
) -> None:
    parallel = ParallelConfig(**{"tensor_parallel_size": 4, "distributed_executor_backend": "mp", **settings})
    config: Any = SimpleNamespace(parallel_config=parallel)
    with pytest.raises(DeclinedError, match=reason):
        start_scheduling(config, None, OPTIONS, NoListener())
    with pytest.raises(DeclinedError, match=reason):
        start_working(config, None, OPTIONS, {})


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
        {"tensor_parallel_size": 2, "nnodes": 2, "data_parallel_size": 2, "data_parallel_size_local": 1},
        {"distributed_executor_backend": "external_launcher"},
    ],
)
def test_an_engine_on_one_host_is_not_declined(settings: dict[str, Any]) -> None:
    check_hosts(ParallelConfig(**{"distributed_executor_backend": "mp", **settings}))


# ---- what the ranks say of themselves ---------------------------------------------------------------------------
class Host:
    """The shared memory of one host, as a directory."""

    def __init__(self, shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._shm = shm
        self._monkeypatch = monkeypatch
        shm.mkdir()

    def connector(self, config: VllmConfig, role: KVConnectorRole) -> HeadwaterConnector:
        """A side of the connector on this host. A worker's has a cache, which is not looked at."""
        layers = [f"model.layers.{i}.self_attn.attn" for i in range(QWEN3["num_hidden_layers"])]
        spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=QWEN3["head_dim"], dtype=torch.float32)
        cache = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(layers, spec)])
        with self._monkeypatch.context() as here:
            here.setattr(embedded, "SHM_ROOT", str(self._shm))
            here.setattr(startup, "_pools", {})  # a process of its own
            made = HeadwaterConnector(config, role, cache)
            if role == KVConnectorRole.WORKER:
                weights = startup.name_weights(config, made._options)
                member = startup.join(config, cache, made._options, weights, is_first=True)
                working = SimpleNamespace(take_report=StepReport)
                here.setattr(connector_module, "start_working", lambda *_: (working, member))
                made.register_kv_caches({})
                assert not isinstance(made._worker, IdleWorker)
        return made


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Host]:
    return [Host(tmp_path / name, monkeypatch) for name in ("here", "there")]


@pytest.fixture(scope="module")
def config(qwen3: Path) -> VllmConfig:
    transfer = settings_of(qwen3, "shm:///pool?capacity=8MiB")["kv_transfer_config"]
    arguments = EngineArgs(model=str(qwen3), dtype="float32", max_model_len=256, kv_transfer_config=transfer)
    return arguments.create_engine_config()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What the connector logs. vLLM's loggers do not pass anything on."""
    logger = logging.getLogger(LOGGER)
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def greetings(workers: list[HeadwaterConnector]) -> dict[tuple[int, int], KVConnectorHandshakeMetadata]:
    """As vLLM collects them from its processes, by pipeline and tensor-parallel rank."""
    return {(0, rank): pickle.loads(pickle.dumps(each.get_handshake_metadata())) for rank, each in enumerate(workers)}


@pytest.mark.parametrize("places", [(0, 0, 1), (0, 1, 1), (1, 0, 0)], ids=["a rank", "the ranks", "the scheduler"])
@pytest.mark.parametrize("tells", ["greetings", "first reports"])
def test_ranks_that_see_another_pool_switch_it_off(
    hosts: list[Host], config: VllmConfig, log: pytest.LogCaptureFixture, places: tuple[int, ...], tells: str
) -> None:
    """One place for the scheduler and one for each of two ranks."""
    scheduler = hosts[places[0]].connector(config, KVConnectorRole.SCHEDULER)
    workers = [hosts[place].connector(config, KVConnectorRole.WORKER) for place in places[1:]]
    assert scheduler._steps is not None
    tell(scheduler, workers, tells)
    assert scheduler._steps is None
    assert "Headwater is off: this engine's ranks do not share one pool" in log.text


@pytest.mark.parametrize("tells", ["greetings", "first reports"])
def test_ranks_that_see_the_same_pool_go_on(
    hosts: list[Host], config: VllmConfig, log: pytest.LogCaptureFixture, tells: str
) -> None:
    scheduler = hosts[0].connector(config, KVConnectorRole.SCHEDULER)
    workers = [hosts[0].connector(config, KVConnectorRole.WORKER) for _ in range(2)]
    tell(scheduler, workers, tells)
    assert scheduler._steps is not None
    assert "Headwater is off" not in log.text
    assert all(worker.build_connector_worker_meta() is None or tells == "greetings" for worker in workers)


@pytest.mark.parametrize("tells", ["greetings", "first reports"])
def test_ranks_that_name_the_model_otherwise_switch_it_off(
    hosts: list[Host], config: VllmConfig, log: pytest.LogCaptureFixture, tells: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler's name goes into the keys, and the workers' weights into the KV."""
    scheduler = hosts[0].connector(config, KVConnectorRole.SCHEDULER)
    workers = [hosts[0].connector(config, KVConnectorRole.WORKER)]
    monkeypatch.setattr(startup, "name_weights", lambda *_: "sha256:" + "1" * 64)
    workers.append(hosts[0].connector(config, KVConnectorRole.WORKER))
    tell(scheduler, workers, tells)
    assert scheduler._steps is None
    assert "Headwater is off: the workers name this model otherwise" in log.text


def tell(scheduler: HeadwaterConnector, workers: list[HeadwaterConnector], how: str) -> None:
    if how == "greetings":
        scheduler.set_xfer_handshake_metadata_pp_aware(greetings(workers))
        return
    scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): KVConnectorHandshakeMetadata()})  # another connector's
    report, *others = [worker.build_connector_worker_meta() for worker in workers]
    assert report is not None
    for other in others:
        assert other is not None
        report = report.aggregate(other)
    scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=report))


def test_greetings_of_a_connector_to_another_pool_are_not_ours(hosts: list[Host], config: VllmConfig) -> None:
    """`MultiConnector` gives what its first connector's workers said to all of them."""
    scheduler = hosts[0].connector(config, KVConnectorRole.SCHEDULER)
    other = greetings([hosts[1].connector(config, KVConnectorRole.WORKER)])
    other[0, 0].pool = "shm:///other"  # type: ignore[attr-defined]
    scheduler.set_xfer_handshake_metadata_pp_aware(other)
    assert scheduler._steps is not None


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.timeout(1800)
def test_an_engine_with_a_rank_elsewhere_runs_without_the_pool(qwen3: Path, log_file: Path, tmp_path: Path) -> None:
    """Real vLLM with two ranks, the second of which has another /dev/shm."""
    name = f"headwater-test-{uuid.uuid4().hex[:12]}"
    elsewhere = tmp_path / "shm"
    elsewhere.mkdir()
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    settings = settings_of(
        qwen3,
        f"shm:///{name}?capacity=64MiB",
        tp=2,
        worker_cls="elsewhere.Worker",
        environment={"PYTHONPATH": paths, "HEADWATER_TEST_ELSEWHERE": elsewhere},
    )
    prompt, size = random_tokens(900, 600), log_file.stat().st_size if log_file.exists() else 0
    try:
        with engine(log_file, settings) as running:
            first = running.ask("generate", prompts=[prompt], max_tokens=8)
            assert running.ask("reset")
            again = running.ask("generate", prompts=[prompt], max_tokens=8)
        assert (elsewhere / name / "index").exists(), "the second rank opened no pool: this test tested nothing"
        assert again["tokens"] == first["tokens"]
        assert again["external"] == 0
        assert "Headwater is off: this engine's ranks do not share one pool" in log_file.read_text()[size:]
    finally:
        shutil.rmtree(f"/dev/shm/{name}", ignore_errors=True)
