"""One rank of a prefill server with a pool of its own, which pushes what it is told by lines of JSON."""

from __future__ import annotations

import json
import os
import random
import secrets
import sys
import threading
import time
from typing import Any

from headwater.kv.topology import Topology
from headwater.peers.caller import LinkSettings
from headwater.peers.sender import PeerSender
from headwater.pool.pool import open_pool
from peer_cases import open_space, prompt, save


class Prefill:
    """A rank that "computes" what `support.tile` says, group by group, and pushes it."""

    def __init__(self, url: str, options: str) -> None:
        given = json.loads(options)
        self._pool = open_pool(url, group=given.get("server", 7))
        self._space = open_space(self._pool)
        topology = Topology(tp=given.get("tp", 1))
        self._shard = topology.shard(self._space.spec, tp_rank=given.get("rank", 0))
        secret = given.get("secret")
        settings = LinkSettings(secret=secret and secret.encode(), **given.get("settings", {}))
        self.sender = PeerSender(
            self._space, self._shard, server=given.get("server", 7), rank=given.get("rank", 0), settings=settings
        )
        self._chunks: dict[str, list[Any]] = {}

    def push(self, transfer: str, address: str, seed: int, num_chunks: int) -> dict[str, Any]:
        chunks = self._chunks[transfer] = prompt(self._space, num_chunks, seed)
        began = time.monotonic()
        taken = self.sender.push(transfer, address, chunks)
        return {"taken": taken, "seconds": time.monotonic() - began}

    def compute(self, transfer: str, first: int, stop: int) -> float:
        """Save and note a group of layers; how long the push took of it."""
        chunks, layers = self._chunks[transfer], range(first, stop)
        save(self._space, chunks, self._shard, layers)
        began = time.monotonic()
        self.sender.noted(chunks, layers)
        return time.monotonic() - began

    def flush(self, transfer: str, deadline_s: float) -> dict[str, Any]:
        began = time.monotonic()
        tokens = self.sender.flush(transfer, deadline_s)
        return {"tokens": tokens, "seconds": time.monotonic() - began}

    def whole(self, address: str, seed: int, num_chunks: int, deadline_s: float) -> dict[str, Any]:
        """All of it."""
        transfer = secrets.token_hex(8)
        self.push(transfer, address, seed, num_chunks)
        self.compute(transfer, 0, self._space.spec.num_layers)
        return self.flush(transfer, deadline_s)

    def storm(self, address: str, count: int, at_once: int) -> dict[str, int]:
        """Requests that are cancelled at random moments, many at once."""
        rng, lock, numbers = random.Random(5), threading.Lock(), iter(range(count))

        def work() -> None:
            while True:
                with lock:
                    number, stop, pause = next(numbers, None), rng.randrange(7), rng.random() * 0.02
                if number is None:
                    return
                transfer = secrets.token_hex(8)
                chunks = prompt(self._space, 3, seed=number % 50)
                self.sender.push(transfer, address, chunks)
                for layer in range(stop):
                    part = range(layer, layer + 1)
                    save(self._space, chunks, self._shard, part, is_alone=False)
                    self.sender.noted(chunks, part)
                time.sleep(pause)
                self.sender.flush(transfer, 0.001) if number % 2 else self.sender.cancel(transfer)

        threads = [threading.Thread(target=work) for _ in range(at_once)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {"transfers": self.sender.stats()["transfers"]}

    def state(self) -> dict[str, Any]:
        stats = self._pool.stats().store
        fds = len(os.listdir("/proc/self/fd"))
        return {"counts": dict(self.sender.counts), "pending": stats.pending_bytes, "fds": fds}

    def close(self) -> str:
        self.sender.close()
        self._pool.close()
        return "closed"


def main() -> None:
    prefill = Prefill(*sys.argv[1:])
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        print(json.dumps(getattr(prefill, what)(*arguments)), flush=True)
    prefill.close()


if __name__ == "__main__":
    main()
