"""Loads that follow chunks which somebody is still filling: a fetch from a lower tier, another server, a peer.

The index says how far a chunk has come; nobody sends a message. Whatever has come is loaded at once as an ordinary load
of some layers of some chunks (a *segment*), verified like any other, while the rest is filled. A followed load ends
when all is in place, at its deadline, when nothing more comes, or when something is wrong; only chunks of which every
layer is in place count.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from headwater.errors import HeadwaterError
from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import Shard
from headwater.pool.space import Space
from headwater.pool.wait import Wait
from headwater.stores.base import Arrived
from headwater.transfer.load_job import Load
from headwater.transfer.streams import DeviceEvent

log = logging.getLogger(__name__)

MIN_POLL_S, MAX_POLL_S = 0.001, 0.01
"""The longer nothing has come, the rarer it is looked for."""
MAX_SEGMENTS = 2
"""Under way at a time for one load: one is placed, one waits. What comes meanwhile goes together in the next."""
SURVEY_CHUNKS = 64
"""Looked at together where the first of them has got further."""
_TRIES = 3
"""A chunk that was there when it was looked at, and not when it was lent, so often: somebody removes it each time."""


@dataclass(eq=False)
class _Progress:
    """How far one chunk is."""

    record_id: int = 0
    num_issued: int = 0
    """Layers whose load was begun, from the first on."""
    num_placed: int = 0
    num_tries: int = 0


@dataclass(eq=False)
class Follow:
    """A request's chunks, some of them still being filled, on their way into its blocks."""

    name: str
    chunks: Sequence[ChunkRef]
    block_ids: npt.NDArray[np.int32]
    asked: DeviceEvent
    wait: Wait
    started_s: float
    progress: list[_Progress] = field(init=False)
    front: int = 0
    """Chunks before it are wholly issued."""
    segments: dict[int, tuple[Load, int]] = field(default_factory=dict)
    """Under way: the load, and the number of its first chunk, by its id()."""
    advanced_s: float = field(init=False)
    """When it last got further."""
    longest_s: float = 0.0
    """The longest time between two advances."""
    is_cancelled: bool = False
    is_stopped: bool = False
    """Nothing more is loaded for it: something was wrong, or nothing more comes."""

    def __post_init__(self) -> None:
        self.progress = [_Progress() for _ in self.chunks]
        self.advanced_s = self.started_s

    @property
    def deadline(self) -> float:
        """When it ends at the latest."""
        return self.started_s + self.wait.wait_s

    def num_placed(self, num_layers: int) -> int:
        """Chunks, from the first on, of which all layers are in place."""
        return next((i for i, one in enumerate(self.progress) if one.num_placed < num_layers), len(self.progress))

    def advance(self, now: float) -> None:
        """It has got further."""
        self.longest_s, self.advanced_s = max(self.longest_s, now - self.advanced_s), now

    def is_hopeless(self, next_one: Arrived, now: float) -> bool:
        """Whether nothing has come for too long."""
        idle_s = now - self.advanced_s
        if next_one.is_announced:
            return idle_s >= self.wait.stall_s
        return idle_s >= (max(self.wait.start_s, 4 * self.longest_s) if self.front else self.wait.start_s)


class LoadFollower:
    """The followed loads of one loader. Has a thread of its own while there are any."""

    def __init__(
        self,
        space: Space,
        shard: Shard,
        begin: Callable[[Load], None],
        finish: Callable[[Follow, int], None],
    ) -> None:
        """`begin` starts a segment, whose end must come to `segment_ended`; `finish(follow, chunks in place)` follows
        for each follow in any case, once, when nothing of it is under way."""
        self._space = space
        self._shard = shard
        self._begin = begin
        self._finish = finish
        self._changed = threading.Condition()
        """Guards everything. Taken before the loader's own lock, and never while that is held."""
        self._follows: list[Follow] = []
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def add(self, follow: Follow) -> None:
        """Follow these chunks from now on."""
        with self._changed:
            is_closing = self._is_closing
            if not is_closing:
                self._follows.append(follow)
            if self._thread is None and not is_closing:
                self._thread = threading.Thread(target=self._run, name="headwater-follow", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        if is_closing:
            self._finish(follow, 0)

    def cancel(self, name: str) -> None:
        """Stop following as soon as possible; the end still comes."""
        with self._changed:
            for follow in self._follows:
                follow.is_cancelled |= follow.name == name
            self._changed.notify_all()

    def stop(self) -> None:
        """Begin no further segment; follows end when theirs have ended."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """Wait for the end of all follows; their segments must have ended. Idempotent."""
        self.stop()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def segment_ended(self, segment: Load, num_good: int) -> None:
        """A segment is over, with so many of its chunks in place. Called from any thread."""
        with self._changed:
            follow = next((one for one in self._follows if id(segment) in one.segments), None)
            if follow is None:
                return
            _, first = follow.segments.pop(id(segment))
            start = self._shard.layers.index(segment.layers[0])
            if start:
                num_good = self._num_same(follow, first, num_good)
            for one in follow.progress[first : first + num_good]:
                if one.num_placed == start:  # else a segment before this one was lost
                    one.num_placed = start + len(segment.layers)
            if num_good < len(segment.chunks):
                follow.is_stopped |= segment.is_damaged
                self._take_back(follow, first + num_good)
            self._changed.notify_all()

    def _num_same(self, follow: Follow, first: int, count: int) -> int:
        """How many of some chunks, from the first on, are still the copies that they were begun with. One that is has
        been so all the time; another one's layers must not follow those of the first."""
        try:
            found = self._space.arrived(follow.chunks[first : first + count], self._shard)
        except HeadwaterError:
            return 0
        progress = follow.progress[first : first + count]
        differ = (i for i, (now, one) in enumerate(zip(found, progress, strict=True)) if now.record_id != one.record_id)
        return next(differ, count)

    @staticmethod
    def _take_back(follow: Follow, number: int) -> None:
        """A chunk was not there any more when it was lent, or the load is over: look at it, and at those after it,
        again."""
        for one in follow.progress[number:]:
            one.num_issued = one.num_placed
        follow.front = min(follow.front, number)
        follow.progress[number].num_tries += 1
        follow.is_stopped |= follow.progress[number].num_tries >= _TRIES

    # ---- the thread ---------------------------------------------------------------------------------------------
    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._follows:
                    if self._is_closing:
                        return
                    self._changed.wait()
                follows = list(self._follows)
            is_busy = False
            for follow in follows:
                try:
                    is_busy |= self._step(follow)
                except HeadwaterError as error:
                    log.warning("a load stopped following chunks that are being filled: %s", error)
                    follow.is_stopped = True
                except Exception:
                    log.exception("a load stopped following chunks that are being filled")
                    follow.is_stopped = True
            if not is_busy:
                now = time.monotonic()
                idle_s = min([now - follow.advanced_s for follow in follows], default=0.0)
                with self._changed:
                    self._changed.wait(max(MIN_POLL_S, min(MAX_POLL_S, idle_s / 8)))

    def _step(self, follow: Follow) -> bool:
        """Begin what has come, or end the follow; whether there was anything to do."""
        now = time.monotonic()
        with self._changed:
            follow.is_stopped |= now >= follow.deadline or follow.is_cancelled or self._is_closing
            if not follow.is_stopped and follow.front < len(follow.chunks):
                return self._load_more(follow, now)
            if follow.segments:
                return False
        try:
            self._finish(follow, follow.num_placed(len(self._shard.layers)))
        finally:
            with self._changed:  # last: until then it can be cancelled
                self._follows.remove(follow)
        return True

    def _load_more(self, follow: Follow, now: float) -> bool:
        """Begin to load what has come since the last look; whether there was anything."""
        if len(follow.segments) >= MAX_SEGMENTS:
            return False
        front = follow.front
        (first,) = self._space.arrived(follow.chunks[front : front + 1], self._shard)
        if not self._has_more(follow, front, first):
            follow.is_stopped |= not follow.segments and follow.is_hopeless(first, now)
            return False
        rest = self._space.arrived(follow.chunks[front + 1 : front + SURVEY_CHUNKS], self._shard)
        start, stop, count = follow.progress[front].num_issued, first.num_layers, 1
        for number, arrived in enumerate(rest, front + 1):
            is_alike = self._has_more(follow, number, arrived) and arrived.num_layers == stop
            if not is_alike or follow.progress[number].num_issued != start:
                break
            count += 1
        follow.advance(now)
        self._load(follow, range(front, front + count), range(start, stop))
        return True

    def _has_more(self, follow: Follow, number: int, arrived: Arrived) -> bool:
        """Whether a chunk has layers to be loaded. Another copy than the one before is loaded from its first layer on,
        once nothing of the old one is under way."""
        one = follow.progress[number]
        if one.num_issued and arrived.record_id not in (0, one.record_id):
            if follow.segments:
                return False
            one.num_issued = one.num_placed = 0
        if not one.num_issued:
            one.record_id = arrived.record_id
        return arrived.num_layers > one.num_issued

    def _load(self, follow: Follow, numbers: range, rows: range) -> None:
        chunks = follow.chunks[numbers.start : numbers.stop]
        layers = self._shard.layers[rows.start : rows.stop]
        segment = Load(
            follow.name,
            chunks,
            follow.block_ids,
            [layers],
            False,
            follow.asked,
            follow.deadline,
            started_s=follow.started_s,
            may_land=False,
            is_segment=True,
        )
        follow.segments[id(segment)] = segment, numbers.start
        for one in follow.progress[numbers.start : numbers.stop]:
            one.num_issued = rows.stop
        if rows.stop == len(self._shard.layers):
            follow.front = numbers.stop
        self._begin(segment)
