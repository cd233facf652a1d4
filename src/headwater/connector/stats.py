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
    num_asked_tokens: int = 0
    """Tokens of requests that were looked up in the pool."""
    num_matched_tokens: int = 0
    """Of those: tokens that the pool had."""
    num_loaded_tokens: int = 0
    """Of those: tokens that came from the pool; the others the engine had itself, or they did not come in time."""
    wait_seconds: float = 0.0
    """Time that requests waited for their loads, all requests together."""
