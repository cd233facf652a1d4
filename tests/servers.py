"""Real servers for tests: started on free ports of the loopback interface, stopped by their process id."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from support import WAIT_S, wait_until

START_S = WAIT_S


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def listens(port: int, host: str = "127.0.0.1") -> bool:
    """Whether somebody accepts connections there."""
    try:
        socket.create_connection((host, port), timeout=0.5).close()
    except OSError:
        return False
    return True


class Server:
    """A process that listens on a port. It can be killed, stopped, woken and started again."""

    def __init__(self, command: Sequence[str], port: int, *, env: dict[str, str] | None = None) -> None:
        self._command = command
        self._env = env
        self.port = port
        self.metrics_port = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it listens."""
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=self._env
        )
        process = self._process

        def ready() -> bool:
            assert process.poll() is None, f"{self._command[0]} ended with {process.returncode}"
            return listens(self.port)

        wait_until(ready, START_S, f"{self._command[0]} listens")

    def send(self, number: signal.Signals) -> None:
        """Send a signal to it."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait(START_S)


@contextlib.contextmanager
def redis_server(*settings: str) -> Iterator[Server]:
    """A Redis or Valkey server without persistence."""
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        pytest.skip("no redis-server or valkey-server on the PATH")
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="hwtest-") as directory:
        fixed = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", directory]
        server = Server([binary, *fixed, *settings], port)
        server.start()
        try:
            yield server
        finally:
            server.kill()


@contextlib.contextmanager
def mooncake_master(*settings: str) -> Iterator[Server]:
    """A Mooncake master."""
    pytest.importorskip("mooncake.store", reason="mooncake-transfer-engine is not installed")
    binary = Path(sys.executable).with_name("mooncake_master")
    if not binary.exists():
        pytest.skip("no mooncake_master beside the interpreter")
    port, metrics = free_port(), free_port()
    fixed = [f"--rpc_port={port}", f"--metrics_port={metrics}", "--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1"]
    advised = ["--eviction_high_watermark_ratio=0.9", "--eviction_ratio=0.15"]
    server = Server([str(binary), *fixed, *advised, *settings], port, env=os.environ | {"GLOG_minloglevel": "2"})
    server.metrics_port = metrics
    server.start()
    try:
        yield server
    finally:
        server.kill()
