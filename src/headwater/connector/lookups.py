"""Lookups on behalf of a scheduler, which must not wait: a late answer is a miss.

If the index is in memory of this host, a lookup is a call. Otherwise it runs in a thread, for as long as the store
itself allows (`lookup` of its URL), so that a backend which is late costs only what it would have added to the tiers
above it. A store that does not keep its own promise costs its deadline once: until that lookup has
returned, every other one is a miss at once.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from typing import TypeVar

from headwater.errors import StoreError
from headwater.stores.workers import Workers

T = TypeVar("T")
log = logging.getLogger(__name__)

GRACE_S = 0.1
"""For a store that gives up in time to say so. All requests of an engine wait while one of them is looked up."""


class LookupRunner:
    """Runs lookups in a store, for one thread. A store that fails has nothing."""

    def __init__(self, lookup_s: float) -> None:
        """`lookup_s` is what the store allows itself; 0: a lookup is a call."""
        self.deadline_s = 2 * lookup_s + GRACE_S  # a match may ask twice: for chunks, then for tails
        self._workers: Workers | None = None
        if lookup_s:
            self._workers = Workers(1, "headwater-lookup")
            weakref.finalize(self, self._workers.close)

    def run(self, call: Callable[[], T], otherwise: T) -> T:
        """What `call` returns, or `otherwise` where it fails or is late; a late one still runs to its end."""
        if self._workers is None:
            try:
                return call()
            except StoreError as error:
                log.warning("a lookup in the pool failed, and counts as a miss: %s", error)
                return otherwise
        answers: list[T] = []
        failure = self._workers.call(lambda: answers.append(call()), time.monotonic() + self.deadline_s)
        if isinstance(failure, StoreError):
            log.warning("a lookup in the pool failed, and counts as a miss: %s", failure)
        elif isinstance(failure, Exception):
            raise failure
        return answers[0] if answers else otherwise

    def post(self, call: Callable[[], None]) -> None:
        """Call it after the lookups before it, without waiting for it if the store may be slow."""
        if self._workers is None:
            self.run(call, None)
        else:
            self._workers.post(call)
