"""From a GPU's paged cache into the pool, at the speed of the bus: the host touches no byte of KV.

`save` launches one gather on the caller's stream and returns; the cache's blocks may then be reused by whatever that
stream runs next. A thread does the rest: extents, checksums on the device, copies straight into the store's registered
memory, commits. When the ring is full the rest is dropped and counted: saving never slows the engine down.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import Shard
from headwater.pool.space import Space
from headwater.stores.base import Filled, Reservation, Status
from headwater.transfer.convert import Plan, Span, gather, plan_spans
from headwater.transfer.device_ring import DeviceRing, Tiles, copy_chunks
from headwater.transfer.lanes import Lane, Mark, current_lane, enter_thread, pinned
from headwater.transfer.registered import Registered
from headwater.transfer.verify import staged_checksums
from headwater.transfer.view import PagedView

log = logging.getLogger(__name__)

_MAX_IN_FLIGHT = 3
"""Batches whose copies are queued on the device: one runs, one waits, one is being committed."""


@dataclass
class _Run:
    """Chunks that were gathered together into neighbouring slots. No plan: nothing to do but to give them back."""

    chunks: Sequence[ChunkRef]
    slots: range
    plan: Plan | None
    gathered: Mark
    sums: Tensor | None = None
    """On the device, once they are being computed."""
    hashed: Mark | None = None


class _Batch(NamedTuple):
    """Chunks of a run on their way into their extents."""

    run: _Run
    spans: range
    filled: list[tuple[int, Reservation, Shard, slice]]
    """(span, its extent, what of it this rank fills, which of the staged layers these are)."""
    copied: Mark


class DeviceSaver:
    """One rank's way into the pool. `save` from one thread; `close` drains for a while and drops the rest."""

    def __init__(self, space: Space, view: PagedView, shard: Shard, *, staging_bytes: int, deadline_s: float) -> None:
        self._space = space
        self._view = view
        self._shard = shard
        self._deadline_s = deadline_s
        layers, heads, tile = shard.local_shape(space.spec, 0, space.chunk_tokens)
        self.ring = DeviceRing(layers * heads * tile, staging_bytes, view.device)
        self._in_place = space.mapped and shard.split.parts == 1
        self._sums = pinned((self.ring.count, layers, heads), torch.int64, view.device)
        self._bounce: Tensor | None = None
        self._segments = Registered(view.device)
        self._hashes = Lane(view.device)
        self._copies = (Lane(view.device), Lane(view.device))
        self._num_batches = 0
        self._in_flight: deque[_Batch] = deque()
        self._filling: set[bytes] = set()
        self._queue: queue.SimpleQueue[_Run | None] = queue.SimpleQueue()
        self._num_unsettled = 0
        self._settled = threading.Condition()
        self.statuses: Counter[Status] = Counter()
        self.num_dropped = 0
        self.num_bytes = 0
        self._thread = threading.Thread(target=self._run, name="headwater-device-saver", daemon=True)
        self._thread.start()

    def save(self, chunks: Sequence[ChunkRef], block_ids: npt.NDArray[np.int32]) -> None:
        """Take the KV of these chunks (in order, parents first) out of the cache, as much as there is room for.

        Launches on the current stream and does not wait.
        """
        done = 0
        while done < len(chunks):
            # The first run of many is short: its copies begin while the others are gathered.
            most = self.ring.batch if self.ring.num_free == self.ring.count else len(chunks)
            slots = self.ring.take(min(most, len(chunks) - done))
            if not slots:
                self.num_dropped += len(chunks) - done
                return
            part = chunks[done : done + len(slots)]
            lane = current_lane(self._view.device)
            plan = None
            try:
                spans = [Span(block_ids, chunk.first_token, chunk.num_tokens) for chunk in part]
                plan = plan_spans(self._view, self._shard, spans)
                gather(plan, self._shard.layers, self.ring.flat(slots))
            finally:
                with self._settled:
                    self._num_unsettled += len(slots)
                self._queue.put(_Run(part, slots, plan, lane.mark()))
            done += len(slots)

    def wait_for_room(self, num_chunks: int, timeout_s: float) -> bool:
        """Wait until so many chunks could be saved without dropping any. For callers with nothing better to do."""
        return self.ring.wait(min(num_chunks, self.ring.count), timeout_s)

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything that was taken is in the pool or given up."""
        with self._settled:
            return self._settled.wait_for(lambda: not self._num_unsettled, timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Drain, then stop the thread. Idempotent."""
        if self._thread.is_alive():
            self.drain(timeout_s)
            self._queue.put(None)
            self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._segments.close()

    # ---- the sender's thread ------------------------------------------------------------------------------------
    def _run(self) -> None:
        enter_thread(self._view.device)
        while True:
            # What waits is sent before what has arrived is committed: the bus must not stand still meanwhile.
            if self._in_flight and self._queue.empty():
                self._finish()
                continue
            run = self._queue.get()
            if run is None:
                break
            self._send(run)
        while self._in_flight:
            self._finish()

    def _send(self, run: _Run) -> None:
        """Everything for one run. What fails is dropped: it costs the next server time, and this one nothing."""
        left = len(run.slots)
        try:
            if run.plan is not None:
                flat = self.ring.flat(run.slots)
                for start in range(0, len(run.chunks), self.ring.batch):
                    while len(self._in_flight) >= _MAX_IN_FLIGHT:
                        self._finish()
                    spans = range(start, min(start + self.ring.batch, len(run.chunks)))
                    if not (self._in_place and self._copy(run, run.plan, flat, spans)):
                        self._write_through(run, run.plan, flat, spans)
                    left -= len(spans)
        except Exception:
            log.exception("a save failed; %d chunks are dropped", left)
        if left:
            while self._in_flight:
                self._finish()
            run.gathered.synchronize()
            self.ring.give_back(left)
            self._settle(left, dropped=left)

    def _copy(self, run: _Run, plan: Plan, flat: Tensor, spans: range) -> bool:
        """Start the copies of a batch into its extents; False where the store's memory cannot be registered."""
        shard, chunks = self._shard, run.chunks[spans.start : spans.stop]
        extents = self._space.reserve(chunks, shard, deadline_s=self._deadline_s)
        filled: list[tuple[int, Reservation, Shard, slice]] = []
        stored: list[tuple[int, slice, Tiles]] = []
        try:
            for span, chunk, extent in zip(spans, chunks, extents, strict=True):
                owned, first, step = shard.owned(chunk.number)
                status, tiles = self._open(chunk, extent, owned)
                if tiles is None:
                    self.statuses[status] += 1
                    extent.close()
                elif not self._segments.ensure(tiles):
                    self._in_place = False
                    for other in extents:
                        other.close()  # not aborted: other ranks' tiles may be in them, and this one's will come
                    return False
                else:
                    layers = slice(first, None, step)
                    filled.append((span, extent, owned, layers))
                    stored.append((span, layers, tiles))
            lane = self._copies[self._num_batches % len(self._copies)]
            self._num_batches += 1
            lane.wait(run.gathered)
            with lane.use():
                copy_chunks(plan, flat, len(shard.layers), stored, to_host=True)
            sums = self._hash(run, plan, flat, lane)
            with lane.use():
                at = run.slots.start
                self._sums[at + spans.start : at + spans.stop].copy_(sums[spans.start : spans.stop], non_blocking=True)
            copied = lane.mark(blocking=True)
        except BaseException:
            for lane in self._copies:
                lane.mark().synchronize()  # no extent may be given up while the device writes into it
            for extent in extents:
                extent.abort()
            raise
        self._filling.update(run.chunks[span].key for span, *_ in filled)
        self._in_flight.append(_Batch(run, spans, filled, copied))
        return True

    def _hash(self, run: _Run, plan: Plan, flat: Tensor, lane: Lane) -> Tensor:
        """The run's checksums, for `lane` to use: computed beside its first copies."""
        if run.sums is None or run.hashed is None:
            self._hashes.wait(run.gathered)
            with self._hashes.use():
                run.sums = staged_checksums(plan, flat, len(self._shard.layers))
            run.hashed = self._hashes.mark()
        lane.wait(run.hashed)
        return run.sums

    def _open(self, chunk: ChunkRef, extent: Reservation, owned: Shard) -> tuple[Status, Tiles | None]:
        """Where this rank's tiles of a chunk go; None, and why, where there is nothing to fill.

        The same prompt may be running twice, and its two results may differ in the last bit: who comes second must
        leave the bytes alone.
        """
        if extent.status != Status.OK:
            return extent.status, None
        layers, heads = owned.layers, owned.heads
        if chunk.key in self._filling:
            return Status.BUSY, None
        if not layers or extent.noted(layers, heads, owned.part):
            return Status.EXISTS, None
        whole = extent.tiles
        if whole is None:
            return Status.LOST, None
        return Status.OK, whole[layers.start : layers.stop : layers.step, heads.start : heads.stop]

    def _finish(self) -> None:
        """Wait for the oldest batch, give its slots back and make it visible."""
        batch = self._in_flight.popleft()
        batch.copied.synchronize()
        run, spans = batch.run, batch.spans
        at = run.slots.start
        # Copied out: with the slots, their place goes to the next run.
        sums = self._sums[at + spans.start : at + spans.stop].numpy().view(np.uint64).copy()
        self.ring.give_back(len(spans))
        try:
            items = [
                Filled(extent, owned.layers, owned.heads, owned.part, sums[span - spans.start, layers])
                for span, extent, owned, layers in batch.filled
            ]
            outcome = self._space.commit(items, deadline_s=self._deadline_s)
            for (span, extent, owned, _), status in zip(batch.filled, outcome, strict=True):
                self.statuses[status] += 1
                if status == Status.OK:
                    self.num_bytes += owned.num_tiles * run.chunks[span].num_tokens * self._space.spec.row_bytes
                elif not status.stored:
                    extent.abort()
        except Exception:
            log.exception("a commit failed")
            self.num_dropped += len(batch.filled)
        finally:
            for span, extent, *_ in batch.filled:
                extent.close()
                self._filling.discard(run.chunks[span].key)
            self._settle(len(spans))

    def _write_through(self, run: _Run, plan: Plan, flat: Tensor, spans: range) -> None:
        """Where extents cannot be filled in place: through pinned memory, with the processor's copy and checksums."""
        while self._in_flight:
            self._finish()
        rows, num_layers, num_heads = plan.spans.rows_before, len(self._shard.layers), len(self._shard.heads)
        scale = self._view.spec.row_bytes * num_layers * num_heads
        starts = [*(rows * scale).tolist(), plan.staged_bytes(num_layers)]
        if self._bounce is None:
            self._bounce = pinned((self.ring.batch * self.ring.slot_bytes,), torch.uint8, self._view.device)
        low, high = starts[spans.start], starts[spans.stop]
        lane = self._copies[0]
        lane.wait(run.gathered)
        with lane.use():
            self._bounce[: high - low].copy_(flat[low:high], non_blocking=True)
        lane.mark(blocking=True).synchronize()
        self.ring.give_back(len(spans))
        whole, tiles = self._bounce.numpy(), []
        for span in spans:
            shape = (num_layers, num_heads, plan.tile_bytes(span))
            tiles.append(whole[starts[span] - low : starts[span + 1] - low].reshape(shape))
        try:
            chunks = run.chunks[spans.start : spans.stop]
            statuses = self._space.write(chunks, self._shard, tiles, deadline_s=self._deadline_s)
            self.statuses.update(statuses)
            self.num_bytes += sum(t.nbytes for t, status in zip(tiles, statuses, strict=True) if status == Status.OK)
        except Exception:
            log.exception("a write failed")
            self.num_dropped += len(spans)
        finally:
            self._settle(len(spans))

    def _settle(self, count: int, *, dropped: int = 0) -> None:
        """So many chunks are in the pool, or given up."""
        self.num_dropped += dropped
        with self._settled:
            self._num_unsettled -= count
            self._settled.notify_all()
