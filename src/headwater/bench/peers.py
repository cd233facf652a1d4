"""The same tiles through Redis: a real server, started here for the benchmark alone and stopped by its pid."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from headwater.bench.measure import gbps, stopwatch, take_turns
from headwater.bench.tiles import BATCH_TILES, SPEC, Caller
from headwater.errors import StoreError

_START_DEADLINE_S = 20.0
_KEYS_PER_COMMAND = 16


def bench_redis(caller: Caller, rounds: int) -> dict[str, Any]:
    """MSET and MGET of every tile, several commands a round trip, over a Unix socket.

    Redis gets the easier task: its tiles are neither verified nor brought to their place in the caller's memory.
    """
    reason = None if shutil.which("redis-server") else "no redis-server on the PATH"
    try:
        redis = importlib.import_module("redis")
    except ImportError:
        reason = "the redis package is not installed"
    if reason is not None:
        return {"redis_read_gbps": None, "redis_write_gbps": None, "redis_bytes": 0, "redis_reason": reason}
    with _server() as socket, redis.Redis(unix_socket_path=socket) as client:
        data = caller.data.reshape(-1, SPEC.num_kv_heads * SPEC.num_layers, caller.data.shape[3])
        order = caller.rng.permutation(len(data) * SPEC.num_tiles).tolist()
        keys = [f"tile:{number}" for number in order]
        tiles = [memoryview(data[divmod(number, SPEC.num_tiles)]) for number in order]
        batches = [(keys[i : i + BATCH_TILES], tiles[i : i + BATCH_TILES]) for i in range(0, len(keys), BATCH_TILES)]
        runs = take_turns(
            {"write": stopwatch(partial(_write, client, batches)), "read": stopwatch(partial(_read, client, batches))},
            rounds,
        )
        for key, tile in zip(keys[:BATCH_TILES], tiles[:BATCH_TILES], strict=True):
            if client.get(key) != tile:
                raise StoreError("Redis returned other bytes than it was given")
        server = str(client.info("server")["redis_version"])
    return {
        "redis_read_gbps": gbps(caller.num_bytes, runs.time("read")),
        "redis_write_gbps": gbps(caller.num_bytes, runs.time("write")),
        "redis_bytes": caller.num_bytes,
        "redis_reason": None,
        "redis_version": server,
        "redis_transport": "unix socket",
    }


Batches = Sequence[tuple[list[str], list[memoryview]]]


def _write(client: Any, batches: Batches) -> None:
    for keys, tiles in batches:
        pipeline = client.pipeline(transaction=False)
        for i in range(0, len(keys), _KEYS_PER_COMMAND):
            end = i + _KEYS_PER_COMMAND
            pipeline.mset(dict(zip(keys[i:end], tiles[i:end], strict=True)))
        pipeline.execute()


def _read(client: Any, batches: Batches) -> None:
    for keys, _ in batches:
        pipeline = client.pipeline(transaction=False)
        for i in range(0, len(keys), _KEYS_PER_COMMAND):
            pipeline.mget(keys[i : i + _KEYS_PER_COMMAND])
        if any(value is None for values in pipeline.execute() for value in values):
            raise StoreError("Redis lost a tile in the middle of the benchmark")


@contextlib.contextmanager
def _server() -> Iterator[str]:
    """A Redis server without persistence; yields the path of its socket."""
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as directory:
        socket = os.path.join(directory, "redis.sock")
        settings = ["--port", "0", "--unixsocket", socket, "--save", "", "--appendonly", "no", "--dir", directory]
        server = subprocess.Popen(["redis-server", *settings], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + _START_DEADLINE_S
            while not os.path.exists(socket):
                if server.poll() is not None or time.monotonic() >= deadline:
                    raise StoreError("redis-server did not start")
                time.sleep(0.01)
            yield socket
        finally:
            server.terminate()
            try:
                server.wait(_START_DEADLINE_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
