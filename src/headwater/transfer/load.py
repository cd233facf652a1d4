"""From the pool into a paged cache: lent, copied, verified, and only then written into the request's blocks.

One thread brings the chunks that the first tier has, several loads at a time, so that the bus does not wait between two
of them. Chunks that somebody is still filling are followed (see `follow`). Chunks that only a lower tier has, and that
could not be kept in the first one, are read into private memory by a second thread (the *lander*): a slow store never
holds up other loads. A load that goes layer by layer writes each layer at once, in time for the step that computes with
it, and its end says whether the bytes were right. Every load ends by its deadline; whatever comes later is thrown away
before it touches the cache.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import Shard
from headwater.pool.space import Space
from headwater.pool.wait import Wait
from headwater.stores.base import Status
from headwater.transfer.follow import Follow, LoadFollower
from headwater.transfer.layers import LOAD_GROUP_BYTES, MAX_LOAD_GROUPS, layer_groups
from headwater.transfer.load_job import Load
from headwater.transfer.movers import make_placer, mover_of
from headwater.transfer.pipeline import Pipeline
from headwater.transfer.streams import current_stream, enter_thread
from headwater.transfer.view import PagedView

log = logging.getLogger(__name__)

GRACE_S = 0.25
"""How long past its deadline a load may take to end by itself; then it is ended."""
GROUPS_AHEAD = 2
"""Groups of layers that are launched before the step gets to them, where the staging has room."""
LANDING_BYTES = 64 << 20
"""Staging of the lander: a lower tier is slower than any bus."""
_MAX_TIMINGS = 4096


class Loader:
    """One rank's way out of the pool. Thread-safe; `on_done(name, chunks in place)` is called from its threads."""

    def __init__(
        self,
        space: Space,
        view: PagedView,
        shard: Shard,
        *,
        staging_bytes: int,
        deadline_s: float,
        on_done: Callable[[str, int], None],
        group_bytes: int | None = None,
        mover: str | None = None,
        is_landing: bool = False,
    ) -> None:
        self._device = view.device
        self._shard = shard
        self._deadline_s = deadline_s
        mover = mover_of(view.device, mover)
        self._group_bytes = group_bytes or LOAD_GROUP_BYTES[mover]
        self._most_groups = MAX_LOAD_GROUPS[mover]
        self._on_done = on_done
        _, heads, tile = shard.local_shape(space.spec, 0, space.chunk_tokens)
        self._layer_bytes = heads * tile
        """Of one chunk."""
        self.placer = make_placer(mover, space, view, shard, staging_bytes)
        self._lander: Loader | None = None
        self._make_lander: Callable[[], Loader] = partial(
            Loader,
            space,
            view,
            shard,
            staging_bytes=min(staging_bytes, LANDING_BYTES),
            deadline_s=deadline_s,
            on_done=on_done,
            mover=mover,
            is_landing=True,
        )
        self._active: deque[Load] = deque()
        """Loads that have something under way; the newest of them is the one that is being issued."""
        self._queue: queue.SimpleQueue[Load | None] = queue.SimpleQueue()
        self._open: list[Load] = []
        self._changed = threading.Condition()
        """Guards `_open`; told whenever a load has got further."""
        self._pipeline = Pipeline(space, shard, self.placer, self._changed, is_landing=is_landing)
        self._follower = LoadFollower(space, shard, self._put_in, self._end_follow)
        self._driving = threading.Lock()
        """Held while a load that goes layer by layer is launched or settled."""
        self._closing = False
        self._seconds = 0.0
        self._timings: deque[float] = deque(maxlen=_MAX_TIMINGS)
        self._thread = threading.Thread(target=self._run, name="headwater-loader", daemon=True)
        self._clock = threading.Thread(target=self._watch, name="headwater-load-clock", daemon=True)
        self._thread.start()
        self._clock.start()

    # ---- what was done ------------------------------------------------------------------------------------------
    @property
    def statuses(self) -> Counter[Status]:
        """What became of the chunks that were asked for."""
        return self._pipeline.statuses if self._lander is None else self._pipeline.statuses + self._lander.statuses

    @property
    def num_bytes(self) -> int:
        """Bytes that were written into the cache."""
        return self._pipeline.num_bytes + (0 if self._lander is None else self._lander.num_bytes)

    @property
    def seconds(self) -> float:
        """Time in which at least one load was under way."""
        return self._seconds + (0.0 if self._lander is None else self._lander.seconds)

    def take_timings(self) -> list[float]:
        """Seconds from asked to done of the loads that ended since the last call."""
        own = [self._timings.popleft() for _ in range(len(self._timings))]
        return own if self._lander is None else own + self._lander.take_timings()

    # ---- for the engine -----------------------------------------------------------------------------------------
    def load(
        self,
        name: str,
        chunks: Sequence[ChunkRef],
        block_ids: npt.NDArray[np.int32],
        *,
        layerwise: bool = False,
        wait: Wait | None = None,
    ) -> None:
        """Bring these chunks (consecutive ones of a chain) into those blocks; `on_done(name, chunks in place)` follows
        in any case, once. The blocks are not written before the current stream has got to this call.

        With `layerwise`, layers come in order, `wait_layer` says when one is there, and blocks may be written with
        bytes that turn out to be damaged: the end says how many chunks, counted from the first, were right in all
        layers. It comes when the step has waited for every layer; `finish_layers` ends a load of which it has not,
        with nothing. Only chunks of the first tier are loaded so: a slow store must not stall a step.

        With `wait`, chunks that are not complete in the first tier are followed while they are filled, for so long and
        no longer; the deadline is then that of `wait`. Only for loads that no step waits for.
        """
        groups = [self._shard.layers]
        if layerwise:
            num_bytes = self._layer_bytes * len(chunks)
            groups = layer_groups(self._shard.layers, num_bytes, self._group_bytes, self._most_groups)
        asked, now = current_stream(self._device).record(), time.monotonic()
        if wait is not None and not layerwise and self._pipeline.lends:
            self._follower.add(Follow(name, chunks, block_ids, asked, wait, now))
            return
        self._put_in(Load(name, chunks, block_ids, groups, layerwise, asked, now + self._deadline_s, started_s=now))

    def _put_in(self, load: Load) -> None:
        self._start(load, is_stuck=self._enlist(load))

    def _enlist(self, load: Load) -> bool:
        """From now on a load can be cancelled, and its time is watched. Whether the loader's thread is stuck, in a load
        that was ended without it."""
        with self._changed:
            self._open.append(load)
            self._changed.notify_all()
            return any(other.gate.is_closed for other in self._active)

    def _start(self, load: Load, *, is_stuck: bool) -> None:
        if is_stuck:  # it would wait for nothing
            self._end(load, 0, is_overdue=True)
        else:
            self._queue.put(load)

    def wait_layer(self, layer: int) -> None:
        """Let the current stream wait for one layer (of the whole model) of every load that goes layer by layer.

        The caller waits only until that is launched, or given up, and never beyond a load's deadline.
        """
        if layer in self._shard.layers:
            self._wait_until(layer, (layer,))

    def wait_layers(self) -> None:
        """The same for all layers at once: for a step that says nothing between them, such as one CUDA graph."""
        self._wait_until(self._shard.layers[-1], self._shard.layers)

    def _wait_until(self, last: int, layers: Sequence[int]) -> None:
        """Let the current stream wait for these layers; whatever comes before the last of them comes before it."""
        stream = current_stream(self._device)
        loads = self._open_layerwise()
        for load in loads:
            self._launch_until(loads, load, last)
            if (event := load.event_of(last)) is not None:
                stream.wait(event)
            with self._changed:
                load.unawaited.difference_update(layers)
                num_settled = None if load.unawaited else load.num_settled
            if num_settled is not None:
                self._end(load, num_settled)

    def _open_layerwise(self) -> list[Load]:
        with self._changed:
            return [load for load in self._open if load.layerwise]

    def finish_layers(self) -> bool:
        """The step is over, or failed: a load of which it did not wait for all layers has failed, since the step may
        have read a layer before it came. False where there was one."""
        loads = self._open_layerwise()
        for load in loads:
            if not load.unawaited:
                self._launch_until(loads, load, self._shard.layers[-1])
                continue
            load.is_missed = True
            self.cancel(load.name)
        return not any(load.unawaited for load in loads)

    def _launch_until(self, loads: Sequence[Load], load: Load, layer: int) -> None:
        """See that a layer of a load is launched, and the next groups as far as there is room.

        The loader's thread only begins a load. The rest is launched by the engine's own thread, so that the two do not
        contend for the interpreter while the step is launched.
        """
        while not load.is_launched.is_set():
            if load.is_handed and len(load.events) > load.group_of(layer):
                break
            handed = next((one for one in loads if one.is_handed and not one.is_launched.is_set()), None)
            if load.is_handed:
                handed = load
            if handed is not None:
                self._launch(handed, wait=True)
            elif self._is_there(load, layer) or not self._wait_begun(load, layer):
                return
        while load.is_handed and len(load.events) <= load.group_of(layer) + GROUPS_AHEAD:
            if not self._launch(load, wait=False):
                return

    def _is_there(self, load: Load, layer: int) -> bool:
        """Whether nothing need be launched for a layer. A load that is to be handed over is not there before: also of
        one that lost a chunk, all layers of the others must come."""
        return load.is_launched.is_set() or (not self.placer.runs_beside and load.has_launched(layer))

    def _wait_begun(self, load: Load, layer: int) -> bool:
        """Wait until the loader's thread has begun a load, or launched a layer of it; False where it is too late."""
        with self._changed:
            left_s = max(0.0, load.deadline - time.monotonic())
            is_good = self._changed.wait_for(lambda: load.is_handed or self._is_there(load, layer), left_s)
            if not is_good:
                load.is_missed = load.is_aborted = True
        return is_good

    def _launch(self, load: Load, *, wait: bool) -> bool:
        with self._driving:
            try:
                return self._pipeline.launch(load, wait=wait)
            except Exception:
                log.exception("a load failed; the engine computes what is missing")
                load.is_missed = load.is_aborted = True
                load.is_launched.set()
                return False

    @property
    def has_open(self) -> bool:
        """Whether a load that goes layer by layer has not ended. Cheap: asked for every layer."""
        return any(load.layerwise for load in tuple(self._open))

    def cancel(self, name: str) -> None:
        """Stop a load as soon as possible. Its `on_done` still comes: until then its blocks may be written."""
        self._follower.cancel(name)  # first: see `_end_follow`
        with self._changed:
            stopped = [load for load in self._open if load.name == name]
            for load in stopped:
                load.is_cancelled = load.is_aborted = True
                load.is_launched.set()
            self._changed.notify_all()
        for load in stopped:
            if load.num_settled is not None:
                self._end(load, 0)
        if self._lander is not None:
            self._lander.cancel(name)

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the threads; loads that have not begun, or that nobody waits for layer by layer any more, are reported
        with nothing in place. Idempotent."""
        self._follower.stop()
        with self._changed:
            self._closing = True
            for load in self._open:
                if load.layerwise:
                    load.is_cancelled = load.is_aborted = True
                    load.is_launched.set()
            self._changed.notify_all()
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(timeout_s)
            self._clock.join(timeout_s)
        with self._changed:
            left = list(self._open)
        for load in left:  # the store, or the step, has not answered, and nobody watches the clock any more
            self._end(load, 0, is_overdue=load.num_settled is None)
        self._follower.close(timeout_s)
        if not self._thread.is_alive():
            self.placer.close(timeout_s)
        if self._lander is not None:
            self._lander.close(timeout_s)

    # ---- the loader's thread ------------------------------------------------------------------------------------
    def _run(self) -> None:
        enter_thread(self._device)
        is_open = True
        while is_open or self._active:
            if is_open and not (self._active and self._active[-1].is_going):
                try:
                    load = self._queue.get(block=not self._active)
                except queue.Empty:
                    pass
                else:
                    is_open = load is not None
                    if load is not None:
                        self._begin(load)
                    continue
            start = time.monotonic()
            try:
                self._advance()
            except Exception:
                log.exception("loads failed; the engine computes what is missing")
                self._fail_all()
            self._seconds += time.monotonic() - start

    def _begin(self, load: Load) -> None:
        if self._closing:
            self._end(load, 0)
            return
        try:
            # Staging goes back in the order of its taking, and what this load takes goes back before that of others.
            while load.layerwise and not all(other.layerwise for other in self._active):
                self._advance()
        except Exception:
            log.exception("loads failed; the engine computes what is missing")
            self._fail_all()
        with self._changed:
            self._active.append(load)
        try:
            self.placer.begin(load)
            if load.layerwise:
                self._load_layers(load)
        except Exception:
            log.exception("a load failed; the engine computes what is missing")
            self._fail_all()

    def _load_layers(self, load: Load) -> None:
        """Begin a load that goes layer by layer, and wait until all of it was launched: then the next one may begin."""
        start = time.monotonic()
        self._pipeline.start_layers(load)
        if self.placer.runs_beside:
            with self._changed:
                load.is_handed = True
                self._changed.notify_all()
            load.is_launched.wait(max(0.0, load.deadline + GRACE_S - time.monotonic()))
        with self._driving:
            while not self.placer.runs_beside and self._pipeline.launch(load, wait=True):
                pass
            load.is_launched.set()
        load.is_going = False
        self._seconds += time.monotonic() - start

    def _advance(self) -> None:
        """One piece of work; then report the loads of which nothing is under way any more."""
        self._pipeline.advance(self._active[-1])
        while self._active and not self._active[0].is_going and not self._active[0].num_in_flight:
            load = self._active[0]
            self._finish(load, self._pipeline.settle_layers(load) if load.layerwise else load.num_done)

    def _finish(self, load: Load, num_done: int) -> None:
        """Nothing of a load is under way any more: report it, or let the lander bring the rest."""
        with self._changed:
            self._active.remove(load)
        for part in load.parts:
            if part.loan is not None:
                part.loan.release()
        load.parts = []
        with self._changed:
            if load.unawaited and load.is_cancelled:
                num_done = 0
            if load.unawaited and num_done:
                load.num_settled = num_done  # whoever waits for its last layer ends it
                return
        is_short = num_done < len(load.chunks) and load.may_land and self._pipeline.may_land and not load.layerwise
        if is_short and not load.gate.is_closed and not self._pipeline.is_over(load):
            self._pass_on(load, num_done)
        else:
            self._end(load, num_done)

    def _pass_on(self, load: Load, num_done: int) -> None:
        """Have the lander bring the rest. At any moment the load is in one of the two lists, so that no `cancel` misses
        it: the lander's lock is taken inside this one's, and never the other way round."""
        with self._changed:
            lander = self._lander = self._lander or self._make_lander()
            rest = Load(
                load.name,
                load.chunks[num_done:],
                load.block_ids,
                load.groups,
                False,
                load.asked,
                load.deadline,
                num_before=load.num_before + num_done,
                started_s=load.started_s,
            )
            rest.is_cancelled = load.is_cancelled
            if not load.gate.close():
                return  # its time was over a moment ago
            self._open.remove(load)
            self._changed.notify_all()
            is_stuck = lander._enlist(rest)
        lander._start(rest, is_stuck=is_stuck)

    def _fail_all(self) -> None:
        """The device, or the store, failed in the middle of several loads: none of them has got anything."""
        self._pipeline.fail()
        for load in list(self._active):
            self._pipeline.statuses[Status.MISS] += 1
            load.is_going = load.may_land = False
            self._finish(load, 0)

    # ---- the end of a load --------------------------------------------------------------------------------------
    def _end(self, load: Load, num_loaded: int, *, is_overdue: bool = False) -> None:
        """Report a load; the second report of one is not made."""
        if not load.gate.close():
            return
        load.is_launched.set()
        if is_overdue:
            self._pipeline.statuses[Status.TIMEOUT] += len(load.chunks)
            try:
                self.placer.synchronize()  # its last writes may be under way
            except Exception:
                log.exception("the device does not answer")
        with self._changed:
            self._open.remove(load)
            load.is_aborted = True
            self._changed.notify_all()
        if load.is_segment:
            self._follower.segment_ended(load, num_loaded)
        else:
            self._report(load.name, load.started_s, load.num_before + num_loaded)

    def _report(self, name: str, started_s: float, num_loaded: int) -> None:
        self._timings.append(time.monotonic() - started_s)
        self._on_done(name, num_loaded)

    def _end_follow(self, follow: Follow, num_placed: int) -> None:
        """Nothing of a followed load is under way any more: report it, or let the lander bring the rest."""
        is_over = follow.is_cancelled or self._closing or time.monotonic() >= follow.deadline
        if num_placed == len(follow.chunks) or is_over or not self._pipeline.may_land:
            self._report(follow.name, follow.started_s, num_placed)
            return
        rest = Load(
            follow.name,
            follow.chunks[num_placed:],
            follow.block_ids,
            [self._shard.layers],
            False,
            follow.asked,
            follow.deadline,
            num_before=num_placed,
            started_s=follow.started_s,
        )
        self._put_in(rest)
        if follow.is_cancelled:  # while it was handed over
            self.cancel(follow.name)

    def _watch(self) -> None:
        """The clock's thread: end loads that are overdue. Their store may answer in a minute, or never."""
        while True:
            with self._changed:
                if self._closing:
                    return
                now = time.monotonic()
                waiting = [load for load in self._open if load.num_settled is None]
                due = [load for load in waiting if now >= load.deadline + GRACE_S]
                if not due:
                    next_due = min((load.deadline + GRACE_S for load in waiting), default=None)
                    self._changed.wait(None if next_due is None else next_due - now)
            for load in due:
                log.warning("no answer from the pool in %.1f s; the engine computes what is missing", self._deadline_s)
                self._end(load, 0, is_overdue=True)
