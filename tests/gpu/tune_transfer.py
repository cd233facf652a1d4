"""Measures gather, scatter, checksums and copies on this machine's GPU, after checking that they are right.

Run by hand: `PYTHONPATH=src:tests python3 tests/gpu/tune_transfer.py`. Prints a table; the configs that it found best
belong into `CopyConfig` and `HashConfig`.
"""

# ruff: noqa: B023 - what is measured is called before the loop goes on

from __future__ import annotations

import mmap
import os
import random
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from triton.testing import do_bench

from headwater.kernels.extent_triton import GATHER, SCATTER, CopyConfig, move_rows_triton
from headwater.kernels.xxh3 import unsigned, xxh3_tiles
from headwater.kernels.xxh3_triton import HashConfig, xxh3_tiles_triton
from headwater.kv.format import checksum
from headwater.kv.spec import KVSpec
from headwater.kv.topology import Shard, whole_shard
from headwater.transfer.convert import ConversionPlan, PageSpan, build_move, gather, plan_spans, scatter
from headwater.transfer.copy import Copy, CopyRows, join_copies, register_host, run_copies
from headwater.transfer.verify import staged_checksums, verify_staged
from headwater.transfer.view import PagedView, view_tensors

SPEC = KVSpec.gqa(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16")
BLOCK, CHUNK, TOKENS = 16, 256, 16384
TOTAL = SPEC.extent_bytes(TOKENS)
COPIES = [CopyConfig(size, heads, warps) for size in (8192, 16384, 32768) for heads in (1, 8) for warps in (4, 8)]
HASHES = [HashConfig(blocks, warps, tiles) for blocks in (4, 8, 16, 32) for warps in (2, 4, 8) for tiles in (8,)]
HASHES += [HashConfig(8, 4, tiles) for tiles in (1, 2, 4, 16, 32)]


def rate(num_bytes: float, function: Callable[[], object]) -> float:
    """GB/s by the median, on the device."""
    return num_bytes / float(do_bench(function, warmup=10, rep=60, return_mode="median")) / 1e6


def wall_rate(num_bytes: float, function: Callable[[], object], repeats: int = 7) -> float:
    """GB/s by the median, from the call to an idle device."""
    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return num_bytes / statistics.median(times[1:]) / 1e9


def make_cache() -> tuple[PagedView, list[int]]:
    """NHD, a tensor for each layer, blocks in no order."""
    num_blocks = TOKENS // BLOCK + 8
    shape = (2, num_blocks, BLOCK, SPEC.num_kv_heads, 128)
    layers = [
        torch.randint(-(2**31), 2**31 - 1, (*shape[:-1], 64), dtype=torch.int32, device="cuda").view(torch.bfloat16)
        for _ in range(SPEC.num_layers)
    ]
    blocks = random.sample(range(num_blocks), TOKENS // BLOCK)
    return view_tensors(SPEC, layers, ("plane", "block", "token", "head", "dim")), blocks


def make_plan(
    view: PagedView, blocks: list[int], shard: Shard, first: int = 0, count: int = TOKENS // CHUNK
) -> ConversionPlan:
    return plan_spans(view, shard, [PageSpan(blocks, i * CHUNK, CHUNK) for i in range(first, first + count)])


def map_shared(num_bytes: int) -> np.ndarray:
    """Shared memory as the shm store has it: prefaulted and registered."""
    path = f"/dev/shm/headwater-tune-{os.getpid()}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.unlink(path)
    os.posix_fallocate(fd, 0, num_bytes)
    memory = mmap.mmap(fd, num_bytes)
    os.close(fd)
    array = np.frombuffer(memory, np.uint8)
    array[:: mmap.PAGESIZE] = 1
    start = time.perf_counter()
    register_host(array)
    print(f"registered {num_bytes >> 20} MiB in {time.perf_counter() - start:.3f} s")
    return array


def tune_moves(view: PagedView, blocks: list[int], staging: torch.Tensor) -> None:
    plan = make_plan(view, blocks, whole_shard(SPEC))
    gather(plan, view.layers, staging)
    want = torch.stack([torch.stack(list(_planes(view, layer, blocks))) for layer in (0, 31)])
    got = staging.view(torch.int32).view(TOKENS // CHUNK, 32, 8, 2, CHUNK, 64)[:, [0, 31]]
    # [chunk, layer, head, plane, token, dim] against [layer, plane, chunk, token, head, dim]
    assert torch.equal(got, want.view(2, 2, TOKENS // CHUNK, CHUNK, 8, 64).permute(2, 0, 4, 1, 3, 5))
    halves = staging.view(2, -1)
    print(f"device copy of {TOTAL >> 21} MiB: {rate(TOTAL / 2, lambda: halves[0].copy_(halves[1])):.0f} GB/s")
    for scattered in (False, True):
        move = build_move(plan, view.layers, staging, writable=True)
        found = {c: rate(TOTAL, lambda: move_rows_triton(move, scatter=scattered, config=c)) for c in COPIES}
        for config, speed in sorted(found.items(), key=lambda item: -item[1])[:5]:
            print(f"{'scatter' if scattered else 'gather'} {tuple(config)}: {speed:.0f} GB/s")
        print(f"  worst {min(found.values()):.0f}, default {found[SCATTER if scattered else GATHER]:.0f}")
    few = make_plan(view, blocks, whole_shard(SPEC), 0, 4)
    size = few.staged_bytes(4)
    speed = rate(size, lambda: gather(few, range(4), staging))
    print(f"gather of 4 chunks, 4 layers ({size >> 20} MiB): {speed:.0f} GB/s")
    start = time.perf_counter()
    for _ in range(100):
        gather(few, range(4), staging)
    print(f"  host time of one call: {(time.perf_counter() - start) * 1e4:.0f} µs")
    torch.cuda.synchronize()


def _planes(view: PagedView, layer: int, blocks: list[int]):
    for tensor in view.owner[layer]:
        yield tensor[blocks].reshape(TOKENS, 8, 128).view(torch.int32)


def tune_checksums(staging: torch.Tensor) -> None:
    for count in (16384, 256):
        tiles = staging[: count << 17].view(count, 1 << 17)
        sums = unsigned(xxh3_tiles(tiles))
        for i in random.sample(range(count), 20):
            assert sums[i] == checksum(tiles[i].cpu().numpy().tobytes())
        results = []
        for config in HASHES:
            assert unsigned(xxh3_tiles_triton(tiles, config=config)) == sums
            results.append((rate(tiles.numel(), lambda: xxh3_tiles_triton(tiles, config=config)), tuple(config)))
        results.sort(reverse=True)
        print(f"xxh3 of {count} tiles: default {rate(tiles.numel(), lambda: xxh3_tiles(tiles)):.0f} GB/s; best")
        for speed, config in results[:5]:
            print(f"  {config}: {speed:.0f} GB/s")


def copy_pieces(targets, sources) -> None:
    """Pieces of rows at one pitch each: (rows…, contiguous bytes), between the device and registered memory."""

    def place(side):
        if isinstance(side, torch.Tensor):
            return side.data_ptr(), side.shape, side.stride()
        return side.ctypes.data, side.shape, side.strides

    def pieces():
        for (to, shape, to_strides), (of, _, of_strides) in zip(map(place, targets), map(place, sources), strict=True):
            width = shape[-1] if len(shape) < 3 else shape[1] * shape[2]
            yield Copy(to, of, CopyRows(width, shape[0] if len(shape) > 1 else 1, to_strides[0], of_strides[0]))

    run_copies(join_copies(pieces()), torch.device("cuda", torch.cuda.current_device()))


def copy_tiles(target, source) -> None:
    copy_pieces([target], [source])


def measure_way(view: PagedView, blocks: list[int], staging: torch.Tensor, mapping: np.ndarray) -> None:
    """One large copy, and whole saves and loads through a ring, between the cache and extents in the mapping."""
    pinned = torch.empty(TOTAL, dtype=torch.uint8, pin_memory=True)
    out_rate = wall_rate(TOTAL, lambda: pinned.copy_(staging[:TOTAL], non_blocking=True))
    in_rate = wall_rate(TOTAL, lambda: staging[:TOTAL].copy_(pinned, non_blocking=True))
    print(f"one large pinned copy: out {out_rate:.1f}, in {in_rate:.1f} GB/s")
    whole = wall_rate(TOTAL, lambda: copy_tiles(mapping[:TOTAL], staging[:TOTAL]))
    print(f"one large copy into the mapping: {whole:.1f} GB/s")
    plan = make_plan(view, blocks, whole_shard(SPEC))

    def staged() -> None:
        gather(plan, view.layers, staging)
        copy_tiles(mapping[:TOTAL], staging[:TOTAL])

    print(f"gather, then one large copy into the mapping: {wall_rate(TOTAL, staged):.1f} GB/s")
    extents = mapping[:TOTAL].reshape(TOKENS // CHUNK, 32, 8, -1)
    for tp in (1, 8):
        heads = range(8 // tp)
        shard = Shard(range(32), heads)
        num_bytes = TOTAL // tp
        for per_batch, num_layers in ((2, 32), (8, 4), (16, 8)) if tp == 1 else ((8, 32), (16, 8)):
            way = RingWay(view, blocks, shard, extents[:, :, heads.start : heads.stop], per_batch, num_layers, staging)
            way.save()
            way.check()
            save = wall_rate(num_bytes, way.save, 5)
            way.load()
            assert bool(torch.stack(way.good).all())
            load = wall_rate(num_bytes, way.load, 5)
            label = f"tp={tp}, batches of {per_batch} chunks × {num_layers} layers ({way.slot_bytes >> 20} MiB)"
            print(f"{label}: save {save:.1f} ({save / out_rate:.3f}), load {load:.1f} GB/s ({load / in_rate:.3f})")
    strided = extents[0, :, :1]
    target, source = torch.from_numpy(strided), staging[: strided.size].view(strided.shape)
    print(f"2-D copy of 32 × 128 KiB: driver {wall_rate(strided.size, lambda: copy_tiles(strided, source)):.1f} GB/s, "
          f"torch {wall_rate(strided.size, lambda: target.copy_(source, non_blocking=True)):.1f} GB/s")  # fmt: skip


class RingWay:
    """Saves and loads of one shard through a ring of four slots, checksums included, on two streams."""

    def __init__(self, view, blocks, shard, extents, per_batch, num_layers, staging) -> None:
        self.extents, self.shard = extents, shard
        self.per_batch, self.num_layers = per_batch, num_layers
        self.plans = [make_plan(view, blocks, shard, i, per_batch) for i in range(0, TOKENS // CHUNK, per_batch)]
        self.slot_bytes = self.plans[0].staged_bytes(num_layers)
        self.slots = [staging[i * self.slot_bytes : (i + 1) * self.slot_bytes] for i in range(4)]
        self.compute, self.copies = torch.cuda.Stream(), torch.cuda.Stream()
        self.sums: dict[tuple[int, int], torch.Tensor] = {}
        self.good: list[torch.Tensor] = []
        for plan in self.plans:
            plan.device_spans  # noqa: B018 - uploaded before anything is measured
        torch.cuda.synchronize()

    def batches(self):
        number = 0
        for index, plan in enumerate(self.plans):
            for layer in range(0, 32, self.num_layers):
                yield number, index, plan, range(layer, layer + self.num_layers)
                number += 1

    def move(self, slot: torch.Tensor, index: int, layers: range, save: bool) -> None:
        """The bytes of a batch between its slot and its extents: one 3-D copy, since they lie evenly spaced."""
        tiles = slot.view(self.per_batch, self.num_layers, len(self.shard.heads), -1)
        first = index * self.per_batch
        parts = [self.extents[i, layers.start : layers.stop] for i in range(first, first + self.per_batch)]
        copy_pieces(parts, list(tiles)) if save else copy_pieces(list(tiles), parts)

    def save(self) -> None:
        free = [None] * len(self.slots)
        for number, index, plan, layers in self.batches():
            slot, n = self.slots[number % len(self.slots)], number % len(self.slots)
            with torch.cuda.stream(self.compute):
                if free[n] is not None:
                    self.compute.wait_event(free[n])
                gather(plan, layers, slot)
                self.sums[index, layers.start] = staged_checksums(plan, slot, self.num_layers)
                ready = self.compute.record_event()
            with torch.cuda.stream(self.copies):
                self.copies.wait_event(ready)
                self.move(slot, index, layers, save=True)
                free[n] = self.copies.record_event()

    def load(self) -> None:
        free = [None] * len(self.slots)
        self.good = []
        for number, index, plan, layers in self.batches():
            slot, n = self.slots[number % len(self.slots)], number % len(self.slots)
            with torch.cuda.stream(self.copies):
                if free[n] is not None:
                    self.copies.wait_event(free[n])
                self.move(slot, index, layers, save=False)
                ready = self.copies.record_event()
            with torch.cuda.stream(self.compute):
                self.compute.wait_event(ready)
                expected = self.sums[index, layers.start]
                self.good.append(verify_staged(plan, slot, self.num_layers, expected).all())
                scatter(plan, layers, slot)
                free[n] = self.compute.record_event()
        torch.cuda.synchronize()

    def check(self) -> None:
        """Some tiles in the extents against their checksums."""
        torch.cuda.synchronize()
        for _, index, _, layers in random.sample(list(self.batches()), 4):
            sums = unsigned(self.sums[index, layers.start])
            part = self.extents[index * self.per_batch, layers.start]
            assert checksum(np.ascontiguousarray(part[0])) == sums[0]


if __name__ == "__main__":
    view, blocks = make_cache()
    staging = torch.empty(TOTAL, dtype=torch.uint8, device="cuda")
    tune_moves(view, blocks, staging)
    tune_checksums(staging)
    measure_way(view, blocks, staging, map_shared(TOTAL))
