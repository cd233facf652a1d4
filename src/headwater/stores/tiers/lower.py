"""The slower tiers of a pool, embedded or remote, as the two things that use them see them: readers and the copier."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import whole_shard
from headwater.locks import ForkSafeLock
from headwater.stores.base import (
    ChunkSource,
    Filling,
    Form,
    Packing,
    Piece,
    RootRef,
    Run,
    SourceStore,
    Status,
    Store,
    Tiles,
)
from headwater.stores.embedded.export import Exported
from headwater.stores.embedded.store import EmbeddedStore
from headwater.stores.remote.store import RemoteStore
from headwater.stores.remote.writer import WholeChunk
from headwater.stores.stats import TierStats
from headwater.stores.url import StoreUrl

_PUT_DEADLINE_S = 10.0


class Counts:
    """Counters of one tier in one process."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = ForkSafeLock()

    def add(self, **amounts: int) -> None:
        """Count."""
        with self._lock:
            self._counts.update(amounts)

    def now(self) -> Counter[str]:
        """All of them."""
        with self._lock:
            return Counter(self._counts)


class LowerTier(ChunkSource, Protocol):
    """A tier that is not the first: a source for those who read, a target for the copier."""

    url: StoreUrl
    mode: str
    """How it is filled: see `stores.url.WRITE_MODES`."""
    counts: Counts
    packing: Packing
    """Whether chunks are copied to it packed."""
    keeps_sums: bool
    """Whether it stores the checksums that it is given, and makes none of its own."""

    @property
    def store(self) -> Store:
        """What it is made of."""

    @property
    def usable(self) -> bool:
        """False while its breaker is open."""

    @property
    def num_writers(self) -> int:
        """How many batches are best copied to it at a time."""

    def own(self) -> None:
        """This process has become the one that copies to it."""

    def put(self, chunks: Sequence[Exported]) -> list[Status]:
        """Copy complete chunks here that are `missing`, parents first. DAMAGED: it does not verify, and is not here."""

    def stats(self, waiting: int) -> TierStats:
        """Figures of this tier."""


class LocalTier:
    """An embedded store below another one: files below shared memory."""

    keeps_sums = False

    def __init__(self, url: StoreUrl, store: EmbeddedStore) -> None:
        self.url = url
        self.store = store
        self.mode = url.options.get("write", "back")
        self.packing = store.packing
        self.counts = Counts()

    usable = True
    num_writers = 1

    def own(self) -> None:
        """See `LowerTier`."""

    def run_from(self, root: RootRef, keys: list[bytes], start: int) -> Run:
        """See `LowerTier`."""
        run = self.store.run(root, keys)
        return run if run.length >= start else Run(start, ())

    def missing(self, keys: Sequence[bytes]) -> list[bytes] | None:
        """See `LowerTier`."""
        return [key for key in keys if self.store.locate(key) is None]

    def forms(self, chunks: Sequence[ChunkRef]) -> list[Form | None]:
        """See `ChunkSource`."""
        return self.store.forms(chunks)

    def fill(
        self, root: RootRef, chunks: Sequence[ChunkRef], extents: Sequence[Tiles], deadline: float
    ) -> list[Filling]:
        """See `ChunkSource`."""
        return self.store.fill(root, chunks, extents, deadline)

    def put(self, chunks: Sequence[Exported]) -> list[Status]:
        """See `LowerTier`. They are hashed anew on the way."""
        statuses = []
        for item in chunks:
            piece = Piece(item.chunk, whole_shard(item.root.space.spec), item.tiles, encoding=item.encoding)
            statuses += self.store.write(item.root, [piece], _PUT_DEADLINE_S)
        _tally(self.counts, chunks, statuses)
        return statuses

    def stats(self, waiting: int) -> TierStats:
        """See `LowerTier`."""
        damaged = self.store.stats().damaged
        return _stats(self, waiting, self.counts.now(), damaged=damaged, host_wide=("damaged",))


class RemoteTier:
    """A store of many hosts below those of this one."""

    keeps_sums = True

    def __init__(self, url: StoreUrl, store: RemoteStore) -> None:
        self.url = url
        self.store = store
        self.mode = url.options.get("write", "back")
        self.packing = store.packing
        self.counts = Counts()

    @property
    def usable(self) -> bool:
        """See `LowerTier`."""
        return self.store.breaker.closed

    @property
    def num_writers(self) -> int:
        """See `LowerTier`."""
        return self.store.num_writers

    def own(self) -> None:
        """See `LowerTier`."""
        self.store.contribute()

    def run_from(self, root: RootRef, keys: list[bytes], start: int) -> Run:
        """See `LowerTier`. One question for the rest of the prompt."""
        run = self.store.run_from(keys[start - 1] if start else root.key, keys[start:])
        return Run(start + run.length, run.tails)

    def missing(self, keys: Sequence[bytes]) -> list[bytes] | None:
        """See `LowerTier`."""
        there = self.store.has(keys)
        return None if there is None else [key for key, found in zip(keys, there, strict=True) if not found]

    def forms(self, chunks: Sequence[ChunkRef]) -> list[Form | None]:
        """See `ChunkSource`."""
        return self.store.forms(chunks)

    def fill(
        self, root: RootRef, chunks: Sequence[ChunkRef], extents: Sequence[Tiles], deadline: float
    ) -> list[Filling]:
        """See `ChunkSource`."""
        return self.store.fill(root, chunks, extents, deadline)

    def put(self, chunks: Sequence[Exported]) -> list[Status]:
        """See `LowerTier`."""
        whole = [WholeChunk(c.root, c.chunk, c.tiles, c.sums, c.is_held, c.encoding, c.is_fetched) for c in chunks]
        statuses = self.store.store(whole, time.monotonic() + _PUT_DEADLINE_S, ask=False)
        _tally(self.counts, chunks, statuses)
        return statuses

    def stats(self, waiting: int) -> TierStats:
        """See `LowerTier`."""
        theirs, breaker = self.store.counts(), self.store.breaker.stats()
        return _stats(
            self,
            waiting,
            self.counts.now(),
            damaged=theirs["damaged"],
            failed=theirs["failed"],
            breaker=breaker.state,
            breaker_trips=breaker.trips,
            breaker_reason=breaker.reason,
            events="fleet" if self.store.has_log else "host",
        )


class SourceTier:
    """The pool of another host below those of this one: only read, so the copier never sees it."""

    keeps_sums = True
    packing = Packing.OFF
    mode = "never"
    num_writers = 1

    def __init__(self, url: StoreUrl, store: SourceStore) -> None:
        self.url = url
        self.store = store
        self.counts = Counts()

    @property
    def usable(self) -> bool:
        """See `LowerTier`."""
        return self.store.breaker.closed

    def own(self) -> None:
        """See `LowerTier`."""

    def run_from(self, root: RootRef, keys: list[bytes], start: int) -> Run:
        """See `LowerTier`. One question for the whole prompt: a chunk is nowhere without those before it."""
        run = self.store.run(root, keys)
        return run if run.length >= start else Run(start, ())

    def missing(self, keys: Sequence[bytes]) -> list[bytes] | None:
        """See `LowerTier`: nothing is copied here, so nobody asks."""
        return None

    def forms(self, chunks: Sequence[ChunkRef]) -> list[Form | None]:
        """See `ChunkSource`."""
        return self.store.forms(chunks)

    def fill(
        self, root: RootRef, chunks: Sequence[ChunkRef], extents: Sequence[Tiles], deadline: float
    ) -> list[Filling]:
        """See `ChunkSource`."""
        return self.store.fill(root, chunks, extents, deadline)

    def put(self, chunks: Sequence[Exported]) -> list[Status]:
        """See `LowerTier`: nothing is taken."""
        return [Status.FULL] * len(chunks)

    def stats(self, waiting: int) -> TierStats:
        """See `LowerTier`. Nothing waits to be copied here."""
        theirs, breaker = self.store.counts(), self.store.breaker.stats()
        return _stats(
            self,
            0,
            self.counts.now(),
            damaged=theirs["damaged"],
            failed=theirs["failed"],
            breaker=breaker.state,
            breaker_trips=breaker.trips,
            breaker_reason=breaker.reason,
            events="none",
        )


def recheck(tiers: Sequence[LowerTier], root: RootRef, chunk: ChunkRef, deadline_s: float) -> None:
    """A chunk was damaged in the first tier, and may have come from a lower one, unverified: read it in all of them. A
    copy that does not verify is removed by that."""
    shard = whole_shard(root.space.spec)
    tiles = np.empty(shard.local_shape(root.space.spec, chunk.first_token, chunk.num_tokens), np.uint8)
    for tier in tiers:
        if tier.usable:
            tier.store.read(root, [Piece(chunk, shard, tiles)], deadline_s)


def _tally(counts: Counts, chunks: Sequence[Exported], statuses: Sequence[Status]) -> None:
    stored = [item.tiles.nbytes for item, status in zip(chunks, statuses, strict=True) if status == Status.OK]
    counts.add(stored=len(stored), stored_bytes=sum(stored), full=statuses.count(Status.FULL))


def _stats(tier: LowerTier, waiting: int, counts: Counter[str], **more: int | str | tuple[str, ...]) -> TierStats:
    names = ("hits", "hit_bytes", "misses", "fetched", "stored", "stored_bytes", "dropped", "full", "heard")
    figures = {name: counts[name] for name in names}
    return TierStats(str(tier.url), tier.mode, waiting=waiting, **figures, **more)  # type: ignore[arg-type]
