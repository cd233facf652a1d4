"""Drafts by looking back: where the request's last tokens stood before, what followed them may follow again.

It costs no model and no memory beyond an index of the request's own tokens, and pays for answers that quote their
prompt or repeat themselves. Elsewhere it is wrong, and rows for wrong drafts cost time. So drafts must pay: a request
whose drafts have cost more than they gave has a pause from them, and a longer one each time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headwater.engine.request import Request

NGRAM = 4
"""So many tokens must have stood there before."""
COST = 2
"""Tokens that the rows of a step's drafts cost: on a CPU it takes two to three times as long as a step without."""
MOST_CREDIT = 4
"""What earlier drafts gave makes up for so much of the cost of later ones."""
PAUSES = (16, 512)
"""Steps of a pause: so many at first, twice as many each time until drafts have paid again, and so many at most."""


class _Text:
    """One request's tokens by what stands before them, and whether to draft for it."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}
        """By n-gram: where it ends, at its latest place but that of the last tokens."""
        self._num_indexed = NGRAM - 1
        self.pause = 0
        """Steps to go without drafts."""
        self._next_pause = PAUSES[0]
        self._credit = 0

    def continuation(self, tokens: list[int], most: int) -> tuple[int, ...]:
        """What followed the last n-gram of `tokens` where it stood before. O(tokens that are new + most)."""
        for end in range(self._num_indexed + 1, len(tokens)):
            self._ends[tuple(tokens[end - NGRAM : end])] = end
        self._num_indexed = max(self._num_indexed, len(tokens) - 1)
        begin = self._ends.get(tuple(tokens[-NGRAM:]))
        if begin is None:
            return ()
        period = len(tokens) - begin
        return tuple(tokens[begin + number % period] for number in range(most))  # it may run into its own repetition

    def learn(self, num_drafts: int, num_accepted: int) -> None:
        """A step has landed."""
        if not num_drafts:
            self.pause = max(0, self.pause - 1)
            return
        self._credit = min(self._credit + num_accepted - COST, MOST_CREDIT)
        if self._credit > 0:
            self._next_pause = PAUSES[0]
        elif self._credit < 0:
            self._credit, self.pause = 0, self._next_pause
            self._next_pause = min(2 * self._next_pause, PAUSES[1])


class NgramDrafter:
    """At most `most` drafts for a request in a step."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._texts: dict[str, _Text] = {}

    def wants(self, request: Request) -> bool:
        """Whether its drafts were of use lately, or have not been tried for long."""
        text = self._texts.get(request.id)
        return text is None or not text.pause

    def propose(self, request: Request, most: int) -> tuple[int, ...]:
        """What followed the last tokens before."""
        text = self._texts.setdefault(request.id, _Text())
        return text.continuation(request.tokens, min(most, self._most))

    def landed(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Go on, or pause."""
        if (text := self._texts.get(request.id)) is not None:
            text.learn(num_drafts, num_accepted)

    def forget(self, request: Request) -> None:
        """Drop its index."""
        self._texts.pop(request.id, None)
