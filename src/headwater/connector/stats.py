"""Counting: what one rank moved between its cache and the pool, and what the scheduler side asked for.

The figures are plain data, counted since the start. `metrics` says what each of them means, and how it is shown.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

TRANSFER_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
MAX_RECENT = 4096
"""Durations that are kept one by one until somebody takes them; of more, the oldest are forgotten."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """How durations are spread over buckets."""

    counts: tuple[int, ...] = ()
    """By bucket, not cumulative; the last one is above all bounds. Empty: nothing was ever counted."""
    sum: float = 0.0


@dataclass(frozen=True, slots=True)
class TransferStats:
    """Figures of one rank; those in the second part are the scheduler side's. For their meaning see `metrics`."""

    loaded_bytes: int = 0
    saved_bytes: int = 0
    load_seconds: float = 0.0
    load_times: Distribution = Distribution()
    save_times: Distribution = Distribution()
    num_dropped: int = 0
    num_damaged: int = 0
    step_seconds: float = 0.0
    thread_seconds: float = 0.0
    pushed_bytes: int = 0
    num_pushed: int = 0
    num_push_drops: int = 0

    num_asked_tokens: int = 0
    num_matched_tokens: int = 0
    num_loaded_tokens: int = 0
    num_failed_loads: int = 0
    num_late_fetches: int = 0
    num_expected: int = 0
    num_followed: int = 0
    num_given_up: int = 0
    wait_seconds: float = 0.0
    fetch_times: Distribution = Distribution()
    is_up: int = 0
    """1 with the figures of a scheduler side that uses its pool."""


Times = dict[str, list[float]]
"""Durations one by one, by the field of `TransferStats` that counts them."""


class Durations:
    """How long jobs took: spread over buckets since the start, and one by one since the last look. Thread-safe."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._started: dict[str, float] = {}
        self._recent: deque[float] = deque(maxlen=MAX_RECENT)
        self._lock = threading.Lock()

    def start(self, name: str) -> None:
        """A job begins."""
        with self._lock:
            self._started[name] = time.monotonic()

    def end(self, name: str) -> None:
        """It has ended. A job that never began is not counted."""
        with self._lock:
            start_s = self._started.pop(name, None)
        if start_s is not None:
            self.add(time.monotonic() - start_s)

    def add(self, seconds: float) -> None:
        """Count one job. A bucket includes its upper bound."""
        with self._lock:
            self._counts[bisect_left(self._bounds, seconds)] += 1
            self._sum += seconds
            self._recent.append(seconds)

    def take(self) -> list[float]:
        """The jobs that have ended since the last call, `MAX_RECENT` at most."""
        with self._lock:
            recent = list(self._recent)
            self._recent.clear()
        return recent

    @property
    def total(self) -> Distribution:
        """All jobs so far."""
        with self._lock:
            return Distribution(tuple(self._counts), self._sum)


class SchedulerCounts:
    """What the scheduler side of one engine counts. Not thread-safe: the scheduler's thread calls it."""

    def __init__(self) -> None:
        self._num_asked = self._num_matched = self._num_loaded = self._num_failed = 0
        self._num_late = self._num_expected = self._num_followed = self._num_given_up = 0
        self._wait_seconds = 0.0
        self.fetch_times = Durations(TRANSFER_BUCKETS_S)
        self._last: tuple[str, int, int] | None = None
        self._loads: dict[str, tuple[float, range]] = {}
        """When each load under way began, and the tokens it may bring."""

    def asked(self, request_id: str, num_asked: int, num_matched: int) -> None:
        """The pool was asked for a request's tokens. A question that is repeated with the same answer counts once:
        an engine without free blocks asks for the first request of its queue at every step."""
        if self._last != (question := (request_id, num_asked, num_matched)):
            self._last = question
            self._num_asked += num_asked
            self._num_matched += num_matched

    def load_started(self, request_id: str, tokens: range) -> None:
        """A request waits for the KV of these tokens."""
        self._loads[request_id] = (time.monotonic(), tokens)

    def load_cancelled(self, request_id: str) -> None:
        """Nobody waits for this load any more: however it ends, it has not failed."""
        self._loads.pop(request_id, None)

    def load_ended(self, request_id: str, num_tokens: int) -> None:
        """A load is over: the KV of the request's first `num_tokens` tokens is there."""
        if (load := self._loads.pop(request_id, None)) is None:
            return
        start_s, tokens = load
        self._wait_seconds += time.monotonic() - start_s
        self._num_loaded += max(0, min(num_tokens, tokens.stop) - tokens.start)
        self._num_failed += num_tokens < tokens.stop

    def fetch_late(self) -> None:
        """A request goes on without chunks that a lower tier did not bring by the deadline."""
        self._num_late += 1

    def expected(self) -> None:
        """Another server is to send KV of a request."""
        self._num_expected += 1

    def followed(self) -> None:
        """A load begins whose chunks are still being filled."""
        self._num_followed += 1

    def gave_up(self) -> None:
        """KV that was expected has not come, or not all of it."""
        self._num_given_up += 1

    def take_times(self) -> Times:
        """How long each fetch took that has been released since the last call."""
        return {"fetch_times": self.fetch_times.take()}

    def stats(self) -> TransferStats:
        """Counts since the start; what only ranks know is 0."""
        return self.add_to(TransferStats())

    def add_to(self, stats: TransferStats) -> TransferStats:
        """A rank's figures with these in them."""
        return replace(
            stats,
            num_asked_tokens=self._num_asked,
            num_matched_tokens=self._num_matched,
            num_loaded_tokens=self._num_loaded,
            num_failed_loads=self._num_failed,
            num_late_fetches=self._num_late,
            num_expected=self._num_expected,
            num_followed=self._num_followed,
            num_given_up=self._num_given_up,
            wait_seconds=self._wait_seconds,
            fetch_times=self.fetch_times.total,
            is_up=1,
        )
