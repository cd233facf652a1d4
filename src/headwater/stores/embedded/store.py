"""The embedded store: `memory://`, `shm://` and `file://` are this class over different files.

A thin front: reader, writer and admin do the work, and this keeps the store open while they do.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt

from headwater.errors import DeadlineError, InvalidArgumentError, StoreClosedError, StoreDamagedError
from headwater.kv.hashing import ChunkRef
from headwater.kv.spec import KVSpec
from headwater.kv.topology import Shard
from headwater.stores.base import (
    Arrived,
    Filled,
    Filling,
    Form,
    Loan,
    MappedStore,
    Packing,
    Piece,
    Place,
    Progress,
    Reservation,
    RootRef,
    Run,
    SpaceRef,
    Status,
    Tiles,
)
from headwater.stores.embedded.admin import Admin
from headwater.stores.embedded.core import Core
from headwater.stores.embedded.data import MappedData
from headwater.stores.embedded.export import Exported, Exporter
from headwater.stores.embedded.janitor import PENDING_SHARE
from headwater.stores.embedded.journal import Journal
from headwater.stores.embedded.layout import COMPLETE, PENDING, Word
from headwater.stores.embedded.lender import Lender
from headwater.stores.embedded.reader import ChunkLease, Reader
from headwater.stores.embedded.source import ExtentSource
from headwater.stores.embedded.survey import Surveyor
from headwater.stores.embedded.ticket import Ticket, close_all
from headwater.stores.embedded.writer import Writer
from headwater.stores.events import EventKind, Follower
from headwater.stores.host import boot_id
from headwater.stores.stats import ChunkInfo, StoreStats, TierStats, VerifyReport
from headwater.stores.url import StoreUrl

DEFAULT_DEADLINE_S = 1.0


class EmbeddedStore:
    """One open store. Handles to the same store in one process share a `Core`."""

    has_lower_tiers = False

    def __init__(self, core: Core, url: StoreUrl, deadline_s: float, release: Callable[[], None]) -> None:
        self._core = core
        self._url = str(url)
        self.packing = Packing(url.packing)
        self._deadline_s = deadline_s
        self._release: Callable[[], None] | None = release
        self._reader = Reader(core)
        self._lender = Lender(core, self._reader)
        self._writer = Writer(core)
        self._admin = Admin(core, self._reader)
        self._exporter = Exporter(core, self._reader)
        self._source = ExtentSource(core, self._reader)
        self.lookup_s = 0.0
        g = core.geometry
        self.max_pending_bytes = g.data_bytes // PENDING_SHARE
        self.max_extent_bytes = min(g.segment_bytes, self.max_pending_bytes)

    @property
    def first(self) -> EmbeddedStore:
        """See `stores.base.Store.first`."""
        return self

    @property
    def mapped(self) -> MappedStore | None:
        """See `stores.base.Store.mapped`."""
        return self if self._core.data.mapped else None

    def _open(self) -> AbstractContextManager[Core]:
        if self._release is None:
            raise StoreClosedError(f"{self._url} was closed")
        return self._core.use()

    def _deadline(self, deadline_s: float | None) -> float:
        seconds = self._deadline_s if deadline_s is None else deadline_s
        if not seconds >= 0:
            raise InvalidArgumentError(f"deadline_s is {deadline_s}; expected a number of seconds")
        return time.monotonic() + min(seconds, 86400.0)

    # ---- the data path ------------------------------------------------------------------------------------------
    def check_space(self, space: SpaceRef) -> None:
        with self._open() as core:
            entry = core.index.find(space.key)
            if entry is not None:
                self._writer.check_space(space, entry)

    def run(self, root: RootRef, keys: list[bytes]) -> Run:
        with self._open():
            return self._reader.run(root, keys)

    def exists(self, root: RootRef, chunks: Sequence[ChunkRef], *, anywhere: bool = False) -> list[bool]:
        with self._open():
            return [self._reader.visible(root, chunk) for chunk in chunks]

    def touch(self, key: bytes) -> None:
        with self._open() as core:
            entry = core.index.find(key)
            if entry is not None and entry.state == COMPLETE:  # a pending one's age says when its writers last came
                core.index.touch(entry.cell, time.time_ns())

    def read(self, root: RootRef, pieces: Sequence[Piece], deadline_s: float | None = None) -> list[Status]:
        with self._open():
            return self._reader.read(root, pieces, self._deadline(deadline_s))

    def judge(self, root: RootRef, piece: Piece, deadline_s: float | None = None) -> Status:
        return self.read(root, [piece], deadline_s)[0]

    def read_shard(
        self, root: RootRef, chunks: Sequence[ChunkRef], shard: Shard, tiles: Tiles, deadline_s: float | None = None
    ) -> list[Status]:
        with self._open():
            return self._reader.read_shard(root, chunks, shard, tiles, self._deadline(deadline_s))

    def write(self, root: RootRef, pieces: Sequence[Piece], deadline_s: float | None = None) -> list[Status]:
        with self._open():
            return self._writer.write(root, pieces, self._deadline(deadline_s))

    def fetch(self, root: RootRef, chunks: Sequence[ChunkRef], deadline_s: float) -> None:
        return None

    def segment(self, number: int) -> Tiles | None:
        with self._open():
            data, words = self._core.data, self._core.index.words
            if not isinstance(data, MappedData) or number >= self._core.geometry.num_segments:
                return None
            while number >= words[Word.BACKED]:
                if not self._core.grow(self._deadline(None)):
                    return None
            return data.segment(number)

    def reserve(
        self,
        root: RootRef,
        chunks: Sequence[ChunkRef],
        forms: Sequence[Form],
        deadline_s: float | None = None,
        *,
        exclusive: bool = False,
    ) -> list[Ticket]:
        """See `stores.base.Store.reserve`. With `exclusive` nobody joins: a pending chunk is BUSY for all others."""
        with self._open():
            return self._writer.reserve(root, chunks, forms, self._deadline(deadline_s), exclusive=exclusive)

    def commit(self, filled: Sequence[Filled], deadline_s: float | None = None) -> list[Status]:
        with self._open():
            return self._writer.commit_filled(filled, self._deadline(deadline_s))

    def places(self, reservations: Sequence[Reservation]) -> list[Place | None]:
        with self._open():
            return self._writer.places(reservations)

    def commit_shard(
        self,
        reservations: Sequence[Reservation],
        shard: Shard,
        sums: npt.NDArray[np.uint64],
        deadline_s: float | None = None,
    ) -> list[Status]:
        with self._open():
            return self._writer.commit_shard(reservations, shard, sums, self._deadline(deadline_s))

    def close_all(self, reservations: Sequence[Reservation]) -> None:
        close_all([self._writer.own(reservation) for reservation in reservations])

    def noted(self, reservations: Sequence[Reservation], layers: range, heads: range, part: int) -> list[int]:
        with self._open():
            return self._writer.noted(reservations, layers, heads, part)

    def arrived(self, chunks: Sequence[ChunkRef], shard: Shard, spec: KVSpec) -> list[Arrived]:
        with self._open():
            return self._lender.arrived(chunks, shard, spec)

    def lend(self, root: RootRef, chunks: Sequence[ChunkRef], shard: Shard) -> Loan:
        with self._open():
            return self._lender.lend(root, chunks, shard)

    def borrow(self, root: RootRef, chunk: ChunkRef, shard: Shard) -> tuple[ChunkLease, Tiles] | Status:
        with self._open():
            return self._reader.borrow(root, chunk, shard)

    def lease(self, root: RootRef, key: bytes, *, is_hit: bool = False) -> ChunkLease | None:
        with self._open():
            return self._reader.lease(root, key, is_hit=is_hit)

    # ---- administration -----------------------------------------------------------------------------------------
    def pin(self, root: RootRef, key: bytes, pinned: bool) -> Status:
        with self._open():
            return self._admin.pin(key, pinned, self._deadline(None))

    def abandon(self, keys: Sequence[bytes], encoding: int | None = None) -> int:
        # Also through a handle that was closed: another one keeps the group alive, and so whatever this one has begun.
        with self._core.use():
            return self._admin.abandon(keys, encoding, self._deadline(None))

    def remove(self, root: RootRef, keys: Sequence[bytes]) -> list[Status]:
        with self._open():
            return self._admin.remove(keys, self._deadline(None))

    def clear(
        self, match: Callable[[dict[str, Any], dict[str, Any]], bool] | None, progress: Progress | None = None
    ) -> int:
        with self._open():
            return self._admin.clear(match, progress)

    def scan(self) -> Iterator[ChunkInfo]:
        with self._open():
            return iter(self._admin.scan())

    def stats(self) -> StoreStats:
        with self._open():
            return self._admin.stats(self._url)

    def tiers(self) -> tuple[TierStats, ...]:
        return ()

    def verify(self, progress: Progress | None = None) -> VerifyReport:
        with self._open():
            return self._admin.verify(progress)

    def audit(self) -> list[str]:
        """Check every invariant of the index (not the stored bytes); what is wrong, in words."""
        with self._open():
            return self._admin.audit()

    # ---- for slower tiers and followers -------------------------------------------------------------------------
    @property
    def journal(self) -> Journal:
        """The store's events."""
        return self._core.journal

    @property
    def directory(self) -> str | None:
        """Where its files are; None for private memory."""
        return self._core.directory

    def follow(self, since: int | None = None) -> Follower:
        """The store's events from now on (or from `since`), of all writers, whichever their process."""
        with self._open() as core:
            return Follower(core.journal.ring(), since)

    def flush(self, timeout_s: float) -> bool:
        """Nothing to wait for: there is no slower tier."""
        return True

    def surveyor(self) -> Surveyor:
        """Whoever looks at the whole store again and again asks this one."""
        return Surveyor(self._core, self._open)

    def say(self, tier: str, events: Sequence[tuple[EventKind, bytes, int, int]]) -> None:
        """Note in the events what happened in another tier: kinds, keys, numbers and tokens. Late or stuck is no
        matter."""

        def work() -> None:
            for kind, key, number, num_tokens in events:
                self._core.journal.say(kind, tier, key, number, num_tokens)

        with self._open() as core, contextlib.suppress(DeadlineError, StoreDamagedError):
            core.transact(work, self._deadline(None))

    def being_filled(self, keys: Sequence[bytes]) -> list[bool]:
        """See `stores.base.Store.being_filled`."""
        with self._open() as core:
            found = [core.index.find(key) for key in keys]
            return [e is not None and e.state == PENDING and not core.janitor.expired(e) for e in found]

    def progress(self, key: bytes) -> int | None:
        """Of a pending chunk: when its writers last committed something; None where none is pending."""
        with self._open() as core:
            entry = core.index.find(key)
            return core.index.age(entry.cell) if entry is not None and entry.state == PENDING else None

    def ages(self, keys: Sequence[bytes]) -> list[int]:
        """When each chunk was last used, in nanoseconds since the epoch; 0 for one that is not here."""
        with self._open() as core:
            found = [core.index.find(key) for key in keys]
            return [0 if entry is None else core.index.age(entry.cell) for entry in found]

    def redate(self, ages: Mapping[bytes, int]) -> None:
        """Say when chunks were last used, by key, where that was before now."""
        with self._open() as core:
            for key, age in ages.items():
                entry = core.index.find(key)
                if entry is not None and entry.state == COMPLETE:
                    core.index.touch(entry.cell, min(age, core.index.age(entry.cell)))

    @property
    def data_bytes(self) -> int:
        """Bytes that extents may occupy."""
        return self._core.geometry.data_bytes

    @property
    def generation(self) -> bytes:
        """Random bytes that all processes of this store share, and no other store has."""
        return self._core.geometry.generation

    @property
    def home(self) -> str:
        """See `stores.base.Store.home`. Two hosts that mount one directory do not share a store: locks are local."""
        return f"{boot_id():x}-{self.generation.hex()}"

    def tails(self, key: bytes) -> tuple[int, ...]:
        """Lengths of the newest tails below a chunk or root."""
        with self._open() as core:
            entry = core.index.find(key)
            return () if entry is None else tuple(tokens for tokens in entry.tails if tokens)

    def locate(self, key: bytes) -> tuple[RootRef, ChunkRef] | None:
        """The names of a complete chunk; chunks before it may still be pending."""
        with self._open():
            return self._exporter.locate(key)

    def export(self, key: bytes, deadline_s: float | None = None, *, in_place: bool = True) -> Exported | None:
        """Open one complete chunk for copying elsewhere; None where it is gone. Release it afterwards. In place, its
        bytes are not verified: only who stores the checksums with them may ask for that."""
        with self._open():
            return self._exporter.export(key, self._deadline(deadline_s), in_place=in_place)

    def has_copy(self, key: bytes, record_id: int) -> bool:
        """Whether this very copy of a chunk, which was exported, can still be found."""
        with self._open() as core:
            entry = core.index.find(key)
            return entry is not None and entry.state == COMPLETE and entry.record.id == record_id

    def forms(self, chunks: Sequence[ChunkRef]) -> list[Form | None]:
        """See `stores.base.ChunkSource.forms`."""
        with self._open():
            return self._source.forms(chunks)

    def fill(
        self, root: RootRef, chunks: Sequence[ChunkRef], extents: Sequence[Tiles], deadline: float
    ) -> list[Filling]:
        """See `stores.base.Source.fill`."""
        with self._open():
            return self._source.fill(root, chunks, extents, deadline)

    def close(self) -> None:
        release, self._release = self._release, None
        if release is not None:
            self._reader.forget()
            release()
