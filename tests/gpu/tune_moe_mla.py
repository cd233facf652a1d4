"""Measures experts and latent attention on this machine's GPU against what it can do, in one run of under 3 minutes.

Run by hand: `PYTHONPATH=src:tests python3 tests/gpu/tune_moe_mla.py [limits] [latent] [experts]`. Read bandwidth,
the matrix product and `torch._grouped_mm` are measured beside, and every config is checked before it is timed. Prints
tables, then the best configs as lines to paste into `moe_triton` and `triton_latent`, and as its last line one JSON
object with the ratios of the default configs. A part that fails is reported, and the others go on.
"""

# ruff: noqa: B023 - what is measured is called before the loop goes on

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import astuple
from functools import cache, partial

import torch
from triton.testing import do_bench, do_bench_cudagraph

from headwater.kernels import moe_triton
from headwater.kernels.activation import silu_and_mul
from headwater.kernels.attention import triton_latent
from headwater.kernels.attention.reference import ReferenceAttention
from headwater.kernels.attention.triton_backend import TritonAttention
from headwater.kernels.attention.triton_tiles import TileConfig
from headwater.kernels.limits_triton import device_limits
from headwater.kernels.moe_reference import run_experts_grouped
from headwater.kernels.moe_triton import (
    ExpertsConfig,
    GemmConfig,
    experts_config,
    grouped_down,
    grouped_gate_up,
    run_experts_triton,
    sort_pairs,
)

from kernel_cases import AttentionShape, LatentCase, relative_error

DEVICE, DTYPE = "cuda", torch.bfloat16
SHARED_BYTES = device_limits(torch.device(DEVICE)).shared_bytes
EXPERTS, TOP_K, HIDDEN, INNER = 128, 8, 2048, 768
"""Of Qwen3-30B-A3B."""
BUDGET_S = 170.0
STARTED = time.monotonic()
RATIOS: dict[str, float] = {}
BEST: dict[str, tuple[float, object]] = {}
"""Milliseconds and config, by what it is for."""

MANY_ROWS = {
    64: [GemmConfig(64, 64, 4, 4), GemmConfig(128, 64, 4, 4)],
    128: [
        GemmConfig(64, 64, 4, 4),
        GemmConfig(128, 64, 8, 3),
        GemmConfig(128, 64, 8, 4),
        GemmConfig(128, 128, 8, 2),
        GemmConfig(256, 64, 8, 3),
        GemmConfig(256, 64, 8, 4),
    ],
}
"""By the rows of a tile. A product's config is tried beside the other's default."""
FEW_ROWS = [
    GemmConfig(cols, k, 4, stages) for cols in (32, 64) for k, stages in ((128, 3), (128, 5), (256, 3), (64, 6))
]
PAIRS = [GemmConfig(cols, k, 4, stages) for cols in (4, 8, 16) for k, stages in ((256, 4), (512, 1), (512, 3))]
LATENT = {
    16: [
        TileConfig(16, 32, 4, 2),
        TileConfig(16, 32, 4, 3),
        TileConfig(16, 32, 4, 6),
        TileConfig(16, 64, 4, 5),
        TileConfig(16, 64, 4, 2),
        TileConfig(16, 64, 8, 2),
        TileConfig(16, 64, 8, 3),
    ],
    128: [
        TileConfig(64, 32, 8, 2),
        TileConfig(64, 64, 8, 1),
        TileConfig(64, 64, 8, 2),
        TileConfig(64, 64, 8, 3),
        TileConfig(64, 64, 16, 2),
        TileConfig(64, 128, 8, 1),
        TileConfig(128, 16, 8, 2),
        TileConfig(128, 32, 16, 1),
    ],
}


def milliseconds(function: Callable[[], object]) -> float:
    return float(do_bench(function, warmup=10, rep=60, return_mode="median"))


def graph_milliseconds(function: Callable[[], object]) -> float:
    return float(do_bench_cudagraph(function, rep=20, return_mode="median"))


@cache
def read_gbps() -> float:
    """Of a sum over 2 GiB."""
    source = torch.ones(2**29, device=DEVICE, dtype=torch.float32)
    return source.nbytes / milliseconds(source.sum) / 1e6


@cache
def matmul_tflops() -> float:
    a, b = torch.randn(2, 8192, 8192, device=DEVICE).to(DTYPE).unbind(0)
    return 2 * 8192**3 / milliseconds(lambda: a @ b) / 1e9


def limits(tune: bool) -> None:
    print(f"read {read_gbps():.0f} GB/s, matrix product {matmul_tflops():.0f} TFLOP/s")


def timed(label: object, function: Callable[[], torch.Tensor], want: torch.Tensor, clock=milliseconds) -> float | None:
    """Time, or None (and why) where a config does not compile, is wrong, or the time is up."""
    if time.monotonic() - STARTED > BUDGET_S:
        return None
    try:
        error = relative_error(function(), want)
    except Exception as problem:  # a config that needs too much shared memory is a result, not a failure
        print(f"    {label}: {type(problem).__name__}: {str(problem)[:80]}")
        return None
    if not error < 1e-2:
        print(f"    {label}: WRONG, error {error:.2e}")
        return None
    return clock(function)


def best(name: str, results: dict[object, float | None], show: Callable[[float], str], default_ms=None) -> None:
    """Show the best, and keep the first of them if it is better than `default_ms`."""
    known = sorted(((ms, label) for label, ms in results.items() if ms is not None), key=lambda item: item[0])
    for ms, label in known[:4]:
        print(f"    {label}: {show(ms)}")
    if known and (default_ms is None or known[0][0] < default_ms):
        BEST[name] = known[0]


def paste() -> None:
    """The tables of both modules, with what was found in place of their defaults."""

    def found(name: str, default: object) -> str:
        _, config = BEST.get(name, (0.0, default))
        config = config[0] if isinstance(config, tuple) else config
        return f"{type(config).__name__}({', '.join(str(value) for value in astuple(config))})"

    def both(name: str, config: ExpertsConfig) -> str:
        parts = (found(f"{name} {part}", getattr(config, part)) for part in ("gate_up", "down"))
        return f"ExpertsConfig({config.block_rows}, {', '.join(parts)})"

    print("\n# moe_triton.py")
    print(f"_PAIR_CONFIG = {both('1', moe_triton._PAIR_CONFIG)}")
    print("_HALF_CONFIGS = {")
    for rows, config in moe_triton._HALF_CONFIGS.items():
        print(f"    {rows}: {both(str(rows), config)},")
    print("}\n# triton_latent.py, the first of each row of _HALF_CONFIGS")
    for heads, rows in ((16, 16), (128, 64)):
        _, label = BEST.get(f"latent {heads}", (0.0, None))
        note = "" if label is None else f"  # {label[1]}"
        print(f"    {rows}: {found(f'latent {heads}', triton_latent._HALF_CONFIGS[rows][0])},{note}")


def choose(rows: int, *, zipf: bool) -> torch.Tensor:
    """ids int32 [rows, k]; with zipf, the hottest expert has about eight times the mean."""
    odds = torch.ones(EXPERTS)
    if zipf:
        odds = 1.0 / torch.arange(1, EXPERTS + 1) ** 0.75
    return torch.multinomial(odds.expand(rows, -1), TOP_K).int().to(DEVICE)


def experts(tune: bool) -> None:
    torch.manual_seed(0)
    gate_up = (torch.randn(EXPERTS, 2 * INNER, HIDDEN, device=DEVICE) * HIDDEN**-0.5).to(DTYPE)
    down = (torch.randn(EXPERTS, HIDDEN, INNER, device=DEVICE) * INNER**-0.5).to(DTYPE)
    many_rows(gate_up, down, tune)
    decode_rows(gate_up, down, 64, FEW_ROWS if tune else [], "moe_decode_bytes")
    decode_rows(gate_up, down, 1, PAIRS if tune else [], "moe_decode_b1_bytes")


def many_rows(gate_up: torch.Tensor, down: torch.Tensor, tune: bool) -> None:
    """Prefill of 8,192 rows: both products with the activation, against torch's grouped product, even and skewed."""
    rows = 8192
    x = torch.randn(rows, HIDDEN, device=DEVICE).to(DTYPE)
    weights = torch.rand(rows, TOP_K, device=DEVICE)
    flop = 6 * rows * TOP_K * HIDDEN * INNER
    config = experts_config(DTYPE, rows * TOP_K, EXPERTS, SHARED_BYTES)
    times = {}
    for zipf in (False, True):
        ids = choose(rows, zipf=zipf)
        pairs = sort_pairs(ids, EXPERTS, config.block_rows)
        counts = pairs.counts.float()
        order = pairs.order.long()
        ends = pairs.counts.cumsum(0).int()
        sorted_x = x[order // TOP_K]

        def rival() -> torch.Tensor:
            inner = silu_and_mul(torch._grouped_mm(sorted_x, gate_up.transpose(1, 2), offs=ends))
            return torch._grouped_mm(inner, down.transpose(1, 2), offs=ends)

        def own(config: ExpertsConfig = config) -> torch.Tensor:
            inner = grouped_gate_up(x, pairs, gate_up, config.gate_up)
            return grouped_down(inner, pairs, weights, down, config.down)

        want = torch.empty(rows * TOP_K, HIDDEN, device=DEVICE, dtype=DTYPE)
        want[order] = rival()
        want *= weights.view(-1, 1)
        rival_ms, own_ms = milliseconds(rival), timed(config, own, want)
        whole_ms = milliseconds(lambda: run_experts_triton(x, ids, weights, gate_up, down))
        sort_ms = milliseconds(lambda: sort_pairs(ids, EXPERTS, config.block_rows))
        name = "zipf" if zipf else "even"
        print(f"8,192 rows, {name}, hottest {float(counts.max() / counts.mean()):.1f} × the mean")
        print(f"  torch {rival_ms:.3f} ms, {flop / rival_ms / 1e9:.0f} TFLOP/s")
        print(f"  ours {own_ms or 0:.3f} ms; with the sort ({sort_ms:.3f} ms) and the sum {whole_ms:.3f} ms")
        if own_ms is not None:
            times[name] = own_ms
            RATIOS[f"grouped_gemm_ratio_{name}"] = rival_ms / own_ms
        if tune and not zipf:
            inner = grouped_gate_up(x, pairs, gate_up, config.gate_up)
            for block_rows, configs in MANY_ROWS.items():
                tiles = sort_pairs(ids, EXPERTS, block_rows)
                products = {
                    "gate_up": (partial(grouped_gate_up, x, tiles, gate_up), inner, flop * 2 / 3),
                    "down": (partial(grouped_down, inner, tiles, weights, down), want, flop / 3),
                }
                for product, (run, result, its_flop) in products.items():
                    print(f"  {product}, tiles of {block_rows} rows")
                    found = {c: timed(c, lambda: run(c), result) for c in configs}
                    best(f"{block_rows} {product}", found, lambda ms: f"{ms:.3f} ms, {its_flop / ms / 1e9:.0f} TFLOP/s")
    if len(times) == 2:
        RATIOS["grouped_skew"] = times["zipf"] / times["even"]


def decode_rows(gate_up: torch.Tensor, down: torch.Tensor, rows: int, configs: list[GemmConfig], name: str) -> None:
    """One layer's experts for a step of decodes, as a graph: bytes of the experts touched, at read bandwidth. Several
    layers of weights in turn, so that none is found in the cache."""
    copies = 2 if rows > 8 else 8
    layers = [(gate_up.roll(i, 0), down.roll(i, 0)) for i in range(copies)]
    x = torch.randn(rows, HIDDEN, device=DEVICE).to(DTYPE)
    weights = torch.rand(rows, TOP_K, device=DEVICE)
    picks = [choose(rows, zipf=False) for _ in layers]
    touched = sum(len(ids.unique()) for ids in picks) / copies
    num_bytes = touched * 3 * HIDDEN * INNER * DTYPE.itemsize
    want = torch.cat([run_experts_grouped(x, i, weights, *w) for i, w in zip(picks, layers, strict=True)])

    def own(config: ExpertsConfig | None = None) -> torch.Tensor:
        return torch.cat([run_experts_triton(x, i, weights, *w, config) for i, w in zip(picks, layers, strict=True)])

    def show(ms: float) -> str:
        us = ms * 1e3 / copies
        return f"{us:.1f} µs, {num_bytes / us / 1e3:.0f} GB/s, {num_bytes / us / 1e3 / read_gbps():.2f} of reading"

    ms = timed("default", own, want, graph_milliseconds)
    print(f"{rows} rows, {touched:.1f} experts touched: {'-' if ms is None else show(ms)}")
    if ms is not None:
        RATIOS[name] = num_bytes * copies / ms / 1e6 / read_gbps()
    rival = milliseconds(lambda: [run_experts_grouped(x, i, weights, *w) for i, w in zip(picks, layers, strict=True)])
    print(f"  torch, whole, with its launches: {show(rival)}")
    base = experts_config(DTYPE, rows * TOP_K, EXPERTS, SHARED_BYTES)
    for part in ("gate_up", "down"):
        found = {}
        for config in configs:
            other = {"gate_up": base.gate_up, "down": base.down, part: config}
            found[config] = timed(
                config, lambda: own(ExpertsConfig(base.block_rows, **other)), want, graph_milliseconds
            )
        print(f"  {part}")
        best(f"{base.block_rows} {part}", found, show, ms)


def latent(tune: bool) -> None:
    """64 requests of 4,096 tokens, with the merge: bytes for 16 heads, arithmetic for 128."""
    rows, context = 64, 4096
    for heads, name in ((16, "mla_decode_16_bandwidth"), (128, "mla_decode_128_matmul")):
        shape = AttentionShape((1,) * rows, (context - 1,) * rows, rows, group=heads, dim=512, seed=1)
        case = LatentCase(shape, device=DEVICE, dtype=DTYPE, rope=64)
        args = (case.q_latent, case.q_rope, case.latent_pages, case.rope_pages)
        num_bytes = rows * context * 576 * DTYPE.itemsize
        flop = 2 * rows * context * heads * (576 + 512)
        want, _ = case.run(ReferenceAttention())

        def run_with(config: TileConfig | None, num_sms: int | None = None) -> Callable[[], torch.Tensor]:
            backend = TritonAttention(DEVICE, latent=config, num_sms=num_sms)
            plan = backend.plan(case.batch)
            return lambda: backend.run_latent(*args, plan, case.scale)

        def show(ms: float) -> str:
            gbps, tflops = num_bytes / ms / 1e6, flop / ms / 1e9
            return (
                f"{ms * 1e3:.1f} µs, {gbps:.0f} GB/s ({gbps / read_gbps():.2f} of reading), "
                f"{tflops:.0f} TFLOP/s ({tflops / matmul_tflops():.2f} of the product)"
            )

        ms = timed("default", run_with(None), want, graph_milliseconds)
        print(f"latent decode, {heads} heads, {rows} × {context}: {'-' if ms is None else show(ms)}")
        if ms is not None:
            RATIOS[name] = num_bytes / ms / 1e6 / read_gbps() if heads == 16 else flop / ms / 1e9 / matmul_tflops()
        sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
        best(
            f"latent {heads}",
            {
                (config, f"splits for {factor} programs a multiprocessor"): timed(
                    config, run_with(config, factor * sms), want, graph_milliseconds
                )
                for config in (LATENT[heads] if tune else ())
                for factor in (1, 2, 4)
            },
            show,
            ms,
        )


if __name__ == "__main__":
    parts = {"limits": limits, "latent": latent, "experts": experts}
    for tuning in (False, True):  # the default configs first: they are the result if the time is up
        for part in sys.argv[1:] or parts:
            try:
                parts[part](tuning)
            except Exception:  # one part's failure is a result; the others are still wanted
                traceback.print_exc()
            print(f"({part}: {time.monotonic() - STARTED:.0f} s)")
    paste()
    print(json.dumps({"read_gbps": read_gbps(), "matmul_tflops": matmul_tflops(), **RATIOS}))
