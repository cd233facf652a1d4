"""Which evictable chunk goes first. Only leaves are ever offered, so no policy can leave a child without its parent."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from headwater.errors import UrlError
from headwater.redaction import show_value

Column = npt.NDArray[np.int64]


class Leaves(NamedTuple):
    """Columns over chunks that may be evicted: complete, childless, neither pinned nor leased."""

    last_used_ns: Column
    """Never in the future."""
    created_ns: Column
    """Never after the last use."""
    is_tail: npt.NDArray[np.bool_]


class EvictionPolicy(Protocol):
    """An order over leaves. A leaf's parent inherits its last use, so a prefix is as young as its youngest user."""

    name: str

    def rank(self, leaves: Leaves) -> Column:
        """The lowest goes first."""


class Lru:
    """Least recently used. A tail counts as a minute older than it is, so it goes before full chunks of its age."""

    name = "lru"
    tail_handicap_ns = 60_000_000_000

    def rank(self, leaves: Leaves) -> Column:
        return leaves.last_used_ns - np.where(leaves.is_tail, self.tail_handicap_ns, 0)


class Fifo:
    """First in, first out: for workloads whose reuse comes soon or never."""

    name = "fifo"

    def rank(self, leaves: Leaves) -> Column:
        return leaves.created_ns


POLICIES: dict[str, type[EvictionPolicy]] = {policy.name: policy for policy in (Lru, Fifo)}
"""Policies by the name that a URL gives (`?policy=lru`)."""


def create_policy(name: str) -> EvictionPolicy:
    """The policy of that name. Raises UrlError where there is none."""
    if name not in POLICIES:
        raise UrlError(f"unknown eviction policy {show_value(name)!r}; known are {', '.join(POLICIES)}")
    return POLICIES[name]()
