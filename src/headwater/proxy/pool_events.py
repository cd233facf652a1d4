"""Events of a Headwater pool on this host, out of its ring (`Pool.follow`).

The events of pools on other hosts have the same shape and come over the wire; they need another source, not another
index.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from headwater.errors import HeadwaterError, StoreError
from headwater.kv.identity import Identity
from headwater.kv.spec import KVSpec
from headwater.pool.pool import Pool
from headwater.pool.space import Space
from headwater.proxy.follow import SourceEvent, SourceKind
from headwater.proxy.keys import Scheme, SpaceScheme
from headwater.stores import open_urls
from headwater.stores.config import find_pool
from headwater.stores.embedded import store_directory
from headwater.stores.events import Event, EventKind, Follower

POLL_S = 0.01
LOOK_S = 0.5
"""How often to look whether the pool was replaced by another of the same name."""
RELIST_S = 30.0
"""The listing is read again so often: it may have learnt of another model."""

_KINDS = {
    EventKind.STORED: SourceKind.STORED,
    EventKind.REMOVED: SourceKind.REMOVED,
    # A root went, and the event does not say which chunks were below it.
    EventKind.CLEARED: SourceKind.LOST,
    EventKind.LOST: SourceKind.LOST,
}


class PoolSource:
    """One pool of this host. Listings are read in a thread; everything else takes microseconds."""

    def __init__(self, url: str) -> None:
        self.name = f"pool {find_pool(url).urls[0]}"
        self.scheme: Scheme | None = None
        self._space_scheme = SpaceScheme()
        self._url = url
        self._pool: Pool | None = None
        self._follower: Follower | None = None
        self._file: tuple[int, int] | None = None
        self._looked_s = self._listed_s = 0.0

    async def open(self) -> None:
        self._pool = await asyncio.to_thread(_open_first_tier, self._url)
        self._follower = self._pool.follow()
        self._file = _file_of(self._url)
        self._looked_s = time.monotonic()

    async def listing(self) -> Mapping[str, Iterable[bytes]]:
        assert self._pool is not None
        keys, newest = await asyncio.to_thread(_scan, self._pool)
        self._listed_s = time.monotonic()
        if newest is not None:
            self._space_scheme.space = newest.open(self._pool)
            self.scheme = self._space_scheme
        return {"": keys}

    async def next(self) -> Sequence[SourceEvent]:
        assert self._follower is not None
        while True:
            found = self._follower.poll()
            now = time.monotonic()
            if found:
                events = [_event(event) for event in found]
                if self.scheme is None and any(event.kind is SourceKind.STORED for event in events):
                    events.append(SourceEvent(SourceKind.LOST))  # the listing says how its chunks are named
                return events
            if now - self._looked_s >= LOOK_S:
                self._looked_s = now
                if _file_of(self._url) != self._file:
                    raise StoreError("the pool was removed or replaced")
            if now - self._listed_s >= RELIST_S:
                return [SourceEvent(SourceKind.LOST)]
            await asyncio.sleep(POLL_S)

    def restarted(self) -> None:
        """The pool outlives its servers."""

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._pool = self._follower = None
        self.scheme = None
        self._space_scheme.space = None


def _open_first_tier(url: str) -> Pool:
    """The pool without its lower tiers, whose copying is not a router's business."""
    config = find_pool(url)
    return Pool(open_urls(config.urls[:1], None, create=False), tenant_secret=config.tenant_secret)


class _Newest(NamedTuple):
    """What the chunk that was used last belongs to."""

    last_used_ns: int
    space: dict[str, Any]
    root: dict[str, Any]

    def open(self, pool: Pool) -> Space:
        """The space. Raises HeadwaterError where another version described it."""
        identity = Identity.from_canonical(self.space["identity"])
        spec = KVSpec.from_canonical(self.space["spec"])
        return pool.space(identity, spec, chunk_tokens=int(self.root["chunk_tokens"]))


def _scan(pool: Pool) -> tuple[set[bytes], _Newest | None]:
    keys: set[bytes] = set()
    newest: _Newest | None = None
    for chunk in pool.scan():
        keys.add(chunk.key)
        if newest is None or chunk.last_used_ns > newest.last_used_ns:
            newest = _Newest(chunk.last_used_ns, chunk.space, chunk.root)
    return keys, newest


def _event(event: Event) -> SourceEvent:
    # Events of lower tiers count as if they were of the first: gone from one is gone, until the next listing. A router
    # that expects too little loses little.
    return SourceEvent(_KINDS[event.kind], (event.key,) if event.key else ())


def _file_of(url: str) -> tuple[int, int] | None:
    """Names the files behind a pool; None where they are gone, or it has none."""
    try:
        found = os.stat(os.path.join(store_directory(find_pool(url).urls[0]), "index"))
    except (OSError, HeadwaterError):
        return None
    return found.st_dev, found.st_ino
