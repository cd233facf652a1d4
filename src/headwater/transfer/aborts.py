"""A chunk that this rank cannot save is aborted for the whole server, also for ranks that come to it later.

A slower rank may reserve a chunk after this one has aborted it, and would then wait for tiles that never come. So the
abort is repeated for a while, unless this rank saves the chunk after all. An abort means one try: the save of a chunk
for some request. It may remove what a faster rank has stored in a later try, which this rank then reports as unsaved
when it comes to that try itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

from headwater.errors import HeadwaterError
from headwater.kv.encoding import PACKED
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
        self._removed: dict[bytes, tuple[str | None, float]] = {}
        """By key: chunks of which an abort may have removed something, the one request whose next try that cannot have
        hurt (None: there is none), and until when it matters."""
        self._due = 0.0

    def abort(self, tries: Sequence[tuple[str, ChunkRef]]) -> None:
        """Abort chunks of some requests now, and again later: some of the other ranks may not have begun them yet. The
        scheduler side must hear of it afterwards: the next try is then not ordered before the abort is over."""
        chunks, now = [chunk for _, chunk in tries], time.monotonic()
        if self.has_peers and chunks:
            self._due = self._due if self._owed else now + RETRY_S
            self._owed.update({chunk.key: (chunk, now + OWED_S) for chunk in chunks})
        with suppress(HeadwaterError, OSError):  # what cannot be aborted expires
            if self._space.abort(chunks) and self.has_peers:
                for name, chunk in tries:
                    known = self._removed.get(chunk.key, (name, 0.0))[0]
                    self._removed[chunk.key] = (name if known == name else None, now + OWED_S)

    def abort_failed(self, outcome: Iterable[tuple[str, ChunkRef, Status]], *, has_begun: bool) -> None:
        """Abort chunks of some requests that could not be stored.

        A chunk that was not even begun in time is left alone: this rank's part of it may be in, by another request.
        """
        failed = [(name, chunk, status) for name, chunk, status in outcome if status.failed]
        if lost := [(name, chunk) for name, chunk, status in failed if has_begun or status != Status.TIMEOUT]:
            self.abort(lost)

    def resume(self, chunks: Sequence[ChunkRef]) -> None:
        """Chunks that this rank saves now. Cheap where nothing is owed."""
        if self._owed:
            for chunk in chunks:
                self._owed.pop(chunk.key, None)

    def abort_packed(self, chunks: Sequence[ChunkRef]) -> None:
        """Chunks that cannot be packed, and that all ranks save raw now: what a slower rank has begun of them packed,
        after they were aborted and before it heard of that, would never be complete, and keep everybody out."""
        if self.has_peers and chunks:
            with suppress(HeadwaterError, OSError):
                self._space.abort(chunks, encoding=PACKED)

    def take_removed(self, tries: Iterable[tuple[str, ChunkRef]]) -> list[tuple[str, ChunkRef]]:
        """Those of some tries, which this rank begins now, of which an abort may have removed the parts of ranks that
        were ahead with them: those take their parts for stored, and must be told to save them again.

        A request whose own try was aborted is ordered again after that: only repeated aborts can meet its next one.
        """
        if not self._removed:
            return []
        now, found = time.monotonic(), list[tuple[str, ChunkRef]]()
        for name, chunk in tries:
            spared, until = self._removed.pop(chunk.key, (name, 0.0))
            if spared != name and now < until:
                found.append((name, chunk))
        return found

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
        self._removed = {key: removed for key, removed in self._removed.items() if now < removed[1]}
        with suppress(HeadwaterError, OSError):
            if self._space.abort([chunk for chunk, _ in self._owed.values()]):
                self._removed.update(dict.fromkeys(self._owed, (None, now + OWED_S)))
