"""Real servers for a benchmark: on a free port of the loopback interface, ended by their process id."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence

from headwater.errors import StoreError

_START_S = 20.0


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def serving(command: Sequence[str], port: int) -> Iterator[None]:
    """A server that listens on this port for the time of a `with`."""
    env = os.environ | {"GLOG_minloglevel": "2"}
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
    try:
        deadline = time.monotonic() + _START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError as error:
                if server.poll() is not None or time.monotonic() >= deadline:
                    raise StoreError(f"{command[0]} did not start") from error
                time.sleep(0.01)
        yield
    finally:
        server.terminate()
        try:
            server.wait(_START_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
