"""The library with torch: blocks of a paged KV cache go to the pool, and come back into other blocks.

    python examples/library_torch.py

The cache is on the GPU if there is one; bytes then go between its memory and the pool without a copy by the CPU. An
engine that wants more than this (what to save, when, for whom) uses a connector: examples/own_connector.py.
"""

from __future__ import annotations

import argparse
import queue
import sys
import time

import numpy as np
import torch
from torch import Tensor

import headwater as hw
from headwater.transfer import Loader, Saver, view_tensors

LAYERS, HEADS, DIM, BLOCK = 8, 4, 64, 16
NUM_BLOCKS = 512


def tokens_of(layer: Tensor, block_ids: list[int], num_tokens: int) -> Tensor:
    """The KV of a request in one layer, as [plane, token, head, dim]."""
    return layer[:, block_ids].flatten(1, 2)[:, :num_tokens]


def main() -> None:
    parser = argparse.ArgumentParser(description="A paged torch cache, saved to a pool and loaded from it.")
    parser.add_argument(
        "--pool", default="memory://?capacity=256MiB", help="a pool URL; shm:///NAME is kept afterwards"
    )
    parser.add_argument("--tokens", type=int, default=1000, help="tokens in the prompt")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    num_needed = -(-args.tokens // BLOCK)
    if 2 * num_needed > NUM_BLOCKS:
        sys.exit(f"--tokens is {args.tokens}; this cache holds two requests of {NUM_BLOCKS // 2 * BLOCK}")

    # The engine's cache: one tensor a layer. Here it holds noise; an engine would compute it.
    torch.manual_seed(0)
    shape = (2, NUM_BLOCKS, BLOCK, HEADS, DIM)
    cache = [torch.randn(shape, device=args.device).to(torch.bfloat16) for _ in range(LAYERS)]
    blocks = torch.randperm(NUM_BLOCKS)[: 2 * num_needed].tolist()
    computed, empty = blocks[:num_needed], blocks[num_needed:]
    prompt = torch.randint(0, 32_000, (args.tokens,)).tolist()

    spec = hw.KVSpec.gqa(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, dtype="bfloat16")
    identity = hw.Identity(weights="sha256:" + "0" * 64, run_dtype="bfloat16", kv_dtype="bfloat16", label="example")
    shard = hw.whole_shard(spec)  # or this rank's: hw.Topology(tp=8).shard(spec, tp_rank=3)
    # Where the KV lies: addresses and strides. Name the axes of your tensors in their own order.
    view = view_tensors(spec, cache, ("plane", "block", "token", "head", "dim"))

    with hw.open_pool(args.pool) as pool:
        space = pool.space(identity, spec)
        keys = space.keys(prompt)

        # Save: `save` returns once the KV has left the cache, and a thread brings it into the pool.
        saver = Saver(space, view, shard, staging_bytes=64 << 20, deadline_s=10)
        start = time.perf_counter()
        saver.save("request 1", keys.chunks(), np.array(computed, np.int32))
        if not saver.drain(timeout_s=30) or saver.num_dropped:
            sys.exit("not everything could be saved; give the pool more capacity, or the saver more staging")
        seconds = time.perf_counter() - start
        print(f"saved  {saver.num_bytes:,} bytes from {args.device} in {seconds * 1000:.1f} ms")
        saver.close()

        # Load: a thread writes verified KV into the blocks, then says how many chunks are in place.
        ended: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        loader = Loader(
            space, view, shard, staging_bytes=64 << 20, deadline_s=10, on_done=lambda name, n: ended.put((name, n))
        )
        hit = space.match(keys)
        with space.lease(hit, request_id="request 2"):
            start = time.perf_counter()
            loader.load("request 2", hit.chunks, np.array(empty, np.int32))
            name, num_chunks = ended.get(timeout=30)
            seconds = time.perf_counter() - start
        print(f"loaded {loader.num_bytes:,} bytes into other blocks in {seconds * 1000:.1f} ms")
        loader.close()

    # Chunks after the first `num_chunks` did not come in time, or did not verify: an engine computes them.
    num_tokens = sum(chunk.num_tokens for chunk in hit.chunks[:num_chunks])
    before = [tokens_of(layer, computed, args.tokens) for layer in cache]
    after = [tokens_of(layer, empty, args.tokens) for layer in cache]
    is_equal = num_tokens == args.tokens and all(map(torch.equal, before, after))
    print(
        f"{name}: KV of {num_tokens} tokens is in place, {'equal' if is_equal else 'DIFFERENT'} in all {LAYERS} layers"
    )
    sys.exit(not is_equal)


if __name__ == "__main__":
    main()
