"""The GPU part of `headwater bench ttft`: a long prompt from the pool, against the bus and against computing it.

Random weights of an 8B-class Llama through the whole engine. Two engines take turns on one device: first one with a
pool and one without, then two that load in different ways.
"""

from __future__ import annotations

import gc
import json
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headwater.bench.engine_gpu import prefill_flops
from headwater.bench.engine_shapes import LLAMA_8B
from headwater.bench.measure import Note, Rounds
from headwater.bench.ttft_side import Answer, Side, Unique, measure_no_reuse, random_prompt, spread
from headwater.connector.config import LOAD_MODES
from headwater.engine.config import EngineConfig
from headwater.engine.engine import Engine
from headwater.errors import EngineError
from headwater.kernels.dtypes import TORCH_DTYPES
from headwater.kv.hashing import DEFAULT_CHUNK_TOKENS
from headwater.kv.spec import KVSpec
from headwater.stores.embedded import destroy
from headwater.stores.url import format_size, parse_url

GPU_FIGURES = ("hit_vs_bus", "gpu_speedup_32k", "layerwise_ratio", "gpu_no_reuse_cost")
SHM = "/dev/shm"
EXTRA_TOKENS = 64
"""Room for answers."""
_MAX_PROMPTS = 5
"""In a row, until all of one was saved."""
UNIQUE = Unique(num_prompts=16, prompt_tokens=2048, output_tokens=64, warm_rounds=3)
LARGE_LLAMA_8B = LLAMA_8B | {"max_position_embeddings": 131072}


@dataclass(frozen=True)
class GpuBench:
    """What to run."""

    config: dict[str, Any]
    prompt_tokens: int = 32768
    max_batched_tokens: int = 8192
    pairs: int = 9
    decode_steps: int = 16
    unique: Unique = UNIQUE
    matmul_size: int = 8192
    num_products: int = 10

    @property
    def num_pages(self) -> int:
        """Of an engine: for one long prompt, or for all the unique ones at once."""
        unique = self.unique
        page_size = EngineConfig.page_size
        one = -(-(unique.prompt_tokens + unique.output_tokens) // page_size)
        return max(-(-(self.prompt_tokens + EXTRA_TOKENS) // page_size), unique.num_prompts * (one + 1)) + 64


def bench_gpu(bench: GpuBench, note: Note, device: str = "cuda") -> dict[str, Any]:
    """All figures of the GPU; None for all of them where there is none. Half a prompt's KV must fit into /dev/shm.

    `device` is for tests, which have none: the same on a CPU, in float32.
    """
    if device == "cuda" and not torch.cuda.is_available():
        return dict.fromkeys(GPU_FIGURES) | {"gpu": None, "gpu_reason": "no CUDA device found"}
    name = torch.cuda.get_device_name() if device == "cuda" else device
    report: dict[str, Any] = {"gpu": name, "gpu_reason": None}
    url = f"shm:///headwater-bench-{secrets.token_hex(6)}"
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(bench.config))
        try:
            gpu = _Gpu(bench, folder, device, url, note)
            report |= gpu.whole_prompt()
            gpu.settle()
            report |= gpu.half_prompt()
        finally:
            destroy(parse_url(url))
    return report


class _Gpu:
    """The pool, and the engines around it."""

    def __init__(self, bench: GpuBench, folder: str, device: str, url: str, note: Note) -> None:
        self._bench, self._note = bench, note
        self._device = torch.device(device)
        self._dtype = "bfloat16" if device == "cuda" else "float32"
        shape = bench.config
        self._spec = KVSpec.gqa(
            num_layers=shape["num_hidden_layers"],
            num_kv_heads=shape["num_key_value_heads"],
            head_dim=shape["head_dim"],
            dtype=self._dtype,
        )
        self._num_bytes = self._spec.extent_bytes(bench.prompt_tokens)
        free = shutil.disk_usage(SHM).free
        capacity = min(3 * self._num_bytes + (64 << 20), int(free * 0.9))
        if capacity < 1.5 * self._num_bytes:
            raise EngineError(
                f"{SHM} has {format_size(free)} free and the KV of {bench.prompt_tokens:,} tokens takes "
                f"{format_size(self._num_bytes)}; make room there for one and a half times that"
            )
        self._capacity = capacity
        self._config = EngineConfig(
            model=folder,
            load_format="dummy",
            device=device,
            dtype=self._dtype,
            num_pages=bench.num_pages,
            max_model_len=bench.prompt_tokens + EXTRA_TOKENS,
            max_batched_tokens=bench.max_batched_tokens,
        )
        self._url = f"{url}?capacity={capacity}&packing=on"
        self._rng = np.random.default_rng(11)
        self._half: list[int] = []
        """The part of a prompt that the pool has."""
        self._num_repeated = 0

    # ---- all of a prompt, or nothing of it ----------------------------------------------------------------------
    def whole_prompt(self) -> dict[str, Any]:
        """A prompt from the pool and the same computed, and what the pool costs where nothing is found."""
        bench = self._bench
        with ExitStack() as stack:
            off = stack.enter_context(self._side(pool=None))
            on = stack.enter_context(self._side())
            self._note(f"{bench.unique.num_prompts} prompts that have nothing in common, with and without the pool")
            report = measure_no_reuse(bench.unique, off, on, self._prompt, "gpu", float("inf"))
            self._note(f"a prompt of {bench.prompt_tokens:,} tokens: {format_size(self._num_bytes)}")
            report |= self._hits(off, on)
            # For later: the first half of a prompt.
            self._half, _ = self._ask_saved(on, bench.prompt_tokens // 2 // DEFAULT_CHUNK_TOKENS * DEFAULT_CHUNK_TOKENS)
        return report | {"gpu_saves_repeated": self._num_repeated}

    def _hits(self, off: Side, on: Side) -> dict[str, Any]:
        """Each round has a prompt of its own: one engine computes and saves it, and has then to find it."""
        bench = self._bench
        work = self._limits()
        seconds: dict[str, list[float]] = {name: [] for name in ("hit", "step", "recompute", "saving", *work)}
        for number in range(bench.pairs + 1):
            prompt, saving = self._ask_saved(on, bench.prompt_tokens)
            recompute = off.ask(prompt, 1, cached=range(1))
            hit = on.ask(prompt, bench.decode_steps, cached=range(bench.prompt_tokens - 1, bench.prompt_tokens + 1))
            on.drain()
            times = {name: self._time(run) for name, run in work.items()}
            if number:  # the first round compiles, and registers memory
                for name, answer in (("hit", hit), ("recompute", recompute), ("saving", saving)):
                    seconds[name].append(answer.first_token_s)
                seconds["step"].append(hit.step_s)
                for name, took in times.items():
                    seconds[name].append(took)
        return self._report_hits(Rounds(seconds), on.engine)

    def _ask_saved(self, on: Side, num_tokens: int) -> tuple[list[int], Answer]:
        """A prompt that is in the pool afterwards. A save that falls behind is dropped; another one is asked then."""
        for _ in range(_MAX_PROMPTS):
            prompt, before = self._prompt(num_tokens), on.engine.stats().pool.num_dropped
            answer = on.ask(prompt, 1, cached=range(1))
            on.drain()
            if on.engine.stats().pool.num_dropped == before:
                return prompt, answer
            self._num_repeated += 1
            self._note("a part of that was dropped instead of saved; another one")
        raise EngineError(f"of {_MAX_PROMPTS} prompts in a row a part was dropped instead of saved; is the host busy?")

    def _report_hits(self, rounds: Rounds, engine: Engine) -> dict[str, Any]:
        bench = self._bench
        bus_s = rounds.time("copy")
        rate = 2 * bench.matmul_size**3 * bench.num_products / rounds.time("product")
        flops = prefill_flops(engine.checkpoint.config, bench.prompt_tokens)
        return {
            "gpu_prompt_tokens": bench.prompt_tokens,
            "gpu_prompt_bytes": self._num_bytes,
            "gpu_pool_load": engine.config.pool_load,
            "gpu_pairs": len(rounds.seconds["hit"]),
            "copy_in_gbps": self._num_bytes / bus_s / 1e9,
            "bus_ms": 1000 * bus_s,
            "hit_ms": 1000 * rounds.time("hit"),
            "decode_step_ms": 1000 * rounds.time("step"),
            "recompute_ms": 1000 * rounds.time("recompute"),
            "recompute_saving_ms": 1000 * rounds.time("saving"),
            "gpu_matmul_tflops": rate / 1e12,
            "gpu_prefill_mfu": flops / rate / rounds.time("recompute"),
            "hit_vs_bus": (rounds.time("hit") - rounds.time("step")) / bus_s,
            "hit_noise": max(spread(rounds.seconds["hit"]), spread(rounds.seconds["copy"])),
            "gpu_speedup_32k": rounds.ratio("recompute", "hit"),
        }

    def _limits(self) -> dict[str, Callable[[], object]]:
        """One large copy of the prompt's bytes, and matrix products."""
        on_gpu = self._device.type == "cuda"
        here = torch.zeros(self._num_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        there = torch.empty_like(here, device=self._device)
        size = self._bench.matmul_size
        left = torch.randn(size, size, dtype=TORCH_DTYPES[self._dtype], device=self._device)
        right = torch.randn_like(left)
        return {
            "copy": lambda: there.copy_(here, non_blocking=True),
            "product": lambda: [torch.mm(left, right) for _ in range(self._bench.num_products)],
        }

    # ---- half of it ---------------------------------------------------------------------------------------------
    def half_prompt(self) -> dict[str, Any]:
        """The first half from the pool, the second computed: waiting for the load against computing beside it."""
        if "layerwise" not in LOAD_MODES:
            return {"layerwise_ratio": None}
        bench = self._bench
        self._note("half a prompt from the pool: layer by layer, and blocking")
        seconds: dict[str, list[float]] = {name: [] for name in ("layerwise", "blocking", "again")}
        with ExitStack() as stack:
            sides = {
                mode: stack.enter_context(self._side(pool_load=mode, pool_role="consumer"))
                for mode in ("layerwise", "blocking")
            }
            for number in range(bench.pairs + 1):
                rest = self._prompt(bench.prompt_tokens - len(self._half))
                for name in seconds if number % 2 else reversed(seconds):
                    answer = self._ask_half(sides["blocking" if name == "again" else name], rest)
                    if number:
                        seconds[name].append(answer.first_token_s)
        rounds = Rounds(seconds)
        return {
            "layerwise_ratio": rounds.ratio("layerwise", "blocking"),
            "layerwise_noise": rounds.noise("again", "blocking"),
            "layerwise_ms": 1000 * rounds.time("layerwise"),
            "blocking_ms": 1000 * rounds.time("blocking"),
            "half_cached_tokens": len(self._half),
        }

    def _ask_half(self, side: Side, rest: list[int]) -> Answer:
        return side.ask(self._half + rest, 1, cached=range(len(self._half), len(self._half) + 1))

    # ---- helpers ------------------------------------------------------------------------------------------------
    @contextmanager
    def _side(self, **settings: Any) -> Iterator[Side]:
        """An engine on the pool, unless the settings say otherwise, that has compiled what it needs."""
        settings = {"pool": self._url} | settings
        config = replace(self._config, **settings)
        self._note(f"random weights for an engine {_describe(config)}")
        with Engine(config) as engine:
            side = Side(engine)
            for num_tokens in (self._bench.max_batched_tokens, 2 * DEFAULT_CHUNK_TOKENS):
                side.ask(self._prompt(min(num_tokens, self._bench.prompt_tokens)), 4)
            side.drain()
            yield side

    def _prompt(self, num_tokens: int) -> list[int]:
        return random_prompt(self._rng, self._bench.config["vocab_size"], num_tokens)

    def _time(self, run: Callable[[], object]) -> float:
        self._wait()
        begin = time.perf_counter()
        run()
        self._wait()
        return time.perf_counter() - begin

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def settle(self) -> None:
        """Give the device's memory back before other engines ask how much there is."""
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _describe(config: EngineConfig) -> str:
    return "without a pool" if config.pool is None else f"with the pool ({config.pool_role}, {config.pool_load})"
