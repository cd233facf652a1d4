"""A remote store: whole chunks as pieces and a manifest, read by ranges for any topology.

It is filled with complete chunks only, by one process (see `tiers`); it is read by all. It evicts by itself, so a match
is an estimate, and a piece that is gone when it is read is a miss. Every operation has a deadline and goes through a
circuit breaker: a backend that fails costs a bounded time, and then nothing until it is back.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from headwater.errors import InvalidArgumentError
from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import Shard, whole_shard
from headwater.stores.base import Filling, Form, Lease, Packing, Piece, Progress, RootRef, Run, SpaceRef, Status, Tiles
from headwater.stores.breaker import CircuitBreaker
from headwater.stores.events import EventKind, Follower
from headwater.stores.remote.admin import RemoteAdmin
from headwater.stores.remote.announce import Announcer, LogEvent
from headwater.stores.remote.base import BackendUsage, LogEntries, ObjectClient, Position
from headwater.stores.remote.guard import Guard
from headwater.stores.remote.manifest import Names
from headwater.stores.remote.memory import Memory
from headwater.stores.remote.reader import RemoteReader
from headwater.stores.remote.source import RemoteSource
from headwater.stores.remote.writer import RemoteWriter, WholeChunk
from headwater.stores.stats import ChunkInfo, StoreStats, TierStats, VerifyReport
from headwater.stores.url import StoreUrl

DEFAULT_DEADLINE_S = 2.0
DEFAULT_LOOKUP_S = 0.2
DEFAULT_PIECE_BYTES = 1 << 20


class _NoLease:
    """What a remote store can promise about eviction: nothing. Reads verify."""

    def release(self) -> None:
        return


class RemoteStore:
    """One backend as a store. See `stores.base.Store`."""

    mapped = None
    has_lower_tiers = False
    max_extent_bytes = max_pending_bytes = 1 << 62

    def __init__(self, url: StoreUrl, client: ObjectClient) -> None:
        self.url = url
        self._client = client
        self._names = Names(url.options.get("prefix", "hw"))
        self.packing = Packing(url.packing)
        self._deadline_s = url.seconds("deadline", DEFAULT_DEADLINE_S)
        self.lookup_s = url.seconds("lookup", DEFAULT_LOOKUP_S)
        self.num_writers = client.num_writers
        """How many batches of whole chunks are best stored at a time."""
        self.breaker = CircuitBreaker(str(url), lambda: client.ping(time.monotonic() + self.lookup_s))
        self._guard = Guard(str(url), self.breaker)
        self._memory = Memory()
        self.announcer = Announcer(self._names)
        common = (client, self._names, self._guard, self._memory, self.announcer)
        self._reader = RemoteReader(*common, self.lookup_s)
        self._source = RemoteSource(*common[:4], self._reader, self.lookup_s)
        self._writer = RemoteWriter(*common, url.size("piece") or DEFAULT_PIECE_BYTES)
        self._admin = RemoteAdmin(client, self._names, self.announcer)

    @property
    def first(self) -> RemoteStore:
        """See `stores.base.Store.first`."""
        return self

    @property
    def home(self) -> str:
        """See `stores.base.Store.home`."""
        return str(self.url)

    # ---- finding and moving -------------------------------------------------------------------------------------
    def check_space(self, space: SpaceRef) -> None:
        """Nothing to check: identity and spec are part of every key."""

    def run(self, root: RootRef, keys: list[bytes]) -> Run:
        """See `stores.base.Store.run`."""
        return self._reader.run(root.key, keys)

    def run_from(self, parent: bytes, keys: Sequence[bytes]) -> Run:
        """The run of `keys` that hang under `parent`, wherever that is stored, and the tails below its end."""
        return self._reader.run(parent, keys)

    def exists(self, root: RootRef, chunks: Sequence[ChunkRef], *, anywhere: bool = False) -> list[bool]:
        """See `stores.base.Store.exists`."""
        return self._reader.has([chunk.key for chunk in chunks]) or [False] * len(chunks)

    def read(self, root: RootRef, pieces: Sequence[Piece], deadline_s: float | None = None) -> list[Status]:
        """See `stores.base.Store.read`."""
        return self._reader.read(root.space.spec, pieces, self._deadline(deadline_s))

    def judge(self, root: RootRef, piece: Piece, deadline_s: float | None = None) -> Status:
        """See `stores.base.Store.judge`."""
        return self.read(root, [piece], deadline_s)[0]

    def read_shard(
        self, root: RootRef, chunks: Sequence[ChunkRef], shard: Shard, tiles: Tiles, deadline_s: float | None = None
    ) -> list[Status]:
        """See `stores.base.Store.read_shard`."""
        return self.read(root, [Piece(c, shard, t) for c, t in zip(chunks, tiles, strict=True)], deadline_s)

    def forms(self, chunks: Sequence[ChunkRef]) -> list[Form | None]:
        """See `stores.base.ChunkSource.forms`."""
        return self._source.forms(chunks)

    def fill(
        self, root: RootRef, chunks: Sequence[ChunkRef], extents: Sequence[Tiles], deadline: float
    ) -> list[Filling]:
        """See `stores.base.Source.fill`."""
        return self._source.fill(root.space.spec, chunks, extents, deadline)

    def write(self, root: RootRef, pieces: Sequence[Piece], deadline_s: float | None = None) -> list[Status]:
        """See `stores.base.Store.write`: of whole chunks. Ranks that hold parts of them need a local tier before it."""
        spec = root.space.spec
        if any(piece.shard != whole_shard(spec) for piece in pieces):
            raise InvalidArgumentError(
                f"{self.url} takes complete chunks only; put a local tier before it, as in shm:///headwater,{self.url}"
            )
        deadline = self._deadline(deadline_s)
        chunks = [WholeChunk(root, piece.chunk, piece.tiles, None, encoding=piece.encoding) for piece in pieces]
        return self.store(chunks, deadline)

    def store(self, chunks: Sequence[WholeChunk], deadline: float, *, ask: bool = True) -> list[Status]:
        """Store complete chunks. Parents need not be there. Who knows that they are not there need not ask again."""
        return self._writer.store(chunks, deadline, ask=ask)

    def contribute(self) -> None:
        """Give the backend this host's share of memory, if it takes any: one process of a host does."""
        self._client.contribute()

    # ---- keeping and forgetting ---------------------------------------------------------------------------------
    def ages(self, keys: Sequence[bytes]) -> list[int]:
        """See `stores.base.Store.ages`: when they were stored, as far as their manifests are remembered."""
        found = [self._memory.manifest(key) for key in keys]
        return [0 if manifest is None else manifest.created_ns for manifest in found]

    def touch(self, key: bytes) -> None:
        """Nothing: the backend sees reads by itself."""

    def lease(self, root: RootRef, key: bytes, *, is_hit: bool = False) -> Lease | None:
        """See `stores.base.Store.lease`. The chunk's expiry begins anew; more cannot be promised."""
        return _NoLease() if self._keep(key, False) else None

    def pin(self, root: RootRef, key: bytes, pinned: bool) -> Status:
        """See `stores.base.Store.pin`. Only this chunk: its prefix is kept by being used."""
        return Status.OK if self._keep(key, pinned) else Status.MISS

    def _keep(self, key: bytes, pinned: bool) -> bool:
        deadline = time.monotonic() + self.lookup_s

        def work() -> bool:
            known = {key} if self._memory.manifest(key) is not None else set[bytes]()
            manifest = self._reader.manifests([key], known, deadline).get(key)
            if manifest is not None:
                self._client.keep(self._names.all_of(manifest), pinned, deadline)
            return manifest is not None

        return bool(self._guard.run("renewal", work, deadline))

    def remove(self, root: RootRef, keys: Sequence[bytes]) -> list[Status]:
        """See `stores.base.Store.remove`. What hangs below cannot be found any more, and expires."""
        deadline = time.monotonic() + self._deadline_s

        def work() -> list[Status]:
            found = self._reader.manifests(keys, set(), deadline)
            there = [manifest for manifest in found.values() if manifest]
            told = [LogEvent.of(EventKind.REMOVED, manifest) for manifest in there]
            names = [name for manifest in there for name in self._names.all_of(manifest)]
            self._client.remove(names, deadline, self.announcer.notice(told))
            self.announcer.happened(told)
            return [Status.MISS if found[key] is None else Status.OK for key in keys]

        outcome = self._guard.run("removal", work, deadline)
        self._memory.forget(keys)
        return [Status.TIMEOUT] * len(keys) if outcome is None else outcome

    def clear(
        self, match: Callable[[dict[str, Any], dict[str, Any]], bool] | None, progress: Progress | None = None
    ) -> int:
        """See `stores.base.Store.clear`."""
        removed = self._admin.clear(match, progress)
        self._memory.forget()
        self._writer.forget_descriptions()
        return removed

    # ---- what other hosts did -----------------------------------------------------------------------------------
    @property
    def has_log(self) -> bool:
        """Whether this host can hear of what others do with the store."""
        return self._client.has_log

    def read_log(self, after: Position | None, limit: int) -> LogEntries | None:
        """Entries of the store's log: see `ObjectClient.hear`, also for what it raises. Late after `lookup`. Nothing
        that goes wrong here is held against the backend, and nothing that goes well counts for it."""
        return self._client.read_log(self._names.log, after, limit, time.monotonic() + self.lookup_s)

    def remove_log(self) -> None:
        """Forget all events. Who follows them is told that some were missed."""
        self._client.remove([self._names.log], time.monotonic() + self.lookup_s)

    def ping(self) -> None:
        """Return if the backend answers."""
        self._client.ping(time.monotonic() + self.lookup_s)

    # ---- looking ------------------------------------------------------------------------------------------------
    def scan(self) -> Iterator[ChunkInfo]:
        """See `stores.base.Store.scan`."""
        return self._admin.scan()

    def verify(self, progress: Progress | None = None) -> VerifyReport:
        """See `stores.base.Store.verify`."""
        report = self._admin.verify(progress)
        self._memory.forget()
        return report

    def counts(self) -> Counter[str]:
        """What this process did with the store: hits, hit_bytes, misses, stored, full, damaged, vanished, failed."""
        return self._guard.counts()

    def tiers(self) -> tuple[TierStats, ...]:
        """See `stores.base.Store.tiers`."""
        return ()

    def stats(self) -> StoreStats:
        """See `stores.base.Store.stats`. What the backend does not say in time is zero; events are this process's."""
        deadline = time.monotonic() + self.lookup_s
        usage = self._guard.run("statistics", lambda: self._client.usage(deadline), deadline) or BackendUsage(0, 0)
        counts = self.counts()
        return StoreStats(
            url=str(self.url),
            capacity_bytes=usage.capacity_bytes,
            data_bytes=usage.capacity_bytes,
            used_bytes=usage.used_bytes,
            pending_bytes=0,
            index_bytes=0,
            index_used_bytes=0,
            chunks=0,
            members=1,
            stored=counts["stored"],
            stored_bytes=counts["stored_bytes"],
            stored_raw_bytes=counts["stored_raw_bytes"],
            evicted=counts["vanished"],
            damaged=counts["damaged"],
            aborted=counts["full"],
            rebuilds=0,
        )

    def follow(self, since: int | None = None) -> Follower:
        """There are none: events are those of a local tier."""
        raise InvalidArgumentError(f"{self.url} alone has no events; put a local tier before it")

    def flush(self, timeout_s: float) -> bool:
        """Nothing to wait for: writes are done when they return."""
        return True

    def close(self) -> None:
        """See `stores.base.Store.close`."""
        self._guard.close()
        self._client.close()

    # ---- the rest -----------------------------------------------------------------------------------------------
    def fetch(self, root: RootRef, chunks: Sequence[ChunkRef], deadline_s: float) -> None:
        """Nothing: there is no tier above it to bring anything to."""

    def abandon(self, keys: Sequence[bytes], encoding: int | None = None) -> int:
        """Nothing is begun here that is not ended by the same call."""
        return 0

    def being_filled(self, keys: Sequence[bytes]) -> list[bool]:
        """See `abandon`."""
        return [False] * len(keys)

    def has(self, keys: Sequence[bytes]) -> list[bool] | None:
        """Whether each chunk's manifest is there; None where the backend does not say so in time."""
        return self._reader.has(keys)

    def _deadline(self, deadline_s: float | None) -> float:
        seconds = self._deadline_s if deadline_s is None else deadline_s
        if not seconds >= 0:
            raise InvalidArgumentError(f"deadline_s is {deadline_s}; expected a number of seconds")
        return time.monotonic() + min(seconds, 86400.0)
