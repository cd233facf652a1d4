"""`headwater router` and `headwater proxy` in front of real `headwater serve` processes with a real model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("msgspec")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("openai")
pytest.importorskip("httpx")

import httpx
import openai

from headwater.errors import ModelError
from headwater.models.catalog import find_in_catalog

from proxy_process import ProxyProcess
from support import temporary_url, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SRC = Path(__file__).parents[2] / "src"
WAIT_S = 300.0
ENGINE = ["--device", "cpu", "--num-pages", "192", "--max-model-len", "2048", "--num-threads", "1"]
STORY = "The river rose in the night, and by the morning the mill stood in the water. "


class Serve:
    """`headwater serve` with SmolLM2 and a pool of its own."""

    def __init__(self, pool: str) -> None:
        self.pool = pool
        path = os.pathsep.join(filter(None, [str(SRC), os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headwater", "serve", "--port", "0", "--pool", pool, *ENGINE],
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.url = ""

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.search(r"ready\s+(http://\S+)/v1", line):
                self.url = found[1]
                return
        raise AssertionError("no server")

    def count(self, name: str) -> float:
        page = httpx.get(f"{self.url}/metrics", timeout=WAIT_S).text
        return sum(float(line.split()[-1]) for line in page.splitlines() if re.match(rf"headwater_{name}[{{ ]", line))

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Serve]]:
    """Both tests use them; the second one kills the first server."""
    try:
        find_in_catalog("smollm2")
    except ModelError as error:
        pytest.skip(str(error))
    with ExitStack() as stack:
        made = []
        for _ in range(2):
            url = stack.enter_context(temporary_url("shm", tmp_path_factory.mktemp("pools"), "capacity=512MiB"))
            made.append(Serve(url))
            stack.callback(made[-1].close)
        for server in made:
            server.wait_ready()
        yield made


def cached(usage: Any) -> int:
    return int(usage.prompt_tokens_details.cached_tokens)


def test_without_tokenizer_and_events_conversations_come_back_too(two: list[Serve], proxy: Any) -> None:
    """And answers are those of the servers themselves. Prefill gets nothing, since no receiver is known."""
    front: ProxyProcess = proxy("proxy", "--decode", two[0].url, two[1].url, "--prefill", two[0].url)
    prompts = [f"Story {n}. " + STORY * 14 for n in range(3)]
    texts = []
    for prompt in prompts:
        body = {"prompt": prompt, "max_tokens": 6, "temperature": 0}
        answer = front.http.post("/v1/completions", json=body, timeout=WAIT_S).raise_for_status().json()
        texts.append(answer["choices"][0]["text"])
        again = front.http.post("/v1/completions", json=body, timeout=WAIT_S).raise_for_status().json()
        assert again["choices"][0]["text"] == texts[-1]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 256
    direct = httpx.post(
        f"{two[0].url}/v1/completions", json={"prompt": prompts[0], "max_tokens": 6, "temperature": 0}, timeout=WAIT_S
    )
    assert direct.json()["choices"][0]["text"] == texts[0]
    assert front.metric("headwater_proxy_prefill_total", decision="no_peer") == 3
    refused = front.http.post("/v1/completions", json={"prompt": 7}, timeout=WAIT_S)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"]


def test_conversations_come_back_to_the_server_that_has_them(two: list[Serve], proxy: Any) -> None:
    """Turns of four conversations through a router with events. The index says what the servers then report; one server
    is killed, and its conversations go on elsewhere."""
    specs = [f"{server.url},pool={server.pool}" for server in two]
    front: ProxyProcess = proxy("router", *specs, "--tokenizer", "smollm2", "--health-interval", "0.2")
    client = openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", timeout=WAIT_S, max_retries=0)
    assert client.models.list().data[0].id
    sequences = [server.count("sequences_total") for server in two]
    talks = [[{"role": "user", "content": f"Story {n}. " + STORY * 14 + f"What happened to {n}?"}] for n in range(4)]
    for talk in talks:
        answer = client.chat.completions.create(model="smollm2", messages=talk, max_tokens=8, temperature=0)  # type: ignore[arg-type]
        talk.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
        assert cached(answer.usage) < 64, "more than the template was cached"
    num_new = [server.count("sequences_total") - old for server, old in zip(two, sequences, strict=True)]
    assert num_new == [2, 2], "idle servers take turns"
    before = [server.count("cached_prompt_tokens_total") for server in two]
    # What was sent a moment ago counts for 10 s; from then on only events do. Both say the same here.
    wait_until(lambda: front.metric("headwater_proxy_index_blocks", source="events") >= 4, WAIT_S)
    expected = front.metric("headwater_proxy_expected_cached_tokens_total")
    found = 0
    for talk in talks:
        talk.append({"role": "user", "content": "And then?"})
        stream = client.chat.completions.create(
            model="smollm2", messages=talk, max_tokens=8, temperature=0, stream=True,  # type: ignore[arg-type]
            stream_options={"include_usage": True},
        )  # fmt: skip
        chunks = list(stream)
        found += cached(chunks[-1].usage)
        assert cached(chunks[-1].usage) >= 256, "it went where its first turn was computed"
    expected = front.metric("headwater_proxy_expected_cached_tokens_total") - expected
    assert 0 < expected <= found, "the index promised more than the servers had"
    assert all(server.count("cached_prompt_tokens_total") > old for server, old in zip(two, before, strict=True))

    two[0].process.kill()
    two[0].process.wait(30)
    for talk in talks:
        answer = client.chat.completions.create(model="smollm2", messages=talk, max_tokens=4, temperature=0)  # type: ignore[arg-type]
        assert answer.usage is not None
    wait_until(lambda: front.metric("headwater_proxy_server_up", server=two[0].url) == 0, WAIT_S)
