"""Events of another host's pool: `Pool.follow` of a `peer://` URL, for routers and for people.

A thread keeps one connection and a bounded number of events; whoever follows takes them without waiting, so an event
loop may do so too. After a connection was lost the rest is asked for from the last place on; where that is gone, or too
much has piled up, LOST says that the listing (`Pool.scan`) must be read again. A peer that cannot be reached for longer
than `SILENCE_S` is an error: what was heard of it may be out of date.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

from headwater.errors import PeerError, PeerGoneError, StoreClosedError
from headwater.peers.channels import Channels, PeerChannel
from headwater.peers.pull_wire import EventPlace, decode_events
from headwater.peers.wire import Type
from headwater.stores.events import Event, EventKind, Follower

log = logging.getLogger("headwater")

MAX_WAITING = 8192
"""Events that are kept for a slow follower; it is told LOST instead of more."""
SILENCE_S = 2.0
_CONNECT_S = 1.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 0.4


class PeerFollower(Follower):
    """A place in another host's events. Safe for one follower thread besides its own; `close` ends it."""

    def __init__(self, channels: Channels, name: str, since: int | None, patience_s: float) -> None:
        """Waits at most `patience_s` for the first connection; LOST comes first where it takes longer."""
        self._channels = channels
        self._name = name
        self.position = 0 if since is None else since
        self._place = EventPlace() if since is None else EventPlace(since)
        self._waiting: deque[Event] = deque()
        self._news = threading.Condition()
        self._last_frame_s = time.monotonic()
        self._reason = "it has not answered yet"
        self._is_closed = False
        self._channel: PeerChannel | None = None
        self._is_prompt = True
        self._has_begun = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headwater-follow", daemon=True)
        self._thread.start()
        self._is_prompt = self._has_begun.wait(patience_s)

    # ---- for whoever follows ------------------------------------------------------------------------------------
    def poll(self, limit: int = 1024) -> list[Event]:
        """See `Follower.poll`. Raises PeerGoneError where nothing was heard for too long."""
        with self._news:
            events = [self._waiting.popleft() for _ in range(min(limit, len(self._waiting)))]
            if not events:
                self._check()
        if events:
            self.position = events[-1].sequence
        return events

    def wait(self, timeout_s: float) -> list[Event]:
        """See `Follower.wait`."""
        with self._news:
            self._news.wait_for(lambda: bool(self._waiting) or self._is_closed, timeout_s)
        return self.poll()

    def _check(self) -> None:
        if self._is_closed:
            raise StoreClosedError(f"{self._name} was closed")
        silent_s = time.monotonic() - self._last_frame_s
        if silent_s > SILENCE_S:
            raise PeerGoneError(f"{self._name} sent nothing for {silent_s:.1f} s: {self._reason}")

    def close(self) -> None:
        """Stop. Idempotent."""
        with self._news:
            self._is_closed = True
            self._news.notify_all()
        channel = self._channel
        if channel is not None:
            channel.connection.shut()
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)

    # ---- the thread ---------------------------------------------------------------------------------------------
    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._is_closed:
            try:
                self._connect()
                pause_s = _FIRST_PAUSE_S
                while not self._is_closed:
                    self._read_events()
            except PeerError as error:
                self._reason = str(error)
                log.debug("%s: its events are interrupted: %s", self._name, error)
            except Exception as error:
                self._reason = str(error)
                log.exception("%s: following its events failed; trying again", self._name)
            finally:
                channel, self._channel = self._channel, None
                if channel is not None:
                    channel.close()
            with self._news:
                self._news.wait_for(lambda: self._is_closed, pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _connect(self) -> None:
        """Go on after the last event that was heard, or begin."""
        deadline = time.monotonic() + _CONNECT_S
        channel = self._channel = self._channels.open(None, deadline)
        _, meta = channel.ask(Type.FOLLOW, self._place.encode(), deadline)
        self._place = EventPlace.decode(meta)
        self._last_frame_s = time.monotonic()
        if not self._has_begun.is_set():
            self.position = self._place.position
            if not self._is_prompt:  # nobody knows what happened since it was asked for
                self._take([Event(self.position, EventKind.LOST, "")])
            self._has_begun.set()

    def _read_events(self) -> None:
        assert self._channel is not None
        _, meta = self._channel.next(time.monotonic() + SILENCE_S, Type.EVENTS)
        position, events = decode_events(meta)
        self._last_frame_s = time.monotonic()
        self._place = self._place._replace(position=position)
        if events:
            self._take(events)

    def _take(self, events: list[Event]) -> None:
        with self._news:
            if len(self._waiting) + len(events) > MAX_WAITING:
                self._waiting.clear()
                self._waiting.append(Event(events[-1].sequence, EventKind.LOST, ""))
            else:
                self._waiting.extend(events)
            self._news.notify_all()
