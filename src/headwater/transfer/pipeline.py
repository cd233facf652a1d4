"""The work of the loader's thread: look up, bring, verify, write. Several loads may be under way at a time.

A batch is issued, then landed (verified and written), then retired (its staging given back), in the order in which the
staging was taken. Which load comes next, and when one ends, is decided by `load`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from headwater.errors import EngineError
from headwater.kv.encoding import RAW
from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import Shard
from headwater.pool.space import Space
from headwater.stores.base import Loan, Status
from headwater.transfer.load_job import Load, LoadBatch, LoadPart, Stored
from headwater.transfer.movers.base import Placer
from headwater.transfer.streams import PAST

log = logging.getLogger(__name__)

_EARLY_CHUNKS = 32
"""Of a long load that goes layer by layer on a GPU: looked up and sent for first. To look a chunk up takes the host a
fortieth of a millisecond, in which the bus would stand still."""


class Pipeline:
    """Batches on their way into the cache. For the loader's thread alone."""

    def __init__(
        self, space: Space, shard: Shard, placer: Placer, changed: threading.Condition, *, is_landing: bool
    ) -> None:
        """`changed` is told whenever a load has got further."""
        self._space = space
        self._shard = shard
        self._placer = placer
        self._changed = changed
        _, heads, tile = shard.local_shape(space.spec, 0, space.chunk_tokens)
        self._layer_bytes = heads * tile
        self.lends = space.mapped and shard.split.parts == 1 and not is_landing
        """Whether chunks are lent where they are stored, and not read into private memory."""
        self.may_land = self.lends and space.has_lower_tiers
        """Whether chunks that the first tier lacks are worth looking for further down."""
        self._in_flight: deque[LoadBatch] = deque()
        self._placing: deque[LoadBatch] = deque()
        self.statuses: Counter[Status] = Counter()
        self.num_bytes = 0

    def advance(self, newest: Load) -> None:
        """One piece of work: begin to bring a batch of the newest load, or wait for the oldest batch and write it."""
        if newest.is_going and self.is_over(newest):
            newest.is_going, newest.is_wanted = False, not newest.is_cancelled
        if newest.is_going and len(self._in_flight) < self._placer.most_in_flight and self._issue(newest):
            return
        if self._in_flight:
            self._land()
        elif self._placing:
            self._retire()

    def fail(self) -> None:
        """Forget everything that is under way, after it has ended."""
        self._in_flight.clear()
        self._placing.clear()
        try:
            self._placer.synchronize()
        except Exception:
            log.exception("the device does not answer")
        self._placer.reset()

    def _issue(self, load: Load) -> bool:
        """Begin to bring the next batch of a load; False where there is none, or no room for it now."""
        try:
            if not load.parts or load.num_issued == load.parts[-1].stop:
                left = len(load.chunks) - load.num_issued
                size = min(self._placer.window_chunks, max(self._placer.first_chunks, load.num_issued), left)
                part = self._look_up(load, load.num_issued, size)
                if part is None:
                    load.is_going = False
                    return False
                load.parts.append(part)
            part = load.parts[-1]
            batch = self._bring(part, load.layers, range(load.num_issued - part.first, len(part.chunks)))
        except Exception:
            log.exception("a load failed; the engine computes what is missing")
            self.statuses[Status.MISS] += 1
            load.is_going = load.is_wanted = load.may_land = False
            load.num_done = 0
            return False
        if batch is None:
            return False
        self._in_flight.append(batch)
        load.num_issued += len(batch.spans)
        load.is_going = load.num_issued < len(load.chunks)
        return True

    def _land(self) -> None:
        """Wait for the oldest batch and write the chunks that verified."""
        batch = self._in_flight.popleft()
        self._placing.append(batch)
        load = batch.load
        batch.checked.synchronize()
        num_good = batch.num_good
        if load.is_wanted and num_good:
            num_bytes = self._placer.put(load, batch, load.layers, num_good)
            self._count(batch, num_good, num_bytes)
            load.num_done += num_good
        if num_good < len(batch.spans):
            if load.is_wanted and batch.part.loan is not None and not batch.is_late:
                load.is_damaged = True
                self._judge(load, batch.part.chunks[batch.spans[num_good]])
            load.is_going = load.is_wanted = False

    def _retire(self) -> None:
        """Wait until the oldest batch is in the cache and give its staging back."""
        batch = self._placing.popleft()
        batch.done.synchronize()
        batch.checked.synchronize()
        self._placer.give_back(batch)
        load = batch.load
        load.num_in_flight -= 1
        if load.layerwise and batch.num_good < len(batch.spans):
            num_good = batch.part.first + batch.spans.start + batch.num_good
            load.is_damaged = batch.part.loan is not None if num_good < load.num_good else load.is_damaged
            self._narrow(load, num_good)

    # ---- layer by layer -----------------------------------------------------------------------------------------
    def start_layers(self, load: Load) -> None:
        """Look up a load that goes layer by layer, and begin to bring its first group of layers."""
        for first, size in self._part_sizes(load):
            part = self._look_up(load, first, size) if not self.is_over(load) else None
            if part is not None:
                load.parts.append(part)
                self._bring_layers(load, part, load.groups[0], wait=True)
            if part is None or len(part.chunks) < size:
                self._narrow(load, first + (len(part.chunks) if part is not None else 0))
                break
        load.next_part = len(load.parts)
        self.launch(load, wait=True)

    def launch(self, load: Load, *, wait: bool) -> bool:
        """Begin to bring the next part of a load's next group of layers; False where nothing is left, or where there is
        no room without waiting."""
        if load.is_launched.is_set():
            return False
        if not self.is_over(load):
            layers = load.groups[len(load.events)]
            if load.next_part < len(load.parts):
                if not self._bring_layers(load, load.parts[load.next_part], layers, wait=wait):
                    return False
                load.next_part += 1
            if load.next_part >= len(load.parts):
                load.next_part = 0
                with self._changed:
                    load.events.append(self._placer.event())
                    self._changed.notify_all()
        if self.is_over(load) or len(load.events) == len(load.groups):
            load.is_launched.set()
        return True

    def settle_layers(self, load: Load) -> int:
        """Of a load of which nothing is under way any more: chunks that were right in all layers, counted from the
        first."""
        is_whole = len(load.events) == len(load.groups)
        if not is_whole or load.is_missed or self.is_over(load):
            return 0
        if load.is_damaged:
            self._judge(load, load.chunks[load.num_good])
        self.statuses[Status.OK] += load.num_good
        self._space.note_taken(load.num_good, load.num_good * self._layer_bytes * len(self._shard.layers))
        return load.num_good

    def _bring_layers(self, load: Load, part: LoadPart, layers: range, *, wait: bool) -> bool:
        """Bring some layers of what is good of a part, and write them without waiting for the answer."""
        at, stop = 0, min(len(part.chunks), load.num_good - part.first)
        while at < stop and not self.is_over(load):
            batch = self._bring(part, layers, range(at, stop), wait=wait or at > 0)
            if batch is None:
                if not wait and not at:
                    return False
                raise EngineError("the staging has no room though nothing is under way")
            self._placing.append(batch)
            count = len(batch.spans) if part.loan is not None and not batch.is_placed else batch.num_good
            self.num_bytes += self._placer.put(load, batch, layers, count)
            at += len(batch.spans)
            if batch.checked is PAST:  # the answer is known: what follows a bad chunk is of no use
                self._retire()
                stop = min(stop, load.num_good - part.first)
        return True

    def _part_sizes(self, load: Load) -> Iterator[tuple[int, int]]:
        """(First chunk, how many) to look up and bring together."""
        most, at, count = self._placer.layer_chunks(max(len(group) for group in load.groups)), 0, len(load.chunks)
        while at < count:
            is_early = not at and self._placer.runs_beside and min(most, count) > 2 * _EARLY_CHUNKS
            size = _EARLY_CHUNKS if is_early else min(most, count - at)
            yield at, size
            at += size

    def is_over(self, load: Load) -> bool:
        """Whether a load must end now: cancelled, or too late."""
        if not load.is_cancelled and time.monotonic() < load.deadline and not load.gate.is_closed:
            return False
        with self._changed:
            load.is_aborted = True
            self._changed.notify_all()
        return True

    def _narrow(self, load: Load, num_good: int) -> None:
        """Something is missing or damaged: not all that was asked for will come. What comes before it is still waited
        for: other requests of the step may share it."""
        load.num_good = min(load.num_good, num_good)

    # ---- looking up and bringing --------------------------------------------------------------------------------
    def _look_up(self, load: Load, first: int, size: int) -> LoadPart | None:
        """Some chunks from a number on: as many of them as there are in a row, None where the first is missing."""
        chunks = load.chunks[first : first + size]
        if not self.lends:
            return LoadPart(load, first, chunks, self._placer.plan(chunks, load.block_ids, [RAW] * len(chunks)))
        shard = self._shard if load.layers == self._shard.layers else replace(self._shard, layers=load.layers)
        loan = self._space.lend(chunks, shard)
        try:
            stored = list[Stored]()
            if not self._placer.can_place(loan.encodings):
                return self._give_up_lending(load, first, size, loan)
            for place in loan.places:
                if place is None:
                    self.statuses[Status.MISS] += not self.may_land and not load.is_segment
                    break
                address = self._placer.address(place.segment)
                if address is None:
                    return self._give_up_lending(load, first, size, loan)
                stored.append(Stored(address, address + place.offset))
            if not stored:
                loan.release()
                return None
            chunks, encodings = chunks[: len(stored)], loan.encodings[: len(stored)]
            plan = self._placer.plan(chunks, load.block_ids, encodings)
            part = LoadPart(load, first, chunks, plan, loan, stored, encodings)
            self._placer.expect(part, self._all_layers(shard, loan.sums[: len(stored)]))
        except BaseException:
            loan.release()
            raise
        return part

    def _give_up_lending(self, load: Load, first: int, size: int, loan: Loan) -> LoadPart | None:
        """Nothing can be placed from where it is stored, from now on: read it."""
        self.lends = self.may_land = False
        loan.release()
        return self._look_up(load, first, size)

    def _all_layers(self, shard: Shard, sums: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Checksums of some layers at their places among all layers of this rank's: movers look for them there."""
        if shard is self._shard:
            return sums
        whole = np.zeros((len(sums), len(self._shard.layers), len(shard.heads)), np.uint64)
        first = self._shard.layers.index(shard.layers.start)
        whole[:, first : first + len(shard.layers)] = sums
        return whole

    def _bring(self, part: LoadPart, layers: range, spans: range, *, wait: bool = True) -> LoadBatch | None:
        """Begin to bring some layers of some of a part's chunks; None where there is no room now."""
        batch = self._placer.take(part, layers, spans)
        while batch is None and self._placing and (wait or self._placing[0].done.query()):
            self._retire()
            batch = self._placer.take(part, layers, spans)
        if batch is None:
            return None
        part.load.num_in_flight += 1
        try:
            if part.loan is not None:
                self._placer.bring(part.load, batch, layers)
            else:
                self._read_through(part.load, batch, layers)
        except BaseException:
            self._placing.append(batch)  # its staging goes back in its turn
            raise
        return batch

    def _read_through(self, load: Load, batch: LoadBatch, layers: range) -> None:
        """Where stored bytes cannot be lent: read by the store, from whichever tier has them, into private memory."""
        plan = batch.plan
        starts = plan.staged_starts(len(layers))
        shard, whole = replace(self._shard, layers=layers), self._placer.landing(plan.staged_bytes(len(layers)))
        tiles = [
            whole[starts[row] : starts[row + 1]].reshape(len(layers), len(shard.heads), plan.tile_bytes(row))
            for row in range(len(batch.spans))
        ]
        chunks = batch.part.chunks[batch.spans.start : batch.spans.stop]
        left_s = max(load.deadline - time.monotonic(), 0.0)
        statuses = self._space.read(chunks, shard, tiles, deadline_s=left_s, keep=False)
        count = next((row for row, status in enumerate(statuses) if status != Status.OK), len(chunks))
        if count < len(chunks):
            self.statuses[statuses[count]] += 1
        self._placer.bring_landed(batch, whole[: starts[count]], count)

    def _count(self, batch: LoadBatch, num_good: int, num_bytes: int) -> None:
        self.statuses[Status.OK] += num_good
        self.num_bytes += num_bytes
        if batch.part.loan is not None:
            self._space.note_taken(num_good, num_bytes)

    def _judge(self, load: Load, chunk: ChunkRef) -> None:
        """A copy did not verify: let the pool find out whether the chunk was damaged, and forget it, or evicted."""
        status = self._space.judge(chunk, self._shard, deadline_s=max(load.deadline - time.monotonic(), 0.1))
        # If it reads well now, the copy was bad: count it all the same.
        self.statuses[Status.DAMAGED if status == Status.OK else status] += 1
