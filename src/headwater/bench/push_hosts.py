"""A push between two hosts made of network namespaces, against bare sockets between the same two.

python -m headwater.bench.push_hosts CASE ROUNDS FAR     on the near host; prints the seconds of every round

The namespaces, and the cable between them, are made here and removed afterwards: it needs root and `ip`.
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
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headwater.bench.measure import Note, Rounds, gbps
from headwater.bench.push_case import FarSide, PushCase, bench_process
from headwater.bench.push_turns import measure
from headwater.errors import StoreError

FIGURES = ("push_ratio_hosts", "push_noise_hosts", "push_gbps_hosts", "bare_gbps_hosts")


def bench_hosts(case: PushCase, rounds: int, note: Note) -> dict[str, Any]:
    """The figures, or null and why; no rounds: there is no time left."""
    with contextlib.ExitStack() as stack:
        try:
            if not rounds:
                raise StoreError("there was no time left")
            near, far = stack.enter_context(two_hosts())
        except StoreError as error:
            note(f"no hosts: {error}")
            return dict.fromkeys(FIGURES) | {"hosts_reason": str(error)}
        note(f"{case.num_tiles} tiles of {case.tile_bytes} bytes between two network namespaces")
        arguments = [json.dumps(asdict(case)), str(rounds), json.dumps(asdict(far))]
        command = [*near, sys.executable, "-m", "headwater.bench.push_hosts", *arguments]
        process = stack.enter_context(bench_process(command))
        out, _ = process.communicate()
        if process.returncode:
            raise StoreError("the push between two hosts failed")
    seconds = Rounds(json.loads(out.splitlines()[-1]))
    best = {name: min(every) for name, every in seconds.seconds.items()}
    return {
        "push_ratio_hosts": best["bare"] / best["push"],
        "push_noise_hosts": seconds.noise("bare", "again"),
        "push_gbps_hosts": gbps(case.num_bytes, best["push"]),
        "bare_gbps_hosts": gbps(case.num_bytes, best["bare"]),
        "hosts_reason": None,
    }


@contextlib.contextmanager
def two_hosts(megabits: int | None = None) -> Iterator[tuple[list[str], FarSide]]:
    """What runs a command on the near host, and the far one; `megabits`: what their cable takes a second, in either
    direction. Raises StoreError where they cannot be made."""
    if os.geteuid() or shutil.which("ip") is None or (megabits and shutil.which("tc") is None):
        raise StoreError("network namespaces need root and `ip`, a limited link also `tc`")
    name, net = f"hwb{secrets.token_hex(3)}", f"10.78.{os.getpid() % 250}"
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as directory:
        secret = Path(directory, "secret")
        secret.write_text(secrets.token_hex(32))
        try:
            _ip("netns", "add", f"{name}n")
            _ip("netns", "add", f"{name}f")
            _ip("-n", f"{name}n", "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", f"{name}f")
            for host, number in ((f"{name}n", 1), (f"{name}f", 2)):
                _ip("-n", host, "addr", "add", f"{net}.{number}/24", "dev", "eth0")
                for device in ("lo", "eth0"):
                    _ip("-n", host, "link", "set", device, "up")
                if megabits:
                    _limit(host, megabits)
            run = ("ip", "netns", "exec")
            yield [*run, f"{name}n"], FarSide(f"{net}.2", (*run, f"{name}f"), str(secret))
        finally:
            for host in (f"{name}n", f"{name}f"):  # the cable goes with them
                subprocess.run(["ip", "netns", "del", host], check=False, capture_output=True)


def _limit(host: str, megabits: int) -> None:
    """Squeeze what a host sends. The bucket holds five milliseconds of it, so that a rate is reached at all."""
    burst = max(256 << 10, megabits * 625)
    shape = ["tbf", "rate", f"{megabits}mbit", "burst", str(burst), "latency", "50ms"]
    _do("tc", "-n", host, "qdisc", "add", "dev", "eth0", "root", *shape)


def _ip(*words: str) -> None:
    _do("ip", *words)


def _do(*words: str) -> None:
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        raise StoreError(f"`{' '.join(words[:4])}` failed: {done.stderr.strip()}")


def main() -> None:
    """Measure from here to the far host."""
    case, far = PushCase(**json.loads(sys.argv[1])), FarSide(**json.loads(sys.argv[3]))
    print(json.dumps(dict(measure(case, int(sys.argv[2]), far).seconds)), flush=True)


if __name__ == "__main__":
    main()
