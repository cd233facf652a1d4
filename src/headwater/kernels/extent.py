"""Moving KV between a paged cache and extent order: many spans, many layers, every plane and head in one call.

Here are the numbers that say where both sides lie, and the dispatch. Extent order is `[layer][head][tile]`, and a tile
is `[plane][token][dim]` or packed (`kv.packing`); a *span* is a run of consecutive rows of one request's blocks. What a
request, a chunk or a shard is, is known to callers only, and so is whether the memory behind an address exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headwater.kernels.dispatch import require, triton_missing_reason
from headwater.kernels.pack import packed_bytes
from headwater.kernels.post import fetch

Table = npt.NDArray[np.int64]

SUM_BYTES = 1024
"""What XXH3 adds up before it scrambles."""

TABLES = 5
"""Numbers of every span that a device has."""


class PlaneRow(NamedTuple):
    """One plane of one layer: element (block, token, head, dim) lies at `address + Σ index × stride`, in bytes."""

    address: int
    block: int
    token: int
    head: int
    dim: int


@dataclass(frozen=True)
class Pages:
    """The cache side: where every plane of every layer lies."""

    planes: tuple[tuple[PlaneRow, ...], ...]
    """By layer, then by plane in extent order."""
    row_bytes: tuple[int, ...]
    """Bytes of one token of one head, of each plane."""
    element_bytes: tuple[int, ...]
    block_size: int
    num_blocks: int
    num_heads: int
    device: torch.device

    @cached_property
    def table(self) -> Table:
        """The numbers as [layer, plane, (the fields of PlaneRow, row bytes, row bytes before, element bytes)]."""
        before = np.cumsum(self.row_bytes) - self.row_bytes
        rows = np.array(self.planes, np.int64).reshape(len(self.planes), len(self.row_bytes), 5)
        sizes = np.broadcast_to(np.stack((self.row_bytes, before, self.element_bytes), axis=1), (*rows.shape[:2], 3))
        return np.concatenate((rows, sizes), axis=2).astype(np.int64)

    @cached_property
    def device_table(self) -> Tensor:
        """The same on the device. Uploaded once, at the first use."""
        return torch.from_numpy(self.table).to(self.device)

    @cached_property
    def dense(self) -> bool:
        """Whether the elements of a row lie side by side everywhere."""
        return all(
            plane.dim == element
            for layer in self.planes
            for plane, element in zip(layer, self.element_bytes, strict=True)
        )

    @cached_property
    def alignment(self) -> int:
        """The largest power of two, up to 16, that divides every address and stride and the bytes of every row."""
        # Where rows are dense, the step from one element to the next does not matter, nor does an element's width.
        numbers = self.table[:, :, [0, 1, 2, 3, 5]] if self.dense else self.table
        return common_alignment([int(np.bitwise_or.reduce(numbers, axis=None))])

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one token of one head: all planes."""
        return sum(self.row_bytes)

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Elements of a row, of each plane."""
        return tuple(row // element for row, element in zip(self.row_bytes, self.element_bytes, strict=True))

    @cached_property
    def adds_up(self) -> bool:
        """Whether a gather can leave sums at all: rows of one length, which divides a KiB."""
        row = self.row_bytes[0]
        return self.dense and self.alignment >= 8 and set(self.row_bytes) == {row} and SUM_BYTES % row == 0


@dataclass(frozen=True)
class Spans:
    """Which rows: for each span, its blocks in `blocks`, where in the first of them it begins, and its length."""

    blocks: Table
    first_block: Table
    """By span: index into `blocks`."""
    offset: Table
    """By span: rows of the first block that come before the span."""
    num_rows: Table
    packed_bytes: Table | None = None
    """By span: stored bytes of one packed tile, or 0 where tiles are raw. None: all are raw."""

    def tile_bytes(self, token_bytes: int) -> Table:
        """By span: bytes of one tile as it is stored; `token_bytes` are those of a raw row, all planes."""
        raw = self.num_rows * token_bytes
        return raw if self.packed_bytes is None else np.where(self.packed_bytes > 0, self.packed_bytes, raw)

    def stored_before(self, token_bytes: int) -> Table:
        """By span: bytes of one tile of each span before it. Times layers and heads that is where a compact staging
        buffer has it."""
        sizes = self.tile_bytes(token_bytes)
        return np.cumsum(sizes) - sizes

    @cached_property
    def has_packed(self) -> bool:
        """Whether tiles of any span are packed."""
        return self.packed_bytes is not None and bool(self.packed_bytes.any())

    @cached_property
    def has_raw(self) -> bool:
        """Whether tiles of any span are raw."""
        return self.packed_bytes is None or not self.packed_bytes.all()

    @cached_property
    def total_rows(self) -> int:
        """Rows of all spans."""
        return int(self.num_rows.sum())

    @cached_property
    def max_rows(self) -> int:
        """Rows of the longest span."""
        return int(self.num_rows.max())

    def upload(self, device: torch.device, token_bytes: int) -> Tensor:
        """All of it in one device tensor, on the current stream, without waiting: `TABLES` tables, one number a span in
        each (first block, offset, rows, stored before, packed bytes), and then the blocks."""
        packed = np.zeros_like(self.num_rows) if self.packed_bytes is None else self.packed_bytes
        tables = (self.first_block, self.offset, self.num_rows, self.stored_before(token_bytes), packed)
        return fetch(torch.from_numpy(np.concatenate((*tables, self.blocks))), device)


class ExtentTarget(NamedTuple):
    """The extent side of one span: tile (layer, head) lies at `address + layer × layer_stride + head × head_stride`."""

    address: int
    layer_stride: int
    head_stride: int


@dataclass(frozen=True)
class Compact:
    """The extent side of all spans in one piece: `[span][layer][head][stored tile]` without gaps."""

    address: int
    num_layers: int
    """Layers that it holds; those that are moved are consecutive ones of them."""
    first_layer: int = 0
    """Which of them is the first that is moved."""

    def targets(self, pages: Pages, spans: Spans, num_heads: int) -> list[ExtentTarget]:
        """The same, span by span."""
        found, size = [], pages.token_bytes
        for before, tile in zip(spans.stored_before(size).tolist(), spans.tile_bytes(size).tolist(), strict=True):
            start = before * self.num_layers + self.first_layer * tile
            found.append(ExtentTarget(self.address + start * num_heads, num_heads * tile, tile))
        return found


@dataclass(frozen=True)
class Move:
    """One call: rows of some layers and heads of a cache, and their places in extent order."""

    pages: Pages
    spans: Spans
    layers: range
    """Indices into the layers of `pages`."""
    heads: range
    staged: Compact | Sequence[ExtentTarget]
    device_spans: Tensor | None = None
    """What `spans.upload` returned, where it has been uploaded before."""
    sums: Tensor | None = None
    """Of a gather into compact staging on CUDA: where to leave what XXH3 adds up of every KiB of it, int64 [KiB, 8],
    as far as tiles are raw and lie so (`adds_up`)."""

    def check(self) -> None:
        """Raise InvalidArgumentError where the numbers cannot belong together. Memory is not looked at."""
        require(
            not self.layers
            or (self.layers.step > 0 and self.layers.start >= 0 and self.layers[-1] < len(self.pages.planes)),
            f"ascending layers below {len(self.pages.planes)}",
            layers=self.layers,
        )
        require(
            self.heads.step == 1 and self.heads.start >= 0 and self.heads.stop <= self.pages.num_heads,
            f"consecutive heads below {self.pages.num_heads}",
            heads=self.heads,
        )
        if isinstance(self.staged, Compact):
            first, held = self.staged.first_layer, self.staged.num_layers
            require(0 <= first <= held - len(self.layers), f"{len(self.layers)} of {held} layers", first=first)
        else:
            num_spans = len(self.spans.num_rows)
            require(len(self.staged) == num_spans, f"one target for each of {num_spans} spans", given=len(self.staged))
        if self.spans.packed_bytes is not None:
            self._check_packed(self.spans.packed_bytes)

    def _check_packed(self, sizes: Table) -> None:
        require(len(sizes) == len(self.spans.num_rows), f"{len(self.spans.num_rows)} packed sizes", given=len(sizes))
        halves = set(self.pages.element_bytes) == {2}
        for rows, size in set(zip(self.spans.num_rows.tolist(), sizes.tolist(), strict=True)):
            expected = packed_bytes(self.pages.widths, rows) if halves else 0
            require(size in (0, expected), f"0 or {expected} bytes for a packed tile of {rows} rows", given=size)

    @property
    def targets(self) -> Sequence[ExtentTarget]:
        """The extent side, span by span."""
        if isinstance(self.staged, Compact):
            return self.staged.targets(self.pages, self.spans, len(self.heads))
        return self.staged

    @property
    def num_bytes(self) -> int:
        """Bytes on the extent side of the call."""
        return int(self.spans.tile_bytes(self.pages.token_bytes).sum()) * len(self.layers) * len(self.heads)


def gather_rows(move: Move) -> None:
    """Copy from the cache into extent order, packing where spans are packed. On CUDA one launch for the raw spans and
    one for the packed ones, which do not wait; on the CPU a few strided copies, and every packed tile by itself.

    A tile that does not fit (`pack.packed_fits`) holds garbage. Raises InvalidArgumentError for numbers that do not fit
    together. Addresses are trusted: one that is wrong ends the process, or on CUDA the context.
    """
    _implementation(move.pages.device)(move, scatter=False)


def scatter_rows(move: Move) -> None:
    """Copy from extent order into the cache: the inverse of `gather_rows`. Bytes of no row of a span stay as they
    are. If two spans name one row, one of them wins. A packed tile that `gather_rows` did not write leaves anything in
    the rows of its span, and nothing elsewhere."""
    _implementation(move.pages.device)(move, scatter=True)


def adds_up(pages: Pages, spans: Spans, span: int, bytes_before: int) -> bool:
    """Whether a gather that has `sums` leaves those of a span with so many bytes before it: it is raw, and every plane
    of every tile is whole KiB."""
    is_raw = spans.packed_bytes is None or not spans.packed_bytes[span]
    plane_bytes = int(spans.num_rows[span]) * pages.row_bytes[0]
    return is_raw and pages.adds_up and plane_bytes % SUM_BYTES == bytes_before % SUM_BYTES == 0


def common_alignment(numbers: Iterable[int]) -> int:
    """The largest power of two, up to 16, that divides all of them."""
    together = 16
    for number in numbers:
        together |= number
    return together & -together


# Triton's own are made for kernels and take ten times as long on the host.
def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()


def ceil_div(number: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-number // divisor)


def _implementation(device: torch.device) -> Callable[..., None]:
    if device.type == "cpu":
        from headwater.kernels.extent_cpu import move_rows_cpu

        return move_rows_cpu
    missing = triton_missing_reason()
    require(missing is None, f"Triton for a cache on {device}", but=missing)
    from headwater.kernels.extent_triton import move_rows_triton

    return move_rows_triton
