"""Streams and events of a device. On a CPU every call has ended when it returns, so there they do nothing."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch


class DeviceEvent(Protocol):
    """A moment on a stream."""

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


PAST: DeviceEvent = _Past()


class DeviceStream:
    """Work of a device that runs in order: a stream of its own, or the caller's (`current_stream`)."""

    def __init__(self, device: torch.device, *, urgent: bool = False, stream: Any = None) -> None:
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = stream or torch.cuda.Stream(device, priority=-1 if urgent else 0)

    def use(self) -> AbstractContextManager[object]:
        """Work launched inside the `with` runs on this stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def record(self, *, blocking: bool = False) -> DeviceEvent:
        """An event that marks this moment. Waiting for a blocking one leaves the processor to others, and takes some
        microseconds more."""
        if self._stream is None:
            return PAST
        event = torch.cuda.Event(blocking=blocking)
        event.record(self._stream)
        return event

    def wait(self, event: DeviceEvent) -> None:
        """Let later work of this stream wait for an event of another. The caller does not wait."""
        if self._stream is not None:
            self._stream.wait_event(event)


def current_stream(device: torch.device) -> DeviceStream:
    """The stream that the calling thread launches on now."""
    return DeviceStream(device, stream=torch.cuda.current_stream(device) if device.type == "cuda" else None)


SWITCH_S = 0.000001
"""How long a thread may keep the interpreter while another wants it: not at all. A thread that launches work for the
device lets go of the interpreter ten times in a step, and each time a thread that reserves or commits may take it. With
Python's default of five milliseconds the device waits for both."""


def switch_threads_often() -> None:
    """Shorten the interpreter's switch interval, for the whole process. Only for processes that are Headwater's own: in
    another engine's process the interval is left alone."""
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))


def enter_thread(device: torch.device) -> None:
    """Make a device the calling thread's own."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def pinned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Host memory that this device copies from and into without waiting."""
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")
