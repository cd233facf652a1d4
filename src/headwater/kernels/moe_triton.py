"""`run_experts` in Triton: how the work is cut, and its launches. The kernels are in `moe_kernels`.

    few pairs     gate_up (a program per pair and columns) → down_sum (a program per row and columns)
    many pairs    sort_pairs → grouped_gate_up → grouped_down → sum

Nothing waits for the device and every grid follows from shapes alone (unused programs return at once), so that a
step can be captured in a CUDA graph. Sums are made in a fixed order: the same inputs give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from headwater.kernels.dispatch import require
from headwater.kernels.limits_triton import device_limits
from headwater.kernels.moe_kernels import down_kernel, gate_up_kernel, sort_kernel, sum_kernel
from headwater.kernels.moe_pair_kernels import pair_down_sum_kernel, pair_gate_up_kernel
from headwater.kernels.moe_reference import check_experts

PAIRED = 32
"""Up to so many pairs no sorting is worth its launch."""
_SORT_BLOCK = 2048
_SUM_COLS = 1024


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """How one grouped product is cut and compiled."""

    block_cols: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Both products; `block_rows` is common, because the tiles of rows are."""

    block_rows: int
    gate_up: GemmConfig
    """Its `block_cols` are read twice, of the gate and of the up half."""
    down: GemmConfig


_PAIR_CONFIG = ExpertsConfig(1, GemmConfig(8, 256, 4, 4), GemmConfig(4, 256, 4, 4))
_WIDE_CONFIG = ExpertsConfig(16, GemmConfig(32, 32, 4, 2), GemmConfig(32, 32, 4, 2))
_HALF_CONFIGS = {
    16: ExpertsConfig(16, GemmConfig(32, 128, 4, 4), GemmConfig(64, 128, 4, 4)),
    64: ExpertsConfig(64, GemmConfig(64, 64, 4, 4), GemmConfig(128, 64, 4, 4)),
    128: ExpertsConfig(128, GemmConfig(128, 64, 8, 4), GemmConfig(256, 64, 8, 4)),
}
"""By rows of a tile: the least that holds an expert's mean rows."""


@lru_cache(maxsize=256)
def experts_config(dtype: torch.dtype, num_pairs: int, num_experts: int, shared_bytes: int) -> ExpertsConfig:
    """The config for so many pairs, from the mean rows of an expert; skew makes more tiles, not larger ones. Its tiles
    fit a block's shared memory, with fewer of them in flight where that is small."""
    if num_pairs <= PAIRED:
        return _PAIR_CONFIG
    if dtype.itemsize > 2:
        return _WIDE_CONFIG
    mean = num_pairs / num_experts
    rows = next((rows for rows in _HALF_CONFIGS if mean <= rows), max(_HALF_CONFIGS))
    config = _HALF_CONFIGS[rows]
    return ExpertsConfig(
        rows,
        _fitted(config.gate_up, rows + 2 * config.gate_up.block_cols, dtype, shared_bytes),
        _fitted(config.down, rows + config.down.block_cols, dtype, shared_bytes),
    )


def _fitted(config: GemmConfig, lines: int, dtype: torch.dtype, shared_bytes: int) -> GemmConfig:
    """`config` with at most as many stages of `lines` times `block_k` as fit, and narrower where two do not."""
    stages = min(config.num_stages, shared_bytes // (lines * config.block_k * dtype.itemsize))
    if stages >= 2:
        return replace(config, num_stages=stages)
    return replace(config, block_cols=min(config.block_cols, 32), block_k=32, num_stages=2)


def run_experts_triton(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    config: ExpertsConfig | None = None,
) -> Tensor:
    """`moe.run_experts`: two launches for few pairs, four for many. The matrices lie row by row."""
    check_experts(x, ids, weights, gate_up, down)
    require(
        ids.is_contiguous() and weights.is_contiguous() and x.stride(1) == gate_up.stride(2) == down.stride(2) == 1,
        "ids and weights contiguous, and x, gate_up and down contiguous in the last dimension",
        x=x,
        ids=ids,
        weights=weights,
        gate_up=gate_up,
        down=down,
    )
    if ids.numel() == 0:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    if config is None:
        config = experts_config(x.dtype, ids.numel(), len(gate_up), device_limits(x.device).shared_bytes)
    if config.block_rows == 1:
        inner = pair_gate_up(x, ids, gate_up, config.gate_up)
        return pair_down_sum(inner, ids, weights, down, config.down)
    pairs = sort_pairs(ids, len(gate_up), config.block_rows)
    inner = grouped_gate_up(x, pairs, gate_up, config.gate_up)
    return grouped_down_sum(inner, pairs, ids, weights, down, config.down)


class SortedPairs(NamedTuple):
    """Pairs by expert, and the tiles of rows that a grouped product computes."""

    order: Tensor
    """int32 [pairs]: which pair stands where; foreign pairs are left out, so that the end may hold anything."""
    counts: Tensor
    """int32 [experts]: rows of each."""
    tiles: Tensor
    """int32 [3, most tiles]: expert (-1 where there is no tile), first place in `order`, end of the expert's places."""
    block_rows: int
    top_k: int


def most_tiles(num_pairs: int, num_experts: int, block_rows: int) -> int:
    """The most tiles that any choice of experts can need: one for each expert that has rows, and the full ones."""
    used = min(num_experts, num_pairs)
    return used + (num_pairs - used) // block_rows


def sort_pairs(ids: Tensor, num_experts: int, block_rows: int) -> SortedPairs:
    """One launch, a program per expert, each of which reads all ids: no atomics, and always the same order."""
    num_pairs = ids.numel()
    tiles = ids.new_empty(3, most_tiles(num_pairs, num_experts, block_rows))
    result = SortedPairs(ids.new_empty(num_pairs), ids.new_empty(num_experts), tiles, block_rows, ids.shape[1])
    block = min(max(triton.next_power_of_2(num_pairs), 128), _SORT_BLOCK)
    sort_kernel[(num_experts,)](
        ids,
        result.order,
        result.counts,
        tiles,
        num_pairs,
        tiles.shape[1],
        NUM_EXPERTS=num_experts,
        BINS=triton.next_power_of_2(num_experts + 1),
        BLOCK=block,
        BLOCK_ROWS=block_rows,
        num_warps=8 if block > 512 else 4,
    )
    return result


def grouped_gate_up(x: Tensor, pairs: SortedPairs, gate_up: Tensor, config: GemmConfig) -> Tensor:
    """silu(gate) · up for every pair, [pairs, inner] in the sorted order. One launch for all experts."""
    inner_dim, hidden = gate_up.shape[1] // 2, gate_up.shape[2]
    inner = x.new_empty(pairs.order.numel(), inner_dim)
    num_col_tiles = triton.cdiv(inner_dim, config.block_cols)
    gate_up_kernel[(pairs.tiles.shape[1] * num_col_tiles,)](
        x,
        pairs.order,
        pairs.tiles,
        gate_up,
        inner,
        pairs.tiles.shape[1],
        num_col_tiles,
        x.stride(0),
        *gate_up.stride()[:2],
        TOP_K=pairs.top_k,
        INNER=inner_dim,
        HIDDEN=hidden,
        BLOCK_ROWS=pairs.block_rows,
        BLOCK_COLS=config.block_cols,
        BLOCK_K=config.block_k,
        PRECISION=_precision(x),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return inner


def grouped_down_sum(
    inner: Tensor, pairs: SortedPairs, ids: Tensor, weights: Tensor, down: Tensor, config: GemmConfig
) -> Tensor:
    """[rows, hidden]: each row's weighted sum, in the order of its choices. One launch for all experts, and one for
    the sums over [rows, k, hidden] of weighted outputs in the dtype of `inner`."""
    outer = grouped_down(inner, pairs, weights, down, config)
    num_rows, top_k = ids.shape
    num_experts, hidden, _ = down.shape
    out = inner.new_empty(num_rows, hidden)
    cols = min(triton.next_power_of_2(hidden), _SUM_COLS)
    sum_kernel[(num_rows, triton.cdiv(hidden, cols))](
        outer, ids, out, num_experts, TOP_K=top_k, HIDDEN=hidden, BLOCK_COLS=cols, num_warps=4
    )
    return out


def grouped_down(inner: Tensor, pairs: SortedPairs, weights: Tensor, down: Tensor, config: GemmConfig) -> Tensor:
    """Weighted outputs of every pair, [pairs, hidden] in the pairs' own order; foreign ones are not written."""
    _, hidden, inner_dim = down.shape
    outer = inner.new_empty(pairs.order.numel(), hidden)
    num_col_tiles = triton.cdiv(hidden, config.block_cols)
    down_kernel[(pairs.tiles.shape[1] * num_col_tiles,)](
        inner,
        pairs.order,
        pairs.tiles,
        weights,
        down,
        outer,
        pairs.tiles.shape[1],
        num_col_tiles,
        *down.stride()[:2],
        INNER=inner_dim,
        HIDDEN=hidden,
        BLOCK_ROWS=pairs.block_rows,
        BLOCK_COLS=config.block_cols,
        BLOCK_K=config.block_k,
        PRECISION=_precision(inner),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return outer


def pair_gate_up(x: Tensor, ids: Tensor, gate_up: Tensor, config: GemmConfig) -> Tensor:
    """silu(gate) · up for every pair, [pairs, inner] in the pairs' own order; foreign ones are not written."""
    num_experts, inner_dim, hidden = len(gate_up), gate_up.shape[1] // 2, gate_up.shape[2]
    inner = x.new_empty(ids.numel(), inner_dim)
    pair_gate_up_kernel[(triton.cdiv(inner_dim, config.block_cols), ids.numel())](
        x,
        ids,
        gate_up,
        inner,
        num_experts,
        x.stride(0),
        *gate_up.stride()[:2],
        TOP_K=ids.shape[1],
        INNER=inner_dim,
        HIDDEN=hidden,
        BLOCK_COLS=config.block_cols,
        BLOCK_K=min(config.block_k, triton.next_power_of_2(hidden)),
        STAGES=config.num_stages,
        num_warps=config.num_warps,
    )
    return inner


def pair_down_sum(inner: Tensor, ids: Tensor, weights: Tensor, down: Tensor, config: GemmConfig) -> Tensor:
    """[rows, hidden]: each row's weighted sum, in the order of its choices, without rounding in between."""
    num_experts, hidden, inner_dim = down.shape
    out = inner.new_empty(ids.shape[0], hidden)
    pair_down_sum_kernel[(triton.cdiv(hidden, config.block_cols), ids.shape[0])](
        inner,
        ids,
        weights,
        down,
        out,
        num_experts,
        *down.stride()[:2],
        TOP_K=ids.shape[1],
        INNER=inner_dim,
        HIDDEN=hidden,
        BLOCK_COLS=config.block_cols,
        BLOCK_K=min(config.block_k, triton.next_power_of_2(inner_dim)),
        STAGES=config.num_stages,
        num_warps=config.num_warps,
    )
    return out


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"
