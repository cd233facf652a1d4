"""Which process copies a store's chunks to slower tiers, and how far it has come, known to all processes of the host.

One file beside the store: whoever holds its lock copies; the operating system releases the lock when that process
dies, and another takes over. In it stands the last event whose consequences are all in the slower tiers, and for each
tier whose log is followed the last entry that was heard.
"""

from __future__ import annotations

import fcntl
import os
import struct

from headwater.stores.private import open_private

_FLOCK = struct.Struct("hhqqi")
_POSITION = struct.Struct("<Q")
_MARKS_AT = 16
_MARK = struct.Struct("<QQQ")
_HAS_MARK = 1


class Ownership:
    """This process's hand on the file. Not thread-safe, except for `position`."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = open_private(path, os.O_RDWR | os.O_CREAT)
        self.held = False

    def take(self) -> bool:
        """Try to become the one; True if this process is."""
        if not self.held:
            try:
                fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
                self.held = True
            except (BlockingIOError, PermissionError):
                return False
        return True

    @property
    def position(self) -> int:
        """The last event that is done with."""
        raw = os.pread(self._fd, _POSITION.size, 8)
        return _POSITION.unpack(raw)[0] if len(raw) == _POSITION.size else 0

    def advance(self, position: int) -> None:
        """Note how far the copying has come."""
        os.pwrite(self._fd, _POSITION.pack(position), 8)

    def log_position(self, number: int) -> tuple[int, int] | None:
        """How far the log of that tier has been heard; None where nobody has listened yet."""
        raw = os.pread(self._fd, _MARK.size, _MARKS_AT + number * _MARK.size)
        is_set, *place = _MARK.unpack(raw) if len(raw) == _MARK.size else (0, 0, 0)
        return (place[0], place[1]) if is_set == _HAS_MARK else None

    def set_log_position(self, number: int, place: tuple[int, int] | None) -> None:
        """Note it."""
        raw = _MARK.pack(0, 0, 0) if place is None else _MARK.pack(_HAS_MARK, *place)
        os.pwrite(self._fd, raw, _MARKS_AT + number * _MARK.size)

    def after_fork(self) -> None:
        """In a forked child: a description of its own, without the parent's lock."""
        old, self._fd = self._fd, open_private(self._path, os.O_RDWR | os.O_CREAT)
        os.close(old)
        self.held = False

    def close(self) -> None:
        """Give it up. Idempotent; a thread that comes later gets an error, and not somebody else's file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class SoleOwnership:
    """The same for a store in private memory, which nobody else can copy."""

    held = True
    position = 0

    def __init__(self) -> None:
        self._log_positions: dict[int, tuple[int, int] | None] = {}

    def log_position(self, number: int) -> tuple[int, int] | None:
        """See `Ownership`."""
        return self._log_positions.get(number)

    def set_log_position(self, number: int, place: tuple[int, int] | None) -> None:
        """See `Ownership`."""
        self._log_positions[number] = place

    def take(self) -> bool:
        """See `Ownership`."""
        return True

    def advance(self, position: int) -> None:
        """See `Ownership`."""
        self.position = position

    def after_fork(self) -> None:
        """See `Ownership`."""

    def close(self) -> None:
        """See `Ownership`."""
