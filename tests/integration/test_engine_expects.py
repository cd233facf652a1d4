"""One engine computes a prompt in another process, and a second one that expects it follows: the same tokens."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from headwater.connector.transfers import TransferParams
from headwater.engine.config import EngineConfig
from headwater.engine.engine import Engine
from headwater.engine.params import SamplingParams

pytest.importorskip("transformers")

from engine_models import save_random_checkpoint
from support import WAIT_S, temporary_url

pytestmark = pytest.mark.slow

PROMPT = [3 + i * 7 % 500 for i in range(600)]
CHUNK = 256
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)

PREFILL = """
import sys
from headwater.engine.config import EngineConfig
from headwater.engine.engine import Engine
from headwater.engine.params import SamplingParams
model, pool, num_tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
config = EngineConfig(model=model, device="cpu", num_threads=1, num_pages=64, max_model_len=1024, pool=pool,
                      max_batched_tokens=128, tensor_parallel_size=2)
with Engine(config) as engine:
    print("ready", flush=True)
    sys.stdin.readline()
    prompt = [3 + i * 7 % 500 for i in range(600)][:num_tokens]
    engine.add("r", prompt, SamplingParams(max_tokens=1, temperature=0.0))
    while engine.has_work:
        engine.step()
    assert engine.drain_saves(30.0)
"""


@contextmanager
def prefill_server(model: Path, pool: str, num_tokens: int) -> Iterator[subprocess.Popen[str]]:
    """A server of two ranks that computes so many tokens of the prompt, in small steps, once it is told to."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(
        [sys.executable, "-c", PREFILL, str(model), pool, str(num_tokens)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == "ready"
            yield process
            assert process.wait(WAIT_S) == 0  # with its ranks: they have the pool open
        finally:
            process.kill()


def answer(engine: Engine, transfer: TransferParams | None, process: subprocess.Popen[str] | None = None) -> list[int]:
    """The tokens that an engine says; the other server is told to go on when this one waits."""
    engine.add("r", PROMPT, GREEDY, transfer=transfer)
    tokens, end = list[int](), time.monotonic() + WAIT_S
    while engine.has_work:
        assert time.monotonic() < end, "it does not end"
        for output in engine.step():
            tokens += output.token_ids
        if process is not None and process.stdin is not None and not process.stdin.closed:
            process.stdin.close()
    return tokens


@pytest.mark.parametrize("load_mode", ["auto", "async", "layerwise", "blocking"])
@pytest.mark.parametrize("num_sent", [600, 300, 0])
def test_what_is_expected_is_followed_and_the_rest_computed(load_mode: str, num_sent: int, tmp_path: Path) -> None:
    model = save_random_checkpoint("llama", tmp_path / "model", seed=1)
    with temporary_url("shm", tmp_path, "capacity=64MiB") as pool:
        config = EngineConfig(
            model=str(model), device="cpu", num_threads=1, num_pages=64, max_model_len=1024, pool=pool,
            pool_load=load_mode,
        )  # fmt: skip
        with Engine(replace(config, pool=None)) as engine:
            alone = answer(engine, None)
        start_s = WAIT_S if num_sent == len(PROMPT) else 2.0
        transfer = TransferParams(id="7", wait_s=WAIT_S, start_s=start_s)
        with Engine(config) as engine:
            if num_sent:
                with prefill_server(model, pool, num_sent) as process:
                    tokens = answer(engine, transfer, process)
            else:
                tokens = answer(engine, transfer)
            assert tokens == alone
            stats = engine.stats().pool
            assert stats.num_expected == 1
            assert stats.num_given_up == int(num_sent < len(PROMPT))
            assert stats.num_loaded_tokens == {600: len(PROMPT) - 1, 300: CHUNK, 0: 0}[num_sent]
