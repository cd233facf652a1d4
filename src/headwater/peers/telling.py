"""The serving side of followers: a pool's events as they happen, its listing and its figures, for other hosts.

A follower that takes its events too slowly is waited for, with nothing kept for it but its place in the pool's ring; if
the ring goes over that place meanwhile, it is told LOST and reads the listing again.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict

from headwater.errors import WireError
from headwater.peers.carriers.tcp import Connection
from headwater.peers.hello import Hello
from headwater.peers.pull_wire import (
    FROM_NOW,
    MAX_EVENTS,
    decode_position,
    encode_events,
    encode_pages,
    encode_position,
)
from headwater.peers.serving import Lanes
from headwater.peers.wire import Header, Type, encode_frame
from headwater.stores.base import Store

_SEND_S = 5.0
_POLL_S = 0.01
HEARTBEAT_S = 0.2
"""So often something is said, so that silence means something."""


class TellingSession(Lanes):
    """One follower. After FOLLOW its connection carries events and nothing else."""

    def __init__(self, hello: Hello, store: Store) -> None:
        super().__init__(hello)
        self._store = store

    def handle(self, lane: Connection, header: Header, meta: bytes, deadline: float) -> None:
        """Do what a frame says, and answer it. Raises PeerError where the connection must be closed."""
        if header.data_bytes:
            raise WireError("a follower brings no data")
        if header.type == Type.FOLLOW:
            self._follow(lane, header.number, decode_position(meta))
        elif header.type == Type.LIST:
            for page in encode_pages(self._store.scan()):
                self._answer(lane, header.number, page)
        elif header.type == Type.STATS:
            self._answer(lane, header.number, json.dumps(asdict(self._store.stats())).encode())
        elif header.type == Type.PING:
            self._answer(lane, header.number, b"")
        else:
            raise WireError(f"a {header.type.name} frame has no place in following")

    def _answer(self, lane: Connection, number: int, body: bytes) -> None:
        lane.send(encode_frame(Type.ANSWER, body, number=number), time.monotonic() + _SEND_S)

    def _follow(self, lane: Connection, number: int, since: int) -> None:
        follower = self._store.follow(None if since == FROM_NOW else since)
        self._answer(lane, number, encode_position(follower.position))
        while not self.is_over:
            events, end = follower.poll(MAX_EVENTS - 1), time.monotonic() + HEARTBEAT_S
            while not events and time.monotonic() < end and not self.is_over:
                time.sleep(_POLL_S)
                events = follower.poll(MAX_EVENTS - 1)
            body = encode_events(follower.position, events)
            lane.send(encode_frame(Type.EVENTS, body, number=number), time.monotonic() + _SEND_S)
