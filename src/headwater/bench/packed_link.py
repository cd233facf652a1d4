"""Packed tiles against raw ones through a link of limited rate: pulled from a peer, pushed to one, read from Redis.

python -m headwater.bench.packed_link CASE ROUNDS FAR     on the near host; prints the seconds of every round

Two hosts are made of network namespaces, and their cable is squeezed by `tc` (a token bucket). A round brings one
prompt from one host's pool into the other's, as raw tiles and as packed ones; what the link gives is measured beside it
by bare sockets. The KV is normal values with a scale for each channel.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from headwater.bench.measure import Note, Rounds, Timed, gbps, machine, stopwatch, take_turns
from headwater.bench.push_case import IDENTITY, FarSide, PushCase, bench_pool, bench_process, bench_receiver
from headwater.bench.push_hosts import two_hosts
from headwater.bench.push_turns import bare_turn
from headwater.bench.servers import free_port
from headwater.bench.values import kv_tile
from headwater.errors import StoreError
from headwater.kv.encoding import PACKED, RAW, stored_extent_bytes
from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import whole_shard
from headwater.peers.caller import LinkSettings
from headwater.peers.hello import read_secret
from headwater.peers.sender import PeerSender
from headwater.pool.pool import Pool, open_pool
from headwater.pool.space import Space
from headwater.stores.base import Packing
from headwater.stores.embedded import destroy
from headwater.stores.url import parse_url

WAYS = ("pull", "push", "redis")
BAR = 0.80
_WAIT_S = 120.0


@dataclass(frozen=True)
class PackedLinkBench:
    """What is brought, over which links, and how often."""

    case: PushCase = PushCase("packed", 256, 128, 8, 8)  # noqa: RUF009 (frozen)
    rates: tuple[tuple[str, int], ...] = (("1g", 1000), ("10g", 10_000))
    """Names, and megabits a second."""
    rounds: int = 9


QUICK = PackedLinkBench(PushCase("packed", 64, 32, 2, 2), (("1g", 1000),), rounds=1)


def run(bench: PackedLinkBench, note: Note) -> dict[str, Any]:
    """`packed_fetch_RATE`: time of packed tiles over that of raw ones, the longest of the three ways. Raises StoreError
    where there are no namespaces or no Redis server."""
    if shutil.which("redis-server") is None:
        raise StoreError("no redis-server on the PATH: one of the ways is a lower tier in Redis")
    report: dict[str, Any] = {"bench": "peers --packed", "machine": machine()}
    raw, packed = (_stored_bytes(bench.case, form) for form in (RAW, PACKED))
    report |= {"packed_raw_bytes": raw, "packed_bytes": packed, "packed_size_ratio": packed / raw}
    verdicts: dict[str, Any] = {}
    for name, megabits in bench.rates:
        note(f"{raw >> 20} MiB through {megabits} Mb/s")
        rounds = _measure(bench, megabits)
        ratios = {way: rounds.ratio(f"{way} packed", f"{way} raw") for way in WAYS}
        noises = {way: rounds.noise(f"{way} raw", f"{way} again") for way in WAYS}
        worst = max(ratios, key=lambda way: ratios[way])
        report |= {f"packed_{way}_{name}": ratio for way, ratio in ratios.items()}
        report |= {f"packed_{way}_noise_{name}": noise for way, noise in noises.items()}
        report |= {f"{way}_raw_gbps_{name}": gbps(raw, rounds.time(f"{way} raw")) for way in WAYS}
        report[f"packed_fetch_{name}"] = ratios[worst]
        report[f"packed_fetch_noise_{name}"] = noises[worst]
        report[f"link_gbps_{name}"] = gbps(bench.case.num_bytes, rounds.time("link"))
        report[f"link_limit_gbps_{name}"] = megabits / 8000
        report[f"packed_fetch_worst_{name}"] = worst
        verdict = "met" if ratios[worst] <= BAR else "missed"
        judged = abs(ratios[worst] - 1) > noises[worst]
        verdicts[f"packed_fetch_{name}"] = {"limit": BAR, "verdict": verdict if judged else "not judged"}
    return report | {"bars": verdicts}


def _stored_bytes(case: PushCase, encoding: int) -> int:
    return case.num_chunks * stored_extent_bytes(case.spec, case.chunk_tokens, encoding)


def _measure(bench: PackedLinkBench, megabits: int) -> Rounds:
    with two_hosts(megabits) as (near, far):
        arguments = [json.dumps(asdict(bench.case)), str(bench.rounds), json.dumps(asdict(far))]
        command = [*near, sys.executable, "-m", "headwater.bench.packed_link", *arguments]
        with bench_process(command) as process:
            out, _ = process.communicate()
            if process.returncode:
                raise StoreError("the near host failed")
    return Rounds(json.loads(out.splitlines()[-1]))


# ---- on the near host -------------------------------------------------------------------------------------------
class _Filled(NamedTuple):
    """A pool that has the prompt, stored in one way."""

    pool: Pool
    chunks: list[ChunkRef]


def _space(pool: Pool, case: PushCase) -> Space:
    return pool.space(IDENTITY, case.spec, chunk_tokens=case.chunk_tokens)


def _write(pool: Pool, case: PushCase) -> list[ChunkRef]:
    space, shard, rng = _space(pool, case), whole_shard(case.spec), np.random.default_rng(5)
    chunks = space.keys(range(case.num_chunks * case.chunk_tokens)).refs(case.num_chunks)
    for chunk in chunks:
        tiles = [kv_tile(case.spec, case.chunk_tokens, rng) for _ in range(case.spec.num_tiles)]
        shape = shard.local_shape(case.spec, chunk.first_token, chunk.num_tokens)
        if not space.write([chunk], shard, [np.stack(tiles).reshape(shape)], deadline_s=_WAIT_S)[0].stored:
            raise StoreError("the prompt could not be stored")
    return chunks


def _filled(stack: contextlib.ExitStack, case: PushCase, packing: Packing) -> _Filled:
    pool = stack.enter_context(bench_pool(case, f"&packing={packing}"))
    filled = _Filled(pool, _write(pool, case))
    expected = _stored_bytes(case, PACKED if packing == Packing.ON else RAW)
    if pool.stats().store.stored_bytes != expected:
        raise StoreError("the prompt is not stored as it should be")
    return filled


def _fetch_turn(stack: contextlib.ExitStack, case: PushCase, lower: str, chunks: list[ChunkRef]) -> Timed:
    """From a lower tier into the first one, all of it. The tier is only read: nothing is copied to it meanwhile."""
    name = f"shm:///hwbench-{os.getpid()}-{secrets.token_hex(4)}?capacity={(case.num_bytes * 5 >> 20) + 32}MiB"
    stack.callback(lambda: destroy(parse_url(name)))
    pool = stack.enter_context(open_pool(f"{name},{lower}"))
    space = _space(pool, case)

    def work() -> None:
        fetch = space.fetch(chunks, deadline_s=_WAIT_S)
        if fetch is None:
            raise StoreError("there was nothing to fetch")
        fetch.wait(time.monotonic() + _WAIT_S)
        kept = fetch.num_kept
        fetch.release()
        if kept != len(chunks):
            raise StoreError(f"{kept} of {len(chunks)} chunks came")

    def timed() -> float:
        pool.first_tier.clear(None, None)
        return stopwatch(work)()

    return timed


def _push_turn(stack: contextlib.ExitStack, case: PushCase, far: FarSide, source: _Filled) -> Timed:
    """From this host's pool into the far one's."""
    there = stack.enter_context(bench_pool(case))
    address = stack.enter_context(bench_receiver(there.stats().store.url, far=far)).address
    assert far.secret_file is not None
    settings = LinkSettings(secret=read_secret(far.secret_file), io_s=_WAIT_S)
    sender = PeerSender(_space(source.pool, case), whole_shard(case.spec), server=1, settings=settings)
    stack.callback(sender.close)

    def work() -> None:
        transfer = secrets.token_hex(8)
        sender.push(transfer, address, source.chunks)
        if sender.flush(transfer, _WAIT_S) != case.num_chunks * case.chunk_tokens:
            raise StoreError("a push did not arrive")

    def timed() -> float:
        there.clear()
        return stopwatch(work)()

    return timed


@contextlib.contextmanager
def _redis(far: FarSide) -> Iterator[str]:
    """A server on the far host."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as directory:
        settings = ["--port", str(port), "--bind", far.host, "--save", "", "--appendonly", "no", "--dir", directory]
        command = [*far.command, "redis-server", *settings, "--protected-mode", "no"]
        with bench_process([*command, "--daemonize", "no"]):
            yield f"redis://{far.host}:{port}?deadline={_WAIT_S:g}&lookup=20"


def _turns(stack: contextlib.ExitStack, case: PushCase, far: FarSide) -> dict[str, Timed]:
    runs: dict[str, Timed] = {"link": bare_turn(stack, case, far)}
    redis = stack.enter_context(_redis(far))
    for name, packing in (("raw", Packing.OFF), ("packed", Packing.ON)):
        source = _filled(stack, case, packing)
        url = f"{source.pool.stats().store.url}"
        address = stack.enter_context(bench_receiver(url, far=far)).address
        peer = f"peer://{address}?secret_file={far.secret_file}&deadline={_WAIT_S:g}&lookup=20"
        runs[f"pull {name}"] = _fetch_turn(stack, case, peer, source.chunks)
        runs[f"push {name}"] = _push_turn(stack, case, far, source)
        tier = f"{redis}&prefix={name}&packing={packing}"
        with open_pool(tier) as pool:
            chunks = _write(pool, case)
        runs[f"redis {name}"] = _fetch_turn(stack, case, tier, chunks)
    return runs | {f"{way} again": runs[f"{way} raw"] for way in WAYS}


def main() -> None:
    """Measure between this host and the far one."""
    case, far = PushCase(**json.loads(sys.argv[1])), FarSide(**json.loads(sys.argv[3]))
    with contextlib.ExitStack() as stack:
        rounds = take_turns(_turns(stack, case, far), int(sys.argv[2]))
    print(json.dumps(dict(rounds.seconds)), flush=True)


if __name__ == "__main__":
    main()
