"""One process of the fleet benchmark: some clients that match, read and write, and check every byte they get.

What a tile holds follows from its chunk's key, layer and head, so nobody needs a copy of what was written.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from headwater.bench.values import kv_tile
from headwater.kv.hashing import ChunkRef
from headwater.kv.identity import Identity
from headwater.kv.spec import KVSpec
from headwater.kv.topology import Shard, Topology
from headwater.pool import Space, open_pool
from headwater.stores.base import Status, Tiles

SPEC = KVSpec.gqa(num_layers=4, num_kv_heads=4, head_dim=64, dtype="bfloat16")
CHUNK_TOKENS = 32
IDENTITY = Identity(weights="sha256:" + "f" * 64, run_dtype="bfloat16", kv_dtype="bfloat16", label="bench fleet")
TOPOLOGIES = (Topology(), Topology(tp=2), Topology(tp=4, pp=2), Topology(tp=8, dcp=2, interleave=4), Topology(pp=4))
DEADLINE_S = 5.0


def tile(chunk: ChunkRef, layer: int, head: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The one true content of a tile. A quarter of the chunks are noise, which does not pack."""
    seed = int.from_bytes(chunk.key[:8], "little") ^ (layer << 32) ^ (head << 48)
    rng = np.random.Generator(np.random.SFC64(seed))
    if chunk.key[0] % 4:
        return kv_tile(SPEC, chunk.num_tokens, rng)
    return rng.integers(0, 256, SPEC.tile_bytes(chunk.num_tokens), dtype=np.uint8)


def local_tiles(chunk: ChunkRef, shard: Shard) -> Tiles:
    """What a rank's cache holds of a chunk."""
    from headwater.kv.format import gather_part, part_rows

    out = np.zeros(shard.local_shape(SPEC, chunk.first_token, chunk.num_tokens), np.uint8)
    rows = part_rows(shard.split, shard.part, chunk.first_token, chunk.num_tokens)
    for i, layer in enumerate(shard.layers):
        for j, head in enumerate(shard.heads):
            gather_part(SPEC, tile(chunk, layer, head), rows, chunk.num_tokens, out[i, j])
    return out


def prompt(number: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Prompts share beginnings of several lengths, and every fourth ends in a tail."""
    shared = np.full(CHUNK_TOKENS * (number % 3), 7, np.uint32)
    own = np.full(CHUNK_TOKENS * (1 + number % 4) + (5 if number % 4 == 0 else 0), 100 + number, np.uint32)
    return np.concatenate([shared, own])


@dataclass
class Tally:
    """What one client saw."""

    ops: int = 0
    wrong_bytes: int = 0
    asked_tokens: int = 0
    matched_tokens: int = 0
    read_tiles: int = 0
    statuses: dict[str, int] = field(default_factory=dict)
    match_ms: list[float] = field(default_factory=list)
    read_ms: list[float] = field(default_factory=list)


class Client:
    """Looks for a prompt, reads what there is as a rank of some topology, and writes what there is not."""

    def __init__(self, space: Space, seed: int, universe: int) -> None:
        self._space = space
        self._rng = np.random.default_rng(seed)
        self._universe = universe
        self.tally = Tally()

    def run(self, until: float) -> None:
        """Until that moment of time.monotonic()."""
        while time.monotonic() < until:
            self._once(TOPOLOGIES[int(self._rng.integers(len(TOPOLOGIES)))])

    def _once(self, topology: Topology) -> None:
        # Few prompts are popular, most are not.
        number = int(self._universe * self._rng.random() ** 2)
        space, tally = self._space, self.tally
        keys = space.keys(prompt(number))
        start = time.perf_counter()
        match = space.match(keys)
        tally.match_ms.append(1000 * (time.perf_counter() - start))
        tally.ops += 1
        tally.asked_tokens += keys.num_tokens
        tally.matched_tokens += match.num_tokens
        if match.chunks:
            shards = list(topology.shards(SPEC))
            for shard in shards if self._rng.random() < 0.3 else [shards[int(self._rng.integers(len(shards)))]]:
                self._read(match.chunks, shard)
        if match.num_tokens < keys.num_tokens:
            chunks = keys.chunks()
            for shard in topology.shards(SPEC):
                space.write(chunks, shard, [local_tiles(c, shard) for c in chunks], deadline_s=DEADLINE_S)
                tally.ops += 1

    def _read(self, chunks: tuple[ChunkRef, ...], shard: Shard) -> None:
        tally = self.tally
        buffers = [np.full_like(local_tiles(chunk, shard), 0xA5) for chunk in chunks]
        start = time.perf_counter()
        statuses = self._space.read(chunks, shard, buffers, deadline_s=DEADLINE_S)
        tally.read_ms.append(1000 * (time.perf_counter() - start))
        tally.ops += 1
        for chunk, buffer, status in zip(chunks, buffers, statuses, strict=True):
            tally.statuses[status.name] = tally.statuses.get(status.name, 0) + 1
            if status == Status.OK:
                tally.read_tiles += shard.num_tiles
                tally.wrong_bytes += int(np.count_nonzero(buffer != local_tiles(chunk, shard)))


def main() -> None:
    """`python -m headwater.bench.fleet_client URL SEED CLIENTS SECONDS UNIVERSE`; the last line is JSON."""
    url, (seed, clients), seconds, universe = sys.argv[1], map(int, sys.argv[2:4]), float(sys.argv[4]), int(sys.argv[5])
    with open_pool(url) as pool:
        space = pool.space(IDENTITY, SPEC, chunk_tokens=CHUNK_TOKENS)
        print("ready", flush=True)
        sys.stdin.readline()
        runners = [Client(space, 1000 * seed + number, universe) for number in range(clients)]
        until = time.monotonic() + seconds
        threads = [threading.Thread(target=runner.run, args=(until,), daemon=True) for runner in runners]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        tiers = [asdict(tier) for tier in pool.stats().store.tiers]
    print(json.dumps({"clients": [asdict(runner.tally) for runner in runners], "tiers": tiers}))


if __name__ == "__main__":
    main()
