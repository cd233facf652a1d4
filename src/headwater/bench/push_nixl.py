"""A push over NIXL, against a bare NIXL write of the same regions between shared memory of two processes.

python -m headwater.bench.push_nixl BYTES     the other process: says where to write, and helps writes on between
                                              `begin` and whatever is said next
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import sys
import time
from typing import Any

import numpy as np

from headwater.bench.measure import Note, Timed, gbps, stopwatch, take_turns
from headwater.bench.push_case import START_S, PushCase, bench_process
from headwater.errors import StoreError
from headwater.peers.carriers import nixl
from headwater.peers.exposing import EAGER_TRIES

FIGURES = ("nixl_ratio", "nixl_noise", "nixl_gbps", "bare_nixl_gbps", "nixl_idle_cores")
_IDLE_S = 2.0


def why_not(is_late: bool) -> str | None:
    """Why the figures are null."""
    return "there was no time left" if is_late else nixl.why_not()


def bench_nixl(case: PushCase, rounds: int, push: Timed, pid: int, note: Note) -> dict[str, Any]:
    """The figures. `push`: one round of a push of this case; `pid`: the receiver's process."""
    note(f"{case.num_bytes >> 20} MiB over NIXL")
    with contextlib.ExitStack() as stack:
        bare = _bare(stack, case)
        found = take_turns({"bare": bare, "push": push, "again": bare}, rounds)
    best = {name: min(seconds) for name, seconds in found.seconds.items()}
    return {
        "nixl_ratio": best["bare"] / best["push"],
        "nixl_noise": found.noise("bare", "again"),
        "nixl_gbps": gbps(case.num_bytes, best["push"]),
        "bare_nixl_gbps": gbps(case.num_bytes, best["bare"]),
        "nixl_idle_cores": _idle_cores(pid),
        "nixl_reason": None,
    }


def _idle_cores(pid: int) -> float:
    """What both processes take with a session that is open, and nothing to do."""
    began, before = time.monotonic(), _cpu_s(pid) + time.process_time()
    time.sleep(_IDLE_S)
    return (_cpu_s(pid) + time.process_time() - before) / (time.monotonic() - began)


def _cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _bare(stack: contextlib.ExitStack, case: PushCase) -> Timed:
    """One region a chunk, as a push has them whose rank has all heads."""
    command = [sys.executable, "-m", "headwater.bench.push_nixl", str(case.num_bytes)]
    process = stack.enter_context(bench_process(command))
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout
    told = json.loads(stdout.readline())
    agent, source = nixl.Agent(), _memory(case.num_bytes, 5)
    stack.callback(agent.close)
    agent.register(source)
    peer = agent.meet(bytes.fromhex(told["metadata"]))
    size = case.num_bytes // case.num_chunks

    def regions(base: int) -> nixl.Regions:
        firsts = base + np.arange(case.num_chunks, dtype=np.uint64) * np.uint64(size)
        return np.stack([firsts, np.full_like(firsts, size), np.zeros_like(firsts)], axis=1)

    local, remote = regions(source.ctypes.data), regions(told["address"])

    def say(line: str) -> None:
        stdin.write(line + "\n")
        stdin.flush()
        if stdout.readline().strip() != line:
            raise StoreError("the bare receiver is gone")

    def work() -> None:
        write, end = agent.write(peer, local, remote), time.monotonic() + START_S
        while not write.is_done():
            if time.monotonic() > end:
                raise StoreError("a bare write does not end")

    def timed() -> float:
        say("begin")
        seconds = stopwatch(work)()
        say("end")
        return seconds

    return timed


def _memory(size: int, value: int) -> nixl.Segment:
    """Shared memory, as a pool's segments are: private memory has larger pages, and is quicker to write to."""
    fd = os.memfd_create("headwater-bench")
    try:
        os.ftruncate(fd, size)
        memory = np.frombuffer(mmap.mmap(fd, size), np.uint8)
    finally:
        os.close(fd)
    memory[:] = value
    return memory


def main() -> None:
    """Be written to until stdin ends."""
    agent, memory = nixl.Agent(), _memory(int(sys.argv[1]), 0)
    agent.register(memory)
    print(json.dumps({"metadata": agent.metadata().hex(), "address": memory.ctypes.data}), flush=True)
    for line in sys.stdin:
        print(line.strip(), flush=True)
        tries = 0
        # As a receiver helps: at first without a pause, so that neither side has a core more than the other.
        while (
            line.strip() == "begin" and not select.select([sys.stdin], [], [], 0 if tries < EAGER_TRIES else 0.001)[0]
        ):
            agent.progress()
            tries += 1
    agent.close()


if __name__ == "__main__":
    main()
