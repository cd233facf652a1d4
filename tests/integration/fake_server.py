"""A server process around the engine without a model (`fake_engine.py`), for tests, and what they ask of it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

import fake_engine

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120.0
LONG = 15_000
"""Tokens of a `slow` answer that takes far longer than anything here may."""


class Server:
    """A server process around the fake engine."""

    def __init__(self, aborts: Path, **options: Any) -> None:
        self.aborts = aborts
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), str(Path(__file__).parent)])
        self.process = subprocess.Popen(
            [sys.executable, fake_engine.__file__, "serve", json.dumps({"port": 0, **options})],
            env=os.environ | {"PYTHONPATH": path, "FAKE_ENGINE_ABORTS": str(aborts)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.facts: dict[str, Any] = json.loads(line) if line else {"url": ""}
        self.url = self.facts["url"]
        self.http = httpx.Client(base_url=self.url, timeout=TIMEOUT_S)

    def chat(self, content: str, **fields: Any) -> Any:
        return self.http.post("/v1/chat/completions", json=chat_body(content, **fields))

    def connect(self, sent: bytes = b"") -> socket.socket:
        """A connection of its own, on which so much was sent."""
        host, port = self.url.partition("://")[2].split(":")
        sock = socket.create_connection((host, int(port)), timeout=TIMEOUT_S)
        sock.sendall(sent)
        return sock

    def metric(self, name: str) -> float:
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith(f"headwater_{name} "):
                return float(line.split()[1])
        raise AssertionError(f"no metric {name}")

    def engine_pid(self) -> int:
        (child,) = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(child)

    def wait_exit(self) -> int:
        return self.process.wait(TIMEOUT_S)

    def close(self) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=TIMEOUT_S)


def chat_body(content: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **fields}


def request(fields: dict[str, Any], *headers: str, path: str = "/v1/completions") -> bytes:
    """A POST as it goes over the wire; the connection ends with the answer."""
    body = json.dumps(fields).encode()
    fixed = ["host: localhost", "connection: close", "content-type: application/json", f"content-length: {len(body)}"]
    return "\r\n".join([f"POST {path} HTTP/1.1", *fixed, *headers, "", ""]).encode() + body


def answer(sock: socket.socket) -> bytes:
    """All that comes until the other end closes."""
    pieces = []
    while piece := sock.recv(1 << 16):
        pieces.append(piece)
    return b"".join(pieces)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def events(text: str) -> list[Any]:
    """The data of a stream; [DONE] is None."""
    data = [line.removeprefix("data: ") for line in text.splitlines() if line]
    return [None if item == "[DONE]" else json.loads(item) for item in data]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
