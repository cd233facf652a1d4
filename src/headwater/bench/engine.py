"""`headwater bench engine`: the engine against `transformers` on the CPU, and against the device's limits on a GPU.

One run measures both sides and reports the ratios, with the noise beside them. Without `transformers`, or without a
GPU, the figures that need it are null and the report says why. Each GPU figure stands alone: one that fails is null,
with the reason beside it, and the others are measured.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from headwater.bench.engine_cpu import CpuBench, bench_cpu
from headwater.bench.engine_drafts import DRAFTS_FIGURES, DraftsBench, bench_drafts
from headwater.bench.engine_gpu import GPU_FIGURES, MOE_FIGURES, GpuBench, bench_gpu
from headwater.bench.engine_shapes import LLAMA_8B, SHAPES
from headwater.bench.measure import Note, machine
from headwater.bench.store import Bar
from headwater.bench.transfer_gpu import TransferBench
from headwater.bench.transfer_latent import LATENT_TRANSFER, TRANSFER_FIGURES, bench_latent_transfer
from headwater.errors import InvalidArgumentError
from headwater.models.checkpoint import open_checkpoint

EXPERTS_SHAPE = "qwen3-30b-a3b"
GROUPED_FIGURES = ("grouped_gemm_ratio", "grouped_skew")
DEVICE_FIGURES = (
    *GROUPED_FIGURES,
    "moe_decode_bytes",
    "mla_decode_16_bandwidth",
    "mla_decode_128_matmul",
    *TRANSFER_FIGURES,
    *GPU_FIGURES,
    *MOE_FIGURES,
)
ONLY_FIGURES = (*DRAFTS_FIGURES, *DEVICE_FIGURES)
"""Figures that can be measured alone."""
Figures = dict[str, Any]


@dataclass(frozen=True)
class KernelSizes:
    """Overrides of the sizes that `engine_experts` and `engine_latent` have by default."""

    experts: Mapping[str, Any] = field(default_factory=dict)
    latent: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineBench:
    """What to measure. The model is the CPU's; the GPU has random weights of larger shapes."""

    model: str = "smollm2"
    cpu: CpuBench | None = field(default_factory=CpuBench)
    """None leaves this part out."""
    drafts: DraftsBench | None = field(default_factory=DraftsBench)
    """None leaves this part out, which runs on the CPU."""
    gpu: GpuBench | None = field(default_factory=lambda: GpuBench(LLAMA_8B))
    """None leaves out everything that needs a GPU."""
    moe: GpuBench = field(default_factory=lambda: moe_bench(EXPERTS_SHAPE))
    kernels: KernelSizes = KernelSizes()
    transfer: TransferBench = LATENT_TRANSFER
    only: frozenset[str] | None = None
    """The figures to measure, of GPUs and of drafts; None: all of them."""
    model_shape: str | None = None
    """Only whole steps of this shape, of all that a GPU is measured with."""
    is_quick: bool = False

    def __post_init__(self) -> None:
        for name in sorted(self.only or ()):
            if name not in ONLY_FIGURES:
                raise InvalidArgumentError(f"{name!r} is no such figure; known are {', '.join(ONLY_FIGURES)}")
        if self.model_shape is not None and self.model_shape not in SHAPES:
            raise InvalidArgumentError(f"{self.model_shape!r} is not a known shape; known are {', '.join(SHAPES)}")


def moe_bench(shape: str) -> GpuBench:
    """Whole steps of a mixture of experts; most of the device is for its weights and 64 requests of 4,096 tokens."""
    return GpuBench(SHAPES[shape], context_tokens=4096, memory_ratio=0.9, prefix="moe_")


_SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8}
_SMALL |= {"num_key_value_heads": 4, "head_dim": 16, "vocab_size": 512}
_SMALL_MOE = _SMALL | {"moe_intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 4}
_SHORT: dict[str, Any] = {
    "context_tokens": 64,
    "window_steps": 2,
    "pairs": 2,
    "prefill_tokens": 256,
    "copy_bytes": 16 << 20,
    "matmul_size": 512,
}
_SMALL_EXPERTS = {"num_experts": 4, "top_k": 2, "hidden": 32, "inner": 16, "prefill_rows": 40, "decode_rows": 20}
_SMALL_LATENT = {"num_requests": 2, "context_tokens": 80, "latent_dim": 32, "rope_dim": 16, "matmul_size": 64}
_FEW = {"pairs": 2, "repeat": 1, "read_bytes": 1 << 20}
QUICK = EngineBench(
    cpu=CpuBench(4, (16, 48), (4, 8), batch_sizes=(2, 4), prefill_tokens=64, tput_pairs=1, prefill_pairs=2),
    drafts=DraftsBench(output_tokens=24, pairs=1),
    gpu=GpuBench(LLAMA_8B | _SMALL, **_SHORT),
    moe=GpuBench(SHAPES[EXPERTS_SHAPE] | _SMALL_MOE, prefix="moe_", **_SHORT),
    kernels=KernelSizes(_SMALL_EXPERTS | _FEW, _SMALL_LATENT | _FEW),
    transfer=TransferBench(num_layers=2, latent=(32, 16), num_tokens=2048, staging_bytes=1 << 20, pairs=2),
    is_quick=True,
)
"""Everything once, in seconds: whether it runs, not how fast."""

BARS = (
    Bar("cpu_tput_ratio", True, 1.3, "cpu_tput_noise"),
    Bar("cpu_prefill_ratio", True, 0.95, "cpu_prefill_noise"),
    Bar("ngram_quote_ratio", True, 2.0, "ngram_quote_noise"),
    Bar("ngram_story_ratio", True, 0.97, "ngram_story_noise"),
    Bar("decode_b1_roofline", True, 0.65, "decode_b1_noise"),
    Bar("decode_b64_roofline", True, 0.55, "decode_b64_noise"),
    Bar("prefill_mfu", True, 0.5, "prefill_noise"),
    Bar("grouped_gemm_ratio", True, 0.95, "grouped_noise"),
    Bar("grouped_skew", False, 1.2, "grouped_skew_noise"),
    Bar("moe_decode_bytes", True, 0.7, "moe_decode_bytes_noise"),
    Bar("mla_decode_16_bandwidth", True, 0.75, "mla_decode_16_bandwidth_noise"),
    Bar("mla_decode_128_matmul", True, 0.35, "mla_decode_128_matmul_noise"),
    Bar("moe_decode_b1_roofline", True, 0.45, "moe_decode_b1_noise"),
    Bar("moe_decode_b64_roofline", True, 0.6, "moe_decode_b64_noise"),
    Bar("moe_prefill_mfu", True, 0.4, "moe_prefill_noise"),
    Bar("mla_save_ratio", True, 0.9, "mla_save_noise"),
    Bar("mla_load_ratio", True, 0.9, "mla_load_noise"),
)


# ---- the parts of a GPU's report --------------------------------------------------------------------------------
def _grouped(bench: EngineBench, run: _Attempts) -> Figures:
    from headwater.bench import engine_experts as experts

    return experts.bench_grouped(experts.ExpertsBench(**bench.kernels.experts), run.note, run.device)


def _decode_experts(bench: EngineBench, run: _Attempts) -> Figures:
    from headwater.bench import engine_experts as experts

    return experts.bench_decode_experts(experts.ExpertsBench(**bench.kernels.experts), run.note, run.device)


def _latent(num_heads: int, bench: EngineBench, run: _Attempts) -> Figures:
    from headwater.bench import engine_latent as latent

    return latent.bench_latent_decode(latent.LatentBench(**bench.kernels.latent), num_heads, run.note, run.device)


def _transfer(bench: EngineBench, run: _Attempts) -> Figures:
    return bench_latent_transfer(bench.transfer, run.note, run.device)


def _dense_engine(bench: EngineBench, run: _Attempts) -> Figures:
    assert bench.gpu is not None
    return bench_gpu(bench.gpu, run.note, run.device.type, run.attempt)


def _moe_engine(bench: EngineBench, run: _Attempts) -> Figures:
    return bench_gpu(bench.moe, run.note, run.device.type, run.attempt)


PARTS: tuple[tuple[Callable[[EngineBench, _Attempts], Figures], tuple[str, ...]], ...] = (
    (_grouped, GROUPED_FIGURES),
    (_decode_experts, ("moe_decode_bytes",)),
    (partial(_latent, 16), ("mla_decode_16_bandwidth",)),
    (partial(_latent, 128), ("mla_decode_128_matmul",)),
    (_transfer, TRANSFER_FIGURES),
    (_dense_engine, GPU_FIGURES),
    (_moe_engine, MOE_FIGURES),
)
"""Each with the figures that it gives. Kernels first: they take seconds, and Triton is imported only for them."""


class _Attempts:
    """Runs measurements one by one, says what came out, and takes a failure for a result."""

    def __init__(self, only: frozenset[str] | None, note: Note, device: torch.device) -> None:
        self.note, self.device = note, device
        self._only = only
        self._told: set[str] = set()

    def wants(self, figures: Iterable[str]) -> bool:
        """Whether any of them was asked for."""
        return self._only is None or any(figure in self._only for figure in figures)

    def attempt(self, figure: str, measure: Callable[[], Figures]) -> Figures:
        """One figure out of several that a part gives."""
        return self.run((figure,), measure) if self.wants((figure,)) else {}

    def run(self, figures: tuple[str, ...], measure: Callable[[], Figures]) -> Figures:
        """What it measured; for those of the figures that are missing then, why."""
        begun = time.perf_counter()
        try:
            found = measure()
        except Exception as error:  # whatever it is, it is this figure's result
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
            found = dict.fromkeys(figures) | {f"{figure}_reason": reason for figure in figures}
        finally:
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        for name in figures:
            if name in found and name not in self._told:
                self._told.add(name)
                value = found[name]
                told = found.get(f"{name}_reason") if value is None else f"{value:.4g}"
                self.note(f"{name}: {told} (after {time.perf_counter() - begun:.0f} s)")
        return found


def run(bench: EngineBench, note: Note = lambda text: None, device: str = "cuda") -> dict[str, Any]:
    """Measure everything; plain data for JSON. Takes about a quarter of an hour at full size on two cores, and four
    minutes on an H200. `device` is for tests, which run the GPU's part on a CPU."""
    report: dict[str, Any] = {"bench": "engine", "machine": machine() | _versions()}
    report |= dict.fromkeys(bar.figure for bar in BARS)
    if bench.cpu is not None or bench.drafts is not None:
        checkpoint = open_checkpoint(bench.model)
        report["model"] = checkpoint.label
        report |= bench_cpu(bench.cpu, checkpoint, note) if bench.cpu is not None else {}
        report |= bench_drafts(bench.drafts, checkpoint, note) if bench.drafts is not None else {}
    if bench.gpu is not None:
        report |= _bench_device(bench, note, device)
    report["bars"] = {bar.figure: {"limit": bar.limit, "verdict": _verdict(bar, report, bench)} for bar in BARS}
    return report


def _bench_device(bench: EngineBench, note: Note, device: str) -> Figures:
    if device == "cuda" and not torch.cuda.is_available():
        return {"gpu": None, "gpu_reason": "no CUDA device found"}
    name = torch.cuda.get_device_name() if device == "cuda" else device
    report: Figures = {"gpu": name, "gpu_reason": None}
    attempts = _Attempts(bench.only, note, torch.device(device))
    if bench.model_shape is not None:
        report["model_shape"] = bench.model_shape
        return report | _bench_shape(bench, bench.model_shape, attempts)
    for measure, figures in PARTS:
        if attempts.wants(figures):
            report |= attempts.run(figures, partial(measure, bench, attempts))
    return report


def _bench_shape(bench: EngineBench, shape: str, attempts: _Attempts) -> Figures:
    """Whole steps of one shape, under the names of the dense or of the sparse figures."""
    is_sparse = any("experts" in key for key in SHAPES[shape])
    plan = moe_bench(shape) if is_sparse else GpuBench(SHAPES[shape])
    figures = MOE_FIGURES if is_sparse else GPU_FIGURES
    return attempts.run(figures, partial(bench_gpu, plan, attempts.note, attempts.device.type, attempts.attempt))


def _verdict(bar: Bar, report: Mapping[str, Any], bench: EngineBench) -> str:
    if report[bar.figure] is None:
        return "not measured"
    if bench.model_shape not in (None, "llama-3-8b", EXPERTS_SHAPE) and bar.figure in GPU_FIGURES + MOE_FIGURES:
        return "not judged: another shape"
    return "not judged: too small a run" if bench.is_quick else bar.judge(report)


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in ("torch", "triton", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found
