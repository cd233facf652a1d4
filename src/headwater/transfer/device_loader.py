"""From the pool into a GPU's paged cache, at the speed of the bus: the host touches no byte of KV.

Copies run ahead into a ring on the device, and the device verifies them there. As a rule only what verified is
scattered into the request's blocks. A load that goes layer by layer does not wait for that answer: its bytes go into
the blocks at once, each layer in time for the step that computes with it, and the load's end says what they were worth.
Loads have their own copy engine and streams of high priority: saves never hold them up.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headwater.errors import EngineError
from headwater.kernels.post import post
from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import Shard
from headwater.pool.space import Space
from headwater.stores.base import Status
from headwater.transfer.convert import plan_chunks, scatter
from headwater.transfer.device_load import Batch, Load, Part, Stored
from headwater.transfer.device_ring import BATCH_BYTES, DeviceRing
from headwater.transfer.extents import Piece, copy_extents, staged_starts
from headwater.transfer.lanes import Lane, current_lane, enter_thread, pinned
from headwater.transfer.layers import GPU_GROUP_BYTES, layer_groups
from headwater.transfer.registered import Registered
from headwater.transfer.verify import verify_staged
from headwater.transfer.view import PagedView

log = logging.getLogger(__name__)

_MAX_IN_FLIGHT = 3

_FIRST_CHUNKS = 32
"""The first ones are few, so that the bus begins while the next are looked up: two milliseconds on a slow host."""


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
        group_bytes: int = GPU_GROUP_BYTES,
        on_done: Callable[[str, int], None],
    ) -> None:
        self._space = space
        self._view = view
        self._shard = shard
        self._deadline_s = deadline_s
        self._group_bytes = group_bytes
        self._on_done = on_done
        layers, heads, tile = shard.local_shape(space.spec, 0, space.chunk_tokens)
        self._layer_bytes = heads * tile
        """Of one chunk."""
        self.ring = DeviceRing(layers * heads * tile, staging_bytes, view.device)
        self._in_place = space.mapped and shard.split.parts == 1
        self._bounce: Tensor | None = None
        self._segments = Registered(view.device)
        self._copies = Lane(view.device, urgent=True)
        self._work = Lane(view.device, urgent=True)
        self._num_taken = 0
        """Bytes of the ring that are in use."""
        self._in_flight: deque[Batch] = deque()
        self._scattering: deque[Batch] = deque()
        self._queue: queue.SimpleQueue[Load | None] = queue.SimpleQueue()
        self._open: list[Load] = []
        self._changed = threading.Condition()
        """Guards `_open`; told whenever a load has got further."""
        self._closing = False
        self.statuses: Counter[Status] = Counter()
        self.num_bytes = 0
        self.seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="headwater-device-loader", daemon=True)
        self._thread.start()

    def load(
        self, name: str, chunks: Sequence[ChunkRef], block_ids: npt.NDArray[np.int32], *, layerwise: bool = False
    ) -> None:
        """Bring these chunks (consecutive ones of a chain) into those blocks; `on_done(name, chunks in place)` follows
        in any case, once. The blocks are not written before the current stream has got to this call.

        With `layerwise`, layers come in order, `wait_layer` says when one is there, and blocks may be written with what
        turns out to be damaged: the end says how many chunks, counted from the first, were right in all layers.
        """
        groups = [self._shard.layers]
        if layerwise:
            groups = layer_groups(self._shard.layers, self._layer_bytes * len(chunks), self._group_bytes)
        asked = current_lane(self._view.device).mark()
        load = Load(name, chunks, block_ids, groups, layerwise, asked, time.monotonic() + self._deadline_s)
        with self._changed:
            self._open.append(load)
        self._queue.put(load)

    def wait_layer(self, layer: int) -> None:
        """Let the current stream wait for one layer (of the whole model) of every load that goes layer by layer.

        The caller waits only until that is launched, or given up, and never beyond a load's deadline.
        """
        if layer not in self._shard.layers:
            return
        with self._changed:
            loads = [load for load in self._open if load.layerwise]
            for load in loads:
                left_s = max(0.0, load.deadline - time.monotonic())
                if not self._changed.wait_for(lambda load=load: load.has_launched(layer), left_s):  # type: ignore[misc]
                    load.is_missed = load.is_given_up = True
            marks = [load.mark_of(layer) for load in loads]
        lane = current_lane(self._view.device)
        for mark in marks:
            if mark is not None:
                lane.wait(mark)

    @property
    def has_open(self) -> bool:
        """Whether a load that goes layer by layer has not ended."""
        with self._changed:
            return any(load.layerwise for load in self._open)

    def cancel(self, name: str) -> None:
        """Stop a load as soon as possible. Its `on_done` still comes: until then its blocks may be written."""
        with self._changed:
            for load in self._open:
                if load.name == name:
                    load.is_cancelled = load.is_given_up = True
            self._changed.notify_all()

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
            start, num_loaded, parts = time.monotonic(), 0, list[Part]()
            try:
                if not self._closing:
                    self._work.wait(load.asked)
                    num_loaded = (self._load_layers if load.layerwise else self._load_whole)(load, parts)
            except Exception:
                log.exception("a load failed; the engine computes what is missing")
                self.statuses[Status.MISS] += 1
                num_loaded = 0
            finally:
                self._settle(parts)
                self.seconds += time.monotonic() - start
                with self._changed:
                    self._open.remove(load)
                    num_loaded = 0 if load.is_missed else num_loaded
                    load.is_given_up = True
                    self._changed.notify_all()
                self._on_done(load.name, num_loaded)

    def _load_whole(self, load: Load, parts: list[Part]) -> int:
        """All layers at once: chunks in place, counted from the first; what follows a missing one is of no use."""
        num_issued, num_done, going, wanted = 0, 0, True, True
        most = max(self.ring.batch, -(-self.ring.count // 5))
        while True:
            if going and self._is_over(load):
                going, wanted = False, not load.is_cancelled
            if going and num_issued < len(load.chunks) and len(self._in_flight) < _MAX_IN_FLIGHT:
                if not parts or num_issued == parts[-1].stop:
                    size = min(most, max(_FIRST_CHUNKS, num_issued), len(load.chunks) - num_issued)
                    going = not parts or parts[-1].is_whole
                    part = self._look_up(load, num_issued, size) if going else None
                    if part is None:
                        going = False
                        continue
                    parts.append(part)
                part = parts[-1]
                batch = self._bring(load, part, self._shard.layers, num_issued - part.first, len(part.chunks))
                if batch is not None:
                    self._in_flight.append(batch)
                    num_issued += len(batch.spans)
                    continue
            if self._in_flight:
                num_landed, all_good = self._land(load, wanted=wanted)
                num_done += num_landed
                if not all_good:
                    going = wanted = False
            elif self._scattering:
                self._retire(load)
            else:
                return num_done

    def _load_layers(self, load: Load, parts: list[Part]) -> int:
        """Layer by layer: chunks that were right in all of them, counted from the first."""
        for number, layers in enumerate(load.groups):
            if not number:
                for first, size in self._part_sizes(load):
                    part = self._look_up(load, first, size) if not self._is_over(load) else None
                    if part is not None:
                        parts.append(part)
                        self._bring_layers(load, part, layers)
                    if part is None or not part.is_whole:
                        self._narrow(load, first + (len(part.chunks) if part is not None else 0))
                        break
            else:
                for part in parts:
                    self._bring_layers(load, part, layers)
            if self._is_over(load):
                return 0
            with self._changed:
                load.marks.append(self._work.mark())
                self._changed.notify_all()
        while self._scattering:
            self._retire(load)
        if load.is_damaged and not self._is_over(load):
            self._judge(load, load.chunks[load.num_good])
        self.statuses[Status.OK] += load.num_good
        return load.num_good

    def _bring_layers(self, load: Load, part: Part, layers: range) -> None:
        """Bring some layers of what is good of a part, and scatter them without waiting for the answer."""
        at, stop = 0, min(len(part.chunks), load.num_good - part.first)
        while at < stop and not self._is_over(load):
            batch = self._bring(load, part, layers, at, stop)
            if batch is None:
                raise EngineError("the ring has no room though nothing is under way")
            self._scattering.append(batch)
            self._scatter(batch, layers, len(batch.spans) if part.loan is not None else batch.num_good)
            at += len(batch.spans)

    def _part_sizes(self, load: Load) -> Iterator[tuple[int, int]]:
        """(First chunk, how many) to look up and copy together: few at first, and at most a quarter of the ring."""
        unit = self._layer_bytes * max(len(group) for group in load.groups)
        most = max(1, min(BATCH_BYTES, self.ring.count * self.ring.slot_bytes // 4) // unit)
        at, size = 0, _FIRST_CHUNKS
        while at < len(load.chunks):
            yield at, min(size, most, len(load.chunks) - at)
            at += min(size, most)
            size *= 2

    def _is_over(self, load: Load) -> bool:
        """Whether a load must end now: cancelled, or too late."""
        if not load.is_cancelled and time.monotonic() < load.deadline:
            return False
        with self._changed:
            load.is_given_up = True
            self._changed.notify_all()
        return True

    def _narrow(self, load: Load, num_good: int) -> None:
        """Something is missing or damaged: what was asked for will not all come."""
        if num_good < load.num_good:
            with self._changed:
                load.num_good, load.is_given_up = num_good, True
                self._changed.notify_all()

    # ---- looking up and copying ---------------------------------------------------------------------------------
    def _look_up(self, load: Load, first: int, size: int) -> Part | None:
        """Some chunks from a number on: as many of them as there are in a row, None where the first is missing."""
        chunks = load.chunks[first : first + size]
        if not self._in_place:
            plan = plan_chunks(self._view, self._shard, chunks, load.block_ids)
            return Part(first, chunks, plan, is_whole=True)
        loan = self._space.lend(chunks, self._shard)
        try:
            stored = list[Stored]()
            for place in loan.places:
                if place is None:
                    self.statuses[Status.MISS] += 1
                    break
                address = self._segments.address(place.segment)
                if address is None:
                    self._in_place = False
                    loan.release()
                    return self._look_up(load, first, size)
                stored.append(Stored(address, address + place.offset))
            if not stored:
                loan.release()
                return None
            is_whole, chunks = len(stored) == len(chunks), chunks[: len(stored)]
            plan = plan_chunks(self._view, self._shard, chunks, load.block_ids)
            here = pinned((len(stored), *loan.sums.shape[1:]), torch.int64, self._view.device)
            here.numpy()[...] = loan.sums[: len(stored)].view(np.int64)
        except BaseException:
            loan.release()
            raise
        return Part(first, chunks, plan, is_whole, loan, stored, here)

    def _bring(self, load: Load, part: Part, layers: range, at: int, stop: int) -> Batch | None:
        """Start bringing some layers of a part's chunks from `at` on: all of them, or up to the end of the ring; None
        where it has no room now. In smaller pieces, whatever is free, the host would need longer than the bus."""
        unit, count = self._layer_bytes * len(layers), stop - at
        room = self.ring.take(unit, count, least=count)
        while room is None and self._scattering:
            self._retire(load)
            room = self.ring.take(unit, count, least=count)
        if room is None:
            return None
        self._num_taken += room.num_bytes
        spans = range(at, at + room.num_units)
        batch = Batch(part, spans, part.plan.part(spans), self.ring.flat(room, unit), room.num_bytes)
        (self._copy if part.loan is not None else self._read_through)(load, batch, layers, self._copies)
        return batch

    def _copy(self, load: Load, batch: Batch, layers: range, lane: Lane) -> None:
        """From the store's registered memory, verified on the device."""
        part, plan, shard = batch.part, batch.plan, self._shard
        if layers != shard.layers:
            shard = replace(shard, layers=layers)
        assert part.sums is not None
        first = self._shard.layers.index(layers.start)
        base, starts = batch.flat.data_ptr(), staged_starts(plan, len(layers))
        model_heads, device = self._space.spec.num_kv_heads, self._view.device
        with lane.use():
            if part.expected is None:
                # On this lane, before the copies: on another one it would wait for whatever copies come next.
                part.expected = part.sums.to(device, non_blocking=True)
            for group in plan.groups:
                piece = Piece(shard, plan.tile_bytes(group.start))
                stored = [part.stored[batch.spans[row]] for row in group]
                copy_extents(piece, stored, [base + starts[r] for r in group], model_heads, device, to_host=False)
        with self._work.use():
            _ = plan.device_spans  # uploaded now: once the copies have come, the scatter waits for nothing
        self._work.wait(lane.mark())
        batch.good = pinned((len(batch.spans),), torch.bool, self._view.device)
        with self._work.use():
            wanted = part.expected[batch.spans.start : batch.spans.stop, first : first + len(layers)]
            tiles = verify_staged(plan, batch.flat, len(layers), wanted)
            every = tiles.flatten(1).all(dim=1)
            post(every, batch.good)
        batch.held = (tiles, every)
        batch.checked = batch.done = self._work.mark()

    def _read_through(self, load: Load, batch: Batch, layers: range, lane: Lane) -> None:
        """Where stored bytes cannot be copied as they lie: read and verified by the processor, into pinned memory."""
        size, plan = batch.plan.staged_bytes(len(layers)), batch.plan
        if self._bounce is None or self._bounce.numel() < size:
            self._bounce = pinned((size,), torch.uint8, self._view.device)
        shard, whole = replace(self._shard, layers=layers), self._bounce.numpy()
        starts = staged_starts(plan, len(layers))
        tiles = [
            whole[starts[row] : starts[row + 1]].reshape(len(layers), len(shard.heads), plan.tile_bytes(row))
            for row in range(len(batch.spans))
        ]
        chunks = batch.part.chunks[batch.spans.start : batch.spans.stop]
        left_s = max(load.deadline - time.monotonic(), 0.0)
        statuses = self._space.read(chunks, shard, tiles, deadline_s=left_s)
        count = next((row for row, status in enumerate(statuses) if status != Status.OK), len(chunks))
        if count < len(chunks):
            self.statuses[statuses[count]] += 1
        with lane.use():
            batch.flat[: starts[count]].copy_(self._bounce[: starts[count]], non_blocking=True)
        batch.good = torch.arange(len(chunks)) < count
        batch.checked = batch.done = lane.mark()
        batch.checked.synchronize()  # the next batch needs the pinned memory

    # ---- into the blocks ----------------------------------------------------------------------------------------
    def _land(self, load: Load, *, wanted: bool) -> tuple[int, bool]:
        """Wait for the oldest batch and scatter what verified: (chunks, whether that is all of them)."""
        batch = self._in_flight.popleft()
        self._scattering.append(batch)
        batch.checked.synchronize()
        num_good = batch.num_good
        if wanted and num_good:
            self._scatter(batch, self._shard.layers, num_good)
            self.statuses[Status.OK] += num_good
        if wanted and num_good < len(batch.spans) and batch.part.loan is not None:
            self._judge(load, batch.part.chunks[batch.spans[num_good]])
        return num_good if wanted else 0, num_good == len(batch.spans)

    def _scatter(self, batch: Batch, layers: range, num_chunks: int) -> None:
        """Write a batch's first chunks into the request's blocks."""
        if num_chunks:
            plan = batch.plan.part(range(num_chunks))
            with self._work.use():
                scatter(plan, layers, batch.flat)
            batch.held = (batch.held, plan)
            batch.done = self._work.mark()
            self.num_bytes += plan.staged_bytes(len(layers))

    def _judge(self, load: Load, chunk: ChunkRef) -> None:
        """A copy did not verify: let the pool find out whether the chunk was damaged, and forget it, or evicted."""
        out = [self._space.empty(chunk, self._shard)]
        left_s = max(load.deadline - time.monotonic(), 0.1)
        status = self._space.read([chunk], self._shard, out, deadline_s=left_s)[0]
        # If it reads well now, the copy was bad: count it all the same.
        self.statuses[Status.DAMAGED if status == Status.OK else status] += 1

    def _retire(self, load: Load) -> None:
        """Wait for the oldest scatter and give its room back; what was scattered unseen is looked at now."""
        batch = self._scattering.popleft()
        batch.done.synchronize()
        batch.checked.synchronize()
        self._num_taken -= batch.num_bytes
        self.ring.give_back(batch.num_bytes)
        if load.layerwise and batch.num_good < len(batch.spans):
            num_good = batch.part.first + batch.spans.start + batch.num_good
            load.is_damaged = batch.part.loan is not None if num_good < load.num_good else load.is_damaged
            self._narrow(load, num_good)

    def _settle(self, parts: list[Part]) -> None:
        """Wait for what is under way, so that nobody writes into the blocks any more, and give everything back."""
        self._in_flight.clear()
        self._scattering.clear()
        for lane in (self._copies, self._work):
            lane.mark().synchronize()
        self.ring.give_back(self._num_taken)
        self._num_taken = 0
        for part in parts:
            if part.loan is not None:
                part.loan.release()
