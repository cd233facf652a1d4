"""`headwater bench vllm`: the time to a first token in real vLLM on a CPU, on a hit in the pool, against plain vLLM and
against other connectors; and what saving costs.

Two engines live at a time, one of them with Headwater, and take turns. A hit counts only where vLLM had forgotten
its own prefix cache and reports the tokens that came from outside.
"""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headwater.bench.measure import Note, Rounds, machine, take_turns
from headwater.bench.vllm_engine import EngineProcess, engine
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
        prompts = {count: _prompt(count, count) for count in plan.prompt_lens}
        with headwater_variant(4 * gib) as ours, _start(path, log, ours, longest, gib) as headwater:
            note(f"{model.name}: filling the pool")
            _fill(headwater, prompts.values())
            for name in plan.peers:
                note(f"{model.name}: beside {name}")
                with _peer(name, log, gib) as variant, _start(path, log, variant, longest, gib) as peer:
                    if name == "none":
                        _beside_none(plan, headwater, peer, prompts, figures, note)
                    else:
                        _fill(headwater, prompts.values())  # the cold prompts may have pushed some of them out
                        _fill(peer, prompts.values())
                        figures.hit[name] = _hits(plan, headwater, peer, prompts)
    return figures


# ---- engines ----------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def _peer(name: str, log: Path, gib: int) -> Iterator[Variant]:
    if name == "none":
        yield Variant("none", None, {})
    elif name == "example":
        with example_variant() as variant:
            yield variant
    else:
        with mooncake_variant(3 * gib, log) as variant:
            yield variant


@contextlib.contextmanager
def _start(path: Path, log: Path, variant: Variant, longest: int, gib: int) -> Iterator[EngineProcess]:
    settings: dict[str, Any] = {
        "model": str(path),
        "block_size": BLOCK_SIZE,
        "max_model_len": longest + 256,
        "max_num_batched_tokens": longest + 256,  # ExampleConnector cannot save prompts that are computed in parts
        "environment": {"VLLM_CPU_KVCACHE_SPACE": str(2 * gib), **variant.environment},
    }
    if variant.transfer is not None:
        settings["kv_transfer_config"] = variant.transfer
    with engine(log, settings) as running:
        yield running


def _prompt(seed: int, count: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(3, LIGHT.vocab_size) for _ in range(count)]


def _fill(running: EngineProcess, prompts: Sequence[list[int]] | Any) -> None:
    """Compute prompts once, and wait until all of each is found outside."""
    for prompt in prompts:
        running.ask("generate", prompts=[prompt], max_tokens=1)
        deadline = time.monotonic() + SETTLE_S
        while True:
            _reset(running)
            if running.ask("generate", prompts=[prompt], max_tokens=1)["external"] >= len(prompt) - BLOCK_SIZE:
                break
            if time.monotonic() > deadline:
                raise EngineError(f"a prompt of {len(prompt)} tokens was not saved within {SETTLE_S:.0f} s")


def _reset(running: EngineProcess) -> None:
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
    found = {}
    for count, prompt in prompts.items():
        rounds = take_turns({"headwater": _hit(headwater, prompt), "peer": _hit(peer, prompt)}, plan.pairs)
        found[count] = (rounds.time("headwater"), rounds.time("peer"))
    return found


def _hit(running: EngineProcess, prompt: list[int]) -> Callable[[], float]:
    def once() -> float:
        _reset(running)
        return _first_token(running, prompt, least_external=len(prompt) - BLOCK_SIZE)

    return once


def _local_hit(running: EngineProcess, prompt: list[int]) -> Callable[[], float]:
    def once() -> float:
        answer = running.ask("generate", prompts=[prompt], max_tokens=1)
        if answer["local"] < len(prompt) - 2 * BLOCK_SIZE:
            running.ask("generate", prompts=[prompt], max_tokens=1)
            answer = running.ask("generate", prompts=[prompt], max_tokens=1)
        return float(answer["seconds"])

    return once


def _beside_none(
    plan: VllmBench,
    headwater: EngineProcess,
    plain: EngineProcess,
    prompts: dict[int, list[int]],
    figures: _ModelFigures,
    note: Note,
) -> None:
    """The floor and the cold times of plain vLLM, what saving costs, and decoding while saving."""
    figures.hit["none"] = {}
    for count, prompt in prompts.items():
        runs = {"headwater": _hit(headwater, prompt), "floor": _local_hit(plain, prompt)}
        rounds = take_turns({**runs, "again": runs["headwater"]}, plan.pairs)
        figures.hit["none"][count] = (rounds.time("headwater"), rounds.time("floor"))
        if count == max(prompts):
            figures.others["hit_noise"] = rounds.noise("headwater", "again")
            figures.others["hit_headwater"] = rounds.time("headwater")
    note("cold prompts")
    _cold(plan, headwater, plain, prompts, figures)
    note("decoding while saving")
    rounds = take_turns(
        {
            "headwater": _decode(headwater, plan.decode_tokens),
            "none": _decode(plain, plan.decode_tokens),
            "again": _decode(plain, plan.decode_tokens),
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
) -> None:
    """Prompts that nobody has seen, in turns; on Headwater's side they are saved meanwhile."""
    longest, seed = max(prompts), 10_000
    seconds: dict[str, list[float]] = {"headwater": [], "none": []}
    busy = 0.0
    before = _settled(headwater)
    for number in range(plan.cold_pairs):
        sides = [("headwater", headwater), ("none", plain)]
        for name, running in sides if number % 2 else reversed(sides):
            seed += 1
            _reset(running)
            seconds[name].append(_first_token(running, _prompt(seed, longest), least_external=0))
    after = _settled(headwater)
    busy = sum(after[name] - before.get(name, 0.0) for name in ("step_seconds", "thread_seconds"))
    rounds = Rounds(seconds)
    figures.cold[longest] = rounds.time("none")
    figures.others["cold_headwater"] = rounds.time("headwater")
    figures.others["cold_cost"] = rounds.ratio("headwater", "none")
    figures.others["cold_noise"] = max(seconds["none"]) / min(seconds["none"]) - 1
    cores = len(os.sched_getaffinity(0))
    figures.others["save_share"] = busy / (sum(seconds["headwater"]) * cores)
    for count in prompts:
        if count != longest:
            _reset(plain)
            seed += 1
            figures.cold[count] = _first_token(plain, _prompt(seed, count), least_external=0)


def _settled(running: EngineProcess) -> dict[str, float]:
    """The connector's counters when nothing is being saved any more. A small request carries them out."""
    deadline, last = time.monotonic() + SETTLE_S, -1.0
    while True:
        time.sleep(1.0)
        running.ask("generate", prompts=[_prompt(7, 16)], max_tokens=2)
        found = {
            name.removeprefix("vllm:headwater_"): value
            for name, value in running.ask("metrics").items()
            if name.startswith("vllm:headwater_")
        }
        if found.get("saved_bytes", 0.0) == last or time.monotonic() > deadline:
            return found
        last = found.get("saved_bytes", 0.0)


def _decode(running: EngineProcess, num_tokens: int) -> Callable[[], float]:
    """Eight requests that begin within a chunk and end in the next one."""
    seeds = iter(range(20_000, 1 << 30, 8))

    def once() -> float:
        seed = next(seeds)
        prompts = [_prompt(seed + i, 256 - num_tokens // 2) for i in range(8)]
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
        "cold_cost": worst(max, [model.get("cold_cost") for model in models.values()]),
        "decode_ratio": worst(max, [model.get("decode_ratio") for model in models.values()]),
    }
