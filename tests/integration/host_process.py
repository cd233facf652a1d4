"""What runs on a host of namespaces: a pool, used as some topology, told what to do by lines of JSON."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

from headwater.kv.topology import Topology
from headwater.pool import open_pool
from headwater.stores.base import Status

from support import empty_tiles, gqa, identity, local_tiles

SPEC = gqa(layers=4, heads=4, dim=32)
CHUNK = 32


def prompt(number: int, num_chunks: int) -> list[int]:
    return [number] * (CHUNK * num_chunks)


class Ranks:
    """All ranks of a server in one process."""

    def __init__(self, url: str, tp: int, pp: int) -> None:
        self.pool = open_pool(url)
        self._space = self.pool.space(identity(), SPEC, chunk_tokens=CHUNK)
        self._shards = list(Topology(tp=tp, pp=pp).shards(SPEC))

    def write(self, number: int, num_chunks: int) -> list[str]:
        chunks = self._space.keys(prompt(number, num_chunks)).chunks()
        names = set()
        for shard in self._shards:
            tiles = [local_tiles(SPEC, chunk, shard) for chunk in chunks]
            names |= {status.name for status in self._space.write(chunks, shard, tiles)}
        return sorted(names)

    def match(self, number: int, num_chunks: int) -> dict[str, Any]:
        start = time.monotonic()
        matched = self._space.match(self._space.keys(prompt(number, num_chunks))).num_tokens // CHUNK
        return {"chunks": matched, "seconds": time.monotonic() - start}

    def read(self, number: int, num_chunks: int, deadline_s: float) -> dict[str, Any]:
        """As each rank, one after another; a wrong byte is counted."""
        chunks = self._space.keys(prompt(number, num_chunks)).chunks()
        counts: dict[str, int] = {}
        wrong, slowest = 0, 0.0
        for shard in self._shards:
            buffers = [empty_tiles(SPEC, chunk, shard) for chunk in chunks]
            start = time.monotonic()
            statuses = self._space.read(chunks, shard, buffers, deadline_s=deadline_s)
            slowest = max(slowest, time.monotonic() - start)
            for chunk, buffer, status in zip(chunks, buffers, statuses, strict=True):
                counts[status.name] = counts.get(status.name, 0) + 1
                if status == Status.OK:
                    wrong += int(np.count_nonzero(buffer != local_tiles(SPEC, chunk, shard)))
        return {"statuses": counts, "wrong": wrong, "seconds": slowest}

    def flush(self, timeout_s: float) -> bool:
        return self.pool.flush(timeout_s)

    def forget(self) -> int:
        """What is on this host."""
        return self.pool._store._front.clear(None)  # type: ignore[attr-defined,no-any-return]

    def tier(self) -> dict[str, Any]:
        last = self.pool.stats().store.tiers[-1]
        return {"breaker": last.breaker, "trips": last.breaker_trips, "hits": last.hits, "waiting": last.waiting}


def main() -> None:
    url, tp, pp = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    ranks = Ranks(url, tp, pp)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        verb, *words = json.loads(line)
        print(json.dumps(getattr(ranks, verb)(*words)), flush=True)
    ranks.pool.close()


if __name__ == "__main__":
    main()
