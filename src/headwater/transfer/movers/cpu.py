"""The mover of a CPU: each tile is copied and hashed, or copied, verified and turned, while it is in the cache.

Several copy threads share one interpreter, so everything that can be known before the first copy is worked out once for
all of a batch's pieces.
"""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from headwater.kernels.extent_cpu import SpanWriter
from headwater.kv.encoding import PACKED, RAW, stored_tile_bytes
from headwater.kv.format import checksum
from headwater.kv.hashing import ChunkRef
from headwater.kv.packing import pack_tiles
from headwater.kv.topology import Shard
from headwater.pool.space import Space
from headwater.stores import encode
from headwater.stores.decode import settle_tiles
from headwater.transfer.convert import BlockIds, ConversionPlan, plan_chunks, scatter
from headwater.transfer.copy_threads import CopyThreads
from headwater.transfer.load_job import Load, LoadBatch, LoadPart
from headwater.transfer.movers.base import Bytes, Copied
from headwater.transfer.save_job import Gathered, SaveJob
from headwater.transfer.streams import PAST, DeviceEvent
from headwater.transfer.view import PagedView

PIECE_BYTES = 4 << 20
"""Large enough that the calls around a piece do not count, and small enough that it stays in the processor's cache."""

MAX_COPIES = 8
"""For one plane of one layer of a chunk. Where its blocks lie in more places, one indexed copy is quicker."""

_WINDOW_CHUNKS = 64


def _address(segment: Bytes) -> int:
    return int(segment.__array_interface__["data"][0])


class CpuStorer:
    """See `movers.base.Storer`. Everything has ended when a call returns."""

    most_in_flight = 1

    def __init__(self, space: Space, view: PagedView, shard: Shard) -> None:
        self._spec = space.spec
        self._model_heads = space.spec.num_kv_heads
        self._shard = shard

    def address(self, segment: Bytes) -> int | None:
        return _address(segment)

    def copy(
        self, work: Gathered, plan: ConversionPlan, spans: Sequence[int], starts: list[int], *, blocking: bool
    ) -> Copied:
        """See `Storer`. Copies each tile and hashes it while it is in the cache: this loop is a save's whole cost."""
        job, shard, sums, memmove, hashed = work.job, self._shard, work.job.sums, ctypes.memmove, checksum
        assert sums is not None
        if work.layers != shard.layers:
            shard = replace(shard, layers=work.layers)
        memory, base, num_heads = memoryview(work.flat.numpy()), work.flat.data_ptr(), len(shard.heads)
        before = self._shard.layers.index(work.layers.start)
        for span in spans:
            owned, first, step = shard.owned(job.chunks[span].number)
            size, start = plan.tile_bytes(span - work.spans.start), starts[span - work.spans.start]
            extent = job.targets[span].address
            if job.encodings[span] != RAW:
                self._pack(job, span, owned, memory, (start, first, step, num_heads), before)
                continue
            for i, layer in enumerate(owned.layers):
                row = first + i * step
                place = extent + (layer * self._model_heads + shard.heads.start) * size
                at = start + row * num_heads * size
                noted = sums[span, before + row]
                for head in range(num_heads):
                    memmove(place, base + at, size)
                    noted[head] = hashed(memory[at : at + size])
                    place, at = place + size, at + size
        return Copied(PAST, [])

    def _pack(
        self, job: SaveJob, span: int, owned: Shard, memory: memoryview, staged: tuple[int, int, int, int], before: int
    ) -> None:
        """Pack a chunk's staged tiles, and copy them into its extent with their checksums; note where one does not
        fit. `staged`: where the chunk begins, the first of its rows, their step, and its heads."""
        assert job.sums is not None
        spec, num_tokens = self._spec, job.chunks[span].num_tokens
        start, first, step, num_heads = staged
        row_bytes, size = num_heads * spec.tile_bytes(num_tokens), stored_tile_bytes(spec, num_tokens, PACKED)
        packed = np.empty((num_heads, size), np.uint8)
        for i, layer in enumerate(owned.layers):
            row = first + i * step
            at = start + row * row_bytes
            raw = np.frombuffer(memory[at : at + row_bytes], np.uint8).reshape(num_heads, -1)
            if not pack_tiles(spec, num_tokens, raw, packed).all():
                job.misfits.add(span)
                return
            job.sums[span, before + row] = [checksum(tile) for tile in packed]
            place = job.targets[span].address + (layer * self._model_heads + owned.heads.start) * size
            ctypes.memmove(place, packed.ctypes.data, num_heads * size)

    def hash(self, work: Gathered) -> None:
        """See `Storer`: done while they were copied."""

    def touch(self, copied: Copied) -> None:
        """See `Storer`: nothing is queued."""

    def take_sums(self, work: Gathered, spans: range) -> None:
        """See `Storer`: they are noted."""

    def host_bytes(self, work: Gathered, low: int, high: int) -> Bytes:
        found: Bytes = work.flat[low:high].numpy()
        return found

    def stored(self, chunk: ChunkRef, encoding: int, tiles: Bytes) -> Bytes | None:
        """See `Storer`."""
        return tiles if encoding == RAW else encode.pack_tiles(self._spec, chunk.num_tokens, tiles)

    def synchronize(self) -> None:
        """See `Storer`: nothing is under way."""

    def wait_prepared(self) -> None:
        """See `Storer`: memory comes when it is needed."""

    def stop(self, timeout_s: float) -> None:
        """See `Storer`."""

    def close(self) -> None:
        """See `Storer`."""


class CpuPlacer:
    """See `movers.base.Placer`. Copy threads carry pieces of a few layers of one chunk."""

    most_in_flight = 1
    runs_beside = False
    window_chunks = first_chunks = _WINDOW_CHUNKS

    def __init__(self, space: Space, view: PagedView, shard: Shard) -> None:
        self._model_heads = space.spec.num_kv_heads
        self._view = view
        self._shard = shard
        _, heads, tile = shard.local_shape(space.spec, 0, space.chunk_tokens)
        self._layer_bytes = heads * tile
        self._threads = CopyThreads()
        self._scratch = _Scratch(max(PIECE_BYTES, self._layer_bytes))
        self._landing: Bytes = np.empty(0, np.uint8)

    def begin(self, load: Load) -> None:
        """See `Placer`: every call before has ended."""

    def address(self, segment: Bytes) -> int | None:
        return _address(segment)

    def can_place(self, encodings: Sequence[int]) -> bool:
        return True

    def plan(self, chunks: Sequence[ChunkRef], block_ids: BlockIds, encodings: Sequence[int]) -> ConversionPlan:
        """See `Placer`. What is packed is decoded before it is placed."""
        return plan_chunks(self._view, self._shard, chunks, block_ids)

    def expect(self, part: LoadPart, sums: npt.NDArray[np.uint64]) -> None:
        part.sums = sums

    def layer_chunks(self, num_layers: int) -> int:
        return _WINDOW_CHUNKS

    def take(self, part: LoadPart, layers: range, spans: range) -> LoadBatch | None:
        """See `Placer`. Pieces have memory of their own, so there is always room."""
        return LoadBatch(part.load, part, spans, part.plan.part(spans))

    def bring(self, load: Load, batch: LoadBatch, layers: range) -> None:
        """See `Placer`. Copies a piece, verifies it where it landed, and only then puts it into the blocks."""
        carrier = _Carrier(batch, layers, self._view, self._shard, self._model_heads, self._scratch)
        step = max(1, PIECE_BYTES // self._layer_bytes)
        pieces = [range(at, min(at + step, len(layers))) for at in range(0, len(layers), step)]

        def carry(number: int) -> bool:
            row, piece = divmod(number, len(pieces))
            if load.is_cancelled or time.monotonic() >= load.deadline:
                return False
            return carrier.carry(row, pieces[piece])

        num_good = self._threads.run(len(batch.spans) * len(pieces), carry) // len(pieces)
        batch.good, batch.is_placed = torch.arange(len(batch.spans)) < num_good, True
        batch.is_late = not carrier.has_damage

    def landing(self, num_bytes: int) -> Bytes:
        if self._landing.nbytes < num_bytes:
            self._landing = np.empty(num_bytes, np.uint8)
        return self._landing[:num_bytes]

    def bring_landed(self, batch: LoadBatch, host: Bytes, num_good: int) -> None:
        batch.flat = torch.from_numpy(host)
        batch.good = torch.arange(len(batch.spans)) < num_good

    def put(self, load: Load, batch: LoadBatch, layers: range, num_chunks: int) -> int:
        plan = batch.plan.part(range(num_chunks)) if num_chunks else None
        if plan is None:
            return 0
        if not batch.is_placed:
            if not load.gate.enter():
                return 0
            try:
                assert batch.flat is not None
                scatter(plan, layers, batch.flat)
            finally:
                load.gate.leave()
        return plan.raw_bytes(len(layers))

    def event(self) -> DeviceEvent:
        return PAST

    def give_back(self, batch: LoadBatch) -> None:
        """See `Placer`."""

    def reset(self) -> None:
        """See `Placer`."""

    def synchronize(self) -> None:
        """See `Placer`: nothing is under way."""

    def close(self, timeout_s: float) -> None:
        self._threads.close(timeout_s)


class _Scratch(threading.local):
    """Memory for one piece, one for each thread: its pages are touched once."""

    def __init__(self, num_bytes: int) -> None:
        self.memory: Bytes = np.empty(num_bytes, np.uint8)
        self._raw: Bytes = np.empty(0, np.uint8)

    def raw(self, *shape: int) -> Bytes:
        """Memory for what is decoded of a piece; none is taken before something is."""
        if self._raw.nbytes < math.prod(shape):
            self._raw = np.empty(max(math.prod(shape), self.memory.nbytes), np.uint8)
        return self._raw[: math.prod(shape)].reshape(shape)


class _Carrier:
    """Carries the lent tiles of one batch. Safe from several threads."""

    def __init__(
        self, batch: LoadBatch, layers: range, view: PagedView, shard: Shard, model_heads: int, scratch: _Scratch
    ) -> None:
        self._load, self._batch, self._layers, self._scratch = batch.load, batch, layers, scratch
        self._spec, self._model_heads, self._heads = view.spec, model_heads, shard.heads
        first = view.layers.index(layers[0])
        step = max(layers.step // view.layers.step, 1)
        self._indices = range(first, view.layers.index(layers[-1]) + 1, step)
        self._head_indices = range(shard.heads.start - view.heads.start, shard.heads.stop - view.heads.start)
        writer = SpanWriter(view.pages, batch.plan.spans, self._indices)
        self._writer = writer if writer.max_copies <= MAX_COPIES else None
        assert isinstance(batch.part.sums, np.ndarray)
        start = shard.layers.index(layers[0])
        rows = slice(batch.spans.start, batch.spans.stop)
        self._sums = batch.part.sums[rows, start : start + len(layers)]
        self.has_damage = False

    def carry(self, row: int, numbers: range) -> bool:
        """Bring some of the layers of one chunk; False where they did not verify, or the load is over."""
        batch, layers = self._batch, self._layers[numbers.start : numbers.stop]
        chunk, encoding = batch.part.chunks[batch.spans[row]], batch.part.encodings[batch.spans[row]]
        size, num_heads = stored_tile_bytes(self._spec, chunk.num_tokens, encoding), len(self._heads)
        row_bytes = num_heads * size
        tiles = self._scratch.memory[: len(layers) * row_bytes].reshape(len(layers), num_heads, size)
        source, target = batch.part.stored[batch.spans[row]].address, tiles.ctypes.data
        for i, layer in enumerate(layers):
            start = (layer * self._model_heads + self._heads.start) * size
            ctypes.memmove(target + i * row_bytes, source + start, row_bytes)
        memory = memoryview(tiles.reshape(-1))
        expected = self._sums[row, numbers.start : numbers.stop].ravel().tolist()
        for i, known in enumerate(expected):
            if checksum(memory[i * size : (i + 1) * size]) != known:
                self.has_damage = True
                return False
        if encoding != RAW:
            raw = self._scratch.raw(len(layers), num_heads, self._spec.tile_bytes(chunk.num_tokens))
            whole = Shard(range(len(layers)), range(num_heads))
            if not settle_tiles(self._spec, chunk, whole, encoding, tiles, raw):
                self.has_damage = True
                return False
            tiles = raw
        if not self._load.gate.enter():
            return False
        try:
            self._put(row, layers, numbers, tiles)
        finally:
            self._load.gate.leave()
        return True

    def _put(self, row: int, layers: range, numbers: range, tiles: Bytes) -> None:
        if self._writer is not None:
            self._writer.write(row, self._indices[numbers.start : numbers.stop], self._head_indices, tiles)
        else:
            scatter(self._batch.plan.part(range(row, row + 1)), layers, [tiles])
