"""What makes two vLLM engines on one machine comparable: the same cores for both, and nobody else at work.

Left alone, vLLM's CPU backend keeps a core free of its threads, and another one where there is a connector, unless so
few would be left that it then takes all: on two cores a plain engine computes on one of them, and an engine with any
connector on both. And an engine that has answered spins for a second, waiting for the next request, on a core that
the other one computes on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from headwater.bench.vllm_engine import EngineProcess
from headwater.errors import EngineError

LOOK_S = 0.1
NUM_LOOKS = 3
IDLE_SHARE = 0.2
"""Of one core. An idle engine's own threads tick now and then: some hundredths."""
QUIET_S = 60.0


def same_cores() -> dict[str, str]:
    """Variables that let every engine compute on all cores that this process may use, whatever its connector."""
    return {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))))}


def wait_until_quiet(
    engines: Sequence[EngineProcess], limit_s: float | None = None, num_looks: int = NUM_LOOKS
) -> None:
    """Return when none of these engines computes, saves or spins any more: a second or two after the last request.

    Raises EngineError where that does not come.
    """
    limit_s = QUIET_S if limit_s is None else limit_s
    deadline, num_quiet, before = time.monotonic() + limit_s, 0, _cpu_seconds(engines)
    while num_quiet < num_looks:
        if time.monotonic() > deadline:
            raise EngineError(f"the engines did not come to rest within {limit_s:g} s")
        time.sleep(LOOK_S)
        now = _cpu_seconds(engines)
        num_quiet = num_quiet + 1 if now - before <= IDLE_SHARE * LOOK_S + 1e-6 else 0
        before = now


def _cpu_seconds(engines: Sequence[EngineProcess]) -> float:
    """Processor time of all processes of these engines. Each engine is a session of its own."""
    sessions, ticks = {running.pid for running in engines}, 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()  # a name may hold spaces
        except OSError:
            continue  # it has just ended
        if int(fields[3]) in sessions:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
