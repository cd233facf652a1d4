"""Multi-head latent attention: the cache holds one latent vector and one rotary key a token, on every rank.

Decodes and short chunks attend over the latents themselves, with `kv_b_proj` moved to the queries and to the result
(absorbed). Long chunks make keys and values of each head first (expanded): 3.4 times fewer operations a query and token
for DeepSeek's shapes, which pay for the making from some number of queries on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name that torch's own documentation uses
from torch import Tensor

from headwater.errors import ModelError
from headwater.kernels.attention.base import AttentionBackend, AttentionBatch
from headwater.kernels.rope import rope_and_store
from headwater.models.config import MLAConfig, ModelConfig
from headwater.models.context import StepContext
from headwater.models.layers import FusedLinear, FusedRows, ParameterPlacement, RMSNorm, RowLinear, Targets
from headwater.models.weights import WeightTarget

EXPANDED_BYTES = 256 << 20
"""The most memory for the keys and values of one request that exist at once; its heads take turns."""


class LatentAttention:
    """One layer's attention; query heads are divided over the ranks, and every rank holds all latents."""

    def __init__(self, config: ModelConfig, layer: int, place: ParameterPlacement) -> None:
        shape = config.attention
        if not isinstance(shape, MLAConfig):
            raise ModelError(f"{config.family} models attend over latents; their config describes keys and values")
        heads = place.ranks.tp.heads(config).query
        self._layer, self._shape, self._num_heads = layer, shape, len(heads)
        self._least_expanded = least_expanded(shape)
        queries = FusedRows("q_proj", shape.num_heads * shape.qk_dim, _scaled(heads, shape.qk_dim))
        latents = FusedRows("kv_a_proj_with_mqa", *_whole(shape.latent_dim + shape.rope_dim))
        q_latent = shape.q_latent_dim
        first = queries if q_latent is None else FusedRows("q_a_proj", *_whole(q_latent))
        self.from_input = FusedLinear(config.hidden_size, (first, latents), bias=False, place=place)
        self.q_norm = None if q_latent is None else RMSNorm(q_latent, config.norm_eps, place)
        rows = (queries._replace(name="q_b_proj"),)
        self.q_b = None if q_latent is None else FusedLinear(q_latent, rows, bias=False, place=place)
        self.kv_norm = RMSNorm(shape.latent_dim, config.norm_eps, place)
        self._kv_rows = _scaled(heads, shape.nope_dim + shape.v_dim)
        self.kv_b = place.table(len(self._kv_rows), shape.latent_dim)
        total = shape.num_heads * shape.v_dim
        self.output = RowLinear(total, _scaled(heads, shape.v_dim), config.hidden_size, bias=False, place=place)

    def __call__(self, x: Tensor, cos_sin: Tensor, ctx: StepContext) -> Tensor:
        shape, rows = self._shape, len(x)
        first, latent, k_rope = self.from_input(x).split(
            [self.from_input.weight.shape[0] - shape.latent_dim - shape.rope_dim, shape.latent_dim, shape.rope_dim], 1
        )
        if self.q_norm is not None and self.q_b is not None:
            first = self.q_b(self.q_norm(first))
        q = first.unflatten(1, (self._num_heads, shape.qk_dim))
        latent_pages, rope_pages = ctx.cache.planes(self._layer)
        rope_and_store(
            q[..., shape.nope_dim :],
            k_rope.unsqueeze(1),
            self.kv_norm(latent).unsqueeze(1),
            cos_sin,
            ctx.positions,
            rope_pages,
            latent_pages,
            ctx.slots,
            order="pairs",
        )
        plan: LatentPlan = ctx.once("latent", lambda: LatentPlan.of(ctx, self._least_expanded))
        if not plan.expanded:
            mixed = self._absorbed(q, ctx.attention, ctx.plan, latent_pages, rope_pages)
        else:
            mixed = q.new_empty(rows, self._num_heads, shape.v_dim)
            if plan.absorbed is not None:
                some = q.index_select(0, plan.absorbed.rows)
                found = self._absorbed(some, ctx.attention, plan.absorbed.plan, latent_pages, rope_pages)
                mixed.index_copy_(0, plan.absorbed.rows, found)
            for chunk in plan.expanded:
                self._expanded(q, mixed, ctx.attention, chunk, latent_pages, rope_pages)
        return self.output(mixed.flatten(1))

    def _absorbed(self, q: Tensor, backend: AttentionBackend, plan: Any, latents: Tensor, ropes: Tensor) -> Tensor:
        """[rows, heads, v_dim]. Scores are (q · W_uk) · latent, and the result is W_uv · (weights · latents)."""
        w_uk, w_uv = self._up()
        nope = self._shape.nope_dim
        q_latent = torch.bmm(q[..., :nope].transpose(0, 1), w_uk).transpose(0, 1)
        mixed = backend.run_latent(q_latent, q[..., nope:], latents, ropes, plan, self._shape.scale)
        return torch.bmm(mixed.transpose(0, 1), w_uv.transpose(1, 2)).transpose(0, 1)

    def _expanded(
        self, q: Tensor, out: Tensor, backend: AttentionBackend, chunk: ExpandedChunk, latents: Tensor, ropes: Tensor
    ) -> None:
        """Attend for one request, some heads at a time, over pages of keys and values made for the purpose."""
        shape = self._shape
        latent, rope = latents[chunk.pages].squeeze(2), ropes[chunk.pages]
        num_pages, page_size, _ = latent.shape
        width = shape.nope_dim + shape.v_dim + shape.qk_dim  # the product, and keys joined of it
        step = max(EXPANDED_BYTES // (num_pages * page_size * width * q.element_size()), 1)
        kv_b = self.kv_b.unflatten(0, (self._num_heads, -1))
        for start in range(0, self._num_heads, step):
            heads = slice(start, start + step)
            made = F.linear(latent, kv_b[heads].flatten(0, 1)).unflatten(2, (-1, shape.nope_dim + shape.v_dim))
            k_nope, v = made.split([shape.nope_dim, shape.v_dim], dim=-1)
            k = torch.cat((k_nope, rope.expand(-1, -1, k_nope.shape[2], -1)), dim=-1)
            out[chunk.rows, heads] = backend.run(q[chunk.rows, heads], k, v, chunk.plan, shape.scale)

    def _up(self) -> tuple[Tensor, Tensor]:
        """(W_uk [heads, nope_dim, latent_dim], W_uv [heads, v_dim, latent_dim]), views of `kv_b`."""
        by_head = self.kv_b.unflatten(0, (self._num_heads, -1))
        return by_head[:, : self._shape.nope_dim], by_head[:, self._shape.nope_dim :]

    def targets(self, prefix: str) -> Targets:
        """The projections down and up, and the norms of the latents."""
        yield from self.from_input.targets(prefix)
        if self.q_norm is not None and self.q_b is not None:
            yield from self.q_norm.targets(f"{prefix}.q_a_layernorm")
            yield from self.q_b.targets(prefix)
        yield from self.kv_norm.targets(f"{prefix}.kv_a_layernorm")
        width = self._shape.num_heads * (self._shape.nope_dim + self._shape.v_dim)
        yield f"{prefix}.kv_b_proj.weight", WeightTarget(self.kv_b, (width, self._shape.latent_dim), 0, self._kv_rows)
        yield from self.output.targets(f"{prefix}.o_proj")


@dataclass(frozen=True, slots=True)
class AbsorbedRows:
    """The requests that attend over latents, in a step where others are expanded."""

    rows: Tensor
    """int64: their rows of the step."""
    plan: Any


@dataclass(frozen=True, slots=True)
class ExpandedChunk:
    """One request whose keys and values are made: its rows of the step, its pages, and a plan over them in order."""

    rows: slice
    pages: Tensor
    plan: Any


@dataclass(frozen=True, slots=True)
class LatentPlan:
    """How the requests of one step attend; the same for all layers. Made without waiting for the device."""

    absorbed: AbsorbedRows | None = None
    expanded: list[ExpandedChunk] = field(default_factory=list)
    """Empty: every request is absorbed, and the step's own plan serves."""

    @classmethod
    def of(cls, ctx: StepContext, least: int) -> LatentPlan:
        """Chunks of `least` queries or more are expanded."""
        batch, backend = ctx.batch, ctx.attention
        long = [i for i, queries in enumerate(batch.query_lens_cpu) if queries >= least]
        if not long:
            return cls()
        starts = _starts(batch.query_lens_cpu)
        short = [i for i in range(batch.num_requests) if i not in set(long)]
        absorbed = None
        if short:
            numbers = [row for i in short for row in range(starts[i], starts[i + 1])]
            rows = _on(batch.kv_lens, numbers, torch.int64)
            absorbed = AbsorbedRows(rows, backend.plan(_select(batch, short)))
        return cls(absorbed, [_chunk(backend, batch, i, starts[i]) for i in long])


def least_expanded(shape: MLAConfig) -> int:
    """From how many queries a chunk is expanded: where making a token's keys and values takes fewer operations than
    attending over latents takes more of. A chunk of one query never is: graphs hold the other path."""
    saved = 2 * shape.latent_dim - shape.nope_dim - shape.v_dim
    making = shape.latent_dim * (shape.nope_dim + shape.v_dim)
    return max(-(-making // saved), 2) if saved > 0 else 1 << 62


def _chunk(backend: AttentionBackend, batch: AttentionBatch, request: int, first_row: int) -> ExpandedChunk:
    queries, kv_len = batch.query_lens_cpu[request], batch.kv_lens_cpu[request]
    num_pages = -(-kv_len // batch.page_size)
    alone = AttentionBatch(
        query_starts=_on(batch.kv_lens, [0, queries], torch.int32),
        kv_lens=_on(batch.kv_lens, [kv_len], torch.int32),  # a slice may lie at odd addresses: other kernels
        page_table=torch.arange(num_pages, dtype=torch.int32, device=batch.kv_lens.device).unsqueeze(0),
        query_lens_cpu=(queries,),
        kv_lens_cpu=(kv_len,),
        num_decodes=0,
        page_size=batch.page_size,
    )
    pages = batch.page_table[request, :num_pages].long()
    return ExpandedChunk(slice(first_row, first_row + queries), pages, backend.plan(alone))


def _select(batch: AttentionBatch, requests: Sequence[int]) -> AttentionBatch:
    """The batch with some of its requests; those with one query stay first."""
    lens = tuple(batch.query_lens_cpu[i] for i in requests)
    chosen = _on(batch.kv_lens, requests, torch.int64)
    return AttentionBatch(
        query_starts=_on(batch.kv_lens, _starts(lens), torch.int32),
        kv_lens=batch.kv_lens.index_select(0, chosen),
        page_table=batch.page_table.index_select(0, chosen),
        query_lens_cpu=lens,
        kv_lens_cpu=tuple(batch.kv_lens_cpu[i] for i in requests),
        num_decodes=sum(i < batch.num_decodes for i in requests),
        page_size=batch.page_size,
    )


def _starts(lens: Sequence[int]) -> list[int]:
    return list(accumulate(lens, initial=0))


def _on(like: Tensor, values: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Host numbers on the device of `like`, without waiting for it."""
    host = torch.tensor(values, dtype=dtype, pin_memory=like.is_cuda)
    return host.to(like.device, non_blocking=True)


def _whole(total: int) -> tuple[int, range]:
    return total, range(total)


def _scaled(heads: range, dim: int) -> range:
    return range(heads.start * dim, heads.stop * dim)
