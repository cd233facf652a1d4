"""A pool of several tiers, fastest first: written to the first, found and read in all.

The first tier is an embedded store, and everything that needs its promises happens there: ranks fill its extents
together, leases and pins hold its chunks. Complete chunks are copied down (see `copier`); chunks that are found further
down are fetched into the first tier (see `fetch`), or read where they are.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from headwater.errors import BackendError, DeadlineError
from headwater.kv.hashing import ChunkRef
from headwater.kv.spec import KVSpec
from headwater.kv.topology import Shard
from headwater.stores.base import (
    Arrived,
    Fetch,
    Filled,
    Form,
    Lease,
    Loan,
    MappedStore,
    Piece,
    Place,
    Progress,
    Reservation,
    RootRef,
    Run,
    SpaceRef,
    Status,
    Store,
    Tiles,
)
from headwater.stores.embedded.layout import Record
from headwater.stores.embedded.store import EmbeddedStore
from headwater.stores.events import EventKind, Follower
from headwater.stores.remote.announce import ORIGIN_BYTES
from headwater.stores.stats import ChunkInfo, StoreStats, TierStats, VerifyReport
from headwater.stores.tiers.copier import Copier, NoCopier
from headwater.stores.tiers.fetch import Fetcher
from headwater.stores.tiers.listener import TierListener
from headwater.stores.tiers.lower import Counts, LowerTier, RemoteTier
from headwater.stores.tiers.ownership import Ownership, SoleOwnership

log = logging.getLogger("headwater")

_CLOSE_S = 5.0
_CLEAR_PATIENCE_S = 5.0
_DEADLINE_S = 5.0


class _Completed(threading.local):
    """Chunks that the calling thread has just made complete; None while nobody wants to know."""

    keys: list[bytes] | None = None


class TieredStore:
    """See the module, and `stores.base.Store`."""

    has_lower_tiers = True

    def __init__(
        self, front: EmbeddedStore, tiers: Sequence[LowerTier], ownership: Ownership | SoleOwnership | None
    ) -> None:
        self._front = front
        self._tiers = tiers
        self.packing = front.packing
        self.lookup_s = sum(tier.store.lookup_s for tier in tiers)
        self._counts = Counts()
        self._fetcher = Fetcher(front, tiers)
        self.max_pending_bytes = front.max_pending_bytes
        self.max_extent_bytes = min(front.max_extent_bytes, *(tier.store.max_extent_bytes for tier in tiers))
        copied = [tier for tier in tiers if tier.mode != "never"]
        self._copier: Copier | NoCopier = NoCopier() if ownership is None else Copier(front, copied, ownership)
        self._completed = _Completed()
        self._through = [(i, tier) for i, tier in enumerate(copied) if tier.mode == "through"]
        if self._through:
            front.journal.listeners.append(self._take_note)
        remotes = [tier for tier in tiers if isinstance(tier, RemoteTier)]
        for i, tier in enumerate(copied):
            if isinstance(tier, RemoteTier):
                tier.store.breaker.on_close(partial(self._copier.look_again, i))
                tier.store.announcer.origin = front.generation[:ORIGIN_BYTES].ljust(ORIGIN_BYTES, b"\0")
                tier.store.announcer.listeners.append(partial(front.say, tier.url.scheme))
        logs, copier = [tier for tier in remotes if tier.store.has_log], self._copier
        self._listener = None
        if isinstance(copier, Copier) and ownership is not None and logs:
            self._listener = TierListener(front, logs, ownership, lambda: copier.is_owner, lambda: copier.num_unread)
            self._listener.start()

    @property
    def home(self) -> str:
        """See `stores.base.Store.home`."""
        return self._front.home

    @property
    def first(self) -> EmbeddedStore:
        """See `stores.base.Store.first`."""
        return self._front

    @property
    def mapped(self) -> MappedStore | None:
        """See `stores.base.Store.mapped`: what the first tier is."""
        return self if self._front.mapped is not None else None

    # ---- finding ------------------------------------------------------------------------------------------------
    def check_space(self, space: SpaceRef) -> None:
        """See `stores.base.Store.check_space`."""
        for store in (self._front, *(tier.store for tier in self._tiers)):
            store.check_space(space)

    def run(self, root: RootRef, keys: list[bytes]) -> Run:
        """See `stores.base.Store.run`. Slower tiers are asked only for what the faster ones lack, each once."""
        run = self._front.run(root, keys)
        length, tails = run.length, set(run.tails)
        if length == len(keys) > 0:
            return run
        for tier in self._tiers:
            below = tier.run_from(root, keys, length)
            tails = set(below.tails) if below.length > length else tails | set(below.tails)
            length = below.length
        if length > run.length:
            tails |= set(self._front.tails(keys[length - 1]))
        return Run(length, tuple(sorted(tails)))

    def exists(self, root: RootRef, chunks: Sequence[ChunkRef], *, anywhere: bool = False) -> list[bool]:
        """See `stores.base.Store.exists`."""
        found = self._front.exists(root, chunks)
        for tier in self._tiers if anywhere else ():
            absent = [i for i, there in enumerate(found) if not there]
            if absent:
                below = tier.store.exists(root, [chunks[i] for i in absent])
                for i, there in zip(absent, below, strict=True):
                    found[i] = there
        return found

    def being_filled(self, keys: Sequence[bytes]) -> list[bool]:
        """See `stores.base.Store.being_filled`."""
        return self._front.being_filled(keys)

    def ages(self, keys: Sequence[bytes]) -> list[int]:
        """See `stores.base.Store.ages`."""
        return self._front.ages(keys)

    def touch(self, key: bytes) -> None:
        """See `stores.base.Store.touch`."""
        self._front.touch(key)

    # ---- reading ------------------------------------------------------------------------------------------------
    def read(self, root: RootRef, pieces: Sequence[Piece], deadline_s: float | None = None) -> list[Status]:
        """See `stores.base.Store.read`: from the fastest tier that has it. `fetch` brings chunks to the first one."""
        end = time.monotonic() + (_DEADLINE_S if deadline_s is None else deadline_s)
        statuses = self._front.read(root, pieces, deadline_s)
        self._tally(self._counts, pieces, statuses)
        self._recheck(root, [piece.chunk for piece in pieces], statuses)
        for tier in self._tiers:
            absent = [i for i, status in enumerate(statuses) if status in (Status.MISS, Status.DAMAGED)]
            if not absent or time.monotonic() >= end:
                break
            wanted = [pieces[i] for i in absent]
            below = tier.store.read(root, wanted, _left(end, deadline_s))
            self._tally(tier.counts, wanted, below)
            for i, status in zip(absent, below, strict=True):
                # What was damaged in one tier and is nowhere else was damaged.
                statuses[i] = status if status == Status.OK or statuses[i] != Status.DAMAGED else Status.DAMAGED
        return statuses

    def judge(self, root: RootRef, piece: Piece, deadline_s: float | None = None) -> Status:
        """See `stores.base.Store.judge`. The same damage may be where the chunk was fetched from, or copied to."""
        status = self._front.judge(root, piece, deadline_s)
        self._recheck(root, [piece.chunk], [status])
        return status

    def _recheck(self, root: RootRef, chunks: Sequence[ChunkRef], statuses: Sequence[Status]) -> None:
        """Have chunks that were damaged in the first tier looked at in the others, in the background."""
        if Status.DAMAGED in statuses:
            for chunk, status in zip(chunks, statuses, strict=True):
                if status == Status.DAMAGED:
                    self._fetcher.recheck(root, chunk)

    def read_shard(
        self, root: RootRef, chunks: Sequence[ChunkRef], shard: Shard, tiles: Tiles, deadline_s: float | None = None
    ) -> list[Status]:
        """See `stores.base.Store.read_shard`."""
        end = time.monotonic() + (_DEADLINE_S if deadline_s is None else deadline_s)
        statuses = self._front.read_shard(root, chunks, shard, tiles, deadline_s)
        self._recheck(root, chunks, statuses)
        absent = [i for i, status in enumerate(statuses) if status in (Status.MISS, Status.DAMAGED)]
        size = tiles[0].nbytes if len(tiles) else 0
        good = statuses.count(Status.OK)
        self._counts.add(hits=good, hit_bytes=good * size)
        if absent and time.monotonic() < end:
            pieces = [Piece(chunks[i], shard, tiles[i]) for i in absent]
            for i, status in zip(absent, self.read(root, pieces, _left(end, deadline_s)), strict=True):
                statuses[i] = status
        return statuses

    def fetch(self, root: RootRef, chunks: Sequence[ChunkRef], deadline_s: float) -> Fetch | None:
        """See `stores.base.Store.fetch`."""
        return self._fetcher.start(root, chunks, deadline_s)

    # ---- writing ------------------------------------------------------------------------------------------------
    def write(self, root: RootRef, pieces: Sequence[Piece], deadline_s: float | None = None) -> list[Status]:
        """See `stores.base.Store.write`."""
        return self._then_through(lambda: self._front.write(root, pieces, deadline_s))

    def forms(self, chunks: Sequence[ChunkRef]) -> list[Form | None]:
        """See `stores.base.MappedStore.forms`."""
        return self._front.forms(chunks)

    def reserve(
        self, root: RootRef, chunks: Sequence[ChunkRef], forms: Sequence[Form], deadline_s: float | None = None
    ) -> Sequence[Reservation]:
        """See `stores.base.MappedStore.reserve`."""
        return self._front.reserve(root, chunks, forms, deadline_s)

    def commit(self, filled: Sequence[Filled], deadline_s: float | None = None) -> list[Status]:
        """See `stores.base.MappedStore.commit`."""
        return self._then_through(lambda: self._front.commit(filled, deadline_s))

    def commit_shard(
        self,
        reservations: Sequence[Reservation],
        shard: Shard,
        sums: npt.NDArray[np.uint64],
        deadline_s: float | None = None,
    ) -> list[Status]:
        """See `stores.base.MappedStore.commit_shard`."""
        return self._then_through(lambda: self._front.commit_shard(reservations, shard, sums, deadline_s))

    def places(self, reservations: Sequence[Reservation]) -> list[Place | None]:
        """See `stores.base.MappedStore.places`."""
        return self._front.places(reservations)

    def segment(self, number: int) -> Tiles | None:
        """See `stores.base.MappedStore.segment`."""
        return self._front.segment(number)

    def noted(self, reservations: Sequence[Reservation], layers: range, heads: range, part: int) -> list[int]:
        """See `stores.base.MappedStore.noted`."""
        return self._front.noted(reservations, layers, heads, part)

    def close_all(self, reservations: Sequence[Reservation]) -> None:
        """See `stores.base.MappedStore.close_all`."""
        self._front.close_all(reservations)

    def abandon(self, keys: Sequence[bytes], encoding: int | None = None) -> int:
        """See `stores.base.Store.abandon`."""
        return self._front.abandon(keys, encoding)

    def _then_through(self, work: Callable[[], list[Status]]) -> list[Status]:
        """Write to the first tier, then, in the same call, what has become complete to the tiers that want it so."""
        self._copier.start()
        if self._listener is not None:
            self._listener.start()
        if not self._through:
            statuses = work()
            self._copier.wake()
            return statuses
        keys: list[bytes] = []
        self._completed.keys = keys
        try:
            statuses = work()
        finally:
            self._completed.keys = None
        for number, tier in self._through:
            missing = (tier.missing(keys) if tier.usable else None) if keys else []
            if missing is None or not self._copier.copy_to(tier, missing):
                self._copier.look_again(number)
        return statuses

    def _take_note(self, kind: EventKind, record: Record | None) -> None:
        keys = self._completed.keys
        if keys is not None and kind == EventKind.STORED and record is not None:
            keys.append(record.key)

    # ---- borrowing and keeping: the first tier's --------------------------------------------------------------
    def lend(self, root: RootRef, chunks: Sequence[ChunkRef], shard: Shard) -> Loan:
        """See `stores.base.MappedStore.lend`: what is further down must be read."""
        loan = self._front.lend(root, chunks, shard)
        sizes = [
            math.prod(shard.local_shape(root.space.spec, chunk.first_token, chunk.num_tokens))
            for chunk, place in zip(chunks, loan.places, strict=True)
            if place is not None
        ]
        self._counts.add(hits=len(sizes), hit_bytes=sum(sizes))
        return loan

    def arrived(self, chunks: Sequence[ChunkRef], shard: Shard, spec: KVSpec) -> list[Arrived]:
        """See `stores.base.MappedStore.arrived`."""
        return self._front.arrived(chunks, shard, spec)

    def borrow(self, root: RootRef, chunk: ChunkRef, shard: Shard) -> tuple[Lease, Tiles] | Status:
        """See `stores.base.MappedStore.borrow`."""
        return self._front.borrow(root, chunk, shard)

    def lease(self, root: RootRef, key: bytes, *, is_hit: bool = False) -> Lease | None:
        """See `stores.base.Store.lease`. Of what is further down, as much as that tier can promise."""
        taken: Lease | None = self._front.lease(root, key, is_hit=is_hit)
        for tier in self._tiers:
            taken = taken or tier.store.lease(root, key, is_hit=is_hit)
        return taken

    def pin(self, root: RootRef, key: bytes, pinned: bool) -> Status:
        """See `stores.base.Store.pin`: in every tier that has it."""
        outcome = [self._front.pin(root, key, pinned), *(tier.store.pin(root, key, pinned) for tier in self._tiers)]
        return min(outcome)

    # ---- administration -----------------------------------------------------------------------------------------
    def remove(self, root: RootRef, keys: Sequence[bytes]) -> list[Status]:
        """See `stores.base.Store.remove`: from every tier, the slowest first, so that nothing comes back."""
        rows = [tier.store.remove(root, keys) for tier in reversed(self._tiers)]
        rows.append(self._front.remove(root, keys))
        return [min(column) for column in zip(*rows, strict=True)]

    def clear(
        self, match: Callable[[dict[str, Any], dict[str, Any]], bool] | None, progress: Progress | None = None
    ) -> int:
        """See `stores.base.Store.clear`: every tier. The most that any of them removed.

        What the copier has in its hands meanwhile must not come back, and neither must what a reader brings up: so it
        is first the first tier, then, when nothing is on its way down, the others, and then the first once more.
        """
        removed = [self._front.clear(match, progress)]
        self._copier.flush(_CLEAR_PATIENCE_S, also_full=False)
        removed += [tier.store.clear(match, progress) for tier in reversed(self._tiers)]
        self._front.clear(match, None)
        return max(removed)

    def scan(self) -> Iterator[ChunkInfo]:
        """See `stores.base.Store.scan`: each chunk once, as the fastest tier has it. Other hosts list their own."""
        seen: set[bytes] = set()
        for store in (self._front, *(tier.store for tier in self._tiers if tier.mode != "never")):
            try:
                for info in store.scan():
                    if info.key not in seen:
                        seen.add(info.key)
                        yield info
            except (BackendError, DeadlineError) as error:
                log.warning("a tier could not be listed: %s", error)

    def stats(self) -> StoreStats:
        """The first tier's figures, and a line for each tier."""
        return replace(self._front.stats(), tiers=self.tiers())

    def tiers(self) -> tuple[TierStats, ...]:
        """See `stores.base.Store.tiers`."""
        counts, front = self._counts.now(), self._front.stats()
        first = TierStats(
            front.url,
            "first",
            hits=counts["hits"],
            hit_bytes=counts["hit_bytes"],
            misses=counts["misses"],
            stored=front.stored,
            stored_bytes=front.stored_bytes,
            damaged=front.damaged,
            host_wide=("stored", "stored_bytes", "damaged"),
        )
        return (first, *(tier.stats(self._copier.num_waiting) for tier in self._tiers))

    def verify(self, progress: Progress | None = None) -> VerifyReport:
        """See `stores.base.Store.verify`: every tier that can be listed; figures are sums over them."""
        reports, unchecked = [self._front.verify(progress)], list[str]()
        for tier in self._tiers:
            try:
                reports.append(tier.store.verify(progress))
            except (BackendError, DeadlineError) as error:
                unchecked.append(f"{tier.url}: {error}")
        names = ("chunks", "tiles", "bytes", "damaged", "lost")
        chunks, tiles, size, damaged, lost = (sum(getattr(report, name) for report in reports) for name in names)
        problems = tuple(problem for report in reports for problem in report.problems)
        return VerifyReport(chunks, tiles, size, damaged, lost, problems, tuple(unchecked))

    def by_name(self) -> dict[str, Store]:
        """The stores of all tiers by their scheme, fastest first."""
        return {self._front.journal.tier: self._front, **{tier.url.scheme: tier.store for tier in self._tiers}}

    def follow(self, since: int | None = None) -> Follower:
        """The events of the first tier, with those that concern its remote tiers: from all writers of this host, and of
        the other hosts where the tier keeps a log (see `TierStats.events`)."""
        return self._front.follow(since)

    def flush(self, timeout_s: float) -> bool:
        """Wait until the slower tiers have what the first one has now."""
        return self._copier.flush(timeout_s)

    def close(self) -> None:
        """Copy what is left for a few seconds, then let go. Idempotent."""
        if self._through and self._take_note in self._front.journal.listeners:
            self._front.journal.listeners.remove(self._take_note)
        if self._listener is not None:
            self._listener.close(_CLOSE_S)
        self._fetcher.close()
        self._copier.close(_CLOSE_S)
        for tier in self._tiers:
            tier.store.close()
        self._front.close()

    @staticmethod
    def _tally(counts: Counts, pieces: Sequence[Piece], statuses: Sequence[Status]) -> None:
        good = [piece.tiles.nbytes for piece, status in zip(pieces, statuses, strict=True) if status == Status.OK]
        counts.add(hits=len(good), hit_bytes=sum(good), misses=len(pieces) - len(good))


def _left(end: float, deadline_s: float | None) -> float | None:
    """What a slower tier may take: its own default unless the caller gave a deadline."""
    if deadline_s is None:
        return None
    return max(0.0, end - time.monotonic())
