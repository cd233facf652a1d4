"""`headwater serve` processes with a small random model, pools of their own and receivers, for tests of roles."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

from engine_models import save_random_checkpoint

SRC = Path(__file__).parents[2] / "src"
TIMEOUT_S = 120.0
VOCAB = 512


def small_model(directory: Path) -> Path:
    """A checkpoint with random weights, whose tokens are words t0, t1, …"""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    save_random_checkpoint("llama", directory, seed=1)
    backend = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="t2").save_pretrained(directory)
    return directory


class Serve:
    """`headwater serve` on a free port."""

    def __init__(self, model: Path, pool: str, *args: str) -> None:
        path = os.pathsep.join(filter(None, [str(SRC), os.environ.get("PYTHONPATH")]))
        engine = ["--device", "cpu", "--num-threads", "1", "--max-model-len", "2048", "--pool-group-bytes", "1"]
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "headwater",
                "serve",
                "--port",
                "0",
                "--pool",
                pool,
                "--model",
                str(model),
                *engine,
                *args,
            ],
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.pool = pool
        self.url = self.peer = ""

    def wait_ready(self) -> None:
        """Read what it prints until it serves."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.search(r"^peers\s+(\S+)", line):
                self.peer = found[1]
            if found := re.search(r"ready\s+(http://\S+)/v1", line):
                self.url = found[1]
                return
        raise AssertionError("no server")

    def complete(self, prompt: list[int], num_tokens: int = 6, **fields: Any) -> dict[str, Any]:
        """An answer of its own."""
        return complete(self.url, prompt, num_tokens, **fields)

    def health(self) -> dict[str, Any]:
        """GET /health."""
        found: dict[str, Any] = httpx.get(f"{self.url}/health", timeout=TIMEOUT_S).json()
        return found

    def count(self, name: str) -> float:
        """The sum of a metric's series."""
        page = httpx.get(f"{self.url}/metrics", timeout=TIMEOUT_S).text
        return sum(float(line.split()[-1]) for line in page.splitlines() if re.match(rf"headwater_{name}[{{ ]", line))

    def receiver_pid(self) -> int:
        """The process that receives for it."""
        (pid,) = [pid for pid in children(self.process.pid) if b"headwater.peers.process" in command_of(pid)]
        return pid

    def close(self) -> None:
        """Stop it, and wait until all its processes are gone."""
        left = [*children(self.process.pid)]
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()
        for pid in left:
            wait_gone(pid)


def complete(url: str, prompt: list[int], num_tokens: int = 6, **fields: Any) -> dict[str, Any]:
    """POST /v1/completions, greedy."""
    body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, **fields}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_S).raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


def cached_of(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def children(pid: int) -> list[int]:
    try:
        return [
            int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()
        ]
    except OSError:
        return []


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def wait_gone(pid: int) -> None:
    from support import wait_until

    wait_until(lambda: not command_of(pid), 30.0, f"the end of process {pid}")
