"""One engine as `headwater bench ttft` sees it: a question and the time to its first token, or many questions at once.

An engine forgets its own prefix cache before every question, so that what is found is found in the pool.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from headwater.bench.measure import Rounds
from headwater.engine.engine import Engine
from headwater.engine.params import SamplingParams
from headwater.errors import EngineError

DRAIN_S = 120.0


class Answer(NamedTuple):
    """What became of one question."""

    first_token_s: float
    step_s: float
    """Of each further token; 0 where there was only one."""
    num_cached: int
    tokens: list[int]


class Side:
    """An engine that answers one question at a time."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def ask(self, prompt: Sequence[int], num_outputs: int, *, cached: range | None = None) -> Answer:
        """Answer greedily. Raises EngineError where not as many tokens were cached as expected."""
        engine, tokens, times, num_cached = self.engine, [], [], 0
        engine.reset_prefix_cache()
        begin = time.perf_counter()
        engine.add("question", prompt, _params(num_outputs))
        while engine.has_work:
            for output in engine.step():
                times.append(time.perf_counter())
                tokens += output.token_ids
                num_cached = output.num_cached_tokens
        if cached is not None and num_cached not in cached:
            raise EngineError(f"{num_cached} tokens were cached, and {cached.start} to {cached.stop - 1} expected")
        step_s = (times[-1] - times[0]) / max(1, len(times) - 1)
        return Answer(times[0] - begin, step_s, num_cached, tokens)

    def serve(self, prompts: Sequence[Sequence[int]], num_outputs: int) -> float:
        """Seconds until all have been answered, asked at once. Raises EngineError if any of it was known before."""
        engine = self.engine
        engine.reset_prefix_cache()
        begin = time.perf_counter()
        for number, prompt in enumerate(prompts):
            engine.add(str(number), prompt, _params(num_outputs))
        num_cached = 0
        while engine.has_work:
            num_cached += sum(output.num_cached_tokens for output in engine.step())
        seconds = time.perf_counter() - begin
        if num_cached:
            raise EngineError("prompts that nobody has seen were found in a cache")
        return seconds

    def drain(self) -> float:
        """Seconds until what was saved is in the pool. Raises EngineError if that takes minutes."""
        begin = time.perf_counter()
        if not self.engine.drain_saves(DRAIN_S):
            raise EngineError(f"saving took longer than {DRAIN_S:.0f} s")
        return time.perf_counter() - begin


def _params(num_outputs: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_outputs, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True)
class Unique:
    """Prompts that have nothing in common, all at once: what a pool costs those who have no use for it."""

    num_prompts: int
    prompt_tokens: int
    output_tokens: int
    pairs: int = 9
    warm_rounds: int = 1
    """That do not count; enough of them fill the pool, so that saving also means evicting, as it does for good."""


def measure_no_reuse(
    unique: Unique, off: Side, on: Side, make_prompt: Callable[[int], list[int]], prefix: str, deadline: float
) -> dict[str, Any]:
    """The part of the throughput that saving takes, and the same with the time until all is in the pool.

    An engine without the pool takes turns with one that has it, and with itself.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ("off", "on", "again", "drained")}
    before = on.engine.stats().pool
    for number in range(-unique.warm_rounds, unique.pairs):
        if number == 0:
            before = on.engine.stats().pool
        prompts = [make_prompt(unique.prompt_tokens) for _ in range(unique.num_prompts)]
        order = ("off", "on", "again")
        for name in order if number % 2 else reversed(order):
            side = on if name == "on" else off
            took = side.serve(prompts, unique.output_tokens)
            drain_s = side.drain()
            if number >= 0:
                seconds[name].append(took)
                if name == "on":
                    seconds["drained"].append(took + drain_s)
        if number >= 0 and time.perf_counter() > deadline:
            break
    rounds, after = Rounds(seconds), on.engine.stats().pool
    return {
        f"{prefix}_no_reuse_cost": 1 - rounds.ratio("off", "on"),
        f"{prefix}_no_reuse_noise": rounds.noise("again", "off"),
        f"{prefix}_no_reuse_cost_drained": 1 - rounds.ratio("off", "drained"),
        f"{prefix}_no_reuse_s": rounds.time("off"),
        f"{prefix}_no_reuse_pairs": len(seconds["off"]),
        f"{prefix}_no_reuse_saved_bytes": after.saved_bytes - before.saved_bytes,
        f"{prefix}_no_reuse_dropped_chunks": after.num_dropped - before.num_dropped,
    }


def spread(values: Sequence[float]) -> float:
    """A against A: the odd repetitions against the even ones."""
    return Rounds({"odd": values[::2], "even": values[1::2] or values[::2]}).noise("odd", "even")


def random_prompt(rng: np.random.Generator, vocab_size: int, num_tokens: int) -> list[int]:
    """Tokens that nobody has seen; those below 100 are control tokens in most vocabularies."""
    return [int(token) for token in rng.integers(min(100, vocab_size - 1), vocab_size, num_tokens)]
