"""Translations of host memory, brought into a device's cache before a copy engine needs them.

A copy engine that writes rows far apart into host memory stops at each row until its pages are translated: 48 GB/s
instead of 54 on an H200 for rows of 128 KiB, one in each MiB. If a kernel has read a word of every few pages a moment
before, the page tables' entries lie in the device's cache, and the engine does not stop.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwater.kernels.dispatch import triton_missing_reason
from headwater.kernels.post import hold


def touch_rows(starts: Tensor, width: int, height: int, pitch: int, device: torch.device) -> None:
    """Read a little of `height` rows of `width` bytes at one pitch from each of some addresses (int64, on the host).

    One launch on the current stream, without waiting; nothing at all where Triton cannot run. What is read is of no
    consequence and may be written meanwhile. Addresses are trusted: they lie in memory registered with the device.
    """
    if device.type != "cuda" or triton_missing_reason() is not None or not (len(starts) and width and height):
        return
    from headwater.kernels.touch_triton import touch_rows_triton

    pinned = starts.pin_memory()
    touch_rows_triton(pinned, width, height, pitch, device)
    hold(pinned, device)
