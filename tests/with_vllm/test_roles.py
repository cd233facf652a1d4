"""Prefill in one vLLM, or in the reference engine, and decode in another vLLM with a pool of its own.

The push goes through real sockets into the receiver that decode's scheduler has started.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from headwater.bench.vllm_engine import EngineProcess, engine

from servers import free_port
from support import WAIT_S
from vllm_models import hit_tokens, random_tokens, settings_of, wait_for_hits, wait_for_metrics

pytestmark = [pytest.mark.slow, pytest.mark.matrix, pytest.mark.timeout(1800)]

PROMPTS = [random_tokens(11, 700), random_tokens(12, 257), random_tokens(13, 255)]
"""With a tail that is worth it, with one that is not, and less than a chunk."""
NUM_NEW = 8
REFERENCE = Path(__file__).with_name("push_process.py")


@pytest.fixture(scope="module")
def expected(qwen3: Path, log_file: Path) -> list[list[int]]:
    """What vLLM says without a connector."""
    with engine(log_file, settings_of(qwen3, None)) as plain:
        found: list[list[int]] = plain.ask("generate", prompts=PROMPTS, max_tokens=NUM_NEW)["tokens"]
        return found


@pytest.fixture
def pools() -> Iterator[tuple[str, str]]:
    names = [f"headwater-test-{uuid.uuid4().hex[:12]}" for _ in range(2)]
    yield f"shm:///{names[0]}?capacity=256MiB&deadline=60", f"shm:///{names[1]}?capacity=256MiB&deadline=60"
    for name in names:
        shutil.rmtree(f"/dev/shm/{name}", ignore_errors=True)


def decode_settings(model: Path, pool: str, peer: str, **more: Any) -> dict[str, Any]:
    return settings_of(model, pool, role="kv_consumer", extra={"peer_listen": peer}, **more)


def check_decode(decode: EngineProcess, expected: list[list[int]]) -> None:
    """Decode says what one server says, and has loaded all that is worth it."""
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        found = decode.ask("generate", prompts=[prompt], max_tokens=NUM_NEW, transfer=expects("07"))
        assert found["tokens"] == [tokens]
        assert found["external"] == hit_tokens(prompt)


def expects(name: str) -> dict[str, Any]:
    return {"headwater": {"transfer": name, "wait_s": 60.0, "start_s": 10.0}}


def test_two_ranks_push_to_one(qwen3: Path, pools: tuple[str, str], log_file: Path, expected: list[list[int]]) -> None:
    """P has two ranks and larger blocks. Decode is asked while prefill computes, and again when all has come."""
    peer = f"127.0.0.1:{free_port()}"
    with ExitStack() as stack:
        decode = stack.enter_context(engine(log_file, decode_settings(qwen3, pools[1], peer)))
        settings = settings_of(qwen3, pools[0], role="kv_producer", tp=2, block_size=64, max_num_batched_tokens=256)
        prefill = stack.enter_context(engine(log_file, settings))
        push = {"headwater": {"push_to": peer, "transfer": "07"}, "do_remote_decode": False}
        first = threading.Thread(
            target=lambda: prefill.ask("generate", prompts=PROMPTS[:1], max_tokens=1, transfer=push)
        )
        first.start()
        found = decode.ask("generate", prompts=PROMPTS[:1], max_tokens=NUM_NEW, transfer=expects("07"))
        first.join(WAIT_S)
        assert found["tokens"] == expected[:1]
        assert found["external"] == hit_tokens(PROMPTS[0])
        told = prefill.ask("generate", prompts=PROMPTS[1:], max_tokens=1, transfer=push)["transfers"]
        assert [params["headwater"]["sent_tokens"] for params in told] == [256, 255]
        wait_for_hits(pools[1], PROMPTS)
        metrics = wait_for_metrics(prefill, lambda now: now.get("headwater_pool_pushed_chunks", 0) >= 5)
        assert metrics["headwater_pool_pushed_bytes"] > 0
        assert not metrics.get("headwater_pool_dropped_pushes")
        assert decode.ask("reset")
        check_decode(decode, expected)


def test_the_reference_engine_pushes_to_vllm(
    qwen3: Path, pools: tuple[str, str], log_file: Path, expected: list[list[int]]
) -> None:
    peer = f"127.0.0.1:{free_port()}"
    with engine(log_file, decode_settings(qwen3, pools[1], peer)) as decode:
        task = {"model": str(qwen3), "pool": pools[0], "prompts": PROMPTS, "peer": peer}
        path = os.pathsep.join(path for path in sys.path if path)
        done = subprocess.run(
            [sys.executable, str(REFERENCE)],
            input=json.dumps(task),
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
            timeout=WAIT_S * 4,
            check=True,
        )
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("@")]
        assert json.loads(line[1:]) == [700, 256, 255]
        check_decode(decode, expected)
