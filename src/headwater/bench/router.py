"""`headwater bench router`: how much of its prompts a fleet need not compute, by how servers are chosen.

Four simulated servers, then two real ones; and what a decision costs beside the hashing that it needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from headwater.bench.measure import Note, machine, stopwatch, take_turns
from headwater.bench.router_real import RealBench, measure_real
from headwater.bench.router_sim import NO_CALL, SimServers, Workload, compare
from headwater.bench.store import Bar
from headwater.proxy.choice import Router, ServerCandidate
from headwater.proxy.keys import PromptKeys, TokenScheme

DECISION_TOKENS = 32_768
DECISION_BLOCKS = 200_000
NUM_PROMPTS = 32


@dataclass(frozen=True, kw_only=True)
class RouterBench:
    """What to run."""

    work: Workload = field(default_factory=Workload)
    servers: SimServers = field(default_factory=SimServers)
    rounds: int = 40
    real: RealBench | None = field(default_factory=RealBench)
    is_quick: bool = False


QUICK = RouterBench(work=Workload(num_requests=1500), rounds=5, real=None, is_quick=True)
"""Everything once and small."""

BARS = (
    Bar("cached_over_ideal", True, 0.95, None),
    Bar("cached_over_round_robin", True, 1.0, None),
    Bar("history_over_round_robin", True, 1.0, None),
    Bar("alike_cached_over_round_robin", True, 1.0, None),
    Bar("busiest_over_mean", False, 1.3, None),
    Bar("decision_over_hash", False, 2.0, None),
    Bar("real_cached_over_round_robin", True, 1.0, None),
)


def run(bench: RouterBench, note: Note = lambda text: None) -> dict[str, Any]:
    """Measure everything; plain data for JSON. Minutes at full size."""
    report: dict[str, Any] = {"bench": "router", "machine": machine(), "num_requests": bench.work.num_requests}
    chats = compare(bench.work, bench.servers, note)
    alike = compare(replace(bench.work, begins_alike=True), bench.servers, note)
    report |= {"simulated": chats, "simulated_alike": alike}
    report |= {
        "cached_share": chats["events"]["cached_share"],
        "ideal_cached_share": chats["ideal"]["cached_share"],
        "history_cached_share": chats["history"]["cached_share"],
        "round_robin_cached_share": chats["round_robin"]["cached_share"],
        "cached_over_ideal": _ratio(chats, "events", "ideal"),
        "cached_over_round_robin": _ratio(chats, "events", "round_robin"),
        "history_over_round_robin": _ratio(chats, "history", "round_robin"),
        "alike_cached_over_round_robin": _ratio(alike, "events", "round_robin"),
        "busiest_over_mean": max(
            found[way]["busiest_over_mean"] for found in (chats, alike) for way in ("events", "history")
        ),
        "first_block_busiest_over_mean": alike["first_block"]["busiest_over_mean"],
    }
    note("timing decisions")
    report |= measure_decision(bench.rounds)
    report |= measure_real(bench.real, note)
    report["bars"] = {bar.figure: {"limit": bar.limit, "verdict": _verdict(bar, report, bench)} for bar in BARS}
    return report


def measure_decision(rounds: int) -> dict[str, Any]:
    """Choosing among four servers, hashing included, against the hashing alone; prompts that one of them has."""
    router = Router()
    scheme = TokenScheme(256)
    servers = [ServerCandidate(f"server {number}", router, scheme=scheme) for number in range(4)]
    for server in servers:
        server.event_bits = router.bits.take()
    dice = np.random.default_rng(5)
    prompts = [dice.integers(1, 100_000, DECISION_TOKENS, np.uint32).tolist() for _ in range(NUM_PROMPTS)]
    for number in range(DECISION_BLOCKS):
        router.table.add(number.to_bytes(32, "big"), servers[number % 4].event_bits)
    for number, tokens in enumerate(prompts):
        for key in PromptKeys(NO_CALL, tokens).of(scheme).keys:
            router.table.add(key, servers[number % 4].event_bits | servers[0].event_bits)
    turn = iter(range(1 << 62))

    def next_prompt() -> PromptKeys:
        return PromptKeys(NO_CALL, prompts[next(turn) % NUM_PROMPTS])

    runs = take_turns(
        {
            "hash": stopwatch(lambda: next_prompt().of(scheme)),
            "decide": stopwatch(lambda: router.choose(next_prompt(), servers)),
            "hash again": stopwatch(lambda: next_prompt().of(scheme)),
        },
        rounds,
    )
    return {
        "decision_tokens": DECISION_TOKENS,
        "hash_ms": 1e3 * runs.time("hash"),
        "decision_ms": 1e3 * runs.time("decide"),
        "decision_over_hash": runs.ratio("decide", "hash"),
        "decision_noise": runs.noise("hash", "hash again"),
    }


def _ratio(found: Mapping[str, Mapping[str, float]], way: str, other: str) -> float:
    return found[way]["cached_share"] / found[other]["cached_share"]


def _verdict(bar: Bar, report: Mapping[str, Any], bench: RouterBench) -> str:
    if report[bar.figure] is None:
        return f"not judged: {report.get('real_reason') or 'not measured'}"
    return "not judged: too small a run" if bench.is_quick else bar.judge(report)
