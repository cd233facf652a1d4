"""KV for `headwater bench packing`: computed by the reference engine in float32, rounded once to what is asked for.

A real model reads the texts of `packing_text`; other families have random weights in a small size, and random tokens.
Random weights show that every layout packs. How well a real model of that family does, they do not show.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from headwater.bench.engine_shapes import SHAPES
from headwater.bench.packing_text import TEXTS
from headwater.bench.ttft_side import Side, random_prompt
from headwater.engine.config import EngineConfig
from headwater.engine.engine import Engine
from headwater.engine.identity import engine_identity
from headwater.errors import EngineError
from headwater.kv.hashing import DEFAULT_CHUNK_TOKENS
from headwater.kv.spec import KVSpec
from headwater.kv.topology import whole_shard
from headwater.models.checkpoint import Checkpoint, open_checkpoint
from headwater.pool.pool import open_pool
from headwater.stores.base import Status
from headwater.stores.embedded import destroy
from headwater.stores.url import parse_url

_SMALL: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 2048,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": SHAPES["qwen2.5-7b"] | _SMALL,
    "qwen3": SHAPES["qwen3-8b"] | _SMALL,
    "mixtral": SHAPES["mixtral-8x7b"] | _SMALL,
    "deepseek_v2": SHAPES["deepseek-v2-lite"]
    | _SMALL
    | {"num_key_value_heads": 8, "n_routed_experts": 8, "moe_intermediate_size": 256},
}
"""Planes as in the models of that name (heads of 128; latents of 512 and 64), and little else."""


class Sample(NamedTuple):
    """The KV of some full chunks."""

    spec: KVSpec
    """In float32."""
    exact: npt.NDArray[np.float32]
    """(chunks × tiles, values of a tile)."""

    @property
    def num_tokens(self) -> int:
        """Of each tile."""
        return DEFAULT_CHUNK_TOKENS

    def in_dtype(self, dtype: str) -> tuple[KVSpec, npt.NDArray[np.uint8]]:
        """Rounded to nearest, ties to even: the spec, and raw tiles as (tiles, bytes)."""
        planes = tuple(replace(plane, dtype=dtype) for plane in self.spec.planes)
        rounded = torch.from_numpy(self.exact).to(getattr(torch, dtype)).view(torch.int16).numpy()
        return replace(self.spec, planes=planes), rounded.view(np.uint8)

    def planes(self, raw: npt.NDArray[np.uint8]) -> dict[str, npt.NDArray[np.uint16]]:
        """Raw tiles of 16-bit values by plane: [tile][token][channel]."""
        found, start, values = {}, 0, raw.view(np.uint16)
        for plane in self.spec.planes:
            end = start + self.num_tokens * plane.width
            found[plane.name] = values[:, start:end].reshape(len(values), self.num_tokens, plane.width)
            start = end
        return found


def real_kv(checkpoint: Checkpoint, tokens_each: int) -> Sample:
    """Of the texts, so many tokens of each, by a model that has a tokenizer. Seconds on a CPU."""
    tokenizer = checkpoint.load_tokenizer()
    prompts = [tokenizer.encode(text)[:tokens_each] for text in TEXTS.values()]
    if any(len(prompt) < tokens_each for prompt in prompts):
        raise EngineError(f"a text has less than {tokens_each} tokens in the vocabulary of {checkpoint.label}")
    return _compute(checkpoint, "auto", prompts)


def random_kv(family: str, num_tokens: int) -> Sample:
    """Of random tokens, by random weights."""
    rng = np.random.default_rng(7)
    with TemporaryDirectory(prefix="headwater-bench-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(FAMILIES[family]))
        checkpoint = open_checkpoint(folder, "dummy")
        return _compute(checkpoint, "dummy", [random_prompt(rng, checkpoint.config.vocab_size, num_tokens)])


def _compute(checkpoint: Checkpoint, load_format: str, prompts: list[list[int]]) -> Sample:
    """Every prompt through one engine into a pool of its own, and out of it again."""
    spec, tokens = checkpoint.config.kv_spec("float32"), sum(map(len, prompts))
    url = f"shm:///headwater-bench-{secrets.token_hex(6)}"
    whole = f"{url}?capacity={2 * spec.extent_bytes(tokens + DEFAULT_CHUNK_TOKENS) + (64 << 20)}"
    longest = max(map(len, prompts)) + DEFAULT_CHUNK_TOKENS
    config = EngineConfig(
        model=str(checkpoint.path),
        load_format=load_format,
        device="cpu",
        dtype="float32",
        num_pages=longest // EngineConfig.page_size + 16,
        max_model_len=longest,
        pool=whole,
    )
    shard, found = whole_shard(spec), []
    try:
        with Engine(config) as engine, open_pool(whole) as pool:
            side = Side(engine)
            space = pool.space(engine_identity(checkpoint, "float32", load_format), spec)
            for prompt in prompts:
                side.ask(prompt, 1)
                side.drain()
                chunks = space.keys(prompt).chunks(tail=False)
                tiles = np.empty((len(chunks), *shard.local_shape(spec, 0, DEFAULT_CHUNK_TOKENS)), np.uint8)
                if set(space.read(chunks, shard, tiles)) != {Status.OK}:
                    raise EngineError(
                        "the engine's KV is not in its pool; a busy machine may miss the saves' deadlines"
                    )
                found.append(tiles.reshape(-1, tiles.shape[-1]).view(np.float32))
    finally:
        destroy(parse_url(url))
    return Sample(spec, np.concatenate(found))
