"""`headwater pool exporter` as a process, for tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx

from metric_cases import samples

SRC = Path(__file__).parents[1] / "src"
TIMEOUT_S = 60.0


class ExporterProcess:
    """The command, on a free port."""

    def __init__(self, url: str, *args: str) -> None:
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(SRC), os.environ.get("PYTHONPATH")]))}
        env.pop("HEADWATER_API_KEY", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headwater", "pool", "exporter", url, "--port", "0", "--json", *args],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.errors: list[str] = []
        self._draining = threading.Thread(target=self._drain, daemon=True)
        self._draining.start()
        self.said: dict[str, Any] = json.loads(self.process.stdout.readline() or "{}")
        assert "listening" in self.said, self.close()
        self.http = httpx.Client(base_url=self.said["listening"], timeout=TIMEOUT_S)

    def page(self) -> dict[str, float]:
        """Every sample by its name and labels."""
        reply = self.http.get("/metrics")
        assert reply.status_code == 200, reply.text
        return samples(reply.text)

    def stop(self) -> int:
        """As a supervisor does; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(TIMEOUT_S)

    def _drain(self) -> None:
        assert self.process.stderr is not None
        self.errors += self.process.stderr

    def close(self) -> str:
        """What it said on stderr."""
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
