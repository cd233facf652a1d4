"""Looking at one pool again and again: it may not be there yet, go, and be made anew.

Only the first tier is opened: figures of the others are those that engines publish. A pool that exists on this host is
opened like any process does, so that it counts as one of its members (which the figures leave out again), and an index
whose writer died is rebuilt. Later looks change nothing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from headwater.errors import HeadwaterError, StoreError
from headwater.redaction import HIDDEN
from headwater.stores import open_urls
from headwater.stores.base import Store
from headwater.stores.breaker import CircuitBreaker
from headwater.stores.config import find_pool
from headwater.stores.embedded import EmbeddedStore, store_directory
from headwater.stores.embedded.peek import is_readable
from headwater.stores.embedded.survey import Surveyor
from headwater.stores.events import Follower, event_name
from headwater.stores.stats import HolderInfo, PrefixInfo, StoreStats
from headwater.watch.activity import MAX_NAME, SHORT, Activity, names, short
from headwater.watch.processes import Own, Processes

Look = dict[str, Any]
"""One look, as plain data for JSON."""

NUM_PREFIXES = 12
NUM_HOLDERS = 8
NUM_HITS = 32
SHARE = 20
"""Looking through the whole index takes one part in this many of the time at most."""
SURVEY_S = 10.0
"""It is looked through this often, though nothing happened."""
_MAX_EVENTS = 1024

_STORE_FIELDS = (
    *("capacity_bytes", "data_bytes", "used_bytes", "pending_bytes", "index_bytes", "index_used_bytes", "chunks"),
    *("stored", "stored_bytes", "stored_raw_bytes", "evicted", "damaged", "aborted", "rebuilds"),
)


class Watcher:
    """Not thread-safe: one thread looks. `own` gives an engine's own figures, for a pool beside which none are
    published: private memory, and stores of other hosts."""

    def __init__(self, url: str | None, *, own: Callable[[], Own] | None = None) -> None:
        """`url` None: there is no pool. Raises UrlError and ConfigError for what names none."""
        self._urls = () if url is None else find_pool(url).urls
        # Published figures are the same ones: while such a pool is away, they must not be counted a second time.
        is_published = bool(self._urls) and self._urls[0].scheme in ("shm", "file")
        self._own = None if is_published else own
        self._store: Store | None = None
        self._file: tuple[int, int] | None = None
        self._generation = 0
        self._follower: Follower | None = None
        self._surveyor: Surveyor | None = None
        self._processes = Processes()
        self._activity = Activity()
        self._prefixes: list[PrefixInfo] = []
        self._holders: list[HolderInfo] = []
        self._surveyed_at, self._survey_cost_s = -1e9, 0.0
        self._is_stale = True

    def look(self) -> Look:
        """What there is now. Takes milliseconds, or what a remote store takes to answer; never raises for a pool."""
        state, why = "none", ""
        store: dict[str, Any] | None = None
        if self._urls and self._urls[0].scheme == "memory":
            state = "private"
        elif self._urls:
            try:
                self._open()
                store = self._look_inside()
                state = "open"
            except (HeadwaterError, OSError, ValueError) as error:
                state, why = ("absent" if self._is_absent() else "unreadable"), short(error)
                self.close()
        own = self._own() if self._own is not None else None
        self._processes.look(self._directory, own, self._activity)
        if store is None and state == "private" and own is not None:
            store = _store_of(own)
        tiers = [str(url).partition("?")[0].replace(f"{HIDDEN}@", "") for url in self._urls]
        shown = [short(tier, MAX_NAME) for tier in tiers]
        return {
            "time_s": time.time(),
            "pool": {"urls": shown, "state": state, "why": why, "generation": self._generation},
            "store": store,
            "tiers": self._processes.tiers(tiers if len(tiers) > 1 else ()),
            "totals": self._processes.totals,
            "processes": self._processes.rows,
            "prefixes": [_prefix_row(prefix) for prefix in self._prefixes],
            "holders": [_holder_row(holder) for holder in self._holders],
            "survey_s": round(self._survey_cost_s, 6),
            "events": [asdict(entry) for entry in self._activity.entries],
        }

    def close(self) -> None:
        """Let go of the pool. The next look opens it again."""
        store, self._store, self._follower, self._surveyor, self._file = self._store, None, None, None, None
        self._prefixes, self._holders, self._is_stale = [], [], True
        if store is not None:
            with suppress(HeadwaterError, OSError):
                store.close()

    # ---- opening ------------------------------------------------------------------------------------------------
    @property
    def _directory(self) -> str | None:
        first = self._store
        return first.directory if isinstance(first, EmbeddedStore) else None

    def _open(self) -> None:
        """Have the pool open that is there now: one that was deleted and made again is another one. One that was
        damaged beyond reading is let go: no engine can replace it as long as anybody has it open."""
        file = self._file_now()
        if self._store is not None and file == self._file and (file is None or is_readable(self._urls[0])):
            return
        self.close()
        self._store = open_urls(self._urls[:1], create=False)
        self._file = file  # as it was before: one that was made since then shows at the next look
        self._generation += 1
        if isinstance(self._store, EmbeddedStore):
            self._surveyor = self._store.surveyor()
        with suppress(HeadwaterError, OSError):  # some have no events, or no room for them
            self._follower = self._store.follow()

    def _file_now(self) -> tuple[int, int] | None:
        """Names the index file that is there; None for remote stores. Raises OSError where there is none."""
        if self._urls[0].is_remote or self._urls[0].is_read_only:
            return None
        found = os.stat(os.path.join(store_directory(self._urls[0]), "index"))
        return found.st_dev, found.st_ino

    def _is_absent(self) -> bool:
        try:
            self._file_now()
        except FileNotFoundError:
            return True
        except (HeadwaterError, OSError):
            pass
        return False

    # ---- inside -------------------------------------------------------------------------------------------------
    def _look_inside(self) -> dict[str, Any]:
        assert self._store is not None
        stats = _stats_of(self._store)
        events = [] if self._follower is None else self._follower.poll(_MAX_EVENTS)
        self._activity.add_events(events, self._describe, event_name(self._urls[0].scheme))
        self._is_stale = self._is_stale or bool(events)
        if self._surveyor is not None:
            self._survey(self._surveyor)
        members = max(stats.members - isinstance(self._store, EmbeddedStore), 0)
        return {name: getattr(stats, name) for name in _STORE_FIELDS} | {"members": members}

    def _survey(self, surveyor: Surveyor) -> None:
        now = time.monotonic()
        since = now - self._surveyed_at
        is_due = since >= SHARE * self._survey_cost_s and (self._is_stale or since >= SURVEY_S)
        hits = surveyor.hits(NUM_HITS)
        if is_due:
            surveyor.refresh()
            hits += surveyor.hits(NUM_HITS)
            self._prefixes, self._holders = surveyor.prefixes(NUM_PREFIXES), surveyor.holders(NUM_HOLDERS)
            self._surveyed_at = time.monotonic()
            self._survey_cost_s = self._surveyed_at - now
        self._activity.add_hits(hits)
        self._is_stale = (self._is_stale and not is_due) or bool(hits)

    def _describe(self, key: bytes) -> tuple[dict[str, Any], int] | None:
        found = self._store.locate(key) if isinstance(self._store, EmbeddedStore) else None
        if found is None:
            return None
        root, chunk = found
        return _described(root.payload), root.space.spec.extent_bytes(chunk.num_tokens)


def _stats_of(store: Store) -> StoreStats:
    """Raises StoreError for a remote store that does not answer: its figures are zeros that nobody said."""
    breaker = getattr(store, "breaker", None)
    if not isinstance(breaker, CircuitBreaker):
        return store.stats()
    failures, stats = breaker.stats().failures, store.stats()
    has_failed = breaker.stats().failures > failures or not breaker.closed
    if has_failed and not (stats.capacity_bytes or stats.used_bytes):
        raise StoreError(f"{stats.url} does not answer")
    return stats


def _described(payload: bytes) -> dict[str, Any]:
    try:
        said = json.loads(payload)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def _store_of(own: Own) -> dict[str, Any] | None:
    """The store's figures, out of an engine's own."""
    values, _ = own
    found = {}
    for name in (*_STORE_FIELDS, "members"):
        series = values.get(f"headwater_store_{name}") or values.get(f"headwater_store_{name}_total") or {}
        found[name] = int(series.get("", 0))
    return found if found["capacity_bytes"] else None


def _prefix_row(prefix: PrefixInfo) -> dict[str, Any]:
    return {
        "key": prefix.key.hex()[:SHORT],
        **names(prefix.root),
        "first_token": prefix.first_token,
        "num_tokens": prefix.num_tokens,
        "num_chunks": prefix.num_chunks,
        "num_bytes": prefix.num_bytes,
        "branches": prefix.branches,
        "hits": prefix.hits,
        "last_used_s": prefix.last_used_ns / 1e9,
    }


def _holder_row(holder: HolderInfo) -> dict[str, Any]:
    return {
        **names(holder.root),
        "num_chunks": holder.num_chunks,
        "num_tokens": holder.num_tokens,
        "num_bytes": holder.num_bytes,
        "hits": holder.hits,
        "last_used_s": holder.last_used_ns / 1e9,
    }
