"""`headwater generate` and `headwater serve` with a model of latent attention: the command, a server with two ranks,
and another server that finds what the first one computed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("httpx")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import httpx
import tokenizers

from headwater.stores import open_store
from headwater.stores.embedded import destroy
from headwater.stores.url import parse_url

from engine_models import save_random_checkpoint
from support import WAIT_S, temporary_url, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SRC = Path(__file__).parents[2] / "src"
ENGINE = ("--device", "cpu", "--num-pages", "128", "--max-model-len", "1024", "--num-threads", "1")
PROMPT = " ".join(f"{i * i}" for i in range(140))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepSeek-V2 with random weights, and a tokenizer of bytes."""
    from transformers import PreTrainedTokenizerFast

    path = save_random_checkpoint("deepseek_v2", tmp_path_factory.mktemp("models") / "deepseek")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    # Every id is a token, or an answer of random weights could not be read.
    words = {**{letter: number for number, letter in enumerate(alphabet)}, **{f"#{i}": i for i in range(256, 512)}}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(words, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(path)
    return path


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(SRC), os.environ.get("PYTHONPATH")]))}


@contextmanager
def served(model: Path, *options: str) -> Iterator[str]:
    """The address of a server."""
    command = [sys.executable, "-m", "headwater", "serve", "--port", "0", "--model", str(model), *ENGINE, *options]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield next(filter(None, (re.search(r"ready\s+(http://\S+)/v1", line) for line in process.stdout)))[1]
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(WAIT_S)
            finally:
                process.kill()


def complete(address: str) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{address}/v1/completions", json=body, timeout=300)
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


def test_the_command_and_servers_of_one_and_two_ranks_say_the_same(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "headwater", "generate", PROMPT, "--raw", "--json", "--max-tokens", "12"]
    done = subprocess.run([*command, "--model", str(model), *ENGINE], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    with temporary_url("shm", tmp_path, "capacity=64MiB&deadline=60") as url:
        with served(model, "--pool", url, "--tensor-parallel-size", "2") as address:
            first = complete(address)
            with closing(open_store(url)) as store:
                wait_until(lambda: len(list(store.scan())) >= 2, what="two whole chunks are in the pool")
        with served(model, "--pool", url) as address:
            second = complete(address)
        destroy(parse_url(url))
    assert first["choices"][0]["text"] == second["choices"][0]["text"] == said["text"]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 512
