"""`headwater bench ttft`: the time to the first token of a prompt that another server has computed.

On the CPU two servers' processes share a pool, with a real model; on a GPU a long prompt of an 8B-class model comes
from the pool, against the bus and against computing it. What could not be measured is null, and the report says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from headwater.bench.engine import QUICK as QUICK_ENGINE
from headwater.bench.measure import Note, machine
from headwater.bench.store import Bar
from headwater.bench.ttft_cpu import CPU_FIGURES, CpuBench, bench_cpu
from headwater.bench.ttft_gpu import GPU_FIGURES, LARGE_LLAMA_8B, GpuBench, bench_gpu
from headwater.bench.ttft_side import Unique
from headwater.errors import ModelError
from headwater.models.checkpoint import open_checkpoint


@dataclass(frozen=True)
class TtftBench:
    """What to measure. The model is the CPU's; the GPU has random weights of a larger shape."""

    model: str = "smollm2"
    cpu: CpuBench | None = field(default_factory=CpuBench)
    """None leaves this part out."""
    gpu: GpuBench | None = field(default_factory=lambda: GpuBench(LARGE_LLAMA_8B))
    is_quick: bool = False


assert QUICK_ENGINE.gpu is not None
QUICK = TtftBench(
    cpu=CpuBench(512, num_prompts=1, unique=Unique(2, 64, 4, pairs=2)),
    gpu=GpuBench(
        QUICK_ENGINE.gpu.config,
        prompt_tokens=2048,
        max_batched_tokens=512,
        pairs=2,
        decode_steps=4,
        unique=Unique(2, 300, 4, pairs=2),
        matmul_size=256,
    ),
    is_quick=True,
)
"""Everything once, in seconds: whether it runs, not how fast."""

BARS = (
    Bar("cpu_speedup_4k", True, 15, None),
    Bar("hit_vs_bus", False, 0.92, "hit_noise"),
    Bar("gpu_speedup_32k", True, 8, None),
    Bar("layerwise_ratio", False, 1.0, "layerwise_noise"),
    Bar("gpu_no_reuse_cost", False, 0.03, "gpu_no_reuse_noise"),
)


def run(bench: TtftBench, note: Note = lambda text: None, device: str = "cuda") -> dict[str, Any]:
    """Measure everything; plain data for JSON. Minutes on a CPU, two or three on an H200; `device` is for tests."""
    report: dict[str, Any] = {"bench": "ttft", "machine": machine() | {"torch": _version("torch")}}
    report |= dict.fromkeys((*CPU_FIGURES, *GPU_FIGURES))
    if bench.cpu is not None:
        try:
            checkpoint = open_checkpoint(bench.model)
        except ModelError as error:
            report["cpu_reason"] = str(error)
        else:
            report |= {"model": checkpoint.label, "cpu_reason": None}
            report |= bench_cpu(bench.cpu, checkpoint, note)
    if bench.gpu is not None:
        report |= bench_gpu(bench.gpu, note, device)
    report["bars"] = {bar.figure: {"limit": bar.limit, "verdict": _verdict(bar, report, bench)} for bar in BARS}
    return report


def _verdict(bar: Bar, report: Mapping[str, Any], bench: TtftBench) -> str:
    measured = report[bar.figure]
    if measured is None:
        return "not measured"
    if bench.is_quick:
        return "not judged: too small a run"
    if bar.noise is not None and abs(measured - bar.limit) <= report[bar.noise]:
        return "not judged: closer to the bar than the noise"
    return "met" if (measured >= bar.limit) == bar.at_least else "missed"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
