"""Small private files beside a store, one for each process that publishes figures, which other processes read.

    DIR/figures-TOKEN       two slots: sequence number, length, checksum, payload

The writer fills the two slots in turn, so a reader always finds one that is whole. A process is alive while it holds
the lock on its file: never a pid, never a timeout. `headwater.connector.published` says what is in the payload.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import struct
import time
import weakref
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import xxhash

from headwater.locks import ForkSafeLock
from headwater.stores.private import open_private

SLOT_BYTES = 64 << 10
MAX_FILES = 2048
"""More than this are not read: a store has room for far fewer processes."""
KEEP_S = 10.0
"""The file of a process that has ended stays for so long, for exporters that have not seen its last figures. Whether a
process has ended, only its lock says."""

_NAME = re.compile(r"figures-([0-9a-f]{16})")
_FLOCK = struct.Struct("hhqqi4x")
_HEADER = struct.Struct("<8sQQQ")
_MAGIC = b"hwfigs1\0"
_READ_ATTEMPTS = 8

MAX_PAYLOAD_BYTES = SLOT_BYTES - _HEADER.size


def is_figures_file(name: str) -> bool:
    """Whether files of that name are made here."""
    return _NAME.fullmatch(name) is not None


class Found(NamedTuple):
    """What one process has published last."""

    token: str
    """Names the process: no two have the same, not even after each other."""
    is_alive: bool
    payload: bytes


class FiguresFile:
    """This process's own file. A forked child has none. Thread-safe."""

    _open: ClassVar[weakref.WeakSet[FiguresFile]] = weakref.WeakSet()

    def __init__(self, directory: str) -> None:
        """Make it, and remove those of processes that ended a while ago. Raises OSError."""
        _sweep(directory)
        self.token = secrets.token_hex(8)
        self._path = os.path.join(directory, f"figures-{self.token}")
        self._sequence = 0
        self._lock = ForkSafeLock()
        self._fd = open_private(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            os.ftruncate(self._fd, 2 * SLOT_BYTES)  # of which only what is written takes storage
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
        except OSError:
            os.close(self._fd)
            os.unlink(self._path)
            raise
        FiguresFile._open.add(self)

    def write(self, payload: bytes) -> bool:
        """Replace what was said. False where nobody can read it any more: the file was closed or deleted, or this is a
        forked child. Raises OSError, and ValueError for more than `MAX_PAYLOAD_BYTES`."""
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise ValueError(f"{len(payload)} bytes; at most {MAX_PAYLOAD_BYTES} can be published")
        with self._lock:
            if self._fd < 0 or not os.fstat(self._fd).st_nlink:
                return False
            sequence = self._sequence + 1
            record = _HEADER.pack(_MAGIC, sequence, len(payload), _checksum(sequence, payload)) + payload
            if os.pwrite(self._fd, record, sequence % 2 * SLOT_BYTES) != len(record):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            # Only now: what failed is tried again in the same slot, and the other one stays whole.
            self._sequence = sequence
            return True

    def close(self) -> None:
        """Release the lock. The last figures stay for `KEEP_S` and then until another process comes. Idempotent."""
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    @classmethod
    def _after_fork_in_child(cls) -> None:
        # The child shares the parent's file description: the lock would outlive the parent.
        for file in list(cls._open):
            file.close()


def read_figures(directory: str) -> list[Found]:
    """What each process has published beside a store, those that have ended included. Left out are files that cannot
    be read, that hold no payload, or that somebody else could write. Raises nothing; empty without a directory."""
    found = []
    for token, path in _files(directory):
        with contextlib.suppress(OSError):
            fd = open_private(path, os.O_RDONLY)
            try:
                is_alive = _is_locked(fd)  # first: what a process says last, it says before it releases the lock
                payload = _read(fd)
            finally:
                os.close(fd)
            if payload is not None:
                found.append(Found(token, is_alive, payload))
    return found


def _files(directory: str) -> Iterator[tuple[str, str]]:
    try:
        names = sorted(name for name in os.listdir(directory) if is_figures_file(name))
    except OSError:
        return
    for name in names[:MAX_FILES]:
        yield name.removeprefix("figures-"), os.path.join(directory, name)


def _read(fd: int) -> bytes | None:
    """The newest record, and never an older one than an earlier call returned."""
    before: list[bytes] = []
    for _ in range(_READ_ATTEMPTS):
        raw = [os.pread(fd, SLOT_BYTES, number * SLOT_BYTES) for number in range(2)]
        slots = [_payload(slot) for slot in raw]
        whole = [slot for slot in slots if slot is not None]
        # A slot that is not whole is being written, and a reader that was suspended may hold an old copy of the other:
        # look again. One that stays as it is was never written, or its writer was stopped or died there.
        if len(whole) == len(slots) or (whole and raw == before):
            return max(whole)[1]
        before = raw
    return None


def _payload(raw: bytes) -> tuple[int, bytes] | None:
    if len(raw) < _HEADER.size:
        return None
    magic, sequence, length, checksum = _HEADER.unpack_from(raw)
    payload = raw[_HEADER.size : _HEADER.size + min(length, SLOT_BYTES)]
    if magic != _MAGIC or len(payload) != length or checksum != _checksum(sequence, payload):
        return None
    return sequence, payload


def _checksum(sequence: int, payload: bytes) -> int:
    return xxhash.xxh3_64_intdigest(payload, seed=sequence)


def _is_locked(fd: int) -> bool:
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
    return int(_FLOCK.unpack(answer)[0]) != fcntl.F_UNLCK


def _sweep(directory: str) -> None:
    """Remove the files of processes that have ended. A file that is new may be about to be locked."""
    for _, path in _files(directory):
        with contextlib.suppress(OSError):
            fd = open_private(path, os.O_RDONLY)
            try:
                if time.time() - os.fstat(fd).st_mtime > KEEP_S and not _is_locked(fd):
                    os.unlink(path)
            finally:
                os.close(fd)


os.register_at_fork(after_in_child=FiguresFile._after_fork_in_child)
