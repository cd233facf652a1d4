"""Small numbers between the device and the host, past the copy engines.

A copy engine works in order: behind some hundred megabytes on their way to or from the pool, a copy of a few kilobytes
waits for milliseconds, and with it whatever its stream would compute next. A kernel that reads or writes pinned memory
waits for nothing but its own stream.
"""

from __future__ import annotations

import threading
from collections import deque

import torch
from torch import Tensor

from headwater.kernels.dispatch import require, runs_triton

_held = threading.local()
"""By thread: pinned memory that a kernel may still read, oldest first, each with the event that ends it."""


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


def fetch(source: Tensor, device: torch.device) -> Tensor:
    """A contiguous tensor of the host, at most some megabytes, on a device; `source` itself where that is the host.

    On CUDA one launch on the current stream, without waiting; the caller need not keep `source`. Raises
    InvalidArgumentError where it does not lie on the host in one piece.
    """
    require(source.device.type == "cpu" and source.is_contiguous(), "a contiguous tensor on the host", source=source)
    if device.type == "cpu":
        return source
    target = torch.empty(source.shape, dtype=source.dtype, device=device)
    pinned = source.pin_memory()
    if not runs_triton(target):
        return target.copy_(pinned, non_blocking=True)
    from headwater.kernels.post_triton import post_triton

    post_triton(pinned, target)
    hold(pinned, device)
    return target


def post_torch(source: Tensor, target: Tensor) -> None:
    """`post` by torch, from any device; where that is a GPU, by a copy engine."""
    target.copy_(source, non_blocking=True)


def as_bytes(tensor: Tensor) -> Tensor:
    """Truth values as the bytes that they are."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def hold(pinned: Tensor, device: torch.device) -> None:
    """Keep pinned memory until the current stream has got past this. Torch, which counts its own copies, knows of no
    kernel's reads, and would give it to somebody else."""
    waiting: deque[tuple[torch.cuda.Event, Tensor]] | None = getattr(_held, "waiting", None)
    if waiting is None:
        waiting = _held.waiting = deque()
    while waiting and waiting[0][0].query():
        waiting.popleft()
    waiting.append((torch.cuda.current_stream(device).record_event(), pinned))
