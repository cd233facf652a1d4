"""From a GPU's paged cache into the pool, at the speed of the bus: the host touches no byte of KV.

`save` launches one gather on the caller's stream and returns; the cache's blocks may then be reused by whatever that
stream runs next. `begin` and `layer_done` take a prompt's KV out layer by layer, while the next ones are computed, and
pass it on in groups of layers. A thread (`Sender`) does the rest. When the ring is full the rest is dropped and
counted: saving never slows the engine down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import Shard
from headwater.pool.space import Space
from headwater.stores.base import Status
from headwater.transfer.convert import Plan, gather, join_plans, plan_chunks
from headwater.transfer.device_ring import DeviceRing, Room
from headwater.transfer.device_save import Gathered, SaveJob
from headwater.transfer.device_sender import Sender
from headwater.transfer.lanes import OVER, Lane, Mark, current_lane
from headwater.transfer.layers import GPU_GROUP_BYTES, layer_groups
from headwater.transfer.saver import Unsaved, Wanted
from headwater.transfer.view import PagedView


class DeviceSaver:
    """One rank's way into the pool. Saves from one thread; `close` drains for a while and drops the rest."""

    def __init__(
        self,
        space: Space,
        view: PagedView,
        shard: Shard,
        *,
        staging_bytes: int,
        deadline_s: float,
        group_bytes: int = GPU_GROUP_BYTES,
    ) -> None:
        self._group_bytes = group_bytes
        self._view = view
        self._shard = shard
        layers, heads, tile = shard.local_shape(space.spec, 0, space.chunk_tokens)
        self._layer_bytes = heads * tile
        """Of one chunk."""
        self.ring = DeviceRing(layers * heads * tile, staging_bytes, view.device, with_sums=True)
        self._beside = Lane(view.device)
        self._is_beside = False
        """Whether gathers may run there that the caller's stream has not waited for."""
        self._passed: Mark = OVER
        """Where the newest group of layers begins."""
        self._open: list[SaveJob] = []
        """Of one step, so all of them are at the same layer and have the same groups."""
        self._names: dict[SaveJob, str] = {}
        """Of those."""
        self._unsaved = Unsaved()
        self._num_full = 0
        self._sender = Sender(space, view, shard, self.ring, deadline_s)

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

    # ---- all layers at once -------------------------------------------------------------------------------------
    def save(self, chunks: Sequence[ChunkRef], block_ids: npt.NDArray[np.int32]) -> None:
        """Take the KV of these chunks (in order, parents first) out of the cache, as much as there is room for.

        Launches on the current stream and does not wait. Between steps: in the middle of one, its saves are given up.
        """
        self.save_all([Wanted("", chunks, block_ids)])

    def save_all(self, wanted: Sequence[Wanted]) -> None:
        """`save` for several requests, in one launch for all that have one tenant and adapter: a launch takes as long
        for one chunk as for a hundred. What several requests have is taken once, from the first of them."""
        for group in _by_root(wanted):
            plans = [plan_chunks(self._view, self._shard, each.chunks, each.block_ids) for each in group]
            names = [each.name for each in group for _ in each.chunks]
            self._save(names, [chunk for each in group for chunk in each.chunks], join_plans(plans))

    def take_unsaved(self) -> list[tuple[str, int]]:
        """By name: the first token of each request that there was no room for, since the last call."""
        return self._unsaved.take()

    def _save(self, names: Sequence[str], chunks: Sequence[ChunkRef], plan: Plan) -> None:
        self._end([job for job in self._open if job.rooms])  # the ring's rooms go back in the order of their taking
        done = 0
        while done < len(chunks):
            room = self.ring.take(self.ring.slot_bytes, len(chunks) - done)
            if room is None:
                self._num_full += len(chunks) - done
                for name, chunk in zip(names[done:], chunks[done:], strict=True):
                    self._unsaved.add(name, chunk.first_token)
                self._sender.give_up(chunks[done:])
                return
            spans = range(done, done + room.num_units)
            try:
                job = SaveJob(chunks[spans.start : spans.stop], plan.part(spans), [self._shard.layers])
            except BaseException:
                self._sender.pass_on(room, OVER)
                raise
            self._sender.count(job.chunks)
            self._gather(job, room)
            done += room.num_units

    # ---- layer by layer -----------------------------------------------------------------------------------------
    def begin(self, name: str, chunks: Sequence[ChunkRef], block_ids: npt.NDArray[np.int32]) -> None:
        """Take these chunks (parents first) in the course of the coming step: `layer_done` says when a layer of them is
        computed.

        What several requests have is taken once, from the first of them. What an earlier step computed only in part is
        given up; one that was not run at all must be discarded.
        """
        self._end([job for job in self._open if job.num_layers])
        taken = {chunk.key for job in self._open for chunk in job.chunks}
        if taken:
            chunks = [chunk for chunk in chunks if chunk.key not in taken]
        if not chunks:
            return
        job = SaveJob(chunks, plan_chunks(self._view, self._shard, chunks, block_ids), [])
        self._names = {open_job: self._names[open_job] for open_job in self._open} | {job: name}
        self._open.append(job)
        self._sender.count(chunks)

    def layer_done(self, layer: int) -> None:
        """The current stream has been told to write the KV of one layer (of the whole model). Does not wait.

        It is gathered beside what the stream runs next; after the shard's last layer, the stream goes on when
        everything has left the cache. Raises what a launch raises; the step's saves are given up then.
        """
        if layer not in self._shard.layers:
            return
        skipped = [job for job in self._open if self._shard.layers[job.num_layers] != layer]
        self._end(skipped)  # a step that was not finished, and another one now
        lane = current_lane(self._view.device)
        if layer == self._shard.layers[-1]:
            self._join(lane)
        if not self._open:
            return
        computed = lane.mark(blocking=True)
        if layer == self._shard.layers[0]:
            self._begin_step(computed)
        if layer != self._shard.layers[-1]:
            self._beside.wait(computed)
            lane, self._is_beside = self._beside, True
        try:
            if layer == self._open[0].group[0]:
                before, self._passed = self._passed, computed
                for job in self._open:
                    self._take_rooms(job, before)
            for job in self._open:
                self._gather_layer(job, layer, lane)
        except BaseException:
            self._drop_finished()
            self._end(list(self._open))
            raise
        self._drop_finished()

    def _begin_step(self, first_layer: Mark) -> None:
        num_chunks = sum([len(job.chunks) for job in self._open])
        groups = layer_groups(self._shard.layers, self._layer_bytes * num_chunks, self._group_bytes)
        for job in self._open:
            job.groups = groups
            self._sender.open(job, first_layer)

    def _drop_finished(self) -> None:
        self._open = [job for job in self._open if job.num_layers < len(self._shard.layers) and job.num_kept]

    def _join(self, lane: Lane) -> None:
        """Let a lane wait for what was launched beside it."""
        if self._is_beside:
            lane.wait(self._beside.mark())
            self._is_beside = False

    def end_step(self) -> None:
        """The step is launched: take what was begun and not announced layer by layer."""
        for layer in self._shard.layers[self._open[0].num_layers :] if self._open else ():
            self.layer_done(layer)

    @property
    def has_open(self) -> bool:
        """Whether a save waits for its layers."""
        return bool(self._open)

    def discard(self) -> None:
        """The step failed: give up what was begun. Its blocks may be reused by the current stream."""
        self._end(list(self._open))
        self._join(current_lane(self._view.device))

    # ---- the end ------------------------------------------------------------------------------------------------
    def wait_for_room(self, num_chunks: int, timeout_s: float) -> bool:
        """Wait until so many chunks could be saved without dropping any. For callers with nothing better to do."""
        return self.ring.wait(min(num_chunks, self.ring.count), timeout_s)

    def wait_prepared(self) -> None:
        """Wait until the store's memory is there and registered; saves do not need to. For measurements."""
        self._sender.wait_prepared()

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything that was taken is in the pool or given up."""
        return self._sender.drain(timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Drain, then stop the thread. Idempotent."""
        self._end(list(self._open))
        self._sender.close(timeout_s)

    # ---- gathering ----------------------------------------------------------------------------------------------
    def _take_rooms(self, job: SaveJob, before: Mark) -> None:
        """Room for a job's next group of layers; chunks that there is none for are given up, from the last on."""
        unit, done = len(job.group) * self._layer_bytes, 0
        # Whoever launches a step is far ahead of the device. As long as that has not come to where the group before
        # began, it has work left, and waiting for room costs it nothing.
        while done < job.num_kept and (
            room := self.ring.take_while(unit, job.num_kept - done, lambda: not before.query())
        ):
            job.rooms.append((range(done, done + room.num_units), room))
            done += room.num_units
        if done < job.num_kept:
            job.num_kept = done
            self._unsaved.add(self._names[job], job.chunks[done].first_token)
            self._sender.cut(job, done)
        job.parts = [job.plan.part(spans) for spans, _ in job.rooms]

    def _gather_layer(self, job: SaveJob, layer: int, lane: Lane) -> None:
        """Launch the gathers of one layer: small ones hide where a computation leaves some of the device idle. After a
        group's last layer, hand the group to the sender."""
        group = job.group
        at, is_last = group.index(layer), layer == self._shard.layers[-1]
        with lane.use():
            for plan, (_, room) in zip(job.parts, job.rooms, strict=True):
                gather(plan, group[at : at + 1], *self._memory(room, len(group)), held=group)
        job.num_layers += 1
        if layer != group[-1]:
            return
        mark, rooms = lane.mark(), job.rooms
        job.rooms, job.num_gathered = [], job.num_gathered + 1
        for number, (plan, (spans, room)) in enumerate(zip(job.parts, rooms, strict=True)):
            memory = self._memory(room, len(group))
            nothing_follows = is_last and number == len(rooms) - 1
            self._sender.send(Gathered(job, spans, group, plan, *memory, room, mark, nothing_follows))

    def _gather(self, job: SaveJob, room: Room) -> None:
        """Launch one gather of all layers and hand it to the sender, also where the launch fails: the room must go back
        in order."""
        layers, lane, plan = self._shard.layers, current_lane(self._view.device), None
        memory = self._memory(room, len(layers))
        try:
            gather(job.plan, layers, *memory)
            plan = job.plan
        finally:
            spans = range(room.num_units)
            self._sender.send(Gathered(job, spans, layers, plan, *memory, room, lane.mark(), is_last=True))

    def _memory(self, room: Room, num_layers: int) -> tuple[Tensor, Tensor | None]:
        """Where a gather puts so many layers, and what it adds up of them."""
        return self.ring.flat(room, num_layers * self._layer_bytes), self.ring.sums(room)

    def _end(self, jobs: list[SaveJob]) -> None:
        """Give up what is left of some open jobs."""
        unused = OVER
        if any(job.rooms for job in jobs):
            lane = current_lane(self._view.device)
            self._join(lane)
            unused = lane.mark(blocking=True)
        for job in jobs:
            self._open.remove(job)
            self._unsaved.add(self._names[job], job.chunks[0].first_token)
            for _, room in job.rooms:
                self._sender.pass_on(room, unused)
            job.num_kept, job.rooms = 0, []
            self._sender.cut(job, 0)


def _by_root(wanted: Sequence[Wanted]) -> Iterable[Sequence[Wanted]]:
    """What can be saved together, each chunk once."""
    if len(wanted) == 1:
        return [wanted] if wanted[0].chunks else []
    seen, same = set[bytes](), dict[bytes, list[Wanted]]()
    for name, every, block_ids in wanted:
        if chunks := [chunk for chunk in every if chunk.key not in seen]:
            seen.update([chunk.key for chunk in chunks])
            same.setdefault(chunks[0].root, []).append(Wanted(name, chunks, block_ids))
    return same.values()
