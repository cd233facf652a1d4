"""From a paged cache into the pool. The caller's thread gathers into a staging ring; a thread (`Sender`) does the rest.

`save` launches one gather on the caller's stream and returns; whatever that stream runs next may reuse the blocks.
`begin` and `layer_done` take a prompt's KV out layer by layer, while the next layers are computed, and pass it on in
groups of layers. Chunks that find no room in the ring are dropped, counted and reported (`take_unsaved`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from headwater.kernels.pack_check import packs_rightly
from headwater.kv.encoding import RAW
from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import Shard
from headwater.pool.space import Space
from headwater.stores.base import Status
from headwater.transfer.convert import gather, plan_chunks
from headwater.transfer.layers import GROUP_BYTES, layer_groups, save_group_bytes
from headwater.transfer.movers import mover_of
from headwater.transfer.ring import Room, StagingRing
from headwater.transfer.save_job import Cut, Gathered, Open, PassOn, SaveAbort, SaveJob, SaveRequest
from headwater.transfer.sender import Sender
from headwater.transfer.sink import SaveSink
from headwater.transfer.streams import PAST, DeviceEvent, DeviceStream, current_stream
from headwater.transfer.view import PagedView


class Saver:
    """One rank's way into the pool. Saves from one thread; `close` drains for a while and drops the rest."""

    def __init__(
        self,
        space: Space,
        view: PagedView,
        shard: Shard,
        *,
        staging_bytes: int,
        deadline_s: float,
        group_bytes: int | None = None,
        patience_s: float = 0.0,
        mover: str | None = None,
        sink: SaveSink | None = None,
    ) -> None:
        """`patience_s`: how long a save of all layers at once may wait for room in the ring. `sink`: who else is told
        what the pool has, group of layers by group of layers."""
        mover = mover_of(view.device, mover)
        self._group_bytes = group_bytes
        self._least_bytes = GROUP_BYTES[mover]
        self._patience_s = patience_s
        self._view = view
        self._shard = shard
        self._space = space
        layers, heads, tile = shard.local_shape(space.spec, 0, space.chunk_tokens)
        self._layer_bytes = heads * tile
        """Of one chunk."""
        self.ring = StagingRing(layers * heads * tile, staging_bytes, view.device, with_sums=True)
        self._beside = DeviceStream(view.device)
        self._is_beside = False
        """Whether gathers may run there that the caller's stream has not waited for."""
        self._passed: DeviceEvent = PAST
        """Where the newest group of layers begins."""
        self._open: list[SaveJob] = []
        """Of one step, so all of them are at the same layer and have the same groups."""
        self._late: list[SaveRequest] = []
        """More than a step may have pending at a time: to be taken at its end, all layers at once."""
        self._is_in_step = False
        """Whether some layers of a step were announced, and not its last one."""
        self._overlaps = mover == "cuda"
        """Whether the ring empties while a step computes; where it may not, a step must fit into it."""
        if self._overlaps and space.encoding(space.chunk_tokens, shard, on_device=True) != RAW:
            packs_rightly(view.device)  # now: the first answer takes as long as compiling the kernels
        self._num_full = 0
        self._sender = Sender(space, view, shard, self.ring, mover, deadline_s, sink)

    # ---- what was done ------------------------------------------------------------------------------------------
    @property
    def statuses(self) -> Counter[Status]:
        """What became of the chunks that were taken."""
        return self._sender.statuses

    @property
    def num_dropped(self) -> int:
        """Chunks that were not saved, because the ring was full or the pool failed."""
        return self._num_full + self._sender.num_dropped

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank has put into the pool."""
        return self._sender.num_bytes

    @property
    def num_watched(self) -> int:
        """Chunks that somebody else is filling; if they do not come, they are reported as unsaved."""
        return len(self._sender.watched)

    def take_unsaved(self) -> list[tuple[str, int]]:
        """Requests with chunks that were not saved since the last call, and the first token of the first of those."""
        return self._sender.unsaved.take()

    def take_misfits(self) -> list[bytes]:
        """Keys of chunks that could not be packed, and were not saved, since the last call: no rank can pack them."""
        return self._sender.misfits.take()

    def take_timings(self) -> list[float]:
        """Seconds from taken to stored, of the batches of chunks that were stored since the last call."""
        timings = self._sender.timings
        return [timings.popleft() for _ in range(len(timings))]

    # ---- all layers at once -------------------------------------------------------------------------------------
    def save(
        self,
        name: str,
        chunks: Sequence[ChunkRef],
        block_ids: npt.NDArray[np.int32],
        raw: Collection[bytes] = frozenset(),
    ) -> None:
        """Take the KV of a request's chunks (in order, parents first) out of the cache, as much as there is room for.

        Launches on the current stream; waits for room for `patience_s` at most. Between steps: in the middle of one,
        its saves are aborted.
        """
        self.save_all([SaveRequest(name, chunks, block_ids, raw)])

    def save_all(self, wanted: Sequence[SaveRequest]) -> None:
        """`save` for several requests, in one launch for all that have one tenant and adapter: a launch takes as long
        for one chunk as for a hundred. A chunk that several requests have is taken once, from the first of them."""
        for group in _by_root(wanted):
            self._save(group)

    def _save(self, group: Sequence[SaveRequest]) -> None:
        job = self._job(group[0], [self._shard.layers])
        if len(group) > 1:
            job.add([self._job(each, job.groups) for each in group[1:]])
        self._end([job for job in self._open if job.rooms])  # the ring's rooms go back in the order of their taking
        self._sender.count(job.chunks)
        self._save_job(job)

    def _job(self, wanted: SaveRequest, groups: list[range]) -> SaveJob:
        """A job of one request's chunks. A GPU packs tiles while it gathers them, a CPU when they leave the ring."""
        name, chunks, block_ids, raw = wanted
        is_device = self._overlaps
        sizes = {chunk.num_tokens for chunk in chunks}
        wants = {n: self._space.encoding(n, self._shard, on_device=is_device) for n in sizes}
        if is_device and any(want != RAW for want in wants.values()) and not packs_rightly(self._view.device):
            wants = dict.fromkeys(sizes, RAW)
        encodings = [RAW if chunk.key in raw else wants[chunk.num_tokens] for chunk in chunks]
        plan = plan_chunks(self._view, self._shard, chunks, block_ids)
        plan = plan.packed(encodings) if is_device else plan
        return SaveJob(chunks, [name] * len(chunks), encodings, plan, groups, frozenset(raw))

    def _save_job(self, job: SaveJob) -> None:
        """Take a job, all layers at once, in as many pieces as the ring gives room for. Chunks that there is none for
        are aborted; if a launch fails, so is all that is left of the job."""
        done, end = 0, time.monotonic() + self._patience_s
        while done < len(job.chunks):
            room = self.ring.take_while(self.ring.slot_bytes, len(job.chunks) - done, lambda: time.monotonic() < end)
            if room is None:
                job.num_kept = done
                self._sender.tell(Cut(job, done))
                return
            self._gather(job, room, range(done, done + room.num_units))
            done += room.num_units

    def _drop(self, chunks: Sequence[ChunkRef], names: Sequence[str]) -> None:
        """There is no room: tell this server's other ranks that these chunks will not be complete."""
        self._num_full += len(chunks)
        self._sender.tell(SaveAbort(list(zip(names, chunks, strict=True))))

    # ---- layer by layer -----------------------------------------------------------------------------------------
    def begin(
        self,
        name: str,
        chunks: Sequence[ChunkRef],
        block_ids: npt.NDArray[np.int32],
        raw: Collection[bytes] = frozenset(),
    ) -> None:
        """Take a request's chunks (parents first) in the course of the coming step: `layer_done` says when a layer of
        them is computed.

        A chunk that several requests have is taken once, from the first of them. Chunks beyond what one step may have
        pending in the pool are taken at its end, all layers at once. An earlier step that was not finished is aborted;
        one that was not run at all must be discarded.
        """
        if self._is_in_step:
            self.discard()
        taken = {chunk.key for job in self._open for chunk in job.chunks}
        taken |= {chunk.key for late in self._late for chunk in late.chunks}
        if taken:
            chunks = [chunk for chunk in chunks if chunk.key not in taken]
        num_open = sum([len(job.chunks) for job in self._open])
        room = max(0, self._max_pending() - num_open) if not self._late else 0
        if len(chunks) > room:
            self._late.append(SaveRequest(name, chunks[room:], block_ids, raw))
            chunks = chunks[:room]
        if not chunks:
            return
        job = self._job(SaveRequest(name, chunks, block_ids, raw), [])
        same = next((job for job in self._open if job.chunks[0].root == chunks[0].root), None)
        if same is not None:  # one gather a layer for all requests: a launch takes as long for one chunk as for many
            same.add([job])
        else:
            self._open.append(job)
        self._sender.count(chunks)

    def _max_pending(self) -> int:
        """Chunks that one step may have pending: seven eighths of the share that the pool sets aside."""
        extent = self._space.spec.extent_bytes(self._space.chunk_tokens)
        most = max(1, self._space.max_pending_bytes // 8 * 7 // extent)
        return most if self._overlaps else min(most, self.ring.count)

    def layer_done(self, layer: int) -> None:
        """The current stream has been told to write the KV of one layer (of the whole model). Does not wait.

        It is gathered beside what the stream runs next; after the shard's last layer, the stream goes on when
        everything has left the cache. Raises what a launch raises; the step's saves are aborted then.
        """
        if layer not in self._shard.layers:
            return
        skipped = [job for job in self._open if self._shard.layers[job.num_layers] != layer]
        if skipped:  # a step that was not finished, and another one now
            self._end(skipped)
            self._drop_late()
        stream = current_stream(self._view.device)
        is_last = layer == self._shard.layers[-1]
        self._is_in_step = not is_last
        if is_last:
            self._join(stream)
        if not self._open:
            return
        computed = stream.record(blocking=True)
        if layer == self._shard.layers[0]:
            self._begin_step(computed)
        if not is_last:
            self._beside.wait(computed)
            stream, self._is_beside = self._beside, True
        try:
            if layer == self._open[0].group[0]:
                before, self._passed = self._passed, computed
                for job in self._open:
                    self._take_rooms(job, before)
            for job in self._open:
                self._gather_layer(job, layer, stream)
        except BaseException:
            self._drop_finished()
            self.discard()
            raise
        self._drop_finished()
        if is_last:
            self._save_late()

    def end_step(self) -> None:
        """The step is over. Layers that were not announced (in a CUDA graph nobody can) are taken now, all at once
        where none was."""
        while self._open and self._open[0].num_layers:
            self.layer_done(self._shard.layers[self._open[0].num_layers])
        self._is_in_step = False
        while self._open:
            try:
                self._save_job(self._open.pop(0))
            except BaseException:
                self.discard()
                raise
        self._save_late()

    def _save_late(self) -> None:
        late, self._late = self._late, []
        for group in _by_root(late):
            self._save(group)

    def _begin_step(self, first_layer: DeviceEvent) -> None:
        layer_bytes = self._layer_bytes * sum([len(job.chunks) for job in self._open])
        groups = layer_groups(self._shard.layers, layer_bytes, self._group_bytes or self._best_group(layer_bytes))
        for job in self._open:
            job.groups = groups
            self._sender.tell(Open(job, first_layer))

    def _best_group(self, layer_bytes: int) -> int:
        if not self._overlaps:
            return self._least_bytes
        ring_bytes = self.ring.count * self.ring.slot_bytes
        return save_group_bytes(layer_bytes * len(self._shard.layers), ring_bytes, self._least_bytes)

    def _drop_finished(self) -> None:
        self._open = [job for job in self._open if job.num_layers < len(self._shard.layers) and job.num_kept]

    def _join(self, stream: DeviceStream) -> None:
        """Let a stream wait for gathers that were launched beside it."""
        if self._is_beside:
            stream.wait(self._beside.record())
            self._is_beside = False

    @property
    def has_open(self) -> bool:
        """Whether a save waits for its layers."""
        return bool(self._open or self._late)

    def discard(self) -> None:
        """The step failed: abort what was begun. The current stream may reuse its blocks."""
        self._end(list(self._open))
        self._drop_late()
        self._is_in_step = False
        self._join(current_stream(self._view.device))

    def _drop_late(self) -> None:
        late, self._late = self._late, []
        for each in late:
            self._drop(each.chunks, [each.name] * len(each.chunks))

    # ---- the end ------------------------------------------------------------------------------------------------
    def wait_for_room(self, num_chunks: int, timeout_s: float) -> bool:
        """Wait until so many chunks could be saved without dropping any. For callers with nothing better to do."""
        return self.ring.wait(min(num_chunks, self.ring.count), timeout_s)

    def wait_prepared(self) -> None:
        """Wait until the store's memory is there and registered; saves do not need to. For measurements."""
        self._sender.wait_prepared()

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything that was taken is in the pool or aborted."""
        return self._sender.drain(timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Drain, then stop the thread. Idempotent."""
        self._end(list(self._open))
        self._late = []
        self._sender.close(timeout_s)

    # ---- gathering ----------------------------------------------------------------------------------------------
    def _take_rooms(self, job: SaveJob, before: DeviceEvent) -> None:
        """Room for a job's next group of layers; chunks that there is none for are aborted, from the last on."""
        unit, done = len(job.group) * self._layer_bytes, 0
        # The thread that launches a step is far ahead of the device. As long as that has not come to where the group
        # before began, it has work left, and waiting for room costs it nothing.
        is_patient: Callable[[], bool] = lambda: not before.query()  # noqa: E731
        while done < job.num_kept and (room := self.ring.take_while(unit, job.num_kept - done, is_patient)):
            job.rooms.append((range(done, done + room.num_units), room))
            done += room.num_units
        if done < job.num_kept:
            job.num_kept = done
            self._sender.tell(Cut(job, done))
        job.parts = [job.plan.part(spans) for spans, _ in job.rooms]

    def _gather_layer(self, job: SaveJob, layer: int, stream: DeviceStream) -> None:
        """Launch the gathers of one layer: small ones hide where a computation leaves some of the device idle. After a
        group's last layer, hand the group to the sender."""
        group = job.group
        at, is_last = group.index(layer), layer == self._shard.layers[-1]
        with stream.use():
            for plan, (_, room) in zip(job.parts, job.rooms, strict=True):
                gather(plan, group[at : at + 1], *self._memory(room, len(group)), held=group)
        job.num_layers += 1
        if layer != group[-1]:
            return
        event, rooms = stream.record(), job.rooms
        job.rooms, job.num_gathered = [], job.num_gathered + 1
        for number, (plan, (spans, room)) in enumerate(zip(job.parts, rooms, strict=True)):
            memory = self._memory(room, len(group))
            nothing_follows = is_last and number == len(rooms) - 1
            self._sender.tell(Gathered(job, spans, group, plan, *memory, room, event, nothing_follows))

    def _gather(self, job: SaveJob, room: Room, spans: range) -> None:
        """Launch one gather of all layers and hand it to the sender, also where the launch fails: the room must go back
        in order."""
        layers, stream, plan = self._shard.layers, current_stream(self._view.device), None
        memory = self._memory(room, len(layers))
        try:
            part = job.plan.part(spans)
            gather(part, layers, *memory)
            plan = part
        finally:
            is_last = spans.stop == len(job.chunks)
            self._sender.tell(Gathered(job, spans, layers, plan, *memory, room, stream.record(), is_last))

    def _memory(self, room: Room, num_layers: int) -> tuple[Tensor, Tensor | None]:
        """Where a gather puts so many layers, and what it adds up of them."""
        return self.ring.flat(room, num_layers * self._layer_bytes), self.ring.sums(room)

    def _end(self, jobs: list[SaveJob]) -> None:
        """Abort what is left of some open jobs."""
        unused = PAST
        if any(job.rooms for job in jobs):
            stream = current_stream(self._view.device)
            self._join(stream)
            unused = stream.record(blocking=True)
        for job in jobs:
            self._open.remove(job)
            for _, room in job.rooms:
                self._sender.tell(PassOn(room, unused))
            job.num_kept, job.rooms = 0, []
            self._sender.tell(Cut(job, 0))


def _by_root(wanted: Sequence[SaveRequest]) -> Iterable[Sequence[SaveRequest]]:
    """What can be saved together, each chunk once."""
    if len(wanted) == 1:
        return [wanted] if wanted[0].chunks else []
    seen, same = set[bytes](), dict[bytes, list[SaveRequest]]()
    for each in wanted:
        if chunks := [chunk for chunk in each.chunks if chunk.key not in seen]:
            seen.update([chunk.key for chunk in chunks])
            same.setdefault(chunks[0].root, []).append(each.left(chunks))
    return same.values()
