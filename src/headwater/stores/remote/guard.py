"""Between a remote store and its backend: the breaker, safe retries, and counts of what became of it all."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from headwater.errors import DeadlineError, StoreClosedError, StoreError
from headwater.locks import ForkSafeLock
from headwater.stores.breaker import CircuitBreaker

T = TypeVar("T")
log = logging.getLogger("headwater")

_ATTEMPTS = 2


class Guard:
    """Through this goes every operation on one backend. Thread-safe."""

    def __init__(self, name: str, breaker: CircuitBreaker) -> None:
        self.name = name
        self.breaker = breaker
        self._lock = ForkSafeLock()
        self._counts: Counter[str] = Counter()
        self._closed = False

    def run(self, verb: str, work: Callable[[], T], deadline: float, *, retry: bool = True) -> T | None:
        """Do it, a second time if the first failed early and it may be repeated. None: it could not be done."""
        if self._closed:
            raise StoreClosedError(f"{self.name} was closed")
        for attempt in range(_ATTEMPTS if retry else 1):
            if not self.breaker.closed:
                self.count(skipped=1)
                return None
            try:
                result = work()
            except DeadlineError as error:
                self.breaker.failed(f"{verb}: {error}")
                self.count(failed=1, late=1)
                return None
            except (StoreError, OSError) as error:
                self.breaker.failed(f"{verb}: {error}")
                self.count(failed=1)
                log.debug("%s: %s failed (attempt %d): %s", self.name, verb, attempt + 1, error)
                if time.monotonic() >= deadline:
                    return None
                continue
            self.breaker.succeeded()
            return result
        return None

    def count(self, **amounts: int) -> None:
        """Add to the counters."""
        with self._lock:
            self._counts.update(amounts)

    def counts(self) -> Counter[str]:
        """The counters now."""
        with self._lock:
            return Counter(self._counts)

    def close(self) -> None:
        """Refuse from now on. Idempotent."""
        self._closed = True
        self.breaker.close()
