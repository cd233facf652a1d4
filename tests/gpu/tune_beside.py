"""What disturbs a computation beside a save: matrix products alone, and beside each part of what a save does.

Run by hand: `PYTHONPATH=src:tests python3 tests/gpu/tune_beside.py`. Prints how many times as long the products take;
the configs that it found best belong into `CopyConfig` and `HashConfig`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from tune_transfer import SPEC, make_cache, make_plan

from headwater.bench.measure import take_turns
from headwater.kernels.extent_triton import GATHER, CopyConfig, move_rows_triton
from headwater.kernels.xxh3_triton import HashConfig, xxh3_tiles_triton
from headwater.kv.topology import whole_shard
from headwater.transfer.convert import build_move

SIZE, PRODUCTS, EVERY = 8192, 64, 2
COPIES = {"gather, default": GATHER, "gather, 8 heads": CopyConfig(heads=8), "gather, 64 KiB": CopyConfig(65536, 1, 32)}
HASHES = {"hash, default": HashConfig(), "hash, 8 warps": HashConfig(32, 8), "hash, 4 warps": HashConfig(16, 4)}


def main() -> None:
    view, blocks = make_cache()
    plan, layers = make_plan(view, blocks, whole_shard(SPEC)), range(2)
    size = plan.staged_bytes(len(layers))
    staging = torch.empty(size, dtype=torch.uint8, device="cuda")
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    tiles = staging.view(-1, 1 << 17)
    move = build_move(plan, layers, staging, writable=True)
    left = torch.randn(SIZE, SIZE, dtype=torch.bfloat16, device="cuda")
    right, out = torch.randn_like(left), torch.empty_like(left)
    side, copies = torch.cuda.Stream(), torch.cuda.Stream()
    compute = torch.cuda.current_stream()

    def on(stream: torch.cuda.Stream, work: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            stream.wait_stream(compute)
            with torch.cuda.stream(stream):
                work()

        return run

    def run(work: Callable[[], object]) -> float:
        for number in range(PRODUCTS // 2 + PRODUCTS):
            if number == PRODUCTS // 2:
                torch.cuda.synchronize()
                start = time.perf_counter()
            torch.mm(left, right, out=out)
            if number >= PRODUCTS // 2 and number % EVERY == EVERY - 1:
                work()
        compute.synchronize()
        took = time.perf_counter() - start
        torch.cuda.synchronize()
        return took

    works: dict[str, Callable[[], object]] = {"alone": lambda: None, "again": lambda: None}
    works["gather, in line"] = partial(move_rows_triton, move, scatter=False, config=GATHER)
    for name, config in COPIES.items():
        works[name] = on(side, partial(move_rows_triton, move, scatter=False, config=config))
    for name, config in HASHES.items():
        works[name] = on(side, partial(xxh3_tiles_triton, tiles, config=config))
    works["copy to the host"] = on(copies, lambda: host.copy_(staging, non_blocking=True))
    rounds = take_turns({name: partial(run, work) for name, work in works.items()}, 7)
    print(f"{PRODUCTS} products: {rounds.time('alone') * 1e3:.1f} ms; {size >> 20} MiB beside every {EVERY}")
    for name in works:
        print(f"{name:36s} {rounds.ratio(name, 'alone'):.4f}   {np.round(np.array(rounds.seconds[name]) * 1e3, 1)}")


if __name__ == "__main__":
    main()
