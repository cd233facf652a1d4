"""From a GPU's paged cache into the pool, at the speed of the bus: the host touches no byte of KV.

`save` launches one gather on the caller's stream and returns; the cache's blocks may then be reused by whatever that
stream runs next. `begin` and `layer_done` take a prompt's KV out group by group of layers, while the next layers are
computed. A thread (`Sender`) does the rest. When the ring is full the rest is dropped and counted: saving never slows
the engine down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

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
from headwater.transfer.view import PagedView

Wanted = tuple[Sequence[ChunkRef], npt.NDArray[np.int32]]
"""Chunks of one request (in order, parents first), and its blocks from its first token on."""


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
        self._gathering: Mark | None = None
        """The newest gather that may still run beside the caller's stream."""
        self._passed: Mark = OVER
        """The end of the newest group of layers that was launched."""
        self._open: list[SaveJob] = []
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

        Launches on the current stream and does not wait.
        """
        self.save_all([(chunks, block_ids)])

    def save_all(self, wanted: Sequence[Wanted]) -> None:
        """`save` for several requests, in one launch for all that have one tenant and adapter: a launch takes as long
        for one chunk as for a hundred. What several requests have is taken once, from the first of them."""
        for group in _by_root(wanted):
            plan = join_plans([plan_chunks(self._view, self._shard, *each) for each in group])
            self._save([chunk for chunks, _ in group for chunk in chunks], plan)

    def _save(self, chunks: Sequence[ChunkRef], plan: Plan) -> None:
        done = 0
        while done < len(chunks):
            room = self.ring.take(self.ring.slot_bytes, len(chunks) - done)
            if room is None:
                self._num_full += len(chunks) - done
                self._sender.give_up(chunks[done:])
                return
            spans = range(done, done + room.num_units)
            try:
                job = SaveJob(chunks[spans.start : spans.stop], plan.part(spans), [self._shard.layers])
            except BaseException:
                self._sender.pass_on(room)
                raise
            self._sender.count(room.num_units)
            self._gather(job, range(room.num_units), room, is_last=True)
            done += room.num_units

    # ---- layer by layer -----------------------------------------------------------------------------------------
    def begin(self, chunks: Sequence[ChunkRef], block_ids: npt.NDArray[np.int32]) -> None:
        """Take these chunks (parents first) in the course of the coming step: `layer_done` says when a layer of them is
        computed. What an earlier step began and did not finish is given up."""
        self._end([job for job in self._open if job.num_layers])
        if not chunks:
            return
        groups = layer_groups(self._shard.layers, self._layer_bytes * len(chunks), self._group_bytes)
        job = SaveJob(chunks, plan_chunks(self._view, self._shard, chunks, block_ids), groups)
        self._open.append(job)
        self._sender.count(len(chunks))
        self._sender.open(job)

    def layer_done(self, layer: int) -> None:
        """The current stream has been told to write the KV of one layer (of the whole model). Does not wait.

        A group of layers is gathered beside what the stream runs next; after the shard's last layer, the stream goes on
        when everything has left the cache.
        """
        if layer not in self._shard.layers:
            return
        skipped = [job for job in self._open if self._shard.layers[job.num_layers] != layer]
        self._end(skipped)  # a step that was not finished, and another one now
        for job in self._open:
            job.num_layers += 1
        if ready := [job for job in self._open if layer == job.groups[job.num_gathered][-1]]:
            before, self._passed = self._passed, current_lane(self._view.device).mark()
            for job in ready:
                self._gather_group(job, before)
        self._open = [job for job in self._open if job.num_gathered < len(job.groups) and job.num_kept]
        if layer == self._shard.layers[-1] and self._gathering is not None:
            current_lane(self._view.device).wait(self._gathering)
            self._gathering = None

    @property
    def has_open(self) -> bool:
        """Whether a save waits for its layers."""
        return bool(self._open)

    def discard(self) -> None:
        """The step failed: give up what was begun. Its blocks may be reused by the current stream."""
        self._end(list(self._open))
        if self._gathering is not None:
            current_lane(self._view.device).wait(self._gathering)
            self._gathering = None

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
    def _gather_group(self, job: SaveJob, before: Mark) -> None:
        """Gather a job's next group of layers; chunks that there is no room for are given up, from the last on."""
        layers = job.groups[job.num_gathered]
        unit, done, rooms = len(layers) * self._layer_bytes, 0, list[Room]()
        # Whoever launches a step is far ahead of the device. As long as that has not come to the end of the group
        # before, it has work left, and waiting for room costs it nothing.
        while done < job.num_kept and (
            room := self.ring.take_while(unit, job.num_kept - done, lambda: not before.query())
        ):
            rooms.append(room)
            done += room.num_units
        if done < job.num_kept:
            self._num_full += job.num_kept - done
            job.num_kept = done
            self._sender.cut(job, done)
        is_last = job.num_gathered == len(job.groups) - 1
        done = 0
        for number, room in enumerate(rooms):
            spans, nothing_follows = range(done, done + room.num_units), is_last and number == len(rooms) - 1
            try:
                self._gather(job, spans, room, nothing_follows, beside=not is_last)
            except BaseException:
                for unused in rooms[number + 1 :]:
                    self._sender.pass_on(unused)
                raise
            done += room.num_units
        job.num_gathered += 1

    def _gather(self, job: SaveJob, spans: range, room: Room, is_last: bool, *, beside: bool = False) -> None:
        """Launch one gather and hand it to the sender, also where the launch fails: the room must go back in order."""
        layers, lane, plan = job.groups[job.num_gathered], current_lane(self._view.device), None
        if beside:
            self._beside.wait(lane.mark())
            lane = self._beside
        flat, sums = self.ring.flat(room, len(layers) * self._layer_bytes), self.ring.sums(room)
        try:
            part = job.plan.part(spans)
            with lane.use():
                gather(part, layers, flat, sums)
            plan = part
        finally:
            mark = lane.mark()
            if beside:
                self._gathering = mark
            self._sender.send(Gathered(job, spans, layers, plan, flat, sums, room, mark, is_last))

    def _end(self, jobs: list[SaveJob]) -> None:
        """Give up what is left of some open jobs."""
        for job in jobs:
            self._open.remove(job)
            self._num_full += job.num_kept
            job.num_kept = 0
            self._sender.cut(job, 0)


def _by_root(wanted: Sequence[Wanted]) -> Iterable[Sequence[Wanted]]:
    """What can be saved together, each chunk once."""
    if len(wanted) == 1:
        return [wanted] if wanted[0][0] else []
    seen, same = set[bytes](), dict[bytes, list[Wanted]]()
    for every, block_ids in wanted:
        if chunks := [chunk for chunk in every if chunk.key not in seen]:
            seen.update([chunk.key for chunk in chunks])
            same.setdefault(chunks[0].root, []).append((chunks, block_ids))
    return same.values()
