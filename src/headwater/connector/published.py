"""The figures that each engine process publishes beside its pool, for exporters and for people who look.

    publisher = Publisher(pool, engine="vllm", model=label)     # one for each process and pool
    publisher.add("rank 0", collect)                            # collect() -> figures(stats, Source.WORKER)
    publisher.close()

    published(pool_or_directory) -> list[Published]             # of the processes that are alive
        Published: pid, engine, role, model, started_s, updated_s, values, times

`engine` is `vllm` or `headwater` (the reference engine, in `headwater serve` and elsewhere). `role` is `scheduler`,
`rank 0`, …; a process that is several of these says `scheduler, rank 0`. `values` are counted since the process
started, by metric and tier, and are this process's own (see `metrics`). Figures that all processes of the host share
come from the pool itself (`metrics.host_values`).

A thread publishes about once a second, and only what has changed: an idle engine writes nothing, and `updated_s` is the
time of the last change. Nothing is published for `memory://`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from headwater.connector.metrics import (
    BY_NAME,
    POOL_METRICS,
    Source,
    Values,
    distributions,
    own_values,
    transfer_values,
)
from headwater.connector.stats import Distribution, TransferStats
from headwater.connector.totals import Spread, Totals
from headwater.errors import HeadwaterError
from headwater.locks import ForkSafeLock
from headwater.pool.pool import Pool
from headwater.stores.figures import FiguresFile, read_figures

log = logging.getLogger("headwater")

EVERY_S = 1.0
CLOSE_S = 5.0
MAX_TEXT = 200
MAX_TIERS = 64
_VERSION = 1
_ALWAYS_CHANGES = "headwater_pool_thread_seconds_total"
"""The publishing itself takes processor time: no reason to publish."""
_MAX_NUMBER = 2.0**62

Collect = Callable[[], tuple[Values, Mapping[str, Distribution]]]


@dataclass(frozen=True, slots=True)
class Published:
    """What one process has published last."""

    token: str
    """Names the process: no two have the same, not even after each other."""
    is_alive: bool
    pid: int
    """As the process sees itself; in a container that is another number than outside."""
    engine: str
    role: str
    model: str
    """A name for people, without the path."""
    started_s: float
    updated_s: float
    """Seconds since 1970."""
    values: Values
    times: Spread


def figures(stats: TransferStats, source: Source) -> tuple[Values, Spread]:
    """What a `Collect` of a rank (`Source.WORKER`) or a scheduler (`Source.SCHEDULER`) returns."""
    times = {name: found for name, found in distributions(stats).items() if BY_NAME[name].source is source}
    return transfer_values(stats, source), times


def published(where: Pool | str) -> list[Published]:
    """What the processes that are alive have published beside a pool, or in a pool's directory, the oldest first. Costs
    some 100 µs a process; raises nothing, and leaves out what cannot be read."""
    return [record for record in all_published(where) if record.is_alive]


def all_published(where: Pool | str) -> list[Published]:
    """The same with the last words of processes that have ended, as far as their files are still there."""
    directory = where if isinstance(where, str) else where.directory
    if directory is None:
        return []
    found = [decode(file.payload, file.token, is_alive=file.is_alive) for file in read_figures(directory)]
    return sorted((record for record in found if record is not None), key=lambda r: (r.started_s, r.token))


class Publisher:
    """Publishes what the parts of one process count about one pool. Thread-safe; a forked child publishes nothing."""

    def __init__(
        self,
        pool: Pool,
        *,
        engine: str,
        model: str,
        starting: Callable[[], AbstractContextManager[None]] = nullcontext,
        every_s: float = EVERY_S,
    ) -> None:
        """Never raises: an engine without figures is better than none. The thread is started inside `starting()`."""
        self._pool = pool
        self._engine = engine
        self._model = model
        self._starting = starting
        self._every_s = every_s
        self._started_s = time.time()
        self._sources: dict[str, Callable[[], Collect | None]] = {}
        self._roles: list[str] = []
        self._totals = Totals()
        self._last: Any = None
        self._file: FiguresFile | None = None
        self._thread: threading.Thread | None = None
        self._end = threading.Event()
        self._lock = ForkSafeLock()
        self._has_complained = False
        if pool.directory is not None:
            try:
                self._file = FiguresFile(pool.directory)
            except OSError as error:
                log.warning("this process's figures are not published: %s", error)

    def add(self, role: str, collect: Collect) -> None:
        """Publish what a part of this process counts as well. A bound method does not keep its object alive."""
        if self._file is None:
            return
        with self._lock:
            self._sources[role] = weakref.WeakMethod(collect) if hasattr(collect, "__self__") else lambda: collect
            if role not in self._roles:
                self._roles = sorted([*self._roles, role], key=lambda name: (name != "scheduler", name))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="headwater-figures", daemon=True)
                with self._starting():
                    self._thread.start()

    def remove(self, role: str) -> None:
        """A part has ended: what it counted stays."""
        self.flush()
        with self._lock:
            self._sources.pop(role, None)
            self._totals.end(role)

    def flush(self) -> None:
        """Publish now what has changed."""
        with self._lock:
            self._publish()

    def close(self) -> None:
        """Publish the last figures, while the pool is still open, and end. Idempotent."""
        self._end.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_S)
        if self._lock.acquire(CLOSE_S):
            try:
                self._publish()
                file, self._file = self._file, None
            finally:
                self._lock.release()
            if file is not None:
                file.close()

    def _run(self) -> None:
        while not self._end.wait(self._every_s):
            with self._lock:
                self._publish()
                if self._file is None:
                    return

    def _publish(self) -> None:
        if self._file is None:
            return
        try:
            self._collect()
            values, times = self._totals.values, self._totals.times
            said = ({name: series for name, series in values.items() if name != _ALWAYS_CHANGES}, times, self._roles)
            if said == self._last:
                return
            now = Published(
                token=self._file.token,
                is_alive=True,
                pid=os.getpid(),
                engine=self._engine,
                role=", ".join(self._roles),
                model=self._model,
                started_s=self._started_s,
                updated_s=time.time(),
                values=values,
                times=times,
            )
            is_there = self._file.write(encode(now))
            self._last = said
        except Exception as error:  # whatever it is, the engine goes on; a counter may be in the middle of a change
            if not self._has_complained and not isinstance(error, HeadwaterError):
                self._has_complained = True
                log.warning("this process's figures could not be published: %s: %s", type(error).__name__, error)
            return
        if not is_there:  # the pool was deleted under this process
            self._file.close()
            self._file = None

    def _collect(self) -> None:
        for role, source in list(self._sources.items()):
            if (collect := source()) is None:
                del self._sources[role]
                self._totals.end(role)
            else:
                self._totals.add(role, *collect())
        # What this process did with each tier: once, however many parts it has.
        with contextlib.suppress(HeadwaterError):  # closed meanwhile
            self._totals.add("", own_values(self._pool.stats().store), {})


def encode(record: Published) -> bytes:
    """A record as bytes."""
    said = {
        "version": _VERSION,
        "pid": record.pid,
        "engine": record.engine,
        "role": record.role,
        "model": record.model,
        "started_s": record.started_s,
        "updated_s": record.updated_s,
        "values": record.values,
        "times": {name: [list(found.counts), found.sum] for name, found in record.times.items()},
    }
    return json.dumps(said, separators=(",", ":")).encode()


def decode(raw: bytes, token: str, *, is_alive: bool) -> Published | None:
    """A record from bytes that anything may have written; None where they are none. Metrics that this version does not
    know, and numbers that cannot be, are left out."""
    try:
        said = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict) or said.get("version") != _VERSION:
        return None
    pid, started_s, updated_s = (_number(said.get(name)) for name in ("pid", "started_s", "updated_s"))
    if pid is None or started_s is None or updated_s is None:
        return None
    return Published(
        token=token,
        is_alive=is_alive,
        pid=int(pid),
        engine=_text(said.get("engine")),
        role=_text(said.get("role")),
        model=_text(said.get("model")),
        started_s=started_s,
        updated_s=updated_s,
        values=_values(said.get("values")),
        times=_times(said.get("times")),
    )


def _values(said: Any) -> Values:
    found: Values = {}
    for name, series in said.items() if isinstance(said, dict) else ():
        metric = BY_NAME.get(name)
        if metric is None or metric.kind == "histogram" or not isinstance(series, dict):
            continue
        if metric.source is Source.PEER:  # no process publishes these
            continue
        given = [(_text(tier), _number(value)) for tier, value in list(series.items())[:MAX_TIERS]]
        numbers = {tier: number for tier, number in given if number is not None and bool(tier) == bool(metric.labels)}
        if numbers:
            found[name] = numbers
    return found


def _times(said: Any) -> Spread:
    found: Spread = {}
    for metric in POOL_METRICS if isinstance(said, dict) else ():
        match said.get(metric.name):
            case [[*counts], total] if metric.kind == "histogram" and len(counts) in (0, len(metric.buckets) + 1):
                numbers, seconds = [_number(count) for count in counts], _number(total)
                if seconds is not None and all(number is not None and number == int(number) for number in numbers):
                    found[metric.name] = Distribution(tuple(int(number or 0) for number in numbers), seconds)
    return found


def _number(value: Any) -> float | None:
    """A finite number that is not negative."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value < _MAX_NUMBER else None


def _text(value: Any) -> str:
    """One line that can be shown."""
    text = value[:MAX_TEXT] if isinstance(value, str) else ""
    return "".join(char if char.isprintable() else "\ufffd" for char in text)
