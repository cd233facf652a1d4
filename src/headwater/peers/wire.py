"""Frames between hosts: a header of 32 bytes, a bounded meta part, and for some types bulk bytes behind it.

    header   magic · type · flags · bytes of meta · bytes of data · number · reserved · XXH3-64 of header and meta
    meta     fixed structures, little-endian; nothing is unpickled and no length is believed before it is checked
    data     tiles, straight out of one extent and into another; their checksums are part of the meta

The checksum over header and meta matters: a flipped layer number would put right bytes in a wrong place, where they
would verify. Frames of several requests may follow each other; an answer repeats the number of its request.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headwater.errors import WireError
from headwater.kv.encoding import RAW
from headwater.kv.format import checksum
from headwater.kv.hashing import KEY_BYTES, ChunkRef
from headwater.kv.topology import Shard

VERSION = 1
MAGIC = 0x5748
_MIB = 1 << 20

HEADER = struct.Struct("<HBBIQIIQ")
_UNSUMMED = HEADER.size - 8


class Type(IntEnum):
    """What a frame is. Numbers are never reused."""

    GREETING = 1  # from the listener, first: version and a nonce
    HELLO = 2  # from the caller: version, role, space, and proof of the secret
    WELCOME = 3  # from the listener: proof of the secret, and its limits
    REFUSE = 4  # from either: why, and then the connection is closed
    ANSWER = 5  # to the request of the same number
    PING = 6  # the caller is alive, although it has nothing to say
    PUT = 16  # push: these chunks of this shard will come
    DATA = 17  # push: a group of layers of some of them
    END = 18  # push: nothing more comes of this put
    ABORT = 19  # push: some of its chunks will not come
    WRITE = 20  # push: where do these layers go? They will be written one-sided
    WRITTEN = 21  # push: such a write is over
    RUN = 32  # pull: the longest run of complete chunks
    EXISTS = 33  # pull: which of these are complete
    READ = 34  # pull: tiles of these chunks
    JUDGE = 35  # pull: copies of these did not verify; look at yours
    FOLLOW = 48  # events of the pool from now on
    EVENTS = 49  # some of them
    LIST = 50  # all chunks of the pool
    STATS = 51  # figures of the pool


class Bounds(NamedTuple):
    """The most that a frame of one type may carry."""

    meta_bytes: int
    data_bytes: int = 0


HELLO_BYTES = 64 << 10
MAX_DATA_BYTES = 1 << 30
BOUNDS: dict[Type, Bounds] = {
    Type.GREETING: Bounds(256),
    Type.HELLO: Bounds(HELLO_BYTES),
    Type.WELCOME: Bounds(256),
    Type.REFUSE: Bounds(1024),
    Type.ANSWER: Bounds(8 * _MIB, MAX_DATA_BYTES),
    Type.PING: Bounds(0),
    Type.PUT: Bounds(_MIB),
    Type.DATA: Bounds(8 * _MIB, MAX_DATA_BYTES),
    Type.END: Bounds(64),
    Type.ABORT: Bounds(_MIB),
    Type.WRITE: Bounds(8 * _MIB),
    Type.WRITTEN: Bounds(64),
    Type.RUN: Bounds(_MIB),
    Type.EXISTS: Bounds(_MIB),
    Type.READ: Bounds(_MIB),
    Type.JUDGE: Bounds(_MIB),
    Type.FOLLOW: Bounds(256),
    Type.EVENTS: Bounds(_MIB),
    Type.LIST: Bounds(0),
    Type.STATS: Bounds(0),
}

MAX_PUT_CHUNKS = 4096
MAX_ROOT_PAYLOAD = 4096
_MAX_REASON = 512


class Refusal(IntEnum):
    """Why a connection or a request is refused."""

    NOT_OURS = 1  # bytes that are no frame, or a frame out of bounds or out of order
    VERSION = 2
    SECRET = 3  # none where one is needed, or another one
    SPACE = 4  # other weights, spec or chunk size than this pool's receiver takes
    TENANTS = 5  # another tenant secret
    TOO_MANY = 6  # connections, or requests at once
    ROLE = 7  # not offered here
    SILENCE = 8  # nothing was heard for too long


def encoding_bits(encodings: Iterable[int]) -> int:
    """Tile encodings as a byte: bit n for encoding n. What a byte has no bit for does not travel."""
    return sum([1 << number for number in set(encodings) if number < 8])


class Header(NamedTuple):
    """The first 32 bytes of a frame, checked against its type's bounds."""

    type: Type
    meta_bytes: int
    data_bytes: int
    number: int
    sum: int
    raw: bytes

    def check(self, meta: bytes | bytearray | memoryview) -> None:
        """Raise WireError unless header and meta came as they were sent."""
        if len(meta) != self.meta_bytes or checksum(self.raw[:_UNSUMMED] + bytes(meta)) != self.sum:
            raise WireError(f"the checksum of a {self.type.name} frame does not match")


def encode_frame(kind: Type, meta: bytes = b"", *, data_bytes: int = 0, number: int = 0) -> bytes:
    """Header and meta of a frame. Raises WireError where they are out of bounds: the other side would refuse them."""
    bounds = BOUNDS[kind]
    if len(meta) > bounds.meta_bytes or data_bytes > bounds.data_bytes:
        raise WireError(f"a {kind.name} frame of {len(meta)} + {data_bytes} bytes is out of bounds ({bounds})")
    head = HEADER.pack(MAGIC, kind, 0, len(meta), data_bytes, number, 0, 0)[:_UNSUMMED]
    return head + checksum(head + meta).to_bytes(8, "little") + meta


def decode_header(raw: bytes) -> Header:
    """A header as it came. Raises WireError for anything that this Headwater would not send."""
    magic, kind, flags, meta_bytes, data_bytes, number, reserved, total = HEADER.unpack(raw)
    if magic != MAGIC or flags or reserved:
        raise WireError("these bytes are not a Headwater frame; is the other end a peer?")
    try:
        bounds = BOUNDS[Type(kind)]
    except ValueError as error:
        raise WireError(f"unknown frame type {kind}") from error
    if meta_bytes > bounds.meta_bytes or data_bytes > bounds.data_bytes:
        raise WireError(f"a {Type(kind).name} frame of {meta_bytes} + {data_bytes} bytes is out of bounds ({bounds})")
    return Header(Type(kind), meta_bytes, data_bytes, number, total, raw)


class Cursor:
    """Reads a meta part from its beginning to its end; whatever does not fit is a WireError."""

    def __init__(self, meta: bytes) -> None:
        self._meta = meta
        self._at = 0

    def take(self, size: int) -> bytes:
        """The next bytes."""
        if size < 0 or self._at + size > len(self._meta):
            raise WireError("a frame is shorter than it says")
        self._at += size
        return self._meta[self._at - size : self._at]

    def unpack(self, fields: struct.Struct) -> tuple[int, ...]:
        """The next fixed fields."""
        return fields.unpack(self.take(fields.size))

    @property
    def is_at_end(self) -> bool:
        """Whether everything was read."""
        return self._at == len(self._meta)

    def end(self) -> None:
        """Raise WireError unless everything was read."""
        if not self.is_at_end:
            raise WireError("a frame is longer than it says")


# ---- refusing ---------------------------------------------------------------------------------------------------
def encode_refusal(why: Refusal, text: str) -> bytes:
    """A REFUSE frame."""
    return encode_frame(Type.REFUSE, bytes([why]) + text.encode("utf-8", "replace")[:_MAX_REASON])


def decode_refusal(meta: bytes) -> tuple[int, str]:
    """(code, text) of a REFUSE frame; the text is printable and short, whoever wrote it."""
    text = meta[1 : 1 + _MAX_REASON].decode("utf-8", "replace")
    return (meta[0] if meta else 0), "".join(char if char.isprintable() else "?" for char in text)


# ---- push -------------------------------------------------------------------------------------------------------
_PUT = struct.Struct("<I16s32s32sIIIIIIIIIIBHI")
_ALL_RAW, _BY_CHUNK = 0, 255
"""How a put says its chunks' encodings: not at all, or in a byte for each behind the keys."""
_DATA = struct.Struct("<IIIII")
_INDICES = struct.Struct("<II")


@dataclass(frozen=True)
class Put:
    """Chunks of one chain, one behind the other, of which one rank will send its part."""

    put: int
    """Names it in DATA, END and ABORT; the sender's own count."""
    transfer: bytes
    """16 bytes, the same for all ranks of a request."""
    chunks: tuple[ChunkRef, ...]
    shard: Shard
    """Tiles in one piece only. Of replicas each sends what `Shard.owned` gives it."""
    root_payload: bytes
    """How the chain's root is described in the index."""
    encodings: tuple[int, ...] = ()
    """By chunk: how its tiles come, and are stored. None at all: raw."""

    @property
    def by_chunk(self) -> tuple[int, ...]:
        """The encoding of each chunk."""
        return self.encodings or (RAW,) * len(self.chunks)

    def encode(self) -> bytes:
        """The meta part of a PUT frame."""
        first, last, shard = self.chunks[0], self.chunks[-1], self.shard
        layers, heads = shard.layers, shard.heads
        fixed = _PUT.pack(
            self.put,
            self.transfer,
            first.root,
            first.parent,
            first.number,
            len(self.chunks),
            last.num_tokens,
            layers.start,
            layers.stop,
            layers.step,
            heads.start,
            heads.stop,
            shard.replicas,
            shard.replica,
            _BY_CHUNK if any(self.encodings) else _ALL_RAW,
            len(self.root_payload),
            0,
        )
        keys = b"".join([chunk.key for chunk in self.chunks])
        return fixed + self.root_payload + keys + (bytes(self.encodings) if any(self.encodings) else b"")

    @classmethod
    def decode(cls, meta: bytes, chunk_tokens: int) -> Put:
        """Read what `encode` wrote, in a space of that chunk size. Raises WireError for anything else."""
        cursor = Cursor(meta)
        try:
            put, transfer, root, parent, number, count, last, *rest = _PUT.unpack(cursor.take(_PUT.size))
            start, stop, step, head, heads_stop, replicas, replica, how, payload_bytes, _ = rest
            if not 1 <= count <= MAX_PUT_CHUNKS or not 1 <= last <= chunk_tokens or payload_bytes > MAX_ROOT_PAYLOAD:
                raise WireError(f"a put of {count} chunks, the last with {last} tokens, is out of bounds")
            if max(stop, heads_stop) >= 1 << 20 or number + count >= 1 << 32 or not 1 <= replicas <= 1 << 16:
                raise WireError("a put names layers, heads or chunks out of bounds")
            if how not in (_ALL_RAW, _BY_CHUNK):
                raise WireError(f"a put says its encodings in an unknown way ({how})")
            shard = Shard(range(start, stop, step), range(head, heads_stop), replicas=replicas, replica=replica)
            payload = cursor.take(payload_bytes)
            keys = cursor.take(count * KEY_BYTES)
            encodings = tuple(cursor.take(count if how == _BY_CHUNK else 0))
            cursor.end()
        except WireError:
            raise
        except (struct.error, ValueError) as error:
            raise WireError(f"a malformed put: {error}") from error
        split = [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
        if len({root, parent, *split}) < count + 1 + (parent != root):
            raise WireError("a put names a chunk twice")
        chunks = list[ChunkRef]()
        for i, key in enumerate(split):
            tokens = last if i == count - 1 else chunk_tokens
            chunks.append(ChunkRef(key, parent, number + i, (number + i) * chunk_tokens, tokens, root))
            parent = key
        return cls(put, transfer, tuple(chunks), shard, payload, encodings)


@dataclass(frozen=True)
class Data:
    """A group of layers of some chunks of a put; the tiles follow chunk by chunk, each in [layer][head] order."""

    put: int
    layers: range
    """Of the model. Each chunk has those of them that the put's rank sends (see `Shard.owned`)."""
    chunks: Sequence[int]
    """Numbers within the put, ascending."""
    sums: npt.NDArray[np.uint64]
    """XXH3-64 of every tile, in the order of the tiles."""

    def encode(self) -> bytes:
        """The meta part of a DATA frame."""
        fixed = _DATA.pack(self.put, self.layers.start, self.layers.stop, len(self.chunks), self.sums.size)
        return fixed + np.asarray(self.chunks, "<u4").tobytes() + np.ascontiguousarray(self.sums, "<u8").tobytes()

    @classmethod
    def decode(cls, meta: bytes) -> Data:
        """Read what `encode` wrote. Raises WireError for anything else."""
        cursor = Cursor(meta)
        put, start, stop, count, num_sums = cursor.unpack(_DATA)
        if not start < stop < 1 << 20 or not 1 <= count <= MAX_PUT_CHUNKS or num_sums > _MIB:
            raise WireError(f"data of layers {start} to {stop} of {count} chunks is out of bounds")
        numbers = np.frombuffer(cursor.take(4 * count), "<u4")
        sums = np.frombuffer(cursor.take(8 * num_sums), "<u8")
        cursor.end()
        if count > 1 and not (numbers[1:] > numbers[:-1]).all():
            raise WireError("the chunks of a data frame do not ascend")
        return cls(put, range(start, stop), numbers.tolist(), sums)


@dataclass(frozen=True)
class Stop:
    """END: nothing more comes of a put. ABORT: these of its chunks do not come."""

    put: int
    chunks: Sequence[int] = ()

    def encode(self) -> bytes:
        """The meta part of an END or ABORT frame."""
        return _INDICES.pack(self.put, len(self.chunks)) + np.asarray(self.chunks, "<u4").tobytes()

    @classmethod
    def decode(cls, meta: bytes) -> Stop:
        """Read what `encode` wrote. Raises WireError for anything else."""
        cursor = Cursor(meta)
        put, count = cursor.unpack(_INDICES)
        if count > MAX_PUT_CHUNKS:
            raise WireError(f"a put has at most {MAX_PUT_CHUNKS} chunks, not {count}")
        numbers = np.frombuffer(cursor.take(4 * count), "<u4").tolist()
        cursor.end()
        return cls(put, numbers)
