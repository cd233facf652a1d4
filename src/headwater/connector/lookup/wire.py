"""What a look-up client and its server say to each other: one frame each way, versioned, and bounded in every length.

    header   magic "HWLK" | version u8 | operation u8 | 0 u16 | client, 16 bytes | number u64     little-endian
    HELLO    →                                           ← chunk tokens u32 | root key
    RUN      → root key | keys                           ← how many u32 | lengths of tails, u32 each
    EXISTS   → (parent key | key) for each chunk         ← 0 or 1 for each, a byte
    LEASE    → key | request id, UTF-8                   ← 0 or 1, a byte
    RELEASE  → request id, UTF-8                         ←
    ERROR                                                ← why, UTF-8

An answer has the operation and the number of its question. Nothing here knows of sockets.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from headwater.errors import InvalidArgumentError
from headwater.kv.hashing import KEY_BYTES

MAGIC = b"HWLK"
VERSION = 1
CLIENT_BYTES = 16
MAX_KEYS = 1 << 16
"""Of one question: at 256 tokens a chunk, sixteen million tokens."""
MAX_ID_BYTES = 256
MAX_TEXT_BYTES = 256
MAX_TAILS = 64

_HEADER = struct.Struct(f"<4sBBH{CLIENT_BYTES}sQ")
_U32 = struct.Struct("<I")
MAX_FRAME_BYTES = _HEADER.size + 2 * MAX_KEYS * KEY_BYTES + KEY_BYTES
"""Whoever announces more is not one of ours."""


class Op(IntEnum):
    """Operations. Numbers are never given a second meaning."""

    HELLO = 1
    RUN = 2
    EXISTS = 3
    LEASE = 4
    RELEASE = 5
    ERROR = 255


_OPS = frozenset(Op)


class Frame(NamedTuple):
    """One question or answer."""

    op: Op
    client: bytes
    number: int
    body: bytes


def encode(frame: Frame) -> bytes:
    """As bytes. Raises InvalidArgumentError for what would be refused."""
    if len(frame.client) != CLIENT_BYTES or _HEADER.size + len(frame.body) > MAX_FRAME_BYTES:
        raise InvalidArgumentError(f"a frame of {len(frame.body)} bytes is too long, or its client has no name")
    return _HEADER.pack(MAGIC, VERSION, frame.op, 0, frame.client, frame.number) + frame.body


def decode(data: bytes) -> Frame:
    """What `encode` made. Raises InvalidArgumentError for anything else."""
    if not _HEADER.size <= len(data) <= MAX_FRAME_BYTES:
        raise InvalidArgumentError(f"a frame of {len(data)} bytes; expected {_HEADER.size} to {MAX_FRAME_BYTES}")
    magic, version, op, zero, client, number = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise InvalidArgumentError("this is no look-up")
    if version != VERSION:
        raise InvalidArgumentError(f"version {version} of the look-ups; this side knows {VERSION}")
    if zero or op not in _OPS:
        raise InvalidArgumentError(f"operation {op} is not known")
    return Frame(Op(op), client, number, data[_HEADER.size :])


def split_keys(body: bytes, *, each: int = 1) -> list[bytes]:
    """A row of keys, a multiple of `each`. Raises InvalidArgumentError where it is none, or too long."""
    count, rest = divmod(len(body), KEY_BYTES)
    if rest or count % each or count > each * MAX_KEYS + 1:
        raise InvalidArgumentError(f"{len(body)} bytes are no row of at most {MAX_KEYS} keys")
    return [body[i : i + KEY_BYTES] for i in range(0, len(body), KEY_BYTES)]


def encode_id(request_id: str) -> bytes:
    """A request id. Raises InvalidArgumentError where it is too long, or empty."""
    raw = request_id.encode("utf-8", errors="surrogatepass")
    if not 0 < len(raw) <= MAX_ID_BYTES:
        raise InvalidArgumentError(f"a request id has 1 to {MAX_ID_BYTES} bytes, not {len(raw)}")
    return raw


def check_id(raw: bytes) -> bytes:
    """A request id from outside: any bytes of a length that can be. Raises InvalidArgumentError."""
    if not 0 < len(raw) <= MAX_ID_BYTES:
        raise InvalidArgumentError(f"a request id has 1 to {MAX_ID_BYTES} bytes, not {len(raw)}")
    return raw


def encode_numbers(*numbers: int) -> bytes:
    """A row of u32."""
    return b"".join(map(_U32.pack, numbers))


def decode_numbers(body: bytes, *, at_most: int) -> list[int]:
    """A row of one to `at_most` u32. Raises InvalidArgumentError for anything else."""
    if not body or len(body) % _U32.size or len(body) > at_most * _U32.size:
        raise InvalidArgumentError(f"{len(body)} bytes are no row of 1 to {at_most} numbers")
    return [number for (number,) in _U32.iter_unpack(body)]
