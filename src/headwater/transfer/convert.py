"""From the engine's paged layout to the pool's extent order and back, for one rank's shard.

A *span* is one chunk of one request as the engine knows it: blocks and token numbers. A plan holds many of them,
ready for the device, and is used once for each batch of layers. Nothing here decides which chunks move, or waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headwater.errors import BufferMismatchError, InvalidArgumentError
from headwater.kernels.extent import Compact, ExtentTarget, Move, Spans, gather_rows, scatter_rows
from headwater.kv.encoding import RAW, stored_tile_bytes
from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import Shard
from headwater.pool.buffers import RawBuffer
from headwater.transfer.view import PagedView

BlockIds = Sequence[int] | npt.NDArray[np.integer[Any]]


class PageSpan(NamedTuple):
    """Some consecutive tokens of a request. `block_ids` are the request's, from its first token on.

    Where context parallelism divides the tokens, a rank's blocks hold its own tokens one after another.
    """

    block_ids: BlockIds
    first_token: int
    num_tokens: int


TileBuffer = npt.NDArray[np.uint8] | Tensor | RawBuffer
"""One span's tiles: bytes of shape (layers, heads, bytes of a tile part), each tile contiguous."""

Staging = Tensor | npt.NDArray[np.uint8] | Sequence[TileBuffer]
"""Flat bytes for all spans one after another (`[span][layer][head][tile]`, see `ConversionPlan.staged`),
or a buffer for each span: a sequence of them, or an array or tensor with an axis more."""


@dataclass(frozen=True)
class ConversionPlan:
    """Spans of a cache that move together, for one shard. On CUDA its numbers are uploaded on the stream that is
    current when it is first used, and it belongs to that stream. Made by `plan_spans`."""

    view: PagedView
    shard: Shard
    spans: Spans

    @property
    def num_spans(self) -> int:
        """Spans in this plan."""
        return len(self.spans.num_rows)

    @cached_property
    def _tile_bytes(self) -> list[int]:
        sizes: list[int] = self.spans.tile_bytes(self.view.spec.row_bytes).tolist()
        return sizes

    def tile_bytes(self, span: int) -> int:
        """Bytes of one tile part of a span in staging: packed, where it is."""
        return self._tile_bytes[span]

    def is_packed(self, span: int) -> bool:
        """Whether a span's tiles are packed in staging."""
        return self.spans.packed_bytes is not None and bool(self.spans.packed_bytes[span])

    def staged_bytes(self, num_layers: int) -> int:
        """Bytes of flat staging for that many layers."""
        return sum(self._tile_bytes) * num_layers * len(self.shard.heads)

    def raw_bytes(self, num_layers: int) -> int:
        """Bytes of the cache that so many layers are."""
        return self.spans.total_rows * self.view.spec.row_bytes * num_layers * len(self.shard.heads)

    def staged_starts(self, num_layers: int) -> list[int]:
        """Where each span begins in flat staging, and where the last one ends."""
        scale = num_layers * len(self.shard.heads)
        return [0, *(np.cumsum(self._tile_bytes) * scale).tolist()]

    @cached_property
    def groups(self) -> list[range]:
        """Consecutive spans of equal rows and size: usually one group of full chunks, and one of tails."""
        found, start = [], 0
        for _, same in groupby(zip(self.spans.num_rows.tolist(), self._tile_bytes, strict=True)):
            stop = start + len(list(same))
            found.append(range(start, stop))
            start = stop
        return found

    def staged(self, flat: Tensor, num_layers: int) -> list[Tensor]:
        """Flat staging as one tensor (spans, layers, heads, tile bytes) for each of `groups`, without copying."""
        heads, starts = len(self.shard.heads), self.staged_starts(num_layers)
        return [
            flat[starts[group.start] : starts[group.stop]].view(
                len(group), num_layers, heads, self.tile_bytes(group.start)
            )
            for group in self.groups
        ]

    def part(self, spans: range) -> ConversionPlan:
        """The plan of some consecutive spans; this one itself where that is all of them."""
        if len(spans) == self.num_spans:
            return self
        every = self.spans
        first = every.first_block[spans.start]
        last = every.first_block[spans.stop] if spans.stop < self.num_spans else len(every.blocks)
        first_block, offset, num_rows = (
            table[spans.start : spans.stop] for table in (every.first_block - first, every.offset, every.num_rows)
        )
        packed = None if every.packed_bytes is None else every.packed_bytes[spans.start : spans.stop]
        return ConversionPlan(
            self.view, self.shard, Spans(every.blocks[first:last], first_block, offset, num_rows, packed)
        )

    def packed(self, encodings: Sequence[int]) -> ConversionPlan:
        """The plan with these encodings of its spans in staging."""
        if all(encoding == RAW for encoding in encodings):
            return self
        spec, rows = self.view.spec, self.spans.num_rows.tolist()
        sizes = [
            0 if encoding == RAW else stored_tile_bytes(spec, num_rows, encoding)
            for num_rows, encoding in zip(rows, encodings, strict=True)
        ]
        return ConversionPlan(self.view, self.shard, replace(self.spans, packed_bytes=np.array(sizes, np.int64)))

    @cached_property
    def device_spans(self) -> Tensor:
        """The spans' numbers on the device."""
        return self.spans.upload(self.view.device, self.view.pages.token_bytes)


def plan_spans(view: PagedView, shard: Shard, spans: Sequence[PageSpan]) -> ConversionPlan:
    """Look up the rows of each span. Costs microseconds a span; a list of blocks that several spans share is
    converted once. Raises InvalidArgumentError for blocks that the cache does not have, or too few of them."""
    if not set(shard.layers) <= set(view.layers) or not set(shard.heads) <= set(view.heads):
        raise InvalidArgumentError(
            f"the shard has layers {shard.layers} and heads {shard.heads}; "
            f"the cache holds layers {view.layers} and heads {view.heads}"
        )
    if not spans:
        raise InvalidArgumentError("a plan needs at least one span")
    known: dict[int, npt.NDArray[np.int64]] = {}
    blocks, first_block, offsets, num_rows, total = [], [], [], [], 0
    for span in spans:
        if span.first_token < 0 or span.num_tokens < 1:
            raise InvalidArgumentError(
                f"a span has {span.num_tokens} tokens from token {span.first_token}; expected at least 1, from 0 on"
            )
        ids = known.get(id(span.block_ids))
        if ids is None:
            ids = known[id(span.block_ids)] = _checked_blocks(span.block_ids, view.num_blocks)
        rows = shard.num_rows(span.first_token, span.num_tokens)
        begin = shard.num_rows(0, span.first_token)
        low, high = (
            begin // view.block_size,
            -(-(begin + rows) // view.block_size) if rows else begin // view.block_size,
        )
        if high > len(ids):
            raise InvalidArgumentError(
                f"{span.num_tokens} tokens from token {span.first_token} need {high} blocks of {view.block_size}; "
                f"the request has {len(ids)}"
            )
        blocks.append(ids[low:high])
        first_block.append(total)
        offsets.append(begin - low * view.block_size)
        num_rows.append(rows)
        total += high - low
    tables = (np.array(numbers, np.int64) for numbers in (first_block, offsets, num_rows))
    return ConversionPlan(view, shard, Spans(np.concatenate(blocks), *tables))


def plan_chunks(view: PagedView, shard: Shard, chunks: Sequence[ChunkRef], block_ids: BlockIds) -> ConversionPlan:
    """`plan_spans` for chunks of one request; a fraction of a microsecond each where no tokens are divided."""
    if shard.split.parts > 1 or not chunks:
        return plan_spans(view, shard, [PageSpan(block_ids, chunk.first_token, chunk.num_tokens) for chunk in chunks])
    ids, size = _checked_blocks(block_ids, view.num_blocks), view.block_size
    first = np.array([chunk.first_token for chunk in chunks], np.int64)
    num_rows = np.array([chunk.num_tokens for chunk in chunks], np.int64)
    low, high = first // size, -(-(first + num_rows) // size)
    if num_rows.min() < 1 or first.min() < 0 or high.max() > len(ids):
        raise InvalidArgumentError(
            f"chunks of {num_rows.min()} tokens and more need {high.max()} blocks of {size}; the request has {len(ids)}"
        )
    if (low[1:] == high[:-1]).all():
        blocks = ids[low[0] : high[-1]]
    else:
        pairs = zip(low.tolist(), high.tolist(), strict=True)
        blocks = np.concatenate([ids[start:stop] for start, stop in pairs])
    first_block = np.cumsum(high - low) - (high - low)
    return ConversionPlan(view, shard, Spans(blocks, first_block, first - low * size, num_rows))


def join_plans(plans: Sequence[ConversionPlan]) -> ConversionPlan:
    """The spans of several plans of one view and shard, one after another."""
    if len(plans) == 1:
        return plans[0]
    spans = [plan.spans for plan in plans]
    blocks_before = np.cumsum([0, *(len(each.blocks) for each in spans[:-1])])
    first_block = [each.first_block + before for each, before in zip(spans, blocks_before, strict=True)]
    tables = [[each.blocks for each in spans], first_block, [s.offset for s in spans], [s.num_rows for s in spans]]
    blocks, first_blocks, offsets, num_rows = (np.concatenate(table) for table in tables)
    packed = None
    if any(each.packed_bytes is not None for each in spans):
        sizes = [np.zeros_like(s.num_rows) if s.packed_bytes is None else s.packed_bytes for s in spans]
        packed = np.concatenate(sizes)
    return ConversionPlan(plans[0].view, plans[0].shard, Spans(blocks, first_blocks, offsets, num_rows, packed))


def gather(
    plan: ConversionPlan, layers: range, out: Staging, sums: Tensor | None = None, *, held: range | None = None
) -> None:
    """Copy the spans' KV of these layers (numbers of the whole model) into extent order.

    Flat staging may be for more layers than these, `held`: they get their places among them.

    On CUDA: one launch on the current stream, without waiting. Raises BufferMismatchError where `out` does not fit.
    A `RawBuffer` is trusted: on CUDA it must be memory of the device, or host memory registered with it. Where flat
    staging has `sums` beside it, `staged_checksums` takes them from there.
    """
    gather_rows(build_move(plan, layers, out, writable=True, sums=sums, held=held))


def scatter(plan: ConversionPlan, layers: range, source: Staging) -> None:
    """Copy extent order into the paged cache: the inverse of `gather`. No other byte of the cache is touched."""
    scatter_rows(build_move(plan, layers, source, writable=False))


def build_move(
    plan: ConversionPlan,
    layers: range,
    staging: Staging,
    *,
    writable: bool,
    sums: Tensor | None = None,
    held: range | None = None,
) -> Move:
    """Check the arguments of `gather` and `scatter` and turn them into what kernels take."""
    view, shard = plan.view, plan.shard
    if not layers or layers.step < 1 or any(layer not in shard.layers for layer in layers):
        raise InvalidArgumentError(f"layers {layers} were given; expected ascending ones of {shard.layers}")
    step = view.layers.step
    first, last = view.layers.index(layers[0]), view.layers.index(layers[-1])
    indices = range(first, last + 1, max(layers.step // step, 1))
    first_head = shard.heads.start - view.heads.start
    heads = range(first_head, first_head + len(shard.heads))
    staged: Compact | list[ExtentTarget]
    if isinstance(staging, (Tensor, np.ndarray)) and staging.ndim == 1:
        held = layers if held is None else held
        if layers[0] not in held or layers[-1] not in held or (len(layers) > 1 and held.step != layers.step):
            raise InvalidArgumentError(f"layers {layers} were given for staging of {held}")
        target = _target(staging, (plan.staged_bytes(len(held)),), view.device, writable, at_least=True)
        staged = Compact(target.address, len(held), held.index(layers[0]))
    else:
        if len(staging) != plan.num_spans:
            raise BufferMismatchError(f"{len(staging)} buffers were given for {plan.num_spans} spans")
        staged = [
            _target(buffer, (len(layers), len(heads), plan.tile_bytes(i)), view.device, writable)
            for i, buffer in enumerate(staging)
        ]
    uploaded = plan.device_spans if view.device.type != "cpu" else None
    return Move(view.pages, plan.spans, indices, heads, staged, uploaded, sums)


def _checked_blocks(block_ids: BlockIds, num_blocks: int) -> npt.NDArray[np.int64]:
    ids = np.asarray(block_ids, np.int64)
    if ids.ndim != 1 or (ids.size and (ids.min() < 0 or ids.max() >= num_blocks)):
        raise InvalidArgumentError(f"block ids must be a list of numbers from 0 to {num_blocks - 1}, got {block_ids!r}")
    return ids


def _target(
    buffer: TileBuffer, shape: tuple[int, ...], device: torch.device, writable: bool, *, at_least: bool = False
) -> ExtentTarget:
    """Where a buffer lies, if it has that shape in bytes and is on that device."""
    if isinstance(buffer, RawBuffer):
        tile = shape[-1]
        head_stride = tile if buffer.head_stride is None else buffer.head_stride
        layer_stride = shape[1] * head_stride if buffer.layer_stride is None else buffer.layer_stride
        return ExtentTarget(buffer.address, layer_stride, head_stride)
    found = tuple(buffer.shape)
    fits = len(found) == 1 and found[0] >= shape[0] if at_least else found == shape
    if isinstance(buffer, Tensor):
        address, strides = buffer.data_ptr(), buffer.stride()
        here, is_bytes, may_write = buffer.device == device, buffer.dtype == torch.uint8, True
    else:
        address, strides = buffer.__array_interface__["data"][0], buffer.strides
        here, is_bytes, may_write = device.type == "cpu", buffer.dtype == np.uint8, buffer.flags.writeable
    if not (fits and here and is_bytes and strides[-1] == 1) or (writable and not may_write):
        kind = "writable bytes" if writable else "bytes"
        raise BufferMismatchError(
            f"expected {kind} of shape {shape} on {device}, contiguous in the last axis; got {buffer.dtype} of shape "
            f"{found} and strides {tuple(strides)}{'' if here else ' elsewhere'}"
        )
    return ExtentTarget(address, strides[0], strides[1] if len(found) > 1 else 0)
