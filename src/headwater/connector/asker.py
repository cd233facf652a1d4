"""Look-ups on behalf of a scheduler, which must not wait: what is not answered soon is not there.

Where the index is memory of this host, a look-up is a call. Elsewhere it runs in a thread, for as long as the store
itself allows (`lookup` of its URL), so that a backend which is late costs only what it would have added to the tiers
above it. A store that does not keep its own promise costs its deadline once: until the look-up has come back nothing
else is looked up and nobody waits.
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


class Asker:
    """Asks a store, for one thread. A store that fails is one that has nothing."""

    def __init__(self, lookup_s: float) -> None:
        """`lookup_s` is what the store allows itself; 0: it waits for nobody."""
        self.deadline_s = 2 * lookup_s + GRACE_S  # a match may ask twice: for chunks, then for tails
        self._workers: Workers | None = None
        if lookup_s:
            self._workers = Workers(1, "headwater-asker")
            weakref.finalize(self, self._workers.close)

    def ask(self, call: Callable[[], T], otherwise: T) -> T:
        """What `call` returns, or `otherwise` where it fails or is late; a late one still runs to its end."""
        if self._workers is None:
            try:
                return call()
            except StoreError as error:
                log.warning("the pool cannot be asked: %s", error)
                return otherwise
        answers: list[T] = []
        failure = self._workers.call(lambda: answers.append(call()), time.monotonic() + self.deadline_s)
        if isinstance(failure, StoreError):
            log.warning("the pool cannot be asked: %s", failure)
        elif isinstance(failure, Exception):
            raise failure
        return answers[0] if answers else otherwise

    def tell(self, call: Callable[[], None]) -> None:
        """Have it done, after what was asked before; nobody waits for it where that may take long."""
        if self._workers is None:
            self.ask(call, None)
        else:
            self._workers.post(call)
