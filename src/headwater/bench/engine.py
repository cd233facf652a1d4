"""`headwater bench engine`: the engine against `transformers` on the CPU, and against the device's limits on a GPU.

One run measures both sides and reports the ratios, with the noise beside them. Without `transformers`, or without a
GPU, the figures that need it are null and the report says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from headwater.bench.engine_cpu import CpuBench, bench_cpu
from headwater.bench.engine_gpu import LLAMA_8B, GpuBench, bench_gpu
from headwater.bench.measure import Note, machine
from headwater.bench.store import Bar
from headwater.models.checkpoint import open_checkpoint


@dataclass(frozen=True)
class EngineBench:
    """What to measure. The model is the CPU's; the GPU has random weights of a larger shape."""

    model: str = "smollm2"
    cpu: CpuBench | None = field(default_factory=CpuBench)
    """None leaves this part out."""
    gpu: GpuBench | None = field(default_factory=lambda: GpuBench(LLAMA_8B))
    is_quick: bool = False


_SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8}
_SMALL |= {"num_key_value_heads": 4, "head_dim": 16, "vocab_size": 512}
QUICK = EngineBench(
    cpu=CpuBench(4, (16, 48), (4, 8), batch_sizes=(2, 4), prefill_tokens=64, tput_pairs=1, prefill_pairs=2),
    gpu=GpuBench(
        LLAMA_8B | _SMALL,
        context_tokens=64,
        window_steps=2,
        pairs=2,
        prefill_tokens=256,
        copy_bytes=16 << 20,
        matmul_size=512,
    ),
    is_quick=True,
)
"""Everything once, in seconds: whether it runs, not how fast."""

BARS = (
    Bar("cpu_tput_ratio", True, 1.3, "cpu_tput_noise"),
    Bar("cpu_prefill_ratio", True, 0.95, "cpu_prefill_noise"),
    Bar("decode_b1_roofline", True, 0.65, "decode_b1_noise"),
    Bar("decode_b64_roofline", True, 0.55, "decode_b64_noise"),
    Bar("prefill_mfu", True, 0.5, "prefill_noise"),
)


def run(bench: EngineBench, note: Note = lambda text: None) -> dict[str, Any]:
    """Measure everything; plain data for JSON. Takes about a quarter of an hour at full size on two cores."""
    report: dict[str, Any] = {"bench": "engine", "machine": machine() | _versions()}
    report |= dict.fromkeys(bar.figure for bar in BARS)
    if bench.cpu is not None:
        checkpoint = open_checkpoint(bench.model)
        report["model"] = checkpoint.label
        report |= bench_cpu(bench.cpu, checkpoint, note)
    if bench.gpu is not None:
        report |= bench_gpu(bench.gpu, note)
    report["bars"] = {bar.figure: {"limit": bar.limit, "verdict": _verdict(bar, report, bench)} for bar in BARS}
    return report


def _verdict(bar: Bar, report: Mapping[str, Any], bench: EngineBench) -> str:
    if report[bar.figure] is None:
        return "not measured"
    return "not judged: too small a run" if bench.is_quick else bar.judge(report)


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in ("torch", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found
