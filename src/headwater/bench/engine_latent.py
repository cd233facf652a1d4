"""Absorbed latent attention alone, in `headwater bench engine`: a step of decodes, with the merge of its splits.

mla_decode_16_bandwidth   16 heads: the bytes of the latents at read bandwidth, of its time
mla_decode_128_matmul     128 heads: its arithmetic at the rate of a large product, of its time
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from headwater.bench.device_clock import DeviceClock, check_close
from headwater.bench.measure import Note, take_turns
from headwater.kernels.attention.base import AttentionBackend, AttentionBatch
from headwater.kernels.attention.reference import ReferenceAttention
from headwater.kernels.attention.triton_backend import TritonAttention


@dataclass(frozen=True)
class LatentBench:
    """What to run."""

    num_requests: int = 64
    context_tokens: int = 4096
    latent_dim: int = 512
    rope_dim: int = 64
    page_size: int = 16
    pairs: int = 9
    repeat: int = 20
    read_bytes: int = 2 << 30
    matmul_size: int = 8192


def bench_latent_decode(bench: LatentBench, num_heads: int, note: Note, device: torch.device) -> dict[str, Any]:
    """One figure for 16 heads (bound by reading) and another for 128 (bound by arithmetic); both limits with each."""
    note(f"latent attention, {num_heads} heads, {bench.num_requests} requests of {bench.context_tokens:,} tokens")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(num_heads)
    pages_each = -(-bench.context_tokens // bench.page_size)
    num_pages = bench.num_requests * pages_each
    latent, rope = (
        torch.randn(num_pages, bench.page_size, 1, width, device=device).to(dtype)
        for width in (bench.latent_dim, bench.rope_dim)
    )
    q_latent, q_rope = (
        torch.randn(bench.num_requests, num_heads, width, device=device).to(dtype)
        for width in (bench.latent_dim, bench.rope_dim)
    )
    kv_lens = (bench.context_tokens,) * bench.num_requests
    batch = AttentionBatch(
        torch.arange(bench.num_requests + 1, dtype=torch.int32, device=device),
        torch.tensor(kv_lens, dtype=torch.int32, device=device),
        torch.randperm(num_pages).int().view(bench.num_requests, pages_each).to(device),
        (1,) * bench.num_requests,
        kv_lens,
        bench.num_requests,
        bench.page_size,
    )
    scale = (bench.latent_dim + bench.rope_dim) ** -0.5

    def run_with(backend: AttentionBackend) -> Any:
        plan = backend.plan(batch)
        return lambda: backend.run_latent(q_latent, q_rope, latent, rope, plan, scale)

    ours = run_with(TritonAttention(device))
    check_close(f"latent attention of {num_heads} heads", ours(), run_with(ReferenceAttention())())
    source = torch.ones(bench.read_bytes // 4, dtype=torch.float32, device=device)
    left = torch.randn(bench.matmul_size, bench.matmul_size, device=device).to(dtype)
    right = torch.randn_like(left)
    clock = DeviceClock(device)
    runs = {
        "ours": clock.captured(ours, bench.repeat),
        "read": clock.repeated(source.sum, 4),
        "product": clock.repeated(lambda: torch.mm(left, right), 4),
    }
    rounds = take_turns(runs, bench.pairs)
    seconds, tokens = rounds.time("ours"), bench.num_requests * bench.context_tokens
    bandwidth, rate = source.nbytes / rounds.time("read"), 2 * bench.matmul_size**3 / rounds.time("product")
    num_bytes = tokens * (bench.latent_dim + bench.rope_dim) * dtype.itemsize
    flops = 2 * tokens * num_heads * (2 * bench.latent_dim + bench.rope_dim)
    name = f"mla_decode_{num_heads}"
    return {
        f"{name}_bandwidth": num_bytes / bandwidth / seconds,
        f"{name}_bandwidth_noise": max(rounds.spread("ours"), rounds.spread("read")),
        f"{name}_matmul": flops / rate / seconds,
        f"{name}_matmul_noise": max(rounds.spread("ours"), rounds.spread("product")),
        f"{name}_us": 1e6 * seconds,
        "read_gbps": bandwidth / 1e9,
        "matmul_tflops": rate / 1e12,
    }
