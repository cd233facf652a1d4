"""Guesses at a request's next tokens, which one step can check at once (speculative decoding)."""

from headwater.engine.draft.base import Drafter, NoDrafts, accept

__all__ = ["Drafter", "NoDrafts", "accept"]
