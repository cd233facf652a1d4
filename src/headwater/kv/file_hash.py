"""SHA-256 of files, several at a time, with progress. It knows nothing of checkpoints or caches.

A file's digest is what `sha256sum` prints, and what names large files in the cache of the Hugging Face hub.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import NamedTuple

from headwater.errors import WeightsChangedError
from headwater.kv.files import FileState, reading

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""

SPAN_BYTES = 64 << 20  # read ahead and reported at a time; not part of the digest
SAMPLE_BYTES = 1 << 20  # these two are part of sampled digests
SAMPLES_PER_FILE = 16
PIECE_BYTES = 1 << 20  # stays in a core's own cache between read and hash: twice as fast as 8 MiB
MAX_THREADS = 16


class FileSpan(NamedTuple):
    """A part of a file."""

    offset: int
    length: int


def hash_files(
    files: Sequence[FileState], *, sample: bool, threads: int | None, progress: Progress | None, total_bytes: int
) -> list[str]:
    """The SHA-256 of each file, as hex digits, or of samples of it. One thread reads a file from start to end.

    `progress` is called in the calling thread, at the start and about once per 64 MiB; what `files` leaves of
    `total_bytes` counts as done. Raises IdentityError for a file that cannot be read or is no longer in its state.
    """
    spans = [(sample_spans if sample else all_spans)(file.size) for file in files]
    report = progress or (lambda done, total: None)
    # What a cache or sampling spares counts as done from the start. Samples of a small file overlap, hence the max.
    done = total_bytes - sum(span.length for of_file in spans for span in of_file)
    report(max(0, done), total_bytes)
    news: SimpleQueue[int | Future[str]] = SimpleQueue()
    stop = threading.Event()
    with ThreadPoolExecutor(threads or default_threads(), thread_name_prefix="headwater-digest") as executor:
        order = sorted(range(len(files)), key=lambda i: -files[i].size)  # a long file that starts last is waited for
        futures = {i: executor.submit(_hash_file, files[i], spans[i], stop, news.put) for i in order}
        try:
            for future in futures.values():
                future.add_done_callback(news.put)
            left = len(futures)
            while left:
                item = news.get()
                if isinstance(item, Future):
                    item.result()
                    left -= 1
                else:
                    done += item
                    report(max(0, done), total_bytes)
        except BaseException:
            stop.set()  # at most one piece per thread is still read
            executor.shutdown(wait=False, cancel_futures=True)
            raise
    return [futures[i].result() for i in range(len(files))]


def default_threads() -> int:
    """One for each core that this process may use, within reason."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MAX_THREADS, cores)


def all_spans(size: int) -> list[FileSpan]:
    """The whole file, in parts."""
    return [FileSpan(offset, min(SPAN_BYTES, size - offset)) for offset in range(0, size, SPAN_BYTES)]


def sample_spans(size: int) -> list[FileSpan]:
    """First, last, and evenly between them; a file of up to 16 MiB is covered whole."""
    length = min(SAMPLE_BYTES, size)
    count = min(SAMPLES_PER_FILE, -(-size // length))
    return [FileSpan(i * (size - length) // max(1, count - 1), length) for i in range(count)]


def changed(path: str) -> WeightsChangedError:
    """The error for weights that do not hold still."""
    return WeightsChangedError(
        f"{path!r} changed while it was read; wait until nothing writes to the checkpoint and try again"
    )


def _hash_file(
    state: FileState, spans: Sequence[FileSpan], stop: threading.Event, report: Callable[[int], None]
) -> str:
    digest = hashlib.sha256()
    with reading(state.path), open(state.path, "rb", buffering=0) as file:
        info = os.fstat(file.fileno())
        if (info.st_dev, info.st_ino) != (state.device, state.inode):
            raise changed(state.path)
        for number, span in enumerate(spans):
            if hasattr(os, "posix_fadvise"):
                for ahead in spans[number : number + 2]:  # the disk is to work while the last span is hashed
                    os.posix_fadvise(file.fileno(), ahead.offset, ahead.length, os.POSIX_FADV_WILLNEED)
            _hash_span(file.fileno(), span, digest.update, state.path, stop)
            report(span.length)
    return digest.hexdigest()


def _hash_span(
    handle: int, span: FileSpan, update: Callable[[memoryview], None], path: str, stop: threading.Event
) -> None:
    buffer = memoryview(bytearray(min(PIECE_BYTES, span.length)))
    offset, end = span.offset, span.offset + span.length
    while offset < end:
        if stop.is_set():
            raise CancelledError
        count = os.preadv(handle, [buffer[: end - offset]], offset)
        if not count:
            raise changed(path)
        update(buffer[:count])
        offset += count
