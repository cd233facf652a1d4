"""What an exporter shows of one pool: the store's own figures, and the sum of what engine processes publish beside it.

It is no member of the pool: it makes none, keeps none from being removed, and finds the next one at the same place. The
sums of counters and histograms keep what processes had counted that ended while the exporter ran.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from prometheus_client import CollectorRegistry
from prometheus_client import Metric as Family
from prometheus_client.registry import Collector

from headwater.connector.metrics import Metric, Source, Values, host_values, merge
from headwater.connector.published import all_published
from headwater.connector.stats import Distribution
from headwater.connector.totals import Totals
from headwater.errors import HeadwaterError, UrlError
from headwater.serve.families import family, pool_families, render
from headwater.stores.embedded import store_directory
from headwater.stores.embedded.peek import peek
from headwater.stores.stats import StoreStats, TierStats
from headwater.stores.url import StoreUrl

log = logging.getLogger("headwater.exporter")

LOOK_S = 1.0
STALE_S = 15.0
"""A look that takes longer hangs in the operating system, and what was seen before is no longer believed."""
_SHARED = ("stored", "stored_bytes", "stored_raw_bytes", "damaged")

STORE_UP = Metric(
    "headwater_store_up",
    "gauge",
    "1 while there is a pool at the exporter's URL that can be read, else 0.",
    Source.STORE,
)
STORE_ENGINES = Metric(
    "headwater_store_engine_processes",
    "gauge",
    "Processes of engines that publish their figures beside the store.",
    Source.STORE,
    labels=("engine",),
)
ENGINES = ("vllm", "headwater")
"""What `Published.engine` may be. Those without a process have a series, too: an alert needs one to compare."""
EXPORTER_METRICS = (STORE_UP, STORE_ENGINES)


@dataclass(frozen=True)
class Look:
    """What was seen at one moment."""

    at_s: float = 0.0
    is_up: bool = False
    engines: dict[str, float] = field(default_factory=dict)
    values: Values = field(default_factory=dict)
    times: dict[str, Distribution] = field(default_factory=dict)


class PoolWatch:
    """Looks at a pool again and again, in a thread of its own: a disk may hang. `latest` waits for nobody."""

    def __init__(self, urls: Sequence[StoreUrl], clock: Callable[[], float] = time.monotonic) -> None:
        """`urls`: all tiers, the first one first. Raises UrlError where that one is not on this host."""
        self._first, *lower = urls
        if self._first.scheme not in ("shm", "file"):
            raise UrlError(f"{self._first}: an exporter looks at a pool of this host, shm:// or file://")
        self._lower = [url for url in lower if url.scheme in ("shm", "file")]
        self._clock = clock
        self._totals = Totals()
        self._history: set[str] = set()
        """Processes that had ended before the first look."""
        self._has_looked = False
        self._trouble: dict[str, str] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headwater-watch", daemon=True)
        self._look = Look()

    @property
    def latest(self) -> Look:
        """What was seen last; a pool that has not been seen for `STALE_S` is not up."""
        look = self._look
        return replace(look, is_up=look.is_up and self._clock() - look.at_s < STALE_S)

    def start(self) -> None:
        """Look for the first time, and then every second until `close`."""
        self.look()
        self._thread.start()

    def close(self) -> None:
        """Look no more. Does not wait for a look that hangs."""
        self._end.set()

    def look(self) -> Look:
        """Look once."""
        engines = self._hear()
        store = self._peek(self._first)
        values = self._totals.values
        if store is not None:
            values = merge(values, host_values(replace(store, tiers=self._shared_tiers(store, values))))
        self._look = Look(self._clock(), store is not None, dict(engines), values, self._totals.times)
        return self._look

    def _run(self) -> None:
        while not self._end.wait(LOOK_S):
            try:
                self.look()
            except Exception:
                log.exception("the pool cannot be looked at")

    def _hear(self) -> Counter[str]:
        """Add up what processes have published; the engines of those that are alive."""
        engines: Counter[str] = Counter()
        records = all_published(store_directory(self._first))
        for record in records:
            if not record.is_alive and not self._has_looked:
                self._history.add(record.token)
            if record.token in self._history:
                continue
            if record.is_alive:
                engines[record.engine] += 1
            self._totals.add(record.token, record.values, record.times)  # of one that has ended, no more than before
        self._totals.keep_only(record.token for record in records if record.is_alive)
        self._has_looked = True
        return engines

    def _shared_tiers(self, store: StoreStats, values: Values) -> tuple[TierStats, ...]:
        """Figures of tiers that each of them counts for the whole host; none where the pool has one tier only."""
        if not any(tier for series in values.values() for tier in series):
            return ()
        first = TierStats(store.url, "first", host_wide=_SHARED, **{name: getattr(store, name) for name in _SHARED})
        lower = []
        for url in self._lower:
            if (found := self._peek(url)) is not None:
                lower.append(TierStats(found.url, "back", damaged=found.damaged, host_wide=("damaged",)))
        return (first, *lower)

    def _peek(self, url: StoreUrl) -> StoreStats | None:
        try:
            found, trouble = peek(url), ""
        except HeadwaterError as error:
            found, trouble = None, str(error)
        if trouble and trouble != self._trouble.get(str(url)):
            log.warning("%s", trouble)
        self._trouble[str(url)] = trouble
        return found


class ExporterMetrics(Collector):
    """The page."""

    def __init__(self, latest: Callable[[], Look]) -> None:
        self._latest = latest
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def collect(self) -> Iterator[Family]:
        """One family for each declared metric."""
        look = self._latest()
        yield family(STORE_UP, {"": float(look.is_up)})
        yield family(STORE_ENGINES, dict.fromkeys(ENGINES, 0.0) | look.engines)
        yield from pool_families(look.values, look.times)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The page and its content type."""
        return render(self._registry, accept)
