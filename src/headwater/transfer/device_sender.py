"""The thread behind `DeviceSaver`: extents, checksums on the device, copies into registered memory, commits.

Everything comes through one queue, in the order in which the ring was taken, and leaves in that order. What waits is
sent before what has arrived is committed: the bus must not stand still meanwhile.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
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
from headwater.transfer.aborts import Aborts
from headwater.transfer.convert import Plan
from headwater.transfer.device_ring import BATCH_BYTES, DeviceRing, Room
from headwater.transfer.device_save import (
    Batch,
    Cut,
    Gathered,
    GiveUp,
    Item,
    Open,
    PassOn,
    SaveJob,
    TakeUp,
    Target,
    noted_tiles,
)
from headwater.transfer.extents import Piece, copy_extents, staged_starts, touch_extents
from headwater.transfer.lanes import Lane, Mark, enter_thread, pinned
from headwater.transfer.layers import layers_before
from headwater.transfer.registered import Preparer, Registered
from headwater.transfer.verify import staged_checksums
from headwater.transfer.view import PagedView

log = logging.getLogger(__name__)

_MAX_IN_FLIGHT = 3
"""Batches whose copies are queued on the device: one runs, one waits, one is being committed."""

_FIRST_BATCH, _LAST_BATCH = 28, 24
"""Chunks of the first two batches of many and of the last ones: the bus begins early, and the last commit is short.
With fewer it would be busy for less than the two milliseconds that a slow host needs for the next batch."""

_Pieces = tuple[Piece, list[Target]]
"""Equal chunks, and their extents."""


class Sender:
    """See the module. All methods but those of its thread may be called from one other thread, and do not wait."""

    def __init__(self, space: Space, view: PagedView, shard: Shard, ring: DeviceRing, deadline_s: float) -> None:
        self._space = space
        self._view = view
        self._shard = shard
        self._ring = ring
        self._deadline_s = deadline_s
        self._in_place = space.mapped and shard.split.parts == 1
        self._aborts = Aborts(space, shard)
        self._bounce: Tensor | None = None
        self._segments = Registered(view.device)
        self._hashes = Lane(view.device)
        self._copies = Lane(view.device)
        self._in_flight: deque[Batch] = deque()
        self._filling: set[bytes] = set()
        self._queue: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._num_unsettled = 0
        self._settled = threading.Condition()
        self.statuses: Counter[Status] = Counter()
        self.num_dropped = 0
        self.num_bytes = 0
        self._thread = threading.Thread(target=self._run, name="headwater-device-saver", daemon=True)
        self._thread.start()
        with_preparer = self._in_place and view.device.type == "cuda"
        self._preparer = Preparer(space, self._segments, view.device) if with_preparer else None

    def wait_prepared(self) -> None:
        """Wait until all segments are there. For measurements."""
        if self._preparer is not None:
            self._preparer.wait()

    # ---- from the thread that launches --------------------------------------------------------------------------
    def count(self, chunks: Sequence[ChunkRef]) -> None:
        """These chunks are taken: `drain` waits until each is settled."""
        with self._settled:
            self._num_unsettled += len(chunks)
        if self._aborts.is_owing:  # else the sender is left asleep
            self._queue.put(TakeUp(chunks))

    def open(self, job: SaveJob, first_layer: Mark) -> None:
        """Reserve a job's extents when its first layer is computed: the others will follow."""
        self._queue.put(Open(job, first_layer))

    def send(self, work: Gathered) -> None:
        """Store what was gathered."""
        self._queue.put(work)

    def cut(self, job: SaveJob, num_kept: int) -> None:
        """A job's chunks from this number on will not be complete."""
        self._queue.put(Cut(job, num_kept))

    def give_up(self, chunks: Sequence[ChunkRef]) -> None:
        """Tell this server's other ranks that these chunks will not be complete."""
        self._queue.put(GiveUp(chunks))

    def pass_on(self, room: Room, unused: Mark) -> None:
        """Give room back of which nothing will be stored, in its turn, when nobody writes into it any more."""
        self._queue.put(PassOn(room, unused))

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything that was counted is settled."""
        with self._settled:
            return self._settled.wait_for(lambda: not self._num_unsettled, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Drain, then stop the thread. Idempotent."""
        if self._preparer is not None:
            self._preparer.close(timeout_s)
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
            is_idle = self._in_flight and self._queue.empty()
            try:
                item = None if is_idle else self._queue.get(timeout=self._aborts.wait_s)
            except queue.Empty:
                self._aborts.retry()
                continue
            if item is None and not is_idle:
                self._aborts.retry()
                break
            try:
                self._finish() if item is None else self._handle(item)
                self._aborts.retry_if_due()
            except Exception:
                log.exception("a save failed")
        self._finish_all()
        self._hashes.mark().synchronize()  # it may still read what is about to be unregistered

    def _handle(self, item: Item) -> None:
        if isinstance(item, Gathered):
            self._send(item)
        elif isinstance(item, Open):
            self._open(item)
        elif isinstance(item, Cut):
            self._cut(item.job, item.num_kept)
        elif isinstance(item, PassOn):
            self._finish_all()
            item.unused.synchronize()
            self._ring.give_back(item.room.num_bytes)
        elif isinstance(item, TakeUp):
            self._aborts.take_up(item.chunks)
        else:
            self._give_up(item.chunks)

    def _open(self, item: Open) -> None:
        """Not at once: whoever launches a step has no lead over the device yet, and would share the interpreter."""
        job, item.job.is_open = item.job, True
        self._aborts.take_up(job.chunks)
        while self._in_flight and not item.first_layer.query():
            try:
                self._finish()
            except Exception:
                log.exception("the end of a save failed")
        try:
            item.first_layer.synchronize()
            job.in_place = self._in_place and self._reserve(job, range(len(job.chunks)))
        except Exception:
            self._fail(job)
            raise

    def _reserve(self, job: SaveJob, spans: range) -> bool:
        """Find out where some chunks go; False where the store's memory cannot be registered.

        A chunk gets no target where there is nothing to fill. The same prompt may be running twice, and its two results
        may differ in the last bit: who comes second must leave the bytes alone.
        """
        chunks = job.chunks[spans.start : spans.stop]
        extents = self._space.reserve(chunks, self._shard, deadline_s=self._deadline_s)
        try:
            places = self._space.places(extents)
            addresses = [0 if place is None else self._segments.address(place.segment) for place in places]
            if None in addresses:
                self._in_place = False
                for extent in extents:
                    extent.close()  # not aborted: other ranks' tiles may be in them, and this one's will come
                return False
            noted = noted_tiles(self._space, self._shard, chunks, extents)
            keys = [chunk.key for chunk in chunks]
            if not any(noted) and None not in places and self._filling.isdisjoint(keys):
                # As usual: all of it is to be filled.
                found = zip(addresses, places, extents, strict=True)
                targets = [Target(a, a + place.offset, extent) for a, place, extent in found if a and place]
                job.targets.update(zip(spans, targets, strict=True))
                self._filling.update(keys)
                return True
            refused = list[tuple[int, Status]]()
            for row, (chunk, extent) in enumerate(zip(chunks, extents, strict=True)):
                place, address, status = places[row], addresses[row], extent.status
                if status != Status.EXISTS and chunk.key in self._filling:
                    status = Status.BUSY
                elif status == Status.OK and place is None:
                    status = Status.LOST
                elif status == Status.OK and noted[row]:
                    status = Status.EXISTS
                if status != Status.OK or place is None or address is None:
                    refused.append((spans[row], status))
                    extent.close()
                else:
                    job.targets[spans[row]] = Target(address, address + place.offset, extent)
                    self._filling.add(chunk.key)
            self._refuse(job, refused, has_begun=False)
        except BaseException:
            for chunk, extent in zip(chunks, extents, strict=True):
                extent.close() if chunk.key in self._filling else extent.abort()
            raise
        return True

    def _send(self, work: Gathered) -> None:
        """Everything for one gather. What fails is dropped: it costs the next server time, and this one nothing."""
        job, left = work.job, work.room.num_bytes
        try:
            if work.plan is None:
                raise EngineError("the gather was not launched")
            if not job.is_open:
                self._aborts.take_up(job.chunks)
            if job.sums is None:
                job.sums = np.zeros((len(job.chunks), len(self._shard.layers), len(self._shard.heads)), np.uint64)
            starts = staged_starts(work.plan, len(work.layers))
            for spans in self._batches(work):
                while len(self._in_flight) >= _MAX_IN_FLIGHT:
                    self._finish()
                at_end = spans.stop == work.spans.stop
                low, high = starts[spans.start - work.spans.start], starts[spans.stop - work.spans.start]
                size = left if at_end else high - low
                commits = spans if not job.is_open else range(job.num_alive if work.is_last and at_end else 0)
                in_place = job.in_place if job.is_open else self._in_place and self._reserve(job, spans)
                if in_place:
                    # The last of several is short, and somebody may wait for it: to be woken takes a tenth of its time.
                    is_short = at_end and not job.is_open and spans.start > work.spans.start
                    copied, pieces = self._copy(work, work.plan, spans, starts, blocking=not is_short)
                    self._in_flight.append(Batch(work, spans, size, commits, copied))
                    left -= size
                    if at_end or len(self._in_flight) == _MAX_IN_FLIGHT:
                        self._hash(work)  # not sooner: the bus would wait for it
                    self._touch(pieces)  # after that, which would drive it out of the device's cache
                else:
                    self._write_through(work, spans, low, high, commits)
                    self._ring.give_back(size)
                    left -= size
        except Exception as error:
            log.warning("a save failed (%s: %s); its chunks are dropped", type(error).__name__, error)
            self._fail(job)
            work.gathered.synchronize()
        if left:
            self._finish_all()
            self._ring.give_back(left)

    def _batches(self, work: Gathered) -> Iterator[range]:
        """Which chunks are copied together: few at first where the bus has nothing to do, and, where each batch is
        committed and nothing follows, few at the end."""
        first, stop, is_whole, was_idle = work.spans.start, work.spans.stop, not work.job.is_open, not self._in_flight
        most, at = max(1, BATCH_BYTES // max(1, work.flat.numel() // len(work.spans))), first
        if is_whole:
            # What is in the ring already may leave in larger pieces than what must be waited for.
            most = max(min(most, self._ring.batch), min(2 * most, len(work.spans) // 4))
        while at < stop:
            size = min(most, max(_FIRST_BATCH, at - first)) if was_idle else most
            if is_whole and self._queue.empty():
                size = min(size, max(_LAST_BATCH, (stop - at) // 2))
            if stop - at - size < min(_LAST_BATCH, most) // 2:
                size = stop - at
            yield range(at, at + size)
            at += size

    def _copy(
        self, work: Gathered, plan: Plan, spans: range, starts: list[int], *, blocking: bool
    ) -> tuple[Mark, list[_Pieces]]:
        """Start the copies of a batch into its extents: (when they have ended, what goes where)."""
        job, shard = work.job, self._shard
        if work.layers != shard.layers:
            shard = replace(shard, layers=work.layers)
        lane = self._copies
        base, first = work.flat.data_ptr(), work.spans.start
        going = [span for span in spans if span in job.targets]
        pieces = list[_Pieces]()
        if not going:
            return work.gathered, pieces
        lane.wait(work.gathered)
        model_heads, device = self._space.spec.num_kv_heads, self._view.device
        with lane.use():
            for group in job.equal(going, shard):
                owned, start, step = shard.owned(job.chunks[group[0]].number)
                piece = Piece(owned, plan.tile_bytes(group[0] - first), start, step)
                targets = [job.targets[span] for span in group]
                staged = [base + starts[span - first] for span in group]
                copy_extents(piece, targets, staged, model_heads, device, to_host=True)
                pieces.append((piece, targets))
        return lane.mark(blocking=blocking), pieces

    def _touch(self, pieces: list[_Pieces]) -> None:
        """Let the device translate where copies go to that wait for others, or for the gather."""
        with self._hashes.use():
            for piece, targets in pieces:
                touch_extents(piece, targets, self._space.spec.num_kv_heads, self._view.device)

    def _hash(self, work: Gathered) -> None:
        """Start on the checksums of all that was gathered, once: beside the first copies."""
        if work.sums is None and work.plan is not None and work.job.targets:
            self._hashes.wait(work.gathered)
            with self._hashes.use():
                sums = staged_checksums(work.plan, work.flat, len(work.layers), work.added_up)
                here = pinned(tuple(sums.shape), torch.int64, self._view.device)
                post(sums, here)
            # All three or none: what has no checksums is not committed.
            work.hashed, work.sums_here, work.sums = self._hashes.mark(blocking=True), here, sums

    # ---- the end of a batch -------------------------------------------------------------------------------------
    def _finish_all(self) -> None:
        while self._in_flight:
            self._finish()

    def _finish(self) -> None:
        """Wait for the oldest batch, give its room back, and make visible what is complete."""
        batch = self._in_flight.popleft()
        batch.copied.synchronize()
        try:
            self._take_sums(batch.work, batch.spans)
        except Exception:
            log.exception("the checksums of a save failed; its chunks are dropped")
            self._lose(batch.work.job, batch.spans)
        self._ring.give_back(batch.num_bytes)
        if batch.commits:
            self._commit(batch.work.job, batch.commits)

    def _take_sums(self, work: Gathered, spans: range) -> None:
        """Wait for the checksums of some of what was gathered."""
        self._hash(work)
        if work.sums_here is not None and work.hashed is not None and work.job.sums is not None:
            work.hashed.synchronize()
            first, layer = work.spans.start, self._shard.layers.index(work.layers.start)
            here = work.sums_here[spans.start - first : spans.stop - first].numpy().view(np.uint64)
            work.job.sums[spans.start : spans.stop, layer : layer + len(work.layers)] = here

    def _lose(self, job: SaveJob, spans: range) -> None:
        """Give up chunks whose bytes are in their extents, and whose checksums nobody knows."""
        self._hashes.mark().synchronize()  # what was launched may still read the ring
        for span in spans:
            if (target := job.targets.pop(span, None)) is not None:
                self._filling.discard(job.chunks[span].key)
                target.extent.abort()
                job.ended.add(span)
                self.num_dropped += 1
        self._give_up(job.chunks[spans.start : spans.stop])

    def _commit(self, job: SaveJob, spans: range) -> None:
        filled = [span for span in spans if span in job.targets]
        extents, num_known = {span: job.targets.pop(span).extent for span in filled}, 0
        try:
            assert job.sums is not None
            for owned, layers, group in job.by_owned(filled, self._shard):
                sums = job.sums[group, layers]
                opened = [extents[span] for span in group]
                outcome = self._space.commit_shard(opened, owned, sums, deadline_s=self._deadline_s)
                num_known += len(outcome)
                lost = [span for span, status in zip(group, outcome, strict=True) if status is not Status.OK]
                self.statuses[Status.OK] += len(group) - len(lost)
                tokens = sum([job.chunks[span].num_tokens for span in group])
                for span in lost:
                    tokens -= job.chunks[span].num_tokens
                    extents[span].abort()
                if lost:
                    self._refuse(job, [(span, outcome[group.index(span)]) for span in lost], has_begun=True)
                self.num_bytes += owned.num_tiles * tokens * self._space.spec.row_bytes
        except Exception:
            log.exception("a commit failed")
            self.num_dropped += len(filled) - num_known
        finally:
            self._space.close_all(list(extents.values()))
            self._filling.difference_update([job.chunks[span].key for span in filled])
            self._settle(job, len(spans))

    # ---- giving up ----------------------------------------------------------------------------------------------
    def _cut(self, job: SaveJob, num_kept: int) -> None:
        """No more will come of a job's chunks from this number on: their room in the pool is free at once."""
        lost = range(num_kept, job.num_alive)
        if not lost:
            return
        self._finish_all()  # no extent may be given up while the device writes into it
        if job.num_settled == len(job.chunks):
            return  # its end was quicker
        job.num_alive = num_kept
        self.num_dropped += len(set(lost) - job.ended)
        try:
            given_up = []
            for span in reversed(lost):
                if (target := job.targets.pop(span, None)) is not None:
                    self._filling.discard(job.chunks[span].key)
                    target.extent.abort()
                    given_up.append(job.chunks[span])
            if not (job.is_open and job.in_place):
                self._give_up(job.chunks[num_kept:])
            elif self._aborts.has_peers:
                self._aborts.give_up(given_up)  # a rank that is behind may be about to reserve them
        finally:
            self._settle(job, len(lost))

    def _fail(self, job: SaveJob) -> None:
        """Drop what is left of a job."""
        for lane in (self._copies, self._hashes):
            lane.mark().synchronize()  # work may be under way that belongs to no batch yet
        self._finish_all()
        for span in sorted(job.targets, reverse=True):
            target = job.targets.pop(span)
            self._filling.discard(job.chunks[span].key)
            target.extent.abort()
        num_left = len(job.chunks) - job.num_settled
        left = range(job.num_alive if num_left else 0) if job.is_open else range(job.num_settled, len(job.chunks))
        lost = [span for span in left if span not in job.ended]
        job.num_alive = 0
        self.num_dropped += len(lost)
        try:
            self._give_up([job.chunks[span] for span in lost])
        finally:
            self._settle(job, num_left)

    def _give_up(self, chunks: Sequence[ChunkRef]) -> None:
        """Give up chunks of which nothing more comes, but not those that another job is filling."""
        self._aborts.give_up([chunk for chunk in chunks if chunk.key not in self._filling])

    def _refuse(self, job: SaveJob, refused: Sequence[tuple[int, Status]], *, has_begun: bool) -> None:
        """Count chunks that this rank does not save, and give up what nobody else will."""
        self.statuses.update([status for _, status in refused])
        job.ended.update([span for span, _ in refused])
        outcome = [(job.chunks[span], status) for span, status in refused]
        self.num_dropped += self._aborts.give_up_failed(outcome, has_begun=has_begun)

    # ---- through the processor ----------------------------------------------------------------------------------
    def _write_through(self, work: Gathered, spans: range, low: int, high: int, commits: range) -> None:
        """Where extents cannot be filled in place: through pinned memory, with the processor's copy and checksums."""
        self._finish_all()
        job, plan = work.job, work.plan
        assert plan is not None
        if self._bounce is None or self._bounce.numel() < high - low:
            self._bounce = pinned((high - low,), torch.uint8, self._view.device)
        lane = self._copies
        lane.wait(work.gathered)
        with lane.use():
            self._bounce[: high - low].copy_(work.flat[low:high], non_blocking=True)
        lane.mark(blocking=True).synchronize()
        whole, at = self._bounce.numpy(), 0
        shard = replace(self._shard, layers=work.layers)
        numbers, tiles = list[int](), list[npt.NDArray[np.uint8]]()
        for span in spans:
            shape = (len(work.layers), len(shard.heads), plan.tile_bytes(span - work.spans.start))
            size = shape[0] * shape[1] * shape[2]
            if span < job.num_alive and span not in job.ended:
                numbers.append(span)
                tiles.append(whole[at : at + size].reshape(shape))
            at += size
        chunks, before = [job.chunks[number] for number in numbers], layers_before(self._shard.layers, work.layers)
        outcome = self._space.write(chunks, shard, tiles, before=before, deadline_s=self._deadline_s) if chunks else []
        self.num_bytes += sum(t.nbytes for t, status in zip(tiles, outcome, strict=True) if status == Status.OK)
        # A chunk is counted once: where it fails, or when its last layers are in.
        self.statuses.update([status for status in outcome if work.is_last and status.stored])
        bad = [(number, status) for number, status in zip(numbers, outcome, strict=True) if not status.stored]
        self._refuse(job, bad, has_begun=before is not None)
        if commits:
            self._settle(job, len(commits))

    def _settle(self, job: SaveJob, count: int) -> None:
        """So many chunks of a job are in the pool, or given up."""
        job.num_settled += count
        with self._settled:
            self._num_unsettled -= count
            if not self._num_unsettled:
                self._settled.notify_all()
