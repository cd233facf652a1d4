"""The measurements. Each function uses running engines and returns the body of one record: raw seconds by side.

Sides take turns, every second round backwards; `again` is the first side once more, which shows the noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headwater.bench.measure import Note, take_turns
from headwater.bench.vllm_engine import EngineProcess
from headwater.bench.vllm_gpu.engines import Engine, Engines
from headwater.bench.vllm_gpu.figures import AGAIN, BUS
from headwater.bench.vllm_gpu.plan import PLAIN, GpuPlan
from headwater.bench.vllm_gpu.prompts import Prompts
from headwater.bench.vllm_gpu.timeline import moments

Sides = Mapping[str, Engine]
"""Engines by the name of their side; the first is the one whose figure it is."""

Body = dict[str, Any]


@dataclass(frozen=True)
class Bench:
    """The shared tools of every measurement."""

    plan: GpuPlan
    engines: Engines
    bus: EngineProcess
    prompts: Prompts
    note: Note

    def copy(self, num_bytes: int) -> Callable[[], float]:
        """The bus alone, when nobody is at work."""

        def once() -> float:
            self.engines.quiet()
            return float(self.bus.ask("copy", num_bytes=num_bytes))

        return once


def measure_hits(bench: Bench, sides: Sides, tokens: int) -> Body:
    """First tokens of one prompt that every side has saved and vLLM has forgotten."""
    prompt = bench.prompts.whole(tokens)
    filled = {name: engine.fill(prompt, bench.engines.quiet) for name, engine in sides.items()}
    runs = {name: _hit(bench, engine, [prompt]) for name, engine in sides.items()}
    runs |= {AGAIN: runs[next(iter(sides))], BUS: bench.copy(tokens * bench.plan.token_bytes)}
    rounds = take_turns(runs, bench.plan.pairs)
    return {
        "seconds": rounds.seconds,
        "found": {name: engine.least_found for name, engine in sides.items()},
        "first_found": {name: one.num_found for name, one in filled.items()},
        "cold_s": {name: one.cold_s for name, one in filled.items()},
    }


def _hit(bench: Bench, engine: Engine, prompts: list[list[int]]) -> Callable[[], float]:
    engine.watch_hits()
    return lambda: engine.hit(prompts, bench.engines.quiet)


def measure_share(bench: Bench, sides: Sides) -> Body:
    """Of prompts that were computed once and saved, what the next request finds."""
    (engine,) = sides.values()
    hits = {}
    room = engine.pool.stats().store.data_bytes if engine.pool is not None else 0
    for tokens in bench.plan.share_tokens:
        if tokens * bench.plan.token_bytes > room:
            continue  # the pool cannot hold it, whatever anybody does
        filled = engine.fill(bench.prompts.whole(tokens), bench.engines.quiet)
        hits[str(tokens)] = {"found": filled.num_found, "later": filled.most_found, "whole": tokens}
    return {"hits": hits}


def measure_equal(bench: Bench, sides: Sides) -> Body:
    """Tokens after a hit in the pool and after a hit in vLLM's own cache: both compute one row of the prompt."""
    (engine,) = sides.values()
    plan, compared, equal, not_compared = bench.plan, 0, 0, 0
    for _ in range(plan.equal_prompts):
        prompt = bench.prompts.whole(plan.equal_tokens)
        filled = engine.fill(prompt, bench.engines.quiet)
        local = engine.ask([prompt], plan.equal_output)
        engine.reset()
        pool = engine.ask([prompt], plan.equal_output)
        if min(filled.most_found, local["local"], pool["external"]) < plan.equal_tokens:
            not_compared += plan.equal_output
            continue
        pairs = list(zip(local["tokens"][0], pool["tokens"][0], strict=True))
        compared += len(pairs)
        equal += sum(one == other for one, other in pairs)
    return {"compared": compared, "equal": equal, "not_compared": not_compared}


def measure_local(bench: Bench, sides: Sides, tokens: int) -> Body:
    """A prompt that nobody has seen, and at once the same again: cold, and a local hit while the first is saved."""
    cold: dict[str, list[float]] = {}
    runs: dict[str, Callable[[], float]] = {}
    names = list(sides)
    for name in [*names, AGAIN]:
        # The noise is that of the side that is divided by.
        engine = sides[names[-1] if name == AGAIN else name]
        cold[name] = []
        runs[name] = _local(bench, engine, tokens, cold[name])
    rounds = take_turns(runs, bench.plan.pairs if PLAIN in sides else bench.plan.aside_pairs)
    return {"cold": {name: seconds[1:] for name, seconds in cold.items()}, "local": rounds.seconds}


def _local(bench: Bench, engine: Engine, tokens: int, cold: list[float]) -> Callable[[], float]:
    def once() -> float:
        engine.reset()
        bench.engines.quiet()
        engine.nudge()
        answer = engine.command("after", prompt=bench.prompts.whole(tokens))
        cold.append(float(answer["cold"]))
        if answer["found"] < tokens:
            raise RuntimeError(f"{engine.side.name}: {answer['found']:.0f} of {tokens} tokens were found locally")
        return float(answer["local"])

    return once


def measure_throughput(bench: Bench, sides: Sides) -> Body:
    """Prompts that have nothing in common, all at once."""
    unique = bench.plan.unique

    def run(engine: Engine) -> Callable[[], float]:
        def once() -> float:
            engine.reset()
            bench.engines.quiet()
            engine.nudge()
            prompts = [bench.prompts.fresh(unique.tokens) for _ in range(unique.count)]
            return float(engine.ask(prompts, unique.output)["seconds"])

        return once

    runs = {name: run(engine) for name, engine in sides.items()}
    runs[AGAIN] = runs[list(sides)[-1]]
    return {"seconds": take_turns(runs, bench.plan.throughput_pairs).seconds}


def measure_reuse(bench: Bench, sides: Sides) -> Body:
    """Requests that mostly share a prefix, some at a time, without vLLM's own prefix cache. The prefix is there."""
    reused, found = bench.plan.reused, dict.fromkeys(sides, float("inf"))

    def run(name: str, engine: Engine) -> Callable[[], float]:
        def once() -> float:
            prefix, prompts = bench.prompts.sharing(reused.count, reused.share, reused.prefix, reused.suffix)
            ahead = [*prefix, prompts[0][0]]
            if engine.side.name == PLAIN:
                engine.nudge()
            else:
                engine.fill(ahead, bench.engines.quiet)
            bench.engines.quiet()
            answer = engine.command("stream", prompts=prompts, at_once=reused.at_once, max_tokens=reused.output)
            found[name] = min(found[name], answer["external"])
            return float(answer["seconds"])

        return once

    runs = {name: run(name, engine) for name, engine in sides.items()}
    runs[AGAIN] = runs[next(iter(sides))]
    rounds = take_turns(runs, bench.plan.reuse_pairs)
    num_tokens = reused.count * (reused.prefix + reused.suffix + reused.output)
    return {"seconds": rounds.seconds, "num_tokens": num_tokens, "found": found}


def measure_burst(bench: Bench, sides: Sides, tokens: int) -> Body:
    """Many prompts at once, all of them hits in the pool: so many tokens together."""
    plan = bench.plan
    prompts = [bench.prompts.whole(plan.burst_tokens) for _ in range(plan.burst_prompts)]
    for engine in sides.values():
        for prompt in prompts:
            engine.fill(prompt, bench.engines.quiet)
    bus_bytes = plan.burst_tokens * plan.token_bytes
    runs = {name: _hit(bench, engine, prompts) for name, engine in sides.items()}
    runs |= {AGAIN: runs[next(iter(sides))], BUS: bench.copy(bus_bytes)}
    rounds = take_turns(runs, plan.pairs)
    return {
        "seconds": rounds.seconds,
        "bytes": tokens * plan.token_bytes,
        "bus_bytes": bus_bytes,
        "found": {name: engine.least_found for name, engine in sides.items()},
    }


def measure_profile(bench: Bench, sides: Sides, tokens: int) -> Body:
    """Where the milliseconds of one pool hit go: the middle one of some."""
    (engine,) = sides.values()
    prompt = bench.prompts.whole(tokens)
    engine.fill(prompt, bench.engines.quiet)
    _hit(bench, engine, [prompt])()
    answers = []
    for _ in range(max(3, bench.plan.aside_pairs)):
        engine.reset()
        bench.engines.quiet()
        engine.nudge()
        answers.append(engine.command("profile", prompt=prompt))
    local = min(engine.ask([prompt])["seconds"] for _ in answers)
    answer = sorted(answers, key=lambda one: float(one["seconds"]))[len(answers) // 2]
    timeline = moments(answer["events"], answer["load_seconds"])
    return {
        "timeline": [[moment.what, moment.ms] for moment in timeline],
        "seconds": answer["seconds"],
        "load_ms": 1000 * answer["load_seconds"],
        "local_ms": 1000 * local,
        "found": answer["external"],
        "bus_ms": 1000 * bench.copy(tokens * bench.plan.token_bytes)(),
    }
