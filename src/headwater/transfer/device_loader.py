"""From the pool into a GPU's paged cache, at the speed of the bus: the host touches no byte of KV.

Copies run ahead into a ring on the device, the device verifies them there, and only what verified is scattered into
the request's blocks. Loads have their own copy engine and streams of high priority: saves never hold them up.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import Shard
from headwater.pool.space import Space
from headwater.stores.base import Loan, Status
from headwater.transfer.convert import Plan, Span, plan_spans, scatter
from headwater.transfer.device_ring import DeviceRing, Tiles, copy_chunks
from headwater.transfer.lanes import Lane, Mark, current_lane, enter_thread, pinned
from headwater.transfer.registered import Registered
from headwater.transfer.verify import verify_staged
from headwater.transfer.view import PagedView

log = logging.getLogger(__name__)

_MAX_IN_FLIGHT = 3


class _Load(NamedTuple):
    name: str
    chunks: Sequence[ChunkRef]
    block_ids: npt.NDArray[np.int32]
    asked: Mark
    """When it was asked for: what the engine did with these blocks before must have ended."""


class _Batch(NamedTuple):
    """Chunks on their way to the device."""

    chunks: Sequence[ChunkRef]
    slots: range
    plan: Plan
    loan: Loan | None
    """None where the processor has verified them."""
    checked: Mark
    held: object
    """Device memory that must live until then."""


class DeviceLoader:
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
        self.ring = DeviceRing(layers * heads * tile, staging_bytes, view.device)
        self._in_place = space.mapped and shard.split.parts == 1
        shape = (self.ring.count, layers, heads)
        self._expected = pinned(shape, torch.int64, view.device)
        self._expected_there = torch.empty(shape, dtype=torch.int64, device=view.device)
        self._good = pinned((self.ring.count,), torch.bool, view.device)
        self._bounce: Tensor | None = None
        self._segments = Registered(view.device)
        self._copies = (Lane(view.device, urgent=True), Lane(view.device, urgent=True))
        self._work = Lane(view.device, urgent=True)
        self._num_batches = 0
        self._in_flight: deque[_Batch] = deque()
        self._scattering: deque[tuple[_Batch, Mark]] = deque()
        self._queue: queue.SimpleQueue[_Load | None] = queue.SimpleQueue()
        self._cancelled: set[str] = set()
        self._closing = False
        self.statuses: Counter[Status] = Counter()
        self.num_bytes = 0
        self.seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="headwater-device-loader", daemon=True)
        self._thread.start()

    def load(self, name: str, chunks: Sequence[ChunkRef], block_ids: npt.NDArray[np.int32]) -> None:
        """Bring these chunks (consecutive ones of a chain) into those blocks; `on_done(name, chunks in place)` follows
        in any case, once. The blocks are not written before the current stream has got to this call."""
        self._queue.put(_Load(name, chunks, block_ids, current_lane(self._view.device).mark()))

    def cancel(self, name: str) -> None:
        """Stop a load as soon as possible. Its `on_done` still comes: until then its blocks may be written."""
        self._cancelled.add(name)

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the thread; loads that have not begun are reported with nothing in place. Idempotent."""
        if self._thread.is_alive():
            self._closing = True
            self._queue.put(None)
            self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._segments.close()

    # ---- the receiver's thread ----------------------------------------------------------------------------------
    def _run(self) -> None:
        enter_thread(self._view.device)
        while (load := self._queue.get()) is not None:
            start, num_loaded = time.monotonic(), 0
            try:
                if not self._closing:
                    num_loaded = self._load(load, start + self._deadline_s)
            except Exception:
                log.exception("a load failed; the engine computes what is missing")
                self.statuses[Status.MISS] += 1
                self._abandon()
            finally:
                self._cancelled.discard(load.name)
                self.seconds += time.monotonic() - start
                self._on_done(load.name, num_loaded)

    def _load(self, load: _Load, deadline: float) -> int:
        """Chunks in place, counted from the first: what follows a chunk that is missing is of no use."""
        num_issued, num_done, going, intact = 0, 0, True, True
        self._work.wait(load.asked)
        while True:
            if going and (load.name in self._cancelled or time.monotonic() >= deadline):
                going, intact = False, load.name not in self._cancelled
            left = len(load.chunks) - num_issued if going else 0
            has_room = self.ring.num_free or self._scattering
            if left and has_room and len(self._in_flight) < _MAX_IN_FLIGHT:
                # The first ones are small, so that the bus begins while the next are looked up.
                size = min(self.ring.batch, max(4, num_issued))
                count = self._issue(load, load.chunks[num_issued : num_issued + size], deadline)
                num_issued += count
                going = count > 0
            elif self._in_flight:
                num_landed, all_good = self._land(load, deadline, wanted=intact)
                num_done += num_landed
                if not all_good:
                    going = intact = False
            else:
                break
        while self._scattering:
            self._retire()
        return num_done

    def _issue(self, load: _Load, chunks: Sequence[ChunkRef], deadline: float) -> int:
        """Start the copies of the first chunks; how many, 0 where there is nothing to copy."""
        while not self.ring.num_free:
            self._retire()
        slots = self.ring.take(len(chunks))
        lane = self._copies[self._num_batches % len(self._copies)]
        self._num_batches += 1
        batch = None
        try:
            chunks = chunks[: len(slots)]
            if self._in_place:
                batch = self._copy(load, chunks, slots, lane)
            if batch is None and not self._in_place:
                batch = self._read_through(load, chunks, slots, lane, deadline)
        except BaseException:
            lane.mark().synchronize()
            self.ring.undo(len(slots))
            raise
        if batch is None:
            self.ring.undo(len(slots))
            return 0
        self.ring.undo(len(slots) - len(batch.slots))
        self._in_flight.append(batch)
        return len(batch.chunks)

    def _copy(self, load: _Load, chunks: Sequence[ChunkRef], slots: range, lane: Lane) -> _Batch | None:
        """From the store's registered memory, verified on the device."""
        loan, shard = self._space.lend(chunks, self._shard), self._shard
        try:
            stored: list[tuple[int, slice, Tiles]] = []
            for span, tiles in enumerate(loan.tiles):
                if tiles is None:
                    self.statuses[Status.MISS] += 1
                    break
                if not self._segments.ensure(tiles):
                    self._in_place = False
                    stored.clear()
                    break
                stored.append((span, slice(None), tiles))
            if not stored:
                loan.release()
                return None
            chunks, slots = chunks[: len(stored)], slots[: len(stored)]
            plan, flat, num_layers = self._plan(load, chunks), self.ring.flat(slots), len(shard.layers)
            here, there = self._expected[slots.start : slots.stop], self._expected_there[slots.start : slots.stop]
            here.numpy()[...] = loan.sums[: len(stored)].view(np.int64)
            with lane.use():
                there.copy_(here, non_blocking=True)
                copy_chunks(plan, flat, num_layers, stored, to_host=False)
            self._work.wait(lane.mark())
            with self._work.use():
                good = verify_staged(plan, flat, num_layers, there)
                every = good.flatten(1).all(dim=1)
                self._good[slots.start : slots.stop].copy_(every, non_blocking=True)
            return _Batch(chunks, slots, plan, loan, self._work.mark(), (good, every))
        except BaseException:
            loan.release()
            raise

    def _read_through(
        self, load: _Load, chunks: Sequence[ChunkRef], slots: range, lane: Lane, deadline: float
    ) -> _Batch | None:
        """Where stored bytes cannot be copied as they lie: read and verified by the processor, into pinned memory."""
        if self._bounce is None:
            self._bounce = pinned((self.ring.batch * self.ring.slot_bytes,), torch.uint8, self._view.device)
        whole, tiles, at = self._bounce.numpy(), [], 0
        for chunk in chunks:
            shape = self._shard.local_shape(self._space.spec, chunk.first_token, chunk.num_tokens)
            size = shape[0] * shape[1] * shape[2]
            tiles.append(whole[at : at + size].reshape(shape))
            at += size
        left_s = max(deadline - time.monotonic(), 0.0)
        statuses = self._space.read(chunks, self._shard, tiles, deadline_s=left_s)
        count = next((i for i, status in enumerate(statuses) if status != Status.OK), len(chunks))
        if count < len(chunks):
            self.statuses[statuses[count]] += 1
        if not count:
            return None
        chunks, slots = chunks[:count], slots[:count]
        size = sum(tile.nbytes for tile in tiles[:count])
        with lane.use():
            self.ring.flat(slots)[:size].copy_(self._bounce[:size], non_blocking=True)
        copied = lane.mark()
        copied.synchronize()  # the next batch needs the pinned memory
        self._good[slots.start : slots.stop] = True
        return _Batch(chunks, slots, self._plan(load, chunks), None, copied, None)

    def _plan(self, load: _Load, chunks: Sequence[ChunkRef]) -> Plan:
        spans = [Span(load.block_ids, chunk.first_token, chunk.num_tokens) for chunk in chunks]
        return plan_spans(self._view, self._shard, spans)

    def _land(self, load: _Load, deadline: float, *, wanted: bool) -> tuple[int, bool]:
        """Wait for the oldest batch and scatter what verified: (chunks, whether that is all of them)."""
        batch = self._in_flight.popleft()
        batch.checked.synchronize()
        if batch.loan is not None:
            batch.loan.release()
        flags = self._good[batch.slots.start : batch.slots.stop].tolist()
        count = (flags.index(False) if False in flags else len(flags)) if wanted else 0
        done = batch.checked
        try:
            if count:
                plan = batch.plan if count == len(flags) else self._plan(load, batch.chunks[:count])
                with self._work.use():
                    scatter(plan, self._shard.layers, self.ring.flat(batch.slots))
                done = self._work.mark()
                self.num_bytes += plan.staged_bytes(len(self._shard.layers))
                self.statuses[Status.OK] += count
        finally:
            self._scattering.append((batch, done))
        if wanted and count < len(flags):
            self._judge(batch.chunks[count], deadline)
        return count, count == len(flags)

    def _judge(self, chunk: ChunkRef, deadline: float) -> None:
        """A copy did not verify: let the pool find out whether the chunk was damaged, and forget it, or evicted."""
        out = [self._space.empty(chunk, self._shard)]
        left_s = max(deadline - time.monotonic(), 0.1)
        status = self._space.read([chunk], self._shard, out, deadline_s=left_s)[0]
        # If it reads well now, the copy was bad: count it all the same.
        self.statuses[Status.DAMAGED if status == Status.OK else status] += 1

    def _retire(self) -> None:
        """Wait for the oldest scatter and give its slots back."""
        batch, done = self._scattering.popleft()
        done.synchronize()
        self.ring.give_back(len(batch.slots))

    def _abandon(self) -> None:
        """After a failure: wait for what is under way, so that nobody writes into the blocks any more."""
        while self._scattering:
            self._retire()
        while self._in_flight:
            batch = self._in_flight.popleft()
            batch.checked.synchronize()
            if batch.loan is not None:
                batch.loan.release()
            self.ring.give_back(len(batch.slots))
