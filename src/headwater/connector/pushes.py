"""Prompts whose KV goes to another host, as the scheduler side sees them: what is announced with which step.

Chunks are announced in the first step that computes some of them, so a peer knows that they come, and reserves room for
a step and not for a whole prompt.
Everything is ordered by request; its transfer's id is the peer's and the proxy's name for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from headwater.connector.orders import FlushOrder, PushOrder, StepReport
from headwater.connector.tracker import Tracked
from headwater.connector.transfers import TransferParams
from headwater.errors import InvalidArgumentError
from headwater.kv.hashing import ChunkRef
from headwater.peers.sender import transfer_name

FLUSH_S = 5.0
"""How long the answer of a prefill waits for the peer."""


@dataclass(eq=False)
class _Push:
    tracked: Tracked
    transfer: TransferParams
    name: str
    limit: int
    """Tokens of the prompt that are worth sending."""
    num_tokens: int = 0
    """Of these: announced so far."""


class Pushes:
    """The pushes of one scheduler side. Its thread calls it."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._pushes: dict[str, _Push] = {}
        self._orders: list[PushOrder] = []
        self._flushes: list[FlushOrder] = []
        self._ranks: dict[str, tuple[str, list[int]]] = {}
        """By request whose flush is under way: its transfer, and what ranks have said."""

    def begin(self, tracked: Tracked, transfer: TransferParams) -> None:
        """A request's prompt is to be sent to `transfer.push_to`, too."""
        self.stop(tracked.request_id)  # its id is used again
        names = {push.name for push in self._pushes.values()}
        limit = tracked.saves.limit(tracked.num_prompt, ends=False)
        self._pushes[tracked.request_id] = _Push(tracked, transfer, _name(transfer.id, tracked, names), limit)

    def computes(self, request_id: str, num_computed: int) -> None:
        """After the step that is ordered next, the KV of so many tokens of a request is there. The chunk that it leaves
        incomplete is announced, too: whoever waits for it learns that it comes."""
        push = self._pushes.get(request_id)
        if push is None or push.num_tokens >= push.limit or push.tracked.inputs is None or push.tracked.is_foreign:
            return  # what is not saved is not sent
        chunk_tokens = push.tracked.space.chunk_tokens
        end = min(push.limit, -(-num_computed // chunk_tokens) * chunk_tokens)
        if end > push.num_tokens:
            chunks = tuple(_chunks(push.tracked, push.num_tokens, end))
            tenant, adapter, _ = push.tracked.inputs
            push.num_tokens = end
            self._orders.append(PushOrder(request_id, push.name, push.transfer.push_to, chunks, tenant, adapter))

    def num_tokens(self, request_id: str) -> int:
        """Of a request's prompt: how many tokens, from the first on, are sent or on their way."""
        push = self._pushes.get(request_id)
        return 0 if push is None else push.num_tokens

    @property
    def has_orders(self) -> bool:
        """Whether there is something to tell the ranks, though nothing may be left to compute."""
        return bool(self._orders or self._flushes)

    def finish(self, request_id: str, *, is_wanted: bool) -> bool:
        """A request is over: flush what was announced of it, or drop it. Whether the end of a flush will be told."""
        push = self._pushes.pop(request_id, None)
        if push is None or not push.num_tokens:
            return False
        self._flushes.append(FlushOrder(request_id, push.name, FLUSH_S if is_wanted else 0.0))
        if is_wanted:
            self._ranks[request_id] = push.name, []
        return is_wanted

    def stop(self, request_id: str) -> None:
        """Nobody waits for a request's push any more: what is left of it is dropped. Idempotent."""
        self.finish(request_id, is_wanted=False)
        if (flushing := self._ranks.pop(request_id, None)) is not None:
            self._flushes.append(FlushOrder(request_id, flushing[0], 0.0))

    def take(self) -> tuple[tuple[PushOrder, ...], tuple[FlushOrder, ...]]:
        """What goes with the step that is ordered now."""
        taken = tuple(self._orders), tuple(self._flushes)
        self._orders, self._flushes = [], []
        return taken

    def handle_report(self, report: StepReport) -> Iterable[tuple[str, int]]:
        """Flushes that are over on all ranks: the request, and how many of its tokens are with the peer."""
        for request_id, counts in report.pushed.items():
            if request_id in self._ranks:
                ranks = self._ranks[request_id][1]
                ranks += counts
                if len(ranks) >= self._num_ranks:
                    del self._ranks[request_id]
                    yield request_id, min(ranks)


def _name(given: str, tracked: Tracked, taken: set[str]) -> str:
    """The id of a transfer for the wire: as given, unless that is none, or another request of this server has it."""
    try:
        transfer_name(given)
        if given not in taken:
            return given
    except InvalidArgumentError:
        pass
    return hashlib.sha256(f"{given} {tracked.request_id}".encode()).hexdigest()[:32]


def _chunks(tracked: Tracked, first: int, end: int) -> Iterable[ChunkRef]:
    """The chunks that hold the tokens from `first`, where one begins, to `end`: the last one may be a tail."""
    size = tracked.space.chunk_tokens
    tracked.extend_keys(end)
    for number in range(first // size, end // size):
        yield tracked.keys.ref(number)
    if tail := end % size:
        yield tracked.keys.tail_ref(end // size, tail)
