"""`headwater bench fleet`: many clients on a pool of three tiers, while bits are flipped in every one of them.

Shared memory that is too small for everybody, files that are larger, and a real Redis server for the rest, all made for
this run and removed after it. Every second process packs what it writes, so that raw and packed chunks lie side by side
in every tier. Every byte that is read is compared with what it must be.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headwater.bench.fleet_client import CHUNK_TOKENS, IDENTITY, SPEC
from headwater.bench.flips import Flipper
from headwater.bench.measure import Note, machine
from headwater.bench.servers import free_port, serving
from headwater.errors import InvalidArgumentError, StoreError
from headwater.pool import open_pool
from headwater.stores.embedded import destroy
from headwater.stores.tiers.store import TieredStore
from headwater.stores.url import parse_url

_START_S = 60.0


@dataclass(frozen=True)
class FleetBench:
    """How many clients, for how long, and how much is flipped."""

    clients: int = 32
    processes: int = 4
    seconds: float = 30.0
    flips: int = 1200
    prompts: int = 800
    shm_bytes: int = 32 << 20
    file_bytes: int = 40 << 20

    def __post_init__(self) -> None:
        if min(self.clients, self.processes, self.prompts) < 1 or self.seconds <= 0 or self.clients < self.processes:
            raise InvalidArgumentError("a fleet needs clients, processes, prompts and some time")


QUICK = FleetBench(clients=4, processes=2, seconds=2.0, flips=60, prompts=60)


def run(bench: FleetBench, note: Note = lambda text: None) -> dict[str, Any]:
    """Let the fleet run; plain data for JSON. Raises StoreError where there is no Redis server to use."""
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        raise StoreError("no redis-server on the PATH: the third tier of this benchmark is a real one")
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="headwater-fleet-") as directory, contextlib.ExitStack() as stack:
        settings = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", directory]
        stack.enter_context(serving([binary, *settings], port))
        shm = f"shm:///headwater-fleet-{secrets.token_hex(8)}?capacity={bench.shm_bytes}"
        files = f"file://{directory}/pool?capacity={bench.file_bytes}"
        redis = f"redis://127.0.0.1:{port}?lookup=2&deadline=5&piece=8KiB"
        stack.callback(lambda: destroy(parse_url(shm)))
        return _run(bench, ",".join((shm, files, redis)), note)


def _run(bench: FleetBench, url: str, note: Note) -> dict[str, Any]:
    with open_pool(url) as pool:
        space = pool.space(IDENTITY, SPEC, chunk_tokens=CHUNK_TOKENS)
        store = pool._store
        assert isinstance(store, TieredStore)
        flipper = Flipper(space, space.root(), store.by_name(), seed=1)
        note(f"{bench.clients} clients in {bench.processes} processes for {bench.seconds:g} s")
        with _clients(bench, url) as processes:
            start = time.monotonic()
            for process in processes:
                process.go()
            while time.monotonic() < start + bench.seconds or (flipper.flipped < bench.flips and flipper.progresses):
                if flipper.flipped < bench.flips:
                    flipper.flip_next()
                else:
                    time.sleep(0.01)
            outcomes = [process.outcome(bench.seconds + _START_S) for process in processes]
            seconds = time.monotonic() - start
        note("checking every stored byte")
        verified = pool.verify()
        return _report(bench, outcomes, flipper, seconds) | {"verified_clean": verified.clean}


class _Process:
    """One process of clients."""

    def __init__(self, url: str, seed: int, clients: int, bench: FleetBench) -> None:
        source = str(Path(__file__).resolve().parents[2])
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))}
        numbers = [str(n) for n in (seed, clients, bench.seconds, bench.prompts)]
        # Of the first tier: what it stores, and so what is copied further down as it is.
        own = url.replace(",", f"&packing={'on' if seed % 2 else 'off'},", 1)
        command = [sys.executable, "-m", "headwater.bench.fleet_client", own, *numbers]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env)

    def wait_ready(self) -> None:
        """Until it has the pool open."""
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != "ready":
            raise StoreError("a process of clients did not start")

    def go(self) -> None:
        """Let it begin."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def outcome(self, timeout_s: float) -> dict[str, Any]:
        """What its clients saw."""
        text, _ = self._process.communicate(timeout=timeout_s)
        if self._process.returncode:
            raise StoreError(f"a process of clients ended with {self._process.returncode}")
        report: dict[str, Any] = json.loads(text.splitlines()[-1])
        return report

    def end(self) -> None:
        """End it if it has not."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def _clients(bench: FleetBench, url: str) -> Iterator[list[_Process]]:
    share, rest = divmod(bench.clients, bench.processes)
    processes = [_Process(url, seed, share + (seed < rest), bench) for seed in range(bench.processes)]
    try:
        for process in processes:
            process.wait_ready()
        yield processes
    finally:
        for process in processes:
            process.end()


def _report(bench: FleetBench, outcomes: list[dict[str, Any]], flipper: Flipper, seconds: float) -> dict[str, Any]:
    clients = [client for outcome in outcomes for client in outcome["clients"]]
    statuses: dict[str, int] = {}
    for client in clients:
        for name, count in client["statuses"].items():
            statuses[name] = statuses.get(name, 0) + count
    injected, detected = sum(flipper.injected.values()), sum(flipper.detected.values())
    wrong = flipper.wrong_bytes + sum(client["wrong_bytes"] for client in clients)
    asked, matched = (sum(client[name] for client in clients) for name in ("asked_tokens", "matched_tokens"))
    tiers = [[outcome["tiers"][i] for outcome in outcomes] for i in range(len(outcomes[0]["tiers"]))]
    report: dict[str, Any] = {
        "bench": "fleet",
        "machine": machine(),
        "clients": bench.clients,
        "processes": bench.processes,
        "seconds": seconds,
        "ops": sum(client["ops"] for client in clients),
        "wrong_bytes": wrong,
        "compared_tiles": sum(client["read_tiles"] for client in clients),
        "injected": injected,
        "detected": detected,
        "injected_packed": flipper.packed,
        "flips_refused": flipper.refused,
        "injected_by_tier": flipper.injected,
        "detected_by_tier": flipper.detected,
        "hit_rate": matched / max(asked, 1),
        "statuses": statuses,
        "breaker_trips": sum(tier["breaker_trips"] for row in tiers for tier in row),
        "hits_by_tier": [sum(tier["hits"] for tier in row) for row in tiers],
        "fetched": sum(tier["fetched"] for row in tiers for tier in row),
    }
    for name in ("match", "read"):
        values = [value for client in clients for value in client[f"{name}_ms"]] or [0.0]
        report |= {f"p{p}_{name}_ms": float(np.percentile(values, p)) for p in (50, 99)}
    checks = {
        "wrong_bytes": (0, wrong == 0),
        "injected": (1000, injected >= 1000),
        "detected": (injected, detected == injected),
        "breaker_trips": (0, report["breaker_trips"] == 0),
    }
    report["bars"] = {
        name: {"limit": limit, "verdict": "met" if met else "missed"} for name, (limit, met) in checks.items()
    }
    return report
