"""Streams and events of a device, and nothing at all on a CPU, where every call has ended when it returns."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch


class Mark(Protocol):
    """A moment on a lane."""

    def synchronize(self) -> None:
        """Wait until the device has got there."""

    def query(self) -> bool:
        """Whether it has."""


class _Past:
    """A moment that is over."""

    def synchronize(self) -> None:
        return

    def query(self) -> bool:
        return True


OVER: Mark = _Past()


class Lane:
    """Work of a device that runs in order: a stream of its own, or of the caller's (`current_lane`)."""

    def __init__(self, device: torch.device, *, urgent: bool = False, stream: Any = None) -> None:
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = stream or torch.cuda.Stream(device, priority=-1 if urgent else 0)

    def use(self) -> AbstractContextManager[object]:
        """What is launched inside the `with` runs on this lane."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def mark(self, *, blocking: bool = False) -> Mark:
        """This moment. Waiting for a blocking one leaves the processor to others, and takes some microseconds more."""
        if self._stream is None:
            return OVER
        event = torch.cuda.Event(blocking=blocking)
        event.record(self._stream)
        return event

    def wait(self, mark: Mark) -> None:
        """Let what follows on this lane wait for a moment on another. The caller does not wait."""
        if self._stream is not None:
            self._stream.wait_event(mark)


def current_lane(device: torch.device) -> Lane:
    """The lane that the calling thread launches on now."""
    return Lane(device, stream=torch.cuda.current_stream(device) if device.type == "cuda" else None)


SWITCH_S = 0.000001
"""How long a thread may keep the interpreter while another wants it: not at all. Whoever launches work for the device
lets go of the interpreter ten times in a step, and each time a thread that reserves or commits may take it. With
Python's five milliseconds the device waits for both; with a fifth of one, matrix products beside saving still took
1.05 times their time on an H200, and with this 1.02."""


def enter_thread(device: torch.device) -> None:
    """Make a device the calling thread's own."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))


def pinned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Host memory that this device copies from and into without waiting."""
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")
