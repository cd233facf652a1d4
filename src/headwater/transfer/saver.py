"""From the paged cache into the pool: gathered at once, stored in the background.

The bytes leave the cache in the caller's thread, so that its blocks may be reused as soon as `save` returns; a thread
writes them to the pool. When staging is full the rest is dropped and counted: saving never slows the engine down.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import Shard
from headwater.pool.space import Space
from headwater.stores.base import Status
from headwater.transfer.convert import Span, gather, plan_spans
from headwater.transfer.staging import Slots
from headwater.transfer.view import PagedView

log = logging.getLogger(__name__)

DRAIN_POLL_S = 0.005

_Batch = tuple[list[ChunkRef], list[int]]


class Saver:
    """One rank's way into the pool. `save` from one thread; `close` drains for a while and drops the rest."""

    def __init__(self, space: Space, view: PagedView, shard: Shard, *, staging_bytes: int, deadline_s: float) -> None:
        self._space = space
        self._view = view
        self._shard = shard
        self._deadline_s = deadline_s
        self._slots = Slots(_slot_bytes(space, shard), staging_bytes)
        self._queue: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self.statuses: Counter[Status] = Counter()
        self.num_dropped = 0
        self.num_bytes = 0
        self._thread = threading.Thread(target=self._run, name="headwater-saver", daemon=True)
        self._thread.start()

    def save(self, chunks: Sequence[ChunkRef], block_ids: npt.NDArray[np.int32]) -> None:
        """Take the KV of these chunks (in order, parents first) out of the cache, as much as there is room for."""
        slots = self._slots.take(len(chunks))
        taken = list(chunks[: len(slots)])
        self.num_dropped += len(chunks) - len(taken)
        if not taken:
            return
        plan = plan_spans(self._view, self._shard, [Span(block_ids, c.first_token, c.num_tokens) for c in taken])
        gather(plan, self._shard.layers, [self._tiles(*pair) for pair in zip(taken, slots, strict=True)])
        self._queue.put((taken, slots))

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything that was taken is in the pool or given up."""
        deadline = time.monotonic() + timeout_s
        while self._slots.num_free < self._slots.count and time.monotonic() < deadline:
            time.sleep(DRAIN_POLL_S)
        return self._slots.num_free == self._slots.count

    def close(self, timeout_s: float = 5.0) -> None:
        """Drain, then stop the thread. Idempotent."""
        if self._thread.is_alive():
            self.drain(timeout_s)
            self._queue.put(None)
            self._thread.join(timeout_s)

    def _tiles(self, chunk: ChunkRef, slot: int) -> npt.NDArray[np.uint8]:
        shape = self._shard.local_shape(self._space.spec, chunk.first_token, chunk.num_tokens)
        return self._slots.bytes_of(slot, shape)

    def _run(self) -> None:
        while (batch := self._queue.get()) is not None:
            chunks, slots = batch
            try:
                tiles = [self._tiles(*pair) for pair in zip(chunks, slots, strict=True)]
                statuses = self._space.write(chunks, self._shard, tiles, deadline_s=self._deadline_s)
                self.statuses.update(statuses)
                stored = zip(tiles, statuses, strict=True)
                self.num_bytes += sum(tile.nbytes for tile, status in stored if status is Status.OK)
            except Exception:  # a pool that cannot be written costs the next server time, and this one nothing
                log.exception("a save failed; %d chunks are dropped", len(chunks))
                self.num_dropped += len(chunks)
            finally:
                self._slots.give_back(slots)


def _slot_bytes(space: Space, shard: Shard) -> int:
    layers, heads, tile = shard.local_shape(space.spec, 0, space.chunk_tokens)
    return layers * heads * tile
