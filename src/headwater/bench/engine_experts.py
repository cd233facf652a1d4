"""Experts alone, in `headwater bench engine`: grouped products against torch's, and a layer's decode against reading.

    grouped_gemm_ratio   both products with the activation, rows of a long prompt, of the best peer's time
    grouped_skew         the same where the hottest expert has eight times the mean, of its own even time
    moe_decode_bytes     a step of decodes: the touched experts' bytes at read bandwidth, of its time

Every result is checked before it is timed. The shape is Qwen3-30B-A3B's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headwater.bench.device_clock import DeviceClock, check_close
from headwater.bench.measure import Note, take_turns
from headwater.kernels.activation import silu_and_mul
from headwater.kernels.limits_triton import device_limits
from headwater.kernels.moe_reference import run_experts_grouped, run_experts_torch
from headwater.kernels.moe_triton import experts_config, grouped_down, grouped_gate_up, run_experts_triton, sort_pairs


@dataclass(frozen=True)
class ExpertsBench:
    """What to run."""

    num_experts: int = 128
    top_k: int = 8
    hidden: int = 2048
    inner: int = 768
    prefill_rows: int = 8192
    decode_rows: int = 64
    layers: int = 2
    """Of weights, in turn: none is found in the cache."""
    zipf: float = 0.75
    """The exponent of the skewed choice: the hottest expert has about eight times the mean."""
    pairs: int = 9
    repeat: int = 10
    read_bytes: int = 2 << 30


class _Layer:
    """Random experts."""

    def __init__(self, bench: ExpertsBench, device: torch.device, seed: int) -> None:
        self.bench, self.device = bench, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        torch.manual_seed(seed)
        self.gate_up = self._matrices(2 * bench.inner, bench.hidden)
        self.down = self._matrices(bench.hidden, bench.inner)

    def _matrices(self, rows: int, columns: int) -> Tensor:
        made = torch.empty(self.bench.num_experts, rows, columns, dtype=self.dtype, device=self.device)
        bound = (3.0 / columns) ** 0.5
        return made.uniform_(-bound, bound)

    def rows(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """Inputs and the weights of their choices."""
        x = torch.randn(num_rows, self.bench.hidden, device=self.device).to(self.dtype)
        return x, torch.rand(num_rows, self.bench.top_k, device=self.device) + 0.1

    def choose(self, num_rows: int, exponent: float = 0.0) -> Tensor:
        """int32 [rows, k] different experts, the lower ones more often."""
        odds = 1.0 / torch.arange(1, self.bench.num_experts + 1) ** exponent
        return torch.multinomial(odds.expand(num_rows, -1), self.bench.top_k).int().to(self.device)


@dataclass(frozen=True)
class _Sides:
    """The same work by us and by others, and how far the choice is from even."""

    runs: dict[str, Callable[[], Tensor]]
    hottest: float


def bench_grouped(bench: ExpertsBench, note: Note, device: torch.device) -> dict[str, Any]:
    """The products of a long prompt. A side that cannot run is left out, and the report says why."""
    layer = _Layer(bench, device, seed=0)
    even, skewed = _products(layer, 0.0), _products(layer, bench.zipf)
    note(f"experts, {bench.prefill_rows:,} rows: even, and with the hottest at {skewed.hottest:.1f} times the mean")
    whole, reasons = _whole_runs(layer)
    runs = {f"{name}_even": run for name, run in even.runs.items()}
    runs |= {f"{name}_skewed": run for name, run in skewed.runs.items()} | whole | {"dense": _dense(layer)}
    clock = DeviceClock(device)
    rounds = take_turns({name: clock.repeated(run, bench.repeat) for name, run in runs.items()}, bench.pairs)
    ratios = {"torch": rounds.ratio("torch_even", "ours_even")}
    if "vllm" in whole:
        ratios["vllm"] = rounds.ratio("vllm", "ours_whole")
    peer = min(ratios, key=lambda name: ratios[name])
    flops = 6 * bench.prefill_rows * bench.top_k * bench.hidden * bench.inner
    return {
        "grouped_gemm_ratio": ratios[peer],
        "grouped_peer": peer,
        **{f"grouped_{name}_ratio": ratio for name, ratio in ratios.items()},
        "grouped_torch_skewed_ratio": rounds.ratio("torch_skewed", "ours_skewed"),
        "grouped_dense_ratio": rounds.ratio("dense", "ours_even"),
        "grouped_noise": max(rounds.spread("ours_even"), rounds.spread("torch_even")),
        "grouped_skew": rounds.ratio("ours_skewed", "ours_even"),
        "grouped_skew_noise": max(rounds.spread("ours_even"), rounds.spread("ours_skewed")),
        "grouped_hottest": skewed.hottest,
        "grouped_ms": 1000 * rounds.time("ours_even"),
        "grouped_whole_ms": 1000 * rounds.time("ours_whole"),
        "grouped_tflops": flops / rounds.time("ours_even") / 1e12,
        **reasons,
    }


def _products(layer: _Layer, exponent: float) -> _Sides:
    """Both products with the activation, for pairs that are sorted already."""
    bench, gate_up, down = layer.bench, layer.gate_up, layer.down
    x, weights = layer.rows(bench.prefill_rows)
    ids = layer.choose(bench.prefill_rows, exponent)
    shared = device_limits(layer.device).shared_bytes
    config = experts_config(layer.dtype, ids.numel(), bench.num_experts, shared)
    pairs = sort_pairs(ids, bench.num_experts, config.block_rows)
    order, ends = pairs.order.long(), pairs.counts.cumsum(0).int()
    sorted_x = x[order // bench.top_k]

    def ours() -> Tensor:
        inner = grouped_gate_up(x, pairs, gate_up, config.gate_up)
        return grouped_down(inner, pairs, weights, down, config.down)

    def torchs() -> Tensor:
        inner = silu_and_mul(torch._grouped_mm(sorted_x, gate_up.transpose(1, 2), offs=ends))
        return torch._grouped_mm(inner, down.transpose(1, 2), offs=ends)

    expected = torch.empty(ids.numel(), bench.hidden, dtype=layer.dtype, device=layer.device)
    expected[order] = torchs()
    check_close("the grouped products", ours(), expected * weights.view(-1, 1))
    counts = pairs.counts.float()
    return _Sides({"ours": ours, "torch": torchs}, float(counts.max() / counts.mean()))


def _whole_runs(layer: _Layer) -> tuple[dict[str, Callable[[], Tensor]], dict[str, str]]:
    """Sorting and summing included: us, and vLLM where it is installed; and why not, where it is not."""
    bench, gate_up, down = layer.bench, layer.gate_up, layer.down
    x, weights = layer.rows(bench.prefill_rows)
    ids = layer.choose(bench.prefill_rows)

    def ours() -> Tensor:
        return run_experts_triton(x, ids, weights, gate_up, down)

    runs: dict[str, Callable[[], Tensor]] = {"ours_whole": ours}
    try:
        from vllm.model_executor.layers.fused_moe import fused_moe

        vllms = getattr(fused_moe, "fused_experts_op", None) or fused_moe.fused_experts
        check_close("vLLM's fused experts", vllms(x, gate_up, down, weights, ids), ours())
    except Exception as error:  # another project's code may fail in any way, and is only a peer
        return runs, {"grouped_vllm_reason": f"{type(error).__name__}: {str(error)[:200]}"}
    return runs | {"vllm": lambda: vllms(x, gate_up, down, weights, ids)}, {}


def _dense(layer: _Layer) -> Callable[[], Tensor]:
    """As many rows, the same number for every expert, as batched products: what the library reaches without groups."""
    bench = layer.bench
    per_expert = max(1, bench.prefill_rows * bench.top_k // bench.num_experts)
    x = torch.randn(bench.num_experts, per_expert, bench.hidden, device=layer.device).to(layer.dtype)

    def run() -> Tensor:
        inner = torch.bmm(x, layer.gate_up.transpose(1, 2)).flatten(0, 1)
        return torch.bmm(silu_and_mul(inner).unflatten(0, (bench.num_experts, -1)), layer.down.transpose(1, 2))

    return run


def bench_decode_experts(bench: ExpertsBench, note: Note, device: torch.device) -> dict[str, Any]:
    """The experts of a layer for a step of decodes, as graphs, in turns with reading; and of one row, which may fail
    alone."""
    layers = [_Layer(bench, device, seed=i) for i in range(bench.layers)]
    report = _decode_rows(layers, bench.decode_rows, "moe_decode", note)
    try:
        report |= _decode_rows(layers, 1, "moe_decode_one_row", note)
    except Exception as error:  # no bar is set for one row
        report["moe_decode_one_row_reason"] = f"{type(error).__name__}: {str(error)[:200]}"
    return report


def _decode_rows(layers: list[_Layer], num_rows: int, name: str, note: Note) -> dict[str, Any]:
    bench, device = layers[0].bench, layers[0].device
    clock = DeviceClock(device)
    source = torch.ones(bench.read_bytes // 4, dtype=torch.float32, device=device)
    x, weights = layers[0].rows(num_rows)
    picks = [(layer, layer.choose(num_rows)) for layer in layers]
    touched = sum(len(ids.unique()) for _, ids in picks) / len(picks)
    num_bytes = touched * 3 * bench.hidden * bench.inner * layers[0].dtype.itemsize
    note(f"experts, {num_rows} rows of decodes, {touched:.1f} of {bench.num_experts} touched")

    def run_with(run: Callable[..., Tensor]) -> list[Tensor]:
        return [run(x, ids, weights, layer.gate_up, layer.down) for layer, ids in picks]

    for got, expected in zip(run_with(run_experts_triton), run_with(run_experts_torch), strict=True):
        check_close("the experts of decodes", got, expected)
    runs = {
        "ours": clock.captured(partial(run_with, run_experts_triton), bench.repeat),
        "torch": clock.repeated(partial(run_with, run_experts_grouped), 2),  # with its launches: not as a graph
        "read": clock.repeated(source.sum, 4),
    }
    rounds = take_turns(runs, bench.pairs)
    bandwidth = source.nbytes / rounds.time("read")
    layer_s = rounds.time("ours") / len(picks)
    return {
        f"{name}_bytes": num_bytes / bandwidth / layer_s,
        f"{name}_bytes_noise": max(rounds.spread("ours"), rounds.spread("read")),
        f"{name}_layer_us": 1e6 * layer_s,
        f"{name}_torch_layer_us": 1e6 * rounds.time("torch") / len(picks),
        f"{name}_touched": touched,
        "read_gbps": bandwidth / 1e9,
    }
