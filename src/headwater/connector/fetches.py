"""Chunks on their way from lower tiers into the first one, on behalf of requests that hold no blocks yet.

Requests that want the same chunks share one fetch. Every fetch ends by its deadline, and what it holds is let go of
when the last request that uses it has released it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from headwater.errors import StoreError
from headwater.kv.hashing import ChunkRef
from headwater.pool.space import Space
from headwater.stores.base import Fetch

log = logging.getLogger(__name__)

MAX_FETCHES = 32
"""Under way or held at a time. Each pins its chunks in the first tier; further requests wait for their turn."""
POLL_S = 0.001


class _Shared:
    """One fetch and how many requests use it."""

    __slots__ = ("deadline", "fetch", "first", "key", "num_users")

    def __init__(self, fetch: Fetch, chunks: Sequence[ChunkRef], deadline: float) -> None:
        self.fetch = fetch
        self.key = chunks[-1].key
        self.first = chunks[0].number
        self.deadline = deadline
        self.num_users = 0

    @property
    def is_late(self) -> bool:
        return not self.fetch.is_done and time.monotonic() >= self.deadline


class FetchTicket:
    """One request's part in a fetch. Release it when its load has ended or the request is gone; twice is once."""

    def __init__(self, fetches: Fetches, shared: _Shared) -> None:
        self._fetches = fetches
        self._shared: _Shared | None = shared
        self.is_told = False
        """Whether it was counted that this fetch came late for this request."""
        shared.num_users += 1

    @property
    def is_over(self) -> bool:
        """Whether there is nothing to wait for any more: all is done, or the deadline has passed."""
        return self._shared is None or self._shared.fetch.is_done or self._shared.is_late

    @property
    def is_near(self) -> bool:
        """Whether a load may follow what is still on its way."""
        return self._shared is not None and self._fetches.is_near(self._shared)

    @property
    def is_late(self) -> bool:
        """Whether the deadline has passed before all was done."""
        return self._shared is not None and self._shared.is_late

    def num_kept(self, chunks: Sequence[ChunkRef]) -> int:
        """How many of these chunks, counted from the first, are in the first tier and stay there."""
        if self._shared is None or not chunks or chunks[0].number < self._shared.first:
            return 0
        end = self._shared.first + self._shared.fetch.num_kept
        return max(0, min(len(chunks), end - chunks[0].number))

    def release(self) -> None:
        """This request needs the fetch no longer."""
        shared, self._shared = self._shared, None
        if shared is not None:
            self._fetches.leave(shared)


class Fetches:
    """All fetches of one scheduler side. One thread calls it."""

    def __init__(
        self,
        deadline_s: float,
        on_end: Callable[[float], None],
        max_open: int = MAX_FETCHES,
        *,
        near_s: float = 0.0,
    ) -> None:
        """`on_end` is told how long each fetch took that had something to bring, when it is released. A fetch whose
        rest takes no longer than `near_s` is not waited for."""
        self._near_s = near_s
        self._deadline_s = deadline_s
        self._on_end = on_end
        self._max_open = max_open
        self._open: list[_Shared] = []

    @property
    def num_open(self) -> int:
        """Fetches that are under way or held."""
        return len(self._open)

    @property
    def is_full(self) -> bool:
        """Whether no further one may be begun now."""
        return len(self._open) >= self._max_open

    def begin(self, space: Space, chunks: Sequence[ChunkRef]) -> FetchTicket | None:
        """Have consecutive chunks brought into the first tier; None where there is nothing to bring. Does not wait."""
        for shared in self._open:
            if shared.key == chunks[-1].key and shared.first <= chunks[0].number and not shared.is_late:
                return FetchTicket(self, shared)
        try:
            fetch = space.fetch(chunks, deadline_s=self._deadline_s)
        except StoreError as error:
            log.warning("a fetch from lower tiers could not start: %s", error)
            return None
        if fetch is None:
            return None
        shared = _Shared(fetch, chunks, time.monotonic() + self._deadline_s)
        self._open.append(shared)
        return FetchTicket(self, shared)

    def leave(self, shared: _Shared) -> None:
        """A request has released its part; the last one ends the fetch."""
        shared.num_users -= 1
        if not shared.num_users:
            self._open.remove(shared)
            if seconds := shared.fetch.seconds:
                self._on_end(seconds)
            shared.fetch.release()

    def is_near(self, shared: _Shared) -> bool:
        """Whether the rest of a fetch comes soon."""
        if not self._near_s or shared.fetch.is_done or shared.is_late:
            return False
        return shared.fetch.left_s <= self._near_s

    @property
    def num_waiting(self) -> int:
        """Those that are neither done nor late, nor near."""
        open_ = [shared for shared in self._open if not shared.fetch.is_done and not shared.is_late]
        return sum([not self.is_near(shared) for shared in open_])
