"""Prompts as token ids: random, the same for the same seed, and different from the first token on for others."""

from __future__ import annotations

import numpy as np

_FIRST_TOKEN = 3
"""Below are those that begin, end and pad."""


def make_prompt(seed: int, num_tokens: int, *, vocab_size: int) -> list[int]:
    """So many tokens."""
    tokens: list[int] = np.random.default_rng(seed).integers(_FIRST_TOKEN, vocab_size, num_tokens).tolist()
    return tokens


class Prompts:
    """Prompts that were not asked before in this run."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._vocab_size, self._next = vocab_size, seed * 1_000_000

    def fresh(self, num_tokens: int) -> list[int]:
        """One of so many tokens."""
        self._next += 1
        return make_prompt(self._next, num_tokens, vocab_size=self._vocab_size)

    def whole(self, num_tokens: int) -> list[int]:
        """One of whole chunks and one token more, which is always computed."""
        return self.fresh(num_tokens + 1)

    def sharing(self, count: int, share: float, num_prefix: int, num_suffix: int) -> tuple[list[int], list[list[int]]]:
        """A prefix, and prompts of which that share begins with it, spread evenly; all have the same length."""
        prefix = self.fresh(num_prefix)
        made = []
        for number in range(count):
            begins = int((number + 1) * share) > int(number * share)
            made.append((prefix if begins else self.fresh(num_prefix)) + self.fresh(num_suffix))
        return prefix, made
