"""The parts of one open embedded store, and the two ways to change it: a transaction, and more storage.

A transaction holds the write lock and nothing but memory operations. It sets DIRTY while it runs, so that
whoever takes the lock after its death rebuilds the index first.
"""

from __future__ import annotations

import errno
import logging
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from headwater.errors import DeadlineError, HeadwaterError, StoreClosedError, StoreDamagedError, StoreError
from headwater.kv.topology import Shard
from headwater.locks import ForkSafeLock
from headwater.stores.embedded.columns import Columns
from headwater.stores.embedded.data import DataArea
from headwater.stores.embedded.index import Index, IndexDamage
from headwater.stores.embedded.janitor import Janitor
from headwater.stores.embedded.journal import Journal
from headwater.stores.embedded.layout import Geometry, Word
from headwater.stores.embedded.members import Members
from headwater.stores.embedded.units import FREE_UNIT
from headwater.stores.policy import EvictionPolicy

T = TypeVar("T")
log = logging.getLogger("headwater")

_GROW_PAUSE_S = 10.0


class Claims:
    """Tiles of pending extents that a thread of this process is filling right now."""

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._taken: dict[int, list[Shard]] = {}

    def take(self, extent_id: int, shard: Shard) -> bool:
        """False where another thread has some of these tiles."""
        with self._lock:
            taken = self._taken.setdefault(extent_id, [])
            if any(_overlap(shard, other) for other in taken):
                return False
            taken.append(shard)
            return True

    def release(self, extent_id: int, shard: Shard) -> None:
        """Give them back."""
        with self._lock:
            taken = self._taken[extent_id]
            taken.remove(shard)
            if not taken:
                del self._taken[extent_id]


def _overlap(one: Shard, other: Shard) -> bool:
    heads = max(one.heads.start, other.heads.start) < min(one.heads.stop, other.heads.stop)
    return heads and one.part == other.part and not set(one.layers).isdisjoint(other.layers)


class Core:
    """Geometry, index, members, data and janitor of one store, as one process sees them."""

    def __init__(
        self,
        name: str,
        geometry: Geometry,
        index: Index,
        members: Members,
        data: DataArea,
        policy: EvictionPolicy,
        directory: str | None = None,
    ) -> None:
        self.name = name
        self.directory = directory
        """Where its files are; None for private memory."""
        self.geometry = geometry
        self.index = index
        self.columns = Columns(index)
        self.members = members
        self.data = data
        self.journal = Journal(directory, index.words, name.partition(":")[0])
        self.janitor = Janitor(geometry, index, members, data, policy, self.journal.note)
        self.claims = Claims()
        self.closed = False
        self._users: list[int] = []
        self._users_lock = ForkSafeLock()
        self._grow_after = 0.0

    @contextmanager
    def use(self) -> Iterator[Core]:
        """Stand inside the store: it is not closed under whoever does. Raises StoreClosedError afterwards."""
        with self._users_lock:
            if self.closed:
                raise StoreClosedError(f"{self.name} was closed")
            self._users.append(threading.get_ident())
        try:
            yield self
        finally:
            with self._users_lock, suppress(ValueError):  # a forked child begins with nobody inside
                self._users.remove(threading.get_ident())

    def transact(self, work: Callable[[], T], deadline: float) -> T:
        """Run `work` under the write lock. Raises DeadlineError where the lock is not to be had in time."""
        if not self.members.lock(deadline):
            raise DeadlineError(f"{self.name}: another process held the write lock past the deadline")
        words = self.index.words
        try:
            for _ in range(2):
                if words[Word.DIRTY] or words[Word.SUSPECT] or not self.index.sane():
                    words[Word.DIRTY] = 1
                    self.janitor.rebuild()
                    log.warning("%s: the index was rebuilt from its records", self.name)
                words[Word.DIRTY] = 1
                try:
                    result = work()
                except HeadwaterError:
                    words[Word.DIRTY] = 0  # raised on purpose, before anything was changed
                    raise
                except (IndexDamage, IndexError, OverflowError, ValueError, struct.error) as error:
                    # Only noise in the index leads here; DIRTY stays set, so that the next round rebuilds.
                    log.warning("%s: the index contradicts itself (%s)", self.name, error)
                    continue
                words[Word.DIRTY] = 0
                return result
        finally:
            self.members.unlock()
        raise StoreDamagedError(f"{self.name}: the index is being damaged faster than it can be rebuilt")

    def grow(self, deadline: float) -> bool:
        """Put storage behind the next segment, outside the lock; whether there is more room now."""
        words, segment = self.index.words, self.index.words[Word.BACKED]
        if segment >= self.geometry.num_segments or time.monotonic() < self._grow_after:
            return False
        try:
            self.data.back(segment)
        except OSError as error:
            # A full device is no reason to stop: the pool lives on in the segments it has.
            self._grow_after = time.monotonic() + _GROW_PAUSE_S
            reason = "no space left" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error.strerror)
            log.warning("%s: no storage for segment %d (%s); evicting instead", self.name, segment, reason)
            return False

        def activate() -> None:
            if words[Word.BACKED] == segment:
                units = self.geometry.units_per_segment
                count = min(units, self.geometry.num_units - segment * units)
                self.index.units.fill(segment * units, count, FREE_UNIT)
                words[Word.BACKED] = segment + 1

        self.transact(activate, deadline)
        return True

    @property
    def can_grow(self) -> bool:
        """Whether another segment might be had."""
        return self.index.words[Word.BACKED] < self.geometry.num_segments and time.monotonic() >= self._grow_after

    def after_fork(self) -> None:
        """In a forked child: a member of its own, with locks of its own."""
        self.data.after_fork()
        self.claims = Claims()
        self._users = []
        try:
            self.members.after_fork()
        except (OSError, HeadwaterError) as error:
            self.closed = True  # no slot for the child: it must not touch what it cannot protect
            log.warning("%s: closed in the forked child: %s", self.name, error)

    def close(self) -> None:
        """Let go of files and mappings, after those who stand inside have left."""
        with self._users_lock:
            if threading.get_ident() in self._users:
                raise StoreError(f"{self.name}: closed from inside one of its own operations")
            already, self.closed = self.closed, True
        if already:
            return
        while self._users:  # every operation has a deadline
            time.sleep(0.0005)
        if self.data.busy:
            # A write hangs in the kernel. Its extent stays fenced and its files open until the process ends, or the
            # bytes might go into whatever else gets the same place or the same descriptor.
            log.warning("%s: closed while a late write hangs; its files stay open", self.name)
            return
        self.journal.close()
        self.index.close()
        self.data.close()
        self.members.close()
