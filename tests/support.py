"""What several tests share: a model's KV that any rank can compute for itself, stores that clean up, strategies.

The content of a tile depends only on its chunk's key, its layer and its head, so a reader needs no copy of what was
written to know what it must get.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
from hypothesis import strategies as st

from headwater.errors import TopologyError
from headwater.kv.format import gather_part, part_rows
from headwater.kv.hashing import ChunkRef
from headwater.kv.identity import Identity
from headwater.kv.spec import KVSpec
from headwater.kv.topology import Shard, Topology
from headwater.stores.base import Tiles
from headwater.stores.embedded import destroy, store_directory
from headwater.stores.url import parse_url

MIB = 1 << 20
WAIT_S = 120.0
"""For anything that happens in the background, on a machine that has other things to do."""


def second_implementation() -> ModuleType:
    """tests/vectors/generate.py: docs/format.md once more, slow, and without any code of Headwater."""
    name = "headwater_vectors"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / "vectors" / "generate.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]


def identity(tag: int = 0, dtype: str = "float16") -> Identity:
    """An identity that differs by `tag`."""
    return Identity(weights=f"sha256:{tag:064x}", run_dtype=dtype, kv_dtype=dtype)


def gqa(layers: int = 3, heads: int = 4, dim: int = 4, dtype: str = "float16") -> KVSpec:
    """A small model."""
    return KVSpec.gqa(num_layers=layers, num_kv_heads=heads, head_dim=dim, dtype=dtype)


def tile(spec: KVSpec, chunk: ChunkRef, layer: int, head: int) -> np.ndarray:
    """The one true content of a tile: noise, or KV like a model's where it is bfloat16."""
    seed = int.from_bytes(chunk.key[:8], "little") ^ (layer << 32) ^ (head << 48)
    rng = np.random.Generator(np.random.SFC64(seed))
    if all(plane.dtype == "bfloat16" for plane in spec.planes):
        planes = [bfloat16_values(rng, chunk.num_tokens, plane.width) for plane in spec.planes]
        return np.concatenate(planes)
    return rng.integers(0, 256, spec.tile_bytes(chunk.num_tokens), dtype=np.uint8)


def bfloat16_values(rng: np.random.Generator, num_tokens: int, width: int) -> np.ndarray:
    """Normal values with a scale for each channel, as bytes: what packs. (Noise does not.)"""
    scales = np.exp(rng.standard_normal(width, np.float32))
    values = rng.standard_normal((num_tokens, width), np.float32) * scales
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(-1)


def local_tiles(spec: KVSpec, chunk: ChunkRef, shard: Shard) -> Tiles:
    """What a rank's cache holds of a chunk."""
    out = np.zeros(shard.local_shape(spec, chunk.first_token, chunk.num_tokens), np.uint8)
    rows = part_rows(shard.split, shard.part, chunk.first_token, chunk.num_tokens)
    for i, layer in enumerate(shard.layers):
        for j, head in enumerate(shard.heads):
            gather_part(spec, tile(spec, chunk, layer, head), rows, chunk.num_tokens, out[i, j])
    return out


def empty_tiles(spec: KVSpec, chunk: ChunkRef, shard: Shard) -> Tiles:
    """Room for the same, filled with something that is not it."""
    return np.full(shard.local_shape(spec, chunk.first_token, chunk.num_tokens), 0xA5, np.uint8)


@contextmanager
def temporary_url(scheme: str, tmp_path: object, options: str = "capacity=8MiB") -> Iterator[str]:
    """A URL of a store that does not exist yet, and that is gone afterwards.

    Unless asked otherwise its calls may wait long: on a shared machine a disk stands still for a second now and then,
    and a write that gave up for that is no defect.
    """
    if "deadline=" not in options:
        options += "&deadline=30"
    if scheme == "memory":
        yield f"memory://?{options}"
        return
    name = f"hwtest-{os.getpid()}-{secrets.token_hex(4)}"
    url = f"shm:///{name}?{options}" if scheme == "shm" else f"file://{tmp_path}/{name}?{options}"
    try:
        yield url
    except BaseException:
        shutil.rmtree(store_directory(parse_url(url)), ignore_errors=True)
        raise
    destroy(parse_url(url))  # raises if anybody still has it open


def wait_until(condition: Callable[[], bool], timeout_s: float = WAIT_S, what: str = "condition") -> None:
    """Poll until true; fail loudly otherwise."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"{what} did not come true within {timeout_s} s"
        time.sleep(0.002)


# ---- strategies -------------------------------------------------------------------------------------------------
DTYPES = ("float32", "float16", "bfloat16", "fp8_e4m3", "int8")


@st.composite
def specs(draw: st.DrawFn) -> KVSpec:
    """Small GQA, MQA and MLA models."""
    layers = draw(st.integers(1, 5))
    dtype = draw(st.sampled_from(DTYPES))
    if draw(st.booleans()):
        width, rope = draw(st.integers(1, 9)), draw(st.integers(1, 5))
        return KVSpec.mla(num_layers=layers, latent_dim=width, rope_dim=rope, dtype=dtype, rope_dtype="bfloat16")
    heads = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    return KVSpec.gqa(
        num_layers=layers,
        num_kv_heads=heads,
        head_dim=draw(st.integers(1, 6)),
        dtype=dtype,
        v_head_dim=draw(st.integers(1, 6)),
    )


@st.composite
def topologies(draw: st.DrawFn, spec: KVSpec) -> Topology:
    """Any topology that this spec allows."""
    heads = spec.num_kv_heads
    tps = [tp for tp in range(1, 13) if heads % tp == 0 or tp % heads == 0]
    tp = draw(st.sampled_from(tps))
    copies = max(tp // heads, 1)
    dcp = draw(st.sampled_from([d for d in range(1, copies + 1) if copies % d == 0]))
    stages = draw(st.integers(1, spec.num_layers))
    cuts = sorted(draw(st.permutations(range(1, spec.num_layers)))[: stages - 1])
    bounds = [0, *cuts, spec.num_layers]
    topology = Topology(
        tp=tp,
        pp=tuple(b - a for a, b in pairwise(bounds)),
        dcp=dcp,
        pcp=draw(st.integers(1, 3)),
        interleave=draw(st.integers(1, 7)),
        pcp_splits_tokens=draw(st.booleans()),
    )
    try:
        topology.shard(spec)
    except TopologyError as error:  # pragma: no cover - the strategy is wrong then
        raise AssertionError(f"{topology} for {spec}: {error}") from error
    return topology
