"""The server with a real model, used as its users do: the `openai` package, plain HTTP, and curl."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
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

from support import WAIT_S, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SRC = Path(__file__).parents[2] / "src"
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
# Few pages: a request that does not give its pages back is soon noticed. One thread: threads that wait for each other
# on a busy machine are slower than none.
ENGINE = ["--device", "cpu", "--num-pages", "256", "--max-model-len", "2048", "--num-threads", "1"]


def command(name: str, *options: str) -> list[str]:
    return [sys.executable, "-m", "headwater", name, *options, *ENGINE]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(SRC), os.environ.get("PYTHONPATH")]))}


@pytest.fixture(scope="module", autouse=True)
def _model() -> None:
    try:
        find_in_catalog("smollm2")
    except ModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def url(_model: None) -> Iterator[str]:
    """A server's address, as it prints it."""
    with subprocess.Popen(
        command("serve", "--port", "0", "--no-pool"),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            lines = []
            for line in process.stdout:
                lines.append(line)
                if found := re.search(r"ready\s+(http://\S+)/v1", line):
                    yield found[1]
                    break
            else:
                raise AssertionError(f"no server: {lines} {process.stderr.read()}")
            assert any(line.startswith("runs on  cpu (as asked), float32") for line in lines)
            process.send_signal(signal.SIGINT)
            assert process.wait(WAIT_S) == 0
            assert "Traceback" not in process.stderr.read()
        finally:
            process.kill()


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300, max_retries=0) as made:
        yield made


def metrics(url: str) -> dict[str, float]:
    lines = httpx.get(f"{url}/metrics", timeout=WAIT_S).text.splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def test_chat_answers_sensibly_and_the_second_time_from_the_cache(client: openai.OpenAI) -> None:
    replies = [client.chat.completions.create(model="smollm2", messages=FRANCE, temperature=0) for _ in range(2)]
    assert "Paris" in replies[0].choices[0].message.content
    assert replies[0].choices[0].finish_reason == "stop"
    assert replies[0].choices[0].message.content == replies[1].choices[0].message.content
    cached = [reply.usage.prompt_tokens_details.cached_tokens for reply in replies]
    assert cached[1] > cached[0]
    assert 0 < cached[1] < replies[1].usage.prompt_tokens
    usage = replies[0].usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_streamed_chat_is_the_same(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "smollm2", "messages": FRANCE, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**fields)
    stream = client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len(chunks) > 5


def test_choices_are_seeded(client: openai.OpenAI) -> None:
    def ask(seed: int, n: int) -> list[str]:
        reply = client.completions.create(
            model="smollm2", prompt="Once upon a time", max_tokens=12, temperature=1.0, seed=seed, n=n
        )
        return [choice.text for choice in reply.choices]

    both = ask(7, 2)
    assert both[0] != both[1]
    assert ask(7, 2) == both
    assert ask(8, 1) == both[1:]


def test_stop_strings(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "smollm2", "prompt": "1, 2, 3, 4,", "max_tokens": 40, "temperature": 0}
    free = client.completions.create(**fields).choices[0].text
    stop = free[4:7]
    stopped = client.completions.create(**fields, stop=[stop])
    assert stopped.choices[0].text == free[: free.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"


def test_logprobs(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="smollm2", messages=FRANCE, temperature=0, max_tokens=6, logprobs=True, top_logprobs=3
    )
    entries = reply.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == reply.choices[0].message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        # Greedy: the chosen token is the best.
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0
    prompt = "The sky is"
    old = client.completions.create(model="smollm2", prompt=prompt, temperature=0, max_tokens=4, logprobs=2)
    logprobs = old.choices[0].logprobs
    assert "".join(logprobs.tokens) == old.choices[0].text
    assert [len(best) for best in logprobs.top_logprobs] == [2] * 4
    assert logprobs.text_offset[0] == 0


def test_prompts_as_token_ids_are_the_same_as_text(client: openai.OpenAI) -> None:
    from headwater.models.checkpoint import open_checkpoint

    ids = open_checkpoint("smollm2").load_tokenizer().encode("The sky is")
    fields: dict[str, Any] = {"model": "smollm2", "max_tokens": 4, "temperature": 0}
    texts = [client.completions.create(prompt=prompt, **fields).choices[0].text for prompt in ("The sky is", ids)]
    assert texts[0] == texts[1]


def test_errors_are_the_packages_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=FRANCE)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="smollm2", prompt="word " * 3000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="smollm2", messages=FRANCE, temperature=-1)
    assert bad.value.param == "temperature"


def test_a_client_that_leaves_gives_its_pages_back(url: str) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 2000, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=WAIT_S) as reply:
        lines = reply.iter_lines()
        next(lines)
        wait_until(lambda: metrics(url)["headwater_kv_pages_used"] > 0)
    wait_until(lambda: metrics(url)["headwater_kv_pages_used"] == 0)
    now = metrics(url)
    assert now["headwater_requests_running"] == 0
    assert now["headwater_kv_pages"] == 256
    wait_until(lambda: metrics(url).get('headwater_sequences_total{outcome="abort"}') == 1)


def test_curl(url: str) -> None:
    if shutil.which("curl") is None:
        pytest.skip("no curl")
    body = json.dumps({"messages": FRANCE, "temperature": 0, "max_tokens": 30})
    done = subprocess.run(
        ["curl", "-s", f"{url}/v1/chat/completions", "-H", "content-type: application/json", "-d", body],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert "Paris" in json.loads(done.stdout)["choices"][0]["message"]["content"]


def test_generate_and_chat_in_the_terminal() -> None:
    options = ("--temperature", "0", "--max-tokens", "20")
    done = subprocess.run(
        command("generate", "What is the capital of France?", "--json", *options),
        env=environment(), capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    report = json.loads(done.stdout.splitlines()[-1])
    assert "Paris" in report["text"]
    assert report["usage"]["prompt_tokens"] > 0
    done = subprocess.run(
        command("chat", *options), input="What is the capital of France?\n/reset\nSay hello.\n/exit\nnever\n",
        env=environment(), capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    assert "Paris" in done.stdout
    assert "forgotten" in done.stderr
