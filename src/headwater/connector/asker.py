"""Look-ups on behalf of a scheduler, which must not wait: what is not answered soon is not there.

Where the index is memory of this host, a look-up is a call. Elsewhere it runs in a thread: a late one costs its
deadline once, and until it has come back nothing is looked up and nobody waits.
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

DEADLINE_S = 0.2
"""All requests of an engine wait while one of them is looked up."""


class Asker:
    """Asks a store, for one thread. A store that fails is one that has nothing."""

    def __init__(self, *, local: bool) -> None:
        self._workers: Workers | None = None
        if not local:
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
        failure = self._workers.call(lambda: answers.append(call()), time.monotonic() + DEADLINE_S)
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
