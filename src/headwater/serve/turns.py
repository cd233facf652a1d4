"""How the streams of a server share its event loop: turning values into text takes a part of each turn, not all of it.

A client that has not read for a while, and does then, wants tens of thousands of values at once. In one go they would
keep everybody else waiting for seconds.
"""

from __future__ import annotations

import asyncio
from collections import deque

PIECE_VALUES = 32
"""Tokens and log-probabilities that one stream takes at a time; they make some 50 µs of work each."""
TURN_VALUES = 128
"""What all streams together take in one turn of the event loop; the last of them may exceed it by a piece."""


class Turns:
    """Hands out the values of each turn. Streams that find none left wait in the order in which they came."""

    def __init__(self) -> None:
        self._num_left = TURN_VALUES
        self._tickets: deque[object] = deque()

    async def wait(self) -> None:
        """Return in a turn in which there are values left, when all who came before have had theirs. The caller takes
        one piece, calls `use`, and waits again."""
        if self._num_left > 0 and not self._tickets:
            return
        ticket = object()
        self._tickets.append(ticket)
        try:
            while self._num_left <= 0 or self._tickets[0] is not ticket:
                await asyncio.sleep(0)
        finally:
            self._tickets.remove(ticket)

    def use(self, num_values: int) -> None:
        """Count values against this turn."""
        if self._num_left == TURN_VALUES:
            asyncio.get_running_loop().call_soon(self._begin)
        self._num_left -= num_values

    def _begin(self) -> None:
        self._num_left = TURN_VALUES
