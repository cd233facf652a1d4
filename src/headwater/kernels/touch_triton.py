"""`touch_rows` in Triton; the contract is in `touch`."""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# ruff: noqa: N803 - compile-time arguments are in capitals, as is the custom in Triton

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.kernels.extent import ceil_div

STEP_BYTES = 1 << 16
"""One word of so many bytes is read: a line of a page table has the entries of sixteen pages."""

_BLOCK = 256


def touch_rows_triton(starts: Tensor, width: int, height: int, pitch: int, device: torch.device) -> None:
    """Read the rows' first word, and one of every further `STEP_BYTES`."""
    per_row = ceil_div(width, STEP_BYTES)
    grid = (len(starts), ceil_div(height * per_row, _BLOCK))
    _touch_kernel[grid](starts, _nowhere(device), per_row, height * per_row, pitch, STEP=STEP_BYTES, BLOCK=_BLOCK)


@lru_cache(maxsize=16)
def _nowhere(device: torch.device) -> Tensor:
    return torch.zeros(_BLOCK, dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=["per_row", "count", "pitch"])
def _touch_kernel(starts, nowhere, per_row, count, pitch, STEP: tl.constexpr, BLOCK: tl.constexpr):
    """Some words of one piece. They are kept only so that the compiler does not leave the reading out."""
    lane = tl.arange(0, BLOCK)
    number = tl.program_id(1) * BLOCK + lane
    start = tl.load(starts + tl.program_id(0)) + (number // per_row).to(tl.int64) * pitch + number % per_row * STEP
    word = tl.load(start.to(tl.pointer_type(tl.int32)), mask=number < count, other=0)
    tl.store(nowhere + lane, word, mask=number < count)
