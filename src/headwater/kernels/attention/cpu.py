"""Paged attention for CPUs: gather a little KV into memory that stays in the cache, then torch's fused kernel.

The fused kernel never writes a matrix of scores, so a long prompt needs no memory beyond its own KV. It wants KV in
one piece; most of what that copy costs is reading main memory, which attending in place would pay as well (it was a
tenth faster on two cores). The units in which it works, and why, are in `cpu_plan`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headwater.errors import InvalidArgumentError
from headwater.kernels.attention.base import AttentionBatch
from headwater.kernels.attention.cpu_plan import CpuPlan, DecodePlan, PrefillPlan, Tokens, plan_step

_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""(q, k, v) as [batch, heads, length, dim], any strides but the last; returns the output and its log-sum-exp."""


class CpuAttention:
    """Attention over pages in main memory. The same inputs give the same bits."""

    name = "cpu"

    def __init__(self) -> None:
        self._scratch: dict[str, Tensor] = {}

    def plan(self, batch: AttentionBatch) -> CpuPlan:
        """Where to gather what. Costs a millisecond or two for dozens of requests."""
        return plan_step(batch)

    def run(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, plan: CpuPlan, scale: float) -> Tensor:
        """Attend. Memory: the KV of `GROUP_TOKENS` tokens, or of the longest prompt."""
        _check(q, k_pages, v_pages, plan)
        k_plane, v_plane = _plane("k", k_pages), _plane("v", v_pages)
        # [rows, heads, dim] seen as [rows, KV heads, query heads of each, dim]
        q = q.view(len(q), k_pages.shape[2], -1, q.shape[2])
        out = torch.empty(q.shape, dtype=q.dtype)
        if plan.decodes is not None:
            self._decode(q, k_plane, v_plane, plan.decodes, scale, out)
        for prefill in plan.prefills:
            self._prefill(q[prefill.rows], k_plane, v_plane, prefill, scale, out[prefill.rows])
        return out.flatten(1, 2)

    def _decode(self, q: Tensor, k_plane: _Plane, v_plane: _Plane, plan: DecodePlan, scale: float, out: Tensor) -> None:
        # A decode sees all of its KV, so the query heads that share a KV head can stand in the place of queries.
        q = q.index_select(0, plan.request_of)
        outs, lses = [], []
        for group in plan.groups:
            k = _by_unit(self._gather(k_plane, group.tokens), group.length)
            v = _by_unit(self._gather(v_plane, group.tokens), group.length)
            part, lse = _attend(q[group.units], k, v, attn_mask=group.mask, scale=scale)
            outs.append(part)
            lses.append(lse)
        parts = torch.cat(outs)
        if plan.merge is None:
            out.index_copy_(0, plan.request_of, parts)
        else:
            weights = plan.merge.weights(torch.cat(lses)).unsqueeze(-1)
            out[: plan.num_requests].zero_().index_add_(0, plan.request_of, parts.mul_(weights.to(parts.dtype)))

    def _prefill(
        self, q: Tensor, k_plane: _Plane, v_plane: _Plane, plan: PrefillPlan, scale: float, out: Tensor
    ) -> None:
        # KV heads as the batch, so that the query heads of each can share it without a copy.
        q = q.permute(1, 2, 0, 3)
        k = _by_head(self._gather(k_plane, plan.tokens), q.shape[1])
        v = _by_head(self._gather(v_plane, plan.tokens), q.shape[1])
        before = plan.num_before
        result, lse = _attend(q, k[:, :, before:], v[:, :, before:], is_causal=True, scale=scale)
        if before:
            earlier, earlier_lse = _attend(q, k[:, :, :before], v[:, :, :before], scale=scale)
            share = torch.sigmoid(earlier_lse - lse).unsqueeze(-1)
            result = torch.lerp(result, earlier, share.to(result.dtype))
        out.copy_(result.permute(2, 0, 1, 3))

    def _gather(self, plane: _Plane, tokens: Tokens) -> Tensor:
        """The KV of `tokens` as [tokens, heads, dim], in scratch memory that the next gather of this name reuses."""
        if plane.rows is None:
            return plane.pages[tokens.pages, tokens.offsets]
        _, _, heads, dim = plane.pages.shape
        rows = tokens.rows(plane.rows_per_page)
        size = rows.numel() * heads * dim
        scratch = self._scratch.get(plane.name)
        if scratch is None or scratch.numel() < size or scratch.dtype != plane.rows.dtype:
            scratch = self._scratch[plane.name] = torch.empty(size, dtype=plane.rows.dtype)
        target = scratch[:size].view(-1, heads * dim)
        torch.index_select(plane.rows, 0, rows, out=target)
        return target.view(-1, heads, dim)


class _Plane(NamedTuple):
    """One layer's K or V: its pages, and the same as [rows, heads * dim] where the strides allow that."""

    name: str
    pages: Tensor
    rows: Tensor | None
    """Rows between two pages belong to others, another layer say, and are never asked for."""
    rows_per_page: int


def _plane(name: str, pages: Tensor) -> _Plane:
    """Whole rows are gathered up to three times as fast as heads one after the other."""
    num_pages, page_size, heads, dim = pages.shape
    page_stride, token_stride, head_stride, _ = pages.stride()
    if head_stride != dim or token_stride == 0 or page_stride % token_stride:
        return _Plane(name, pages, None, 0)
    rows_per_page = page_stride // token_stride
    num_rows = (num_pages - 1) * rows_per_page + page_size
    return _Plane(name, pages, pages.as_strided((num_rows, heads * dim), (token_stride, 1)), rows_per_page)


def _by_unit(kv: Tensor, length: int) -> Tensor:
    """[units * length, heads, dim] as [units, heads, length, dim], without a copy."""
    return kv.view(-1, length, *kv.shape[1:]).transpose(1, 2)


def _by_head(kv: Tensor, share: int) -> Tensor:
    """[length, heads, dim] as [heads, share, length, dim], without a copy: every KV head `share` times."""
    return kv.transpose(0, 1).unsqueeze(1).expand(-1, share, -1, -1)


def _check(q: Tensor, k_pages: Tensor, v_pages: Tensor, plan: CpuPlan) -> None:
    if q.device.type != "cpu" or k_pages.device.type != "cpu":
        raise InvalidArgumentError(
            f"the cpu backend attends in main memory, got queries on {q.device}, KV on {k_pages.device}"
        )
    if k_pages.shape != v_pages.shape or k_pages.shape[3] != q.shape[2]:
        raise InvalidArgumentError(
            f"the cpu backend needs K, V and queries of one width, got {tuple(k_pages.shape)}, {tuple(v_pages.shape)} "
            f'and {tuple(q.shape)}; the "reference" backend takes others'
        )
    if q.shape[0] != plan.num_rows or q.shape[1] % k_pages.shape[2]:
        raise InvalidArgumentError(
            f"expected {plan.num_rows} queries, as planned, and a multiple of {k_pages.shape[2]} heads, "
            f"got {q.shape[0]} and {q.shape[1]}"
        )
    if k_pages.stride(3) != 1 or v_pages.stride(3) != 1:
        raise InvalidArgumentError("the last dimension of the pages must be contiguous")
