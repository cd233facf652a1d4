"""Attention over pages, written to be obviously right: the oracle for every other backend, and slow.

One request at a time, its KV gathered into a contiguous copy, the whole score matrix in float32 (float64 for float64
queries). For tests and for finding out whether a wrong answer comes from attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwater.kernels.attention.base import AttentionBatch
from headwater.kernels.attention.latent import check_latent


class ReferenceAttention:
    """`AttentionBackend` in plain torch, on any device. Reads the page table on the host: not for CUDA graphs."""

    name = "reference"

    def plan(self, batch: AttentionBatch) -> AttentionBatch:
        """Nothing to prepare."""
        return batch

    def run(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, plan: AttentionBatch, scale: float) -> Tensor:
        """Costs queries × KV × heads of float32 memory per request."""
        out = q.new_empty(q.shape[0], q.shape[1], v_pages.shape[3])
        start = 0
        for request, (query_len, kv_len) in enumerate(zip(plan.query_lens_cpu, plan.kv_lens_cpu, strict=True)):
            rows = slice(start, start + query_len)
            k = gather_tokens(k_pages, plan.page_table[request], kv_len)
            v = gather_tokens(v_pages, plan.page_table[request], kv_len)
            out[rows] = attend(q[rows], k, v, scale)
            start += query_len
        return out

    def run_latent(
        self,
        q_latent: Tensor,
        q_rope: Tensor,
        latent_pages: Tensor,
        rope_pages: Tensor,
        plan: AttentionBatch,
        scale: float,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Costs queries × KV × heads of float32 memory per request."""
        check_latent(q_latent, q_rope, latent_pages, rope_pages, plan, scale, lse)
        out = torch.empty_like(q_latent, memory_format=torch.contiguous_format)
        q = torch.cat((q_latent, q_rope), dim=-1)
        start = 0
        for request, (query_len, kv_len) in enumerate(zip(plan.query_lens_cpu, plan.kv_lens_cpu, strict=True)):
            rows = slice(start, start + query_len)
            latent = gather_tokens(latent_pages, plan.page_table[request], kv_len)[:, 0]
            rope = gather_tokens(rope_pages, plan.page_table[request], kv_len)[:, 0]
            out[rows], sums = attend_latent(q[rows], latent, rope, scale)
            if lse is not None:
                lse[rows] = sums
            start += query_len
        return out


def gather_tokens(pages: Tensor, page_ids: Tensor, num_tokens: int) -> Tensor:
    """The first `num_tokens` of a request, [num_tokens, kv_heads, dim], copied out of its pages."""
    num_pages = -(-num_tokens // pages.shape[1])
    return pages[page_ids[:num_pages].long()].flatten(0, 1)[:num_tokens]


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of one request whose queries are the last of its tokens."""
    _, num_heads, _ = q.shape
    kv_len, num_kv_heads, _ = k.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    k = k.to(wide).repeat_interleave(num_heads // num_kv_heads, dim=1)
    v = v.to(wide).repeat_interleave(num_heads // num_kv_heads, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.to(wide), k) * scale
    weights = scores.masked_fill(_future(q, kv_len), float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)


def attend_latent(q: Tensor, latent: Tensor, rope: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse) of one request: `q` [queries, heads, latent and rope], `latent` and `rope` [tokens, width]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("qhd,kd->qhk", q.to(wide), torch.cat((latent, rope), dim=-1).to(wide)) * scale
    scores.masked_fill_(_future(q, len(latent)).unsqueeze(1), float("-inf"))
    weights = scores.softmax(dim=-1).nan_to_num(0.0) if latent.numel() else scores  # a row that sees nothing is 0 / 0
    return torch.einsum("qhk,kd->qhd", weights, latent.to(wide)).to(q.dtype), scores.logsumexp(-1)


def _future(q: Tensor, kv_len: int) -> Tensor:
    """bool [queries, tokens]: which tokens come after which queries, where the queries are the last tokens."""
    query_positions = torch.arange(kv_len - len(q), kv_len, device=q.device)
    return torch.arange(kv_len, device=q.device) > query_positions[:, None]
