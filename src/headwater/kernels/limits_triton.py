"""What a device allows a Triton program, for kernels that choose how their work is cut."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from triton.runtime import driver


class DeviceLimits(NamedTuple):
    """What the cutting of work depends on."""

    num_sms: int
    shared_bytes: int
    """Shared memory that one block may use."""


def device_limits(device: torch.device) -> DeviceLimits:
    """The limits of a CUDA device, or stand-ins for the interpreter."""
    if device.type != "cuda":
        return DeviceLimits(num_sms=1, shared_bytes=48 * 1024)
    return _cuda_limits(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _cuda_limits(index: int) -> DeviceLimits:
    properties = driver.active.utils.get_device_properties(index)
    return DeviceLimits(properties["multiprocessor_count"], properties["max_shared_mem"])
