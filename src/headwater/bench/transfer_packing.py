"""How fast a device packs and unpacks KV between its paged cache and staging, beside a copy of its own memory.

The values are like real KV: normal, with a scale for each channel. What was packed is unpacked into a cleared cache and
must be there again, before anything is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwater.bench.measure import Note, Rounds, gbps
from headwater.bench.transfer_gpu import AXES, LATENT_AXES, TransferBench, run_rounds
from headwater.errors import EngineError
from headwater.kernels.extent import Compact, Move, Pages, Spans, Table, gather_rows, scatter_rows
from headwater.kernels.pack import packed_bytes, packed_fits
from headwater.kv.spec import KVSpec
from headwater.stores.url import format_size
from headwater.transfer.view import PagedView, view_tensors

PACKED_TOKENS = 32768
"""At most: 4.3 GB of an 8B-class model."""


def bench_packing(bench: TransferBench, note: Note, device: torch.device) -> dict[str, Any]:
    """All figures. Raises EngineError where a value does not come back."""
    tokens = min(bench.num_tokens, PACKED_TOKENS)
    spec = KVSpec.gqa(
        num_layers=bench.num_layers, num_kv_heads=bench.num_kv_heads, head_dim=bench.head_dim, dtype="bfloat16"
    )
    note(f"packing {tokens:,} tokens, {format_size(spec.extent_bytes(tokens))}, {bench.pairs} rounds")
    cache = PackedCache(spec, tokens, bench.chunk_tokens, bench.block_size, device)
    cache.check()
    copy = DeviceCopy(torch.empty_like(cache.staging))
    work: dict[str, Callable[[], object]] = {
        "copy": copy.run,
        "pack": partial(gather_rows, cache.move),
        "unpack": partial(scatter_rows, cache.move),
    }
    return _report(run_rounds(work, bench.pairs, lambda: None, device), cache, copy)


class PackedCache:
    """A cache of bfloat16 KV, and staging for all of it, packed."""

    def __init__(self, spec: KVSpec, tokens: int, chunk: int, block_size: int, device: torch.device) -> None:
        count = tokens // block_size
        widths = [plane.width for plane in spec.planes]
        shape: tuple[int, ...] = (len(widths), count, block_size, spec.num_kv_heads, widths[0])
        axes: tuple[str, ...] = AXES
        if len(set(widths)) > 1:
            shape, axes = (count, block_size, sum(widths)), LATENT_AXES
        self.layers = [_like_kv(shape, device) for _ in range(spec.num_layers)]
        self.view: PagedView = view_tensors(spec, self.layers, axes)
        order = np.random.default_rng(7).permutation(count).astype(np.int64)
        self.spans = packed_spans(self.view.pages, order, tokens // chunk, chunk)
        self.num_tiles = tokens // chunk * spec.num_tiles
        tile = int(self.spans.tile_bytes(spec.row_bytes)[0])
        self.chunk, self.raw_bytes, self.packed_bytes = chunk, spec.extent_bytes(tokens), self.num_tiles * tile
        self.staging = torch.empty(self.packed_bytes, dtype=torch.uint8, device=device)
        staged, heads = Compact(self.staging.data_ptr(), spec.num_layers), range(spec.num_kv_heads)
        uploaded = self.spans.upload(device, spec.row_bytes) if device.type != "cpu" else None
        self.move = Move(self.view.pages, self.spans, range(spec.num_layers), heads, staged, uploaded)

    def check(self) -> None:
        """Raise EngineError unless everything fits, and comes back."""
        gather_rows(self.move)
        tiles = self.staging.view(self.num_tiles, -1)
        if not bool(packed_fits(tiles, self.view.pages.widths, self.chunk).all()):
            raise EngineError("tiles of usual values do not fit their packed size")
        ends = (self.layers[0], self.layers[-1])
        before = [layer.clone() for layer in ends]
        for layer in ends:
            layer.zero_()
        scatter_rows(self.move)
        for layer, was in zip(ends, before, strict=True):
            if not torch.equal(layer.view(torch.int16), was.view(torch.int16)):
                raise EngineError("what was unpacked is not what was packed")


def packed_spans(pages: Pages, blocks: Table, count: int, chunk: int) -> Spans:
    """Whole chunks, one after another, packed."""
    chunks, numbers = chunk // pages.block_size, np.arange(count, dtype=np.int64)
    sizes = np.full_like(numbers, packed_bytes(pages.widths, chunk))
    return Spans(blocks, numbers * chunks, np.zeros_like(numbers), np.full_like(numbers, chunk), sizes)


class DeviceCopy:
    """A copy from one half of some memory to the other: the speed of the memory itself."""

    def __init__(self, memory: Tensor) -> None:
        self._halves = memory[: len(memory) // 2 * 2].view(2, -1)

    @property
    def num_bytes(self) -> int:
        """Bytes that are read and written."""
        return self._halves.numel()

    def run(self) -> None:
        """Once."""
        self._halves[1].copy_(self._halves[0])


def _report(rounds: Rounds, cache: PackedCache, copy: DeviceCopy) -> dict[str, Any]:
    """Gigabytes of raw KV a second; and bytes read and written, against those of a copy."""
    report: dict[str, Any] = {"device_copy_gbps": gbps(copy.num_bytes, rounds.time("copy"))}
    traffic = cache.raw_bytes + cache.packed_bytes
    for verb in ("pack", "unpack"):
        report[f"{verb}_gbps"] = gbps(cache.raw_bytes, rounds.time(verb))
        report[f"{verb}_copy_ratio"] = rounds.ratio("copy", verb) * traffic / copy.num_bytes
        report[f"{verb}_noise"] = max(rounds.spread(verb), rounds.spread("copy"))
    return report


def _like_kv(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Normal values, with a scale for every channel of every head and plane."""
    scales = torch.randn((shape[0], 1, 1, *shape[3:]) if len(shape) == 5 else shape[-1:], device=device).mul_(2).exp_()
    return torch.randn(shape, dtype=torch.float32, device=device).mul_(scales).to(torch.bfloat16)
