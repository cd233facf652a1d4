"""What happens in a remote store, told to the other hosts that share it: entries of one log beside the chunks.

The log is bounded and may be forgotten by its server: who misses something is told so and looks at the pool instead. An
entry says which host it comes from, so that nobody hears of its own doings twice. Whatever else stands in the log is
passed over.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

from headwater.kv.format import checksum
from headwater.kv.hashing import KEY_BYTES
from headwater.stores.events import EventKind
from headwater.stores.remote.base import Notice
from headwater.stores.remote.manifest import Manifest, Names

MAGIC = b"HWE1"
ORIGIN_BYTES = 8
_ENTRY = struct.Struct("<4s8sB3xII32s")
_SUM = struct.Struct("<Q")
ENTRY_BYTES = _ENTRY.size + _SUM.size
_LOGGED = (EventKind.STORED, EventKind.REMOVED, EventKind.CLEARED)


class LogEvent(NamedTuple):
    """One event. Without a key: to everything, or nobody knows to what."""

    kind: EventKind
    key: bytes = b""
    number: int = 0
    num_tokens: int = 0

    @classmethod
    def of(cls, kind: EventKind, manifest: Manifest) -> LogEvent:
        """What happened to the chunk of that manifest."""
        return cls(kind, manifest.key, manifest.number, manifest.num_tokens)

    def encode(self, origin: bytes) -> bytes:
        """As it stands in the log."""
        body = _ENTRY.pack(MAGIC, origin, self.kind, self.number, self.num_tokens, self.key)
        return body + _SUM.pack(checksum(body))


def decode(raw: bytes) -> tuple[bytes, LogEvent] | None:
    """The origin and the event that `LogEvent.encode` wrote; None for anything else."""
    body = raw[: _ENTRY.size]
    if len(raw) != ENTRY_BYTES or _SUM.unpack(raw[_ENTRY.size :])[0] != checksum(body):
        return None
    magic, origin, kind, number, num_tokens, key = _ENTRY.unpack(body)
    if magic != MAGIC or kind not in _LOGGED:
        return None
    return origin, LogEvent(EventKind(kind), key if key != bytes(KEY_BYTES) else b"", number, num_tokens)


Listener = Callable[[Sequence[LogEvent]], None]


class Announcer:
    """What one process tells the log and its own host."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self.origin = os.urandom(ORIGIN_BYTES)
        """Which host this is. Processes that share a first tier share it, too."""
        self.listeners: list[Listener] = []
        """Called after something has happened, in the thread that did it."""

    def notice(self, events: Sequence[LogEvent]) -> Notice:
        """For the client, to go along with what is done."""
        return Notice(self._names.log, [event.encode(self.origin) for event in events])

    def happened(self, events: Sequence[LogEvent]) -> None:
        """It is done: tell this host."""
        for listener in self.listeners if events else ():
            listener(events)

    def foreign(self, values: Sequence[bytes]) -> list[LogEvent]:
        """What others did, of entries of the log."""
        found = [decode(value) for value in values]
        return [entry[1] for entry in found if entry is not None and entry[0] != self.origin]
