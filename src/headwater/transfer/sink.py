"""A second place for KV that is saved: whoever sends it on, told of each group of layers that the pool has.

`peers.sender.PeerSender` is one. The saver's thread calls it, so nothing here may wait.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import Shard
from headwater.pool.space import Space
from headwater.stores.base import Status
from headwater.transfer.save_job import Gathered

log = logging.getLogger(__name__)


class SaveSink(Protocol):
    """What a saver tells."""

    def wants(self, chunks: Sequence[ChunkRef]) -> bool:
        """Whether some of these chunks are awaited layer by layer: their checksums are noted group by group then."""

    def noted(self, chunks: Sequence[ChunkRef], layers: range) -> None:
        """The pool has this rank's tiles of these layers."""

    def lost(self, chunks: Sequence[ChunkRef]) -> None:
        """This rank will not save these chunks, or not all of them."""


class NoSink:
    """The null object: nobody awaits anything."""

    def wants(self, chunks: Sequence[ChunkRef]) -> bool:
        """Nobody does."""
        return False

    def noted(self, chunks: Sequence[ChunkRef], layers: range) -> None:
        """Nobody listens."""

    def lost(self, chunks: Sequence[ChunkRef]) -> None:
        """Nobody listens."""


def show_layers(space: Space, shard: Shard, work: Gathered, spans: range, sink: SaveSink, deadline_s: float) -> None:
    """Note the checksums of one group of layers before the others have come, and tell the sink. Does not raise: where
    it fails, the commit of the whole finds out why."""
    job, sums, mine = work.job, work.job.sums, shard.layers
    assert sums is not None
    filled = [span for span in spans if span in job.targets]
    try:
        for owned, _, group in job.by_owned(filled, shard):
            inside = [layer for layer in owned.layers if layer in work.layers]
            if not inside:
                continue
            layers = range(inside[0], inside[-1] + 1, owned.layers.step)
            rows = slice(mine.index(inside[0]), mine.index(inside[-1]) + 1, owned.layers.step // mine.step)
            extents = [job.targets[span].extent for span in group]
            outcome = space.commit_shard(extents, Shard(layers, owned.heads), sums[group, rows], deadline_s=deadline_s)
            good = [span for span, status in zip(group, outcome, strict=True) if status is Status.OK]
            job.shown.update(dict.fromkeys(good, len(layers)))
            if good:
                sink.noted([job.chunks[span] for span in good], layers)
    except Exception as error:
        log.warning("committing some layers early failed; they are committed with the rest: %s", error)
