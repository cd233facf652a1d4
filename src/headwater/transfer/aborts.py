"""A chunk that this rank cannot save is aborted for the whole server, also for ranks that come to it later.

A slower rank may reserve a chunk after this one has aborted it, and would then wait for tiles that never come. So the
abort is repeated for a while, unless this rank saves the chunk after all.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

from headwater.errors import HeadwaterError
from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import Shard
from headwater.pool.space import Space
from headwater.stores.base import Status

RETRY_S = 0.1
OWED_S = 2.0
"""Ranks of one server are a step apart at most; whatever is later than this expires in the store."""


class Aborts:
    """What one saver owes its peers. For the sender's thread alone."""

    def __init__(self, space: Space, shard: Shard) -> None:
        self._space = space
        is_part = shard.num_tiles < space.spec.num_layers * space.spec.num_kv_heads
        self.has_peers = is_part or shard.split.parts > 1 or shard.replicas > 1
        """Whether other ranks write parts of the same chunks."""
        self._owed: dict[bytes, tuple[ChunkRef, float]] = {}
        """By key: chunks to be aborted again, and until when."""
        self._repeated: dict[bytes, float] = {}
        """By key: chunks of which a repeated abort may have removed something, and until when that matters."""
        self._due = 0.0

    def abort(self, chunks: Sequence[ChunkRef]) -> None:
        """Abort chunks now, and again later: some of the other ranks may not have begun them yet."""
        if self.has_peers and chunks:
            self._due = self._due if self._owed else time.monotonic() + RETRY_S
            until = time.monotonic() + OWED_S
            self._owed.update({chunk.key: (chunk, until) for chunk in chunks})
        with suppress(HeadwaterError, OSError):  # what cannot be aborted expires
            self._space.abort(chunks)

    def abort_failed(self, outcome: Iterable[tuple[ChunkRef, Status]], *, has_begun: bool) -> int:
        """Abort chunks that could not be stored; how many those were.

        A chunk that was not even begun in time is left alone: this rank's part of it may be in, by another request.
        """
        failed = [(chunk, status) for chunk, status in outcome if status.failed]
        if lost := [chunk for chunk, status in failed if has_begun or status != Status.TIMEOUT]:
            self.abort(lost)
        return len(failed)

    def resume(self, chunks: Sequence[ChunkRef]) -> None:
        """Chunks that this rank saves now. Cheap where nothing is owed."""
        if self._owed:
            for chunk in chunks:
                self._owed.pop(chunk.key, None)

    def take_repeated(self, chunks: Sequence[ChunkRef]) -> set[bytes]:
        """Those of some chunks, which this rank saves now, that a repeated abort may have taken from ranks which were
        ahead with the same save: they take their parts for stored, and must be told to save them again."""
        if not self._repeated:
            return set()
        now = time.monotonic()
        return {chunk.key for chunk in chunks if self._repeated.pop(chunk.key, 0.0) > now}

    @property
    def is_owing(self) -> bool:
        """Whether an abort is to be repeated. From any thread."""
        return bool(self._owed)

    @property
    def wait_s(self) -> float | None:
        """How long the thread may sleep before it calls `retry`; None: until there is something else to do."""
        return RETRY_S if self._owed else None

    def retry_if_due(self) -> None:
        """`retry` for a thread that is never idle."""
        if self._owed and time.monotonic() >= self._due:
            self.retry()

    def retry(self) -> None:
        """Abort what has been begun since. Cheap where nothing is owed; a chunk that cannot be aborted expires."""
        now = time.monotonic()
        self._due = now + RETRY_S
        self._owed = {key: owed for key, owed in self._owed.items() if now < owed[1]}
        self._repeated = {key: until for key, until in self._repeated.items() if now < until}
        with suppress(HeadwaterError, OSError):
            if self._space.abort([chunk for chunk, _ in self._owed.values()]):
                self._repeated.update(dict.fromkeys(self._owed, now + OWED_S))
