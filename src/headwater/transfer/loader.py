"""From the pool into the paged cache: read and verified in the background, then scattered into the request's blocks."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import Shard
from headwater.pool.space import Space
from headwater.stores.base import Status
from headwater.transfer.convert import Span, plan_spans, scatter
from headwater.transfer.staging import Slots
from headwater.transfer.view import PagedView

log = logging.getLogger(__name__)

_Load = tuple[str, Sequence[ChunkRef], npt.NDArray[np.int32]]


class Loader:
    """One rank's way out of the pool. Loads run one after another in a thread, which says when each is done."""

    def __init__(
        self,
        space: Space,
        view: PagedView,
        shard: Shard,
        *,
        staging_bytes: int,
        deadline_s: float,
        on_done: Callable[[str, int], None],
    ) -> None:
        self._space = space
        self._view = view
        self._shard = shard
        self._deadline_s = deadline_s
        self._on_done = on_done
        layers, heads, tile = shard.local_shape(space.spec, 0, space.chunk_tokens)
        self._slots = Slots(layers * heads * tile, staging_bytes)
        self._queue: queue.SimpleQueue[_Load | None] = queue.SimpleQueue()
        self._cancelled: set[str] = set()
        self.statuses: Counter[Status] = Counter()
        self.num_bytes = 0
        self.seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="headwater-loader", daemon=True)
        self._thread.start()

    def load(self, name: str, chunks: Sequence[ChunkRef], block_ids: npt.NDArray[np.int32]) -> None:
        """Bring these chunks into those blocks; `on_done(name, chunks in place)` follows in any case, once."""
        self._queue.put((name, chunks, block_ids))

    def cancel(self, name: str) -> None:
        """Stop a load as soon as possible. Its `on_done` still comes: until then its blocks may be written."""
        self._cancelled.add(name)

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the thread; loads that have not begun are reported with nothing in place. Idempotent."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (load := self._queue.get()) is not None:
            name, chunks, block_ids = load
            start = time.monotonic()
            num_loaded = 0
            try:
                num_loaded = self._load(name, chunks, block_ids, start + self._deadline_s)
            except Exception:
                log.exception("a load failed; the engine computes what is missing")
                self.statuses[Status.MISS] += 1
            finally:
                self._cancelled.discard(name)
                self.seconds += time.monotonic() - start
                self._on_done(name, num_loaded)

    def _load(self, name: str, chunks: Sequence[ChunkRef], block_ids: npt.NDArray[np.int32], deadline: float) -> int:
        """Chunks in place, counted from the first: what follows a chunk that is missing is of no use."""
        done = 0
        while done < len(chunks):
            left_s = deadline - time.monotonic()
            if left_s <= 0 or name in self._cancelled:
                break
            batch = chunks[done : done + self._slots.count]
            tiles = [self._slots.bytes_of(slot, self._shape(chunk)) for slot, chunk in enumerate(batch)]
            statuses = self._space.read(batch, self._shard, tiles, deadline_s=left_s)
            self.statuses.update(statuses)
            good = next((i for i, status in enumerate(statuses) if status is not Status.OK), len(batch))
            if good:
                spans = [Span(block_ids, c.first_token, c.num_tokens) for c in batch[:good]]
                scatter(plan_spans(self._view, self._shard, spans), self._shard.layers, tiles[:good])
                self.num_bytes += sum(tile.nbytes for tile in tiles[:good])
            done += good
            if good < len(batch):
                break
        return done

    def _shape(self, chunk: ChunkRef) -> tuple[int, int, int]:
        return self._shard.local_shape(self._space.spec, chunk.first_token, chunk.num_tokens)
