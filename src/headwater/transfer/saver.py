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
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import Shard
from headwater.pool.space import Space
from headwater.stores.base import Status
from headwater.transfer.aborts import Aborts
from headwater.transfer.convert import Plan, Span, gather, plan_spans
from headwater.transfer.layers import CPU_GROUP_BYTES, layer_groups, layers_before
from headwater.transfer.staging import Slots
from headwater.transfer.view import PagedView

log = logging.getLogger(__name__)

DRAIN_POLL_S = 0.005


class Wanted(NamedTuple):
    """Chunks of one request (in order, parents first), and its blocks from its first token on."""

    name: str
    chunks: Sequence[ChunkRef]
    block_ids: npt.NDArray[np.int32]


class Unsaved:
    """By name: the first token that was not saved. Safe from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first: dict[str, int] = {}

    def add(self, name: str, first_token: int) -> None:
        """Nothing from this token on was saved."""
        with self._lock:
            self._first[name] = min(first_token, self._first.get(name, first_token))

    def take(self) -> list[tuple[str, int]]:
        """What was added since the last call."""
        with self._lock:
            found, self._first = self._first, {}
        return list(found.items())


@dataclass
class _Save:
    """Chunks that were taken together, and the slots they lie in."""

    name: str
    chunks: Sequence[ChunkRef]
    slots: list[int]
    plan: Plan
    failed: set[int] = field(default_factory=set)
    """Which of the chunks will not be complete; the sender's thread keeps it."""


@dataclass(frozen=True)
class _Begin:
    """Chunks that will come."""

    chunks: Sequence[ChunkRef]


@dataclass(frozen=True)
class _Part:
    """One group of layers of some saves, in their slots."""

    saves: Sequence[_Save]
    layers: range


@dataclass(frozen=True)
class _GiveUp:
    """A save that will not be complete; its slots are free once what was queued before is written."""

    save: _Save


@dataclass(frozen=True)
class _Drop:
    """Chunks that there was no room for."""

    chunks: Sequence[ChunkRef]


_Item = _Begin | _Part | _GiveUp | _Drop
"""What the sender is told to do, in this order."""


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
        self._unsaved = Unsaved()
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._open: list[_Save] = []
        """Saves whose layers are being computed, all in one step."""
        self._groups: list[range] = []
        """The groups of layers of that step that are still in the cache; none before its first layer."""
        self._num_layers = 0
        """Layers of that step that are computed."""
        self.statuses: Counter[Status] = Counter()
        self._num_full = 0
        self._num_failed = 0
        """By the sender's thread."""
        self.num_bytes = 0
        self._thread = threading.Thread(target=self._run, name="headwater-saver", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        """Chunks that were not saved, because staging was full or the pool or a step failed."""
        return self._num_full + self._num_failed

    def save(self, chunks: Sequence[ChunkRef], block_ids: npt.NDArray[np.int32]) -> None:
        """Take the KV of these chunks (in order, parents first) out of the cache, as much as there is room for."""
        self.save_all([Wanted("", chunks, block_ids)])

    def save_all(self, wanted: Sequence[Wanted]) -> None:
        """`save` for several requests."""
        for name, chunks, block_ids in wanted:
            if (save := self._take(name, chunks, block_ids)) is not None:
                try:
                    self._gather(save, self._shard.layers)
                except BaseException:
                    self._give_up([save])
                    raise
                self._queue.put(_Part([save], self._shard.layers))

    def take_unsaved(self) -> list[tuple[str, int]]:
        """By name: the first token of each request that was not saved, since the last call."""
        return self._unsaved.take()

    def begin(self, name: str, chunks: Sequence[ChunkRef], block_ids: npt.NDArray[np.int32]) -> None:
        """Take these chunks in the course of the coming step: `layer_done` says when a layer of them is computed.

        What several requests have is taken once, from the first of them. What an earlier step computed only in part is
        given up; one that was not run at all must be discarded.
        """
        if self._num_layers:
            self.discard()
        taken = {chunk.key for save in self._open for chunk in save.chunks}
        chunks = [chunk for chunk in chunks if chunk.key not in taken]
        if (save := self._take(name, chunks, block_ids)) is not None:
            self._open.append(save)

    def layer_done(self, layer: int) -> None:
        """The KV of one layer (of the whole model) is in the cache; the layers before it were so already."""
        if self._open and layer in self._shard.layers and layer != self._shard.layers[self._num_layers]:
            self.discard()  # a step that was not finished, and another one now
        if not self._open or layer not in self._shard.layers:
            return
        self._num_layers += 1
        if not self._groups:
            # The same for all: a chunk can only be stored when its parent is, which may be another request's.
            num_chunks = sum([len(save.chunks) for save in self._open])
            self._groups = layer_groups(self._shard.layers, self._layer_bytes * num_chunks, self._group_bytes)
        while self._groups and layer >= self._groups[0][-1]:
            try:
                for save in self._open:
                    self._gather(save, self._groups[0])
            except BaseException:
                self.discard()
                raise
            self._queue.put(_Part(self._open, self._groups.pop(0)))
        if not self._groups:
            self._open, self._num_layers = [], 0

    def end_step(self) -> None:
        """The step is over and all its KV is in the cache: take what was begun and not announced layer by layer."""
        for layer in self._shard.layers[self._num_layers :] if self._open else ():
            self.layer_done(layer)

    @property
    def has_open(self) -> bool:
        """Whether a save waits for its layers."""
        return bool(self._open)

    def discard(self) -> None:
        """The step failed: give up what was begun."""
        for save in self._open:
            self._unsaved.add(save.name, save.chunks[0].first_token)
        self._give_up(self._open)
        self._open, self._groups, self._num_layers = [], [], 0

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

    def _take(self, name: str, chunks: Sequence[ChunkRef], block_ids: npt.NDArray[np.int32]) -> _Save | None:
        slots = self._slots.take(len(chunks))
        taken, dropped = chunks[: len(slots)], chunks[len(slots) :]
        if dropped:
            self._num_full += len(dropped)
            self._unsaved.add(name, dropped[0].first_token)
            self._queue.put(_Drop(dropped))
        if not taken:
            return None
        try:
            spans = [Span(block_ids, chunk.first_token, chunk.num_tokens) for chunk in taken]
            plan = plan_spans(self._view, self._shard, spans)
        except BaseException:
            self._slots.give_back(slots)
            raise
        self._queue.put(_Begin(taken))
        return _Save(name, taken, slots, plan)

    def _give_up(self, saves: Sequence[_Save]) -> None:
        for save in saves:
            self._queue.put(_GiveUp(save))

    def _gather(self, save: _Save, layers: range) -> None:
        gather(save.plan, layers, [self._tiles(save, i, layers) for i in range(len(save.chunks))])

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
                item = _Begin([])
            try:
                self._handle(item)
                self._aborts.retry_if_due()
            except Exception:  # a pool that cannot be written costs the next server time, and this one nothing
                log.exception("a save failed")
            if item is None:
                break

    def _handle(self, item: _Item | None) -> None:
        if isinstance(item, _Part):
            try:
                for root in dict.fromkeys([save.chunks[0].root for save in item.saves]):
                    self._store([save for save in item.saves if save.chunks[0].root == root], item.layers)
            finally:
                if item.layers[-1] == self._shard.layers[-1]:
                    self._slots.give_back([slot for save in item.saves for slot in save.slots])
        elif isinstance(item, _GiveUp):
            self._num_failed += len(item.save.chunks) - len(item.save.failed)
            try:
                self._aborts.give_up(item.save.chunks)
            finally:
                self._slots.give_back(item.save.slots)
        elif isinstance(item, _Drop):
            self._aborts.give_up(item.chunks)
        elif item is None or not item.chunks:
            self._aborts.retry()
        else:
            self._aborts.take_up(item.chunks)

    def _store(self, saves: Sequence[_Save], layers: range) -> None:
        """Write one group of layers of saves with one root. A chunk is given up at its first failure: it can never be
        complete. A pool that raises an error has lost all of them."""
        live = [(save, n) for save in saves for n in range(len(save.chunks)) if n not in save.failed]
        if not live:
            return
        own = self._shard.layers
        chunks = [save.chunks[number] for save, number in live]
        tiles = [self._tiles(save, number, layers) for save, number in live]
        before = layers_before(own, layers)
        try:
            shard = replace(self._shard, layers=layers)
            outcome = self._space.write(chunks, shard, tiles, before=before, deadline_s=self._deadline_s)
        except Exception:  # it costs the next server time, and this one nothing
            log.exception("a save failed")
            outcome = [Status.LOST] * len(chunks)
        self.num_bytes += sum([t.nbytes for t, status in zip(tiles, outcome, strict=True) if status is Status.OK])
        self.statuses.update([status for status in outcome if layers[-1] == own[-1] or not status.stored])
        for (save, number), status in zip(live, outcome, strict=True):
            if not status.stored:
                save.failed.add(number)
            if status.failed:
                self._unsaved.add(save.name, save.chunks[number].first_token)
        stored = zip(chunks, outcome, strict=True)
        self._num_failed += self._aborts.give_up_failed(stored, has_begun=before is not None)
