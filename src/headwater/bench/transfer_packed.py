"""The same cache to the pool and back with packed tiles, against the plain copy of the raw bytes.

A ratio above 1 means that KV arrived sooner than the bus could have copied it. The values are normal, each channel on a
scale of its own, as those of trained models are; noise of all exponents would not be packed at all.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from typing import Any

import torch

from headwater.bench.measure import Note
from headwater.bench.transfer_gpu import (
    LargeCopy,
    TransferBench,
    interference,
    open_rank,
    run_rounds,
    speed_ratios,
)
from headwater.errors import EngineError
from headwater.kv.identity import Identity
from headwater.pool.pool import open_pool
from headwater.stores.embedded import destroy
from headwater.stores.url import format_size, parse_url


def bench_packed(bench: TransferBench, note: Note, device: torch.device) -> dict[str, Any]:
    """Saved is packed, visible and checksummed; loaded is verified, unpacked and in the cache, bit for bit."""
    bench = replace(bench, packed=True)
    spec = bench.spec(device)
    extent, asked = spec.extent_bytes(bench.chunk_tokens), spec.extent_bytes(bench.num_tokens)
    capacity = min(4 * asked + (64 << 20), int(shutil.disk_usage("/dev/shm").free * 0.9))
    tokens = min(bench.num_tokens, capacity // 3 // extent * bench.chunk_tokens)
    total = spec.extent_bytes(tokens)
    url = f"shm:///headwater-bench-packed-{os.getpid()}"
    try:
        with open_pool(f"{url}?capacity={capacity}&packing=on") as pool:
            identity = Identity(weights=f"sha256:{3:064x}", run_dtype="bfloat16", kv_dtype="bfloat16")
            space = pool.space(identity, spec, chunk_tokens=bench.chunk_tokens)
            with open_rank(bench, pool, space, range(spec.num_kv_heads), tokens, device) as rank:
                large = LargeCopy(total, device)
                note(f"packed: {tokens:,} tokens, {format_size(total)} of raw KV, {bench.pairs} rounds")
                work = {"out": large.copy_out, "save": rank.save, "in": large.copy_in, "load": rank.load}
                rounds = run_rounds(work, bench.pairs, rank.renew, device)
                rank.check_loaded()
                share = pool.stats().store.packed_share
                if share == 1.0:
                    raise EngineError("nothing was packed, though it was asked for")
                note("matrix products beside saving packed tiles")
                beside = interference(bench, rank, total / rounds.time("out"), device)
    finally:
        destroy(parse_url(url))
    speeds = speed_ratios(rounds, total, "")
    report = {f"packed_{verb}_vs_bus": speeds[f"{verb}_ratio"] for verb in ("save", "load")}
    report |= {f"packed_{name}": value for name, value in speeds.items() if not name.endswith("_ratio")}
    return report | {"packed_tokens": tokens, "packed_share": share} | {f"packed_{k}": v for k, v in beside.items()}
