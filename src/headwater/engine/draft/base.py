"""What the scheduler asks of whoever drafts tokens, and which drafts count.

A drafter only guesses: what it proposes changes how long an answer takes, never what it says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from headwater.engine.request import Request


class Drafter(Protocol):
    """Proposes tokens for requests, and is told what became of them. Equal calls give equal drafts."""

    def wants(self, request: Request) -> bool:
        """Whether it would look at the request's tokens now. Then the engine waits for those in flight."""
        ...

    def propose(self, request: Request, most: int) -> tuple[int, ...]:
        """At most `most` tokens that may follow `request.tokens`, all of which are known."""
        ...

    def landed(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Of so many drafts, the first so many were what the model said; called for every step that samples."""
        ...

    def forget(self, request: Request) -> None:
        """The request is over. Harmless for one that was never seen."""
        ...


class NoDrafts:
    """The null object: no guesses."""

    def wants(self, request: Request) -> bool:
        """Never."""
        return False

    def propose(self, request: Request, most: int) -> tuple[int, ...]:
        """Nothing."""
        return ()

    def landed(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Nothing to learn."""

    def forget(self, request: Request) -> None:
        """Nothing to forget."""


def accept(drafts: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """The tokens of one step: those sampled, up to the first one that is not what was drafted in its place.

        drafts     a  b  c
        sampled    a  b  x  y      y follows c, which was never said
        accepted   a  b  x

    Each token was sampled as if there were no drafts, so this is what the model says without them.
    """
    right = next((n for n, (draft, token) in enumerate(zip(drafts, sampled, strict=False)) if draft != token), None)
    return list(sampled if right is None else sampled[: right + 1])
