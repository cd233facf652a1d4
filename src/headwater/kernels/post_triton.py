"""`post` and `fetch` in Triton; the contracts are in `post`."""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# ruff: noqa: N803 - compile-time arguments are in capitals, as is the custom in Triton

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headwater.kernels.extent import ceil_div
from headwater.kernels.post import as_bytes

_BLOCK = 1024


def post_triton(source: Tensor, target: Tensor) -> None:
    """Either way, between pinned memory, which has one address on the host and on the device, and a device's own."""
    count = source.numel()
    if count:
        _post_kernel[(ceil_div(count, _BLOCK),)](as_bytes(source), as_bytes(target), count, BLOCK=_BLOCK)


@triton.jit(do_not_specialize=["count"])
def _post_kernel(source, target, count, BLOCK: tl.constexpr):
    """Some elements, one after another."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)
