"""Guesses at a request's next tokens, which one step can check at once (speculative decoding)."""

from __future__ import annotations

from headwater.engine.draft.base import Drafter, NoDrafts, accept
from headwater.engine.draft.ngram import NgramDrafter

__all__ = ["Drafter", "NgramDrafter", "NoDrafts", "accept", "create_drafter"]


def create_drafter(ngram: int | None) -> Drafter:
    """Whoever drafts up to `ngram` tokens by looking back; nobody for None."""
    return NoDrafts() if ngram is None else NgramDrafter(ngram)
