"""Checksums of staged tiles, computed and compared where the tiles lie."""

from __future__ import annotations

import torch
from torch import Tensor

from headwater.errors import BufferMismatchError
from headwater.kernels.extent import SUM_BYTES, adds_up
from headwater.kernels.pack import packed_fits
from headwater.kernels.xxh3 import finish_tiles, xxh3_tiles
from headwater.transfer.convert import ConversionPlan


def staged_checksums(plan: ConversionPlan, flat: Tensor, num_layers: int, added_up: Tensor | None = None) -> Tensor:
    """XXH3-64 of every tile in flat staging: int64 (spans, layers, heads) on its device, without waiting.

    On CUDA: two launches for each of `plan.groups`; one where the gather has left its sums (`added_up`) and could.
    `kernels.xxh3.unsigned` makes the numbers that a commit takes.
    """

    needed = plan.staged_bytes(num_layers)
    if flat.dim() != 1 or flat.dtype != torch.uint8 or not flat.is_contiguous() or flat.numel() < needed:
        raise BufferMismatchError(
            f"expected at least {needed} contiguous bytes of staging, got {flat.dtype} of shape {tuple(flat.shape)}"
        )
    shape = (plan.num_spans, num_layers, len(plan.shard.heads))
    sums = torch.empty(shape, dtype=torch.int64, device=flat.device)
    for group, tiles in zip(plan.groups, plan.staged(flat, num_layers), strict=True):
        start, out = tiles.data_ptr() - flat.data_ptr(), sums[group.start : group.stop]
        if added_up is not None and adds_up(plan.view.pages, plan.spans, group.start, start):
            finish_tiles(tiles, added_up[start // SUM_BYTES :], out)
        else:
            xxh3_tiles(tiles, out)
    return sums


def verify_staged(plan: ConversionPlan, flat: Tensor, num_layers: int, expected: Tensor) -> Tensor:
    """Whether every tile in flat staging is what `expected`, int64 (spans, layers, heads), says: bool of that shape.

    Does not wait: the answer lies on the device too.
    """
    sums = staged_checksums(plan, flat, num_layers)
    if expected.shape != sums.shape or expected.dtype != sums.dtype or expected.device != sums.device:
        raise BufferMismatchError(
            f"expected checksums are {expected.dtype} of shape {tuple(expected.shape)} on {expected.device}; the tiles "
            f"need {sums.dtype} of shape {tuple(sums.shape)} on {sums.device}"
        )
    good = sums == expected
    fits = staged_fits(plan, flat, num_layers)
    return good if fits is None else good & fits


def staged_fits(plan: ConversionPlan, flat: Tensor, num_layers: int) -> Tensor | None:
    """Whether every packed tile in flat staging can be read: bool (spans, layers, heads)
    on its device, without waiting. None where no tile is packed."""
    if plan.spans.packed_bytes is None:
        return None
    fits = torch.ones((plan.num_spans, num_layers, len(plan.shard.heads)), dtype=torch.bool, device=flat.device)
    for group, tiles in zip(plan.groups, plan.staged(flat, num_layers), strict=True):
        if plan.is_packed(group.start):
            rows = int(plan.spans.num_rows[group.start])
            fits[group.start : group.stop] = packed_fits(tiles, plan.view.spec.widths, rows)
    return fits
