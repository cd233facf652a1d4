"""What happened to the chunks of a pool, in order, for followers: routers, other tiers, people.

A ring of fixed slots in a small mapped file. Writers append under the store's own lock; followers of any process read
without one. A follower that is further behind than the ring is long receives LOST and must rescan the pool. Nothing
here knows what a chunk is.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from enum import IntEnum
from typing import NamedTuple

from headwater.errors import StoreError
from headwater.kv.format import checksum
from headwater.stores.private import allocate, open_private


class EventKind(IntEnum):
    """What happened."""

    STORED = 1  # a chunk can be found (if its parent can)
    REMOVED = 2  # evicted, damaged, or removed by hand
    CLEARED = 3  # a whole root went, or (with an empty key) nobody knows what: look at the pool
    LOST = 4  # told to a follower that fell behind: events were overwritten


class Event(NamedTuple):
    """One entry. Of LOST only the sequence counts: the next event that can be read."""

    sequence: int
    kind: EventKind
    tier: str
    key: bytes = b""
    number: int = 0
    num_tokens: int = 0
    time_ns: int = 0


MAGIC = b"HWEVENT1"
NUM_SLOTS = 4096
_HEADER_BYTES = 64
_SLOT = struct.Struct("<QQ8sIII4x32s")
_SLOT_BYTES = _SLOT.size + 8
RING_BYTES = _HEADER_BYTES + NUM_SLOTS * _SLOT_BYTES


def event_name(tier: str) -> str:
    """A tier's name as events have it: its first eight bytes."""
    return tier.encode()[:8].decode("ascii", "replace")


class EventRing:
    """The mapped ring. `append` needs the store's write lock; everything else needs nothing."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._map = mapping
        self._words = memoryview(mapping)[:_HEADER_BYTES].cast("Q")
        if self._words[0] == 0:
            self._words[1] = 0
            self._words[0] = int.from_bytes(MAGIC, "little")
        if self._words[0] != int.from_bytes(MAGIC, "little"):
            self.close()
            raise StoreError("the events file was written by another version of Headwater; remove the pool to renew it")

    @classmethod
    def private(cls) -> EventRing:
        """A ring in this process's own memory."""
        return cls(mmap.mmap(-1, RING_BYTES))

    @classmethod
    def open(cls, path: str, *, create: bool) -> EventRing:
        """The ring in that file. Raises OSError where there is none, or StoreError where it is none of ours."""
        fd = open_private(path, os.O_RDWR | (os.O_CREAT if create else 0))
        try:
            allocate(fd, RING_BYTES)
            mapping = mmap.mmap(fd, RING_BYTES)
        finally:
            os.close(fd)
        return cls(mapping)

    @property
    def head(self) -> int:
        """The sequence of the newest event."""
        return self._words[1]

    def append(self, kind: EventKind, tier: str, key: bytes = b"", number: int = 0, num_tokens: int = 0) -> None:
        """Add an event. A microsecond or two."""
        sequence = (self.head + 1) & ((1 << 63) - 1)
        body = _SLOT.pack(sequence, time.time_ns(), tier.encode()[:8], kind, number, num_tokens, key)
        at = _HEADER_BYTES + (sequence % NUM_SLOTS) * _SLOT_BYTES
        self._map[at : at + _SLOT_BYTES] = body + checksum(body).to_bytes(8, "little")
        self._words[1] = sequence

    def read(self, sequence: int) -> Event | None:
        """The event with that number; None where it was overwritten, or is being."""
        at = _HEADER_BYTES + (sequence % NUM_SLOTS) * _SLOT_BYTES
        raw = self._map[at : at + _SLOT_BYTES]
        body = raw[: _SLOT.size]
        if int.from_bytes(raw[_SLOT.size :], "little") != checksum(body):
            return None
        found, time_ns, tier, kind, number, num_tokens, key = _SLOT.unpack(body)
        if found != sequence or kind not in EventKind._value2member_map_:
            return None
        name = tier.rstrip(b"\0").decode("ascii", "replace")
        return Event(sequence, EventKind(kind), name, key if any(key) else b"", number, num_tokens, time_ns)

    def close(self) -> None:
        """Let go of the mapping."""
        self._words.release()
        self._map.close()


class Follower:
    """A position in a ring. Not thread-safe; any number of them may follow one ring."""

    def __init__(self, ring: EventRing, since: int | None = None) -> None:
        self._ring = ring
        self.position = ring.head if since is None else since
        """The last event that was given out."""

    def poll(self, limit: int = 1024) -> list[Event]:
        """What is new, oldest first, without waiting. Begins with LOST where something was missed."""
        head = self._ring.head
        events: list[Event] = []
        if head < self.position or head - self.position > NUM_SLOTS:
            self.position = max(0, head - NUM_SLOTS // 2)
            events.append(Event(self.position + 1, EventKind.LOST, ""))
        while self.position < head and len(events) < limit:
            event = self._ring.read(self.position + 1)
            self.position += 1
            events.append(event or Event(self.position, EventKind.LOST, ""))
        return events

    def wait(self, timeout_s: float) -> list[Event]:
        """What is new, waiting for it at most so long."""
        end = time.monotonic() + timeout_s
        while not (events := self.poll()) and (left := end - time.monotonic()) > 0:
            time.sleep(min(0.005, left))
        return events
