"""A push into another process's pool, against the same bytes over bare sockets into that process's private memory.

Both sides are processes on this host, connected by loopback; both take turns, and a round ends when the other side has
said that everything is in its place. The bare sockets reserve nothing, note no checksums and find nothing again.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import Any

from headwater.bench import push_nixl
from headwater.bench.measure import Note, gbps, machine
from headwater.bench.push_case import PushCase
from headwater.bench.push_hosts import bench_hosts
from headwater.bench.push_layers import LayersCase, bench_layers
from headwater.bench.push_turns import measure, push_turn

_BYTES_A_ROUND, _MOST_TIMES = 128 << 20, 16
"""A case of few bytes is repeated more often: of nine rounds of a millisecond, a neighbour may disturb all."""


@dataclass(frozen=True)
class PeersBench:
    """What is measured, and how often."""

    cases: tuple[PushCase, ...] = (
        PushCase("4k", 16, 64, 25, 5),
        PushCase("128k", 256, 128, 25, 5),
        PushCase("1m", 256, 1024, 16, 2),
        PushCase("128k_2ranks", 256, 128, 25, 5, num_ranks=2),
        PushCase("128k_2lanes", 256, 128, 25, 5, num_lanes=2),
    )
    nixl: PushCase = PushCase("nixl", 256, 128, 25, 5, carrier="nixl")  # noqa: RUF009 (frozen)
    hosts: PushCase = PushCase("hosts", 256, 128, 25, 5)  # noqa: RUF009 (frozen)
    layers: LayersCase = LayersCase()  # noqa: RUF009 (frozen)
    rounds: int = 9
    seconds: float = 240.0
    """No case begins after this time."""


QUICK = PeersBench(
    cases=(PushCase("4k", 16, 64, 25, 5), PushCase("128k", 256, 128, 2, 2)),
    nixl=PushCase("nixl", 256, 128, 2, 2, carrier="nixl"),
    hosts=PushCase("hosts", 256, 128, 2, 2),
    layers=LayersCase(PushCase("layers", 64, 32, 16, 2), layer_s=0.002),
    rounds=2,
)


def run(bench: PeersBench, note: Note) -> dict[str, Any]:
    """The report: `push_ratio_NAME` is the push's rate over the bare sockets', each the best of its rounds."""
    report: dict[str, Any] = {"machine": machine()}
    began = time.monotonic()
    for case in bench.cases:
        if time.monotonic() - began > bench.seconds:
            note(f"no time left for {case.name}")
            report[f"push_ratio_{case.name}"] = None
            continue
        note(f"{case.num_tiles} tiles of {case.tile_bytes} bytes, {case.num_ranks} ranks")
        rounds = measure(case, bench.rounds * max(1, min(_MOST_TIMES, _BYTES_A_ROUND // case.num_bytes)))
        best = {name: min(seconds) for name, seconds in rounds.seconds.items()}
        report |= {
            f"push_ratio_{case.name}": best["bare"] / best["push"],
            f"push_noise_{case.name}": rounds.noise("bare", "again"),
            f"push_gbps_{case.name}": gbps(case.num_bytes, best["push"]),
            f"bare_gbps_{case.name}": gbps(case.num_bytes, best["bare"]),
            f"push_bytes_{case.name}": case.num_bytes,
        }
    is_late = time.monotonic() - began > bench.seconds
    if (reason := push_nixl.why_not(is_late)) is not None:
        note(f"no NIXL: {reason}")
        report |= dict.fromkeys(push_nixl.FIGURES) | {"nixl_reason": reason}
    else:
        with contextlib.ExitStack() as stack:
            work, pid = push_turn(stack, bench.nixl)
            report |= push_nixl.bench_nixl(bench.nixl, bench.rounds, work, pid, note)
    is_late = time.monotonic() - began > bench.seconds
    report |= bench_hosts(bench.hosts, 0 if is_late else bench.rounds, note)
    is_late = time.monotonic() - began > bench.seconds
    return report | bench_layers(bench.layers, 0 if is_late else bench.rounds, note)
