"""What other hosts do with a shared tier, brought into this host's own events, by the process that copies.

A thread of its own: however slow a server is, nothing else waits for it. It never brings more than whoever reads the
host's events can take, for the copier's queue is the same ring.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence

from headwater.errors import HeadwaterError, StoreClosedError
from headwater.stores.embedded.store import EmbeddedStore
from headwater.stores.events import NUM_SLOTS, EventKind
from headwater.stores.remote.announce import LogEvent
from headwater.stores.tiers.lower import RemoteTier
from headwater.stores.tiers.ownership import Ownership, SoleOwnership

log = logging.getLogger("headwater")

_POLL_S = 0.1
_PAUSE_S = 1.0
_BATCH = 256
_MOST_UNREAD = NUM_SLOTS // 4
_PATIENCE = 3

UNKNOWN_CHANGE = LogEvent(EventKind.CLEARED)
"""Something happened that cannot be told any more: look at the pool."""


class TierListener:
    """Follows the logs of all tiers that have one, while this process is the one that copies."""

    def __init__(
        self,
        front: EmbeddedStore,
        tiers: Sequence[RemoteTier],
        ownership: Ownership | SoleOwnership,
        is_owner: Callable[[], bool],
        num_unread: Callable[[], int],
    ) -> None:
        self._front = front
        self._tiers = tiers
        self._ownership = ownership
        self._is_owner = is_owner
        self._num_unread = num_unread
        self._refused: set[int] = set()
        self._failures = [0] * len(tiers)
        self._stop = threading.Event()
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, if it has not: also in a forked child, whose parent kept the thread."""
        if not self._tiers or (self._stop.is_set() and self._pid == os.getpid()):
            return
        if self._thread is None or self._pid != os.getpid():
            self._pid, self._stop = os.getpid(), threading.Event()
            self._thread = threading.Thread(target=self._run, name="headwater-listener", daemon=True)
            self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Stop. Idempotent."""
        self._stop.set()
        if self._thread is not None and self._pid == os.getpid():
            self._thread.join(timeout_s)

    # ---- the thread ---------------------------------------------------------------------------------------------
    def _run(self) -> None:
        pause_s = _POLL_S
        while not self._stop.wait(pause_s):
            pause_s = _POLL_S
            if not self._is_owner():
                continue
            try:
                for number in range(len(self._tiers)):
                    if not self._follow(number):
                        pause_s = _PAUSE_S
            except StoreClosedError:
                return
            except Exception:  # what one entry does must not end all listening
                log.exception("listening to other hosts failed; trying again")
                pause_s = _PAUSE_S

    def _follow(self, number: int) -> bool:
        """Bring what is new in one tier's log; False where it is better to wait a while before asking again."""
        tier = self._tiers[number]
        if not tier.usable:
            return False
        after = self._ownership.log_position(number)
        while self._num_unread() <= _MOST_UNREAD and not self._stop.is_set():
            try:
                heard = tier.store.read_log(after, _BATCH)
            except (HeadwaterError, OSError) as error:
                return self._failed(number, error)
            self._failures[number] = 0
            if heard is None:
                if number not in self._refused:
                    log.warning("%s keeps no log of events, so events of other hosts do not reach this one", tier.url)
                    self._refused.add(number)
                return False
            events = tier.store.announcer.foreign(heard.values)
            if heard.missed:
                events.insert(0, UNKNOWN_CHANGE)
            if events:
                self._front.say(tier.url.scheme, events)
                tier.counts.add(heard=len(events))
            if heard.position != after:
                self._ownership.set_log_position(number, heard.position)
            if len(heard.values) < _BATCH:
                return True
            after = heard.position
        return True

    def _failed(self, number: int, error: Exception) -> bool:
        """A server that is away is asked again. If it answers, but its log cannot be read, the log is removed, as all
        noise is: what is too long to be read once would be so for ever, and for every host."""
        tier = self._tiers[number]
        log.debug("%s: its events cannot be read: %s", tier.url, error)
        try:
            tier.store.ping()
            self._failures[number] += 1
            if self._failures[number] >= _PATIENCE:
                self._failures[number] = 0
                tier.store.remove_log()
                log.warning("%s: its log of events was malformed and has been removed", tier.url)
        except (HeadwaterError, OSError):
            pass  # not now
        return False
