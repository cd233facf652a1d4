"""Chunks of one load, taken from where they lie in a store's mapped memory: copied, verified where they landed,
and only then put into the request's blocks.

Everything that can be known before is worked out once for all pieces: the threads of a load share one interpreter, and
whatever Python does between two copies, all of them wait for. What is missing or does not verify is not judged here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from headwater.kernels.extent_cpu import SpanWriter
from headwater.kv.format import checksum
from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import Shard
from headwater.pool.space import Space
from headwater.stores.base import Tiles
from headwater.transfer.convert import BlockIds, Span, plan_spans
from headwater.transfer.view import PagedView

MAX_COPIES = 8
"""For one plane of one layer of a chunk. Where its blocks lie in more places, one indexed copy is quicker: then nothing
is lent, and everything goes the other way."""


class Lent:
    """Some chunks under one lease, as a context manager. Safe from many threads."""

    def __init__(
        self, space: Space, view: PagedView, shard: Shard, chunks: Sequence[ChunkRef], block_ids: BlockIds
    ) -> None:
        plan = plan_spans(view, shard, [Span(block_ids, chunk.first_token, chunk.num_tokens) for chunk in chunks])
        self._writer = SpanWriter(view.pages, plan.spans, _indices(view.layers, shard.layers))
        self._view_layers, self._first_head = view.layers, view.heads.start
        self._shard = shard
        self._num_heads = space.spec.num_kv_heads
        self._space = space
        self._taken: list[int] = []
        """Bytes of each piece that has gone into the cache."""
        self._loan = space.lend(chunks, shard) if self._writer.max_copies <= MAX_COPIES else None
        places = self._loan.places if self._loan is not None else [None] * len(chunks)
        self._addresses = [
            None if place is None else place.segment.__array_interface__["data"][0] + place.offset for place in places
        ]

    def copy(self, number: int, piece: Shard, tiles: Tiles) -> bool:
        """Copy some tiles of one chunk. False where they cannot be seen, or were not what they should be: then the
        memory holds garbage."""
        source = self._addresses[number]
        if source is None or self._loan is None:
            return False
        _, num_heads, size = tiles.shape
        target, row_bytes = tiles.ctypes.data, num_heads * size
        for i, layer in enumerate(piece.layers):
            start = (layer * self._num_heads + piece.heads.start) * size
            ctypes.memmove(target + i * row_bytes, source + start, row_bytes)
        layers, heads = self._shard.layers, self._shard.heads
        rows = slice(layers.index(piece.layers[0]), layers.index(piece.layers[-1]) + 1)
        columns = slice(piece.heads.start - heads.start, piece.heads.stop - heads.start)
        memory = memoryview(tiles.reshape(-1))
        expected = self._loan.sums[number, rows, columns].ravel().tolist()
        return all(checksum(memory[i * size : (i + 1) * size]) == known for i, known in enumerate(expected))

    def put(self, number: int, piece: Shard, tiles: Tiles) -> None:
        """Write tiles that were copied into the request's blocks."""
        heads = range(piece.heads.start - self._first_head, piece.heads.stop - self._first_head)
        self._writer.write(number, _indices(self._view_layers, piece.layers), heads, tiles)
        self._taken.append(tiles.nbytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._loan is not None:
            self._loan.release()
            self._space.note_taken(len(self._taken), sum(self._taken))


def _indices(of: range, layers: range) -> range:
    return range(of.index(layers[0]), of.index(layers[-1]) + 1, max(layers.step // of.step, 1))
