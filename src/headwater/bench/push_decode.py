"""The decode side of the benchmark of layer-wise pushes: a process with a paged cache, whose loads follow a push.

python -m headwater.bench.push_decode URL CASE     on stdin: load → follows, then TIME CHUNKS DIGEST
"""

from __future__ import annotations

import json
import queue
import sys
import time

import numpy as np
import torch
import xxhash

from headwater.bench.push_case import IDENTITY, START_S, PushCase
from headwater.kv.topology import whole_shard
from headwater.pool.pool import open_pool
from headwater.pool.wait import Wait
from headwater.transfer.load import Loader
from headwater.transfer.view import AXES, PagedView, view_tensors

_BLOCK = 16


class BenchCache:
    """A paged cache with room for one prompt, whose blocks are in no order."""

    def __init__(self, case: PushCase) -> None:
        spec = case.spec
        count = case.num_chunks * case.chunk_tokens // _BLOCK
        shape = (len(spec.planes), count, _BLOCK, spec.num_kv_heads, case.head_dim)
        self._layers = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(spec.num_layers)]
        self.view: PagedView = view_tensors(spec, self._layers, AXES)
        self.blocks = np.random.default_rng(7).permutation(count).astype(np.int32)

    def fill(self) -> None:
        """Bytes without a pattern."""
        rng = np.random.default_rng(5)
        for layer in self._layers:
            bits = layer.view(torch.int16)
            bits.copy_(torch.from_numpy(rng.integers(-(1 << 15), 1 << 15, bits.shape, np.int16)))

    def clear(self) -> None:
        """Forget what was loaded: whatever is found later came later."""
        for layer in self._layers:
            layer.zero_()

    def digest(self) -> str:
        """Of all of it."""
        digest = xxhash.xxh3_64()
        for layer in self._layers:
            digest.update(memoryview(layer.view(torch.int16).numpy()).cast("B"))
        return digest.hexdigest()


def main() -> None:
    """Serve until stdin ends."""
    torch.set_num_threads(1)
    case, ends = PushCase(**json.loads(sys.argv[2])), queue.SimpleQueue[tuple[float, int]]()
    with open_pool(sys.argv[1]) as pool:
        space = pool.space(IDENTITY, case.spec, chunk_tokens=case.chunk_tokens)
        chunks = space.keys(range(case.num_chunks * case.chunk_tokens)).refs(case.num_chunks)
        cache = BenchCache(case)
        loader = Loader(
            space,
            cache.view,
            whole_shard(case.spec),
            staging_bytes=case.num_bytes,
            deadline_s=START_S,
            on_done=lambda _, count: ends.put((time.monotonic(), count)),
        )
        print("ready", flush=True)
        for _ in sys.stdin:
            cache.clear()
            loader.load("bench", chunks, cache.blocks, wait=Wait(START_S, START_S, START_S))
            print("follows", flush=True)
            arrived, count = ends.get(timeout=2 * START_S)
            print(arrived, count, cache.digest(), flush=True)
        loader.close()


if __name__ == "__main__":
    main()
