"""What pulls and followers say: the meta parts of their requests and answers, each with its bounds.

Nothing here moves bytes or looks at a pool. All numbers are little-endian; times are told as ages, since the clocks of
two hosts differ.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headwater.errors import WireError
from headwater.kv.encoding import RAW
from headwater.kv.hashing import KEY_BYTES, ChunkRef
from headwater.kv.topology import Shard
from headwater.peers.wire import Cursor, encoding_bits
from headwater.stores.base import Run, Status
from headwater.stores.events import Event, EventKind
from headwater.stores.stats import ChunkInfo

MAX_KEYS = 16_000
"""In one question: about four million tokens."""
MAX_READ_BYTES = 64 << 20
"""Of one answer with more than one chunk."""
PAGE_CHUNKS = 8192
MAX_EVENTS = 4096
FROM_NOW = (1 << 64) - 1
UNSPECIFIED = bytes(KEY_BYTES)
"""A parent that is not looked at."""

_COUNT = struct.Struct("<I")
_RUN = struct.Struct("<32sI")
_RUN_ANSWER = struct.Struct("<II")
_EXISTS = struct.Struct("<BI")
_READ = struct.Struct("<32s32sIIIIIIIII")
_PAGE = struct.Struct("<BIII")
_ENTRY = struct.Struct("<32sIIIQQB3x")
_EVENTS = struct.Struct("<QI")
_EVENT = struct.Struct("<QB8sII32sQ")
_PLACE = struct.Struct("<Q32s")
_TAIL, _PINNED, _LEASED = 1, 2, 4
_MAX_TAILS = 64
_IS_USE, _TELL_ENCODINGS = 1, 2
_READ_STATUSES = frozenset((Status.OK, Status.MISS, Status.DAMAGED, Status.TIMEOUT))


def _times(count: int, most: int) -> int:
    if count > most:
        raise WireError(f"a frame has {count} entries; at most {most} are allowed")
    return count


# ---- looking up -------------------------------------------------------------------------------------------------
def encode_run(root: bytes, keys: Sequence[bytes]) -> bytes:
    """RUN: how many of these keys, from the first on, are complete below a root."""
    return _RUN.pack(root, len(keys)) + b"".join(keys)


def decode_run(meta: bytes) -> tuple[bytes, list[bytes]]:
    """(root, keys) of a RUN. Raises WireError."""
    cursor = Cursor(meta)
    root, count = _RUN.unpack(cursor.take(_RUN.size))
    raw = cursor.take(KEY_BYTES * _times(count, MAX_KEYS))
    cursor.end()
    return root, [raw[at : at + KEY_BYTES] for at in range(0, len(raw), KEY_BYTES)]


def encode_run_answer(run: Run) -> bytes:
    """The length of a run, and the tails at its end."""
    tails = run.tails[:_MAX_TAILS]
    return _RUN_ANSWER.pack(run.length, len(tails)) + np.array(tails, "<u4").tobytes()


def decode_run_answer(meta: bytes, num_keys: int) -> Run:
    """Read what `encode_run_answer` wrote. Raises WireError."""
    cursor = Cursor(meta)
    length, count = cursor.unpack(_RUN_ANSWER)
    tails = np.frombuffer(cursor.take(4 * _times(count, _MAX_TAILS)), "<u4").tolist()
    cursor.end()
    if length > num_keys or 0 in tails:
        raise WireError(f"a run of {length} chunks of {num_keys}, with tails of {tails} tokens")
    return Run(length, tuple(tails))


class Exists(NamedTuple):
    """EXISTS: which chunks are complete below their parents."""

    pairs: list[tuple[bytes, bytes]]
    """(key, parent) of each."""
    is_use: bool = False
    """To note a use of those that are."""
    tell_encodings: bool = False
    """To say how each is stored, too. Not for a listener that knows of no encodings (`Welcome.encodings`)."""

    def encode(self) -> bytes:
        """The meta part."""
        flags = _IS_USE * self.is_use | _TELL_ENCODINGS * self.tell_encodings
        return _EXISTS.pack(flags, len(self.pairs)) + b"".join([key + parent for key, parent in self.pairs])

    @classmethod
    def decode(cls, meta: bytes) -> Exists:
        """Read what `encode` wrote. Raises WireError for anything else."""
        cursor = Cursor(meta)
        flags, count = cursor.unpack(_EXISTS)
        raw = cursor.take(2 * KEY_BYTES * _times(count, MAX_KEYS))
        cursor.end()
        if flags > _IS_USE | _TELL_ENCODINGS:
            raise WireError(f"a question with unknown flags {flags}")
        starts = range(0, len(raw), 2 * KEY_BYTES)
        pairs = [(raw[at : at + KEY_BYTES], raw[at + KEY_BYTES : at + 2 * KEY_BYTES]) for at in starts]
        return cls(pairs, bool(flags & _IS_USE), bool(flags & _TELL_ENCODINGS))


def encode_ages(used_ns: Sequence[int], encodings: Sequence[int] = ()) -> bytes:
    """When chunks were last used, 0 for those that are not there, as seconds ago; and how each is stored, if that was
    asked."""
    now = time.time_ns()
    seconds = [0 if not at else 1 + max(0, min((now - at) // 10**9, (1 << 32) - 2)) for at in used_ns]
    return np.array(seconds, "<u4").tobytes() + bytes(encodings)


def decode_ages(meta: bytes, count: int, *, has_encodings: bool = False) -> tuple[list[int], list[int]]:
    """The same in this host's nanoseconds since the epoch, and the encodings: all raw where none were asked. Raises
    WireError."""
    if len(meta) != (5 if has_encodings else 4) * count:
        raise WireError(f"an answer of {len(meta)} bytes about {count} chunks")
    now, raw = time.time_ns(), np.frombuffer(meta, "<u4", count)
    ages = [0 if not age else max(1, now - (age - 1) * 10**9) for age in raw.tolist()]
    return ages, list(meta[4 * count :]) or [RAW] * count


# ---- reading ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Read:
    """READ and JUDGE: some tiles of consecutive chunks of one chain."""

    chunks: tuple[ChunkRef, ...]
    shard: Shard
    """Tiles in one piece only: parts of them are the caller's business."""
    within_ms: int
    """After so long nobody waits for it any more."""
    takes: tuple[int, ...] = ()
    """By chunk: in which encodings its tiles may come, as bits (`wire.encoding_bits`). None at all: raw, and the
    answer says nothing about encodings, as a listener wants it that knows of none."""

    def encode(self) -> bytes:
        """The meta part."""
        first, last, layers, heads = self.chunks[0], self.chunks[-1], self.shard.layers, self.shard.heads
        place = first.root, first.parent, first.number, len(self.chunks), last.num_tokens
        tiles = layers.start, layers.stop, layers.step, heads.start, heads.stop
        keys = b"".join([chunk.key for chunk in self.chunks])
        return _READ.pack(*place, *tiles, self.within_ms) + keys + bytes(self.takes)

    @classmethod
    def decode(cls, meta: bytes, chunk_tokens: int, num_layers: int, num_heads: int) -> Read:
        """Read what `encode` wrote, for a model of so many layers and heads. Raises WireError for anything else."""
        cursor = Cursor(meta)
        root, parent, number, count, last, start, stop, step, head, heads_stop, within = _READ.unpack(
            cursor.take(_READ.size)
        )
        keys = cursor.take(KEY_BYTES * _times(count, MAX_KEYS))
        takes = tuple(cursor.take(0 if cursor.is_at_end else count))
        cursor.end()
        fits = start < stop <= num_layers and step > 0 and head < heads_stop <= num_heads
        if not fits or not count or not 1 <= last <= chunk_tokens or number + count >= 1 << 32:
            raise WireError(
                f"a read of layers {start} to {stop} of {count} chunks, the last with {last} tokens, is out of bounds"
            )
        chunks = list[ChunkRef]()
        for i in range(count):
            key = keys[i * KEY_BYTES : (i + 1) * KEY_BYTES]
            tokens = last if i == count - 1 else chunk_tokens
            chunks.append(ChunkRef(key, parent, number + i, (number + i) * chunk_tokens, tokens, root))
            parent = key
        return cls(tuple(chunks), Shard(range(start, stop, step), range(head, heads_stop)), within, takes)


def encode_read_answer(
    statuses: Sequence[Status], sums: Sequence[npt.NDArray[np.uint64]], encodings: Sequence[int] = ()
) -> bytes:
    """A status for each chunk, its encoding where the request says which it takes, and the checksums of the tiles of
    those that are OK, which follow as data."""
    rows = [np.ascontiguousarray(row, "<u8").tobytes() for row in sums]
    return bytes(statuses) + bytes(encodings) + b"".join(rows)


class ReadAnswer(NamedTuple):
    """What a peer says before the tiles that it sends."""

    statuses: list[Status]
    encodings: list[int]
    """By chunk."""
    sums: npt.NDArray[np.uint64]
    """Of the chunks that are OK: (chunks, tiles)."""


def decode_read_answer(meta: bytes, read: Read) -> ReadAnswer:
    """Read the answer to a request. Raises WireError, also for tiles in an encoding that it does not take."""
    count, num_tiles, sized = len(read.chunks), read.shard.num_tiles, len(read.takes)
    statuses = decode_statuses(meta[:count], count)
    encodings = list(meta[count : count + sized]) or [RAW] * count
    sums = meta[count + sized :]
    if len(encodings) != count or len(sums) != 8 * num_tiles * statuses.count(Status.OK):
        raise WireError("an answer whose checksums do not fit its chunks")
    takes = read.takes or [encoding_bits([RAW])] * count
    for status, encoding, bits in zip(statuses, encodings, takes, strict=True):
        if status == Status.OK and not bits >> encoding & 1:
            raise WireError(f"tiles in encoding {encoding}, which were not asked for")
    return ReadAnswer(statuses, encodings, np.frombuffer(sums, "<u8").reshape(-1, num_tiles))


def decode_statuses(meta: bytes, count: int) -> list[Status]:
    """A byte for each chunk: OK, or why there is nothing to read. Raises WireError."""
    if len(meta) != count or not _READ_STATUSES.issuperset(meta):
        raise WireError("an answer that does not fit its question")
    return [Status(code) for code in meta]


# ---- listing ----------------------------------------------------------------------------------------------------
class Page(NamedTuple):
    """Some chunks of a listing."""

    chunks: list[ChunkInfo]
    is_last: bool


def encode_pages(found: Iterable[ChunkInfo]) -> Iterator[bytes]:
    """A listing as the meta parts of answers; the last one says that it is. A root is described once."""
    numbers: dict[str, int] = {}
    described, entries, now = list[str](), list[bytes](), time.time_ns()
    for info in found:
        text = json.dumps([info.space, info.root], sort_keys=True)
        if text not in numbers:
            numbers[text] = len(numbers)
            described.append(text)
        flags = _TAIL * info.is_tail | _PINNED * info.pinned | _LEASED * info.leased
        ago = max(0, now - info.last_used_ns)
        sizes = numbers[text], info.number, info.num_tokens, info.num_bytes, ago, flags
        entries.append(_ENTRY.pack(info.key, *sizes))
        if len(entries) == PAGE_CHUNKS or len(described) == 256:
            yield _page(described, entries, is_last=False)
            described, entries = [], []
    yield _page(described, entries, is_last=True)


def _page(described: Sequence[str], entries: Sequence[bytes], *, is_last: bool) -> bytes:
    text = ("[" + ",".join(described) + "]").encode()
    return _PAGE.pack(is_last, len(described), len(text), len(entries)) + text + b"".join(entries)


class PageReader:
    """Reads the pages of one listing, in order."""

    def __init__(self) -> None:
        self._roots: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def decode(self, meta: bytes) -> Page:
        """The next page. Raises WireError."""
        cursor = Cursor(meta)
        is_last, num_roots, text_bytes, count = cursor.unpack(_PAGE)
        try:
            described = json.loads(cursor.take(text_bytes))
            for space, root in described:
                if not isinstance(space, dict) or not isinstance(root, dict):
                    raise ValueError
                self._roots.append((space, root))
        except (ValueError, TypeError, RecursionError) as error:
            raise WireError("the roots of a listing cannot be read") from error
        raw = cursor.take(_ENTRY.size * _times(count, PAGE_CHUNKS))
        cursor.end()
        if len(described) != num_roots:
            raise WireError("a listing does not have as many roots as it says")
        now, chunks = time.time_ns(), list[ChunkInfo]()
        for key, at, number, tokens, size, ago, flags in _ENTRY.iter_unpack(raw):
            if at >= len(self._roots):
                raise WireError("a listing names a root that it does not describe")
            is_tail, pinned, leased = bool(flags & _TAIL), bool(flags & _PINNED), bool(flags & _LEASED)
            space, root = self._roots[at]
            used_ns = max(0, now - ago)
            chunks.append(ChunkInfo(key, space, root, number, tokens, size, is_tail, pinned, leased, used_ns))
        return Page(chunks, bool(is_last))


# ---- events -----------------------------------------------------------------------------------------------------
def encode_events(position: int, events: Sequence[Event]) -> bytes:
    """EVENTS: what happened, and the place up to which everything was told. None at all: the pool is still there."""
    now, body = time.time_ns(), []
    for event in events:
        names = event.tier.encode()[:8], event.number, event.num_tokens, event.key or bytes(KEY_BYTES)
        body.append(_EVENT.pack(event.sequence, event.kind, *names, max(0, now - event.time_ns)))
    return _EVENTS.pack(position, len(events)) + b"".join(body)


def decode_events(meta: bytes) -> tuple[int, list[Event]]:
    """(position, events). Raises WireError."""
    cursor = Cursor(meta)
    position, count = cursor.unpack(_EVENTS)
    raw = cursor.take(_EVENT.size * _times(count, MAX_EVENTS))
    cursor.end()
    now, events = time.time_ns(), list[Event]()
    for sequence, kind, tier, number, tokens, key, ago in _EVENT.iter_unpack(raw):
        if kind not in EventKind._value2member_map_:
            raise WireError(f"unknown event kind {kind}")
        name = tier.rstrip(b"\0").decode("ascii", "replace")
        events.append(
            Event(sequence, EventKind(kind), name, key if any(key) else b"", number, tokens, max(0, now - ago))
        )
    return position, events


class EventPlace(NamedTuple):
    """A place in the events of one particular pool. In a FOLLOW: after which to begin; in its answer: where that is."""

    position: int = FROM_NOW
    home: bytes = UNSPECIFIED
    """Names the pool, so that a place in another one that was made under the same name is not taken for this one's."""

    def encode(self) -> bytes:
        """The meta part of a FOLLOW, and of its answer."""
        return _PLACE.pack(*self)

    @classmethod
    def decode(cls, meta: bytes) -> EventPlace:
        """Read what `encode` wrote. Raises WireError."""
        if len(meta) != _PLACE.size:
            raise WireError("a position in the events has the wrong size")
        return cls(*_PLACE.unpack(meta))
