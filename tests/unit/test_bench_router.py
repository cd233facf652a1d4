"""`headwater bench router`, small; and acceptance test 17 of prefill/decode disaggregation on its simulated servers."""

from __future__ import annotations

import pytest

pytest.importorskip("msgspec")
pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")

from headwater.bench import router
from headwater.bench.router_sim import SimServers, Simulation, Workload, by_cost, by_first_block, in_turns

BUSY = Workload(num_requests=3000)
TIGHT = SimServers(cache_blocks=500, prefill_tokens_per_s=7000)


def share(work: Workload, choose: object, delay_s: float | None) -> float:
    return Simulation(work, TIGHT, choose, delay_s).run().cached_share  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [1, 2])
def test_late_events_find_nearly_what_an_index_without_delay_finds(seed: int) -> None:
    work = Workload(num_requests=3000, seed=seed)
    ideal = share(work, by_cost, 0.0)
    in_turn = share(work, in_turns, None)
    for delay_s in (0.1, 1.0, None):
        found = share(work, by_cost, delay_s)
        assert found >= 0.95 * ideal
        assert found > 1.05 * in_turn


@pytest.mark.parametrize("alike", [False, True])
def test_no_server_gets_much_more_than_the_others(alike: bool) -> None:
    work = Workload(num_requests=3000, begins_alike=alike)
    outcome = Simulation(work, TIGHT, by_cost, 0.1).run()
    assert outcome.busiest_over_mean <= 1.3
    assert outcome.cached_share >= Simulation(work, TIGHT, in_turns, None).run().cached_share


def test_the_trap_is_one() -> None:
    """All prompts begin alike, and the first block names the server: the simulation shows what must not happen."""
    work = Workload(num_requests=500, begins_alike=True)
    assert Simulation(work, TIGHT, by_first_block, None).run().busiest_over_mean == 4.0


def test_a_decision_costs_no_more_than_the_hashing_once_more() -> None:
    found = [router.measure_decision(rounds=20)["decision_over_hash"] for _ in range(3)]
    assert min(found) <= 2.0


def test_the_report_is_complete_and_judges_nothing_when_quick() -> None:
    report = router.run(router.QUICK)
    assert {bar.figure for bar in router.BARS} == set(report["bars"])
    assert all(bar["verdict"].startswith("not judged") for bar in report["bars"].values())
    for name in ("cached_share", "round_robin_cached_share", "busiest_over_mean", "decision_over_hash"):
        assert report[name] > 0
