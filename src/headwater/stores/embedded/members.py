"""Who is alive, what each process is touching, and who may write: the members of one embedded store.

Every process that opens a store owns a slot in the `members` file: an operating-system lock on one byte, and a page
in which it publishes the ids of the extents it reads under a lease or is writing to. A slot whose lock is free
belongs to the dead, whatever its page says: never a pid, never a timeout. The write lock is one more byte.

Locks are open-file-description locks: they survive an unrelated close of the same file in this process, and die
with it. A forked child must call `after_fork` before anything else (the store does).
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

from headwater.errors import CapacityError
from headwater.locks import ForkSafeLock
from headwater.stores.embedded.layout import MEMBERS_BYTES, NUM_SLOTS, PAGE, SLOT_BYTES
from headwater.stores.private import allocate, open_private

# Lock bytes lie far beyond the file's end, where no data ever is.
_WRITE_LOCK, _CREATE_LOCK, _SLOT_LOCK = 1 << 40, (1 << 40) + 1, (1 << 40) + 4096
_FLOCK = struct.Struct("hhqqi4x")

_STUCK_PATIENCE_S = 0.002

_GROUP, _HIGH, _FIRST = 0, 1, 8
_MAX_HAZARDS = SLOT_BYTES // 8 - _FIRST

_fence_lock = ForkSafeLock()


def fence() -> None:
    """Order the stores before this call before the loads after it, also for other processes.

    Taking a lock is a read-modify-write with full ordering on x86 and acquire/release with a barrier in the kernel
    path elsewhere; it stands between "publish, then check" on both sides of a lease.
    """
    with _fence_lock:
        pass


def new_group() -> int:
    """A random, non-zero name for one running server."""
    return secrets.randbits(63) | 1


class Members(Protocol):
    """What the store needs to know about processes."""

    group: int

    def publish(self, extent_id: int) -> bool:
        """Say that this process touches an extent; counted, so each publish needs one retract. False: no room."""

    def publish_all(self, extent_ids: Sequence[int]) -> int:
        """`publish` of many; how many of the first there was room for."""

    def retract(self, extent_id: int) -> None:
        """Take one publish back."""

    def retract_all(self, extent_ids: Sequence[int]) -> None:
        """`retract` of many."""

    def published(self) -> set[int]:
        """Ids that living processes touch, this one's included."""

    def group_alive(self, group: int) -> bool:
        """Whether any living process belongs to `group`."""

    def lock(self, deadline: float) -> bool:
        """Take the write lock, by `time.monotonic() == deadline` at the latest."""

    def unlock(self) -> None:
        """Give it back."""

    def count(self) -> int:
        """Living processes."""

    def after_fork(self) -> None:
        """In a forked child: become a member of its own."""

    def close(self) -> None:
        """Leave."""


class LocalMembers:
    """A store that only this process can see: no files, one lock."""

    def __init__(self, group: int) -> None:
        self.group = group
        self._lock = ForkSafeLock()
        self._touching: dict[int, int] = {}
        self._mutex = ForkSafeLock()

    def publish(self, extent_id: int) -> bool:
        with self._mutex:
            self._touching[extent_id] = self._touching.get(extent_id, 0) + 1
        return True

    def publish_all(self, extent_ids: Sequence[int]) -> int:
        for extent_id in extent_ids:
            self.publish(extent_id)
        return len(extent_ids)

    def retract(self, extent_id: int) -> None:
        with self._mutex:
            left = self._touching.get(extent_id, 0) - 1
            if left > 0:
                self._touching[extent_id] = left
            else:
                self._touching.pop(extent_id, None)

    def retract_all(self, extent_ids: Sequence[int]) -> None:
        for extent_id in extent_ids:
            self.retract(extent_id)

    def published(self) -> set[int]:
        with self._mutex:
            return set(self._touching)

    def group_alive(self, group: int) -> bool:
        return group == self.group

    def lock(self, deadline: float) -> bool:
        return self._lock.acquire(timeout=max(0.0, deadline - time.monotonic()))

    def unlock(self) -> None:
        self._lock.release()

    def count(self) -> int:
        return 1

    def after_fork(self) -> None:
        self._touching = {}

    def close(self) -> None:
        return


class SharedMembers:
    """A store that many processes of this host see, through one file."""

    def __init__(self, path: str, group: int) -> None:
        self._fd = open_private(path, os.O_RDWR | os.O_CREAT)
        self._slot = -1
        self._stuck = False
        self._thread_lock = ForkSafeLock()
        self._mutex = ForkSafeLock()
        self.group = group
        try:
            allocate(self._fd, MEMBERS_BYTES)
            self._map = mmap.mmap(self._fd, MEMBERS_BYTES)
        except OSError:
            os.close(self._fd)
            raise
        self._words = memoryview(self._map).cast("Q")

    def join(self) -> None:
        """Claim a slot. Raises CapacityError where all are taken."""
        for slot in range(NUM_SLOTS):
            if _try_lock(self._fd, _SLOT_LOCK + slot):
                self._slot = slot
                break
        else:
            raise CapacityError(f"{NUM_SLOTS} processes have this store open already; close some of them")
        base = self._base(self._slot)
        self._words[base + _HIGH] = 0
        self._words[base + _GROUP] = self.group
        self._free = list(range(_MAX_HAZARDS - 1, -1, -1))
        self._places: dict[int, tuple[int, int]] = {}

    # ---- publishing ---------------------------------------------------------------------------------------------
    def publish(self, extent_id: int) -> bool:
        return self.publish_all((extent_id,)) == 1

    def publish_all(self, extent_ids: Sequence[int]) -> int:
        count = 0
        with self._mutex:
            words, base, places, free = self._words, self._base(self._slot), self._places, self._free
            for extent_id in extent_ids:
                place, uses = places.get(extent_id, (-1, 0))
                if place < 0:
                    if not free:
                        break
                    place = free.pop()
                    words[base + _FIRST + place] = extent_id
                    if place >= words[base + _HIGH]:
                        words[base + _HIGH] = place + 1
                places[extent_id] = (place, uses + 1)
                count += 1
        fence()
        return count

    def retract(self, extent_id: int) -> None:
        self.retract_all((extent_id,))

    def retract_all(self, extent_ids: Sequence[int]) -> None:
        with self._mutex:
            if self._slot < 0:
                return  # the store was closed and everything with it
            first = self._base(self._slot) + _FIRST
            for extent_id in extent_ids:
                place, uses = self._places.get(extent_id, (-1, 0))
                if place < 0:
                    continue  # never published
                if uses > 1:
                    self._places[extent_id] = (place, uses - 1)
                    continue
                del self._places[extent_id]
                self._words[first + place] = 0
                self._free.append(place)

    def published(self) -> set[int]:
        fence()
        ids: set[int] = set()
        for slot in self._living():
            base = self._base(slot)
            high = min(self._words[base + _HIGH], _MAX_HAZARDS)
            ids.update(self._words[base + _FIRST : base + _FIRST + high].tolist())
        ids.discard(0)
        return ids

    # ---- liveness -----------------------------------------------------------------------------------------------
    def group_alive(self, group: int) -> bool:
        return group == self.group or any(self._words[self._base(slot) + _GROUP] == group for slot in self._living())

    def count(self) -> int:
        return sum(1 for _ in self._living())

    def _living(self) -> Iterator[int]:
        # A slot that was never used has no group; asking the kernel about the rest costs half a microsecond.
        for slot, group in enumerate(self._words[self._base(0) + _GROUP :: SLOT_BYTES // 8].tolist()):
            if slot == self._slot or (group and _is_locked(self._fd, slot)):
                yield slot

    @staticmethod
    def _base(slot: int) -> int:
        return (PAGE + slot * SLOT_BYTES) // 8

    # ---- the write lock -----------------------------------------------------------------------------------------
    def lock(self, deadline: float) -> bool:
        """Poll for the lock. Once a deadline was missed, somebody is stopped inside: later calls give up after
        two milliseconds, until one succeeds, so that a stopped process costs its peers one deadline in all."""
        if not self._thread_lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            return False
        pause = 0.00001
        if self._stuck:
            deadline = min(deadline, time.monotonic() + _STUCK_PATIENCE_S)
        while not _try_lock(self._fd, _WRITE_LOCK):
            if time.monotonic() >= deadline:
                self._stuck = True
                self._thread_lock.release()
                return False
            time.sleep(pause)
            pause = min(pause * 1.5, 0.001)
        self._stuck = False
        return True

    def unlock(self) -> None:
        _unlock(self._fd, _WRITE_LOCK)
        self._thread_lock.release()

    @contextlib.contextmanager
    def creating(self, deadline: float) -> Iterator[bool]:
        """Hold the creation lock: only one process at a time makes or replaces the store's files."""
        while not (held := _try_lock(self._fd, _CREATE_LOCK)) and time.monotonic() < deadline:
            time.sleep(0.001)
        try:
            yield held
        finally:
            if held:
                _unlock(self._fd, _CREATE_LOCK)

    # ---- leaving ------------------------------------------------------------------------------------------------
    def after_fork(self) -> None:
        # The child shares the parent's file description and so its locks. A new description of the same inode
        # (even of one that was deleted) owns none; closing the old one here leaves the parent's untouched.
        old, self._fd = self._fd, os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC)
        os.close(old)
        self._stuck = False
        self._slot = -1
        self.group = new_group()
        self.join()

    def close(self) -> None:
        with self._mutex:
            slot, self._slot = self._slot, -1
        if slot >= 0:
            self._words[self._base(slot) + _HIGH] = 0
            self._words[self._base(slot) + _GROUP] = 0
        self._words.release()
        self._map.close()
        os.close(self._fd)


def count_members(path: str) -> int:
    """Living processes, for one that is none of them. Raises OSError."""
    fd = open_private(path, os.O_RDONLY)
    try:
        slots = range(NUM_SLOTS)
        groups = (os.pread(fd, 8, PAGE + slot * SLOT_BYTES + 8 * _GROUP) for slot in slots)
        return sum(any(group) and _is_locked(fd, slot) for slot, group in zip(slots, groups, strict=True))
    finally:
        os.close(fd)


def _is_locked(fd: int, slot: int) -> bool:
    question = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _SLOT_LOCK + slot, 1, 0)
    return int(_FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, question))[0]) != fcntl.F_UNLCK


def _try_lock(fd: int, byte: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True


def _unlock(fd: int, byte: int) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, byte, 1, 0))
