"""An embedded store's events. They are written from the moment when somebody first wants to follow them."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable

from headwater.errors import CapacityError, StoreError
from headwater.stores.embedded.layout import Record, Word
from headwater.stores.events import EventKind, EventRing

log = logging.getLogger("headwater")

EVENTS_FILE = "events"
CURSOR_PREFIX = "copied-"
"""What begins like this notes how far the copying to slower tiers has come (see `stores.tiers`)."""

Listener = Callable[[EventKind, Record | None], None]


class Journal:
    """One process's hand on the ring, and those of its own threads that want to know at once."""

    def __init__(self, directory: str | None, words: memoryview, tier: str) -> None:
        self._directory = directory
        self._words = words
        self.tier = tier
        """What events of this store say where they happened."""
        self._ring: EventRing | None = None
        self._failed = False
        self.listeners: list[Listener] = []
        """Called inside the transaction, in the thread that did it: they may only take notes."""

    def note(self, kind: EventKind, record: Record | None) -> None:
        """Say what happened to a record (None: to nobody knows which). Called with the write lock held."""
        for listener in self.listeners:
            listener(kind, record)
        if self._words[Word.EVENTS] and not self._failed:
            about = () if record is None else (record.key, record.number, record.num_tokens)
            self.say(kind, self.tier, *about)

    def say(self, kind: EventKind, tier: str, key: bytes = b"", number: int = 0, num_tokens: int = 0) -> None:
        """Append to the ring, also what happened elsewhere. Called with the write lock held."""
        try:
            ring = self._ring or self._attach(create=False)
        except (OSError, StoreError) as error:
            self._failed = True
            log.warning("events cannot be written: %s", error)
            return
        ring.append(kind, tier, key, number, num_tokens)

    def ring(self) -> EventRing:
        """The ring, made if there is none; from now on all writers write to it. Raises StoreError."""
        try:
            ring = self._ring or self._attach(create=True)
        except OSError as error:
            kind = CapacityError if error.errno in (errno.ENOSPC, errno.EDQUOT) else StoreError
            raise kind(f"{self._directory}: its events cannot be stored: {error.strerror}") from error
        self._words[Word.EVENTS] = 1
        return ring

    def _attach(self, *, create: bool) -> EventRing:
        if self._directory is None:
            self._ring = EventRing.private()
        else:
            self._ring = EventRing.open(os.path.join(self._directory, EVENTS_FILE), create=create)
        return self._ring

    def close(self) -> None:
        """Let go of the ring."""
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.close()
