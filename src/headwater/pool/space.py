"""A space: one model's KV in the pool. Keys from tokens, the longest match, and tiles in and out for any shard."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from headwater.errors import BufferMismatchError, InvalidArgumentError
from headwater.kv.encoding import RAW, packed_or_raw, stored_tile_bytes
from headwater.kv.hashing import KEY_BYTES, ChunkKeys, ChunkRef, Extra, Tokens
from headwater.kv.identity import Identity
from headwater.kv.spec import KVSpec
from headwater.kv.topology import Shard
from headwater.locks import ForkSafeLock
from headwater.pool.buffers import Buffer, as_tiles
from headwater.pool.match import Match, RequestLease, chain_runs
from headwater.pool.roots import Roots
from headwater.stores.base import (
    Arrived,
    Fetch,
    Filled,
    Form,
    Lease,
    Loan,
    MappedStore,
    Packing,
    Piece,
    Place,
    Reservation,
    RootRef,
    SpaceRef,
    Status,
    Store,
    Tiles,
)
from headwater.stores.encode import pack_piece

PACKS_ON_DEVICES = False
"""Whether `packing=auto` packs what a GPU saves. It will when a GPU was measured (docs/packing.md)."""
_FETCH_S = 2.0
"""How long a read without a deadline waits for lower tiers."""


class Space:
    """A pool opened for one identity and spec. Thread-safe. Made by `Pool.space`."""

    def __init__(
        self,
        store: Store,
        ref: SpaceRef,
        identity: Identity,
        count: Callable[..., None],
        tenant_secret: bytes | None = None,
    ) -> None:
        self._store = store
        self._mapped = store.mapped
        self.ref = ref
        self.identity = identity
        self._count = count
        self._roots = Roots(ref, identity, tenant_secret)
        self._leases: dict[str, tuple[Lease, ...]] = {}
        self._pid = os.getpid()
        self._lock = ForkSafeLock()

    @property
    def spec(self) -> KVSpec:
        """What one token's KV is here."""
        return self.ref.spec

    @property
    def chunk_tokens(self) -> int:
        """Tokens in a complete chunk."""
        return self.ref.chunk_tokens

    # ---- names --------------------------------------------------------------------------------------------------
    def root(self, *, tenant: bytes = b"", adapter: bytes = b"") -> RootRef:
        """Where the chains of a tenant and adapter begin. A process that writes chunks whose keys were computed
        elsewhere calls this first."""
        return self._roots.name(tenant, adapter)

    def adopt(self, key: bytes, payload: bytes) -> RootRef:
        """A root whose key another host computed: its chunks can be written here from now on. `payload` is that root's
        description there, which `describe` gives."""
        return self._roots.adopt(key, payload)

    def describe(self, key: bytes) -> bytes:
        """How a root that this process has named is described in the index."""
        return self._roots.find(key).payload

    def keys(
        self, tokens: Tokens = (), *, tenant: bytes = b"", adapter: bytes = b"", extras: Sequence[Extra] = ()
    ) -> ChunkKeys:
        """The chunk keys of a prompt. Extend the result as the prompt grows: only new tokens are hashed."""
        return ChunkKeys(self.root(tenant=tenant, adapter=adapter).key, self.chunk_tokens, tokens, extras)

    # ---- finding ------------------------------------------------------------------------------------------------
    def match(self, keys: ChunkKeys, *, max_tokens: int | None = None) -> Match:
        """The longest run of complete chunks from the start, then the longest tail that fits.

        Takes no lock and changes nothing. Costs a microsecond or two a chunk, and one SHA-256 for each tail that the
        last chunk's record lists (eight at most).
        """
        limit = keys.num_tokens if max_tokens is None else min(max_tokens, keys.num_tokens)
        root = self._roots.find(keys.root)
        run = self._store.run(root, keys.full[: limit // self.chunk_tokens])
        chunks = keys.refs(run.length)
        room = limit - run.length * self.chunk_tokens
        lengths = sorted({length for length in run.tails if length <= min(room, self.chunk_tokens - 1)}, reverse=True)
        tails = [keys.tail_ref(run.length, length) for length in lengths]
        # All in one question: it may go to another host.
        there = self._store.exists(root, tails, anywhere=True) if tails else []
        chunks += [tail for tail, found in zip(tails, there, strict=True) if found][:1]
        match = Match(tuple(chunks))
        self._count(matches=1, asked_tokens=limit, matched_tokens=match.num_tokens)
        return match

    def exists(self, chunks: Sequence[ChunkRef]) -> list[bool]:
        """Whether each chunk is there now, in the tier that chunks are written to."""
        return self._store.exists(self._roots.any, chunks)

    def being_filled(self, chunks: Sequence[ChunkRef]) -> list[bool]:
        """Whether a living process is writing each chunk, which is not complete yet."""
        return self._store.being_filled([chunk.key for chunk in chunks])

    def lease(self, match: Match, request_id: str, *, is_hit: bool = True) -> RequestLease:
        """Keep a match from eviction until released. One lease per request: taking it again changes nothing, and a
        deeper match replaces a shallower one. The first lease of a request counts as a hit of the deepest chunk, unless
        `is_hit` is False because nothing will be loaded."""
        groups = [chunks for chunks in match.groups if chunks]
        with self._lock:
            is_hit = is_hit and request_id not in self._own_leases()
        # Always a new one: the chunk that was leased may have been cleared and written again since.
        leases = [self._store.lease(self._roots.any, chunks[-1].key, is_hit=is_hit) for chunks in groups]
        taken = tuple(lease for lease in leases if lease is not None)
        if taken:
            with self._lock:
                old = self._own_leases().get(request_id, ())
                self._leases[request_id] = taken
            for lease in old:
                lease.release()
            for chunks in groups:
                self._store.touch(chunks[-1].key)
        return RequestLease(match, lambda: self.release(request_id), bool(taken) and len(taken) == len(groups))

    def release(self, request_id: str) -> None:
        """End a request's lease, if it has one."""
        with self._lock:
            held = self._own_leases().pop(request_id, ())
        for lease in held:
            lease.release()

    def _own_leases(self) -> dict[str, tuple[Lease, ...]]:
        """This process's leases: a forked child has none of its parent's."""
        if self._pid != os.getpid():
            self._pid, self._leases = os.getpid(), {}
        return self._leases

    # ---- moving bytes -------------------------------------------------------------------------------------------
    def empty(self, chunk: ChunkRef, shard: Shard) -> Tiles:
        """Fresh memory of the right shape for this shard's tiles of a chunk."""
        return np.empty(self._shape(chunk, shard), np.uint8)

    def read(
        self,
        chunks: Sequence[ChunkRef],
        shard: Shard,
        out: Sequence[Buffer] | Tiles,
        *,
        deadline_s: float | None = None,
        keep: bool = True,
    ) -> list[Status]:
        """Copy this shard's tiles of each chunk into the caller's memory and verify them there.

        One buffer a chunk (`empty` makes them), or, where all chunks have the same number of tokens, one array for
        all: uint8 of shape (chunks, layers, heads, bytes), each tile contiguous, which is the fastest way to bring
        many small pieces. A buffer whose status is not OK holds garbage. Chunks that only a lower tier has are also
        brought to the first one, unless `keep` is False.
        """
        if len(out) != len(chunks):
            raise BufferMismatchError(f"{len(out)} buffers were given for {len(chunks)} chunks")
        if not isinstance(out, np.ndarray) or not chunks:
            pieces = [Piece(chunk, shard, buffer) for chunk, buffer in zip(chunks, out, strict=True)]
            return self.read_pieces(pieces, deadline_s=deadline_s, keep=keep)
        shape = self._shape(chunks[0], shard)
        fits = out.shape[1:] == shape and out.dtype == np.uint8 and out.strides[3] == 1 and out.flags.writeable
        sizes = (
            {chunk.num_tokens for chunk in chunks}
            if shard.split.parts == 1
            else {self._shape(c, shard) for c in chunks}
        )
        if not fits or len(sizes) > 1 or _overlaps(out):
            raise BufferMismatchError(
                f"one array for {len(chunks)} chunks must be writeable uint8 of shape {(len(chunks), *shape)}, each "
                f"tile contiguous, and the chunks of one size; got {out.dtype} of shape {out.shape}"
            )
        root = self._roots.find_or_any(chunks[0].root)
        if keep:
            self._fetch_all(root, chunks, deadline_s)
        statuses = self._store.read_shard(root, chunks, shard, out, deadline_s)
        self._tally("read", shape[0] * shape[1] * shape[2] * statuses.count(Status.OK), statuses)
        return statuses

    def read_pieces(
        self, pieces: Sequence[Piece], *, deadline_s: float | None = None, keep: bool = True
    ) -> list[Status]:
        """Read any mixture of shards of any chunks of this space. `keep`: see `read`."""
        ready = [self._ready(piece) for piece in pieces]
        root = self._roots.find_or_any(pieces[0].chunk.root) if pieces else self._roots.any
        if keep:
            self._fetch_all(root, [piece.chunk for piece in pieces], deadline_s)
        statuses = self._store.read(root, ready, deadline_s)
        self._tally("read", _moved(ready, statuses), statuses)
        return statuses

    def write(
        self,
        chunks: Sequence[ChunkRef],
        shard: Shard,
        tiles: Sequence[Buffer],
        *,
        before: range | None = None,
        encodings: Sequence[int] | None = None,
        deadline_s: float | None = None,
    ) -> list[Status]:
        """Store this shard's tiles of each chunk. Ranks that hold the same tiles divide them: each writes its share.

        Give parents before children. OK means that this rank's part is in; the chunk can be found when the last
        rank's is. Until then its bytes are pending, and pending bytes take at most a quarter of the store: ranks that
        are far ahead of their slowest peer meet FULL.

        A chunk may be written in several groups of layers. From the second group on, pass the layers that were written
        `before`; the status is LOST if the chunk was cleared or aborted since, because it cannot become complete.

        `encodings`: how each chunk's tiles are given, and stored; None: they are raw, and packed here if the pool wants
        that (`encoding`). All parts of a chunk must be stored alike: a part whose tiles cannot be packed, though others
        were, is BUSY.
        """
        if len(tiles) != len(chunks):
            raise BufferMismatchError(f"{len(tiles)} buffers were given for {len(chunks)} chunks")
        statuses = [Status.OK] * len(chunks)
        pieces: dict[bytes, list[tuple[int, Piece]]] = {}
        for i, (chunk, buffer) in enumerate(zip(chunks, tiles, strict=True)):
            given = RAW if encodings is None else encodings[i]
            whole = as_tiles(buffer, self._shape(chunk, shard, given), writable=False)
            owned, first, step = shard.owned(chunk.number)
            earlier = None if before is None else replace(shard, layers=before).owned(chunk.number)[0].layers
            # Also where this rank writes nothing: a chunk can only be reserved when its parent is.
            piece = Piece(chunk, owned, whole[first::step], earlier, given)
            if encodings is None and self.encoding(chunk.num_tokens, shard) != RAW:
                piece = pack_piece(self.spec, piece)
            pieces.setdefault(chunk.root, []).append((i, piece))
        for root, numbered in pieces.items():
            batch = [piece for _, piece in numbered]
            outcome = self._store.write(self._roots.find(root), batch, deadline_s)
            self._tally("write", _moved(batch, outcome), outcome)
            for (i, _), status in zip(numbered, outcome, strict=True):
                statuses[i] = status
        return statuses

    def _fetch_all(self, root: RootRef, chunks: Sequence[ChunkRef], deadline_s: float | None) -> None:
        """Bring chunks that only lower tiers have into the first one, as far as they can be kept there, and wait."""
        if not self._store.has_lower_tiers or not chunks or root.key != chunks[0].root:
            return
        end = time.monotonic() + (_FETCH_S if deadline_s is None else deadline_s)
        for run in chain_runs(chunks):
            fetch = self._store.fetch(root, run, max(0.0, end - time.monotonic()))
            if fetch is not None:
                fetch.wait(end)
                fetch.release()

    def judge(self, chunk: ChunkRef, shard: Shard, *, deadline_s: float | None = None) -> Status:
        """A copy of a lent chunk did not verify: read it where it was lent. DAMAGED: it was damaged and has been
        removed; MISS: it was evicted meanwhile; OK: the copy was bad."""
        status = self._store.judge(self._roots.any, Piece(chunk, shard, self.empty(chunk, shard)), deadline_s)
        self._tally("read", 0, [status])
        return status

    @property
    def has_lower_tiers(self) -> bool:
        """Whether there are lower tiers in which chunks may be found."""
        return self._store.has_lower_tiers

    def fetch(self, chunks: Sequence[ChunkRef], *, deadline_s: float) -> Fetch | None:
        """Begin to bring consecutive chunks of one chain from lower tiers into the first one; None if there is nothing
        to do. The caller must `release` the result when the chunks are loaded or no longer needed.

        Costs a few microseconds a chunk where the first tier has them all. Does not wait."""
        return self._store.fetch(self._roots.find(chunks[0].root), chunks, deadline_s) if chunks else None

    def segment(self, number: int) -> Tiles | None:
        """See `MappedStore.segment`; None also where the store is not mapped."""
        return None if self._mapped is None else self._mapped.segment(number)

    def reserve(
        self,
        chunks: Sequence[ChunkRef],
        shard: Shard,
        *,
        encodings: Sequence[int] | None = None,
        deadline_s: float | None = None,
    ) -> list[Reservation]:
        """Open extents for filling in place (mapped stores only). Close each reservation when its writing has ended.
        `encodings`: how each chunk's tiles will be stored; None: all raw."""
        mapped = self._in_place("write")
        roots = {chunk.root for chunk in chunks}
        if len(roots) > 1:
            raise InvalidArgumentError("chunks of several tenants or adapters cannot be reserved in one call")
        if not roots:
            return []
        forms = [Form(shard.split, encoding) for encoding in encodings or [RAW] * len(chunks)]
        return list(mapped.reserve(self._roots.find(chunks[0].root), chunks, forms, deadline_s))

    def places(self, extents: Sequence[Reservation]) -> list[Place | None]:
        """The addresses of some reserved extents; None for a reservation that has ended."""
        return self._in_place("write").places(extents)

    def noted(self, extents: Sequence[Reservation], shard: Shard) -> list[int]:
        """How many of this shard's tiles are already in each of some reserved extents. Do not write those
        again: the same prompt may have been computed twice, and the two results may differ in the last bit."""
        return self._in_place("write").noted(extents, shard.layers, shard.heads, shard.part) if extents else []

    def commit(self, filled: Sequence[Filled], *, deadline_s: float | None = None) -> list[Status]:
        """Commit what was filled in reserved extents, all in one transaction. Does not close the reservations."""
        if not filled:
            return []
        statuses = self._in_place("write").commit(filled, deadline_s)
        self._tally("write", 0, statuses)
        return statuses

    def commit_shard(
        self,
        extents: Sequence[Reservation],
        shard: Shard,
        sums: npt.NDArray[np.uint64],
        *,
        deadline_s: float | None = None,
    ) -> list[Status]:
        """`commit` of this shard's tiles of many chunks, with checksums (chunks, layers, heads): the fastest way."""
        if not extents:
            return []
        statuses = self._in_place("write").commit_shard(extents, shard, sums, deadline_s)
        self._tally("write", 0, statuses)
        return statuses

    def close_all(self, extents: Sequence[Reservation]) -> None:
        """Stop writing into some reserved extents."""
        self._in_place("write").close_all(extents)

    def abort(self, chunks: Sequence[ChunkRef], *, encoding: int | None = None) -> int:
        """Abort chunks that this rank's group is writing, so that their room is free at once: all, or
        those that it writes in one encoding. Returns how many.

        Chunks that another server writes, and complete ones, do not change. A rank that has not begun a chunk yet may
        still do so; such a chunk expires.
        """
        return self._store.abandon([chunk.key for chunk in chunks], encoding) if chunks else 0

    def tidy(self) -> None:
        """Free extents in limbo that no process has open any more (mapped stores only)."""
        self._in_place("write").remove(self._roots.any, [])

    def lend(self, chunks: Sequence[ChunkRef], shard: Shard) -> Loan:
        """Where consecutive chunks of one chain are stored, under one lease (mapped stores only). Chunks that are not
        complete yet are among them if all tiles of this shard are in.

        They are NOT verified. A caller that copies them (to a device, say) must compare the copy's checksums with
        `sums` before use, and pass those that fail to `read`, which judges and counts the damage.
        """
        for chunk in chunks:
            self._shape(chunk, shard)
        return self._in_place("read").lend(self._roots.any, chunks, shard)

    def arrived(self, chunks: Sequence[ChunkRef], shard: Shard) -> list[Arrived]:
        """How far chunks are that may still be filled, by another process, a peer's receiver or a fetch from a lower
        tier (mapped stores only). A few microseconds a chunk; takes no lock and holds nothing."""
        return self._in_place("read").arrived(chunks, shard, self.spec)

    def note_taken(self, num_pieces: int, num_bytes: int) -> None:
        """Count tiles that were copied out of a loan and verified, as `read` counts its own."""
        self._tally("read", num_bytes, [Status.OK] * num_pieces)

    @property
    def mapped(self) -> bool:
        """Whether extents can be filled and seen in place: `reserve`, `borrow` and `lend` work."""
        return self._mapped is not None

    @property
    def max_pending_bytes(self) -> int:
        """How many bytes may be reserved and not yet visible, by all servers together."""
        return self._store.max_pending_bytes

    @property
    def pending_bytes(self) -> int:
        """How many are now."""
        return self._store.stats().pending_bytes

    @property
    def lookup_s(self) -> float:
        """How long `match`, `exists`, `lease` and `release` may take; 0 if they only read
        memory of this host and never wait."""
        return self._store.lookup_s

    @contextmanager
    def borrow(self, chunk: ChunkRef, shard: Shard) -> Iterator[Tiles | None]:
        """A verified, read-only view of stored tiles, valid inside the `with`; None if there are none."""
        outcome = self._in_place("read").borrow(self._roots.any, chunk, shard)
        if isinstance(outcome, Status):
            yield None
            return
        lease, view = outcome
        try:
            yield view
        finally:
            lease.release()

    # ---- keeping ------------------------------------------------------------------------------------------------
    def pin(self, match: Match) -> bool:
        """Keep a match from eviction until `unpin`, across processes and restarts; False if it is gone."""
        return self._pin(match, True)

    def unpin(self, match: Match) -> bool:
        """Let a match be evicted again. Idempotent; False if it is gone."""
        return self._pin(match, False)

    def _pin(self, match: Match, pinned: bool) -> bool:
        if not match.chunks:
            return False
        last = match.chunks[-1]
        return self._store.pin(self._roots.any, last.key, pinned) == Status.OK

    def _in_place(self, instead: str) -> MappedStore:
        """The store, for what needs mapped memory. Raises InvalidArgumentError where there is none."""
        if self._mapped is None:
            raise InvalidArgumentError(f"this store is not mapped; use {instead}, or put shm:// before it")
        return self._mapped

    # ---- helpers ------------------------------------------------------------------------------------------------
    def _ready(self, piece: Piece) -> Piece:
        """The piece with its memory as tiles; the same one where it is so already."""
        chunk, shard, buffer, *_ = piece
        tiles = as_tiles(buffer, self._shape(chunk, shard), writable=True)
        return piece if tiles is buffer else Piece(chunk, shard, tiles)

    def encoding(self, num_tokens: int, shard: Shard, *, on_device: bool = False) -> int:
        """How this pool wants new tiles of so many tokens to be stored. `on_device`: a GPU packs them."""
        packing = self._store.packing
        pays = not self.mapped or (on_device and PACKS_ON_DEVICES)
        is_wanted = packing == Packing.ON or (packing == Packing.AUTO and pays)
        return packed_or_raw(self.spec, num_tokens) if is_wanted and shard.split.parts == 1 else RAW

    def _shape(self, chunk: ChunkRef, shard: Shard, encoding: int = RAW) -> tuple[int, int, int]:
        spec, layers, heads = self.ref.spec, shard.layers, shard.heads
        tokens, number = chunk.num_tokens, chunk.number
        if type(tokens) is not int or not 0 < tokens <= self.ref.chunk_tokens or len(chunk.key) != KEY_BYTES:
            raise InvalidArgumentError(f"a chunk has a key and 1 to {self.chunk_tokens} tokens, not {tokens!r}")
        if not 0 <= number < 1 << 32 or chunk.first_token != number * self.ref.chunk_tokens:
            raise InvalidArgumentError(f"chunk {number} does not begin at token {chunk.first_token}")
        if layers.start < 0 or layers.stop > spec.num_layers or heads.start < 0 or heads.stop > spec.num_kv_heads:
            raise InvalidArgumentError(f"{shard} does not fit a model of {spec}")
        if encoding != RAW:
            return len(layers), len(heads), stored_tile_bytes(spec, chunk.num_tokens, encoding)
        rows = chunk.num_tokens
        if shard.split.parts > 1:
            rows = shard.num_rows(chunk.first_token, rows)
        return len(layers), len(heads), rows * spec.row_bytes

    def _tally(self, verb: str, moved: int, statuses: Sequence[Status]) -> None:
        good = statuses.count(Status.OK)
        others = set(statuses) if good < len(statuses) else (Status.OK,)
        counts = {f"{verb}_{status.name.lower()}": statuses.count(status) for status in others}
        self._count(**{f"{verb}_bytes": moved, **counts})


def _overlaps(array: Tiles) -> bool:
    """Whether two tiles of an array share memory: one of them would be overwritten after it was found right."""
    axes = sorted(
        (abs(stride), length) for stride, length in zip(array.strides, array.shape, strict=True) if length > 1
    )
    span = 1
    for stride, length in axes:
        if stride < span:
            return True
        span = stride * (length - 1) + span
    return False


def _moved(pieces: Sequence[Piece], statuses: Sequence[Status]) -> int:
    """Bytes of the pieces that are OK."""
    return sum([piece.tiles.nbytes for piece, status in zip(pieces, statuses, strict=True) if not status])
