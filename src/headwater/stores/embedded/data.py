"""The bytes of an embedded store: segments of one size, in private memory, in shared memory or in files.

Mapped segments are copied with the CPU; files with `preadv` and `pwritev`, never through a mapping, because a page
fault cannot time out. Segments get their storage when first needed (`back`), outside any lock.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from headwater.locks import ForkSafeLock
from headwater.stores.base import Place
from headwater.stores.embedded.layout import Geometry
from headwater.stores.private import open_private
from headwater.stores.workers import Workers

Bytes = npt.NDArray[np.uint8]

Sources = tuple[int, Sequence[Bytes]]
"""An offset, and the pieces that go there one after another."""

_NOTHING: Bytes = np.empty(0, np.uint8)

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


class DataArea(Protocol):
    """Segments of bytes, addressed by one global offset. A range never crosses a segment."""

    mapped: bool

    @property
    def busy(self) -> bool:
        """Whether anybody still writes, late."""

    def back(self, segment: int) -> None:
        """Give a segment storage. Raises OSError where there is none. Idempotent, slow, takes no lock."""

    def is_backed(self, segment: int) -> bool:
        """Whether a segment has all its storage."""

    def view(self, offset: int, length: int) -> Bytes:
        """The bytes themselves (mapped data only)."""

    def load(self, offset: int, targets: Sequence[Bytes], deadline: float) -> bool:
        """Fill consecutive targets from consecutive bytes; False if that did not succeed by `deadline`, or would not.

        After False nobody writes into the targets any more. Raises OSError or IndexError where the bytes are not there.
        """

    def save(self, runs: Sequence[Sources], deadline: float, done: Callable[[], None]) -> bool:
        """Write each run's sources one after another from its offset; False if it failed or is late.

        `done` is called once, when nobody writes any more: before the return, or after a late end.
        """

    def after_fork(self) -> None:
        """In a forked child: threads of its own."""

    def close(self) -> None:
        """Let go of everything."""


class MappedData:
    """Segments that the CPU can address. With a directory they are files in it, without one private memory."""

    mapped = True
    busy = False

    def __init__(self, geometry: Geometry, directory: str | None) -> None:
        self._geometry = geometry
        self._directory = directory
        self._mappings: list[mmap.mmap | None] = [None] * geometry.num_segments
        self.segments: list[Bytes] = [_NOTHING] * geometry.num_segments
        """Each segment's bytes; empty until it is first needed in this process."""
        self._closed = False
        self.addresses = np.zeros(geometry.num_segments, np.int64)
        """Where each begins, once it is attached."""
        self.segment_bytes = geometry.segment_bytes
        self._lock = ForkSafeLock()

    def back(self, segment: int) -> None:
        self._attach(segment)

    def is_backed(self, segment: int) -> bool:
        if self._directory is None or self.segments[segment].size:
            return self.segments[segment].size > 0
        return _has_storage(self._directory, self._geometry, segment)

    def segment(self, number: int) -> Bytes:
        """All bytes of one segment. Raises OSError where it has no storage."""
        array = self.segments[number]
        return array if array.size else self._attach(number)

    def place(self, offset: int) -> Place:
        """Where a byte is. Raises OSError where its segment has no storage."""
        number, start = divmod(offset, self.segment_bytes)
        return Place(self.segments[number] if self.segments[number].size else self._attach(number), start)

    def holds(self, offset: int, length: int) -> bool:
        """Whether `view` would give a range; its segment is attached then."""
        number, start = divmod(offset, self.segment_bytes)
        try:
            return start + length <= (self.segments[number].size or self._attach(number).size)
        except (OSError, IndexError):
            return False

    def view(self, offset: int, length: int) -> Bytes:
        segment, start = divmod(offset, self._geometry.segment_bytes)
        array = self.segment(segment)
        if start + length > array.size:
            raise IndexError("range crosses the end of a segment")
        return array[start : start + length]

    def load(self, offset: int, targets: Sequence[Bytes], deadline: float) -> bool:
        for target in targets:
            np.copyto(target, self.view(offset, target.size))
            offset += target.size
        return True

    def save(self, runs: Sequence[Sources], deadline: float, done: Callable[[], None]) -> bool:
        try:
            for offset, sources in runs:
                for source in sources:
                    np.copyto(self.view(offset, source.size), source)
                    offset += source.size
        except OSError:
            return False
        finally:
            done()
        return True

    def after_fork(self) -> None:
        return

    def close(self) -> None:
        self._closed = True
        self.segments = [_NOTHING] * len(self.segments)
        for mapping in self._mappings:
            if mapping is not None:
                try:
                    mapping.close()
                except BufferError:
                    continue  # somebody still holds a borrowed view; the mapping goes with it
        self._mappings = [None] * len(self._mappings)

    def _attach(self, segment: int) -> Bytes:
        with self._lock:
            array = self.segments[segment]
            if array.size:
                return array
            if self._closed:
                raise OSError(errno.EBADF, "the store was closed")
            size = self._geometry.segment_size(segment)
            if self._directory is None:
                # Private, so that a forked child gets a copy and not a share without a lock.
                mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            else:
                # Created also where it should exist: if somebody deleted or cut it, its chunks fail their checksums
                # and go, and the segment is good for new ones.
                path = segment_path(self._directory, self._geometry, segment)
                fd = open_private(path, os.O_RDWR | os.O_CREAT)
                try:
                    os.posix_fallocate(fd, 0, size)
                    mapping = mmap.mmap(fd, size)
                finally:
                    os.close(fd)
            self._mappings[segment] = mapping
            array = np.frombuffer(mapping, np.uint8)
            # First touch of a fresh page costs five times its copy: pay it now, in one call; an older kernel refuses,
            # and the pages come when they are touched. Not Python's own madvise, which keeps all other threads waiting.
            _libc().madvise(ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.size), _POPULATE_WRITE)
            self.addresses[segment] = array.ctypes.data
            self.segments[segment] = array
            return array


class FileData:
    """Segments in ordinary files, for stores on a disk.

    Reads never leave a thread behind that could write into the caller's memory after the deadline: the caller's own
    thread takes what the page cache has (`RWF_NOWAIT`), and where that is not enough a worker reads the range into
    a scratch buffer of its own, only to warm the cache.
    """

    mapped = False

    def __init__(self, geometry: Geometry, directory: str) -> None:
        self._geometry = geometry
        self._directory = directory
        self._fds: list[int | None] = [None] * geometry.num_segments
        self._lock = ForkSafeLock()
        self._workers = Workers(4, "headwater-io")
        self._nowait = hasattr(os, "RWF_NOWAIT")

    @property
    def busy(self) -> bool:
        return self._workers.jobs > 0

    def back(self, segment: int) -> None:
        os.posix_fallocate(self._fd(segment, os.O_CREAT), 0, self._geometry.segment_size(segment))

    def is_backed(self, segment: int) -> bool:
        return _has_storage(self._directory, self._geometry, segment)

    def view(self, offset: int, length: int) -> Bytes:
        raise IndexError("a file store is not mapped")

    def load(self, offset: int, targets: Sequence[Bytes], deadline: float) -> bool:
        segment, start = divmod(offset, self._geometry.segment_bytes)
        fd = self._fd(segment)
        flat = [memoryview(target) for target in targets]
        total = sum(len(view) for view in flat)
        done = 0
        while done < total:
            got = self._read_cached(fd, _rest(flat, done), start + done)
            if got > 0:
                done += got
                continue
            if got == 0:
                raise _cut_off(segment)
            if time.monotonic() >= deadline:
                return False
            scratch = bytearray(min(total - done, 1 << 20))
            warmed = self._workers.call(partial(os.preadv, fd, [scratch], start + done), deadline)
            if warmed is None:
                return False
            if isinstance(warmed, Exception):
                raise warmed
            if not isinstance(warmed, int) or warmed == 0:
                raise _cut_off(segment)
            if not self._nowait:
                _spread(scratch[:warmed], _rest(flat, done))
                done += warmed
        return True

    def _read_cached(self, fd: int, targets: list[memoryview], offset: int) -> int:
        """Bytes read from the page cache; 0 at the end of the file; -1 where it would have to wait."""
        if not self._nowait:
            return -1
        try:
            return os.preadv(fd, targets[:1024], offset, os.RWF_NOWAIT)
        except BlockingIOError:
            return -1
        except OSError:
            # This filesystem cannot say (EOPNOTSUPP): bounce through the worker's buffer from now on.
            self._nowait = False
            return -1

    def save(self, runs: Sequence[Sources], deadline: float, done: Callable[[], None]) -> bool:
        def work() -> bool:
            try:
                for offset, sources in runs:
                    segment, start = divmod(offset, self._geometry.segment_bytes)
                    fd, views = self._fd(segment, os.O_CREAT), [memoryview(source) for source in sources]
                    total, at = sum(len(view) for view in views), 0
                    while at < total:
                        at += os.pwritev(fd, _rest(views, at)[:1024], start + at)
                return True
            finally:
                done()

        return self._workers.call(work, deadline) is True

    def after_fork(self) -> None:
        self._workers = Workers(4, "headwater-io")

    def close(self) -> None:
        self._workers.close()
        for fd in self._fds:
            if fd is not None:
                os.close(fd)
        self._fds = [None] * len(self._fds)

    def _fd(self, segment: int, create: int = 0) -> int:
        with self._lock:
            fd = self._fds[segment]
            if fd is None:
                path = segment_path(self._directory, self._geometry, segment)
                fd = open_private(path, os.O_RDWR | create)
                self._fds[segment] = fd
            return fd


def segment_path(directory: str, geometry: Geometry, segment: int) -> str:
    """Segments carry their store's generation, so that a replaced index never sees an older one's bytes."""
    return os.path.join(directory, f"data-{geometry.generation.hex()}-{segment:04d}")


def _cut_off(segment: int) -> OSError:
    return OSError(errno.EIO, f"segment {segment} ends before its bytes do")


def _has_storage(directory: str, geometry: Geometry, segment: int) -> bool:
    try:
        return os.stat(segment_path(directory, geometry, segment)).st_size >= geometry.segment_size(segment)
    except OSError:
        return False


def _rest(views: list[memoryview], skip: int) -> list[memoryview]:
    out = []
    for view in views:
        if skip >= len(view):
            skip -= len(view)
        else:
            out.append(view[skip:] if skip else view)
            skip = 0
    return out


def _spread(source: bytearray, targets: list[memoryview]) -> None:
    at = 0
    for target in targets:
        take = min(len(target), len(source) - at)
        if take <= 0:
            return
        target[:take] = source[at : at + take]
        at += take
