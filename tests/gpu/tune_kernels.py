"""Measures the Triton kernels on this machine's GPU over several tile configs, after checking each of them.

Run by hand: `PYTHONPATH=src:tests python3 tests/gpu/tune_kernels.py [prefill] [decode] [small]`. Prints a table; the
configs that it found best belong into `prefill_config` and `decode_config`.
"""

# ruff: noqa: B023 - what is measured is called before the loop goes on

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

import torch
from triton.testing import do_bench, do_bench_cudagraph

from headwater.kernels.activation import silu_and_mul
from headwater.kernels.attention import AttentionBatch
from headwater.kernels.attention.triton_backend import TritonAttention, decode_splits
from headwater.kernels.attention.triton_decode import decode_attention
from headwater.kernels.attention.triton_tiles import TileConfig
from headwater.kernels.norm import add_rms_norm, rms_norm
from headwater.kernels.rope import rope_and_store

from kernel_cases import AttentionCase, AttentionShape, relative_error

DEVICE = "cuda"
DTYPE = torch.bfloat16
HEADS, KV_HEADS, DIM = 32, 8, 128

PREFILL_CONFIGS = [
    TileConfig(128, 64, 8, 3),
    TileConfig(128, 128, 8, 3),
    TileConfig(128, 128, 8, 5),
    TileConfig(64, 64, 4, 2),
    TileConfig(64, 64, 4, 3),
    TileConfig(64, 128, 4, 3),
]
DECODE_CONFIGS = [
    TileConfig(16, 32, 4, 4),
    TileConfig(16, 64, 2, 3),
    TileConfig(16, 64, 4, 3),
    TileConfig(16, 64, 4, 4),
    TileConfig(16, 64, 4, 5),
    TileConfig(16, 128, 4, 4),
    TileConfig(16, 128, 8, 4),
]
DECODE_SHAPES = [(64, 1024), (256, 1024), (40, 1024), (16, 1024), (8, 4096), (1, 512), (1, 2048), (1, 16384)]


def attention_case(query_lens: Iterable[int], prefix_lens: Iterable[int], num_decodes: int) -> AttentionCase:
    """Llama-3-8B's heads on pages of 16."""
    shape = AttentionShape(
        tuple(query_lens), tuple(prefix_lens), num_decodes, 16, KV_HEADS, HEADS // KV_HEADS, DIM, seed=1
    )
    return AttentionCase(shape, device=DEVICE, dtype=DTYPE)


def run_with(backend: TritonAttention, case: AttentionCase) -> Callable[[], torch.Tensor]:
    plan = backend.plan(case.batch)
    return lambda: backend.run(case.q, case.k_pages, case.v_pages, plan, case.scale)


def milliseconds(function: Callable[[], object]) -> float:
    return float(do_bench(function, warmup=25, rep=150, return_mode="median"))


def try_config(label: str, make: Callable[[], Callable[[], torch.Tensor]], want: torch.Tensor) -> float | None:
    """Median time, or None (and why) where the config does not compile or is wrong."""
    try:
        function = make()
        error = relative_error(function(), want)
    except Exception as problem:  # a config that needs too much shared memory is a result, not a failure
        print(f"  {label}: {type(problem).__name__}: {str(problem)[:80]}")
        return None
    if not error < 1e-2:
        print(f"  {label}: WRONG, error {error:.2e}")
        return None
    return milliseconds(function)


def flash_reference(case: AttentionCase) -> Callable[[], torch.Tensor]:
    """torch's own attention on contiguous tensors of the same shape: what the hardware gives without pages."""
    rows = case.q.shape[0]
    q = torch.randn(1, HEADS, rows, DIM, device=DEVICE, dtype=DTYPE)
    k = torch.randn(1, HEADS, rows, DIM, device=DEVICE, dtype=DTYPE)
    v = torch.randn_like(k)
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def tune_prefill() -> None:
    for tokens, prefix in ((8192, 0), (1024, 0), (2048, 16384), (128, 16384), (16, 16384)):
        case = attention_case([tokens], [prefix], 0)
        flop = 4 * HEADS * DIM * (tokens * prefix + tokens * (tokens + 1) / 2)
        default = run_with(TritonAttention(DEVICE), case)
        want = default()
        print(
            f"prefill {tokens} tokens on a prefix of {prefix}: default {flop / milliseconds(default) / 1e9:.0f} TFLOP/s"
        )
        if prefix == 0:
            print(f"  torch SDPA, contiguous: {flop / milliseconds(flash_reference(case)) / 1e9:.0f} TFLOP/s")
        for config in PREFILL_CONFIGS:
            label = str(config)[10:]
            ms = try_config(label, lambda: run_with(TritonAttention(DEVICE, prefill=config), case), want)
            if ms is not None:
                print(f"  {label}: {ms:.3f} ms, {flop / ms / 1e9:.0f} TFLOP/s")


def rotating(case: AttentionCase, rows: int) -> list[tuple[torch.Tensor, AttentionBatch]]:
    """The case's decodes as several steps of `rows` requests with KV of their own, so that no step finds the last
    one's KV in the cache; in a model, the weights drive it out."""
    batch = case.batch
    steps = []
    for start in range(0, batch.num_requests, rows):
        part = slice(start, start + rows)
        shape = (batch.query_lens_cpu[part], batch.kv_lens_cpu[part], rows, batch.page_size)
        step = AttentionBatch(batch.query_starts[: rows + 1], batch.kv_lens[part], batch.page_table[part], *shape)
        steps.append((case.q[part], step))
    return steps


def tune_decode() -> None:
    source, target = torch.empty(2, 2**30, device=DEVICE, dtype=torch.uint8)
    copy_ms = milliseconds(lambda: target.copy_(source))
    print(f"copy of 1 GiB: {2 * source.numel() / copy_ms / 1e6:.0f} GB/s (read and written)")
    sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    backend = TritonAttention(DEVICE)
    for rows, context in DECODE_SHAPES:
        num_bytes = 2 * rows * context * KV_HEADS * DIM * DTYPE.itemsize
        copies = max(1, min(64, 2**28 // num_bytes))
        case = attention_case([1] * rows * copies, [context - 1] * rows * copies, rows * copies)
        steps = rotating(case, rows)
        plans = [(q, backend.plan(step)) for q, step in steps]
        want = torch.cat([backend.run(q, case.k_pages, case.v_pages, plan, case.scale) for q, plan in plans])
        out = torch.empty_like(want)

        def show(label: str, function: Callable[[], object]) -> tuple[float, str]:
            us = do_bench_cudagraph(function, rep=30, return_mode="median") * 1e3 / copies
            return us, f"{label}: {us:.1f} µs, {num_bytes / us / 1e3:.0f} GB/s"

        def default() -> None:
            for q, plan in plans:
                backend.run(q, case.k_pages, case.v_pages, plan, case.scale)

        chosen = decode_splits(rows * KV_HEADS, context, sms)
        print(show(f"decode {rows} × {context}, default, splits {chosen}", default)[1])
        results = []
        for config in DECODE_CONFIGS:
            for splits in (1, 2, 3, 4, 6, 8, 16, 32, 64):
                if splits * rows * KV_HEADS > 24 * sms or splits > context // 64:
                    continue

                def run() -> None:
                    for number, (q, step) in enumerate(steps):
                        decode_attention(
                            q, case.k_pages, case.v_pages, out[number * rows : (number + 1) * rows],
                            kv_lens=step.kv_lens, page_table=step.page_table, scale=case.scale,
                            config=config, num_splits=splits, min_split_tokens=1,
                        )  # fmt: skip

                run()
                error = relative_error(out, want)
                label = f"  {str(config)[10:]} splits {splits}"
                results.append(show(label, run) if error < 1e-2 else (0.0, f"{label}: WRONG, error {error:.2e}"))
        for _, line in sorted(results)[:6]:
            print(line)


def measure_small() -> None:
    hidden, inner = 4096, 14336
    for rows in (1, 64, 8192):
        x, residual = torch.randn(2, rows, hidden, device=DEVICE).to(DTYPE).unbind(0)
        weight = torch.randn(hidden, device=DEVICE).to(DTYPE)
        gate_up = torch.randn(rows, 2 * inner, device=DEVICE).to(DTYPE)
        fused = torch.randn(rows, HEADS + 2 * KV_HEADS, DIM, device=DEVICE).to(DTYPE)
        q, k, v = fused.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        k_pages, v_pages = torch.zeros(2, rows // 16 + 2, 16, KV_HEADS, DIM, device=DEVICE, dtype=DTYPE).unbind(0)
        cos_sin = torch.rand(8192, DIM, device=DEVICE)
        positions = torch.arange(rows, device=DEVICE)
        norm = torch.ones(DIM, device=DEVICE, dtype=DTYPE)
        rope = (q, k, v, cos_sin, positions, k_pages, v_pages, positions)
        measured = {
            "rms_norm": (lambda: rms_norm(x, weight, 1e-5), 2 * x.numel()),
            "add_rms_norm": (lambda: add_rms_norm(x, residual, weight, 1e-5), 4 * x.numel()),
            "silu_and_mul": (lambda: silu_and_mul(gate_up), gate_up.numel() * 3 // 2),
            "rope_and_store": (lambda: rope_and_store(*rope), 2 * fused.numel()),
            "rope_and_store with norms": (lambda: rope_and_store(*rope, norm, norm, 1e-6), 2 * fused.numel()),
        }
        for name, (function, elements) in measured.items():
            us = do_bench_cudagraph(function, rep=20, return_mode="median") * 1e3
            rate = f", {elements * DTYPE.itemsize / us / 1e3:.0f} GB/s" if rows > 64 else ""
            print(f"{name}, {rows} rows: {us:.1f} µs{rate}")


if __name__ == "__main__":
    torch.manual_seed(0)
    parts = {"prefill": tune_prefill, "decode": tune_decode, "small": measure_small}
    for part in sys.argv[1:] or parts:
        parts[part]()
