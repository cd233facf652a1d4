"""Which engines live together, and what is measured with them, in the order of a run. Plain data.

At most two engines live at a time, and one that the next stage needs, too, stays.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from headwater.bench.vllm_gpu import measures
from headwater.bench.vllm_gpu.measures import Bench, Body, Sides
from headwater.bench.vllm_gpu.plan import (
    HEADWATER,
    LAYERWISE,
    LMCACHE,
    LMCACHE_V3,
    OFFLOADING,
    PACKED,
    PLAIN,
    UNPACKED,
    GpuPlan,
)
from headwater.bench.vllm_gpu.records import Record
from headwater.bench.vllm_gpu.sides import (
    BASE,
    DEFAULT_CAPACITY,
    LARGE_STEPS,
    NO_PREFIX_CACHE,
    PROFILED,
    TIERS,
)
from headwater.bench.vllm_gpu.tiers import measure_tiers

PROFILE_PART = "profile"


@dataclass(frozen=True)
class Measure:
    """One record to be made."""

    name: str
    part: str
    work: Callable[..., Body]
    tokens: int | None = None
    alone: str | None = None
    """The label of the one side it is made with; None for all of the stage."""
    seconds: float = 30.0
    """About how long it takes at full size."""

    def can_run(self, names: Collection[str]) -> bool:
        """Whether these sides are enough."""
        return self.alone is None or self.alone.partition("@")[0] in names

    def run(self, bench: Bench, sides: Sides) -> Body:
        """Measure it."""
        name = None if self.alone is None else self.alone.partition("@")[0]
        given = sides if name is None else {name: sides[name]}
        return self.work(bench, given) if self.tokens is None else self.work(bench, given, self.tokens)

    def record(self, mode: str, stage: str, sides: Iterable[str]) -> Record:
        """The key fields of its record, made with these sides."""
        made: dict[str, Any] = {"mode": mode, "stage": stage, "measure": self.name}
        made |= {"tokens": self.tokens, "side": self.alone}
        made["sides"] = sorted(sides if self.alone is None else [self.alone.partition("@")[0]])
        return made


@dataclass(frozen=True)
class Stage:
    """Engines that live together. Without the first one nothing is measured."""

    name: str
    sides: tuple[tuple[str, str], ...]
    """(side, variant)."""
    measures: tuple[Measure, ...]
    needs_all: bool = True
    """Whether nothing is worth measuring where one of the others is absent."""

    def can_run(self, names: Collection[str]) -> bool:
        """Whether these sides are enough."""
        wanted = [name for name, _ in self.sides]
        return all(name in names for name in (wanted if self.needs_all else wanted[:1]))


def stages(plan: GpuPlan) -> Iterator[Stage]:
    """All stages of a plan that have something to measure."""
    for stage in _all_stages(plan):
        chosen = tuple(side for side in stage.sides if side[0] in plan.sides)
        wanted = tuple(one for one in stage.measures if one.part in plan.parts or one.part == PROFILE_PART)
        if wanted and stage.can_run(plan.sides):
            yield replace(stage, sides=chosen, measures=wanted)


def _all_stages(plan: GpuPlan) -> Iterator[Stage]:
    ours = (HEADWATER, BASE)

    def by_length(name: str, part: str, work: Callable[..., Body], a_second: float) -> tuple[Measure, ...]:
        return tuple(Measure(name, part, work, tokens, seconds=15 + tokens / a_second) for tokens in plan.hit_tokens)

    hits = by_length("hits", "hits", measures.measure_hits, 2000)
    local = by_length("local", "local", measures.measure_local, 600)
    others = by_length("local", "others", measures.measure_local, 1500)
    burst_tokens = plan.burst_prompts * plan.burst_tokens

    def share(label: str) -> Measure:
        return Measure("share", "hits", measures.measure_share, alone=label, seconds=15)

    def equal(label: str) -> Measure:
        return Measure("equal", "hits", measures.measure_equal, alone=label, seconds=25)

    throughput = Measure("throughput", "throughput", measures.measure_throughput, seconds=120)
    yield Stage(PLAIN, (ours, (PLAIN, BASE)), (*local, throughput))
    yield Stage(OFFLOADING, (ours, (OFFLOADING, BASE)), (*hits, *others))
    packed = (PACKED, BASE)
    yield Stage(PACKED, (packed, (UNPACKED, BASE)), (hits[-1], equal(PACKED)))  # of the longest prompt
    burst = Measure("burst", "burst", measures.measure_burst, burst_tokens, seconds=50)
    beside = (*hits, share(HEADWATER), equal(HEADWATER), equal(LMCACHE), burst, *others)
    yield Stage(LMCACHE, (ours, (LMCACHE, BASE)), beside, False)
    yield Stage(LMCACHE_V3, (ours, (LMCACHE_V3, BASE)), (*hits, equal(LMCACHE_V3)))
    layerwise = (LAYERWISE, BASE)
    yield Stage(LAYERWISE, (layerwise, (LMCACHE, BASE)), (*hits, equal(LAYERWISE), share(LAYERWISE), *others), False)
    large, small = f"{HEADWATER}@{LARGE_STEPS}", f"{HEADWATER}@{DEFAULT_CAPACITY}"
    yield Stage(LARGE_STEPS, ((HEADWATER, LARGE_STEPS),), (share(large),))
    yield Stage(DEFAULT_CAPACITY, ((HEADWATER, DEFAULT_CAPACITY),), (share(small),))
    reuse = Measure("reuse", "reuse", measures.measure_reuse, seconds=180)
    without = (HEADWATER, NO_PREFIX_CACHE)
    yield Stage(f"reuse_{PLAIN}", (without, (PLAIN, NO_PREFIX_CACHE)), (reuse,))
    yield Stage(f"reuse_{LMCACHE}", (without, (LMCACHE, NO_PREFIX_CACHE)), (reuse,))
    tiers = Measure("tiers", "tiers", measure_tiers, plan.tier_tokens, seconds=40)
    yield Stage(TIERS, ((HEADWATER, TIERS),), (tiers,))
    if plan.profile:
        for side in (HEADWATER, LAYERWISE):
            label = f"{side}@{PROFILED}"
            work = tuple(
                Measure(PROFILE_PART, PROFILE_PART, measures.measure_profile, tokens, alone=label, seconds=10)
                for tokens in plan.hit_tokens
            )
            yield Stage(f"{PROFILE_PART}_{side}", ((side, PROFILED),), work)
