"""Which chunks have become findable, and which are gone, for routers that want to know what a server has.

A chunk is announced when it can be found, which is when the last rank's part of it is in. That a chunk is gone is
noticed by looking at some of those announced from time to time. Engine-neutral: adapters turn this into their events.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from headwater.kv.hashing import ChunkRef
from headwater.pool.space import Space

GIVE_UP_S = 30.0
"""A chunk that cannot be found so long after it was ordered was dropped somewhere."""
LOOK_EVERY_S = 0.05
SWEEP_EVERY_S = 1.0
SWEEP_CHUNKS = 1024
MAX_ANNOUNCED = 1 << 17


class ChunkStored(NamedTuple):
    """A chunk can be found from now on."""

    chunk: ChunkRef
    token_ids: list[int]
    label: str | None
    """The name of the request's adapter, if it has one."""


class ChunksRemoved(NamedTuple):
    """Chunks that were announced cannot be found any more."""

    keys: list[bytes]


class _Saved(NamedTuple):
    space: Space
    event: ChunkStored
    since: float


class EventListener(Protocol):
    """Whoever wants to know what is saved."""

    def saved(self, space: Space, chunks: Sequence[ChunkRef], tokens: Sequence[int], label: str | None) -> None:
        """These chunks are on their way to the pool. `tokens` are the request's, from its first on."""


class Announcements:
    """What was announced, and what is about to be. Bounded: the oldest announcements are forgotten."""

    def __init__(self) -> None:
        self._pending: deque[_Saved] = deque(maxlen=MAX_ANNOUNCED)
        self._announced: dict[bytes, tuple[Space, ChunkRef]] = {}
        self._next_look = self._next_sweep = 0.0

    def saved(self, space: Space, chunks: Sequence[ChunkRef], tokens: Sequence[int], label: str | None) -> None:
        """These chunks are on their way to the pool."""
        now = time.monotonic()
        for chunk in chunks:
            if chunk.key not in self._announced:
                token_ids = list(tokens[chunk.first_token : chunk.first_token + chunk.num_tokens])
                self._pending.append(_Saved(space, ChunkStored(chunk, token_ids, label), now))

    def take(self) -> list[ChunkStored | ChunksRemoved]:
        """What has happened since the last call. Costs nothing most of the time."""
        now, found = time.monotonic(), list[ChunkStored | ChunksRemoved]()
        if self._pending and now >= self._next_look:
            self._next_look = now + LOOK_EVERY_S
            found += self._stored(now)
        if self._announced and now >= self._next_sweep:
            self._next_sweep = now + SWEEP_EVERY_S
            found += self._removed()
        return found

    def _stored(self, now: float) -> Iterator[ChunkStored]:
        for _ in range(len(self._pending)):
            saved = self._pending.popleft()
            chunk = saved.event.chunk
            if not saved.space.exists([chunk])[0]:
                if now - saved.since < GIVE_UP_S:
                    self._pending.append(saved)
                continue
            if chunk.key in self._announced:
                continue
            self._announced[chunk.key] = (saved.space, chunk)
            while len(self._announced) > MAX_ANNOUNCED:
                del self._announced[next(iter(self._announced))]
            yield saved.event

    def _removed(self) -> Iterator[ChunksRemoved]:
        """Look at the oldest ones; those that are still there become the newest."""
        keys = [key for key, _ in zip(self._announced, range(SWEEP_CHUNKS), strict=False)]
        gone = []
        for key in keys:
            space, chunk = self._announced.pop(key)
            if space.exists([chunk])[0]:
                self._announced[key] = (space, chunk)
            else:
                gone.append(key)
        if gone:
            yield ChunksRemoved(gone)


class NoListener:
    """The null object: nobody listens."""

    def saved(self, space: Space, chunks: Sequence[ChunkRef], tokens: Sequence[int], label: str | None) -> None:
        """Nothing to remember."""

    def take(self) -> list[ChunkStored | ChunksRemoved]:
        """Nothing to tell."""
        return []
