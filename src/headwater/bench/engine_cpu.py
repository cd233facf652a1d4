"""The CPU part of `headwater bench engine`: many requests at once, and one long prompt, against `transformers`.

The peers run on the same weights in the same process, in turns. Which of them is the best is found in one round; only
that one then takes turns with the engine, because a round of all would take many minutes.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headwater.bench.engine_peers import (
    EnginePeerError,
    Job,
    StaticBatches,
    continuous_batches,
    forward_prompt,
    load_transformers,
)
from headwater.bench.measure import Note, Rounds
from headwater.engine.config import EngineConfig
from headwater.engine.engine import Engine
from headwater.engine.params import SamplingParams
from headwater.errors import EngineError
from headwater.models.checkpoint import Checkpoint

FIRST_TOKEN = 100
"""Token ids below are control tokens in most vocabularies."""
Serve = Callable[[Sequence[Job]], list[list[int]] | None]
"""A side of the comparison: each job's tokens."""
PEER_FIGURES = ("best", "seconds", "static_tokens_per_s", "continuous_tokens_per_s", "continuous_reason")
SLOWEST_PEER = 2.0
"""Continuous batching that takes this many times as long as the best static batches is not waited for."""


@dataclass(frozen=True)
class CpuBench:
    """What to serve. The lengths are drawn evenly, from a fixed seed."""

    num_requests: int = 24
    prompt_tokens: tuple[int, int] = (64, 1024)
    output_tokens: tuple[int, int] = (16, 192)
    batch_sizes: tuple[int, ...] = (4, 8, 24)
    prefill_tokens: int = 4096
    tput_pairs: int = 3
    """A run takes tens of seconds."""
    prefill_pairs: int = 9
    seconds: float = 1200.0
    """No further pair is begun after this time, but there is always one."""
    seed: int = 3

    def jobs(self, vocab_size: int) -> list[Job]:
        """The requests."""
        rng = np.random.default_rng(self.seed)
        prompts = rng.integers(*self.prompt_tokens, self.num_requests, endpoint=True)
        outputs = rng.integers(*self.output_tokens, self.num_requests, endpoint=True)
        return [
            Job(rng.integers(FIRST_TOKEN, vocab_size, length).tolist(), int(num))
            for length, num in zip(prompts, outputs, strict=True)
        ]

    def prompt(self, vocab_size: int) -> list[int]:
        """The long prompt."""
        rng = np.random.default_rng(self.seed + 1)
        return [int(token) for token in rng.integers(FIRST_TOKEN, vocab_size, self.prefill_tokens)]


class OurEngine:
    """The engine with its default settings. Nothing is left in its prefix cache between two runs."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def serve(self, jobs: Sequence[Job]) -> list[list[int]]:
        """All jobs at once; each one's tokens."""
        engine = self._engine
        engine.reset_prefix_cache()
        answers: list[list[int]] = [[] for _ in jobs]
        for i, job in enumerate(jobs):
            params = SamplingParams(max_tokens=job.num_outputs, temperature=0.0, ignore_eos=True)
            engine.add(str(i), job.prompt, params)
        while engine.has_work:
            for output in engine.step():
                answers[int(output.request_id)] += output.token_ids
        return answers


def bench_cpu(bench: CpuBench, checkpoint: Checkpoint, note: Note) -> dict[str, Any]:
    """Measure both; plain data for JSON. Takes minutes, and the memory of three copies of the weights."""
    deadline = time.perf_counter() + bench.seconds
    longest = max(bench.prompt_tokens[1] + bench.output_tokens[1], bench.prefill_tokens + 1)
    note("loading the engine")
    config = EngineConfig(model=str(checkpoint.path), device="cpu", dtype="float32", max_model_len=longest)
    with Engine(config, checkpoint=checkpoint) as engine:
        ours = OurEngine(engine)
        jobs = bench.jobs(checkpoint.config.vocab_size)
        prompt = bench.prompt(checkpoint.config.vocab_size)
        report: dict[str, Any] = {
            "requests": len(jobs),
            "prompt_tokens": sum(len(job.prompt) for job in jobs),
            "output_tokens": sum(job.num_outputs for job in jobs),
            "prefill_tokens": len(prompt),
        }
        try:
            note("loading transformers")
            peer = load_transformers(checkpoint.path)
        except EnginePeerError as error:
            peer = None
            report["transformers_reason"] = str(error)
        else:
            report["transformers_reason"] = None
        report |= _bench_prefill(bench, ours, peer, prompt, deadline - bench.seconds / 2, note)
        report |= _bench_tput(bench, ours, peer, checkpoint, jobs, deadline, note)
    return report


# ---- one long prompt --------------------------------------------------------------------------------------------
def _bench_prefill(
    bench: CpuBench, ours: OurEngine, peer: Any, prompt: list[int], deadline: float, note: Note
) -> dict[str, Any]:
    note(f"a prompt of {len(prompt)} tokens")
    job = [Job(prompt, 1)]
    runs: dict[str, Callable[[], object]] = {"ours": lambda: ours.serve(job), "again": lambda: ours.serve(job)}
    if peer is not None:
        runs["peer"] = lambda: forward_prompt(peer, prompt)
    for run in runs.values():
        run()
    rounds = _take_turns(runs, bench.prefill_pairs, deadline)
    return {
        "prefill_s": rounds.time("ours"),
        "prefill_tokens_per_s": len(prompt) / rounds.time("ours"),
        "transformers_prefill_s": rounds.time("peer") if peer is not None else None,
        "cpu_prefill_ratio": rounds.ratio("peer", "ours") if peer is not None else None,
        "cpu_prefill_noise": rounds.noise("ours", "again"),
        "cpu_prefill_pairs": len(rounds.seconds["ours"]),
    }


# ---- many requests ----------------------------------------------------------------------------------------------
def _bench_tput(
    bench: CpuBench, ours: OurEngine, peer: Any, checkpoint: Checkpoint, jobs: list[Job], deadline: float, note: Note
) -> dict[str, Any]:
    num_tokens = sum(job.num_outputs for job in jobs)
    report: dict[str, Any] = {f"transformers_{name}": None for name in PEER_FIGURES}
    runs: dict[str, Callable[[], object]] = {"ours": lambda: ours.serve(jobs), "again": lambda: ours.serve(jobs)}
    note(f"{len(jobs)} requests at once through the engine, a first time")
    answers = ours.serve(jobs)
    _check_counts(jobs, answers)
    with contextlib.ExitStack() as stack:
        if peer is not None:
            sides: dict[str, Serve] = {f"static {size}": StaticBatches(peer, size).serve for size in bench.batch_sizes}
            seconds, agreement = _try_once(sides, jobs, answers, note)
            note("transformers, continuous batching")
            continuous, figures = _try_continuous(stack, checkpoint, jobs, SLOWEST_PEER * min(seconds.values()))
            if continuous is not None:
                sides["continuous"] = continuous
            seconds |= figures.pop("seconds")
            best = min(seconds, key=seconds.__getitem__)
            if best != "continuous":
                stack.close()
            runs["peer"] = functools.partial(sides[best], jobs)
            report |= figures
        note(f"rounds of the engine{'' if peer is None else f' and of transformers ({best})'}")
        rounds = _take_turns(runs, bench.tput_pairs, deadline)
    report |= {
        "tokens_per_s": num_tokens / rounds.time("ours"),
        "cpu_tput_noise": rounds.noise("ours", "again"),
        "cpu_tput_pairs": len(rounds.seconds["ours"]),
    }
    if peer is not None:
        seconds[best] = rounds.time("peer")
        static_s = min(value for name, value in seconds.items() if name != "continuous")
        report |= {
            "cpu_tput_ratio": rounds.ratio("peer", "ours"),
            "cpu_tput_agreement": agreement,
            "transformers_best": best,
            "transformers_seconds": seconds,
            "transformers_static_tokens_per_s": num_tokens / static_s,
        }
        if "continuous" in seconds:
            report["transformers_continuous_tokens_per_s"] = num_tokens / seconds["continuous"]
    return report


def _try_once(
    sides: Mapping[str, Serve], jobs: list[Job], answers: list[list[int]], note: Note
) -> tuple[dict[str, float], float]:
    """Seconds of one run of each side, and the part of all answers that equal the engine's."""
    seconds, equal = {}, []
    for name, serve in sides.items():
        note(f"transformers, {name}")
        start = time.perf_counter()
        theirs = serve(jobs) or []
        seconds[name] = time.perf_counter() - start
        _check_counts(jobs, theirs)
        equal += [a == b for a, b in zip(answers, theirs, strict=True)]
    return seconds, float(np.mean(equal))


def _try_continuous(
    stack: contextlib.ExitStack, checkpoint: Checkpoint, jobs: list[Job], give_up_s: float
) -> tuple[Serve | None, dict[str, Any]]:
    """One warm run, on a model of its own, which lives in `stack`. None, and the reason, where it is no candidate."""
    try:
        continuous = stack.enter_context(continuous_batches(load_transformers(checkpoint.path), jobs))
        continuous.serve([Job(job.prompt[:16], 4) for job in jobs[:4]])
        start = time.perf_counter()
        finished = continuous.serve(jobs, give_up_s)
        seconds = time.perf_counter() - start
    except EnginePeerError as error:
        return None, {"transformers_continuous_reason": str(error), "seconds": {}}
    if finished is None:
        reason = f"stopped after {seconds:.0f} s, unfinished: the figure is an upper bound"
        return None, {"transformers_continuous_reason": reason, "seconds": {"continuous": seconds}}
    _check_counts(jobs, finished)
    return continuous.serve, {"transformers_continuous_reason": None, "seconds": {"continuous": seconds}}


def _check_counts(jobs: Sequence[Job], answers: Sequence[Sequence[int]]) -> None:
    """A side that says less than it was asked to would look fast."""
    got, asked = [len(answer) for answer in answers], [job.num_outputs for job in jobs]
    if got != asked:
        raise EngineError(f"a side of the comparison answered with {got} tokens instead of {asked}")


def _take_turns(runs: dict[str, Callable[[], object]], count: int, deadline: float) -> Rounds:
    """Like `measure.take_turns`, but without a first round that does not count, and never longer than it may."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(count):
        for name in reversed(runs) if number % 2 else runs:
            start = time.perf_counter()
            runs[name]()
            seconds[name].append(time.perf_counter() - start)
        if time.perf_counter() > deadline:
            break
    return Rounds(seconds)
