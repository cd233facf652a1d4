"""`headwater router` in front of vLLM's own API server, with its KV events: the index expects what vLLM then finds."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("zmq")
pytest.importorskip("httpx")

import httpx

from proxy_process import ProxyProcess, chat_body
from support import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.matrix, pytest.mark.timeout(900)]

WAIT_S = 600.0
BLOCK = 32
STORY = "The river rose in the night, and by the morning the mill stood in the water. " * 20


class Vllm(NamedTuple):
    url: str
    events: str
    replay: str

    @property
    def spec(self) -> str:
        return f"{self.url},events={self.events},replay={self.replay}"

    def ask(self, content: str, **fields: Any) -> Any:
        body = chat_body(content, max_tokens=2, **fields)
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=WAIT_S).raise_for_status().json()


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        made = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(sock.getsockname()[1]) for sock in made]


@pytest.fixture(scope="module")
def vllm(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    port, events, replay = free_ports(3)
    publisher = {
        "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replay}",
    }  # fmt: skip
    options = ["--model", str(smollm2), "--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port)]
    options += ["--dtype", "float32", "--block-size", str(BLOCK), "--enforce-eager", "--max-model-len", "2048"]
    options += ["--enable-prompt-tokens-details", "--kv-events-config", json.dumps(publisher)]
    env = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"}
    log = tmp_path_factory.mktemp("vllm") / "log"
    with log.open("wb") as file:
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options]
        process = subprocess.Popen(command, env=env, stdout=file, stderr=file)
    try:
        url = f"http://127.0.0.1:{port}"
        end_s = time.monotonic() + WAIT_S
        while not _is_up(url):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < end_s
            time.sleep(0.2)
        yield Vllm(url, f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}")
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(60)


def _is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.parametrize("salt", [{}, {"cache_salt": "one"}])
def test_the_index_expects_what_vllm_finds(vllm: Vllm, smollm2: Path, salt: dict[str, str]) -> None:
    """The prompt reaches vLLM without the router, which can know of it by events alone; those that it missed are
    repeated."""
    vllm.ask(f"First. {STORY}", **salt)
    front = ProxyProcess("router", vllm.spec, "--tokenizer", str(smollm2))
    try:
        vllm.ask(f"Second. {STORY}", **salt)
        wait_until(lambda: front.metric("headwater_proxy_index_blocks", source="events") >= 24, WAIT_S)
        for name in ("First", "Second"):
            before = front.metric("headwater_proxy_expected_cached_tokens_total")
            answer = front.chat(f"{name}. {STORY}And then?", max_tokens=2, **salt).json()
            found = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert found >= 10 * BLOCK
            assert front.metric("headwater_proxy_expected_cached_tokens_total") - before == found
    finally:
        errors = front.close()
    assert errors == ""


def test_streams_models_and_errors_are_vllms(vllm: Vllm) -> None:
    front = ProxyProcess("router", vllm.url)
    try:
        assert front.http.get("/v1/models").json()["data"][0]["id"] == "m"
        with front.stream("Hello", max_tokens=4) as response:
            lines = [line for line in response.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert json.loads(lines[-2].removeprefix("data: "))["usage"]["completion_tokens"] == 4
        assert front.http.post("/v1/completions", json={"model": "m", "prompt": 7}).status_code == 400
        assert front.chat("Hello", max_tokens=2, headers={"x-request-id": "mine"}).status_code == 200
        tokens = front.http.post("/tokenize", json={"model": "m", "prompt": "Hello"}).json()
        assert tokens["count"] > 0
    finally:
        front.close()
