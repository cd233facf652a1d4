"""Bytes out of Mooncake: batches of ranges into registered blocks, some ahead of whoever copies and verifies them."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from headwater.errors import BackendError, DeadlineError
from headwater.stores.remote.base import Bytes, ObjectRange
from headwater.stores.remote.staging import Blocks

_AHEAD = 3
_NOT_FOUND = -704


class StreamBatch(NamedTuple):
    """Spans that fit into one block, and where each begins there."""

    spans: range
    places: list[int]


class StreamedBatch(NamedTuple):
    """A batch whose bytes are in a block."""

    batch: StreamBatch
    block: Bytes
    codes: list[int]


class MooncakeStream:
    """Batches on their way into blocks, one after another, as long as somebody takes them out again.

    The library's thread is up to `_AHEAD` blocks ahead of the one that verifies. A block belongs to the thread that
    fills it, then to the queue, then to whoever takes it out.
    """

    def __init__(self, store: Any, spans: Sequence[ObjectRange], blocks: Blocks, deadline: float) -> None:
        self._store = store
        self._spans = spans
        self._blocks = blocks
        self._deadline = deadline
        self._room = threading.Semaphore(_AHEAD)
        self._arrived: queue.SimpleQueue[StreamedBatch | Exception | None] = queue.SimpleQueue()
        self._abandoned = False

    def work(self) -> None:
        """The library's part: runs in a thread of its own."""
        try:
            for batch in _batches(self._spans, self._blocks.block_bytes):
                if not self._room.acquire(timeout=max(0.0, self._deadline - time.monotonic())) or self._abandoned:
                    return
                spans = [self._spans[i] for i in batch.spans]
                block = self._blocks.take(sum(span.length for span in spans), self._deadline)
                if block is None:
                    raise BackendError("all transfer buffers are held by calls that do not return")
                try:
                    codes = _get(self._store, block, spans, batch.places)
                except BaseException:
                    self._blocks.give_back(block)
                    raise
                self._arrived.put(StreamedBatch(batch, block, codes))
        except Exception as error:
            self._arrived.put(error)
        finally:
            self._arrived.put(None)
            if self._abandoned:
                self._drain()

    def next(self) -> StreamedBatch:
        """The next batch. Raises DeadlineError where it does not come in time."""
        try:
            arrived = self._arrived.get(timeout=max(0.0, self._deadline - time.monotonic()))
        except queue.Empty:
            arrived = None
        if arrived is None:
            raise DeadlineError("Mooncake does not deliver in time")
        if isinstance(arrived, Exception):
            raise BackendError(f"Mooncake failed to read: {arrived}") from arrived
        return arrived

    def done_with(self, arrived: StreamedBatch) -> None:
        """Its bytes have been copied."""
        self._blocks.give_back(arrived.block)
        self._room.release()

    def abandon(self) -> None:
        """Nobody takes anything out any more. What arrives later is given back by the thread that brings it."""
        self._abandoned = True
        self._room.release()
        self._drain()

    def _drain(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                arrived = self._arrived.get_nowait()
                if isinstance(arrived, StreamedBatch):
                    self._blocks.give_back(arrived.block)


def _get(store: Any, block: Bytes, spans: Sequence[ObjectRange], places: Sequence[int]) -> list[int]:
    """Whole objects in one batch, ranges in another: the library is much faster for the former."""
    codes = [_NOT_FOUND] * len(spans)
    start = block.ctypes.data
    whole = [i for i, span in enumerate(spans) if span.is_whole]
    if whole:
        names, sizes = [spans[i].name for i in whole], [spans[i].length for i in whole]
        for i, code in zip(whole, store.batch_get_into(names, [start + places[i] for i in whole], sizes), strict=True):
            codes[i] = code
    parts = [i for i, span in enumerate(spans) if not span.is_whole]
    if parts:
        names = [spans[i].name for i in parts]
        found = store.get_into_ranges(
            [start],
            [names],
            [[[places[i]] for i in parts]],
            [[[spans[i].offset] for i in parts]],
            [[[spans[i].length] for i in parts]],
        )
        for i, (code,) in zip(parts, found[0], strict=True):
            codes[i] = code
    return codes


def _batches(spans: Sequence[ObjectRange], most: int) -> list[StreamBatch]:
    batches, start, used, places = list[StreamBatch](), 0, 0, list[int]()
    for i, span in enumerate(spans):
        if places and used + span.length > most:
            batches.append(StreamBatch(range(start, i), places))
            start, used, places = i, 0, []
        places.append(used)
        used += span.length
    return [*batches, StreamBatch(range(start, len(spans)), places)] if places else batches
