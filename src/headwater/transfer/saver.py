"""From the paged cache into the pool: gathered at once, stored in the background.

The bytes leave the cache in the caller's thread, so that its blocks may be reused as soon as `save` returns; a thread
writes them to the pool. A prompt's KV may also leave layer by layer, while the next layers are computed. When staging
is full the rest is dropped and counted: saving never slows the engine down.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import Shard
from headwater.pool.space import Space
from headwater.stores.base import Status
from headwater.transfer.aborts import Aborts
from headwater.transfer.convert import Plan, Span, gather, plan_spans
from headwater.transfer.layers import CPU_GROUP_BYTES, layer_groups
from headwater.transfer.staging import Slots
from headwater.transfer.view import PagedView

log = logging.getLogger(__name__)

DRAIN_POLL_S = 0.005


@dataclass
class _Save:
    """Chunks that were taken together, and the slots they lie in."""

    chunks: Sequence[ChunkRef]
    slots: list[int]
    plan: Plan
    groups: list[range]
    num_gathered: int = 0
    """Groups of layers that have left the cache."""
    failed: set[int] = field(default_factory=set)
    """Which of the chunks will not be complete; the sender's thread keeps it."""


@dataclass(frozen=True)
class _GiveUp:
    """Chunks that will not be complete, and slots that are free once what was queued before is written."""

    chunks: Sequence[ChunkRef]
    slots: list[int]


@dataclass(frozen=True)
class _Part:
    """One group of layers of a save, in its slots."""

    save: _Save
    layers: range
    is_last: bool


class Saver:
    """One rank's way into the pool. Taken from by one thread; `close` drains for a while and drops the rest."""

    def __init__(
        self,
        space: Space,
        view: PagedView,
        shard: Shard,
        *,
        staging_bytes: int,
        deadline_s: float,
        group_bytes: int = CPU_GROUP_BYTES,
    ) -> None:
        self._space = space
        self._view = view
        self._shard = shard
        self._deadline_s = deadline_s
        self._group_bytes = group_bytes
        layers, heads, tile = shard.local_shape(space.spec, 0, space.chunk_tokens)
        self._layer_bytes = heads * tile
        self._slots = Slots(layers * heads * tile, staging_bytes)
        self._aborts = Aborts(space, shard)
        self._queue: queue.SimpleQueue[_Part | _GiveUp | None] = queue.SimpleQueue()
        self._open: list[_Save] = []
        """Saves whose layers are being computed."""
        self.statuses: Counter[Status] = Counter()
        self.num_dropped = 0
        self.num_bytes = 0
        self._thread = threading.Thread(target=self._run, name="headwater-saver", daemon=True)
        self._thread.start()

    def save(self, chunks: Sequence[ChunkRef], block_ids: npt.NDArray[np.int32]) -> None:
        """Take the KV of these chunks (in order, parents first) out of the cache, as much as there is room for."""
        if (save := self._take(chunks, block_ids, [self._shard.layers])) is not None:
            self._gather(save)

    def save_all(self, wanted: Sequence[tuple[Sequence[ChunkRef], npt.NDArray[np.int32]]]) -> None:
        """`save` for several requests."""
        for chunks, block_ids in wanted:
            self.save(chunks, block_ids)

    def begin(self, chunks: Sequence[ChunkRef], block_ids: npt.NDArray[np.int32]) -> None:
        """Take these chunks in the course of the coming step: `layer_done` says when a layer of them is computed."""
        layer_bytes = self._layer_bytes * min(len(chunks), self._slots.count)
        groups = layer_groups(self._shard.layers, layer_bytes, self._group_bytes)
        if (save := self._take(chunks, block_ids, groups)) is not None:
            self._open.append(save)

    def layer_done(self, layer: int) -> None:
        """The KV of one layer is in the cache; the layers before it were so already."""
        for save in self._open:
            if layer >= save.groups[save.num_gathered][-1]:
                self._gather(save)
        self._open = [save for save in self._open if save.num_gathered < len(save.groups)]

    @property
    def has_open(self) -> bool:
        """Whether a save waits for its layers."""
        return bool(self._open)

    def discard(self) -> None:
        """The step failed: give up what was begun."""
        for save in self._open:
            self._queue.put(_GiveUp(save.chunks, save.slots))
        self._open = []

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything that was taken is in the pool or given up."""
        deadline = time.monotonic() + timeout_s
        while self._slots.num_free < self._slots.count and time.monotonic() < deadline:
            time.sleep(DRAIN_POLL_S)
        return self._slots.num_free == self._slots.count

    def close(self, timeout_s: float = 5.0) -> None:
        """Drain, then stop the thread. Idempotent."""
        if self._thread.is_alive():
            self.discard()
            self.drain(timeout_s)
            self._queue.put(None)
            self._thread.join(timeout_s)

    def _take(self, chunks: Sequence[ChunkRef], block_ids: npt.NDArray[np.int32], groups: list[range]) -> _Save | None:
        slots = self._slots.take(len(chunks))
        taken, dropped = chunks[: len(slots)], chunks[len(slots) :]
        if dropped:
            self.num_dropped += len(dropped)
            self._queue.put(_GiveUp(dropped, []))
        if not taken:
            return None
        spans = [Span(block_ids, chunk.first_token, chunk.num_tokens) for chunk in taken]
        return _Save(taken, slots, plan_spans(self._view, self._shard, spans), groups)

    def _gather(self, save: _Save) -> None:
        layers = save.groups[save.num_gathered]
        save.num_gathered += 1
        gather(save.plan, layers, [self._tiles(save, i, layers) for i in range(len(save.chunks))])
        self._queue.put(_Part(save, layers, save.num_gathered == len(save.groups)))

    def _tiles(self, save: _Save, number: int, layers: range) -> npt.NDArray[np.uint8]:
        """Where some layers of one chunk lie in its slot."""
        chunk = save.chunks[number]
        shape = self._shard.local_shape(self._space.spec, chunk.first_token, chunk.num_tokens)
        first = self._shard.layers.index(layers[0])
        return self._slots.bytes_of(save.slots[number], shape)[first : first + len(layers)]

    # ---- the sender's thread ------------------------------------------------------------------------------------
    def _run(self) -> None:
        while True:
            try:
                item = self._queue.get(timeout=self._aborts.wait_s)
            except queue.Empty:
                self._aborts.retry()
                continue
            if item is None:
                self._aborts.retry()
                break
            try:
                if isinstance(item, _Part):
                    self._store(item)
                else:
                    self._aborts.give_up(item.chunks)
            except Exception:  # a pool that cannot be written costs the next server time, and this one nothing
                log.exception("a save failed")
                if isinstance(item, _Part):
                    self._fail(item.save, [n for n in range(len(item.save.chunks)) if n not in item.save.failed])
            finally:
                if isinstance(item, _GiveUp):
                    self._slots.give_back(item.slots)
                elif item.is_last:
                    self._slots.give_back(item.save.slots)

    def _store(self, part: _Part) -> None:
        """Write one group of layers. A chunk is given up at its first failure: it can never be complete."""
        save = part.save
        live = [number for number in range(len(save.chunks)) if number not in save.failed]
        if not live:
            return
        chunks = [save.chunks[number] for number in live]
        tiles = [self._tiles(save, number, part.layers) for number in live]
        shard = replace(self._shard, layers=part.layers)
        outcome = self._space.write(chunks, shard, tiles, deadline_s=self._deadline_s)
        self.num_bytes += sum(t.nbytes for t, status in zip(tiles, outcome, strict=True) if status is Status.OK)
        bad = [number for number, status in zip(live, outcome, strict=True) if not status.stored]
        self.statuses.update(status for status in outcome if part.is_last or not status.stored)
        if bad and len(save.groups) > 1:
            self._aborts.give_up([save.chunks[number] for number in bad])
        save.failed.update(bad)

    def _fail(self, save: _Save, numbers: list[int]) -> None:
        save.failed.update(numbers)
        self.num_dropped += len(numbers)
