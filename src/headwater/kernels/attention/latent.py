"""What every backend's `run_latent` shares: the check of its arguments, and joining results over disjoint tokens.

Latent attention (MLA, absorbed) has one KV head whose K is the latent vector beside the rotary key, and whose V is the
latent vector again:

    scores[h, t]  =  scale · (q_latent[h] · latent[t]  +  q_rope[h] · rope[t])
    out[h]        =  Σ_t softmax(scores[h])[t] · latent[t]
    lse[h]        =  ln Σ_t exp(scores[h, t])

A row that sees no token, as on a rank that holds none of a request's tokens, has out 0 and lse -inf.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwater.kernels.attention.base import AttentionBatch
from headwater.kernels.dispatch import require


def merge_parts(parts: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) over all tokens, from results over disjoint ones: `parts` [n, rows, heads, dim], `lses` float32
    [n, rows, heads]. A part that saw nothing has no weight; rows that no part saw stay 0 and -inf."""
    lse = lses.logsumexp(0)
    # exp(-inf - -inf) is NaN: rows that nobody saw are shifted by nothing.
    weights = (lses - lse.masked_fill(lse == float("-inf"), 0.0)).exp().unsqueeze(-1)
    return (parts * weights).sum(0).to(parts.dtype), lse


def check_latent(
    q_latent: Tensor,
    q_rope: Tensor,
    latent_pages: Tensor,
    rope_pages: Tensor,
    batch: AttentionBatch,
    scale: float,
    lse: Tensor | None,
) -> None:
    """What `AttentionBackend.run_latent` asks of its arguments; host data only."""
    require(
        q_latent.dim() == q_rope.dim() == 3
        and q_latent.shape[:2] == q_rope.shape[:2]
        and latent_pages.dim() == rope_pages.dim() == 4
        and latent_pages.shape[:3] == rope_pages.shape[:3]
        and latent_pages.shape[1:3] == (batch.page_size, 1)
        and q_latent.shape[2] == latent_pages.shape[3]
        and q_rope.shape[2] == rope_pages.shape[3]
        and q_latent.dtype == q_rope.dtype == latent_pages.dtype == rope_pages.dtype
        and q_latent.stride(2) == q_rope.stride(2) == latent_pages.stride(3) == rope_pages.stride(3) == 1
        and scale > 0,
        "q_latent and q_rope [rows, heads, width], pages [pages, page_size, 1, width] with the widths of the queries, "
        "all of one dtype and contiguous in the last dimension, a positive scale, and the page size of the plan",
        q_latent=q_latent,
        q_rope=q_rope,
        latent_pages=latent_pages,
        rope_pages=rope_pages,
        page_size=batch.page_size,
        scale=scale,
    )
    require(
        q_latent.shape[0] == sum(batch.query_lens_cpu),
        "as many queries as planned",
        q_latent=q_latent,
        planned=sum(batch.query_lens_cpu),
    )
    require(
        lse is None or (lse.shape == q_latent.shape[:2] and lse.dtype == torch.float32 and lse.is_contiguous()),
        "lse float32 [rows, heads], contiguous, or None",
        lse=lse,
        q_latent=q_latent,
    )
