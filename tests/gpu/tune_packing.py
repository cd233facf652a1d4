"""Measures packing and unpacking on this machine's GPU, after checking that they are right on new values.

Run by hand: `PYTHONPATH=src:tests python3 tests/gpu/tune_packing.py`. Prints `pack_gbps` and `unpack_gbps` of every
config, of raw bytes, beside what a copy of the device's memory would allow; the best belong into `PackConfig` and
`UnpackConfig`.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import partial

import torch
from triton.testing import do_bench

from headwater.bench.transfer_packing import DeviceCopy, PackedCache
from headwater.kernels.extent import Compact
from headwater.kernels.extent_triton import move_rows_triton
from headwater.kernels.pack_triton import PACK, UNPACK, PackConfig, UnpackConfig
from headwater.kv.spec import KVSpec

from pack_cases import check_hostile, check_pack, check_unpack, every_pattern

LLAMA_8B = KVSpec.gqa(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16")
OTHERS = [KVSpec.gqa(num_layers=32, num_kv_heads=8, head_dim=dim, dtype="bfloat16") for dim in (64, 80, 96, 256)]
OTHERS += [KVSpec.mla(num_layers=61, latent_dim=512, rope_dim=64, dtype="bfloat16")]
TOKENS, CHUNK, BLOCK = 32768, 256, 16
PACKS = [
    PackConfig(rows, words, warps, registers)
    for rows, words, warps, registers in (
        (256, 64, 8, 128),
        (256, 64, 8, 168),
        (256, 64, 8, 255),
        (256, 32, 16, 64),
        (256, 32, 16, 128),
        (128, 32, 8, 80),
        (64, 16, 8, 64),
        (32, 16, 4, 64),
        (64, 32, 4, 96),
    )
]
UNPACKS = [
    UnpackConfig(rows, words, warps, steps)
    for rows, words, warps in (
        (16, 8, 4),
        (16, 16, 2),
        (32, 16, 4),
        (32, 8, 8),
        (64, 16, 8),
        (64, 32, 4),
        (128, 32, 8),
    )
    for steps in (1, 2, 4, 8, 16)
]


def milliseconds(function) -> float:
    """By the median, on the device."""
    return float(do_bench(function, warmup=10, rep=60, return_mode="median"))


def check() -> None:
    """Gather and scatter of new random caches, against the CPU."""
    seed = random.randrange(2**31)
    print(f"checking, seed {seed}")
    rng = random.Random(seed)
    for pack, unpack in ((PACK, UNPACK), (PackConfig(16), UnpackConfig(8, steps=2, programs=1))):
        for _ in range(10):
            check_pack(rng, "cuda", partial(move_rows_triton, packing=pack))
            check_unpack(rng, "cuda", partial(move_rows_triton, packing=unpack))
            check_hostile(rng, "cuda", partial(move_rows_triton, packing=unpack))
        assert check_pack(rng, "cuda", partial(move_rows_triton, packing=pack), every_pattern(rng, "cuda")) == 1
        check_unpack(rng, "cuda", partial(move_rows_triton, packing=unpack), every_pattern(rng, "cuda"))


def measure(cache: PackedCache, move, raw_bytes: int, scatter: bool, config) -> float:
    """GB/s of raw bytes, after a look at the result where the whole cache moves."""
    if not scatter and move is cache.move:
        want = cache.staging.clone()
        cache.staging.fill_(0xA5)
        move_rows_triton(move, scatter=False, packing=config)
        assert torch.equal(cache.staging, want), config
    elif move is cache.move:
        want = cache.layers[-1].clone()
        cache.layers[-1].zero_()
        move_rows_triton(move, scatter=True, packing=config)
        assert torch.equal(cache.layers[-1].view(torch.int16), want.view(torch.int16)), config
    return raw_bytes / milliseconds(lambda: move_rows_triton(move, scatter=scatter, packing=config)) / 1e6


def main() -> None:
    check()
    device = torch.device("cuda", torch.cuda.current_device())
    cache = PackedCache(LLAMA_8B, TOKENS, CHUNK, BLOCK, device)
    cache.check()
    copy = DeviceCopy(torch.empty_like(cache.staging))
    copy_gbps = copy.num_bytes / milliseconds(copy.run) / 1e6
    ceiling = copy_gbps * cache.raw_bytes / (cache.raw_bytes + cache.packed_bytes)
    print(f"device copy: {copy_gbps:.0f} GB/s read and written; at most {ceiling:.0f} GB/s of raw KV either way")
    layer = replace(cache.move, layers=range(1), staged=Compact(cache.staging.data_ptr(), 1), spans=few(cache, 32))
    layer = replace(layer, device_spans=layer.spans.upload(device, LLAMA_8B.row_bytes))
    layer_bytes = 32 * CHUNK * LLAMA_8B.row_bytes * LLAMA_8B.num_kv_heads
    best = {}
    for verb, configs, default in (("pack", PACKS, PACK), ("unpack", UNPACKS, UNPACK)):
        found = {}
        for config in {default: None, **dict.fromkeys(configs)}:
            whole = measure(cache, cache.move, cache.raw_bytes, verb == "unpack", config)
            cache.check()
            one = measure(cache, layer, layer_bytes, verb == "unpack", config)
            cache.check()
            found[config] = (whole, one)
        for config, (whole, one) in sorted(found.items(), key=lambda item: -item[1][0])[:8]:
            print(f"{verb} {tuple(config)}: {whole:.0f} GB/s; one layer of 32 chunks {one:.0f}")
        best[f"{verb}_gbps"], best[f"{verb}_layer_gbps"] = found[default]
        best[f"{verb}_of_copy"] = found[default][0] / ceiling
    del cache
    for spec in OTHERS:
        name = "x".join(str(plane.width) for plane in spec.planes)
        other = PackedCache(spec, TOKENS, CHUNK, BLOCK, device)
        other.check()
        for verb in ("pack", "unpack"):
            speed = measure(other, other.move, other.raw_bytes, verb == "unpack", None)
            print(f"{verb} of {name}: {speed:.0f} GB/s")
        del other
    print(json.dumps({name: round(value, 3) for name, value in best.items()}))


def few(cache: PackedCache, count: int):
    """The first spans of a cache."""
    spans = cache.spans
    assert spans.packed_bytes is not None
    tables = (spans.first_block, spans.offset, spans.num_rows)
    return type(spans)(spans.blocks, *(table[:count] for table in tables), spans.packed_bytes[:count])


if __name__ == "__main__":
    main()
