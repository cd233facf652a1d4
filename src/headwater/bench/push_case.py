"""What the benchmarks of peers share: sizes of tiles, pools of their own, and processes that end with them."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headwater.kv.identity import Identity
from headwater.kv.spec import KVSpec
from headwater.pool.pool import Pool, open_pool
from headwater.stores.embedded import destroy
from headwater.stores.url import parse_url

IDENTITY = Identity(weights="sha256:" + "0" * 64, run_dtype="bfloat16", kv_dtype="bfloat16", label="bench")
_HEADS = 8
START_S = 60.0


@dataclass(frozen=True)
class PushCase:
    """One size of tile: `num_chunks` chunks of `num_layers` × 8 tiles."""

    name: str
    chunk_tokens: int
    head_dim: int
    num_layers: int
    num_chunks: int
    num_ranks: int = 1
    num_lanes: int = 1
    """Connections a rank; the bare sockets have one."""
    carrier: str = "tcp"

    @property
    def spec(self) -> KVSpec:
        """The model whose tiles have this size."""
        return KVSpec.gqa(num_layers=self.num_layers, num_kv_heads=_HEADS, head_dim=self.head_dim, dtype="bfloat16")

    @property
    def tile_bytes(self) -> int:
        """Bytes of one tile."""
        return self.spec.tile_bytes(self.chunk_tokens)

    @property
    def num_tiles(self) -> int:
        """Tiles in all."""
        return self.num_chunks * self.spec.num_tiles

    @property
    def num_bytes(self) -> int:
        """Bytes in all."""
        return self.num_tiles * self.tile_bytes


@dataclass(frozen=True)
class FarSide:
    """Where the processes of the other side run."""

    host: str = "127.0.0.1"
    """Its address."""
    command: Sequence[str] = ()
    """What runs a command there."""
    secret_file: str | None = None


HERE = FarSide()


@contextlib.contextmanager
def bench_pool(case: PushCase, options: str = "") -> Iterator[Pool]:
    """Large enough for everything to be pending at once. `options`: further ones of its URL."""
    capacity = (case.num_bytes * 5 >> 20) + 32
    name = f"shm:///hwbench-{os.getpid()}-{secrets.token_hex(4)}"
    url = f"{name}?capacity={capacity}MiB&segment={max(8, capacity // 8)}MiB{options}"
    try:
        with open_pool(url) as pool:
            yield pool
    finally:
        destroy(parse_url(url))


@contextlib.contextmanager
def bench_process(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


class BenchReceiver(NamedTuple):
    """`headwater pool receive` of a pool, in a process of its own."""

    address: str
    pid: int


@contextlib.contextmanager
def bench_receiver(url: str, *options: str, far: FarSide = HERE) -> Iterator[BenchReceiver]:
    """One that ends with the context."""
    command = [*far.command, sys.executable, "-m", "headwater", "pool", "receive", url, "--listen", f"{far.host}:0"]
    secret = ["--secret-file", far.secret_file] if far.secret_file else []
    with bench_process([*command, "--json", "--share", "1.0", *secret, *options]) as process:
        assert process.stdout is not None
        yield BenchReceiver(str(json.loads(process.stdout.readline())["listening"]), process.pid)
