"""`headwater bench store`: how close a pool comes to the memory it lives in, and what finding costs.

One run measures the pool, its physical limit (copy and checksum in a bare loop), a peer (Redis) and the noise. Every
store that it makes is new, has a random name, and is removed at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from headwater.bench.lookup import bench_lookup, url_options
from headwater.bench.measure import Note, Rounds, gbps, machine, take_turns
from headwater.bench.peers import bench_redis
from headwater.bench.remote import bench_remote, no_remote
from headwater.bench.tiles import CHUNK_BYTES, TILE_BYTES, Caller, Ceiling, PoolSide, shared_memory
from headwater.errors import InvalidArgumentError
from headwater.pool import Pool, open_pool
from headwater.stores.embedded import destroy, store_directory
from headwater.stores.url import parse_url

_SEED = 1


@dataclass(frozen=True)
class StoreBench:
    """What to measure, and how long."""

    url: str | None = None
    """Where the pool of tiles is made; it must not exist yet. By default a new one in shared memory."""
    tiles_bytes: int = 1 << 30
    num_chunks: int = 1_000_000
    pairs: int = 9
    redis: bool = True
    remote: bool = True
    """Also measure remote tiers against the bare clients of their servers."""
    side_bytes: int = 256 << 20
    """Tiles for what is only mentioned beside: files and Redis."""

    def __post_init__(self) -> None:
        if self.pairs < 1 or self.num_chunks < 1 or self.tiles_bytes < CHUNK_BYTES:
            raise InvalidArgumentError(
                f"a benchmark needs at least one pair, one chunk and {CHUNK_BYTES >> 20} MiB of tiles, got "
                f"{self.pairs} pairs, {self.num_chunks} chunks and {self.tiles_bytes} bytes"
            )

    @property
    def tile_chunks(self) -> int:
        """Chunks of 64 tiles that hold at least `tiles_bytes`."""
        return -(-self.tiles_bytes // CHUNK_BYTES)


QUICK_BELOW = 256 << 20
"""Fewer tiles than this lie in the processor's cache, and say nothing."""
QUICK = StoreBench(tiles_bytes=48 << 20, num_chunks=4000, pairs=2, side_bytes=16 << 20)
"""Everything once, in seconds: whether it runs, not how fast."""


class Bar(NamedTuple):
    """What a figure should be. A bar closer to 1 than the noise cannot be judged."""

    figure: str
    at_least: bool
    limit: float
    noise: str | None

    def judge(self, report: Mapping[str, Any]) -> str:
        """`met`, `missed`, or why neither can be said."""
        if report[self.figure] is None:
            return "not judged: not measured"
        if self.noise is not None and abs(self.limit - 1) <= report[self.noise]:
            return "not judged: too noisy"
        met = report[self.figure] >= self.limit if self.at_least else report[self.figure] <= self.limit
        return "met" if met else "missed"


BARS = (
    Bar("read_vs_ceiling", True, 0.9, "read_noise"),
    Bar("write_vs_ceiling", True, 0.9, "write_noise"),
    Bar("match_ratio", False, 3.0, "match_noise"),
    Bar("overhead_ratio", False, 0.01, None),
    Bar("redis_read_ratio", True, 0.85, "redis_read_noise"),
    Bar("redis_write_ratio", True, 0.85, "redis_write_noise"),
    Bar("mooncake_read_ratio", True, 0.75, "mooncake_read_noise"),
    Bar("mooncake_write_ratio", True, 0.85, "mooncake_write_noise"),
)


def run(bench: StoreBench, note: Note = lambda text: None) -> dict[str, Any]:
    """Measure everything; plain data for JSON. Takes minutes at full size, and about five times `tiles_bytes`."""
    report: dict[str, Any] = {"bench": "store", "machine": machine(), "pairs": bench.pairs}
    report |= _bench_import(note)
    note(f"making {bench.tile_chunks * CHUNK_BYTES / 2**30:.2f} GiB of tiles")
    caller = Caller(bench.tile_chunks, _SEED)
    report |= _bench_tiles(bench, caller, note)
    side = caller.head(max(1, bench.side_bytes // CHUNK_BYTES))
    report |= _bench_file(bench, side, note)
    if bench.redis:
        note("the same tiles through Redis")
        report |= bench_redis(side, min(bench.pairs, 5))
    else:
        report |= {"redis_read_gbps": None, "redis_write_gbps": None, "redis_bytes": 0, "redis_reason": "left out"}
    report |= bench_remote(side, bench.pairs, note) if bench.remote else no_remote("left out")
    del caller, side
    with _new_pool(None, **url_options(bench.num_chunks)) as pool:
        report |= bench_lookup(pool, bench.num_chunks, bench.pairs, note)
    report["bars"] = {bar.figure: {"limit": bar.limit, "verdict": bar.judge(report)} for bar in BARS}
    if bench.tiles_bytes < QUICK_BELOW:
        for bar in report["bars"].values():
            bar["verdict"] = "not judged: too small a run"
    elif report["match_chunks"] < bench.num_chunks:
        report["bars"]["match_ratio"]["verdict"] = (
            f"not judged: the pool kept {report['match_chunks']} chunks of {bench.num_chunks}"
        )
    return report


# ---- tiles ------------------------------------------------------------------------------------------------------
def _bench_tiles(bench: StoreBench, caller: Caller, note: Note) -> dict[str, Any]:
    size = caller.num_bytes
    capacity = size + max(size // 4, 4 * CHUNK_BYTES)
    with shared_memory(caller.data) as shared, _new_pool(bench.url, capacity=capacity) as pool:
        ceiling, ours = Ceiling(caller, shared), PoolSide(caller, pool)
        ours.fill()
        stats = pool.stats().store
        note(f"reading {TILE_BYTES >> 10} KiB tiles in random order, one thread and two")
        caller.forget_out()
        ours.read()()
        caller.check_out()
        reads = take_turns(
            {"ceiling": ceiling.read(), "pool": ours.read(), "again": ceiling.read(), "memcpy": ceiling.memcpy()},
            bench.pairs,
        )
        reads2 = take_turns({"ceiling": ceiling.read(2), "pool": ours.read(2), "again": ceiling.read(2)}, bench.pairs)
        others = take_turns({"pieces": ours.read_pieces(), "chunks": ours.read_chunks()}, min(bench.pairs, 5))
        note("writing chunks of the same tiles, one thread and two")
        writes = take_turns({"ceiling": ceiling.write(), "pool": ours.write(), "again": ceiling.write()}, bench.pairs)
        writes2 = take_turns(
            {"ceiling": ceiling.write(2), "pool": ours.write(2), "again": ceiling.write(2)}, bench.pairs
        )
        single = take_turns({"pool": ours.write_tiles()}, min(bench.pairs, 5))
        note("checking every stored byte")
        verified = pool.verify()
    return {
        "tile_bytes": TILE_BYTES,
        "tiles_bytes": size,
        "memcpy_gbps": gbps(size, reads.time("memcpy")),
        **_compared("read", size, reads, reads2),
        "read_piece_gbps": gbps(size, others.time("pieces")),
        "read_chunk_gbps": gbps(size, others.time("chunks")),
        **_compared("write", size, writes, writes2),
        "write_tile_gbps": gbps(size, single.time("pool")),
        "noise": max(reads.noise("ceiling", "again"), writes.noise("ceiling", "again")),
        "overhead_ratio": stats.index_used_bytes / stats.used_bytes,
        "index_reserved_ratio": stats.index_bytes / stats.capacity_bytes,
        "evicted": stats.evicted,
        "verified_clean": verified.clean,
    }


def _compared(verb: str, size: int, one: Rounds, two: Rounds) -> dict[str, Any]:
    return {
        f"{verb}_gbps": gbps(size, one.time("pool")),
        f"ceiling_{verb}_gbps": gbps(size, one.time("ceiling")),
        f"{verb}_vs_ceiling": one.ratio("ceiling", "pool"),
        f"{verb}_noise": one.noise("ceiling", "again"),
        f"{verb}_gbps_2t": gbps(size, two.time("pool")),
        f"ceiling_{verb}_gbps_2t": gbps(size, two.time("ceiling")),
        f"{verb}_vs_ceiling_2t": two.ratio("ceiling", "pool"),
        f"{verb}_noise_2t": two.noise("ceiling", "again"),
    }


def _bench_file(bench: StoreBench, caller: Caller, note: Note) -> dict[str, Any]:
    note("the same through files, with a warm page cache")
    size = caller.num_bytes
    with (
        tempfile.TemporaryDirectory(prefix="headwater-bench-") as directory,
        _new_pool(f"file://{directory}/pool", capacity=size + max(size // 4, 4 * CHUNK_BYTES)) as pool,
    ):
        ours = PoolSide(caller, pool)
        writes = take_turns({"pool": ours.write()}, min(bench.pairs, 5))
        ours.fill()
        caller.forget_out()
        reads = take_turns({"pool": ours.read()}, min(bench.pairs, 5))
        caller.check_out()
    return {
        "file_read_gbps": gbps(size, reads.time("pool")),
        "file_write_gbps": gbps(size, writes.time("pool")),
        "file_bytes": size,
    }


# ---- stores -----------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def _new_pool(url: str | None, **options: int) -> Iterator[Pool]:
    """A pool that did not exist before and does not exist after."""
    url = url or f"shm:///headwater-bench-{secrets.token_hex(8)}"
    parsed = parse_url(url)
    missing = "&".join(f"{name}={value}" for name, value in options.items() if name not in parsed.options)
    if missing:
        url += ("&" if parsed.options else "?") + missing
        parsed = parse_url(url)
    if parsed.scheme != "memory" and os.path.exists(store_directory(parsed)):
        raise InvalidArgumentError(f"{parsed} exists already; the benchmark empties and removes what it uses")
    try:
        with open_pool(url) as pool:
            yield pool
    finally:
        if parsed.scheme != "memory":
            destroy(parsed)


# ---- importing --------------------------------------------------------------------------------------------------
_IMPORT = """
import json, sys, time
start = time.perf_counter()
import headwater
ms = 1000 * (time.perf_counter() - start)
print(json.dumps({"import_ms": ms, "import_torch": "torch" in sys.modules}))
"""


def _bench_import(note: Note) -> dict[str, Any]:
    """Best of five fresh interpreters: the first may compile byte code."""
    note("importing headwater")
    source = str(Path(__file__).resolve().parents[2])
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))}
    command = [sys.executable, "-c", _IMPORT]
    runs = [
        json.loads(subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60).stdout)
        for _ in range(5)
    ]
    return {"import_ms": min(run["import_ms"] for run in runs), "import_torch": any(r["import_torch"] for r in runs)}
