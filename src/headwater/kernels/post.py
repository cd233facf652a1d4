"""Small answers from the device to the host, past the copy engines.

A copy engine works in order: behind some hundred megabytes that leave for the pool, a copy of a few kilobytes waits for
milliseconds. A kernel that stores into pinned memory waits for nothing but its own stream.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwater.kernels.dispatch import require, runs_triton


def post(source: Tensor, target: Tensor) -> None:
    """Copy a contiguous tensor into `target`: host memory, pinned where the source is on a GPU; at most some kilobytes.

    On CUDA one launch on the current stream, without waiting: the answer is there when the stream has got past it.
    Raises InvalidArgumentError where the two do not fit each other.
    """
    require(
        source.shape == target.shape
        and source.dtype == target.dtype
        and source.is_contiguous()
        and target.is_contiguous()
        and target.device.type == "cpu",
        "contiguous tensors of one shape and type, the target on the host",
        source=source,
        target=target,
    )
    if runs_triton(source):
        from headwater.kernels.post_triton import post_triton

        post_triton(source, target)
    else:
        post_torch(source, target)


def post_torch(source: Tensor, target: Tensor) -> None:
    """`post` by torch, from any device; where that is a GPU, by a copy engine."""
    target.copy_(source, non_blocking=True)


def as_bytes(tensor: Tensor) -> Tensor:
    """Truth values as the bytes that they are."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
