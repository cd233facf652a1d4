"""The receiver's side of one-sided writes: extents that a session's sender may write to, and when that is over.

    WRITE      the sender asks where some layers go. The extents are fenced from here on (`Landing.enter`)
    …          it writes; this process only lets its carrier get on
    WRITTEN    the sender says that the carrier has reported the end: checksums are noted, the fence is lifted

If WRITTEN does not come, nobody knows what is on its way. Then this session's agent is closed, after which nothing
lands through it; and the extents stay fenced until the connection ends from the other side. A sender ends it, or dies,
only after its own agent has gone. No time lifts the fence: a sender that is stopped keeps its extents (in the peers'
share of the pool's pending room) until it goes on or dies.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from headwater.errors import PeerTimeoutError, WireError
from headwater.peers.carriers import nixl
from headwater.peers.carriers.tcp import Connection
from headwater.peers.landing import Landing, PushedPart
from headwater.stores.base import Place

MAX_EXPOSED = 64
"""Writes of one session at a time."""
EAGER_TRIES = 100
"""How often a write is helped on without a pause, before this thread gives the processor away in between."""
_NUMBER = struct.Struct("<I")
_ADDRESSES = struct.Struct("<I")


@dataclass(frozen=True)
class Targets:
    """The answer to WRITE: where each chunk's extent begins in the receiver's process, 0 where it is not wanted."""

    addresses: Sequence[int]
    metadata: bytes = b""
    """Of the receiver's agent, where the sender has not seen it as it is now."""

    def encode(self) -> bytes:
        """The body of the answer."""
        return _ADDRESSES.pack(len(self.addresses)) + np.asarray(self.addresses, "<u8").tobytes() + self.metadata

    @classmethod
    def decode(cls, body: bytes, count: int) -> Targets:
        """Read what `encode` wrote, for so many chunks. Raises WireError for anything else."""
        end = _ADDRESSES.size + 8 * count
        if len(body) < end or _ADDRESSES.unpack_from(body)[0] != count or len(body) - end > nixl.MAX_METADATA:
            raise WireError("an answer that does not fit its write")
        return cls(np.frombuffer(body, "<u8", count, _ADDRESSES.size).tolist(), body[end:])


def encode_written(number: int) -> bytes:
    """The meta part of a WRITTEN frame: the number of the WRITE."""
    return _NUMBER.pack(number)


def decode_written(meta: bytes) -> int:
    """Read what `encode_written` wrote. Raises WireError for anything else."""
    if len(meta) != _NUMBER.size:
        raise WireError("a WRITTEN frame has the wrong size")
    return int(_NUMBER.unpack(meta)[0])


class Exposure:
    """See the module. For the thread of the session's connection; `close` and `settle` come last."""

    def __init__(self, landing: Landing) -> None:
        """Raises PeerError where there is no carrier."""
        self._landing = landing
        self._agent = nixl.Agent()
        self._open: dict[int, list[PushedPart]] = {}
        """By number of their WRITE: parts that may be written to."""

    @property
    def is_open(self) -> bool:
        """Whether something may be written now."""
        return bool(self._open)

    def expose(self, number: int, entered: Sequence[PushedPart], places: Sequence[Place | None]) -> Targets:
        """Let these places be written to; `entered` are their parts, fenced already, and are this object's now."""
        if number in self._open or len(self._open) >= MAX_EXPOSED:
            self._landing.leave(entered)
            raise WireError(f"a write has a number that is in use, or more than {MAX_EXPOSED} writes are open")
        self._open[number] = list(entered)
        is_new = [self._agent.register(place.segment) for place in places if place is not None]
        addresses = [0 if place is None else place.segment.ctypes.data + place.offset for place in places]
        return Targets(addresses, self._agent.metadata() if any(is_new) else b"")

    def written(self, number: int) -> list[PushedPart]:
        """A write is over: its parts, which the caller leaves when their checksums are noted."""
        parts = self._open.pop(number, None)
        if parts is None:
            raise WireError("the end of a write that was not begun")
        return parts

    def help_on(self, connection: Connection, is_over: Callable[[], bool]) -> None:
        """Until the sender says something: let its writes get on. Raises PeerTimeoutError once `is_over` says so."""
        tries = 0
        while self._open and not connection.is_readable(0.0 if tries < EAGER_TRIES else 0.001):
            self._agent.progress()
            tries += 1
            if tries % 64 == 0 and is_over():
                raise PeerTimeoutError("the peer sent nothing in time")

    def settle(self, connection: Connection, is_over: Callable[[], bool]) -> None:
        """The session is over. Lift what is left of the fence when the other side has ended the connection; where
        `is_over` says so before, it stays for as long as this process lives."""
        self._agent.close()
        if self._open:
            self._landing.counts["writes_unsettled"] += len(self._open)
        while self._open and not connection.has_ended():
            if is_over():
                return
        parts, self._open = [part for some in self._open.values() for part in some], {}
        if parts:
            self._landing.counts["writes_settled"] += 1
            self._landing.leave(parts)
