"""Segments of mapped stores that the device may copy from and into: registered once a process, by whoever comes first.

A view of stored tiles leads to its segment: numpy keeps, as a view's base, the array that covers the whole mapping.
"""

from __future__ import annotations

import contextlib
import logging
import threading

import numpy as np
import numpy.typing as npt
import torch

from headwater.errors import EngineError
from headwater.transfer.copy import register_host, unregister_host

log = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]

_uses: dict[int, int] = {}
_lock = threading.Lock()


class Registered:
    """The segments that one saver or loader uses. Thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[int, Bytes] = {}

    def ensure(self, view: Bytes) -> bool:
        """Register the segment of a view, if it is not yet; False where the driver refuses.

        A microsecond for a segment that is known; about 50 ms a gigabyte for a new one.
        """
        base = view.base
        segment = base if isinstance(base, np.ndarray) else view
        if id(segment) in self._known:
            return True
        if self._device.type == "cuda":
            address = segment.__array_interface__["data"][0]
            with _lock:
                if address not in _uses:
                    try:
                        register_host(segment)
                    except EngineError as error:
                        log.warning("%s; copies go through pinned memory instead", error)
                        return False
                _uses[address] = _uses.get(address, 0) + 1
        self._known[id(segment)] = segment  # held, so that nobody else gets its id or its addresses
        return True

    def close(self) -> None:
        """Let go of all of them; no copy may be under way. Idempotent."""
        known, self._known = self._known, {}
        for segment in known.values() if self._device.type == "cuda" else ():
            address = segment.__array_interface__["data"][0]
            with _lock:
                _uses[address] -= 1
                if not _uses[address]:
                    del _uses[address]
                    with contextlib.suppress(RuntimeError):
                        unregister_host(segment)
