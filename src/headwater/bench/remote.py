"""Chunks through `redis://` and `mooncake://`, against the bare clients moving the same bytes in their best form.

Ours does more: every tile is verified where it lands, and nothing can be found before all of it is there. Both sides
use the same real server, started here for the benchmark alone, over TCP on the loopback interface, with objects of the
same size. Mooncake's bytes lie in memory that the reading process gave to the cluster, and need no network: for both
sides the fastest case, and the hardest to compare with. The `far` figures are those of clients that gave none.
"""

from __future__ import annotations

import contextlib
import importlib
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from headwater.bench.measure import Note, Timed, gbps, stopwatch, take_turns
from headwater.bench.servers import free_port, serving
from headwater.bench.tiles import BATCH_CHUNKS, CHUNK_TOKENS, DEADLINE_S, IDENTITY, SPEC, WHOLE, Caller
from headwater.errors import StoreError
from headwater.kv.hashing import ChunkRef
from headwater.pool import Pool, Space
from headwater.stores.embedded import destroy, open_embedded
from headwater.stores.embedded.export import Exported
from headwater.stores.embedded.store import EmbeddedStore
from headwater.stores.remote import open_remote
from headwater.stores.remote.mooncake import MooncakeClient
from headwater.stores.remote.store import RemoteStore
from headwater.stores.tiers.copier import COPY_CHUNKS, export_batches
from headwater.stores.tiers.lower import RemoteTier
from headwater.stores.url import parse_url
from headwater.stores.workers import run_in_threads

_OBJECT_BYTES = SPEC.num_kv_heads * SPEC.tile_bytes(CHUNK_TOKENS)


def bench_remote(caller: Caller, pairs: int, note: Note) -> dict[str, Any]:
    """Figures of both backends; those that are not installed say so in `…_reason`."""
    report: dict[str, Any] = {}
    for name, bench in (("redis", _bench_redis), ("mooncake", _bench_mooncake)):
        note(f"whole chunks through {name}://, and through its bare client")
        report |= {f"{name}_{figure}": value for figure, value in bench(caller, pairs).items()}
    return report


# ---- the pool's side --------------------------------------------------------------------------------------------
class _OurSide:
    """Whole chunks to and from a remote tier, a batch at a time: down from a pool in shared memory, as the copier takes
    them, and up into the caller's memory."""

    def __init__(self, caller: Caller, front: EmbeddedStore, tier: RemoteTier, far: RemoteStore) -> None:
        self._caller = caller
        self._front = front
        self._tier = tier
        self._pool = Pool(front)
        self._space = self._pool.space(IDENTITY, SPEC, chunk_tokens=CHUNK_TOKENS)
        self._remote = Pool(tier.store).space(IDENTITY, SPEC, chunk_tokens=CHUNK_TOKENS)
        self._far = Pool(far).space(IDENTITY, SPEC, chunk_tokens=CHUNK_TOKENS)
        prompts = caller.rng.integers(0, 2**32, (caller.num_chunks, CHUNK_TOKENS), np.uint32)
        self._refs: list[ChunkRef] = [self._space.keys(tokens).ref(0) for tokens in prompts]
        order = caller.chunk_order
        self._groups = [order[i : i + BATCH_CHUNKS] for i in range(0, len(order), BATCH_CHUNKS)]
        for c in range(caller.num_chunks):
            _check(self._space.write([self._refs[c]], WHOLE, [caller.data[c]], deadline_s=DEADLINE_S))

    def write(self) -> float:
        """Every chunk; the remote store is emptied before, outside the measured time."""
        self._tier.store.clear(None)
        start = time.perf_counter()
        for at in range(0, len(self._refs), COPY_CHUNKS):
            order = self._caller.chunk_order[at : at + COPY_CHUNKS]
            missing = self._tier.missing([self._refs[c].key for c in order])
            if missing is None:
                raise StoreError("the remote store did not answer in the middle of the benchmark")
            batches = export_batches(self._front, self._tier, missing)
            run_in_threads((partial(self._put, batch) for batch in batches), self._tier.num_writers)
        seconds = time.perf_counter() - start
        if self._tier.missing([ref.key for ref in self._refs]) != []:
            raise StoreError("the copier lost a chunk in the middle of the benchmark")
        return seconds

    def _put(self, batch: Sequence[Exported]) -> None:
        _check(self._tier.put(batch))
        for item in batch:
            item.release()

    def read(self) -> None:
        """Every chunk, verified in the caller's memory."""
        self._read(self._remote)

    def read_far(self) -> None:
        """The same as a client that gave no memory."""
        self._read(self._far)

    def _read(self, space: Space) -> None:
        for group in self._groups:
            out = [self._caller.out[c] for c in group]
            _check(space.read([self._refs[c] for c in group], WHOLE, out, deadline_s=DEADLINE_S))

    def check(self, read: Callable[[], None]) -> None:
        """Raise unless what is read is what was written."""
        self._caller.out.fill(0)
        read()
        if not np.array_equal(self._caller.out, self._caller.data):
            raise StoreError("what was read is not what was written")


@contextlib.contextmanager
def _our_side(caller: Caller, url: str, far_url: str | None = None) -> Iterator[_OurSide]:
    parsed, far_parsed = (
        parse_url(f"{text}{'&' if '?' in text else '?'}lookup=10&deadline={DEADLINE_S}")
        for text in (url, far_url or url)
    )
    local = parse_url(f"shm:///headwater-bench-{secrets.token_hex(8)}?capacity={2 * caller.num_bytes + (64 << 20)}")
    front = open_embedded(local)
    remote = open_remote(parsed)
    far = open_remote(far_parsed)
    try:
        remote.contribute()
        yield _OurSide(caller, front, RemoteTier(parsed, remote), far)
    finally:
        far.close()
        remote.close()
        front.close()
        destroy(local)


def _check(statuses: Sequence[int]) -> None:
    if any(statuses):
        raise StoreError(f"the store answered {next(status for status in statuses if status)!r} in the benchmark")


def _compared(caller: Caller, ours: _OurSide, write: Timed, read: Callable[[], object], pairs: int) -> dict[str, Any]:
    # Three times as many as reads: they are shorter, and vary more.
    writes = take_turns({"bare": write, "ours": ours.write, "again": write}, 3 * pairs)
    ours.check(ours.read)
    reads = take_turns({"bare": stopwatch(read), "ours": stopwatch(ours.read), "again": stopwatch(read)}, pairs)
    return {
        "read_ratio": reads.ratio("bare", "ours"),
        "write_ratio": writes.ratio("bare", "ours"),
        "read_noise": reads.noise("bare", "again"),
        "write_noise": writes.noise("bare", "again"),
        "remote_read_gbps": gbps(caller.num_bytes, reads.time("ours")),
        "remote_write_gbps": gbps(caller.num_bytes, writes.time("ours")),
        "bare_read_gbps": gbps(caller.num_bytes, reads.time("bare")),
        "bare_write_gbps": gbps(caller.num_bytes, writes.time("bare")),
        "remote_bytes": caller.num_bytes,
        "remote_reason": None,
    }


def no_remote(reason: str) -> dict[str, Any]:
    """The report of a run that measures none of them."""
    return {f"{name}_{figure}": value for name in ("redis", "mooncake") for figure, value in _absent(reason).items()}


def _absent(reason: str) -> dict[str, Any]:
    return {"read_ratio": None, "write_ratio": None, "read_noise": 0.0, "write_noise": 0.0, "remote_reason": reason}


def _objects(caller: Caller) -> list[tuple[list[str], list[np.ndarray[Any, np.dtype[np.uint8]]], list[Any]]]:
    """For the bare clients: batches of (names, values, targets), one object a layer, as many as ours in a call."""
    data, out = caller.data.reshape(-1, _OBJECT_BYTES), caller.out.reshape(-1, _OBJECT_BYTES)
    per_chunk, batches = SPEC.num_layers, []
    order = caller.chunk_order
    for i in range(0, len(order), BATCH_CHUNKS):
        rows = [c * per_chunk + layer for c in order[i : i + BATCH_CHUNKS] for layer in range(per_chunk)]
        batches.append(([f"bare:{row}" for row in rows], [data[row] for row in rows], [out[row] for row in rows]))
    return batches


# ---- Redis ------------------------------------------------------------------------------------------------------
def _bench_redis(caller: Caller, pairs: int) -> dict[str, Any]:
    try:
        redis = importlib.import_module("redis")
    except ImportError:
        return _absent("the redis package is not installed")
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        return _absent("no redis-server on the PATH")
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as directory:
        settings = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", directory]
        with (
            serving([binary, *settings], port),
            redis.Redis(port=port) as client,
            _our_side(caller, f"redis://127.0.0.1:{port}") as ours,
        ):
            batches = _objects(caller)

            def write() -> float:
                client.delete(*[name for names, _, _ in batches for name in names])
                return stopwatch(partial(_redis_write, client, batches))()

            return _compared(caller, ours, write, partial(_redis_read, client, batches), pairs)


def _redis_write(client: Any, batches: Sequence[Any]) -> None:
    for names, values, _ in batches:
        pipeline = client.pipeline(transaction=False)
        for name, value in zip(names, values, strict=True):
            pipeline.set(name, memoryview(value))
        pipeline.execute()


def _redis_read(client: Any, batches: Sequence[Any]) -> None:
    for names, _, _ in batches:
        pipeline = client.pipeline(transaction=False)
        for name in names:
            pipeline.get(name)
        if any(value is None for value in pipeline.execute()):
            raise StoreError("Redis lost an object in the middle of the benchmark")


# ---- Mooncake ---------------------------------------------------------------------------------------------------
def _bench_mooncake(caller: Caller, pairs: int) -> dict[str, Any]:
    try:
        library = importlib.import_module("mooncake.store")
    except ImportError as error:
        return _absent(f"Mooncake's client cannot be loaded: {error}")
    binary = Path(sys.executable).with_name("mooncake_master")
    if not binary.exists():
        return _absent("no mooncake_master beside the interpreter")
    port, metrics = free_port(), free_port()
    settings = [
        f"--rpc_port={port}",
        "--rpc_address=127.0.0.1",
        f"--metrics_port={metrics}",
        "--metrics_host=127.0.0.1",
    ]
    with serving([str(binary), *settings], port):
        bare = library.MooncakeDistributedStore()
        # Each gives memory of its own and prefers it, with room for what eviction wants to keep free.
        size = 2 * caller.num_bytes + (64 << 20)
        if bare.setup("127.0.0.1", "P2PHANDSHAKE", size, 64 << 20, "tcp", "", f"127.0.0.1:{port}"):
            return _absent("Mooncake's client could not be set up")
        try:
            for memory in (caller.data, caller.out):
                bare.register_buffer(memory.ctypes.data, memory.nbytes)
            url = f"mooncake://127.0.0.1:{port}?buffer=64MiB"
            with _our_side(caller, f"{url}&segment={size}", url) as ours:
                batches = _objects(caller)
                write = partial(_mooncake_write, bare, library, batches)
                report = _compared(caller, ours, write, partial(_mooncake_read, bare, batches), pairs)
                return report | _mooncake_far(caller, ours, library, batches, port, pairs)
        finally:
            bare.close()


def _mooncake_far(
    caller: Caller, ours: _OurSide, library: Any, batches: Sequence[Any], port: int, pairs: int
) -> dict[str, Any]:
    """Both sides as clients that gave no memory: all bytes come through a socket."""
    bare = library.MooncakeDistributedStore()
    if bare.setup("127.0.0.1", "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", f"127.0.0.1:{port}"):
        raise StoreError("a second client of Mooncake could not be set up")
    try:
        bare.register_buffer(caller.out.ctypes.data, caller.out.nbytes)
        ours.check(ours.read_far)
        runs = {"bare": stopwatch(partial(_mooncake_read, bare, batches)), "ours": stopwatch(ours.read_far)}
        reads = take_turns(runs, pairs)
        return {
            "far_read_ratio": reads.ratio("bare", "ours"),
            "far_read_gbps": gbps(caller.num_bytes, reads.time("ours")),
            "bare_far_read_gbps": gbps(caller.num_bytes, reads.time("bare")),
        }
    finally:
        bare.close()


def _mooncake_write(client: Any, library: Any, batches: Sequence[Any]) -> float:
    for names, _, _ in batches:
        client.batch_remove(names, True)
    config = library.ReplicateConfig()
    config.preferred_segment = client.get_hostname()

    def put(names: Sequence[str], values: Sequence[Any]) -> None:
        codes = client.batch_put_from(names, [v.ctypes.data for v in values], [v.nbytes for v in values], config)
        if any(codes):
            raise StoreError(f"Mooncake refused an object in the middle of the benchmark: {set(codes)}")

    start = time.perf_counter()
    run_in_threads(
        (partial(put, names, values) for names, values, _ in batches), MooncakeClient.num_writers
    )  # as fast as it gets
    return time.perf_counter() - start


def _mooncake_read(client: Any, batches: Sequence[Any]) -> None:
    for names, _, targets in batches:
        codes = client.batch_get_into(names, [t.ctypes.data for t in targets], [t.nbytes for t in targets])
        if any(code != _OBJECT_BYTES for code in codes):
            raise StoreError(f"Mooncake lost an object in the middle of the benchmark: {set(codes)}")
