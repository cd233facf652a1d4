"""The mover of a GPU: copies by the copy engines, checksums by the device. The host touches no byte of KV.

Saves and loads have streams of their own, so that neither holds up the other. On CPU tensors, where streams do nothing,
the same code runs in tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headwater.kernels.pack_check import packs_rightly
from headwater.kernels.post import post
from headwater.kv.encoding import RAW
from headwater.kv.hashing import ChunkRef
from headwater.kv.packing import fits_packed
from headwater.kv.topology import Shard
from headwater.pool.space import Space
from headwater.transfer.convert import BlockIds, ConversionPlan, plan_chunks, scatter
from headwater.transfer.extents import ExtentPiece, copy_extents, touch_extents
from headwater.transfer.load_job import Load, LoadBatch, LoadPart
from headwater.transfer.movers.base import Bytes, Copied
from headwater.transfer.registered import Preparer, Registered
from headwater.transfer.ring import StagingRing
from headwater.transfer.save_job import Gathered, SaveTarget
from headwater.transfer.streams import DeviceEvent, DeviceStream, pinned
from headwater.transfer.verify import staged_checksums, staged_fits, verify_staged
from headwater.transfer.view import PagedView

_MAX_IN_FLIGHT = 3
"""Batches whose copies are queued on the device: one runs, one waits, one is being committed or scattered."""

_PIECE_BYTES = 256 << 20
"""What a load brings at a time, if the ring holds two of them. The host needs two milliseconds a piece on a slow
machine, whatever its size; the bus needs five for this one."""
_FIRST_BYTES = 128 << 20
"""The first piece is smaller, so that the bus begins while the next is looked up."""


class _Bounce:
    """Pinned memory of the host, as large as was ever needed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: Tensor | None = None

    def take(self, num_bytes: int) -> Tensor:
        if self._memory is None or self._memory.numel() < num_bytes:
            self._memory = pinned((num_bytes,), torch.uint8, self._device)
        return self._memory[:num_bytes]


class CudaStorer:
    """See `movers.base.Storer`."""

    most_in_flight = _MAX_IN_FLIGHT

    def __init__(self, space: Space, view: PagedView, shard: Shard) -> None:
        self._model_heads = space.spec.num_kv_heads
        self._view = view
        self._shard = shard
        self._bounce = _Bounce(view.device)
        self._segments = Registered(view.device)
        self._hashes = DeviceStream(view.device)
        self._copies = DeviceStream(view.device)
        with_preparer = space.mapped and shard.split.parts == 1 and view.device.type == "cuda"
        self._preparer = Preparer(space, self._segments, view.device) if with_preparer else None

    def address(self, segment: Bytes) -> int | None:
        """See `Storer`. Registers the segment if it was not yet."""
        return self._segments.address(segment)

    def copy(
        self, work: Gathered, plan: ConversionPlan, spans: Sequence[int], starts: list[int], *, blocking: bool
    ) -> Copied:
        """See `Storer`. One call of the driver for each stretch of equal chunks."""
        job, shard, stream = work.job, self._shard, self._copies
        if work.layers != shard.layers:
            shard = replace(shard, layers=work.layers)
        pieces = list[tuple[ExtentPiece, list[SaveTarget]]]()
        if not spans:
            return Copied(work.gathered, pieces)
        base, first = work.flat.data_ptr(), work.spans.start
        stream.wait(work.gathered)
        with stream.use():
            for group in job.equal(spans, shard):
                owned, start, step = shard.owned(job.chunks[group[0]].number)
                piece = ExtentPiece(owned, plan.tile_bytes(group[0] - first), start, step)
                targets = [job.targets[span] for span in group]
                staged = [base + starts[span - first] for span in group]
                copy_extents(piece, targets, staged, self._model_heads, self._view.device, to_host=True)
                pieces.append((piece, targets))
        return Copied(stream.record(blocking=blocking), pieces)

    def hash(self, work: Gathered) -> None:
        if work.sums is None and work.plan is not None and work.job.targets:
            self._hashes.wait(work.gathered)
            with self._hashes.use():
                sums = staged_checksums(work.plan, work.flat, len(work.layers), work.added_up)
                here = pinned(tuple(sums.shape), torch.int64, self._view.device)
                post(sums, here)
                fits = staged_fits(work.plan, work.flat, len(work.layers))
                if fits is not None:
                    fits = fits.flatten(1).all(dim=1)
                    work.fits_here = pinned((work.plan.num_spans,), torch.bool, self._view.device)
                    post(fits, work.fits_here)
            # All or none: chunks without checksums are not committed.
            work.hashed, work.sums_here, work.sums = self._hashes.record(blocking=True), here, sums
            work.held = fits

    def touch(self, copied: Copied) -> None:
        with self._hashes.use():
            for piece, targets in copied.pieces:
                touch_extents(piece, targets, self._model_heads, self._view.device)

    def take_sums(self, work: Gathered, spans: range) -> None:
        self.hash(work)
        if work.sums_here is not None and work.hashed is not None and work.job.sums is not None:
            work.hashed.synchronize()
            first, layer = work.spans.start, self._shard.layers.index(work.layers.start)
            here = work.sums_here[spans.start - first : spans.stop - first].numpy().view(np.uint64)
            work.job.sums[spans.start : spans.stop, layer : layer + len(work.layers)] = here
            if work.fits_here is not None:
                fits = work.fits_here[spans.start - first : spans.stop - first].tolist()
                work.job.misfits.update(span for span, fit in zip(spans, fits, strict=True) if not fit)

    def host_bytes(self, work: Gathered, low: int, high: int) -> Bytes:
        target, stream = self._bounce.take(high - low), self._copies
        stream.wait(work.gathered)
        with stream.use():
            target.copy_(work.flat[low:high], non_blocking=True)
        stream.record(blocking=True).synchronize()
        return target.numpy()

    def stored(self, chunk: ChunkRef, encoding: int, tiles: Bytes) -> Bytes | None:
        """See `Storer`: the device has packed them."""
        return tiles if encoding == RAW or fits_packed(self._view.spec, chunk.num_tokens, tiles).all() else None

    def synchronize(self) -> None:
        for stream in (self._copies, self._hashes):
            stream.record().synchronize()

    def wait_prepared(self) -> None:
        if self._preparer is not None:
            self._preparer.wait()

    def stop(self, timeout_s: float) -> None:
        if self._preparer is not None:
            self._preparer.close(timeout_s)

    def close(self) -> None:
        self._segments.close()


class CudaPlacer:
    """See `movers.base.Placer`. Copies run ahead into a ring on the device, and the device verifies them there."""

    most_in_flight = _MAX_IN_FLIGHT
    runs_beside = True

    def __init__(self, space: Space, view: PagedView, shard: Shard, staging_bytes: int) -> None:
        self._model_heads = space.spec.num_kv_heads
        self._view = view
        self._shard = shard
        layers, heads, tile = shard.local_shape(space.spec, 0, space.chunk_tokens)
        self._layer_bytes = heads * tile
        """Of one chunk."""
        self.ring = StagingRing(layers * heads * tile, staging_bytes, view.device)
        slot, half = self.ring.slot_bytes, self.ring.count // 2
        self.window_chunks = max(1, min(_PIECE_BYTES // slot, half))
        self.first_chunks = max(1, min(_FIRST_BYTES // slot, half))
        self._bounce = _Bounce(view.device)
        self._segments = Registered(view.device)
        self._copies = DeviceStream(view.device, urgent=True)
        self._work = DeviceStream(view.device, urgent=True)

    def begin(self, load: Load) -> None:
        self._work.wait(load.asked)

    def address(self, segment: Bytes) -> int | None:
        return self._segments.address(segment)

    def can_place(self, encodings: Sequence[int]) -> bool:
        return all(encoding == RAW for encoding in encodings) or packs_rightly(self._view.device)

    def plan(self, chunks: Sequence[ChunkRef], block_ids: BlockIds, encodings: Sequence[int]) -> ConversionPlan:
        return plan_chunks(self._view, self._shard, chunks, block_ids).packed(encodings)

    def expect(self, part: LoadPart, sums: npt.NDArray[np.uint64]) -> None:
        here = pinned(sums.shape, torch.int64, self._view.device)
        here.numpy()[...] = sums.view(np.int64)
        part.sums = here

    def layer_chunks(self, num_layers: int) -> int:
        unit = self._layer_bytes * num_layers
        return max(1, min(_PIECE_BYTES, self.ring.count * self.ring.slot_bytes // 2) // unit)

    def take(self, part: LoadPart, layers: range, spans: range) -> LoadBatch | None:
        """See `Placer`. In smaller pieces, of whatever is free, the host would need longer than the bus."""
        unit, count = self._layer_bytes * len(layers), len(spans)
        room = self.ring.take(unit, count, least=count)
        if room is None:
            return None
        taken = range(spans.start, spans.start + room.num_units)
        return LoadBatch(part.load, part, taken, part.plan.part(taken), self.ring.flat(room, unit), room.num_bytes)

    def bring(self, load: Load, batch: LoadBatch, layers: range) -> None:
        """See `Placer`. From the store's registered memory, verified on the device."""
        part, plan, shard, stream, flat = batch.part, batch.plan, self._shard, self._copies, batch.flat
        if layers != shard.layers:
            shard = replace(shard, layers=layers)
        assert isinstance(part.sums, Tensor)
        assert flat is not None
        first = self._shard.layers.index(layers.start)
        base, starts, device = flat.data_ptr(), plan.staged_starts(len(layers)), self._view.device
        with stream.use():
            if part.expected is None:
                # On this stream, before the copies: on another one it would wait for whatever copies come next.
                part.expected = part.sums.to(device, non_blocking=True)
            for group in plan.groups:
                piece = ExtentPiece(shard, plan.tile_bytes(group.start))
                stored = [part.stored[batch.spans[row]] for row in group]
                staged = [base + starts[row] for row in group]
                copy_extents(piece, stored, staged, self._model_heads, device, to_host=False)
        with self._work.use():
            _ = plan.device_spans  # uploaded now: once the copies have come, the scatter waits for nothing
        self._work.wait(stream.record())
        batch.good = pinned((len(batch.spans),), torch.bool, device)
        with self._work.use():
            wanted = part.expected[batch.spans.start : batch.spans.stop, first : first + len(layers)]
            tiles = verify_staged(plan, flat, len(layers), wanted)
            every = tiles.flatten(1).all(dim=1)
            post(every, batch.good)
        batch.held = (tiles, every)
        batch.checked = batch.done = self._work.record()

    def landing(self, num_bytes: int) -> Bytes:
        return self._bounce.take(num_bytes).numpy()

    def bring_landed(self, batch: LoadBatch, host: Bytes, num_good: int) -> None:
        """See `Placer`. Waits, because the next read needs the pinned memory."""
        assert batch.flat is not None
        size = host.nbytes
        with self._copies.use():
            batch.flat[:size].copy_(torch.from_numpy(host), non_blocking=True)
        batch.good = torch.arange(len(batch.spans)) < num_good
        batch.checked = batch.done = self._copies.record()
        batch.checked.synchronize()

    def put(self, load: Load, batch: LoadBatch, layers: range, num_chunks: int) -> int:
        if not num_chunks or not load.gate.enter():
            return 0
        try:
            plan = batch.plan.part(range(num_chunks))
            assert batch.flat is not None
            with self._work.use():
                scatter(plan, layers, batch.flat)
            batch.held = (batch.held, plan)
            batch.done = self._work.record()
        finally:
            load.gate.leave()
        return plan.raw_bytes(len(layers))

    def event(self) -> DeviceEvent:
        return self._work.record()

    def give_back(self, batch: LoadBatch) -> None:
        self.ring.give_back(batch.num_bytes)

    def reset(self) -> None:
        self.ring.reset()

    def synchronize(self) -> None:
        for stream in (self._copies, self._work):
            stream.record().synchronize()

    def close(self, timeout_s: float) -> None:
        self._segments.close()
