"""Paged attention for CPUs: gather a little KV into memory that stays in the cache, then torch's fused kernel.

The fused kernel never writes a matrix of scores, so a long prompt needs no memory beyond its own KV. It wants KV in
one piece; most of what that copy costs is reading main memory, which attending in place would pay as well (it was a
tenth faster on two cores). The units in which it works, and why, are in `cpu_plan`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812 - the name that torch's own documentation uses
from torch import Tensor

from headwater.errors import InvalidArgumentError
from headwater.kernels.attention.base import AttentionBatch
from headwater.kernels.attention.cpu_gather import CpuPlane, Gatherer, cpu_plane
from headwater.kernels.attention.cpu_latent import LatentStep
from headwater.kernels.attention.cpu_plan import CpuPlan, DecodePlan, PrefillPlan, plan_step
from headwater.kernels.attention.latent import check_latent

_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""(q, k, v) as [batch, heads, length, dim], any strides but the last; returns the output and its log-sum-exp."""


class CpuAttention:
    """Attention over pages in main memory. The same inputs give the same bits."""

    name = "cpu"

    def __init__(self) -> None:
        self._gatherer = Gatherer()

    def plan(self, batch: AttentionBatch) -> CpuPlan:
        """Where to gather what. Costs a millisecond or two for dozens of requests."""
        return plan_step(batch)

    def run(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, plan: CpuPlan, scale: float) -> Tensor:
        """Attend. Memory: the KV of `GROUP_TOKENS` tokens, or of the longest prompt. The fused kernel wants one width:
        where V has another than K, all pages are copied, which is meant for pages made for one step."""
        _check(q, k_pages, v_pages, plan)
        v_dim, width = v_pages.shape[3], max(q.shape[2], v_pages.shape[3])
        if v_dim != q.shape[2]:
            q, k_pages, v_pages = (F.pad(x, (0, width - x.shape[-1])) for x in (q, k_pages, v_pages))
        k_plane, v_plane = cpu_plane("k", k_pages), cpu_plane("v", v_pages)
        # [rows, heads, dim] seen as [rows, KV heads, query heads of each, dim]
        q = q.view(len(q), k_pages.shape[2], -1, q.shape[2])
        out = torch.empty(q.shape, dtype=q.dtype)
        if plan.decodes is not None:
            self._decode(q, k_plane, v_plane, plan.decodes, scale, out)
        for prefill in plan.prefills:
            self._prefill(q[prefill.rows], k_plane, v_plane, prefill, scale, out[prefill.rows])
        return out.flatten(1, 2)[..., :v_dim].contiguous()

    def run_latent(
        self,
        q_latent: Tensor,
        q_rope: Tensor,
        latent_pages: Tensor,
        rope_pages: Tensor,
        plan: CpuPlan,
        scale: float,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Attend over latents, in float32 whatever the dtype. Memory: the latents of `GROUP_TOKENS` tokens or of the
        longest prompt, twice, and 4 MiB of scores."""
        _check_device(q_latent, latent_pages)
        check_latent(q_latent, q_rope, latent_pages, rope_pages, plan.batch, scale, lse)
        q = torch.cat((q_latent, q_rope), dim=-1)
        out = q_latent.new_zeros(q_latent.shape)
        lse = torch.empty(out.shape[:2]) if lse is None else lse
        planes = cpu_plane("latent", latent_pages), cpu_plane("rope", rope_pages)
        LatentStep(
            self._gatherer, *planes, q.to(torch.promote_types(q.dtype, torch.float32)), scale, out, lse.fill_(-math.inf)
        ).run(plan)
        return out

    def _decode(
        self, q: Tensor, k_plane: CpuPlane, v_plane: CpuPlane, plan: DecodePlan, scale: float, out: Tensor
    ) -> None:
        # A decode sees all of its KV, so the query heads that share a KV head can stand in the place of queries.
        q = q.index_select(0, plan.request_of)
        outs, lses = [], []
        for group in plan.groups:
            k = _by_unit(self._gatherer.gather(k_plane, group.tokens), group.length)
            v = _by_unit(self._gatherer.gather(v_plane, group.tokens), group.length)
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
        self, q: Tensor, k_plane: CpuPlane, v_plane: CpuPlane, plan: PrefillPlan, scale: float, out: Tensor
    ) -> None:
        # KV heads as the batch, so that the query heads of each can share it without a copy.
        q = q.permute(1, 2, 0, 3)
        k = _by_head(self._gatherer.gather(k_plane, plan.tokens), q.shape[1])
        v = _by_head(self._gatherer.gather(v_plane, plan.tokens), q.shape[1])
        before = plan.num_before
        result, lse = _attend(q, k[:, :, before:], v[:, :, before:], is_causal=True, scale=scale)
        if before:
            earlier, earlier_lse = _attend(q, k[:, :, :before], v[:, :, :before], scale=scale)
            share = torch.sigmoid(earlier_lse - lse).unsqueeze(-1)
            result = torch.lerp(result, earlier, share.to(result.dtype))
        out.copy_(result.permute(2, 0, 1, 3))


def _by_unit(kv: Tensor, length: int) -> Tensor:
    """[units * length, heads, dim] as [units, heads, length, dim], without a copy."""
    return kv.view(-1, length, *kv.shape[1:]).transpose(1, 2)


def _by_head(kv: Tensor, share: int) -> Tensor:
    """[length, heads, dim] as [heads, share, length, dim], without a copy: every KV head `share` times."""
    return kv.transpose(0, 1).unsqueeze(1).expand(-1, share, -1, -1)


def _check(q: Tensor, k_pages: Tensor, v_pages: Tensor, plan: CpuPlan) -> None:
    _check_device(q, k_pages)
    if k_pages.shape[:3] != v_pages.shape[:3] or k_pages.shape[3] != q.shape[2]:
        raise InvalidArgumentError(
            f"expected as many pages of K as of V, and queries as wide as K, got {tuple(k_pages.shape)}, "
            f"{tuple(v_pages.shape)} and {tuple(q.shape)}"
        )
    if q.shape[0] != plan.num_rows or q.shape[1] % k_pages.shape[2]:
        raise InvalidArgumentError(
            f"expected {plan.num_rows} queries, as planned, and a multiple of {k_pages.shape[2]} heads, "
            f"got {q.shape[0]} and {q.shape[1]}"
        )
    if k_pages.stride(3) != 1 or v_pages.stride(3) != 1:
        raise InvalidArgumentError("the last dimension of the pages must be contiguous")


def _check_device(q: Tensor, pages: Tensor) -> None:
    if q.device.type != "cpu" or pages.device.type != "cpu":
        raise InvalidArgumentError(
            f"the cpu backend attends in main memory, got queries on {q.device}, KV on {pages.device}"
        )
