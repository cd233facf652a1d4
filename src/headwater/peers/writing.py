"""The sender's side of one-sided writes: tiles out of the own pool's extents straight into a peer's.

A write that was begun is over when its carrier says so, or when the agent is closed; until then its tiles stay lent. So
whatever goes wrong with a write, the agent is closed first (by `RemoteWriter.write` itself), and the loan and the
connection end afterwards: to the receiver, the end of the connection means that nothing of it is on its way.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np

from headwater.errors import PeerError, PeerTimeoutError, WireError
from headwater.peers.caller import LinkSettings
from headwater.peers.carriers import nixl
from headwater.peers.exposing import Targets
from headwater.peers.tiles import Layout
from headwater.stores.base import Place

log = logging.getLogger("headwater")

_EAGER_TRIES = 200
"""How often a write is helped on before this thread sleeps in between: an engine wants the interpreter, too."""
_PAUSE_S = 0.0001


class RemoteWriter:
    """One session's writes. For one thread, the link's."""

    def __init__(self) -> None:
        """Half a second. Raises PeerError where there is no carrier."""
        self._agent = nixl.Agent()
        self._peer = ""

    def write(
        self,
        places: Sequence[Place],
        layout: Layout,
        targets: Targets,
        deadline: float,
        meanwhile: Callable[[], None],
    ) -> int:
        """Write some chunks' tiles to where the peer wants them; how many chunks those were. Returns when they are
        there, and calls `meanwhile` now and then. Raises PeerError, with the agent closed: nothing is on its way."""
        wanted = [(place, address) for place, address in zip(places, targets.addresses, strict=True) if address]
        try:
            if targets.metadata:
                self._peer = self._agent.meet(targets.metadata)
            if not wanted:
                return 0
            if not self._peer:
                raise WireError("a peer sent addresses for a write, but not its agent")
            for place, _ in wanted:
                self._agent.register(place.segment)
            sources = [place.segment.ctypes.data + place.offset for place, _ in wanted]
            local = _regions(sources, layout)
            remote = _regions([address for _, address in wanted], layout)
            self._await(self._agent.write(self._peer, local, remote), deadline, meanwhile)
        except BaseException:
            self.close()
            raise
        return len(wanted)

    @staticmethod
    def _await(write: nixl.Write, deadline: float, meanwhile: Callable[[], None]) -> None:
        tries = 0
        while not write.is_done():
            tries += 1
            if tries < _EAGER_TRIES:
                continue
            if time.monotonic() > deadline:
                raise PeerTimeoutError("a write to the peer did not end in time")
            meanwhile()
            time.sleep(_PAUSE_S)

    def close(self) -> None:
        """Nothing leaves from now on. Idempotent."""
        self._agent.close()


def open_writer(settings: LinkSettings) -> RemoteWriter | None:
    """A writer where the settings want one and there is one; otherwise everything goes over the connection."""
    if settings.carrier != "nixl":
        return None
    try:
        return RemoteWriter()
    except PeerError as error:
        log.warning("NIXL is not used, pushes go over TCP: %s", error)
        return None


def _regions(bases: Sequence[int], layout: Layout) -> nixl.Regions:
    """What a layout is of extents at these addresses, extent by extent."""
    inside = np.array(layout.regions, np.uint64)
    found = np.zeros((len(bases), len(inside), 3), np.uint64)
    found[:, :, 0] = np.array(bases, np.uint64)[:, None] + inside[:, 0]
    found[:, :, 1] = inside[:, 1]
    return found.reshape(-1, 3)
