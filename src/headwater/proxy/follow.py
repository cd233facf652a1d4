"""Following what servers have: event sources feed the router's index, and are read again where something was lost.

A source that fails is opened again; meanwhile its servers are chosen by what was sent to them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from headwater.errors import HeadwaterError
from headwater.proxy.choice import Router
from headwater.proxy.config import ServerSpec
from headwater.proxy.fleet import FleetServer
from headwater.proxy.index import Mask
from headwater.proxy.keys import Scheme

REOPEN_S = 0.25
"""A source that failed is opened again after so long."""
SLICE = 2048
"""Blocks of a listing that are taken in one turn of the event loop."""

log = logging.getLogger("headwater.proxy")


class SourceKind(Enum):
    """What happened to blocks."""

    STORED = "stored"
    REMOVED = "removed"
    CLEARED = "cleared"
    """The source has nothing any more."""
    LOST = "lost"
    """Events are missing: its listing says what is there."""


class SourceEvent(NamedTuple):
    """One event. Blocks can be at several places of a source: tiers of a pool, kinds of memory of an engine."""

    kind: SourceKind
    keys: Sequence[bytes] = ()
    place: str = ""


class EventSource(Protocol):
    """Where a server's events come from. Used by one task. Every method may raise HeadwaterError or OSError: then the
    source is closed and opened again."""

    @property
    def name(self) -> str:
        """For the log."""
        ...

    @property
    def scheme(self) -> Scheme | None:
        """How it names blocks; None as long as that is not known."""
        ...

    async def open(self) -> None:
        """Begin. Events from here on are not missed, or said to be lost."""
        ...

    async def listing(self) -> Mapping[str, Iterable[bytes]]:
        """The blocks at each place. Events that come afterwards may repeat some of it."""
        ...

    async def next(self) -> Sequence[SourceEvent]:
        """The next events, waiting for some; may be empty."""
        ...

    def restarted(self) -> None:
        """The server was away and is back."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


class Feed:
    """One source, the servers that it speaks for, and their place in the index."""

    def __init__(self, source: EventSource, servers: Sequence[FleetServer], router: Router) -> None:
        self.source = source
        self.servers = list(servers)
        self.num_repairs = 0
        """How often the listing was read because events were lost."""
        self._router = router
        self._places: dict[str, Mask] = {"": router.bits.take()}

    async def run(self) -> None:
        """Follow until cancelled."""
        reported = ""
        while True:
            try:
                await self.source.open()
                await self._read_listing()
                reported = ""
                while True:
                    await self._take(await self.source.next())
            except (HeadwaterError, OSError) as error:
                if str(error) != reported:
                    reported = str(error)
                    log.warning(
                        "events of %s: %s; until they are back, the index counts the requests sent to it",
                        self.source.name,
                        error,
                    )
            finally:
                self._believe(False)
                self.source.close()
            await asyncio.sleep(REOPEN_S)

    async def _take(self, events: Sequence[SourceEvent]) -> None:
        table = self._router.table
        is_lost = False
        for event in events:
            match event.kind:
                case SourceKind.STORED:
                    bit = self._bit(event.place)
                    for key in event.keys:
                        table.add(key, bit)
                case SourceKind.REMOVED:
                    bit = self._bit(event.place)
                    for key in event.keys:
                        table.remove(key, bit)
                case SourceKind.CLEARED:
                    table.clear(self._mask)
                    for server in self.servers:
                        server.forget()
                case SourceKind.LOST:
                    is_lost = True
        if is_lost:
            self.num_repairs += 1
            await self._read_listing()
        self._believe(True)

    async def _read_listing(self) -> None:
        listing = await self.source.listing()
        table = self._router.table
        for place in [*self._places, *(place for place in listing if place not in self._places)]:
            keys, bit = set(listing.get(place, ())), self._bit(place)
            stale = [key for key, mask in table.masks.items() if mask & bit and key not in keys]
            for number, key in enumerate(stale):
                table.remove(key, bit)
                if number % SLICE == SLICE - 1:
                    await asyncio.sleep(0)
            for number, key in enumerate(keys):
                table.add(key, bit)
                if number % SLICE == SLICE - 1:
                    await asyncio.sleep(0)
        self._believe(True)

    @property
    def _mask(self) -> Mask:
        mask = 0
        for bit in self._places.values():
            mask |= bit
        return mask

    def _bit(self, place: str) -> Mask:
        bit = self._places.get(place)
        if bit is None:
            bit = self._places[place] = self._router.bits.take()
        return bit

    def _believe(self, is_live: bool) -> None:
        scheme = self.source.scheme
        for server in self.servers:
            if is_live and scheme is not None:
                server.scheme, server.event_bits = scheme, self._mask
            else:
                server.event_bits = 0


class Following:
    """All feeds of a proxy."""

    def __init__(self, feeds: Sequence[Feed]) -> None:
        self.feeds = list(feeds)
        self._tasks = [asyncio.create_task(feed.run()) for feed in self.feeds]

    async def close(self) -> None:
        """Stop following."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


MakeSource = Callable[[ServerSpec], EventSource]


def make_source(spec: ServerSpec) -> EventSource:
    """The source that a server's options name."""
    if spec.pool is not None:
        from headwater.proxy.pool_events import PoolSource

        return PoolSource(spec.pool)
    from headwater.proxy.vllm_events import VllmSource

    assert spec.events is not None
    return VllmSource(spec.events, spec.replay)


async def follow_servers(
    servers: Sequence[FleetServer], router: Router, *, has_tokens: bool, make: MakeSource = make_source
) -> Following:
    """Follow the servers that have events. Servers with the same pool share one feed."""
    shared: dict[str, list[FleetServer]] = {}
    for server in servers:
        if (address := server.spec.pool or server.spec.events) is not None:
            shared.setdefault(address, []).append(server)
    if shared and not has_tokens:
        log.warning("events need --tokenizer, because they refer to tokens; servers are chosen by history")
        shared = {}
    feeds = []
    for group in shared.values():
        source = make(group[0].spec)
        feeds.append(Feed(source, group, router))
        for server in group:
            server.on_return = source.restarted
    return Following(feeds)
