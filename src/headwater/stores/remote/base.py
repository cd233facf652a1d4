"""What a remote store must be able to do for us: batches of named, immutable objects, every call under a deadline.

A client knows names and bytes, nothing of KV. It raises BackendError where the backend cannot be used and
DeadlineError where it takes too long; one object that is missing or finds no room is a status.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from headwater.stores.base import Status

Bytes = npt.NDArray[np.uint8]


class ObjectRange(NamedTuple):
    """A range of one object, and where its bytes go: contiguous targets that it fills one after another."""

    name: str
    offset: int
    length: int
    targets: Sequence[Bytes]
    is_whole: bool
    """Whether the range is all of the object."""


Landed = Callable[[int, range], None]
"""Told the number of a span and which of its targets have got their bytes; with none, that the object is not there. It
may be called by several threads at once."""


class NewObject(NamedTuple):
    """An object to be stored: its value is these contiguous parts, one after another."""

    name: str
    parts: Sequence[Bytes]
    is_held: bool = False
    """Whether somebody holds the chunk: let others be evicted before it, as far as the backend can."""

    @property
    def length(self) -> int:
        """Bytes of the value."""
        return sum(part.nbytes for part in self.parts)


class NewManifest(NamedTuple):
    """A manifest to be published if there is none of that name; for a tail also where its length is listed."""

    name: str
    value: bytes
    tail_list: str | None
    num_tokens: int
    is_held: bool = False
    told: bytes = b""
    """An entry for the log, if this is the one that is published."""


class Survey(NamedTuple):
    """Which manifests are there, and the lengths in the tail lists that were asked for."""

    present: list[bool]
    tails: list[tuple[int, ...]]


class BackendUsage(NamedTuple):
    """How full a backend is, as far as it says so; zeros where it does not."""

    used_bytes: int
    capacity_bytes: int


class Notice(NamedTuple):
    """Entries for the log of that name."""

    log: str
    values: Sequence[bytes]


Position = tuple[int, int]
"""A place in a log. They only grow."""


class LogEntries(NamedTuple):
    """Entries of a log after some position, oldest first, and where they end."""

    values: list[bytes]
    position: Position
    missed: bool
    """Whether there may have been others, which are gone."""


LOG_ENTRIES = 4096
"""About so many a log keeps, the newest."""

MAX_TAILS = 8
"""Lengths that a tail list keeps, the newest first."""


class ObjectClient(Protocol):
    """One backend. Thread-safe. Deadlines are values of time.monotonic()."""

    num_writers: int
    """How many batches are best written at a time: one, unless each spends much of its time waiting."""
    has_log: bool
    """Whether it can keep a log that all hosts read. Where it cannot, notices go nowhere."""

    def ping(self, deadline: float) -> None:
        """Return if the backend answers."""

    def survey(self, names: Sequence[str], tail_lists: Sequence[str], deadline: float) -> Survey:
        """One question for a whole prompt. Backends that cannot join the two may look only at the list of the last
        manifest in a row that is there; the others' tails are then empty."""

    def fetch(self, names: Sequence[str], limit: int, deadline: float) -> list[bytes | None]:
        """Small objects, whole. Longer than `limit` is None."""

    def read(self, spans: Sequence[ObjectRange], deadline: float, landed: Landed) -> None:
        """Bring ranges to their targets, and say at once which have landed, so that they can be verified while they are
        in the cache and others arrive. Nothing is written to a target, and nothing said, after the return."""

    def write(self, objects: Sequence[NewObject], deadline: float) -> list[Status]:
        """Store objects: OK, or FULL where there is no room. What fails may be left behind."""

    def publish(self, manifests: Sequence[NewManifest], deadline: float, log: str = "") -> list[Status]:
        """Store manifests, each only if there is none of its name: OK, EXISTS or FULL. What those that are OK have to
        tell goes to the log, if the backend has one; if it is refused there, that is no matter."""

    def remove(self, names: Sequence[str], deadline: float, notice: Notice | None = None) -> None:
        """Forget objects. Those that are not there are no matter. The notice goes along."""

    def read_log(self, log: str, after: Position | None, limit: int, deadline: float) -> LogEntries | None:
        """Entries of a log after a position (None: after its end, to begin there); None where there is no log to be
        had: the backend knows none, or does not let us."""

    def keep(self, names: Sequence[str], pinned: bool, deadline: float) -> None:
        """Note a use; `pinned` keeps the objects until they are unpinned, as far as the backend can."""

    def remove_prefix(self, prefix: str, deadline: float, *, but: str = "") -> int:
        """Forget all objects whose names begin like this, except one; how many there were."""

    def contribute(self) -> None:
        """Give the backend the memory that this host was asked to give, if it takes any. Once is enough."""

    def scan(self, prefix: str, deadline: float) -> Iterator[str]:
        """Names that begin like this. For administrators: it may look at everything. Raises BackendError where the
        backend cannot list."""

    def usage(self, deadline: float) -> BackendUsage:
        """How full it is."""

    def close(self) -> None:
        """Let go. Idempotent."""
