"""What paged attention is asked to do, and the interface that every backend implements.

A backend plans once per step, from the ragged shape of the batch, and runs once per layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The ragged shape of one step: `n` requests, those with a single query (decodes) first.

        rows of q    query_starts[i] … query_starts[i + 1]     the queries of request i
        pages        page_table[i]                             its KV, token t in page_table[i, t // page_size]
        positions    kv_lens[i] - query_lens[i] … kv_lens[i]   where its queries stand: they are its last tokens

    The KV of the queries themselves is already in the pages. Columns of `page_table` beyond a request's last page
    may hold anything that is a valid page. The host lists repeat the device tensors, so that planning needs no
    synchronisation; while a CUDA graph is captured they hold upper bounds.
    """

    query_starts: Tensor
    """int32 [n + 1], on the device."""
    kv_lens: Tensor
    """int32 [n], on the device; at least 1 each, but for `run_latent`, where a rank may hold no token of a request."""
    page_table: Tensor
    """int32 [n, max_pages], on the device."""
    query_lens_cpu: tuple[int, ...]
    kv_lens_cpu: tuple[int, ...]
    num_decodes: int
    page_size: int

    @property
    def num_requests(self) -> int:
        """Requests in this step."""
        return len(self.kv_lens_cpu)


class AttentionBackend(Protocol):
    """Causal attention of ragged queries over paged KV. Stateless between steps, but for scratch memory."""

    name: str

    def plan(self, batch: AttentionBatch) -> Any:
        """Prepare one step; the result goes to every `run` of that step."""
        ...

    def run(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, plan: Any, scale: float) -> Tensor:
        """Attend. `q` is [rows, heads, dim], the pages [pages, page_size, kv_heads, dim] with any strides but a
        contiguous last dimension; the result is [rows, heads, v_dim], contiguous, in q's dtype. Query head h reads
        KV head h // (heads // kv_heads)."""
        ...

    def run_latent(
        self,
        q_latent: Tensor,
        q_rope: Tensor,
        latent_pages: Tensor,
        rope_pages: Tensor,
        plan: Any,
        scale: float,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Attend over latents (MLA, absorbed; the formula is in `latent`). The queries are [rows, heads, width], the
        pages [pages, page_size, 1, width], with any strides but a contiguous last dimension, one width for the latent
        and one for the rotary part; the result is [rows, heads, latent width], contiguous, in the queries' dtype.

        `lse`, float32 [rows, heads], is filled with the natural log-sum-exp of each row's scores. A row that sees no
        token gets 0 and -inf; `latent.merge_parts` joins results over disjoint tokens."""
        ...
