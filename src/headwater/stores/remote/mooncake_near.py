"""Objects that lie in the memory which this very process gave to a Mooncake cluster: they are read where they are.

The library would copy them with a thread of its own into memory that it may write to whenever it likes, and we from
there to the caller. Here the caller's thread copies them once, and what it copied is still in its cache when it is
verified.
To ask where objects lie is to lease them, so that they stay meanwhile; what went nevertheless fails its checksums.
"""

from __future__ import annotations

import contextlib
import ctypes
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from headwater.errors import DeadlineError
from headwater.stores.remote.base import Bytes, Landed, ObjectRange
from headwater.stores.workers import run_in_threads

_PROBE_BYTES = 64
_THREADS = 2
_ALONE_BELOW = 4 << 20


class NearMemory:
    """One process's own segment: the address under which the cluster knows it, and its bytes here."""

    def __init__(self, endpoint: str, start: int, end: int) -> None:
        self.endpoint = endpoint
        self._start = start
        self._bytes: Bytes = np.ctypeslib.as_array((ctypes.c_uint8 * (end - start)).from_address(start))
        self._users = 0
        self._closed = False
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[bool]:
        """The memory stays until the end of the `with`, if this is True."""
        with self._lock:
            open_, self._users = not self._closed, self._users + 1
        try:
            yield open_
        finally:
            with self._lock:
                self._users -= 1

    def close(self) -> bool:
        """Let nobody in any more; whether nobody is inside."""
        with self._lock:
            self._closed = True
            return not self._users

    def locate(self, replicas: Mapping[str, Sequence[Any]], spans: Sequence[ObjectRange]) -> dict[int, int]:
        """Which spans lie here, and where their bytes begin."""
        found = {}
        for number, span in enumerate(spans):
            for replica in replicas.get(span.name, ()):
                if not replica.is_memory_replica() or replica.status.name != "COMPLETE":
                    continue
                place = replica.get_memory_descriptor().buffer_descriptor
                at = place.buffer_address - self._start + span.offset
                fits = span.offset + span.length <= place.size and 0 <= at <= self._bytes.size - span.length
                if place.transport_endpoint == self.endpoint and fits:
                    found[number] = at
                    break
        return found

    def land(self, spans: Sequence[ObjectRange], places: Mapping[int, int], deadline: float, landed: Landed) -> None:
        """Copy spans to their targets, in two threads: one alone cannot use the memory's bandwidth. The memory must be
        in use."""

        def copy(number: int, at: int) -> None:
            if time.monotonic() >= deadline:
                raise DeadlineError("no time is left")
            for i, target in enumerate(spans[number].targets):
                np.copyto(target, source[at : at + target.size])
                landed(number, range(i, i + 1))
                at += target.size

        source = self._bytes
        length = sum(spans[number].length for number in places)
        works = (partial(copy, number, at) for number, at in places.items())
        run_in_threads(works, _THREADS if length > _ALONE_BELOW else 1)


def find_near(store: Any, replication: Any) -> NearMemory | None:
    """Where the memory that `store` has just given lies: found out with an object that is put there and removed.

    None where it cannot be said, or where the object went elsewhere. Takes a few round trips to the master.
    """
    name, content = f"headwater-probe-{secrets.token_hex(8)}", secrets.token_bytes(_PROBE_BYTES)
    if store.put(name, content, replication) != 0:
        return None
    try:
        replicas = store.batch_get_replica_desc([name]).get(name, ())
        places = [r.get_memory_descriptor().buffer_descriptor for r in replicas if r.is_memory_replica()]
        for place in places:
            area = _mapping(place.buffer_address)
            # Another process may have something else at the same address.
            if area is not None and ctypes.string_at(place.buffer_address, len(content)) == content:
                return NearMemory(place.transport_endpoint, *area)
    finally:
        store.remove(name, True)
    return None


def _mapping(address: int) -> tuple[int, int] | None:
    """The mapped area of this process, readable and writable, in which an address lies."""
    with open("/proc/self/maps", encoding="ascii", errors="replace") as file:
        for line in file:
            area, rights = line.split(" ", 2)[:2]
            start, end = (int(number, 16) for number in area.split("-"))
            if start <= address and address + _PROBE_BYTES <= end:
                return (start, end) if rights.startswith("rw") else None
    return None
