"""Which chunks of a gather are copied together: the bus must begin early, and the last commit be short."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from headwater.transfer.ring import BATCH_BYTES, StagingRing
from headwater.transfer.save_job import Gathered

_FIRST_BATCH, _LAST_BATCH = 28, 24
"""Chunks of the first two batches of many and of the last ones: the bus begins early, and the last commit is short.
With fewer it would be busy for less than the two milliseconds that a slow host needs for the next batch."""


def batches(work: Gathered, ring: StagingRing, *, was_idle: bool, is_alone: Callable[[], bool]) -> Iterator[range]:
    """Numbers of chunks: few at first where the bus has nothing to do (`was_idle`), and few at the end where each batch
    is committed and nothing follows (`is_alone`)."""
    first, stop, is_whole = work.spans.start, work.spans.stop, not work.job.is_open
    most, at = max(1, BATCH_BYTES // max(1, work.flat.numel() // len(work.spans))), first
    if is_whole:
        # Chunks that are in the ring already may leave in larger pieces than those that must be waited for.
        most = max(min(most, ring.batch), min(2 * most, len(work.spans) // 4))
    while at < stop:
        size = min(most, max(_FIRST_BATCH, at - first)) if was_idle else most
        if is_whole and is_alone():
            size = min(size, max(_LAST_BATCH, (stop - at) // 2))
        if stop - at - size < min(_LAST_BATCH, most) // 2:
            size = stop - at
        yield range(at, at + size)
        at += size
