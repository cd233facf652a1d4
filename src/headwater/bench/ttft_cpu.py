"""The CPU part of `headwater bench ttft`: two servers' engines in two processes on one pool.

The first one computes a prompt, the second has never seen it and finds it in the pool. Besides: what the pool costs
where nothing is ever found.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from headwater.bench.measure import Note
from headwater.bench.ttft_peer import Peer
from headwater.bench.ttft_side import Side, Unique, measure_no_reuse, random_prompt
from headwater.engine.config import EngineConfig
from headwater.engine.engine import Engine
from headwater.errors import EngineError
from headwater.models.checkpoint import Checkpoint
from headwater.stores.embedded import destroy
from headwater.stores.url import parse_url

CPU_FIGURES = ("cpu_speedup_4k", "cpu_no_reuse_cost")
EXTRA_TOKENS = 32
"""Room for answers."""
UNIQUE = Unique(num_prompts=4, prompt_tokens=512, output_tokens=16)


@dataclass(frozen=True)
class CpuBench:
    """What to ask."""

    prompt_tokens: int = 4096
    num_prompts: int = 5
    """Each computed once and found once; computing one takes ten seconds and more."""
    output_tokens: int = 4
    unique: Unique = UNIQUE
    seconds: float = 900.0
    """No further prompt or pair is begun after this time, but there is always one."""

    @property
    def num_pages(self) -> int:
        """Of an engine: for one long prompt, or for all the unique ones at once."""
        page_size = EngineConfig.page_size
        unique = self.unique
        one = -(-(unique.prompt_tokens + unique.output_tokens) // page_size)
        return max(-(-(self.prompt_tokens + EXTRA_TOKENS) // page_size), unique.num_prompts * (one + 1)) + 16


def bench_cpu(bench: CpuBench, checkpoint: Checkpoint, note: Note) -> dict[str, Any]:
    """Both figures; plain data for JSON. Takes minutes, and the memory of four copies of the weights."""
    model = checkpoint.config
    spec = model.kv_spec("float32")
    url = f"shm:///headwater-bench-{secrets.token_hex(6)}"
    capacity = (bench.num_prompts + 1) * spec.extent_bytes(bench.prompt_tokens + EXTRA_TOKENS) + (64 << 20)
    config = EngineConfig(
        model=str(checkpoint.path),
        device="cpu",
        dtype="float32",
        num_pages=bench.num_pages,
        max_model_len=bench.prompt_tokens + EXTRA_TOKENS,
        pool=f"{url}?capacity={capacity}",
    )
    rng = np.random.default_rng(17)

    def make_prompt(num_tokens: int) -> list[int]:
        return random_prompt(rng, model.vocab_size, num_tokens)

    deadline = time.perf_counter() + bench.seconds
    try:
        report = _two_servers(bench, config, make_prompt, deadline - bench.seconds / 2, note)
        note(f"{bench.unique.num_prompts} prompts that have nothing in common, with and without the pool")
        with Engine(replace(config, pool=None)) as off, Engine(config) as on:
            report |= measure_no_reuse(bench.unique, Side(off), Side(on), make_prompt, "cpu", deadline)
    finally:
        destroy(parse_url(url))
    return report


def _two_servers(
    bench: CpuBench, config: EngineConfig, make_prompt: Callable[[int], list[int]], deadline: float, note: Note
) -> dict[str, Any]:
    """Each prompt through the first server, then through the second."""
    cold, hit, num_cached = [], [], bench.prompt_tokens
    with Peer(config) as first, Peer(config) as second:
        note("two servers load the model")
        for peer in (first, second):
            peer.wait_ready()
        for peer in (first, second):
            peer.ask(make_prompt(bench.prompt_tokens // 16), 2)  # the first question of a process is slower
        for number in range(bench.num_prompts):
            note(f"a prompt of {bench.prompt_tokens:,} tokens to both, {number + 1} of {bench.num_prompts}")
            prompt = make_prompt(bench.prompt_tokens)
            computed, found = (peer.ask(prompt, bench.output_tokens) for peer in (first, second))
            if computed.num_cached or found.num_cached < bench.prompt_tokens - 1:
                raise EngineError(
                    f"{computed.num_cached} and {found.num_cached} of {bench.prompt_tokens} tokens were cached, and "
                    "none and all expected; saves and loads have deadlines, which a busy machine may miss"
                )
            if computed.tokens != found.tokens:
                raise EngineError(f"the servers answered {computed.tokens} and {found.tokens} to the same question")
            cold.append(computed.first_token_s)
            hit.append(found.first_token_s)
            num_cached = min(num_cached, found.num_cached)
            if time.perf_counter() > deadline:
                break
    return {
        "cpu_prompt_tokens": bench.prompt_tokens,
        "cpu_cached_tokens": num_cached,
        "cpu_prompts": len(cold),
        "cpu_cold_s": float(np.median(cold)),
        "cpu_hit_s": float(np.median(hit)),
        "cpu_hit_first_s": hit[0],
        "cpu_speedup_4k": float(np.median(cold) / np.median(hit)),
        "cpu_speedup_least": min(cold) / max(hit),
    }
