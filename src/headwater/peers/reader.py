"""`peer://HOST:PORT`: the first tier of another host's pool as a store that is only read, below the tiers of this one.

The other host's `headwater pool receive` answers. Every operation has a deadline and goes through a circuit breaker, as
with every remote tier; a match is an estimate, since the other host evicts by itself, and every byte is verified where
it is used. Nothing is written there, kept there or removed there.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, NoReturn, TypeVar

import numpy as np

from headwater.errors import (
    DeadlineError,
    InvalidArgumentError,
    PeerRefusedError,
    PeerTimeoutError,
    WireError,
)
from headwater.kv.encoding import ENCODINGS, RAW, can_decode, encoding_of_extent, stored_tile_bytes
from headwater.kv.hashing import ChunkRef
from headwater.kv.spec import KVSpec
from headwater.kv.topology import WHOLE, Shard
from headwater.locks import ForkSafeLock
from headwater.peers.channels import Channels, ChannelSettings, PeerChannel
from headwater.peers.follow import PeerFollower
from headwater.peers.pull_wire import (
    MAX_KEYS,
    UNSPECIFIED,
    Exists,
    PageReader,
    decode_ages,
    decode_run_answer,
    encode_run,
)
from headwater.peers.pulling import Got, Wanted, judge, pull
from headwater.peers.wire import Refusal, Type, encoding_bits
from headwater.stores.base import (
    Filling,
    Form,
    Lease,
    Packing,
    Piece,
    Progress,
    RootRef,
    Run,
    SpaceRef,
    Status,
    Tiles,
    check_extents,
)
from headwater.stores.breaker import CircuitBreaker
from headwater.stores.decode import settle_tiles, takes_stored
from headwater.stores.remote.guard import Guard
from headwater.stores.remote.memory import Memory
from headwater.stores.remote.plan import is_right
from headwater.stores.remote.store import DEFAULT_DEADLINE_S, DEFAULT_LOOKUP_S
from headwater.stores.stats import ChunkInfo, StoreStats, TierStats, VerifyReport
from headwater.stores.url import StoreUrl

log = logging.getLogger("headwater")
T = TypeVar("T")

_ADMIN_S = 60.0
_ATTEMPTS = 2
_REFUSED_S = 5.0
_NOT_THIS_SPACE = (Refusal.SPACE, Refusal.TENANTS)
_MOST_AGES = 1 << 16


def open_source(url: StoreUrl) -> PeerStore:
    """The store that a `peer://` URL names. Raises ConfigError where its secret or certificates cannot be used."""
    return PeerStore(url, Channels(ChannelSettings.of(url)))


class _NoLease:
    """What can be promised about eviction on another host: nothing. Reads verify."""

    def release(self) -> None:
        return


class PeerStore:
    """One peer as a store. See `stores.base.SourceStore`."""

    mapped = None
    has_lower_tiers = False
    packing = Packing.OFF
    max_extent_bytes = max_pending_bytes = 1 << 62

    def __init__(self, url: StoreUrl, channels: Channels) -> None:
        self.url = url
        self._channels = channels
        self._deadline_s = url.seconds("deadline", DEFAULT_DEADLINE_S)
        self.lookup_s = url.seconds("lookup", DEFAULT_LOOKUP_S)
        self.breaker = CircuitBreaker(str(url), self.ping)
        self._guard = Guard(str(url), self.breaker)
        self._memory = Memory()
        self._ages: OrderedDict[bytes, int] = OrderedDict()
        self._refused: dict[bytes, float] = {}
        self._space: SpaceRef | None = None
        """Of the last question: keys alone can be asked about in any space."""
        self._lock = ForkSafeLock()
        self._followers: list[PeerFollower] = []

    @property
    def home(self) -> str:
        """See `stores.base.Store.home`."""
        return str(self.url)

    @property
    def first(self) -> PeerStore:
        """See `stores.base.Store.first`."""
        return self

    # ---- finding ------------------------------------------------------------------------------------------------
    def check_space(self, space: SpaceRef) -> None:
        """Nothing to check: a peer that has other KV says so when it is asked."""
        self._space = space

    def run(self, root: RootRef, keys: list[bytes]) -> Run:
        """See `stores.base.Store.run`. One question for the whole prompt."""
        now = time.monotonic()
        keys = keys[: min(MAX_KEYS, self._memory.run_limit(keys, now))]
        meta = encode_run(root.key, keys)
        run = self._look_up(
            root.space, lambda channel, end: decode_run_answer(_asked(channel, Type.RUN, meta, end), len(keys))
        )
        if run is None:
            return Run(0, ())
        if run.length < len(keys):
            self._memory.note_absent(keys[run.length], now)
        return run

    def exists(self, root: RootRef, chunks: Sequence[ChunkRef], *, anywhere: bool = False) -> list[bool]:
        """See `stores.base.Store.exists`."""
        return [bool(age) for age in self._used(root.space, chunks)]

    def forms(self, chunks: Sequence[ChunkRef]) -> list[Form | None]:
        """See `stores.base.ChunkSource.forms`: tiles travel whole, in the encoding that the peer stores them in."""
        ages, encodings = self._ask_for(self._space, chunks)
        return [Form(WHOLE, encoding) if age else None for age, encoding in zip(ages, encodings, strict=True)]

    def ages(self, keys: Sequence[bytes]) -> list[int]:
        """See `stores.base.Store.ages`: as the peer said when it was asked whether it has them."""
        return [self._ages.get(key, 0) for key in keys]

    def _used(self, space: SpaceRef | None, chunks: Sequence[ChunkRef], *, is_use: bool = False) -> list[int]:
        """When each chunk was last used there; 0 for those that are not there, or nobody says so in time."""
        return self._ask_for(space, chunks, is_use=is_use)[0]

    def _ask_for(
        self, space: SpaceRef | None, chunks: Sequence[ChunkRef], *, is_use: bool = False
    ) -> tuple[list[int], list[int]]:
        """`_used`, and in which encoding the peer would send each chunk: one that it stores and can be used here."""
        if not chunks or space is None or len(chunks) > MAX_KEYS:
            return [0] * len(chunks), [RAW] * len(chunks)
        question, count = Exists([(chunk.key, chunk.parent) for chunk in chunks], is_use), len(chunks)

        def ask(channel: PeerChannel, end: float) -> tuple[list[int], list[int]]:
            has_encodings = channel.encodings > 0
            meta = _asked(channel, Type.EXISTS, question._replace(tell_encodings=has_encodings).encode(), end)
            return decode_ages(meta, count, has_encodings=has_encodings)

        found = self._look_up(space, ask)
        if found is None:
            return [0] * len(chunks), [RAW] * len(chunks)
        ages, encodings = found
        with self._lock:
            for chunk, age in zip(chunks, ages, strict=True):
                self._ages.pop(chunk.key, None)
                if age:
                    self._ages[chunk.key] = age
            while len(self._ages) > _MOST_AGES:
                self._ages.popitem(last=False)
        return ages, [encoding if can_decode(encoding) else RAW for encoding in encodings]

    def _look_up(self, space: SpaceRef, ask: Callable[[PeerChannel, float], T]) -> T | None:
        """One question and its answer; None where there is none in time."""
        end = time.monotonic() + self.lookup_s

        def work() -> T:
            with self._channels.use(space, end, is_question=True) as channel:
                return ask(channel, end)

        return self._guarded("look-up", space, work, end)

    def _guarded(
        self, verb: str, space: SpaceRef, work: Callable[[], T], deadline: float, *, retry: bool = True
    ) -> T | None:
        """Do it through the breaker. A peer that has no use for this space is well, and left alone for that space."""
        self._space = space
        if not space.scope or self._refused.get(space.scope, 0.0) > time.monotonic():
            self._guard.count(skipped=1)
            return None

        def tried() -> T | None:
            try:
                return work()
            except PeerRefusedError as error:
                if error.code not in _NOT_THIS_SPACE:
                    raise
                self._note_refusal(space.scope, error)
                return None
            except PeerTimeoutError as error:
                raise DeadlineError(str(error)) from error

        return self._guard.run(verb, tried, deadline, retry=retry)

    def _note_refusal(self, scope: bytes, error: PeerRefusedError) -> None:
        if scope not in self._refused:
            log.warning("%s has nothing for this model: %s", self.url, error)
        self._refused[scope] = time.monotonic() + _REFUSED_S
        self._guard.count(refused=1)

    # ---- reading ------------------------------------------------------------------------------------------------
    def fill(
        self, root: RootRef, chunks: Sequence[ChunkRef], extents: Sequence[Tiles], deadline: float
    ) -> list[Filling]:
        """See `stores.base.Source.fill`."""
        check_extents(chunks, extents)
        spec = root.space.spec
        shard = Shard(range(spec.num_layers), range(spec.num_kv_heads))
        wanted = dict[int, Wanted]()
        for i, (chunk, extent) in enumerate(zip(chunks, extents, strict=True)):
            encoding = encoding_of_extent(spec, chunk.num_tokens, extent.nbytes)
            if encoding is not None:
                tiles = extent.reshape(spec.num_layers, spec.num_kv_heads, -1)
                wanted[i] = Wanted(chunk, shard, tiles, encoding)
        got, outcome = self._pull(root, wanted, deadline), [Filling(Status.MISS)] * len(chunks)
        for i, item in got.items():
            outcome[i] = Filling(item.status, item.sums, Form(WHOLE, item.encoding))
        self._count([extent.nbytes for extent in extents], [filling.status for filling in outcome])
        return outcome

    def read(self, root: RootRef, pieces: Sequence[Piece], deadline_s: float | None = None) -> list[Status]:
        """See `stores.base.Store.read`. Bytes that do not verify are asked for once more, after the peer has looked at
        its own copy."""
        deadline = self._deadline(deadline_s)
        spec, statuses = root.space.spec, [Status.MISS] * len(pieces)
        wanted = {i: _wanted(spec, piece) for i, piece in enumerate(pieces) if piece.shard.num_tiles}
        for _ in range(_ATTEMPTS):
            got = self._pull(root, wanted, deadline)
            wrong = dict[int, Wanted]()
            for i, outcome in got.items():
                statuses[i] = outcome.status
                if outcome.status == Status.OK and not _is_right(outcome):
                    self._guard.count(damaged=1)
                    statuses[i] = self._judge(root, wanted[i], deadline)
                    if statuses[i] == Status.OK:  # there; it was damaged on the way
                        statuses[i], wrong[i] = Status.DAMAGED, wanted[i]
                elif outcome.status == Status.OK and not _settle(spec, pieces[i], outcome):
                    statuses[i] = Status.DAMAGED  # right by its checksums, and nothing that anybody writes
            wanted = wrong
            if not wanted:
                break
        self._count([piece.tiles.nbytes for piece in pieces], statuses)
        return statuses

    def judge(self, root: RootRef, piece: Piece, deadline_s: float | None = None) -> Status:
        """See `stores.base.Store.judge`."""
        return self.read(root, [piece], deadline_s)[0]

    def read_shard(
        self, root: RootRef, chunks: Sequence[ChunkRef], shard: Shard, tiles: Tiles, deadline_s: float | None = None
    ) -> list[Status]:
        """See `stores.base.Store.read_shard`."""
        return self.read(root, [Piece(c, shard, t) for c, t in zip(chunks, tiles, strict=True)], deadline_s)

    def _pull(self, root: RootRef, wanted: dict[int, Wanted], deadline: float) -> dict[int, Got]:
        """Bring what is wanted, by number; what an error cut short is asked for once more."""
        got = {i: Got(Status.MISS) for i in wanted}
        todo = dict(wanted)
        for _ in range(_ATTEMPTS):
            numbers = list(todo)

            def answered(at: int, outcome: Got, numbers: list[int] = numbers) -> None:
                got[numbers[at]] = outcome
                todo.pop(numbers[at], None)

            work = partial(pull, self._channels, root, [todo[i] for i in numbers], deadline, answered)
            if not todo or time.monotonic() >= deadline:
                break
            self._guarded("read", root.space, work, deadline, retry=False)
            if not self.breaker.closed:
                break
        if time.monotonic() >= deadline:
            got |= {i: Got(Status.TIMEOUT) for i in todo}
        return got

    def _judge(self, root: RootRef, item: Wanted, deadline: float) -> Status:
        status = self._guarded(
            "check", root.space, lambda: judge(self._channels, root, item, deadline), deadline, retry=False
        )
        return Status.DAMAGED if status is None else status

    def _count(self, sizes: Sequence[int], statuses: Sequence[Status]) -> None:
        good = [size for size, status in zip(sizes, statuses, strict=True) if status == Status.OK]
        self._guard.count(hits=len(good), hit_bytes=sum(good), misses=len(statuses) - len(good))

    # ---- keeping ------------------------------------------------------------------------------------------------
    def touch(self, key: bytes) -> None:
        """Nothing: the peer sees reads by itself."""

    def lease(self, root: RootRef, key: bytes, *, is_hit: bool = False) -> Lease | None:
        """See `stores.base.Store.lease`: a use is noted there; more cannot be promised."""
        used = self._used(root.space, [ChunkRef(key, UNSPECIFIED, 0, 0, 1, root.key)], is_use=True)
        return _NoLease() if used[0] else None

    def pin(self, root: RootRef, key: bytes, pinned: bool) -> Status:
        """Nothing: pins are the other host's own."""
        return Status.MISS

    # ---- looking ------------------------------------------------------------------------------------------------
    def ping(self) -> None:
        """See `stores.base.SourceStore.ping`."""
        end = time.monotonic() + max(self.lookup_s, 1.0)
        with self._channels.use(None, end, is_question=True) as channel:
            channel.ask(Type.PING, b"", end)

    def scan(self) -> Iterator[ChunkInfo]:
        """See `stores.base.Store.scan`. Raises PeerError where the peer does not answer."""
        end, reader = time.monotonic() + _ADMIN_S, PageReader()
        with self._channels.use(None, end, is_question=True) as channel:
            _, meta = channel.ask(Type.LIST, b"", end)
            pages = [reader.decode(meta)]
            while not pages[-1].is_last:
                pages.append(reader.decode(channel.next(end)[1]))
        return iter([info for page in pages for info in page.chunks])

    def stats(self) -> StoreStats:
        """See `stores.base.Store.stats`: the other host's first tier. Raises PeerError where it does not answer."""
        end = time.monotonic() + max(self.lookup_s, 1.0)
        with self._channels.use(None, end, is_question=True) as channel:
            _, meta = channel.ask(Type.STATS, b"", end)
        try:
            found = json.loads(meta)
            names = [field.name for field in fields(StoreStats) if field.name not in ("url", "tiers")]
            figures: dict[str, Any] = {name: int(found[name]) for name in names if name in found}
            return StoreStats(str(self.url), **figures)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise WireError("a peer's figures cannot be read") from error

    def counts(self) -> Counter[str]:
        """What this process did with the peer: hits, hit_bytes, misses, damaged, refused, failed, skipped."""
        return self._guard.counts()

    def tiers(self) -> tuple[TierStats, ...]:
        """See `stores.base.Store.tiers`."""
        return ()

    def verify(self, progress: Progress | None = None) -> VerifyReport:
        """Nothing: a pool is checked on its own host."""
        return VerifyReport(0, 0, 0, 0, 0, ())

    def follow(self, since: int | None = None) -> PeerFollower:
        """See `stores.base.Store.follow`, and `peers.follow`: the events of the other host's first tier. Waits for a
        connection no longer than for a look-up."""
        follower = PeerFollower(self._channels, str(self.url), since, self.lookup_s)
        self._followers.append(follower)
        return follower

    # ---- everything else is the other host's business ------------------------------------------------------------
    def write(self, root: RootRef, pieces: Sequence[Piece], deadline_s: float | None = None) -> NoReturn:
        """Raises InvalidArgumentError: a peer is only read."""
        raise InvalidArgumentError(
            f"{self.url} is only read; put a tier of this host before it: shm:///NAME,{self.url}"
        )

    def remove(self, root: RootRef, keys: Sequence[bytes]) -> list[Status]:
        """Nothing: chunks of another host are removed there."""
        return [Status.MISS] * len(keys)

    def clear(
        self, match: Callable[[dict[str, Any], dict[str, Any]], bool] | None, progress: Progress | None = None
    ) -> int:
        """Nothing: see `remove`."""
        return 0

    def abandon(self, keys: Sequence[bytes], encoding: int | None = None) -> int:
        """Nothing is begun here."""
        return 0

    def being_filled(self, keys: Sequence[bytes]) -> list[bool]:
        """See `abandon`."""
        return [False] * len(keys)

    def fetch(self, root: RootRef, chunks: Sequence[ChunkRef], deadline_s: float) -> None:
        """Nothing: there is no tier above it to bring anything to."""

    def flush(self, timeout_s: float) -> bool:
        """Nothing to wait for."""
        return True

    def close(self) -> None:
        """See `stores.base.Store.close`."""
        self._guard.close()
        for follower in self._followers:
            follower.close()
        self._channels.close()

    def _deadline(self, deadline_s: float | None) -> float:
        seconds = self._deadline_s if deadline_s is None else deadline_s
        if not seconds >= 0:
            raise InvalidArgumentError(f"deadline_s is {deadline_s}; expected a number of seconds")
        return time.monotonic() + min(seconds, 86400.0)


def _asked(channel: PeerChannel, kind: Type, meta: bytes, end: float) -> bytes:
    header, answer = channel.ask(kind, meta, end)
    if header.data_bytes:
        raise WireError("an answer has data that was not requested")
    return answer


def _wanted(spec: KVSpec, piece: Piece) -> Wanted:
    """The whole tiles that a piece needs: its own memory, or scratch memory where it has parts of tiles."""
    tiles, others = piece.tiles, encoding_bits(number for number in ENCODINGS if can_decode(number))
    if not takes_stored(piece.shard, RAW):
        shape = len(piece.shard.layers), len(piece.shard.heads), stored_tile_bytes(spec, piece.chunk.num_tokens)
        tiles = np.empty(shape, np.uint8)
    return Wanted(piece.chunk, piece.shard, tiles, RAW, others)


def _is_right(got: Got) -> bool:
    return got.tiles is not None and is_right(got.tiles, got.sums)


def _settle(spec: KVSpec, piece: Piece, got: Got) -> bool:
    """Bring what a piece is about of verified tiles to its memory. False where they are not readable."""
    if got.tiles is None or takes_stored(piece.shard, got.encoding):
        return True
    return settle_tiles(spec, piece.chunk, piece.shard, got.encoding, got.tiles, piece.tiles)
