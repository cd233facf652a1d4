"""A circuit breaker: after some failures a backend is left alone, and asked again in the background until it answers.

Nobody who uses the pool pays for that: while the breaker is open, operations are misses at once. It knows nothing of
what it guards.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from headwater.locks import ForkSafeLock

log = logging.getLogger("headwater")


@dataclass(frozen=True)
class BreakerStats:
    """A breaker at one moment."""

    state: str
    """`closed` (in use), `open` (left alone) or `probing`."""
    trips: int
    failures: int
    reason: str
    """Why it opened last; empty if it never did."""


@dataclass(frozen=True)
class BreakerSettings:
    """When it opens, and how often it asks again."""

    threshold: int = 3
    """So many failures in a row open it; so does half of the last `window` operations."""
    window: int = 16
    first_pause_s: float = 0.25
    longest_pause_s: float = 5.0


class CircuitBreaker:
    """Closed, open, or asking. Thread-safe; in a forked child it begins anew, closed."""

    def __init__(
        self,
        name: str,
        probe: Callable[[], None],
        settings: BreakerSettings = BreakerSettings(),  # noqa: B008 - frozen
    ) -> None:
        self._name = name
        self._probe = probe
        self._settings = settings
        self._lock = ForkSafeLock()
        self._pid = os.getpid()
        self._recent: deque[bool] = deque(maxlen=settings.window)
        self._in_a_row = 0
        self._state = "closed"
        self._trips = self._failures = 0
        self._reason = ""
        self._stop = threading.Event()
        self._on_close: list[Callable[[], None]] = []

    @property
    def closed(self) -> bool:
        """Whether the backend may be used now."""
        if self._state != "closed" and self._pid != os.getpid():
            self._begin_anew()  # the thread that would have asked stayed in the parent
        return self._state == "closed"

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call this, from the asking thread, when the backend is back, just before it is used again."""
        self._on_close.append(callback)

    def succeeded(self) -> None:
        """An operation did what it should, in time."""
        with self._lock:
            self._in_a_row = 0
            self._recent.append(True)

    def failed(self, reason: str) -> None:
        """An operation met an error, or took too long."""
        with self._lock:
            self._failures += 1
            self._in_a_row += 1
            self._recent.append(False)
            half_bad = len(self._recent) == self._recent.maxlen and self._recent.count(False) * 2 >= len(self._recent)
            if self._state != "closed" or (self._in_a_row < self._settings.threshold and not half_bad):
                return
            self._state, self._reason = "open", reason[:200]
            self._trips += 1
            self._pid = os.getpid()
        log.warning("%s is not used until it answers again: %s", self._name, reason[:200])
        threading.Thread(target=self._ask_until_it_answers, name="headwater-breaker", daemon=True).start()

    def stats(self) -> BreakerStats:
        """The breaker now."""
        return BreakerStats(self._state, self._trips, self._failures, self._reason)

    def close(self) -> None:
        """Stop asking. Idempotent."""
        self._stop.set()

    def _begin_anew(self) -> None:
        with self._lock:
            self._pid, self._state, self._in_a_row = os.getpid(), "closed", 0
            self._recent.clear()
            self._stop = threading.Event()

    def _ask_until_it_answers(self) -> None:
        pause_s, since = self._settings.first_pause_s, time.monotonic()
        while not self._stop.wait(pause_s):
            self._state = "probing"
            try:
                self._probe()
            except Exception as error:  # whatever it is: the backend is not back
                self._state = "open"
                log.debug("%s does not answer yet: %s", self._name, error)
                pause_s = min(2 * pause_s, self._settings.longest_pause_s)
                continue
            for callback in self._on_close:  # first: who sees it closed may rely on what they do
                callback()
            with self._lock:
                self._state, self._in_a_row = "closed", 0
                self._recent.clear()
            log.warning("%s is back after %.1f s", self._name, time.monotonic() - since)
            return
