"""Finding a long prompt among very many chunks: what it costs beside the hashing that nobody can avoid."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headwater.bench.measure import Note, Timed, stopwatch, take_turns
from headwater.errors import StoreError
from headwater.kv.hashing import DEFAULT_CHUNK_TOKENS
from headwater.kv.identity import Identity
from headwater.kv.spec import KVSpec
from headwater.kv.topology import whole_shard
from headwater.pool import Pool, Space

SPEC = KVSpec.gqa(num_layers=1, num_kv_heads=1, head_dim=1, dtype="int8")
CHUNK_TOKENS = DEFAULT_CHUNK_TOKENS
CHUNK_BYTES = SPEC.extent_bytes(CHUNK_TOKENS)
IDENTITY = Identity(
    weights="sha256:" + "0" * 64, run_dtype="float16", kv_dtype="int8", kv_scales="sha256:" + "0" * 64, label="bench"
)
PROMPT_TOKENS = 100_000
CHUNKS_PER_PROMPT = PROMPT_TOKENS // CHUNK_TOKENS
NUM_PROMPTS = 64
"""Prompts that are looked up in turn, so that no look-up finds the last one's records in the processor's cache."""
MIN_ROUNDS = 40
DEADLINE_S = 60.0

Tokens = npt.NDArray[np.uint32]


def url_options(num_chunks: int) -> dict[str, int]:
    """A store that has room for that many of these chunks: 384 bytes of index and two units of 256 for each."""
    index = 384 * num_chunks + (1 << 20)
    return {"capacity": max(2 * index, index + (CHUNK_BYTES + 64) * num_chunks + (8 << 20)), "index": index}


def bench_lookup(pool: Pool, num_chunks: int, rounds: int, note: Note) -> dict[str, Any]:
    """Fill `pool` with that many chunks and look prompts up in it."""
    space = pool.space(IDENTITY, SPEC, chunk_tokens=CHUNK_TOKENS)
    prompts, fill_s = _fill(space, num_chunks, note)
    store = pool.stats().store
    if space.match(space.keys(prompts[0])).num_tokens != CHUNKS_PER_PROMPT * CHUNK_TOKENS:
        raise StoreError("a prompt that was written last is not found")
    note(f"looking up prompts of {PROMPT_TOKENS:,} tokens among {store.chunks:,} chunks")
    runs = take_turns(_runs(space, prompts), max(rounds, MIN_ROUNDS))
    return {
        "match_chunks": store.chunks,
        "match_tokens": PROMPT_TOKENS,
        "fill_chunks_per_s": num_chunks / fill_s,
        "fill_evicted": store.evicted,
        "hash_ms": 1e3 * runs.time("hash"),
        "match_ms": 1e3 * runs.time("hash and match"),
        "lookup_only_ms": 1e3 * runs.time("match"),
        "hash_list_ms": 1e3 * runs.time("hash a list"),
        "match_ratio": runs.ratio("hash and match", "hash"),
        "match_noise": runs.noise("hash", "hash again"),
    }


def _fill(space: Space, num_chunks: int, note: Note) -> tuple[list[Tokens], float]:
    """Prompts of 390 chunks until that many chunks are written; the last ones written, and the seconds of writing."""
    rng = np.random.default_rng(num_chunks)
    shard = whole_shard(SPEC)
    tiles = list(rng.integers(0, 256, (CHUNKS_PER_PROMPT, 1, 1, CHUNK_BYTES), np.uint8))
    prompts: list[Tokens] = []
    written, seconds, total = 0, 0.0, max(num_chunks, CHUNKS_PER_PROMPT)
    told = time.monotonic()
    while written < total:
        # The short prompt comes first, so that those which are looked up are all complete.
        count = min((total - written) % CHUNKS_PER_PROMPT or CHUNKS_PER_PROMPT, total - written)
        tokens = rng.integers(0, 128_000, PROMPT_TOKENS, np.uint32)
        refs = space.keys(tokens).chunks(tail=False)[:count]
        start = time.perf_counter()
        statuses = space.write(refs, shard, tiles[:count], deadline_s=DEADLINE_S)
        seconds += time.perf_counter() - start
        if any(statuses):
            raise StoreError(f"filling stopped after {written:,} chunks: {max(statuses).name}")
        written += count
        if count == CHUNKS_PER_PROMPT:
            prompts = [*prompts[-NUM_PROMPTS + 1 :], tokens]
        if time.monotonic() - told > 5:
            told = time.monotonic()
            note(f"filling: {written:,} of {total:,} chunks")
    return prompts, seconds


def _runs(space: Space, prompts: Sequence[Tokens]) -> dict[str, Timed]:
    """Every kind of run walks through the prompts from a place of its own."""

    def over(work: Any, values: Sequence[Any], start: int) -> Timed:
        turn = itertools.islice(itertools.cycle(values), start % len(values), None)

        def run() -> float:
            value = next(turn)
            return stopwatch(lambda: work(value))()

        return run

    lists = [prompt.tolist() for prompt in prompts[:4]]
    keys = [space.keys(prompt) for prompt in prompts]
    step = max(1, len(prompts) // 5)
    return {
        "hash": over(space.keys, prompts, 0),
        "hash and match": over(lambda tokens: space.match(space.keys(tokens)), prompts, step),
        "match": over(space.match, keys, 2 * step),
        "hash again": over(space.keys, prompts, 3 * step),
        "hash a list": over(space.keys, lists, 0),
    }
