"""What a remote store must be able to do for us: batches of named, immutable objects, every call under a deadline.

A client knows names and bytes, nothing of KV. It raises BackendError where the backend cannot be used and
DeadlineError where it takes too long; one object that is missing or finds no room is a status.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from headwater.stores.base import Status

Bytes = npt.NDArray[np.uint8]


class Span(NamedTuple):
    """A range of one object, and where its bytes go: contiguous targets that it fills one after another."""

    name: str
    offset: int
    length: int
    targets: Sequence[Bytes]
    is_whole: bool
    """Whether the range is all of the object."""


class Landed(NamedTuple):
    """Some targets of a span have got their bytes, or (with none) the object is not there."""

    span: int
    targets: range


class NewObject(NamedTuple):
    """An object to be stored: its value is these contiguous parts, one after another."""

    name: str
    parts: Sequence[Bytes]

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


class Survey(NamedTuple):
    """Which manifests are there, and the lengths in the tail lists that were asked for."""

    present: list[bool]
    tails: list[tuple[int, ...]]


class Usage(NamedTuple):
    """How full a backend is, as far as it says so; zeros where it does not."""

    used_bytes: int
    capacity_bytes: int
    num_objects: int


MAX_TAILS = 8
"""Lengths that a tail list keeps, the newest first."""


class ObjectClient(Protocol):
    """One backend. Thread-safe. Deadlines are values of time.monotonic()."""

    def ping(self, deadline: float) -> None:
        """Return if the backend answers."""

    def survey(self, names: Sequence[str], tail_lists: Sequence[str], deadline: float) -> Survey:
        """One question for a whole prompt. Backends that cannot join the two may look only at the list of the last
        manifest in a row that is there; the others' tails are then empty."""

    def fetch(self, names: Sequence[str], limit: int, deadline: float) -> list[bytes | None]:
        """Small objects, whole. Longer than `limit` is None."""

    def read(self, spans: Sequence[Span], deadline: float) -> Iterator[Landed]:
        """Bring ranges to their targets, and say which have landed, so that they can be verified while they are in the
        cache and others arrive. Nothing is written to a target after the generator has ended, however it ended."""

    def write(self, objects: Sequence[NewObject], deadline: float) -> list[Status]:
        """Store objects: OK, or FULL where there is no room. What fails may be left behind."""

    def publish(self, manifests: Sequence[NewManifest], deadline: float) -> list[Status]:
        """Store manifests, each only if there is none of its name: OK, EXISTS or FULL."""

    def remove(self, names: Sequence[str], deadline: float) -> None:
        """Forget objects. Those that are not there are no matter."""

    def keep(self, names: Sequence[str], pinned: bool, deadline: float) -> None:
        """Note a use; `pinned` keeps the objects until they are unpinned, as far as the backend can."""

    def remove_prefix(self, prefix: str, deadline: float) -> int:
        """Forget all objects whose names begin like this; how many there were."""

    def contribute(self) -> None:
        """Give the backend the memory that this host was asked to give, if it takes any. Once is enough."""

    def scan(self, prefix: str, deadline: float) -> Iterator[str]:
        """Names that begin like this. For administrators: it may look at everything. Raises BackendError where the
        backend cannot list."""

    def usage(self, deadline: float) -> Usage:
        """How full it is."""

    def close(self) -> None:
        """Let go. Idempotent."""
