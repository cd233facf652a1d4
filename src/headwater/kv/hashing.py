"""Chunk keys: what a prefix is called in the pool, computed from tokens and nothing an engine chose.

`key(-1)` names the space (identity, spec, chunk size, tenant, adapter); `key(i)` chains over the tokens of chunk i
and over the non-token inputs that overlap it. The exact bytes are in docs/format.md. One SHA-256 call per chunk,
none per token.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_right
from collections.abc import Sequence
from operator import index
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headwater.errors import InvalidArgumentError, TokenError

FORMAT_VERSION = 1
KEY_BYTES = 32
DEFAULT_CHUNK_TOKENS = 256
MAX_CHUNK_TOKENS = 32768

Tokens = Sequence[int] | npt.NDArray[np.integer]


class Extra(NamedTuple):
    """A non-token input of the prompt: an image, an audio clip, prompt embeddings.

    It stands for the tokens `offset … offset + num_tokens - 1` of the prompt, and `digest` is a hash of its content.
    """

    kind: str
    digest: bytes
    offset: int
    num_tokens: int


class ChunkRef(NamedTuple):
    """One chunk of one prompt: its key, its parent's and its chain's first, and which tokens it holds."""

    key: bytes
    parent: bytes
    number: int
    first_token: int
    num_tokens: int
    root: bytes


def check_chunk_tokens(chunk_tokens: int) -> int:
    """Return `chunk_tokens` if it is possible, else raise."""
    if type(chunk_tokens) is not int or not 1 <= chunk_tokens <= MAX_CHUNK_TOKENS:
        raise InvalidArgumentError(f"chunk_tokens is {chunk_tokens!r}; expected 1 to {MAX_CHUNK_TOKENS}")
    return chunk_tokens


def root_key(
    identity_digest: bytes, spec_digest: bytes, chunk_tokens: int, tenant: bytes = b"", adapter: bytes = b""
) -> bytes:
    """`key(-1)`: where every chain of this identity, spec, chunk size, tenant and adapter begins."""
    for name, value in (("identity digest", identity_digest), ("spec digest", spec_digest)):
        if len(value) != KEY_BYTES:
            raise InvalidArgumentError(f"{name} has {len(value)} bytes; expected {KEY_BYTES}")
    for name, value in (("tenant", tenant), ("adapter", adapter)):
        if not isinstance(value, bytes) or len(value) > 1024:
            got = f"{len(value)} bytes" if isinstance(value, bytes) else type(value).__name__
            raise InvalidArgumentError(f"{name} must be of type bytes, and at most 1024 long; got {got}")
    return hashlib.sha256(
        b"headwater root\0"
        + struct.pack("<I", FORMAT_VERSION)
        + identity_digest
        + spec_digest
        + struct.pack("<I", check_chunk_tokens(chunk_tokens))
        + struct.pack("<I", len(tenant))
        + tenant
        + struct.pack("<I", len(adapter))
        + adapter
    ).digest()


def _as_tokens(tokens: Tokens) -> npt.NDArray[np.uint32]:
    try:
        array = np.asarray(tokens)
    except (ValueError, TypeError, OverflowError) as error:
        raise TokenError(f"tokens must be a flat sequence of integers: {error}") from error
    if array.size == 0:
        return np.empty(0, "<u4")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TokenError(f"tokens must be a flat sequence of integers, got shape {array.shape} of {array.dtype}")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > 0xFFFFFFFF:
        raise TokenError(f"token ids must be 0 to 2**32 - 1, found {low if low < 0 else high}")
    return array.astype("<u4", copy=False)


def _checked_extra(extra: Extra) -> Extra:
    """The extra with plain, immutable fields. Raises TokenError where it cannot be encoded."""
    try:
        digest, offset, num_tokens = bytes(memoryview(extra.digest)), index(extra.offset), index(extra.num_tokens)
        if not 0 < len(extra.kind.encode("utf-8")) <= 255 or not 0 < len(digest) <= 255:
            raise TokenError("an extra's kind and digest must each be 1 to 255 bytes long")
        if not 0 <= offset < 1 << 63 or num_tokens < 1:
            raise TokenError(f"an extra needs offset ≥ 0 and num_tokens ≥ 1, got {offset} and {num_tokens}")
        return Extra(extra.kind, digest, offset, num_tokens)
    except (TypeError, AttributeError, UnicodeError) as error:
        raise TokenError(f"{extra!r} is not (kind: str, digest: bytes, offset: int, num_tokens: int)") from error


def _encode_extra(extra: Extra) -> bytes:
    kind = extra.kind.encode("utf-8")
    return struct.pack("<BB", len(kind), len(extra.digest)) + kind + extra.digest + struct.pack("<Q", extra.offset)


class ChunkKeys:
    """The keys of one growing prompt. `extend` hashes only what is new; look-ups of old chunks cost nothing.

    Not thread-safe while it grows. Memory: four bytes a token and 32 a chunk.
    """

    def __init__(self, root: bytes, chunk_tokens: int, tokens: Tokens = (), extras: Sequence[Extra] = ()) -> None:
        if len(root) != KEY_BYTES:
            raise InvalidArgumentError(f"a root key has {KEY_BYTES} bytes, not {len(root)}; Space.keys knows it")
        self.root = root
        self.chunk_tokens = check_chunk_tokens(chunk_tokens)
        self.full: list[bytes] = []
        """Keys of the complete chunks, in order."""
        self._tokens = np.empty(0, "<u4")
        self._num_tokens = 0
        self._extras: list[Extra] = []
        self.extend(tokens, extras)

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return self._num_tokens

    @property
    def tail_tokens(self) -> int:
        """Tokens after the last complete chunk."""
        return self._num_tokens % self.chunk_tokens

    def extend(self, tokens: Tokens, extras: Sequence[Extra] = ()) -> None:
        """Append tokens, and the extras that stand for some of them. Raises TokenError and changes nothing."""
        new = _as_tokens(tokens)
        hashed_tokens = len(self.full) * self.chunk_tokens
        more = [_checked_extra(extra) for extra in extras]
        for extra in more:
            if extra.offset < hashed_tokens or extra.offset + extra.num_tokens > self._num_tokens + new.size:
                raise TokenError(
                    f"an extra covers tokens {extra.offset} to {extra.offset + extra.num_tokens - 1}, "
                    f"but only {hashed_tokens} to {self._num_tokens + new.size - 1} can still be described"
                )
        self._extras = sorted([*self._extras, *more], key=lambda e: (e.offset, e.kind, e.digest))
        self._append(new)
        self._hash_complete_chunks()

    def tail_key(self, number: int, num_tokens: int) -> bytes:
        """Key of the first `num_tokens` tokens after chunk `number - 1`, as a tail. Costs one SHA-256."""
        if (
            number < 0
            or not 0 < num_tokens < self.chunk_tokens
            or number * self.chunk_tokens + num_tokens > self._num_tokens
        ):
            raise InvalidArgumentError(f"no tail of {num_tokens} tokens after chunk {number - 1}")
        return self._key(self.parent_of(number), number * self.chunk_tokens, num_tokens)

    def parent_of(self, number: int) -> bytes:
        """Key that chunk `number` hangs under."""
        return self.full[number - 1] if number else self.root

    def ref(self, number: int) -> ChunkRef:
        """The complete chunk `number`."""
        if not 0 <= number < len(self.full):
            raise InvalidArgumentError(f"there is no complete chunk {number}; there are {len(self.full)}")
        size = self.chunk_tokens
        return ChunkRef(self.full[number], self.parent_of(number), number, number * size, size, self.root)

    def refs(self, count: int) -> list[ChunkRef]:
        """The first `count` complete chunks."""
        if not 0 <= count <= len(self.full):
            raise InvalidArgumentError(f"there are {len(self.full)} complete chunks, not {count}")
        size, root = self.chunk_tokens, self.root
        parents = [root, *self.full[: count - 1]] if count else []
        return [
            ChunkRef(key, parent, number, number * size, size, root)
            for number, (key, parent) in enumerate(zip(self.full[:count], parents, strict=True))
        ]

    def tail_ref(self, number: int, num_tokens: int) -> ChunkRef:
        """The tail of `num_tokens` tokens after chunk `number - 1`."""
        key, first = self.tail_key(number, num_tokens), number * self.chunk_tokens
        return ChunkRef(key, self.parent_of(number), number, first, num_tokens, self.root)

    def chunks(self, *, tail: bool = True) -> list[ChunkRef]:
        """Every complete chunk, and the tail if there is one and it is wanted."""
        refs = self.refs(len(self.full))
        if tail and self.tail_tokens:
            refs.append(self.tail_ref(len(self.full), self.tail_tokens))
        return refs

    def _append(self, new: npt.NDArray[np.uint32]) -> None:
        end = self._num_tokens + new.size
        if end > self._tokens.size:
            # Doubling keeps a conversation that grows token by token linear.
            grown = np.empty(max(end, 2 * self._tokens.size), "<u4")
            grown[: self._num_tokens] = self._tokens[: self._num_tokens]
            self._tokens = grown
        self._tokens[self._num_tokens : end] = new
        self._num_tokens = end

    def _hash_complete_chunks(self) -> None:
        size = self.chunk_tokens
        if self._extras:
            for number in range(len(self.full), self._num_tokens // size):
                self.full.append(self._key(self.parent_of(number), number * size, size))
            return
        # The common case, on one screen line per chunk: this loop is what a scheduler waits for.
        data, sha256, count = memoryview(self._tokens).cast("B"), hashlib.sha256, struct.pack("<I", size)
        parent = self.parent_of(len(self.full))
        for start in range(4 * size * len(self.full), 4 * size * (self._num_tokens // size), 4 * size):
            digest = sha256(parent + count)
            digest.update(data[start : start + 4 * size])
            parent = digest.digest()
            self.full.append(parent)

    def _key(self, parent: bytes, first_token: int, num_tokens: int) -> bytes:
        digest = hashlib.sha256(parent + struct.pack("<I", num_tokens))
        end = first_token + num_tokens
        digest.update(memoryview(self._tokens)[first_token:end].cast("B"))
        # Sorted by offset: those that begin at or after the end cannot overlap.
        for extra in self._extras[: bisect_right(self._extras, end - 1, key=lambda e: e.offset)]:
            if extra.offset + extra.num_tokens > first_token:
                digest.update(_encode_extra(extra))
        return digest.digest()
