"""Plain data that a store gives to people and to metrics: listings, figures, and the result of a full check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from headwater.redaction import HIDDEN


class ChunkInfo(NamedTuple):
    """One complete chunk, for listings."""

    key: bytes
    space: dict[str, Any]
    root: dict[str, Any]
    number: int
    num_tokens: int
    num_bytes: int
    is_tail: bool
    pinned: bool
    leased: bool
    last_used_ns: int
    hits: int = 0
    """Requests that loaded the prefix which ends with this chunk; only embedded stores count them."""


class PrefixInfo(NamedTuple):
    """One stretch of a pool's chains without a fork: what several prompts begin with, or the rest of a single one.
    Tails belong to the stretch that they continue."""

    key: bytes
    """Of its deepest chunk, which names the whole prefix."""
    root: dict[str, Any]
    first_token: int
    num_tokens: int
    """Of the whole prefix, from the first token of the prompt to the end of the stretch."""
    num_chunks: int
    num_bytes: int
    """Of the stretch alone, as the chunks before it belong to others too."""
    branches: int
    """Stretches that continue this one."""
    hits: int
    """Requests that loaded it, or more than it."""
    last_used_ns: int


class HolderInfo(NamedTuple):
    """What one model, tenant and adapter have in a pool."""

    root: dict[str, Any]
    num_chunks: int
    num_tokens: int
    num_bytes: int
    hits: int
    last_used_ns: int


class HitInfo(NamedTuple):
    """A prefix that requests have begun to load."""

    key: bytes
    root: dict[str, Any]
    num_tokens: int
    num_requests: int


@dataclass(frozen=True)
class TierStats:
    """What one process did with one tier, and whether the tier is in use. Figures of the copying are those of the one
    process that does it."""

    url: str
    write: str
    """How it is filled: `first`, `through`, `back`, `demote`, or `never` (it is only read)."""
    hits: int = 0
    hit_bytes: int = 0
    misses: int = 0
    fetched: int = 0
    """Chunks that were brought from here into the first tier."""
    stored: int = 0
    stored_bytes: int = 0
    waiting: int = 0
    """Chunks known to be missing here, to be copied."""
    dropped: int = 0
    """Chunks that were gone from the first tier before they could be copied."""
    full: int = 0
    failed: int = 0
    damaged: int = 0
    breaker: str = "closed"
    breaker_trips: int = 0
    breaker_reason: str = ""
    events: str = "host"
    """Whose events of this tier reach followers here: `host` (all processes of this one), `fleet` (all hosts) or
    `none`."""
    heard: int = 0
    """Events of other hosts that this process has brought."""
    host_wide: tuple[str, ...] = ()
    """Of the figures above: those that all processes of this host count together, and see alike."""

    @property
    def name(self) -> str:
        """Scheme and place, without account and options: what metrics call the tier."""
        return self.url.partition("?")[0].replace(f"{HIDDEN}@", "")

    @property
    def is_breaker_open(self) -> bool:
        """Whether the tier is left alone for now."""
        return self.breaker != "closed"

    def shares(self, name: str) -> bool:
        """Whether this figure is the whole host's, and not this process's own."""
        return name in self.host_wide


@dataclass(frozen=True)
class StoreStats:
    """A store at one moment. Byte counts are exact; event counts are since the store was created, or since noise in the
    index destroyed them."""

    url: str
    capacity_bytes: int
    data_bytes: int
    used_bytes: int
    pending_bytes: int
    index_bytes: int
    index_used_bytes: int
    chunks: int
    members: int
    stored: int
    stored_bytes: int
    evicted: int
    damaged: int
    aborted: int
    rebuilds: int
    stored_raw_bytes: int = 0
    """What `stored_bytes` would be if nothing were packed."""
    tiers: tuple[TierStats, ...] = ()
    """Fastest first; empty where there is one only."""

    @property
    def packed_share(self) -> float:
        """Stored bytes over raw bytes, of all chunks ever stored: 1 where nothing was packed."""
        return self.stored_bytes / self.stored_raw_bytes if self.stored_raw_bytes else 1.0

    @property
    def name(self) -> str:
        """The URLs of all tiers."""
        return ",".join(tier.url for tier in self.tiers) or self.url


@dataclass(frozen=True)
class VerifyReport:
    """What a full check found. `clean` means that nothing was wrong in what was checked; damaged chunks have been
    removed."""

    chunks: int
    tiles: int
    bytes: int
    damaged: int
    lost: int
    """Good chunks that continued a damaged one, and went with it."""
    problems: tuple[str, ...]
    unchecked: tuple[str, ...] = ()
    """Tiers that could not be looked through, and why."""

    @property
    def clean(self) -> bool:
        """No damage and no broken invariant."""
        return not self.damaged and not self.problems
