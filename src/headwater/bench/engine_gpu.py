"""Whole steps in `headwater bench engine`: how close they come to what the device itself can do.

Random weights of some model's shape through the whole engine, scheduling and sampling included. The limits are measured
in the same run: memory bandwidth by a large copy, arithmetic by a large bf16 product. Of a mixture of experts, a step
must read the experts that its rows really went to, which are counted; a prompt computes with the chosen ones.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headwater.bench.measure import Note, Rounds
from headwater.engine.config import EngineConfig
from headwater.engine.engine import Engine
from headwater.engine.params import SamplingParams
from headwater.kernels.dtypes import TORCH_DTYPES
from headwater.models.config import ModelConfig, SparseConfig

SLACK_STEPS = 128
"""How much the first request of a batch may have said, at most, when the last one begins."""
GPU_FIGURES = ("decode_b1_roofline", "decode_b64_roofline", "prefill_mfu")
MOE_FIGURES = tuple(f"moe_{name}" for name in GPU_FIGURES)
COUNTED_STEPS = 4
"""Steps after the measured ones in which the experts that were touched are counted."""


@dataclass(frozen=True)
class GpuBench:
    """What to run."""

    config: dict[str, Any]
    context_tokens: int = 1024
    """Around which the measured steps of decoding lie."""
    window_steps: int = 16
    pairs: int = 9
    prefill_tokens: int = 8192
    copy_bytes: int = 2 << 30
    matmul_size: int = 8192
    memory_ratio: float = 0.6
    """For the engine; the limits are measured beside it."""
    prefix: str = ""
    """Of the figures' names."""

    @property
    def steps(self) -> int:
        """Steps of decoding that are measured."""
        return self.window_steps * self.pairs


def step_bytes(
    config: ModelConfig, batch_size: int, context: float, itemsize: int, touched: float | None = None
) -> float:
    """Bytes that one step of decoding has to read: all weights but the embedding table, and the KV of the context. Of
    the experts, `touched` of each sparse layer."""
    kv = config.kv_spec("bfloat16").token_bytes / 2 * context * batch_size
    read = layer_params(config) + _head_params(config) + kv
    if config.sparse is not None and touched is not None:
        untouched = config.sparse.num_experts - touched
        read -= len(config.sparse.layers) * untouched * 3 * config.hidden_size * config.sparse.expert_size
    return read * itemsize


def prefill_flops(config: ModelConfig, num_tokens: int) -> float:
    """Arithmetic of one prompt: the layers for every token, causal attention, the output matrix for the last token."""
    shape: Any = config.attention
    widths = shape.qk_dim + shape.v_dim if hasattr(shape, "qk_dim") else 2 * shape.head_dim
    attention: float = 2 * config.num_layers * shape.num_heads * widths * num_tokens * (num_tokens + 1) / 2
    return 2 * active_params(config) * num_tokens + attention + 2 * _head_params(config)


def layer_params(config: ModelConfig) -> int:
    """Parameters of all layers, the few of norms and biases left out."""
    hidden = config.hidden_size
    attention = config.num_layers * config.attention.num_parameters(hidden)
    return attention + sum(config.mlp_of(layer).num_parameters(hidden) for layer in range(config.num_layers))


def active_params(config: ModelConfig) -> int:
    """Those of them that one token is multiplied with."""
    hidden = config.hidden_size
    mlps = (config.mlp_of(layer) for layer in range(config.num_layers))
    return config.num_layers * config.attention.num_parameters(hidden) + sum(
        mlp.num_active_parameters(hidden) if isinstance(mlp, SparseConfig) else mlp.num_parameters(hidden)
        for mlp in mlps
    )


def _head_params(config: ModelConfig) -> int:
    return config.vocab_size * config.hidden_size


def bench_gpu(
    bench: GpuBench,
    note: Note,
    device: str = "cuda",
    attempt: Callable[[str, Callable[[], dict[str, Any]]], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Measure decoding at batch 1 and 64, and a long prompt; None for all of them where there is no GPU.

    `device` is for tests, which have none: the same on a CPU, in float32. `attempt` is given each figure's name and
    measurement, and may leave it out or take its failure for a result.
    """
    if device == "cuda" and not torch.cuda.is_available():
        return dict.fromkeys(bench.prefix + name for name in GPU_FIGURES) | {
            "gpu": None,
            "gpu_reason": "no CUDA device found",
        }
    attempt = attempt or (lambda name, measure: measure())
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(bench.config))
        config = EngineConfig(
            model=folder,
            load_format="dummy",
            device=device,
            dtype="bfloat16" if device == "cuda" else "float32",
            max_num_seqs=64,
            memory_ratio=bench.memory_ratio,
            max_batched_tokens=bench.prefill_tokens,
            max_model_len=bench.prefill_tokens + 64,
        )
        note("making random weights on the GPU, and capturing graphs")
        begun = time.perf_counter()
        with Engine(config) as engine:
            gpu = _Gpu(bench, engine)
            name = torch.cuda.get_device_name() if device == "cuda" else device
            report: dict[str, Any] = {"gpu": name, "gpu_reason": None, f"{bench.prefix}gpu_pairs": bench.pairs}
            report[f"{bench.prefix}engine_start_s"] = time.perf_counter() - begun
            for batch_size in (1, 64):
                note(f"decoding, batch {batch_size}, around {bench.context_tokens} tokens of context")
                report |= attempt(f"{bench.prefix}decode_b{batch_size}_roofline", partial(gpu.decode, batch_size))
            note(f"a prompt of {bench.prefill_tokens} tokens")
            report |= attempt(f"{bench.prefix}prefill_mfu", gpu.prefill)
    return report


class _Gpu:
    """One engine and the limits of its device."""

    def __init__(self, bench: GpuBench, engine: Engine) -> None:
        self._bench = bench
        self._engine = engine
        self._model = engine.checkpoint.config
        self._device = engine.placement.device
        self._dtype = TORCH_DTYPES[engine.placement.dtype]
        self._rng = np.random.default_rng(5)
        self._number = 0
        self._running: list[str] = []

    def decode(self, batch_size: int) -> dict[str, Any]:
        """Windows of steps in turns with a large copy."""
        try:
            return self._named(self._decode(batch_size))
        finally:
            self._drain()

    def _decode(self, batch_size: int) -> dict[str, Any]:
        bench, engine = self._bench, self._engine
        prompt_tokens = max(1, bench.context_tokens - bench.steps // 2)
        waiting = self._fill(batch_size, prompt_tokens, bench.steps + SLACK_STEPS)
        num_generated = 0
        while waiting:
            outputs = engine.step()
            num_generated += sum(len(output.token_ids) for output in outputs)
            waiting -= {output.request_id for output in outputs}
        context = prompt_tokens + num_generated / batch_size + bench.steps / 2
        source = torch.empty(bench.copy_bytes, dtype=torch.uint8, device=self._device)
        target = torch.empty_like(source)

        def window() -> None:
            for _ in range(bench.window_steps):
                engine.step()

        rounds = _take_turns({"steps": window, "copy": lambda: target.copy_(source)}, bench.pairs)
        touched = self._touched()
        assert engine.stats().num_running == batch_size, "a request ended inside the measurement"
        bandwidth = 2 * bench.copy_bytes / rounds.time("copy")
        step_s = rounds.time("steps") / bench.window_steps
        needed = step_bytes(self._model, batch_size, context, self._dtype.itemsize, touched)
        report = {
            f"decode_b{batch_size}_ms": 1000 * step_s,
            f"decode_b{batch_size}_tokens_per_s": batch_size / step_s,
            f"decode_b{batch_size}_roofline": needed / bandwidth / step_s,
            f"decode_b{batch_size}_noise": rounds.spread("steps"),
            "gpu_copy_gbps": bandwidth / 1e9,
        }
        if touched is not None:
            report |= {f"decode_b{batch_size}_touched": touched, f"decode_b{batch_size}_gb": needed / 1e9}
        return report

    def _touched(self) -> float | None:
        """Experts that a layer's rows of one step went to, in the mean over the sparse layers of a few steps."""
        before = self._engine.expert_rows()
        if before is None:
            return None
        found = []
        for _ in range(COUNTED_STEPS):
            self._engine.step()
            _wait_for_device()  # the step that was launched is done
            after = self._engine.expert_rows()
            assert after is not None
            found.append(float((after != before).sum(dim=1).double().mean()))
            before = after
        return sum(found) / len(found)

    def _named(self, report: dict[str, Any]) -> dict[str, Any]:
        return {self._bench.prefix + name: value for name, value in report.items()}

    def prefill(self) -> dict[str, Any]:
        """A prompt until its first token, in turns with a large product."""
        return self._named(self._prefill())

    def _prefill(self) -> dict[str, Any]:
        bench, engine = self._bench, self._engine
        left = torch.randn(bench.matmul_size, bench.matmul_size, dtype=self._dtype, device=self._device)
        right = torch.randn_like(left)

        def prompt() -> None:
            self._fill(1, bench.prefill_tokens, 1)
            while engine.has_work:
                engine.step()

        repeat = 10
        rounds = _take_turns(
            {"prompt": prompt, "product": lambda: [torch.mm(left, right) for _ in range(repeat)]}, bench.pairs
        )
        rate = 2 * bench.matmul_size**3 * repeat / rounds.time("product")
        seconds = rounds.time("prompt")
        return {
            "gpu_prefill_ms": 1000 * seconds,
            "gpu_prefill_tokens_per_s": bench.prefill_tokens / seconds,
            "gpu_matmul_tflops": rate / 1e12,
            "prefill_mfu": prefill_flops(self._model, bench.prefill_tokens) / rate / seconds,
            "prefill_noise": rounds.spread("prompt"),
        }

    def _fill(self, batch_size: int, prompt_tokens: int, output_tokens: int) -> set[str]:
        """New requests, whose prompts nobody has seen before; their names."""
        params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
        self._engine.reset_prefix_cache()
        names = [f"bench-{self._number + i}" for i in range(batch_size)]
        self._number += batch_size
        for name in names:
            self._engine.add(name, self._rng.integers(0, self._model.vocab_size, prompt_tokens).tolist(), params)
        self._running = names
        return set(names)

    def _drain(self) -> None:
        for name in self._running:
            self._engine.abort(name)
        while self._engine.has_work:
            self._engine.step()


def _take_turns(runs: dict[str, Callable[[], object]], count: int) -> Rounds:
    """Once around without counting (but for steps, of which there are only so many), then in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for name, run in runs.items():
        if name != "steps":
            run()
    for _ in range(count):
        for name, run in runs.items():
            _wait_for_device()
            start = time.perf_counter()
            run()
            _wait_for_device()
            seconds[name].append(time.perf_counter() - start)
    return Rounds(seconds)


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
