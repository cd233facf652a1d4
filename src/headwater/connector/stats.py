"""Counts of what one rank moved between its cache and the pool."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransferStats:
    """What one rank moved."""

    loaded_bytes: int = 0
    saved_bytes: int = 0
    load_seconds: float = 0.0
    num_dropped: int = 0
    """Chunks that were not saved, because staging was full or the pool failed."""
    num_damaged: int = 0
    """Chunks whose bytes did not verify; they were computed again."""
