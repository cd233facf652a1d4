"""`headwater proxy` and `headwater router` as processes, for tests."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx

SRC = Path(__file__).parents[1] / "src"
TIMEOUT_S = 60.0


class ProxyProcess:
    """The command, on a free port. Short prompts are prefilled elsewhere, too, unless something else is asked for."""

    def __init__(self, *args: str) -> None:
        if "--prefill" in args and "--min-prefill-tokens" not in args:
            args = (*args, "--min-prefill-tokens", "0")
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(SRC), os.environ.get("PYTHONPATH")]))}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headwater", *args, "--port", "0"],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        lines = []
        self.url = ""
        for line in self.process.stdout:
            lines.append(line)
            if found := re.search(r"ready\s+(http\S+)/v1", line):
                self.url = found[1]
                break
        self.errors: list[str] = []
        self._draining = threading.Thread(target=self._drain, daemon=True)
        self._draining.start()
        assert self.url, f"no proxy: {lines} {self.close()}"
        self.http = httpx.Client(base_url=self.url, timeout=TIMEOUT_S)

    def _drain(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.errors.append(line)

    def chat(self, content: str, **fields: Any) -> httpx.Response:
        headers = fields.pop("headers", None)
        return self.http.post("/v1/chat/completions", json=chat_body(content, **fields), headers=headers)

    def stream(self, content: str, **fields: Any) -> Any:
        body = chat_body(content, stream=True, stream_options={"include_usage": True}, **fields)
        return self.http.stream("POST", "/v1/chat/completions", json=body)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the series that have these labels."""
        total = 0.0
        for line in self.http.get("/metrics").text.splitlines():
            if re.match(rf"{name}[{{ ]", line) and all(f'{key}="{value}"' in line for key, value in labels.items()):
                total += float(line.rpartition(" ")[2])
        return total

    def rss_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) << 10  # type: ignore[index]

    def num_files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def close(self) -> str:
        if getattr(self, "http", None) is not None:
            self.http.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(TIMEOUT_S)
        self._draining.join(TIMEOUT_S)
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
        return "".join(self.errors)


def chat_body(content: str, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": content}], **fields}
