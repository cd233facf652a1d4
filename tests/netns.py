"""Hosts made of network namespaces: each has its own interfaces, and a cable that can be pulled or squeezed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest

from support import wait_until

HERE = Path(__file__).resolve().parent
START_S = 90.0
_letters = cycle(ascii_lowercase)


def ip(*words: str) -> None:
    """Run `ip`."""
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Host:
    """One namespace on the common switch."""

    def __init__(self, network: str, number: int) -> None:
        self.name = f"{network}h{number}"
        self.address = f"10.77.{os.getpid() % 250}.{number + 1}"
        self._cable = f"{network}c{number}"

    def command(self, words: Sequence[str]) -> list[str]:
        """The command that runs something on this host."""
        return ["ip", "netns", "exec", self.name, *words]

    def unplug(self) -> None:
        """Pull the cable: packets are lost without a word."""
        ip("link", "set", self._cable, "down")

    def plug(self) -> None:
        """Put it back."""
        ip("link", "set", self._cable, "up")

    def limit(self, rate: str | None) -> None:
        """What the switch sends to this host a second, e.g. 1mbit; None: as much as it can."""
        if rate is None:
            subprocess.run(["tc", "qdisc", "del", "dev", self._cable, "root"], check=True, capture_output=True)
            return
        shape = ["tbf", "rate", rate, "burst", "16kb", "latency", "400ms"]
        subprocess.run(["tc", "qdisc", "add", "dev", self._cable, "root", *shape], check=True, capture_output=True)


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """So many hosts on one switch. Skips where that cannot be made (it needs root)."""
    if os.geteuid() or shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("network namespaces need root, ip and tc")
    network = f"hw{os.getpid() % 100000}{next(_letters)}"  # a namespace that was deleted takes a while to go
    made = [Host(network, number) for number in range(count)]
    bridge = f"{network}b"
    try:
        try:
            ip("link", "add", bridge, "type", "bridge")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no bridge can be made here: {error.stderr.decode().strip()}")
        ip("link", "set", bridge, "up")
        for host in made:
            ip("netns", "add", host.name)
            ip("link", "add", host._cable, "type", "veth", "peer", "name", "eth0", "netns", host.name)
            ip("link", "set", host._cable, "master", bridge, "up")
            for words in (["link", "set", "lo", "up"], ["addr", "add", f"{host.address}/24", "dev", "eth0"]):
                subprocess.run(host.command(["ip", *words]), check=True, capture_output=True)
            subprocess.run(host.command(["ip", "link", "set", "eth0", "up"]), check=True, capture_output=True)
        yield made
    finally:
        for host in made:
            subprocess.run(["ip", "link", "del", host._cable], check=False, capture_output=True)
            subprocess.run(["ip", "netns", "del", host.name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], check=False, capture_output=True)


class Daemon:
    """A server on a host."""

    def __init__(self, host: Host, command: Sequence[str], port: int) -> None:
        self._host = host
        self._command = command
        self._port = port
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it listens."""
        self._process = subprocess.Popen(
            self._host.command(self._command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        probe = f"import socket; socket.create_connection(('{self._host.address}', {self._port}), 1)"
        command = self._host.command([sys.executable, "-c", probe])

        def listens() -> bool:
            return subprocess.run(command, check=False, capture_output=True).returncode == 0

        wait_until(listens, START_S, f"{self._command[0]} listens")

    def kill(self) -> None:
        """End it."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(START_S)


class Peer:
    """A process on a host that does what it is told: see `host_process` and `host_engine`."""

    def __init__(self, host: Host, *words: str, script: str = "host_process") -> None:
        paths = [str(HERE), str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        env |= {"GLOG_minloglevel": "3", "OMP_NUM_THREADS": "1"}
        command = host.command([sys.executable, str(HERE / "integration" / f"{script}.py"), *words])
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env)
        assert self.hear() == "ready"

    def hear(self) -> Any:
        """What it says next."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "a process on a host ended"
        return json.loads(line)

    def tell(self, *words: object) -> None:
        """Tell it to do something, without waiting."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()

    def ask(self, *words: object) -> Any:
        """Tell it, and hear what became of it."""
        self.tell(*words)
        return self.hear()

    def close(self) -> None:
        """Let it end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
