"""The serving side of followers: a pool's events as they happen, its listing and its figures, for other hosts.

A follower that takes its events too slowly is waited for, with nothing kept for it but its place in the pool's ring; if
the ring goes over that place meanwhile, it is told LOST and reads the listing again.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict

from headwater.errors import PeerGoneError, WireError
from headwater.peers.carriers.tcp import Connection
from headwater.peers.hello import Hello
from headwater.peers.pull_wire import (
    FROM_NOW,
    MAX_EVENTS,
    UNSPECIFIED,
    EventPlace,
    encode_events,
    encode_pages,
)
from headwater.peers.serving import PeerSession
from headwater.peers.wire import Header, Type, encode_frame
from headwater.stores.base import Store
from headwater.stores.events import Event, EventKind, Follower

_SEND_S = 5.0
_POLL_S = 0.01
HEARTBEAT_S = 0.2
"""So often something is said, so that silence means something."""


class EventSession(PeerSession):
    """One follower. After FOLLOW its connection carries events and nothing else."""

    def __init__(self, hello: Hello, store: Store) -> None:
        super().__init__(hello)
        self._store = store

    def handle(self, connection: Connection, header: Header, meta: bytes, deadline: float) -> None:
        """Do what a frame says, and answer it. Raises PeerError where the connection must be closed."""
        if header.data_bytes:
            raise WireError("a follower's request must not carry data")
        if header.type == Type.FOLLOW:
            self._follow(connection, header.number, EventPlace.decode(meta))
        elif header.type == Type.LIST:
            for page in encode_pages(self._store.scan()):
                self._answer(connection, header.number, page)
        elif header.type == Type.STATS:
            self._answer(connection, header.number, json.dumps(asdict(self._store.stats())).encode())
        elif header.type == Type.PING:
            self._answer(connection, header.number, b"")
        else:
            raise WireError(f"a {header.type.name} frame is not allowed from a follower")

    def _answer(self, connection: Connection, number: int, body: bytes) -> None:
        connection.send(encode_frame(Type.ANSWER, body, number=number), time.monotonic() + _SEND_S)

    def _follow(self, connection: Connection, number: int, since: EventPlace) -> None:
        home = hashlib.sha256(self._store.home.encode()).digest()
        tier = self._store.stats().url.partition(":")[0]
        is_known = since.home in (home, UNSPECIFIED) and since.position != FROM_NOW
        follower = self._store.follow(since.position if is_known else None)
        self._answer(connection, number, EventPlace(follower.position, home).encode())
        if since.home not in (home, UNSPECIFIED):
            self._send(connection, number, follower.position, [Event(follower.position, EventKind.LOST, "")])
        while not self.is_over:
            events, end = _poll(follower), time.monotonic() + HEARTBEAT_S
            while not events and time.monotonic() < end and not self.is_over:
                time.sleep(_POLL_S)
                events = _poll(follower)
            # Of slower tiers a follower has no listing, so their events would mean nothing.
            self._send(connection, number, follower.position, [event for event in events if event.tier in ("", tier)])

    def _send(self, connection: Connection, number: int, position: int, events: Sequence[Event]) -> None:
        frame = encode_frame(Type.EVENTS, encode_events(position, events), number=number)
        connection.send(frame, time.monotonic() + _SEND_S)


def _poll(follower: Follower) -> list[Event]:
    try:
        return follower.poll(MAX_EVENTS - 1)
    except ValueError as error:  # the mapping was closed
        raise PeerGoneError("the pool was closed") from error
