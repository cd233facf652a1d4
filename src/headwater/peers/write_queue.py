"""One-sided writes of a link, one after another: each is asked for while the one before is under way.

    WRITE 1 ─ WRITE 2 ─ (writes 1) ─ WRITTEN 1 ─ WRITE 3 ─ (writes 2) ─ WRITTEN 2 ─ (writes 3) ─ WRITTEN 3

So the peer reserves, answers and notes checksums beside the bytes, and never between them. What was asked for is always
written, or the connection ends: a WRITTEN of what was not would make garbage look like tiles.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from headwater.errors import WireError
from headwater.peers.conversation import Answered, Conversation
from headwater.peers.exposing import Targets, encode_written
from headwater.peers.tiles import Layout
from headwater.peers.wire import Data, Type
from headwater.stores.base import Place


class _Asked(NamedTuple):
    """A write that the peer was asked for."""

    number: int
    places: Sequence[Place]
    """Lent until it is written."""
    layout: Layout
    targets: Answered
    """Stands for the answer, which says where it goes."""
    answered: Answered
    """Told the answer to WRITTEN."""


class WriteQueue:
    """See the module. For one thread, the link's; any call may raise PeerError, and `forget` follows then."""

    def __init__(self, talk: Conversation, counts: Counter[str], meanwhile: Callable[[], None]) -> None:
        """`meanwhile` is called now and then while a write is under way."""
        self._talk = talk
        self._counts = counts
        self._meanwhile = meanwhile
        self._asked: _Asked | None = None

    def write(self, data: Data, places: Sequence[Place], layout: Layout, answered: Answered) -> None:
        """Ask where a group of layers goes, and write the one that was asked for before. The loan of this one may end
        after `finish`. `answered` is told the answer to its WRITTEN."""

        def targets(_: bytes) -> None:
            raise WireError("the answer to a write came when nothing is written")

        number = self._talk.request(Type.WRITE, data.encode(), targets)
        asked = _Asked(number, places, layout, targets, answered)
        before, self._asked = self._asked, asked
        if before is not None:
            self._do(before)

    def finish(self) -> None:
        """Write what was asked for. All loans may end."""
        asked, self._asked = self._asked, None
        if asked is not None:
            self._do(asked)

    def forget(self) -> None:
        """The connection is of no use any more."""
        self._asked = None

    def _do(self, asked: _Asked) -> None:
        assert self._talk.writer is not None
        targets = Targets.decode(self._talk.await_answer(asked.targets), len(asked.places))
        deadline = self._talk.deadline(asked.layout.num_bytes * len(asked.places))
        count = self._talk.writer.write(asked.places, asked.layout, targets, deadline, self._meanwhile)
        self._talk.request(Type.WRITTEN, encode_written(asked.number), asked.answered)
        for name in ("bytes", "written_bytes"):
            self._counts[name] += asked.layout.num_bytes * count
