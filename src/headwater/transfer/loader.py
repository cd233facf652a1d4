"""From the pool into the paged cache: read and verified in the background, then scattered into the request's blocks.

Where the store's memory can be addressed, several threads carry small pieces, which are scattered while they are in
the processor's cache; from other stores many chunks are read at once. A load may go layer by layer, in groups, while
the layers before are computed. Every load ends by its deadline, also where the store does not answer at all: what comes
late is thrown away before it touches the cache.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import Shard
from headwater.pool.space import Space
from headwater.stores.base import Status, Tiles
from headwater.transfer.carriers import MAX_CARRIERS, Carriers, Gate
from headwater.transfer.convert import Span, plan_spans, scatter
from headwater.transfer.layers import CPU_GROUP_BYTES, layer_groups
from headwater.transfer.lent import Lent
from headwater.transfer.staging import Slots
from headwater.transfer.view import PagedView

log = logging.getLogger(__name__)

PIECE_BYTES = 4 << 20
"""Large enough that the calls around a piece do not count, and small enough that it stays in the processor's cache."""
GRACE_S = 0.25
"""How long past its deadline a load may take to end by itself; then it is ended."""


@dataclass
class _Load:
    name: str
    chunks: Sequence[ChunkRef]
    block_ids: npt.NDArray[np.int32]
    layerwise: bool
    deadline: float
    num_layers: int = 0
    """Layers of the shard, from its first on, that are in place (or will never be)."""
    is_cancelled: bool = False
    gate: Gate = field(default_factory=Gate)
    """Closed when the load ends: from then on nothing may be written into its blocks."""


class Loader:
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
        group_bytes: int = CPU_GROUP_BYTES,
    ) -> None:
        self._space = space
        self._view = view
        self._shard = shard
        self._deadline_s = deadline_s
        self._group_bytes = group_bytes
        self._on_done = on_done
        layers, heads, tile = shard.local_shape(space.spec, 0, space.chunk_tokens)
        self._layer_bytes = heads * tile
        self._is_mapped = space.mapped and shard.split.parts == 1
        self._carriers = Carriers() if self._is_mapped else Carriers(1)
        if self._is_mapped:
            piece_bytes = max(PIECE_BYTES, self._layer_bytes)
            self._slots = Slots(piece_bytes, MAX_CARRIERS * piece_bytes)
        else:
            self._slots = Slots(layers * heads * tile, staging_bytes)
        self._queue: queue.SimpleQueue[_Load | None] = queue.SimpleQueue()
        self._open: list[_Load] = []
        self._changed = threading.Condition()
        """Guards `_open`; told whenever a load has got further."""
        self._closing = False
        self._current: _Load | None = None
        """What the receiver's thread works on."""
        self.statuses: Counter[Status] = Counter()
        self.num_bytes = 0
        self.seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="headwater-loader", daemon=True)
        self._clock = threading.Thread(target=self._watch, name="headwater-load-clock", daemon=True)
        self._thread.start()
        self._clock.start()

    def load(
        self, name: str, chunks: Sequence[ChunkRef], block_ids: npt.NDArray[np.int32], *, layerwise: bool = False
    ) -> None:
        """Bring these chunks into those blocks; `on_done(name, chunks in place)` follows in any case, once.

        With `layerwise`, layers come in order, and `wait_layer` says when one is there.
        """
        load = _Load(name, chunks, block_ids, layerwise, time.monotonic() + self._deadline_s)
        with self._changed:
            self._open.append(load)
            self._changed.notify_all()
            is_stuck = self._current is not None and self._current.gate.is_closed
        if is_stuck:  # in a load that was ended without it: the next one would wait for nothing
            self._give_up(load)
        else:
            self._queue.put(load)

    def wait_layer(self, layer: int) -> None:
        """Wait until the loads that go layer by layer have brought this layer (of the whole model), or have ended."""
        number = layer - self._shard.layers.start
        with self._changed:
            self._changed.wait_for(lambda: all(load.num_layers > number for load in self._open if load.layerwise))

    @property
    def has_open(self) -> bool:
        """Whether a load that goes layer by layer has not ended."""
        with self._changed:
            return any(load.layerwise for load in self._open)

    def cancel(self, name: str) -> None:
        """Stop a load as soon as possible. Its `on_done` still comes: until then its blocks may be written."""
        with self._changed:
            for load in self._open:
                load.is_cancelled = load.is_cancelled or load.name == name

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the thread; loads that have not begun are reported with nothing in place. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(timeout_s)
            self._clock.join(timeout_s)
            self._carriers.close(timeout_s)
        with self._changed:
            left = list(self._open)
        for load in left:  # the store has not answered, and nobody watches the clock any more
            self._give_up(load)

    # ---- the receiver's thread ----------------------------------------------------------------------------------
    def _run(self) -> None:
        while (load := self._queue.get()) is not None:
            start = time.monotonic()
            num_loaded = 0
            self._current = load
            try:
                num_loaded = 0 if self._closing else self._load(load)
            except Exception:
                log.exception("a load failed; the engine computes what is missing")
                self.statuses[Status.MISS] += 1
            finally:
                self._current = None
                self.seconds += time.monotonic() - start
                self._end(load, num_loaded)

    def _load(self, load: _Load) -> int:
        """Chunks in place in all layers, counted from the first: what follows a missing one is of no use."""
        groups = [self._shard.layers]
        if load.layerwise:
            groups = layer_groups(self._shard.layers, self._layer_bytes * len(load.chunks), self._group_bytes)
        good = len(load.chunks)
        for layers in groups:
            good = self._load_layers(load, layers, load.chunks[:good])
            if not good:
                break
            with self._changed:
                load.num_layers += len(layers)
                self._changed.notify_all()
        return good

    def _load_layers(self, load: _Load, layers: range, chunks: Sequence[ChunkRef]) -> int:
        """Chunks of which these layers are in place, counted from the first."""
        if self._is_mapped and chunks:
            return self._carry_layers(load, layers, chunks)
        shard = self._shard if layers == self._shard.layers else replace(self._shard, layers=layers)
        done = 0
        while done < len(chunks):
            left_s = load.deadline - time.monotonic()
            if left_s <= 0 or load.is_cancelled or load.gate.is_closed:
                break
            batch = chunks[done : done + self._slots.count]
            tiles = [self._slots.bytes_of(slot, self._shape(chunk, shard)) for slot, chunk in enumerate(batch)]
            statuses = self._space.read(batch, shard, tiles, deadline_s=left_s)
            good = next((i for i, status in enumerate(statuses) if status is not Status.OK), len(batch))
            # A chunk is counted once: with the first layers, or where it fails.
            self.statuses.update(statuses if layers.start == self._shard.layers.start else statuses[good:])
            if good and not self._put(load, shard, batch[:good], tiles[:good]):
                break
            done += good
            if good < len(batch):
                break
        return done

    def _carry_layers(self, load: _Load, layers: range, chunks: Sequence[ChunkRef]) -> int:
        """The same in pieces of a few layers of one chunk, chunk after chunk, by all carriers."""
        step = max(1, PIECE_BYTES // self._layer_bytes)
        pieces = [layers[first : first + step] for first in range(0, len(layers), step)]
        shards = [replace(self._shard, layers=piece) for piece in pieces]
        outcomes = [Status.OK] * len(chunks)
        whole = replace(self._shard, layers=layers)
        with Lent(self._space, self._view, whole, chunks, load.block_ids) as lent:

            def carry(number: int) -> bool:
                place, part = divmod(number, len(shards))
                chunk, piece = chunks[place], shards[part]
                left_s = load.deadline - time.monotonic()
                if left_s <= 0 or load.is_cancelled:
                    return False
                (slot,) = self._slots.take(1)
                try:
                    tiles = self._slots.bytes_of(slot, self._shape(chunk, piece))
                    if lent.copy(place, piece, tiles):
                        return self._enter(load, tiles.nbytes, partial(lent.put, place, piece, tiles))
                    # Not to be seen in place, or not what it should be: the pool finds out which.
                    (outcome,) = self._space.read([chunk], piece, tiles[None], deadline_s=left_s)
                    if outcome is not Status.OK:
                        outcomes[place] = outcome
                        return False
                    return self._put(load, piece, [chunk], [tiles])
                finally:
                    self._slots.give_back([slot])

            good = self._carriers.run(len(chunks) * len(shards), carry) // len(shards)
        # A chunk is counted once: with the first layers, or where it fails.
        self.statuses.update(outcomes[: good + 1] if layers.start == self._shard.layers.start else outcomes[good:][:1])
        return good

    def _put(self, load: _Load, shard: Shard, chunks: Sequence[ChunkRef], tiles: Sequence[Tiles]) -> bool:
        """Write into the request's blocks, if they are still its own."""
        spans = [Span(load.block_ids, chunk.first_token, chunk.num_tokens) for chunk in chunks]
        plan = plan_spans(self._view, shard, spans)
        num_bytes = sum(tile.nbytes for tile in tiles)
        return self._enter(load, num_bytes, partial(scatter, plan, shard.layers, tiles))

    def _enter(self, load: _Load, num_bytes: int, write: Callable[[], None]) -> bool:
        if not load.gate.enter():
            return False
        try:
            write()
        finally:
            load.gate.leave()
        self.num_bytes += num_bytes
        return True

    def _end(self, load: _Load, num_loaded: int) -> None:
        """Say that a load is done; who says it second says nothing."""
        if not load.gate.close():
            return
        with self._changed:
            self._open.remove(load)
            self._changed.notify_all()
        self._on_done(load.name, num_loaded)

    def _give_up(self, load: _Load) -> None:
        self.statuses[Status.TIMEOUT] += len(load.chunks)
        self._end(load, 0)

    def _shape(self, chunk: ChunkRef, shard: Shard) -> tuple[int, int, int]:
        return shard.local_shape(self._space.spec, chunk.first_token, chunk.num_tokens)

    # ---- the clock's thread -------------------------------------------------------------------------------------
    def _watch(self) -> None:
        """End loads that are overdue: their store may answer in a minute, or never."""
        while True:
            with self._changed:
                if self._closing:
                    return
                now = time.monotonic()
                due = [load for load in self._open if now >= load.deadline + GRACE_S]
                if not due:
                    next_due = min((load.deadline + GRACE_S for load in self._open), default=None)
                    self._changed.wait(None if next_due is None else next_due - now)
            for load in due:
                log.warning("no answer from the pool in %.1f s; the engine computes what is missing", self._deadline_s)
                self._give_up(load)
