"""The store protocols: what the pool asks of a place where bytes live, of a mapped one, and of a source of chunks.

Calls are batched and answer with one `Status` per item; an exception means that the call itself was wrong or that
the store cannot be used at all. Nothing here says how a store keeps its promises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from headwater.errors import BufferMismatchError
from headwater.kv.encoding import RAW
from headwater.kv.hashing import ChunkRef
from headwater.kv.spec import KVSpec
from headwater.kv.topology import WHOLE, Shard, Split
from headwater.stores.breaker import CircuitBreaker
from headwater.stores.events import Follower
from headwater.stores.stats import ChunkInfo, StoreStats, TierStats, VerifyReport

Tiles = npt.NDArray[np.uint8]
"""Bytes of one shard's piece of one chunk: shape (layers, heads, bytes of a tile part), the last axis contiguous."""

Progress = Callable[[int, int], None]
"""Called with (done, total) during long work."""


class Status(IntEnum):
    """What became of one item."""

    OK = 0
    EXISTS = 1  # write: it is already there, by whomever; nothing was copied
    MISS = 2  # read: not there, or gone meanwhile
    DAMAGED = 3  # read: its bytes did not verify; it has been removed and counted. write: not stored for that reason
    TIMEOUT = 4  # the deadline passed; nothing was stored, or what was read must not be used
    BUSY = 5  # write: another server, or another thread of this one, is writing this chunk right now
    FULL = 6  # write: no room, and nothing that may be evicted
    NO_PARENT = 7  # write: the chunk before this one is not in the store, so this one could never be found
    LOST = 8  # write: the reservation was taken away (over-age, aborted by another rank, cleared)

    @property
    def stored(self) -> bool:
        """Whether the item is in the store now, or this rank's part of it is."""
        return self <= Status.EXISTS

    @property
    def failed(self) -> bool:
        """Whether a written item is not in the store, for all its writer knows. BUSY: somebody else stores it."""
        return self > Status.EXISTS and self != Status.BUSY


@dataclass(frozen=True)
class SpaceRef:
    """One model's KV in one chunk size. `key` and `payload` describe it in the index."""

    spec: KVSpec
    chunk_tokens: int
    key: bytes
    payload: bytes
    scope: bytes = field(default=b"", compare=False)
    """Root of the nameless tenant: two hosts that have the same one may exchange this space's KV. Empty where it was
    read out of an index, which does not say."""


@dataclass(frozen=True)
class RootRef:
    """Where one tenant's and adapter's chains begin in a space."""

    space: SpaceRef
    key: bytes
    payload: bytes


class Packing(StrEnum):
    """Whether new chunks are stored packed: the option `packing` of a URL."""

    AUTO = "auto"
    """Where it pays: on a GPU, and where a slower wire or a disk follows."""
    ON = "on"
    OFF = "off"


class Piece(NamedTuple):
    """One shard's part of one chunk, and the caller's memory for it."""

    chunk: ChunkRef
    shard: Shard
    tiles: Tiles
    before: range | None = None
    """To be written: layers of the same heads that this writer has put into the chunk before, None for its first piece.
    Where they are not there any more, the chunk could never be complete, and the piece is LOST."""
    encoding: int = RAW
    """To be written: the tiles are given, and stored, so. What is read is always raw."""


class Form(NamedTuple):
    """How the tiles of a chunk are stored."""

    split: Split = WHOLE
    """How their checksums divide them."""
    encoding: int = RAW


class Run(NamedTuple):
    """How many keys in a row are there, and the lengths of the newest tails under the last of them."""

    length: int
    tails: tuple[int, ...]


class Lease(Protocol):
    """Keeps one chunk, and so its whole prefix, from eviction. Released by `release`, `with`, or the holder's death."""

    def release(self) -> None:
        """End it. Doing so twice is once."""


class Place(NamedTuple):
    """Where an extent begins: in which segment of a mapped store, and how many bytes from its beginning."""

    segment: npt.NDArray[np.uint8]
    offset: int


class Reservation(Protocol):
    """A pending extent of a mapped store, open for this process to fill in place."""

    status: Status

    @property
    def tiles(self) -> Tiles | None:
        """The extent's bytes as (layers, heads, tile bytes), to be filled in place; None where there is no extent."""

    def abort(self) -> None:
        """Give the chunk up for the whole group."""

    def close(self) -> None:
        """Stop writing. The extent is fenced until then."""


class Filled(NamedTuple):
    """Tiles (or one part of them) that are in place in a reserved extent, with their checksums in [layer][head]
    order."""

    reservation: Reservation
    layers: range
    heads: range
    part: int
    sums: Sequence[int] | npt.NDArray[np.uint64]
    """The array is the faster way."""


class Loan(NamedTuple):
    """Stored tiles as they lie, NOT verified: whoever copies them must verify the copy before it is used."""

    lease: Lease | None
    """To be released when the last copy has ended; None where nothing was found."""
    places: list[Place | None]
    """By chunk: where its whole extent lies, not to be written to; None where there is nothing to see. Of a pending
    chunk only the tiles that were asked for mean anything."""
    sums: npt.NDArray[np.uint64]
    """(chunks, layers, heads): what each stored tile's XXH3-64 must be."""
    encodings: list[int]
    """By chunk: how its tiles are stored."""

    def release(self) -> None:
        """End the lease."""
        if self.lease is not None:
            self.lease.release()


class Arrived(NamedTuple):
    """How far one chunk has come in the first tier."""

    record_id: int
    """Which copy of the chunk it is: another one is filled from its first layer on. 0: there is none."""
    num_layers: int
    """Of the layers that were asked for: how many can be lent, from the first on."""
    is_complete: bool
    encoding: int = RAW
    """How its tiles are stored."""

    @property
    def is_announced(self) -> bool:
        """Whether somebody has begun it, and it was not given up."""
        return self.record_id > 0


NOT_HERE = Arrived(0, 0, False)


class Fetch(Protocol):
    """Consecutive chunks on their way from lower tiers into the first one, in the background."""

    @property
    def is_done(self) -> bool:
        """Whether nothing more will come."""

    @property
    def num_kept(self) -> int:
        """Chunks, counted from the first one asked for, that are in the first tier now and cannot be evicted before
        `release`. What is missing when the fetch is done could not be kept there: a load reads it from further down."""

    @property
    def seconds(self) -> float:
        """How long it took, or has taken until now; 0 where nothing could be brought."""

    @property
    def left_s(self) -> float:
        """How long the rest takes at the rate so far; 0 when it is done, infinite before the first chunk has come."""

    def wait(self, deadline: float) -> bool:
        """Wait until it is done, by `time.monotonic() == deadline` at the latest."""

    def release(self) -> None:
        """Stop, and let go of what is held. Idempotent."""


class Store(Protocol):
    """Where bytes live: to find, read, write and administer them. Safe from many threads; embedded stores also from
    many processes."""

    lookup_s: float
    """How long looking something up may take; 0 where it reads memory of this host and waits for nobody."""
    max_extent_bytes: int
    max_pending_bytes: int
    """Bytes that may be reserved and not yet visible, at most."""
    has_lower_tiers: bool
    """Whether it is the first of several tiers."""
    packing: Packing
    """Of what is written to it; of several tiers, the first one's."""

    @property
    def home(self) -> str:
        """Names what chunks are written to: processes with the same one can fill a chunk together, others cannot."""

    @property
    def first(self) -> Store:
        """The tier that chunks are written to: the store itself where there is one only."""

    @property
    def mapped(self) -> MappedStore | None:
        """The same store, where its extents can be filled and seen in place; None where they cannot."""

    # ---- finding ------------------------------------------------------------------------------------------------
    def check_space(self, space: SpaceRef) -> None:
        """Raise SpecMismatchError if this identity is stored under another spec."""

    def run(self, root: RootRef, keys: list[bytes]) -> Run:
        """The longest run of complete chunks. Takes no lock and has no side effects."""

    def exists(self, root: RootRef, chunks: Sequence[ChunkRef], *, anywhere: bool = False) -> list[bool]:
        """Whether each chunk is complete where chunks are written; with `anywhere`, in any tier."""

    def being_filled(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether somebody who is alive has begun each chunk where chunks are written, and not completed it."""

    def ages(self, keys: Sequence[bytes]) -> list[int]:
        """When each chunk was last used, in nanoseconds since the epoch; 0 for one that is not known."""

    def touch(self, key: bytes) -> None:
        """Note a use of this chunk, and so of its prefix."""

    def lease(self, root: RootRef, key: bytes, *, is_hit: bool = False) -> Lease | None:
        """Keep a chunk and its prefix from eviction; None if it is not there or the process holds too many. `is_hit`: a
        request loads it, which embedded stores count."""

    # ---- moving bytes -------------------------------------------------------------------------------------------
    def read(self, root: RootRef, pieces: Sequence[Piece], deadline_s: float | None = None) -> list[Status]:
        """Copy into the callers' memory and verify there. Memory of an item that is not OK holds garbage."""

    def judge(self, root: RootRef, piece: Piece, deadline_s: float | None = None) -> Status:
        """`read` of one piece where chunks are lent, in no lower tier."""

    def read_shard(
        self, root: RootRef, chunks: Sequence[ChunkRef], shard: Shard, tiles: Tiles, deadline_s: float | None = None
    ) -> list[Status]:
        """Read one shard of many chunks into one array of (chunks, layers, heads, bytes of a tile part)."""

    def write(self, root: RootRef, pieces: Sequence[Piece], deadline_s: float | None = None) -> list[Status]:
        """Copy from the callers' memory, parents before children."""

    def abandon(self, keys: Sequence[bytes], encoding: int | None = None) -> int:
        """Abort chunks that this process's group has begun and not completed, all or those in one encoding;
        how many there were."""

    def fetch(self, root: RootRef, chunks: Sequence[ChunkRef], deadline_s: float) -> Fetch | None:
        """Bring consecutive chunks of one chain into the first tier, whole, from the nearest tier that has each; None
        where there is nothing to do: all of them are there, or there is one tier only. Does not wait."""

    # ---- administration -----------------------------------------------------------------------------------------
    def pin(self, root: RootRef, key: bytes, pinned: bool) -> Status:
        """Keep a chunk and its prefix until further notice, across processes and restarts."""

    def remove(self, root: RootRef, keys: Sequence[bytes]) -> list[Status]:
        """Forget chunks, and with them what hangs below."""

    def clear(self, match: Callable[[dict[str, Any], dict[str, Any]], bool] | None, progress: Progress | None) -> int:
        """Forget whole roots, chosen by (space, root) descriptions; None for all. Chunks removed."""

    def scan(self) -> Iterator[ChunkInfo]:
        """Every complete chunk, in no particular order."""

    def stats(self) -> StoreStats:
        """The store now."""

    def tiers(self) -> tuple[TierStats, ...]:
        """Of a store of several: what this process did with each, fastest first. Asks no server."""

    def verify(self, progress: Progress | None = None) -> VerifyReport:
        """Read every byte and check every invariant; damaged chunks are removed."""

    def follow(self, since: int | None = None) -> Follower:
        """Events from now on, or after the one numbered `since`. Raises InvalidArgumentError where there are none."""

    def flush(self, timeout_s: float) -> bool:
        """Wait until slower tiers have what the first one has now; False where they do not in time."""

    def close(self) -> None:
        """Let go. Idempotent."""


class MappedStore(Store, Protocol):
    """A store whose extents can be addressed: filled in place by the ranks of a server, and read where they lie."""

    def segment(self, number: int) -> Tiles | None:
        """All bytes of one segment, which gets its storage now if it had none; None where there is none to be had. Slow
        for a new one: for whoever wants all of them ready before they are needed."""

    def forms(self, chunks: Sequence[ChunkRef]) -> list[Form | None]:
        """How each complete chunk's tiles are stored where chunks are written; None where it is not there, or in an
        encoding that nobody can use here."""

    def arrived(self, chunks: Sequence[ChunkRef], shard: Shard, spec: KVSpec) -> list[Arrived]:
        """How far each chunk has come for this shard. Takes no lock and holds nothing: `lend` decides. Chunks whose
        writers are dead are not here."""

    # ---- filling ------------------------------------------------------------------------------------------------
    def reserve(
        self, root: RootRef, chunks: Sequence[ChunkRef], forms: Sequence[Form], deadline_s: float | None = None
    ) -> Sequence[Reservation]:
        """Open extents for writing in place, for tiles of these forms, by chunk. What follows takes reservations of
        this very store. A chunk that this server's ranks fill in another form already is BUSY."""

    def places(self, reservations: Sequence[Reservation]) -> list[Place | None]:
        """Where reserved extents lie; None where there is none (any more)."""

    def noted(self, reservations: Sequence[Reservation], layers: range, heads: range, part: int) -> list[int]:
        """How many of these tiles' checksums each has already: who finds any must not fill them again."""

    def commit(self, filled: Sequence[Filled], deadline_s: float | None = None) -> list[Status]:
        """Say that tiles are in place, all in one transaction. The last one of a chunk makes it visible."""

    def commit_shard(
        self,
        reservations: Sequence[Reservation],
        shard: Shard,
        sums: npt.NDArray[np.uint64],
        deadline_s: float | None = None,
    ) -> list[Status]:
        """`commit` of the same tiles of many chunks, their checksums as (chunks, layers, heads): the fastest way."""

    def close_all(self, reservations: Sequence[Reservation]) -> None:
        """`Reservation.close` of many."""

    # ---- reading in place ---------------------------------------------------------------------------------------
    def lend(self, root: RootRef, chunks: Sequence[ChunkRef], shard: Shard) -> Loan:
        """Where consecutive chunks lie, unverified, under one lease, with their checksums: those that are complete, and
        those pending, of any server, that have the checksums of all tiles of this shard."""

    def borrow(self, root: RootRef, chunk: ChunkRef, shard: Shard) -> tuple[Lease, Tiles] | Status:
        """Verified, read-only raw tiles, valid until the lease is released: a view of the stored bytes where they are
        raw, else a copy."""


class Filling(NamedTuple):
    """What became of one extent that a source was to fill."""

    status: Status
    """OK: all its bytes are in place, NOT verified. MISS, TIMEOUT: they may be anything."""
    sums: npt.NDArray[np.uint64] | None = None
    """What the source knows of the stored tiles: their checksums in [layer][head][part] order."""
    form: Form = Form()


class ChunkSource(Protocol):
    """Where the first tier gets chunks from: a slower tier, or another host."""

    def run_from(self, root: RootRef, keys: list[bytes], start: int) -> Run:
        """How far the run goes that stands at `start`, and the tails where it ends."""

    def missing(self, keys: Sequence[bytes]) -> list[bytes] | None:
        """Which of these chunks are not here; None where nobody can say now."""

    def forms(self, chunks: Sequence[ChunkRef]) -> list[Form | None]:
        """How each chunk's tiles are stored: whoever reserves an extent for it must say so. None where it is not here,
        or in an encoding that nobody can use here. An estimate: it may be gone when it is asked for."""

    def fill(
        self, root: RootRef, chunks: Sequence[ChunkRef], extents: Sequence[Tiles], deadline: float
    ) -> list[Filling]:
        """Bring chunks, whole and as they are stored, into extents of (layers, heads, stored bytes of a tile), which
        must be contiguous. Nothing is verified: whoever uses the bytes compares them with the checksums. `deadline` is
        a value of time.monotonic(). Nobody writes into the extents after the return, which is soon after the deadline.
        """


class SourceStore(Store, Protocol):
    """A store of another host that is only read: a source for the first tier of this one."""

    breaker: CircuitBreaker

    def forms(self, chunks: Sequence[ChunkRef]) -> list[Form | None]:
        """See `ChunkSource.forms`."""

    def fill(
        self, root: RootRef, chunks: Sequence[ChunkRef], extents: Sequence[Tiles], deadline: float
    ) -> list[Filling]:
        """See `ChunkSource.fill`."""

    def counts(self) -> Counter[str]:
        """What this process did with it."""

    def ping(self) -> None:
        """Return if the other host answers; raises BackendError where it does not."""


def check_extents(chunks: Sequence[ChunkRef], extents: Sequence[Tiles]) -> None:
    """Raise BufferMismatchError unless there is one extent a chunk, each contiguous memory that can be written to."""
    fits = [extent.dtype == np.uint8 and extent.flags.c_contiguous and extent.flags.writeable for extent in extents]
    if len(extents) != len(chunks) or not all(fits):
        raise BufferMismatchError(
            f"{len(extents)} extents were given for {len(chunks)} chunks; expected one contiguous, writeable array of "
            "uint8 for each"
        )
