"""What the scheduler half asks of a space, whoever answers; and how ZeroMQ is had, which only look-ups need."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol

from headwater.errors import StoreError
from headwater.kv.hashing import ChunkKeys, ChunkRef, Tokens
from headwater.pool.space import Match, RequestLease


class Lookup(Protocol):
    """What the scheduler half asks of a space."""

    @property
    def chunk_tokens(self) -> int:
        """Tokens in a complete chunk."""
        ...

    @property
    def lookup_s(self) -> float:
        """How long an answer may take; 0 where nothing here can take long."""
        ...

    def keys(self, tokens: Tokens = ()) -> ChunkKeys:
        """The chunk keys of a prompt."""
        ...

    def match(self, keys: ChunkKeys, *, max_tokens: int | None = None) -> Match:
        """The longest prefix that the pool holds."""
        ...

    def exists(self, chunks: Sequence[ChunkRef]) -> list[bool]:
        """Whether each chunk can be found now."""
        ...

    def lease(self, match: Match, request_id: str) -> RequestLease:
        """Keep a match from eviction."""
        ...

    def release(self, request_id: str) -> None:
        """End a request's lease, if it has one."""
        ...


def import_zmq() -> Any:
    """The package, imported now. Raises StoreError, saying what to install, where it is missing."""
    try:
        return import_module("zmq")
    except ImportError as error:
        raise StoreError(
            f"look-ups in another process need pyzmq ({error}); pip install '/path/to/headwater[lookup]', or use a "
            "shm:// pool"
        ) from error
