"""Fetching: chunks of lower tiers into reserved extents of the first one, in the background.

A fetch goes window by window, in chain order, so that a chunk's parent is always there or being filled. Two windows
are filled at a time, and each is committed as soon as it and those before it are full, so that a load can follow. It
commits the checksums that the lower tier's record or manifest gave, unverified: placing a chunk in a cache verifies it.
Whatever cannot be kept (no room, no parent, larger than half of the first tier) is left to the load, which reads it
from further down into memory of its own.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np

from headwater.errors import HeadwaterError, StoreClosedError
from headwater.kv.encoding import stored_tile_bytes
from headwater.kv.format import checksum
from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import whole_shard
from headwater.stores.base import Filled, Filling, Form, Lease, Piece, RootRef, Status, Tiles
from headwater.stores.embedded.store import EmbeddedStore
from headwater.stores.embedded.ticket import Ticket
from headwater.stores.tiers.lower import LowerTier, recheck
from headwater.stores.workers import Workers, run_in_threads

log = logging.getLogger("headwater")

WINDOW_BYTES = 128 << 20
"""Reserved, filled and committed together, unless an eighth of the pending room is less."""
_THREADS = 2
"""Windows of one fetch that are filled at a time: the source is not idle while a window is reserved or committed."""
_THREADS = 2
_RECHECK_S = 5.0
_BUSY_PATIENCE_S, _BUSY_POLL_S = 0.1, 0.002


class _Window(NamedTuple):
    """Chunks that are brought together."""

    number: int
    chunks: Sequence[ChunkRef]
    tickets: Sequence[Ticket]
    sources: Sequence[tuple[int, Form]]
    """By chunk, up to the first that no tier has: which tier has it, and how it is stored there."""


class Fetcher:
    """All fetches of one pool in one process."""

    def __init__(self, front: EmbeddedStore, tiers: Sequence[LowerTier]) -> None:
        self.front = front
        self.tiers = tiers
        self._workers = Workers(_THREADS, "headwater-fetch")
        self._pid = os.getpid()

    def start(self, root: RootRef, chunks: Sequence[ChunkRef], deadline_s: float) -> TierFetch | None:
        """See `stores.base.Store.fetch`."""
        there = self.front.exists(root, chunks)
        num_there = there.index(False) if False in there else len(chunks)
        if num_there == len(chunks):
            return None
        fetch = TierFetch(self, root, chunks, num_there, time.monotonic() + deadline_s)
        if self._can_keep(root, chunks[num_there:]):
            self._post(fetch.run)
        else:
            fetch.end()
        return fetch

    def recheck(self, root: RootRef, chunk: ChunkRef) -> None:
        """Have a chunk that was damaged in the first tier looked at in the others. Does not wait."""
        self._post(partial(recheck, self.tiers, root, chunk, _RECHECK_S))

    def _post(self, work: Callable[[], None]) -> None:
        if self._pid != os.getpid():  # a forked child has none of its parent's threads
            self._workers, self._pid = Workers(_THREADS, "headwater-fetch"), os.getpid()
        self._workers.post(work)

    def _can_keep(self, root: RootRef, chunks: Sequence[ChunkRef]) -> bool:
        """Whether the first tier should take these at all: their parent is there, and they do not sweep it clean."""
        first, size = chunks[0], sum([root.space.spec.extent_bytes(chunk.num_tokens) for chunk in chunks])
        if 2 * size > self.front.data_bytes:
            return False
        return first.number == 0 or self.front.locate(first.parent) is not None

    def close(self) -> None:
        """Let the threads end when they are free. Idempotent."""
        self._workers.close()


class TierFetch:
    """One fetch. See `stores.base.Fetch`."""

    def __init__(
        self, fetcher: Fetcher, root: RootRef, chunks: Sequence[ChunkRef], num_there: int, deadline: float
    ) -> None:
        self._front, self._tiers = fetcher.front, fetcher.tiers
        self._root = root
        self._chunks = chunks
        self._first = self._at = self._next = num_there
        """Chunks before `_at` are in the first tier; those before `_next` are there, or being brought."""
        self._num_windows = self._turn = 0
        """Windows that were begun, and those that have ended: they end in order."""
        self._is_short = False
        """A window could not be brought whole: what comes after it is of no use."""
        self._order = threading.Condition()
        self._deadline = deadline
        self._num_kept = 0
        self._lease: Lease | None = None
        self._ages: dict[bytes, int] = {}
        """By key: when the chunks that were fetched had last been used, where they came from."""
        self._from: dict[bytes, LowerTier] = {}
        self._lock = threading.Lock()
        self._is_released = False
        self._started_s = self._begun_s = self._ended_s = time.monotonic()
        self._done = threading.Event()

    # ---- for whoever asked --------------------------------------------------------------------------------------
    @property
    def is_done(self) -> bool:
        """See `stores.base.Fetch`."""
        return self._done.is_set()

    @property
    def num_kept(self) -> int:
        """See `stores.base.Fetch`."""
        return self._num_kept

    @property
    def seconds(self) -> float:
        """See `stores.base.Fetch`."""
        return (self._ended_s if self.is_done else time.monotonic()) - self._started_s

    @property
    def left_s(self) -> float:
        """See `stores.base.Fetch`."""
        if self.is_done:
            return 0.0
        num_brought = self._at - self._first
        if not num_brought:
            return math.inf
        return (time.monotonic() - self._begun_s) / num_brought * (len(self._chunks) - self._at)

    def wait(self, deadline: float) -> bool:
        """See `stores.base.Fetch`."""
        return self._done.wait(max(0.0, deadline - time.monotonic()))

    def release(self) -> None:
        """See `stores.base.Fetch`. Chunks that were used once are as old as they were: one read of a large lower tier
        must not push everything else out of the first one."""
        with self._lock:
            is_first, self._is_released = not self._is_released, True
            lease, self._lease, self._num_kept = self._lease, None, 0
            ages = dict(self._ages) if is_first else {}  # the thread may be adding to them
        try:
            if ages:
                self._front.redate(ages)
        except StoreClosedError:
            return  # and everything with it
        finally:
            if lease is not None:
                lease.release()

    # ---- in a thread --------------------------------------------------------------------------------------------
    def run(self) -> None:
        """Bring everything, window by window."""
        self._begun_s = time.monotonic()
        try:
            self._hold()
            num_threads = _THREADS if self._front.mapped else 1
            run_in_threads([self._bring_windows] * num_threads, num_threads)
        except Exception:
            log.exception("a fetch failed; the rest is read from lower tiers directly")
        finally:
            self._ended_s = time.monotonic()
            self._done.set()

    def _bring_windows(self) -> None:
        """Bring one window after another, while another thread brings those between them."""
        while (turn := self._begin()) is not None:
            number, window, tickets, sources = turn
            fillings = dict[int, Filling]()
            num_kept = 0
            try:
                with _told():
                    fillings = self._fill(window, sources, tickets) if self._front.mapped else {}
                self._await_turn(number)
                with _told():
                    num_kept = self._settle(window, sources, tickets, fillings)
            finally:
                with self._order:
                    self._is_short |= num_kept < len(window)
                    self._turn = number + 1
                    self._order.notify_all()

    def _await_turn(self, number: int) -> None:
        with self._order:
            self._order.wait_for(lambda: self._turn == number)

    def _begin(self) -> _Window | None:
        """Reserve the next window: one after another, since a chunk needs its parent's record. Where there is no room
        beside the windows under way, it waits for the end of one."""
        with self._order:
            while True:
                is_over = self._is_short or self._is_released or time.monotonic() >= self._deadline
                if is_over or self._next >= len(self._chunks):
                    return None
                window, turn = self._open_window(), self._turn
                if turn == self._num_windows or not any(ticket.status == Status.FULL for ticket in window.tickets):
                    self._num_windows += 1
                    self._next += len(window.chunks)
                    return window
                self._abort(window.tickets)
                while self._turn == turn:
                    self._order.wait()

    def _open_window(self) -> _Window:
        window = self._window()
        sources, tickets = list[tuple[int, Form]](), list[Ticket]()
        with _told():
            found = self._sources(window)
            sources = [source for source in found[: [*found, None].index(None)] if source is not None]
            if self._front.mapped:
                tickets = self._reserve(window[: len(sources)], [form for _, form in sources])
        return _Window(self._num_windows, window, tickets, sources)

    def _abort(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            if ticket.status == Status.OK:
                ticket.abort()  # not committed: it could never be complete
        self._front.close_all(tickets)

    def _settle(
        self,
        window: Sequence[ChunkRef],
        sources: Sequence[tuple[int, Form]],
        tickets: Sequence[Ticket],
        fillings: dict[int, Filling],
    ) -> int:
        """Make a window visible, in its turn; how many of its chunks, from the first on, are in the first tier now."""
        if not self._front.mapped:
            num_kept = 0 if self._is_short else self._write(window, sources)
        else:
            try:
                if not self._is_short:
                    self._commit(tickets, fillings)
            finally:
                self._abort(tickets)
            num_kept = 0 if self._is_short else self._num_complete(window, tickets)
        self._at += num_kept
        self._hold()
        return num_kept

    def end(self) -> None:
        """Nothing can be brought: hold what is there."""
        self._hold()
        self._done.set()

    def _hold(self) -> None:
        """Keep what is there from eviction: a lease on the last chunk keeps its whole prefix."""
        if not self._at:
            return
        lease = self._front.lease(self._root, self._chunks[self._at - 1].key)
        with self._lock:
            old, self._lease = self._lease, lease
            self._num_kept = self._at if lease is not None else 0
            if self._is_released:
                lease, self._lease, self._num_kept = self._lease, None, 0
            else:
                lease = None
        for ended in (old, lease):
            if ended is not None:
                ended.release()

    def _window(self) -> Sequence[ChunkRef]:
        extent = self._root.space.spec.extent_bytes(self._root.space.chunk_tokens)
        most = max(1, min(WINDOW_BYTES, self._front.max_pending_bytes // (4 * _THREADS)) // extent)
        return self._chunks[self._next : self._next + most]

    def _sources(self, window: Sequence[ChunkRef], after: int = -1) -> list[tuple[int, Form] | None]:
        """By chunk: the nearest tier (after some tier) that has it, and how it is stored there."""
        found: list[tuple[int, Form] | None] = [None] * len(window)
        for number, tier in enumerate(self._tiers):
            absent = [i for i, source in enumerate(found) if source is None]
            if number <= after or not absent or not tier.usable:
                continue
            for i, form in zip(absent, tier.forms([window[i] for i in absent]), strict=True):
                if form is not None and self._is_defined(window[i], form):
                    found[i] = number, form
        return found

    def _is_defined(self, chunk: ChunkRef, form: Form) -> bool:
        """Whether a chunk of this model can be stored so at all: what another host says is not to be relied on."""
        return stored_tile_bytes(self._root.space.spec, chunk.num_tokens, form.encoding) > 0

    def _reserve(self, window: Sequence[ChunkRef], forms: Sequence[Form]) -> list[Ticket]:
        """Extents for as many chunks as there is room for, in chain order."""
        left_s = max(0.0, self._deadline - time.monotonic())
        return self._front.reserve(self._root, window, forms, left_s, exclusive=True) if window else []

    def _fill(
        self, window: Sequence[ChunkRef], sources: Sequence[tuple[int, Form]], tickets: Sequence[Ticket]
    ) -> dict[int, Filling]:
        """Have the tiers fill the extents; a chunk that one tier has lost comes from the next. By number in the
        window: those that are filled."""
        filled = dict[int, Filling]()
        todo: dict[int, tuple[int, Form] | None] = {
            i: source for i, source in enumerate(sources[: len(tickets)]) if tickets[i].status == Status.OK
        }
        while todo:
            for number, tier in enumerate(self._tiers):
                mine = [i for i, source in todo.items() if source is not None and source[0] == number]
                ready = [(i, extent) for i in mine if (extent := tickets[i].tiles) is not None]
                if ready:
                    filled |= self._fill_from(tier, window, ready)
            lost = {i: source for i, source in todo.items() if i not in filled and source is not None}
            others = {i: self._sources([window[i]], after=source[0])[0] for i, source in lost.items()}
            todo = {i: other for i, other in others.items() if other is not None and other[1] == lost[i][1]}
        return filled

    def _fill_from(
        self, tier: LowerTier, window: Sequence[ChunkRef], ready: Sequence[tuple[int, Tiles]]
    ) -> dict[int, Filling]:
        chunks = [window[i] for i, _ in ready]
        ages = tier.store.ages([chunk.key for chunk in chunks])
        fillings = tier.fill(self._root, chunks, [extent for _, extent in ready], self._deadline)
        good = dict[int, Filling]()
        for (i, extent), filling, age in zip(ready, fillings, ages, strict=True):
            if filling.status == Status.OK:
                good[i] = filling
                with self._lock:
                    self._ages[window[i].key], self._from[window[i].key] = age, tier
                tier.counts.add(hits=1, hit_bytes=extent.nbytes)
            else:
                tier.counts.add(misses=1)
        return good

    def _commit(self, tickets: Sequence[Ticket], fillings: dict[int, Filling]) -> None:
        """Note the checksums of what was filled, up to the first chunk that was not: without it, nobody could find the
        others. A ticket's status becomes EXISTS where its chunk is complete."""
        spec, commits, owners = self._root.space.spec, list[Filled](), list[int]()
        missing = [i for i, ticket in enumerate(tickets) if ticket.status == Status.OK and i not in fillings]
        for i in range(missing[0] if missing else len(tickets)):
            if i in fillings:
                sums, split = fillings[i].sums, fillings[i].form.split
                assert sums is not None
                for part, column in enumerate(np.ascontiguousarray(sums.reshape(-1, split.parts).T)):
                    commits.append(Filled(tickets[i], range(spec.num_layers), range(spec.num_kv_heads), part, column))
                    owners.append(i)
        outcome = self._front.commit(commits, max(0.1, self._deadline - time.monotonic()))
        lost = {i for i, status in zip(owners, outcome, strict=True) if status != Status.OK}
        for i in dict.fromkeys(owners):
            if i not in lost:
                tickets[i].status = Status.EXISTS
                self._from[tickets[i].chunk.key].counts.add(fetched=1)
        with self._lock:
            ages = {tickets[i].chunk.key: self._ages[tickets[i].chunk.key] for i in dict.fromkeys(owners)}
        self._front.redate(ages)

    def _num_complete(self, window: Sequence[ChunkRef], tickets: Sequence[Ticket]) -> int:
        """Chunks, from the first on, that are complete now. One that another server fills is waited for, as long as its
        commits advance."""
        for number, ticket in enumerate(tickets):
            if ticket.status == Status.BUSY and not self._wait_for(window[number]):
                return number
            if ticket.status not in (Status.EXISTS, Status.BUSY):
                return number
        return len(tickets)

    def _wait_for(self, chunk: ChunkRef) -> bool:
        seen, patience = self._front.progress(chunk.key), time.monotonic() + _BUSY_PATIENCE_S
        while time.monotonic() < min(patience, self._deadline) and not self._is_released:
            if self._front.exists(self._root, [chunk])[0]:
                return True
            now = self._front.progress(chunk.key)
            if now is None:
                break
            if now != seen:
                seen, patience = now, time.monotonic() + _BUSY_PATIENCE_S
            time.sleep(_BUSY_POLL_S)
        return self._front.exists(self._root, [chunk])[0]

    def _write(self, window: Sequence[ChunkRef], sources: Sequence[tuple[int, Form]]) -> int:
        """Into a first tier that cannot be mapped: through memory of this process, verified before it is written, since
        writing makes new checksums."""
        spec, shard = self._root.space.spec, whole_shard(self._root.space.spec)
        for number, (chunk, (tier, form)) in enumerate(zip(window, sources, strict=False)):
            if time.monotonic() >= self._deadline:
                return number
            size = stored_tile_bytes(spec, chunk.num_tokens, form.encoding)
            tiles = np.empty((spec.num_layers, spec.num_kv_heads, size), np.uint8)
            good = self._fill_from(self._tiers[tier], window, [(number, tiles)])
            if number not in good or good[number].form.split.parts > 1 or not _is_right(tiles, good[number]):
                return number
            left_s = max(0.0, self._deadline - time.monotonic())
            piece = Piece(chunk, shard, tiles, encoding=good[number].form.encoding)
            if not self._front.write(self._root, [piece], left_s)[0].stored:
                return number
            self._from[chunk.key].counts.add(fetched=1)
        return len(sources)


@contextmanager
def _told() -> Iterator[None]:
    """What fails ends the fetch, and is told here: the window that it concerns comes up short."""
    try:
        yield
    except HeadwaterError as error:
        log.warning("a fetch ended early: %s", error)
    except Exception:
        log.exception("a fetch failed; the rest is read from lower tiers directly")


def _is_right(tiles: Tiles, filling: Filling) -> bool:
    flat = tiles.reshape(-1, tiles.shape[-1])
    return filling.sums is not None and [checksum(tile) for tile in flat] == filling.sums.ravel().tolist()
