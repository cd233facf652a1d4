"""Prefill in one real vLLM, decode in another: over TLS, by NIXL, with prefill killed, and beside vLLM's NixlConnector.

`test_roles` has the rest of what is pushed between two engines.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from headwater.bench import vllm_handoff
from headwater.bench.vllm_engine import EngineProcess, engine
from headwater.peers.carriers import nixl
from headwater.pool import open_pool

from servers import free_port
from support import WAIT_S, wait_until
from vllm_models import hit_tokens, random_tokens, settings_of, wait_for_hits

pytestmark = [pytest.mark.slow, pytest.mark.matrix, pytest.mark.timeout(1800)]

PROMPT = random_tokens(21, 700)
LONG = random_tokens(22, 1500)
NUM_NEW = 8


@pytest.fixture(scope="module")
def expected(qwen3: Path, log_file: Path) -> list[list[int]]:
    """What vLLM says without a connector."""
    with engine(log_file, settings_of(qwen3, None)) as plain:
        found: list[list[int]] = plain.ask("generate", prompts=[PROMPT, LONG], max_tokens=NUM_NEW)["tokens"]
        return found


@pytest.fixture
def pools() -> Iterator[tuple[str, str]]:
    names = [f"headwater-test-{uuid.uuid4().hex[:12]}" for _ in range(2)]
    yield f"shm:///{names[0]}?capacity=256MiB&deadline=60", f"shm:///{names[1]}?capacity=256MiB&deadline=60"
    for name in names:
        shutil.rmtree(f"/dev/shm/{name}", ignore_errors=True)


def duo(
    stack: ExitStack, model: Path, pools: tuple[str, str], log: Path, extra: dict[str, Any], **prefill: Any
) -> tuple[EngineProcess, EngineProcess, str]:
    """A server for prefill, one for decode, and where the latter listens. `extra` is for both connectors."""
    peer = f"127.0.0.1:{free_port()}"
    theirs = settings_of(model, pools[1], role="kv_consumer", extra={"peer_listen": peer, **extra})
    decode = stack.enter_context(engine(log, theirs))
    ours = settings_of(model, pools[0], role="kv_producer", extra=extra, **prefill)
    return stack.enter_context(engine(log, ours)), decode, peer


def push_to(peer: str) -> dict[str, Any]:
    return {"headwater": {"push_to": peer, "transfer": "07"}}


def expects(start_s: float = 30.0) -> dict[str, Any]:
    return {"headwater": {"transfer": "07", "wait_s": 60.0, "start_s": start_s}}


def check_pushed(
    prefill: EngineProcess, decode: EngineProcess, peer: str, pool: str, expected: list[list[int]]
) -> None:
    told = prefill.ask("generate", prompts=[PROMPT], max_tokens=1, transfer=push_to(peer))["transfers"]
    assert told[0]["headwater"]["sent_tokens"] == len(PROMPT)
    wait_for_hits(pool, [PROMPT])
    found = decode.ask("generate", prompts=[PROMPT], max_tokens=NUM_NEW, transfer=expects())
    assert found["tokens"] == expected[:1]
    assert found["external"] == hit_tokens(PROMPT)


def test_over_tls(
    qwen3: Path, pools: tuple[str, str], log_file: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    """Both ends present the same certificate, and accept no other."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    named = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*made, "-keyout", key, "-out", cert, *named], check=True, capture_output=True)
    tls = {"peer_tls_cert": cert, "peer_tls_key": key, "peer_tls_ca": cert}
    with ExitStack() as stack:
        prefill, decode, peer = duo(stack, qwen3, pools, log_file, tls)
        check_pushed(prefill, decode, peer, pools[1], expected)
        without = settings_of(qwen3, pools[0], role="kv_producer")
        prefill.close()
        stranger = stack.enter_context(engine(log_file, without))
        stranger.ask("generate", prompts=[LONG], max_tokens=1, transfer=push_to(peer))
        found = decode.ask("generate", prompts=[LONG], max_tokens=NUM_NEW, transfer=expects(1.0))
        assert found["tokens"] == expected[1:], "a push in the clear costs the answer nothing"
        assert found["external"] == 0, "and is not taken"


def test_by_nixl(qwen3: Path, pools: tuple[str, str], log_file: Path, expected: list[list[int]]) -> None:
    if (reason := nixl.why_not()) is not None:
        pytest.skip(reason)
    with ExitStack() as stack:
        prefill, decode, peer = duo(stack, qwen3, pools, log_file, {"peer_carrier": "nixl"})
        check_pushed(prefill, decode, peer, pools[1], expected)
    assert re.search(f"pushes to {re.escape(peer)} go over NIXL", log_file.read_text())


def test_prefill_that_is_killed_while_it_computes(
    qwen3: Path, pools: tuple[str, str], log_file: Path, expected: list[list[int]]
) -> None:
    """Decode waits for the push, and has a part of it when prefill dies: it answers as if nothing had been."""
    with ExitStack() as stack:
        prefill, decode, peer = duo(stack, qwen3, pools, log_file, {}, max_num_batched_tokens=256)
        pool = stack.enter_context(open_pool(pools[1]))
        found: list[dict[str, Any]] = []
        asking = threading.Thread(
            target=lambda: found.append(decode.ask("generate", prompts=[LONG], max_tokens=NUM_NEW, transfer=expects()))
        )
        asking.start()
        prefill._send(["generate", {"prompts": [LONG], "max_tokens": 1, "transfer": push_to(peer)}])
        wait_until(lambda: pool.stats().store.chunks > 0, WAIT_S, "a chunk of the prompt is with decode")
        os.killpg(prefill.pid, signal.SIGKILL)
        asking.join(WAIT_S)
        assert [answer["tokens"] for answer in found] == [expected[1:]]
        wait_until(lambda: pool.stats().store.pending_bytes == 0, WAIT_S, "nothing stays pending")
        again = decode.ask("generate", prompts=[PROMPT], max_tokens=NUM_NEW)
        assert again["tokens"] == expected[:1], "and the next one is served"


def test_beside_vllms_own_connector() -> None:
    """The benchmark of both, once and small: its rounds check tokens and that nothing was computed twice. With the
    prefill server killed in between, ours answers rightly, and not with nothing."""
    if (reason := vllm_handoff.why_not()) is not None:
        pytest.skip(reason)
    report = vllm_handoff.run(vllm_handoff.QUICK, lambda text: None)
    assert report["killed_tokens_headwater"] == 4
    assert report["ttft_vs_nixl"] > 0
    assert report["ttft_headwater_s"] > report["after_prefill_headwater_s"]
