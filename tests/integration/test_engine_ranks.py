"""A rank that dies while nothing runs is noticed all the same, and the server told why."""

from __future__ import annotations

import gc
import os
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headwater.engine import ranks
from headwater.engine.config import EngineConfig
from headwater.engine.engine import Engine
from headwater.engine.params import SamplingParams
from headwater.errors import EngineDeadError
from headwater.serve import worker
from headwater.serve.messages import Stats

pytest.importorskip("transformers")

from engine_models import save_random_checkpoint

pytestmark = pytest.mark.slow


def test_a_rank_killed_while_the_engine_is_idle(tmp_path: Path) -> None:
    model = save_random_checkpoint("llama", tmp_path)
    config = EngineConfig(
        model=str(model), device="cpu", tensor_parallel_size=2, num_threads=1, num_pages=64, max_model_len=64
    )
    with Engine(config) as engine:
        engine.check_alive()
        group: Any = engine._executor._others  # type: ignore[attr-defined]
        process, _ = group._children[0]
        process.kill()
        process.wait()
        with pytest.raises(EngineDeadError, match="rank 1 exited with status -9"):
            engine.check_alive()


def test_the_engine_process_looks_after_its_ranks_while_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "IDLE_CHECK_S", 0.01)

    def check_alive() -> None:
        if time.monotonic() > die_s:
            raise EngineDeadError("rank 1 exited with status -9")

    engine: Any = SimpleNamespace(has_work=False, check_alive=check_alive)
    server, own = socket.socketpair()
    with server, own:
        die_s = time.monotonic() + 0.1
        running = worker.Running(engine, None, Stats)  # type: ignore[arg-type]
        with pytest.raises(EngineDeadError):
            worker.serve_engine(worker.WorkerChannel(own), running)


def test_ranks_on_gpus_meet_on_loopback_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Left alone, NCCL listens on the first interface that is not loopback."""
    made = []
    monkeypatch.setattr(ranks._dist, "ProcessGroupNCCL", lambda *args: made.append(args), raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    ranks._make_group(None, 0, 2, torch.device("cuda"))
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    ranks._make_group(None, 0, 2, torch.device("cuda"))
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth7"
    assert len(made) == 2


def test_two_engines_of_one_process_meet_their_own_ranks(tmp_path: Path) -> None:
    model = save_random_checkpoint("llama", tmp_path)
    config = EngineConfig(
        model=str(model), device="cpu", tensor_parallel_size=2, num_threads=1, num_pages=64, max_model_len=64
    )
    num_open = []
    for _ in range(2):
        with Engine(config) as first, Engine(config) as second:
            for engine in (first, second, first):
                engine.add("r", [1, 2, 3], SamplingParams(max_tokens=2))
                while engine.has_work:
                    engine.step()
        gc.collect()
        num_open.append(len(os.listdir("/proc/self/fd")))
    assert num_open[1] == num_open[0], "descriptors are left behind"
