"""Segments of mapped stores that the device may copy from and into: registered once, by whoever comes first."""

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
        self._known: dict[int, tuple[int, Bytes]] = {}

    def address(self, segment: Bytes) -> int | None:
        """Where a segment begins, registered if it was not yet; None where the driver refuses.

        A fraction of a microsecond for a segment that is known; about 50 ms a gigabyte for a new one.
        """
        known = self._known.get(id(segment))
        if known is not None:
            return known[0]
        address = int(segment.__array_interface__["data"][0])
        with _lock:
            if id(segment) in self._known:  # another thread was faster
                return address
            if self._device.type == "cuda":
                if address not in _uses:
                    try:
                        register_host(segment)
                    except EngineError as error:
                        log.warning("%s; copies go through pinned memory instead", error)
                        return None
                _uses[address] = _uses.get(address, 0) + 1
            self._known[id(segment)] = address, segment  # held, so that nobody else gets its id or its addresses
        return address

    def close(self) -> None:
        """Let go of all of them; no copy may be under way. Idempotent."""
        known, self._known = self._known, {}
        for address, segment in known.values() if self._device.type == "cuda" else ():
            with _lock:
                _uses[address] -= 1
                if not _uses[address]:
                    del _uses[address]
                    with contextlib.suppress(RuntimeError):
                        unregister_host(segment)
