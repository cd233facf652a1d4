"""A rank that dies while nothing runs is noticed all the same, and the server told why."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headwater.engine.config import EngineConfig
from headwater.engine.engine import Engine
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
        ranks: Any = engine._executor._ranks  # type: ignore[attr-defined]
        process, _ = ranks._children[0]
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
            worker.serve_engine(worker.Channel(own), running)
