"""`headwater bench vllm`: the time to a first token in real vLLM on a CPU, on a hit in the pool, against plain vLLM and
against other connectors; and what saving costs.

Two engines live at a time and take turns, on the same cores and never while the other one is at work (`vllm_fair`).
Two plain engines do so first: what they differ by is what the order of starting, and chance, make. A hit counts only
where vLLM had forgotten its own prefix cache and reports the tokens that came from outside.
"""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count as count_from
from pathlib import Path
from typing import Any

from headwater.bench.measure import Note, Rounds, Timed, machine, take_turns
from headwater.bench.vllm_engine import EngineProcess, engine
from headwater.bench.vllm_fair import same_cores, wait_until_quiet
from headwater.bench.vllm_peers import (
    HEAVY,
    LIGHT,
    BenchModel,
    Variant,
    example_variant,
    headwater_variant,
    mooncake_variant,
)
from headwater.errors import EngineError

BLOCK_SIZE = 128
SETTLE_S = 60.0
RESET_S = 30.0

PLAIN = Variant("none", None, {})

Quiet = Callable[[], None]
"""Waits until no engine is at work."""


@dataclass(frozen=True)
class VllmBench:
    """What to measure, and how often."""

    models: tuple[BenchModel, ...] = (LIGHT, HEAVY)
    prompt_lens: tuple[int, ...] = (1024, 2048, 4096, 8192)
    pairs: int = 9
    cold_pairs: int = 3
    decode_pairs: int = 5
    decode_tokens: int = 96
    peers: tuple[str, ...] = ("none", "example", "mooncake")


QUICK = VllmBench(models=(LIGHT,), prompt_lens=(512, 1024), pairs=2, cold_pairs=1, decode_pairs=1, decode_tokens=8)


@dataclass
class _ModelFigures:
    """Seconds of one model, by what was measured."""

    hit: dict[str, dict[int, tuple[float, float]]] = field(default_factory=dict)
    """By peer and prompt length: (Headwater's, the peer's), from the same rounds."""
    cold: dict[int, float] = field(default_factory=dict)
    others: dict[str, float] = field(default_factory=dict)


def run(plan: VllmBench, note: Note) -> dict[str, Any]:
    """Run everything. Raises EngineError where an engine does not do what was asked."""
    report: dict[str, Any] = {"machine": machine(), "block_size": BLOCK_SIZE, "pairs": plan.pairs, "models": {}}
    for model in plan.models:
        figures = _bench_model(plan, model, note)
        report["models"][model.name] = found = _report(figures, plan, model)
        longest = found["prompts"][str(max(plan.prompt_lens))]
        note(f"{model.name}: " + ", ".join(f"{name} {value:.4g}" for name, value in longest.items() if value))
    return report | _bars(report["models"], plan)


def _bench_model(plan: VllmBench, model: BenchModel, note: Note) -> _ModelFigures:
    figures = _ModelFigures()
    longest = max(plan.prompt_lens)
    gib = max(1, -(-model.token_bytes * longest // (1 << 30)))
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as directory:
        path, log = model.save(Path(directory, model.name)), Path(directory, "engines.log")
        prompts = {count: prompt_of(count, count) for count in plan.prompt_lens}
        with headwater_variant(4 * gib) as ours, contextlib.ExitStack() as ours_running:
            start = partial(_start, path, log, longest, gib)
            headwater = None
            if "none" in plan.peers:
                with start(PLAIN) as plain:
                    note(f"{model.name}: plain beside plain")
                    with start(PLAIN) as second:
                        _control(plan, plain, second, prompts, figures)
                    note(f"{model.name}: beside none")
                    headwater = ours_running.enter_context(start(ours))
                    _fill(headwater, prompts.values())
                    _beside_none(plan, headwater, plain, prompts, figures, note)
            headwater = headwater or ours_running.enter_context(start(ours))
            for name in (name for name in plan.peers if name != "none"):
                note(f"{model.name}: beside {name}")
                with _peer(name, log, gib) as variant, start(variant) as peer:
                    _fill(headwater, prompts.values())  # the cold prompts may have pushed some of them out
                    _fill(peer, prompts.values())
                    figures.hit[name] = _hits(plan, headwater, peer, prompts)
    return figures


# ---- engines ----------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def _peer(name: str, log: Path, gib: int) -> Iterator[Variant]:
    if name == "example":
        with example_variant() as variant:
            yield variant
    else:
        with mooncake_variant(3 * gib, log) as variant:
            yield variant


@contextlib.contextmanager
def _start(path: Path, log: Path, longest: int, gib: int, variant: Variant) -> Iterator[EngineProcess]:
    settings: dict[str, Any] = {
        "model": str(path),
        "block_size": BLOCK_SIZE,
        "max_model_len": longest + 256,
        "max_num_batched_tokens": longest + 256,  # ExampleConnector cannot save prompts that are computed in parts
        "environment": {"VLLM_CPU_KVCACHE_SPACE": str(2 * gib), **same_cores(), **variant.environment},
    }
    if variant.transfer is not None:
        settings["kv_transfer_config"] = variant.transfer
    with engine(log, settings) as running:
        yield running


def prompt_of(seed: int, count: int) -> list[int]:
    """A prompt without a pattern, the same for the same seed."""
    numbers = random.Random(seed)
    return [numbers.randrange(3, LIGHT.vocab_size) for _ in range(count)]


def _fill(running: EngineProcess, prompts: Sequence[list[int]] | Any) -> None:
    """Compute prompts once, and wait until all of each is found outside."""
    for prompt in prompts:
        running.ask("generate", prompts=[prompt], max_tokens=1)
        deadline = time.monotonic() + SETTLE_S
        while True:
            reset(running)
            if running.ask("generate", prompts=[prompt], max_tokens=1)["external"] >= len(prompt) - BLOCK_SIZE:
                break
            if time.monotonic() > deadline:
                raise EngineError(f"a prompt of {len(prompt)} tokens was not saved within {SETTLE_S:.0f} s")


def reset(running: EngineProcess) -> None:
    """Forget the local prefix cache; it cannot be forgotten while blocks are not freed yet."""
    deadline = time.monotonic() + RESET_S
    while not running.ask("reset"):
        if time.monotonic() > deadline:
            raise EngineError("vLLM does not give up its prefix cache")


def _first_token(running: EngineProcess, prompt: list[int], *, least_external: int) -> float:
    answer = running.ask("generate", prompts=[prompt], max_tokens=1)
    if answer["external"] < least_external:
        raise EngineError(f"a hit was expected, and {answer['external']:.0f} tokens came from outside")
    return float(answer["seconds"])


# ---- what is measured -------------------------------------------------------------------------------------------
def _hits(
    plan: VllmBench, headwater: EngineProcess, peer: EngineProcess, prompts: dict[int, list[int]]
) -> dict[int, tuple[float, float]]:
    quiet, found = partial(wait_until_quiet, [headwater, peer]), {}
    for count, prompt in prompts.items():
        runs = {"headwater": _hit(headwater, prompt, quiet), "peer": _hit(peer, prompt, quiet)}
        rounds = take_turns(runs, plan.pairs)
        found[count] = (rounds.time("headwater"), rounds.time("peer"))
    return found


def _hit(running: EngineProcess, prompt: list[int], quiet: Quiet) -> Timed:
    def once() -> float:
        reset(running)
        quiet()
        return _first_token(running, prompt, least_external=len(prompt) - BLOCK_SIZE)

    return once


def _local_hit(running: EngineProcess, prompt: list[int], quiet: Quiet) -> Timed:
    def once() -> float:
        quiet()
        answer = running.ask("generate", prompts=[prompt], max_tokens=1)
        if answer["local"] < len(prompt) - 2 * BLOCK_SIZE:
            running.ask("generate", prompts=[prompt], max_tokens=1)
            quiet()
            answer = running.ask("generate", prompts=[prompt], max_tokens=1)
        return float(answer["seconds"])

    return once


def _control(
    plan: VllmBench,
    first: EngineProcess,
    second: EngineProcess,
    prompts: dict[int, list[int]],
    figures: _ModelFigures,
) -> None:
    """How many times as long the engine that was started second takes, of two that are the same."""
    quiet, longest = partial(wait_until_quiet, [first, second]), max(prompts)
    prompt = prompts[longest]
    hits = take_turns(
        {"first": _local_hit(first, prompt, quiet), "second": _local_hit(second, prompt, quiet)}, plan.pairs
    )
    cold = _cold_turns({"first": first, "second": second}, plan.cold_pairs, longest, count_from(5_000), quiet)
    figures.others["order_bias_hit"] = hits.ratio("second", "first")
    figures.others["order_bias"] = cold.ratio("second", "first")


def _beside_none(
    plan: VllmBench,
    headwater: EngineProcess,
    plain: EngineProcess,
    prompts: dict[int, list[int]],
    figures: _ModelFigures,
    note: Note,
) -> None:
    """The floor and the cold times of plain vLLM, what saving costs, and decoding while saving."""
    quiet = partial(wait_until_quiet, [headwater, plain])
    figures.hit["none"] = {}
    for count, prompt in prompts.items():
        runs = {"headwater": _hit(headwater, prompt, quiet), "floor": _local_hit(plain, prompt, quiet)}
        rounds = take_turns({**runs, "again": runs["headwater"]}, plan.pairs)
        figures.hit["none"][count] = (rounds.time("headwater"), rounds.time("floor"))
        if count == max(prompts):
            figures.others["hit_noise"] = rounds.noise("headwater", "again")
            figures.others["hit_headwater"] = rounds.time("headwater")
    note("cold prompts")
    _cold(plan, headwater, plain, prompts, figures, quiet)
    note("decoding while saving")
    decode = partial(_decode, num_tokens=plan.decode_tokens, seeds=count_from(20_000, 8), quiet=quiet)
    rounds = take_turns(
        {
            "headwater": decode(headwater),
            "none": decode(plain),
            "again": decode(plain),
        },
        plan.decode_pairs,
    )
    figures.others["decode_ratio"] = rounds.ratio("headwater", "none")
    figures.others["decode_noise"] = rounds.noise("none", "again")


def _cold(
    plan: VllmBench,
    headwater: EngineProcess,
    plain: EngineProcess,
    prompts: dict[int, list[int]],
    figures: _ModelFigures,
    quiet: Quiet,
) -> None:
    """Prompts that nobody has seen, in turns; on Headwater's side they are saved meanwhile."""
    longest, seeds = max(prompts), count_from(10_000)
    before = _settled(headwater)
    rounds = _cold_turns({"headwater": headwater, "none": plain}, plan.cold_pairs, longest, seeds, quiet)
    after = _settled(headwater)
    busy = sum(after[name] - before.get(name, 0.0) for name in ("step_seconds", "thread_seconds"))
    figures.cold[longest] = rounds.time("none")
    figures.others["cold_headwater"] = rounds.time("headwater")
    figures.others["cold_cost"] = rounds.ratio("headwater", "none")
    figures.others["cold_noise"] = max(rounds.seconds["none"]) / min(rounds.seconds["none"]) - 1
    cores = len(os.sched_getaffinity(0))
    figures.others["save_share"] = busy / (sum(rounds.seconds["headwater"]) * cores)
    for count in prompts:
        if count != longest:
            rounds = _cold_turns({"none": plain}, 1, count, seeds, quiet)
            figures.cold[count] = rounds.time("none")


def _cold_turns(
    engines: dict[str, EngineProcess], pairs: int, num_tokens: int, seeds: Iterator[int], quiet: Quiet
) -> Rounds:
    """Prompts that nobody has seen, every engine in its turn."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(pairs):
        for name, running in reversed(engines.items()) if number % 2 else engines.items():
            reset(running)
            quiet()
            seconds[name].append(_first_token(running, prompt_of(next(seeds), num_tokens), least_external=0))
    return Rounds(seconds)


def _settled(running: EngineProcess) -> dict[str, float]:
    """The connector's counters when nothing is being saved any more. A small request carries them out."""
    deadline, last = time.monotonic() + SETTLE_S, -1.0
    while True:
        time.sleep(1.0)
        running.ask("generate", prompts=[prompt_of(7, 16)], max_tokens=2)
        found = {
            name.removeprefix("headwater_pool_"): value
            for name, value in running.ask("metrics").items()
            if name.startswith("headwater_pool_")
        }
        if found.get("saved_bytes", 0.0) == last or time.monotonic() > deadline:
            return found
        last = found.get("saved_bytes", 0.0)


def _decode(running: EngineProcess, *, num_tokens: int, seeds: Iterator[int], quiet: Quiet) -> Timed:
    """Eight requests that nobody has seen, which begin within a chunk and end in the next one."""

    def once() -> float:
        seed = next(seeds)
        prompts = [prompt_of(seed + i, 256 - num_tokens // 2) for i in range(8)]
        quiet()
        return float(running.ask("generate", prompts=prompts, max_tokens=num_tokens)["seconds"])

    return once


# ---- the report -------------------------------------------------------------------------------------------------
def _report(figures: _ModelFigures, plan: VllmBench, model: BenchModel) -> dict[str, Any]:
    found: dict[str, Any] = {"token_bytes": model.token_bytes, **figures.others, "prompts": {}}
    for count in plan.prompt_lens:
        row: dict[str, Any] = {"cold_s": figures.cold.get(count)}
        for peer, rows in figures.hit.items():
            name = "floor" if peer == "none" else peer
            row[f"headwater_beside_{name}_s"], row[f"{name}_s"] = rows[count]
            row[f"vs_{name}"] = rows[count][0] / rows[count][1]
        if "none" in figures.hit and figures.cold.get(count):
            row["speedup"] = figures.cold[count] / figures.hit["none"][count][0]
        found["prompts"][str(count)] = row
    return found


def _bars(models: dict[str, Any], plan: VllmBench) -> dict[str, Any]:
    """The worse of all models, at the longest prompt."""
    rows = [model["prompts"][str(max(plan.prompt_lens))] for model in models.values()]

    def worst(choose: Callable[..., float], values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return choose(known) if known else None

    return {
        "ttft_vs_mooncake": worst(max, [row.get("vs_mooncake") for row in rows]),
        "ttft_vs_example": worst(max, [row.get("vs_example") for row in rows]),
        "ttft_vs_floor": worst(max, [row.get("vs_floor") for row in rows]),
        "ttft_speedup": worst(min, [row.get("speedup") for row in rows]),
        "save_share": worst(max, [model.get("save_share") for model in models.values()]),
        "order_bias": worst(_farthest_from_one, [model.get("order_bias") for model in models.values()]),
        "cold_cost": worst(max, [model.get("cold_cost") for model in models.values()]),
        "decode_ratio": worst(max, [model.get("decode_ratio") for model in models.values()]),
    }


def _farthest_from_one(ratios: list[float]) -> float:
    return max(ratios, key=lambda ratio: abs(ratio - 1))
