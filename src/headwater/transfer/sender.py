"""The thread behind `Saver`: extents, checksums, copies, commits.

Everything comes through one queue, in the order in which the ring was taken, and leaves in that order. Waiting batches
are sent before arrived ones are committed: the bus must not stand still meanwhile.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt

from headwater.errors import EngineError, StoreClosedError
from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import Shard
from headwater.pool.space import Space
from headwater.stores.base import Reservation, Status
from headwater.transfer.aborts import Aborts
from headwater.transfer.batching import batches
from headwater.transfer.layers import layers_before
from headwater.transfer.movers import make_storer
from headwater.transfer.ring import StagingRing
from headwater.transfer.save_job import (
    Cut,
    Gathered,
    Item,
    Open,
    PassOn,
    Resume,
    SaveBatch,
    SaveJob,
    SaveTarget,
    noted_tiles,
)
from headwater.transfer.sink import NoSink, SaveSink, show_layers
from headwater.transfer.states import PartState
from headwater.transfer.streams import enter_thread
from headwater.transfer.unsaved import Misfits, Unsaved
from headwater.transfer.view import PagedView
from headwater.transfer.watched import WatchedChunks

log = logging.getLogger(__name__)

_FULL_PATIENCE_S, _FULL_POLL_S = 0.25, 0.005
"""How long pending room is waited for that this server's own ranks are about to make visible."""

_MAX_TIMINGS = 4096


class Sender:
    """See the module. All methods but those of its thread may be called from one other thread, and do not wait."""

    def __init__(
        self,
        space: Space,
        view: PagedView,
        shard: Shard,
        ring: StagingRing,
        mover: str,
        deadline_s: float,
        sink: SaveSink | None = None,
    ) -> None:
        self._space = space
        self._sink: SaveSink = sink or NoSink()
        self._device = view.device
        self._shard = shard
        self._ring = ring
        self._deadline_s = deadline_s
        self._in_place = space.mapped and shard.split.parts == 1
        self._aborts = Aborts(space, shard)
        self.watched = WatchedChunks(space)
        self._storer = make_storer(mover, space, view, shard)
        self._in_flight: deque[SaveBatch] = deque()
        self._filling: set[bytes] = set()
        self._queue: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._num_items = 0
        self._num_unsettled = 0
        self._settled = threading.Condition()
        self.statuses: Counter[Status] = Counter()
        self.num_dropped = 0
        self.num_bytes = 0
        self.unsaved = Unsaved()
        self.misfits = Misfits()
        self.timings: deque[float] = deque(maxlen=_MAX_TIMINGS)
        """Seconds from taken to stored, one for each batch of chunks of which something was."""
        self._thread = threading.Thread(target=self._run, name="headwater-sender", daemon=True)
        self._thread.start()

    def wait_prepared(self) -> None:
        """Wait until the store's memory is ready. For measurements."""
        self._storer.wait_prepared()

    # ---- from the thread that launches --------------------------------------------------------------------------
    def count(self, chunks: Sequence[ChunkRef]) -> None:
        """These chunks are taken: `drain` waits until each is settled."""
        with self._settled:
            self._num_unsettled += len(chunks)
        if self._aborts.is_owing:  # else the sender is left asleep
            self.tell(Resume(chunks))

    def tell(self, item: Item) -> None:
        """Have something done, in its turn."""
        with self._settled:
            self._num_items += 1
        self._queue.put(item)

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything that was counted is settled, and nothing is under way."""
        with self._settled:
            return self._settled.wait_for(lambda: self._is_idle, timeout_s)

    @property
    def _is_idle(self) -> bool:
        return not (self._num_unsettled or self._num_items or self._in_flight)

    def close(self, timeout_s: float) -> None:
        """Drain, then stop the thread. Idempotent."""
        self._storer.stop(timeout_s)
        if self._thread.is_alive():
            self.drain(timeout_s)
            self._queue.put(None)
            self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._storer.close()

    # ---- the sender's thread ------------------------------------------------------------------------------------
    def _run(self) -> None:
        enter_thread(self._device)
        while True:
            has_batch = self._in_flight and self._queue.empty()
            try:
                item = None if has_batch else self._queue.get(timeout=self._wait_s)
            except queue.Empty:
                self._aborts.retry()
                self._look_at_watched()
                continue
            if item is None and not has_batch:
                self._aborts.retry()
                break
            try:
                self._finish() if item is None else self._handle(item)
                self._aborts.retry_if_due()
                self._look_at_watched()
            except Exception as error:
                _log_failure("a save failed", error)
            finally:
                with self._settled:
                    self._num_items -= item is not None
                    if self._is_idle:
                        self._settled.notify_all()
        self._finish_all()
        self._storer.synchronize()  # the device may still read memory that is about to be unregistered

    @property
    def _wait_s(self) -> float | None:
        waits = [wait_s for wait_s in (self._aborts.wait_s, self.watched.wait_s) if wait_s is not None]
        return min(waits, default=None)

    def _look_at_watched(self) -> None:
        if lost := self.watched.take_lost():
            self.unsaved.add([(name, chunk.first_token) for name, chunk in lost])

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
        elif isinstance(item, Resume):
            self._aborts.resume(item.chunks)
        else:
            try:
                self._abort(item.tries)
            finally:  # not before: the next try must not meet the abort of this one
                self.unsaved.add([(name, chunk.first_token) for name, chunk in item.tries])
                self._sink.lost([chunk for _, chunk in item.tries])

    def _open(self, item: Open) -> None:
        """Not at once: whoever launches a step has no lead over the device yet, and would share the interpreter."""
        job, item.job.is_open = item.job, True
        self._resume(job)
        while self._in_flight and not item.first_layer.query():
            try:
                self._finish()
            except Exception as error:
                _log_failure("the end of a save failed", error)
        try:
            item.first_layer.synchronize()
            job.in_place = self._in_place and self._reserve(job, range(len(job.chunks)))
            job.is_shown = job.in_place and self._sink.wants(job.chunks)
        except Exception:
            self._fail(job)
            raise

    def _resume(self, job: SaveJob) -> None:
        """A job is saved now: what was aborted before is aborted no more."""
        self._aborts.resume(job.chunks)
        if job.raw:
            raw = [chunk for chunk in job.chunks if chunk.key in job.raw and chunk.key not in self._filling]
            self._aborts.abort_packed(raw)
        if removed := self._aborts.take_removed(zip(job.names, job.chunks, strict=True)):
            self.unsaved.add([(name, chunk.first_token) for name, chunk in removed])

    def _reserve(self, job: SaveJob, spans: range) -> bool:
        """Find out where some chunks go; False where the store's memory cannot be reached in place.

        A chunk gets no target where there is nothing to fill. The same prompt may be running twice, and its two results
        may differ in the last bit: the second to come must leave the bytes alone.
        """
        chunks = job.chunks[spans.start : spans.stop]
        extents = self._reserve_patiently(chunks, job.encodings[spans.start : spans.stop])
        try:
            places = self._space.places(extents)
            addresses = [0 if place is None else self._storer.address(place.segment) for place in places]
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
                targets = [SaveTarget(a, a + p.offset, extent, p.segment) for a, p, extent in found if a and p]
                job.targets.update(zip(spans, targets, strict=True))
                job.states[spans.start : spans.stop] = [PartState.FILLING] * len(spans)
                self._filling.update(keys)
                return True
            refused = list[tuple[int, Status]]()
            for row, (chunk, extent) in enumerate(zip(chunks, extents, strict=True)):
                place, address, status = places[row], addresses[row], extent.status
                if status != Status.EXISTS and chunk.key in self._filling:
                    status = Status.BUSY
                elif status == Status.OK and noted[row]:
                    status = Status.EXISTS
                if status != Status.OK or place is None or address is None:
                    refused.append((spans[row], status))
                    extent.close()
                else:
                    job.targets[spans[row]] = SaveTarget(address, address + place.offset, extent, place.segment)
                    job.states[spans[row]] = PartState.FILLING
                    self._filling.add(chunk.key)
            if refused:
                self._refuse(job, refused, has_begun=False)
        except BaseException:
            for chunk, extent in zip(chunks, extents, strict=True):
                extent.close() if chunk.key in self._filling else extent.abort()
            raise
        return True

    def _reserve_patiently(self, chunks: Sequence[ChunkRef], encodings: Sequence[int]) -> list[Reservation]:
        """Reserve extents. Where pending room runs out, finish what is under way and try again: the chunks that take
        it up are this server's own, and become visible by that."""
        reserve = partial(self._space.reserve, shard=self._shard, deadline_s=self._deadline_s)
        extents = reserve(chunks, encodings=encodings)
        end = time.monotonic() + _FULL_PATIENCE_S
        while (at := _first_full(extents)) is not None:
            has_hope = bool(self._in_flight) or self._aborts.has_peers
            if not has_hope or time.monotonic() >= end or self._space.pending_bytes == 0:
                break
            self._finish_all()
            for extent in extents[at:]:
                extent.close()
            extents[at:] = reserve(chunks[at:], encodings=encodings[at:])
            if _first_full(extents) == at:
                time.sleep(_FULL_POLL_S)
        return extents

    def _send(self, work: Gathered) -> None:
        """Everything for one gather. A failure aborts its chunks: it costs the next server time, and this one
        nothing."""
        job, left = work.job, work.room.num_bytes
        try:
            if work.plan is None or (not job.is_open and not job.alive(work.spans)):
                raise EngineError("the gather was not launched, or another piece of the job has failed")
            if not job.is_open:
                self._resume(job)
            if job.sums is None:
                job.sums = np.zeros((len(job.chunks), len(self._shard.layers), len(self._shard.heads)), np.uint64)
            starts = work.plan.staged_starts(len(work.layers))
            for spans in batches(work, self._ring, was_idle=not self._in_flight, is_alone=self._queue.empty):
                while len(self._in_flight) >= self._storer.most_in_flight:
                    self._finish()
                at_end = spans.stop == work.spans.stop
                low, high = starts[spans.start - work.spans.start], starts[spans.stop - work.spans.start]
                size = left if at_end else high - low
                commits = spans if not job.is_open else range(len(job.chunks) if work.is_last and at_end else 0)
                in_place = job.in_place if job.is_open else self._in_place and self._reserve(job, spans)
                if in_place:
                    # The last of several is short, and somebody may wait for it: to be woken takes a tenth of its time.
                    is_short = at_end and not job.is_open and spans.start > work.spans.start
                    going = [span for span in spans if span in job.targets]
                    copied = self._storer.copy(work, work.plan, going, starts, blocking=not is_short)
                    self._in_flight.append(SaveBatch(work, spans, size, commits, copied.event))
                    left -= size
                    if at_end or len(self._in_flight) == self._storer.most_in_flight:
                        self._storer.hash(work)  # not sooner: the bus would wait for it
                    self._storer.touch(copied)  # after that, which would drive it out of the device's cache
                else:
                    self._write_through(work, spans, low, high)
                    self._ring.give_back(size)
                    left -= size
        except Exception as error:
            log.warning("a save failed (%s: %s); its chunks are aborted", type(error).__name__, error)
            self._fail(job)
            work.gathered.synchronize()
        if left:
            self._finish_all()
            self._ring.give_back(left)

    # ---- the end of a batch -------------------------------------------------------------------------------------
    def _finish_all(self) -> None:
        while self._in_flight:
            self._finish()

    def _finish(self) -> None:
        """Wait for the oldest batch, give its room back, and make visible what is complete."""
        batch = self._in_flight.popleft()
        batch.copied.synchronize()
        try:
            self._storer.take_sums(batch.work, batch.spans)
        except Exception as error:
            _log_failure("the checksums of a save failed; its chunks are aborted", error)
            self._storer.synchronize()  # what was launched may still read the ring
            self._abort_parts(batch.work.job, batch.spans)
        self._ring.give_back(batch.num_bytes)
        if batch.work.job.misfits:
            self._lose_misfits(batch.work.job)
        if batch.work.job.is_shown:
            show_layers(self._space, self._shard, batch.work, batch.spans, self._sink, self._deadline_s)
        if batch.commits:
            self._commit(batch.work.job, batch.commits)

    def _commit(self, job: SaveJob, spans: range) -> None:
        filled = [span for span in spans if span in job.targets]
        extents, known = {span: job.targets.pop(span).extent for span in filled}, set[int]()
        num_stored = 0
        try:
            assert job.sums is not None
            for owned, layers, group in job.by_owned(filled, self._shard):
                left = [span for span in group if job.shown[span] < len(owned.layers)]
                opened = [extents[span] for span in left]
                sums = job.sums[left, layers]
                said = dict(
                    zip(left, self._space.commit_shard(opened, owned, sums, deadline_s=self._deadline_s), strict=True)
                )
                outcome = [said.get(span, Status.OK) for span in group]
                known.update(group)
                good = [span for span, status in zip(group, outcome, strict=True) if status is Status.OK]
                lost = [(span, s) for span, s in zip(group, outcome, strict=True) if s is not Status.OK]
                if good:
                    self.statuses[Status.OK] += len(good)
                    num_stored += len(good)
                    self._sink.noted([job.chunks[span] for span in good], self._shard.layers)
                self._end_parts(job, good, PartState.STORED)
                for span, _ in lost:
                    extents[span].abort()
                if lost:
                    self._refuse(job, lost, has_begun=True)
                tokens = sum([job.chunks[span].num_tokens for span in good])
                self.num_bytes += owned.num_tiles * tokens * self._space.spec.row_bytes
        except Exception as error:
            _log_failure("a commit failed; its chunks are aborted", error)
            lost_spans = [span for span in filled if span not in known]
            for span in reversed(lost_spans):
                extents[span].abort()
            self._end_parts(job, lost_spans, PartState.ABORTED)
        finally:
            self._space.close_all(list(extents.values()))
            self._filling.difference_update([job.chunks[span].key for span in filled])
            if num_stored:
                self.timings.append(time.monotonic() - job.taken_s)

    def _lose_misfits(self, job: SaveJob) -> None:
        """Tiles of some chunks could not be packed: abort these for the whole server, and what is behind them; the
        scheduler side orders them again, raw."""
        is_first = not job.doomed
        self.misfits.add(job.doom_misfits())
        if not is_first or not job.doomed:  # whoever waits below aborts these, too
            return
        try:
            self._finish_all()  # no extent may be aborted while the device writes into it
        finally:
            doomed, job.doomed = job.doomed, {}
            job.targets |= {span: target for span, target in doomed.items() if target is not None}
            self._abort_parts(job, sorted(doomed))

    # ---- aborting -----------------------------------------------------------------------------------------------
    def _cut(self, job: SaveJob, num_kept: int) -> None:
        """No more will come of a job's chunks from this number on: their room in the pool is free at once."""
        if job.alive(range(num_kept, len(job.chunks))):
            self._finish_all()  # no extent may be aborted while the device writes into it
            self._abort_parts(job, range(num_kept, len(job.chunks)))

    def _fail(self, job: SaveJob) -> None:
        """Abort what is left of a job."""
        self._storer.synchronize()  # work may be under way that belongs to no batch yet
        self._finish_all()
        self._abort_parts(job, range(len(job.chunks)))

    def _abort_parts(self, job: SaveJob, spans: Sequence[int]) -> None:
        """Abort those of some chunks that are not settled, for the whole server."""
        lost = job.alive(spans)
        try:
            for span in reversed(lost):
                if (target := job.targets.pop(span, None)) is not None:
                    self._filling.discard(job.chunks[span].key)
                    target.extent.abort()
            self._abort([(job.names[span], job.chunks[span]) for span in lost])
        finally:
            self._end_parts(job, lost, PartState.ABORTED)

    def _abort(self, tries: Sequence[tuple[str, ChunkRef]]) -> None:
        """Abort chunks of which nothing more comes, but not those that another job is filling."""
        self._aborts.abort([(name, chunk) for name, chunk in tries if chunk.key not in self._filling])

    def _refuse(self, job: SaveJob, refused: Sequence[tuple[int, Status]], *, has_begun: bool) -> None:
        """Note chunks that this rank does not save, and abort those that nobody else will."""
        self.statuses.update([status for _, status in refused])
        outcome = [(job.names[span], job.chunks[span], status) for span, status in refused]
        self._aborts.abort_failed(outcome, has_begun=has_begun)
        self.watched.add([(name, chunk) for name, chunk, status in outcome if status == Status.BUSY])
        if there := [chunk for _, chunk, status in outcome if status == Status.EXISTS]:
            self._sink.noted(there, self._shard.layers)
        for span, status in refused:
            self._end_parts(job, [span], PartState.ABORTED if status.failed else PartState.SKIPPED)

    def _end_parts(self, job: SaveJob, spans: Iterable[int], state: PartState) -> None:
        """Some parts have come to their end; each is counted once."""
        ended = [span for span in spans if not job.states[span].is_final]
        for span in ended:
            job.states[span] = state
        if state is PartState.ABORTED:
            self.num_dropped += len(ended)
            self.unsaved.add([(job.names[span], job.chunks[span].first_token) for span in ended])
            self._sink.lost([job.chunks[span] for span in ended])
        with self._settled:
            self._num_unsettled -= len(ended)

    # ---- through the processor ----------------------------------------------------------------------------------
    def _write_through(self, work: Gathered, spans: range, low: int, high: int) -> None:
        """Where extents cannot be filled in place: through memory of the host, with the store's copy and checksums."""
        self._finish_all()
        job, plan = work.job, work.plan
        assert plan is not None
        whole, at = self._storer.host_bytes(work, low, high), 0
        shard = replace(self._shard, layers=work.layers)
        stored = dict[int, npt.NDArray[np.uint8]]()
        for span in spans:
            shape = (len(work.layers), len(shard.heads), plan.tile_bytes(span - work.spans.start))
            size = shape[0] * shape[1] * shape[2]
            staged, at = whole[at : at + size].reshape(shape), at + size
            if job.states[span].is_final:
                continue
            tiles = self._storer.stored(job.chunks[span], job.encodings[span], staged)
            if tiles is None:
                job.misfits.add(span)
            else:
                stored[span] = tiles
        if job.misfits:
            self._lose_misfits(job)
        numbers = job.alive(stored)
        chunks, before = [job.chunks[number] for number in numbers], layers_before(self._shard.layers, work.layers)
        encodings = [job.encodings[number] for number in numbers]
        write = partial(self._space.write, before=before, encodings=encodings, deadline_s=self._deadline_s)
        outcome = write(chunks, shard, [stored[number] for number in numbers]) if chunks else []
        good = [number for number, status in zip(numbers, outcome, strict=True) if status == Status.OK]
        first = work.spans.start
        self.num_bytes += sum([plan.part(range(n - first, n - first + 1)).raw_bytes(len(work.layers)) for n in good])
        refused = [(number, status) for number, status in zip(numbers, outcome, strict=True) if not status.stored]
        if refused:
            self._refuse(job, refused, has_begun=before is not None)
        if work.layers[-1] == self._shard.layers[-1]:  # a chunk is counted once: here, or where it fails
            self.statuses.update([status for status in outcome if status.stored])
            self._end_parts(job, numbers, PartState.STORED)
            if Status.OK in outcome:
                self.timings.append(time.monotonic() - job.taken_s)


def _log_failure(what: str, error: Exception) -> None:
    """With a traceback, unless the pool was closed under a save: whoever closed it knows why."""
    log.warning("%s: %s", what, error, exc_info=None if isinstance(error, StoreClosedError) else error)


def _first_full(extents: Sequence[Reservation]) -> int | None:
    return next((row for row, extent in enumerate(extents) if extent.status == Status.FULL), None)
