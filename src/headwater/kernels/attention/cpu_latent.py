"""Latent attention for CPUs: the units of `cpu_plan`, with matrix products in float32 and a running softmax.

All query heads share the one latent head, so the heads of some queries stand side by side as the rows of a product,
and one gathered block of latents serves as K and as V.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwater.kernels.attention.cpu_gather import CpuPlane, Gatherer
from headwater.kernels.attention.cpu_plan import CpuPlan, DecodePlan, GatheredTokens, PrefillPlan
from headwater.kernels.attention.latent import merge_parts

BLOCK_ROWS = 2048
"""Queries × heads whose scores exist at once."""
BLOCK_TOKENS = 512
"""Tokens whose scores exist at once: 4 MiB for `BLOCK_ROWS`."""


class LatentStep:
    """One call of `run_latent`: the planes of one layer, the queries, and where the results go."""

    def __init__(
        self, gatherer: Gatherer, latent: CpuPlane, rope: CpuPlane, q: Tensor, scale: float, out: Tensor, lse: Tensor
    ) -> None:
        self._gatherer, self._latent, self._rope = gatherer, latent, rope
        self._q, self._out, self._lse = q * scale, out, lse
        self._latent_dim = latent.pages.shape[3]

    def run(self, plan: CpuPlan) -> None:
        """Fill `out` and `lse`, which begin as 0 and -inf."""
        if plan.decodes is not None:
            self._decode(plan.decodes)
        for prefill in plan.prefills:
            self._prefill(prefill)

    def _decode(self, plan: DecodePlan) -> None:
        q = self._q.index_select(0, plan.request_of)
        outs, lses = [], []
        for group in plan.groups:
            k = self._keys(group.tokens).unflatten(0, (-1, group.length))
            scores = torch.bmm(q[group.units], k.transpose(1, 2))
            if group.mask is not None:
                scores += group.mask[:, 0]
            lse = scores.logsumexp(-1)
            weights = scores.sub_(lse.unsqueeze(-1)).exp_()
            outs.append(torch.bmm(weights, k[..., : self._latent_dim]))
            lses.append(lse)
        parts, part_lses = torch.cat(outs), torch.cat(lses)
        if plan.merge is not None:
            # One part more than there are, empty: the table names it where a request has fewer parts than another.
            parts = torch.cat((parts, parts.new_zeros(1, *parts.shape[1:])))
            part_lses = torch.cat((part_lses, part_lses.new_full((1, part_lses.shape[1]), float("-inf"))))
            table = plan.merge.table.T
            merged, merged_lse = merge_parts(parts[table], part_lses[table])
            self._out[: plan.num_requests], self._lse[: plan.num_requests] = merged.to(self._out.dtype), merged_lse
        else:
            self._out.index_copy_(0, plan.request_of, parts.to(self._out.dtype))
            self._lse.index_copy_(0, plan.request_of, part_lses.to(self._lse.dtype))

    def _prefill(self, plan: PrefillPlan) -> None:
        q, out, lse = self._q[plan.rows], self._out[plan.rows], self._lse[plan.rows]
        k = self._keys(plan.tokens)
        step = max(BLOCK_ROWS // q.shape[1], 1)
        for first in range(0, len(q), step):
            last = min(first + step, len(q))
            positions = torch.arange(first, last).add_(plan.num_before)
            result, sums = self._attend(q[first:last], k[: max(plan.num_before + last, 0)], positions)
            out[first:last], lse[first:last] = result.to(out.dtype), sums

    def _attend(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(out, lse) of queries at `positions` over the tokens 0 … len(k)."""
        num_queries, num_heads, _ = q.shape
        rows = q.flatten(0, 1)
        row_positions = positions.repeat_interleave(num_heads).unsqueeze(1)
        top = rows.new_full((len(rows), 1), float("-inf"))
        total = rows.new_zeros(len(rows), 1)
        acc = rows.new_zeros(len(rows), self._latent_dim)
        for start in range(0, len(k), BLOCK_TOKENS):
            block = k[start : start + BLOCK_TOKENS]
            scores = rows @ block.T
            if start + len(block) > int(positions[0]) + 1:
                scores.masked_fill_(torch.arange(start, start + len(block)) > row_positions, float("-inf"))
            new_top = torch.maximum(top, scores.amax(1, keepdim=True))
            shift = new_top.masked_fill(new_top == float("-inf"), 0.0)
            weights = scores.sub_(shift).exp_()
            decay = (top - shift).exp_()
            total.mul_(decay).add_(weights.sum(1, keepdim=True))
            acc.mul_(decay).addmm_(weights, block[:, : self._latent_dim])
            top = new_top
        acc /= total.masked_fill(total == 0.0, 1.0)
        lse = (top + total.log()).view(num_queries, num_heads)
        return acc.view(num_queries, num_heads, -1), lse

    def _keys(self, tokens: GatheredTokens) -> Tensor:
        latent = self._gatherer.gather(self._latent, tokens)
        rope = self._gatherer.gather(self._rope, tokens)
        return torch.cat((latent, rope), dim=-1).squeeze(1).to(self._q.dtype)
