"""Segments of mapped stores that the device may copy from and into: registered once, by whoever comes first."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading

import numpy as np
import numpy.typing as npt
import torch

from headwater.errors import EngineError, HeadwaterError
from headwater.pool.space import Space
from headwater.transfer.copy import register_host, unregister_host
from headwater.transfer.streams import enter_thread

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


class Preparer:
    """Gets a store's segments and registers them before they are needed, in a thread: it takes a third of a second a
    gigabyte, in which the ring would be full and saves dropped."""

    def __init__(self, space: Space, segments: Registered, device: torch.device) -> None:
        self._space = space
        self._segments = segments
        self._device = device
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="headwater-device-segments", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        enter_thread(self._device)
        with contextlib.suppress(HeadwaterError, OSError):
            for number in itertools.count():
                segment = None if self._closing else self._space.segment(number)
                if segment is None or self._segments.address(segment) is None:
                    return

    def wait(self) -> None:
        """Wait until all segments are there. For measurements."""
        self._thread.join()

    def close(self, timeout_s: float) -> None:
        """Stop after the segment that is being prepared. Idempotent."""
        self._closing = True
        self._thread.join(timeout_s)
