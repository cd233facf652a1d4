"""MLA's KV to the pool and back, in `headwater bench engine`: `bench transfer`'s way, with one large copy beside it.

The tiles of MLA are few and large (288 KiB for 256 tokens in bfloat16), and latent and rotary key share a row of a
layer's tensor, as vLLM keeps them. All ranks hold the same; this is one that saves and loads all of it.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

import torch

from headwater.bench.measure import Note
from headwater.bench.transfer_gpu import LargeCopy, TransferBench, open_rank, run_rounds, speed_ratios
from headwater.kv.identity import Identity
from headwater.pool.pool import open_pool
from headwater.stores.embedded import destroy
from headwater.stores.url import format_size, parse_url
from headwater.transfer.streams import switch_threads_often

TRANSFER_FIGURES = ("mla_save_ratio", "mla_load_ratio")
LATENT_TRANSFER = TransferBench(num_layers=27, latent=(512, 64))
"""DeepSeek-V2-Lite's."""


def bench_latent_transfer(bench: TransferBench, note: Note, device: torch.device) -> dict[str, Any]:
    """Saved is visible and checksummed, loaded is verified and in the cache, both of the bus's own speed."""
    switch_threads_often()
    spec = bench.spec(device)
    extent, asked = spec.extent_bytes(bench.chunk_tokens), spec.extent_bytes(bench.num_tokens)
    capacity = min(4 * asked + (64 << 20), int(shutil.disk_usage("/dev/shm").free * 0.9))
    tokens = min(bench.num_tokens, capacity // 3 // extent * bench.chunk_tokens)
    total = spec.extent_bytes(tokens)
    url = f"shm:///headwater-bench-mla-{os.getpid()}"
    try:
        with open_pool(f"{url}?capacity={capacity}&packing=off") as pool:
            identity = Identity(weights=f"sha256:{2:064x}", run_dtype="bfloat16", kv_dtype="bfloat16")
            space = pool.space(identity, spec, chunk_tokens=bench.chunk_tokens)
            with open_rank(bench, pool, space, range(1), tokens, device) as rank:
                large = LargeCopy(total, device)
                note(f"MLA's KV: {tokens:,} tokens, {format_size(total)}, {bench.pairs} rounds")
                work = {"out": large.copy_out, "save": rank.save, "in": large.copy_in, "load": rank.load}
                rounds = run_rounds(work, bench.pairs, rank.renew, device)
                rank.check_loaded()
    finally:
        destroy(parse_url(url))
    figures = {f"mla_{name}": value for name, value in speed_ratios(rounds, total, "").items()}
    return figures | {"mla_transfer_tokens": tokens, "mla_token_bytes": spec.token_bytes}
