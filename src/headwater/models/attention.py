"""Grouped-query attention (MHA and MQA are its ends) over a paged cache, with optional norms of queries and keys."""

from __future__ import annotations

from torch import Tensor

from headwater.kernels.rope import rope_and_store
from headwater.models.config import ModelConfig
from headwater.models.context import StepContext
from headwater.models.layers import FusedLinear, FusedRows, ParameterPlacement, RMSNorm, RowLinear, Targets, WidthNorm


class GroupedQueryAttention:
    """One layer's attention; writes the step's KV into the cache and reads all of it back through the backend."""

    def __init__(self, config: ModelConfig, layer: int, place: ParameterPlacement) -> None:
        shape = config.gqa
        heads = place.ranks.tp.heads(config)
        dim = shape.head_dim
        self._layer = layer
        self._scale = shape.scale
        self._num_heads, self._num_kv_heads, self._dim = len(heads.query), len(heads.kv), dim
        kv_part = _scaled(heads.kv, dim)
        total, total_kv = shape.num_heads * dim, shape.num_kv_heads * dim
        part = _scaled(heads.query, dim)
        self.qkv = FusedLinear(
            config.hidden_size,
            (
                FusedRows("q_proj", total, part),
                FusedRows("k_proj", total_kv, kv_part),
                FusedRows("v_proj", total_kv, kv_part),
            ),
            bias=shape.qkv_bias,
            place=place,
        )
        self.output = RowLinear(total, part, config.hidden_size, bias=shape.output_bias, place=place)
        has_norms = shape.qk_norm and not shape.norms_whole_width
        self.q_norm = RMSNorm(dim, config.norm_eps, place) if has_norms else None
        self.k_norm = RMSNorm(dim, config.norm_eps, place) if has_norms else None
        widths = (FusedRows("q_norm", total, part), FusedRows("k_norm", total_kv, kv_part))
        self.width_norm = WidthNorm(widths, config.norm_eps, place) if shape.norms_whole_width else None
        self._eps = config.norm_eps

    def __call__(self, x: Tensor, cos_sin: Tensor, ctx: StepContext) -> Tensor:
        rows = x.shape[0]
        heads = self.qkv(x).view(rows, -1, self._dim)
        first_v = self._num_heads + self._num_kv_heads
        q, k, v = heads[:, : self._num_heads], heads[:, self._num_heads : first_v], heads[:, first_v:]
        if self.width_norm is not None:
            q, k = (x.view(rows, -1, self._dim) for x in self.width_norm((q.flatten(1), k.flatten(1))))
        k_pages, v_pages = ctx.cache.planes(self._layer)
        q_norm = None if self.q_norm is None else self.q_norm.weight
        k_norm = None if self.k_norm is None else self.k_norm.weight
        rope_and_store(q, k, v, cos_sin, ctx.positions, k_pages, v_pages, ctx.slots, q_norm, k_norm, self._eps)
        mixed = ctx.attention.run(q, k_pages, v_pages, ctx.plan, self._scale)
        return self.output(mixed.view(rows, self._num_heads * self._dim))

    def targets(self, prefix: str) -> Targets:
        """The projections, and the norms where there are any."""
        yield from self.qkv.targets(prefix)
        yield from self.output.targets(f"{prefix}.o_proj")
        if self.q_norm is not None and self.k_norm is not None:
            yield from self.q_norm.targets(f"{prefix}.q_norm")
            yield from self.k_norm.targets(f"{prefix}.k_norm")
        if self.width_norm is not None:
            yield from self.width_norm.targets(prefix)


def _scaled(heads: range, dim: int) -> range:
    return range(heads.start * dim, heads.stop * dim)
