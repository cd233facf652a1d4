"""Attention over pages, written to be obviously right: the oracle for every other backend, and slow.

One request at a time, its KV gathered into a contiguous copy, the whole score matrix in float32 (float64 for float64
queries). For tests and for finding out whether a wrong answer comes from attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwater.kernels.attention.base import AttentionBatch


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


def gather_tokens(pages: Tensor, page_ids: Tensor, num_tokens: int) -> Tensor:
    """The first `num_tokens` of a request, [num_tokens, kv_heads, dim], copied out of its pages."""
    num_pages = -(-num_tokens // pages.shape[1])
    return pages[page_ids[:num_pages].long()].flatten(0, 1)[:num_tokens]


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of one request whose queries are the last of its tokens."""
    query_len, num_heads, _ = q.shape
    kv_len, num_kv_heads, _ = k.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    k = k.to(wide).repeat_interleave(num_heads // num_kv_heads, dim=1)
    v = v.to(wide).repeat_interleave(num_heads // num_kv_heads, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.to(wide), k) * scale
    query_positions = torch.arange(kv_len - query_len, kv_len, device=q.device)
    future = torch.arange(kv_len, device=q.device) > query_positions[:, None]
    weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
