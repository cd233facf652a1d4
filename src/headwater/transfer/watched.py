"""Chunks that a save skipped because somebody else is filling them: another server, a fetch, or another request's job.

A filler may fail. The chain would then be broken at its chunk, and nobody would know. So skipped chunks are looked at
now and then until they are there; one that is neither there nor being filled any more is reported as unsaved.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from headwater.errors import HeadwaterError, StoreClosedError
from headwater.kv.hashing import ChunkRef
from headwater.pool.space import Space

LOOK_S = 0.1
PATIENCE_S = 35.0
"""A store gives a filler up that commits nothing for 30 seconds."""


class WatchedChunks:
    """What one saver leaves to others. For the sender's thread alone."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._watched: dict[tuple[str, bytes], tuple[ChunkRef, float]] = {}
        """By request and key: the chunk, and until when to wait for it."""
        self._due = 0.0

    def __len__(self) -> int:
        return len(self._watched)

    def add(self, tries: Iterable[tuple[str, ChunkRef]]) -> None:
        """Watch chunks of some requests."""
        now = time.monotonic()
        self._due = self._due if self._watched else now + LOOK_S
        self._watched.update({(name, chunk.key): (chunk, now + PATIENCE_S) for name, chunk in tries})

    @property
    def wait_s(self) -> float | None:
        """How long the thread may sleep before it calls `take_lost`; None: until there is something else to do."""
        return LOOK_S if self._watched else None

    def take_lost(self) -> list[tuple[str, ChunkRef]]:
        """Chunks that nobody will store: those who skipped them must save them. Cheap where it is not time to look."""
        now = time.monotonic()
        if not self._watched or now < self._due:
            return []
        self._due = now + LOOK_S
        watched = list(self._watched.items())
        chunks = [chunk for _, (chunk, _) in watched]
        try:
            filled = self._space.being_filled(chunks)  # first: it may be complete a moment later
            there = self._space.exists(chunks)
        except StoreClosedError:
            self._watched.clear()
            return []
        except (HeadwaterError, OSError):  # the next look may tell more
            return []
        lost = list[tuple[str, ChunkRef]]()
        for (place, (chunk, until)), is_filled, is_there in zip(watched, filled, there, strict=True):
            if is_there or not is_filled or now >= until:
                del self._watched[place]
                lost += [] if is_there else [(place[0], chunk)]
        return lost
