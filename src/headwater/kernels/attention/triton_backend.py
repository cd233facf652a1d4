"""The Triton attention backend: decodes by one kernel, everything else by another, in one plan.

Planning uses host data only, and so does `run`: nothing waits for the device, and a step of decodes can be captured
in a CUDA graph. How the work is cut is decided here; the kernels are in `triton_decode` and `triton_prefill`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headwater.kernels.attention.base import AttentionBatch
from headwater.kernels.attention.latent import check_latent
from headwater.kernels.attention.triton_decode import decode_attention, decode_config
from headwater.kernels.attention.triton_latent import (
    latent_attention,
    latent_config,
    latent_splits,
    programs_a_multiprocessor,
    tile_queries,
)
from headwater.kernels.attention.triton_prefill import prefill_attention, prefill_config
from headwater.kernels.attention.triton_tiles import TileConfig
from headwater.kernels.dispatch import require
from headwater.kernels.limits_triton import device_limits

_MAX_SPLITS = 64
_PROGRAMS_PER_SM = 2
_MIN_DECODE_SPLIT = 64
_LONG_DECODE_SPLIT = 2048
"""A request this long is cut even where there are enough requests to fill the device: it would finish last."""
_MIN_PREFILL_SPLIT = 512
_DEEP_DECODE_BYTES = 80 * 1024
"""Shared memory per block from which on `decode_config` may go deep."""


def interpreted() -> bool:
    """Whether Triton kernels run in its interpreter, which needs no GPU (TRITON_INTERPRET was set at import)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@dataclass(slots=True)
class TritonPlan:
    """One step: its shape, and the tile lists made so far (one per tile height, shared by all layers)."""

    batch: AttentionBatch
    tiles: dict[int, Tensor] = field(default_factory=dict)

    def prefill_tiles(self, tile_queries: int) -> Tensor:
        """int32 [n, 2] on the device: (request, first query) of every tile, those with the most KV first, so that
        the long ones do not start last. The first call of a step copies it to the device, without waiting."""
        tiles = self.tiles.get(tile_queries)
        if tiles is None:
            batch = self.batch
            lens = zip(batch.query_lens_cpu, batch.kv_lens_cpu, strict=True)
            work = [
                (kv_len - query_len + first, request, first)
                for request, (query_len, kv_len) in enumerate(lens)
                if request >= batch.num_decodes
                for first in range(0, query_len, tile_queries)
            ]
            work.sort(reverse=True)
            device = batch.kv_lens.device
            host = torch.tensor([item[1:] for item in work], dtype=torch.int32, pin_memory=device.type == "cuda")
            tiles = self.tiles[tile_queries] = host.to(device, non_blocking=True)
        return tiles


class TritonAttention:
    """`AttentionBackend` on CUDA. The keywords are for tuning; left out, they follow from dtype, shape and device."""

    name = "triton"

    def __init__(
        self,
        device: torch.device | str,
        *,
        prefill: TileConfig | None = None,
        decode: TileConfig | None = None,
        latent: TileConfig | None = None,
        num_sms: int | None = None,
    ) -> None:
        limits = device_limits(torch.device(device))
        self._prefill = prefill
        self._decode = decode
        self._latent = latent
        self._num_sms = num_sms or limits.num_sms
        self._shared_bytes = limits.shared_bytes

    def plan(self, batch: AttentionBatch) -> TritonPlan:
        """Keeps the batch: what else is needed depends on the shape of the heads, which `run` sees."""
        return TritonPlan(batch)

    def run(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, plan: TritonPlan, scale: float) -> Tensor:
        """One to four launches: decodes and the rest, each with a merge where its KV is split.

        Scratch for splits is allocated per call (float32, rows × heads × splits × v_dim), a few MiB at most for
        decodes. Raises InvalidArgumentError for shapes and dtypes that do not fit.
        """
        batch = plan.batch
        check_attention(q, k_pages, v_pages, batch, scale)
        out = q.new_empty(q.shape[0], q.shape[1], v_pages.shape[3])
        if batch.num_decodes:
            self._run_decodes(q, k_pages, v_pages, out, plan, scale)
        if batch.num_decodes < batch.num_requests:
            self._run_prefills(q, k_pages, v_pages, out, plan, scale)
        return out

    def _run_decodes(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, out: Tensor, plan: TritonPlan, scale: float
    ) -> None:
        batch = plan.batch
        n = batch.num_decodes
        num_kv_heads = k_pages.shape[2]
        num_programs = n * num_kv_heads
        num_splits, min_split_tokens = decode_splits(num_programs, max(batch.kv_lens_cpu[:n]), self._num_sms)
        crowded = num_programs * num_splits > _PROGRAMS_PER_SM * self._num_sms
        deep = not crowded and self._shared_bytes >= _DEEP_DECODE_BYTES
        group = q.shape[1] // num_kv_heads
        decode_attention(
            q[:n],
            k_pages,
            v_pages,
            out[:n],
            kv_lens=batch.kv_lens,
            page_table=batch.page_table,
            scale=scale,
            config=self._decode or decode_config(q.dtype, q.shape[2], group, deep=deep),
            num_splits=num_splits,
            min_split_tokens=min_split_tokens,
        )

    def _run_prefills(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, out: Tensor, plan: TritonPlan, scale: float
    ) -> None:
        batch = plan.batch
        n = batch.num_decodes
        num_kv_heads = k_pages.shape[2]
        group = q.shape[1] // num_kv_heads
        config = self._prefill or prefill_config(q.dtype, max(q.shape[2], v_pages.shape[3]), group, self._shared_bytes)
        tiles = plan.prefill_tiles(config.block_rows // group)
        num_splits, split_tokens = prefill_splits(
            tiles.shape[0] * num_kv_heads, max(batch.kv_lens_cpu[n:]), self._num_sms
        )
        prefill_attention(
            q[n:],
            k_pages,
            v_pages,
            out[n:],
            row_base=n,
            tiles=tiles,
            query_starts=batch.query_starts,
            kv_lens=batch.kv_lens,
            page_table=batch.page_table,
            scale=scale,
            config=config,
            num_splits=num_splits,
            split_tokens=split_tokens,
        )

    def run_latent(
        self,
        q_latent: Tensor,
        q_rope: Tensor,
        latent_pages: Tensor,
        rope_pages: Tensor,
        plan: TritonPlan,
        scale: float,
        lse: Tensor | None = None,
    ) -> Tensor:
        """One to four launches, as `run`."""
        batch = plan.batch
        check_latent(q_latent, q_rope, latent_pages, rope_pages, batch, scale, lse)
        check_batch(batch)
        out = q_latent.new_empty(q_latent.shape)
        n, num_heads = batch.num_decodes, q_latent.shape[1]
        for requests, rows, tiled in (
            (slice(0, n), slice(0, n), False),
            (slice(n, batch.num_requests), slice(n, len(out)), True),
        ):
            if requests.start == requests.stop:
                continue
            width = q_latent.shape[2] + q_rope.shape[2]
            tile_rows = num_heads * (max(batch.query_lens_cpu[requests]) if tiled else 1)
            config = self._latent or latent_config(q_latent.dtype, tile_rows, width, self._shared_bytes)
            tiles = plan.prefill_tiles(tile_queries(num_heads, config)) if tiled else None
            num_programs = (n if tiles is None else len(tiles)) * _ceil_div(num_heads, config.block_rows)
            at_once = self._num_sms * programs_a_multiprocessor(config)
            num_splits, least = latent_splits(num_programs, max(batch.kv_lens_cpu[requests]), at_once)
            latent_attention(
                q_latent[rows],
                q_rope[rows],
                latent_pages,
                rope_pages,
                out[rows],
                None if lse is None else lse[rows],
                tiles=tiles,
                row_base=rows.start,
                query_starts=batch.query_starts,
                kv_lens=batch.kv_lens,
                page_table=batch.page_table,
                scale=scale,
                config=config,
                num_splits=num_splits,
                min_split_tokens=least,
            )
        return out


def decode_splits(num_programs: int, max_kv_len: int, num_sms: int) -> tuple[int, int]:
    """(number of splits, least tokens per split) for `num_programs` = requests × KV heads.

    As many splits as the device runs at once; where the requests alone fill it, only long ones are cut.
    """
    wanted = min(max(_PROGRAMS_PER_SM * num_sms // num_programs, 1), _MAX_SPLITS)
    if wanted > 8:
        wanted = 1 << (wanted.bit_length() - 1)  # the merge works on a power of two
    for_long = min(_ceil_div(max_kv_len, _LONG_DECODE_SPLIT), 8)
    if wanted == 1:
        return for_long, _LONG_DECODE_SPLIT
    return min(max(wanted, for_long), _ceil_div(max_kv_len, _MIN_DECODE_SPLIT)), _MIN_DECODE_SPLIT


def prefill_splits(num_programs: int, max_kv_len: int, num_sms: int) -> tuple[int, int]:
    """(number of splits, tokens per split) for `num_programs` = tiles × KV heads: more than one only where they
    leave most of the device idle, as a short suffix on a long prefix does."""
    wanted = min(num_sms // num_programs, _ceil_div(max_kv_len, _MIN_PREFILL_SPLIT), _MAX_SPLITS)
    if wanted <= 1:
        return 1, max_kv_len
    # A multiple of every block size, so that a split's unmasked part is whole blocks.
    split_tokens = _ceil_div(_ceil_div(max_kv_len, wanted), 128) * 128
    return _ceil_div(max_kv_len, split_tokens), split_tokens


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def check_attention(q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: AttentionBatch, scale: float) -> None:
    """What `AttentionBackend.run` asks of its arguments; host data only."""
    require(
        q.dim() == 3
        and k_pages.dim() == v_pages.dim() == 4
        and k_pages.shape[:3] == v_pages.shape[:3]
        and q.shape[2] == k_pages.shape[3]
        and q.shape[1] % k_pages.shape[2] == 0
        and k_pages.shape[1] == batch.page_size
        and q.dtype == k_pages.dtype == v_pages.dtype
        and q.stride(2) == k_pages.stride(3) == v_pages.stride(3) == 1
        and scale > 0,
        "q [rows, heads, dim] and pages [pages, page_size, kv_heads, dim] of one dtype, contiguous in the last "
        "dimension, heads a multiple of kv_heads, a positive scale, and the page size of the plan",
        q=q,
        k_pages=k_pages,
        v_pages=v_pages,
        page_size=batch.page_size,
        scale=scale,
    )
    check_batch(batch)


def check_batch(batch: AttentionBatch) -> None:
    """What the kernels ask of a plan's tensors; host data only."""
    require(
        batch.query_starts.dtype == batch.kv_lens.dtype == batch.page_table.dtype == torch.int32
        and batch.page_table.stride(1) == 1
        and batch.page_table.shape[0] >= batch.num_requests,
        "query_starts, kv_lens and page_table in int32, page_table contiguous in its rows",
        query_starts=batch.query_starts,
        kv_lens=batch.kv_lens,
        page_table=batch.page_table,
    )
