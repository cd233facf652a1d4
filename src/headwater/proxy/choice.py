"""Which server gets a prompt: the one where the least has to be computed before it, for its weight.

    cost = (uncached tokens of the prompt there + tokens queued there) / weight

No input or output happens here, so that simulations and the real thing choose with the same code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from headwater.proxy.index import Bits, History, Mask, Table, runs
from headwater.proxy.keys import TEXT, PromptKeys, Scheme

RUNNING_TOKENS = 32
"""A stream that is being generated slows prefill down about as this many more prompt tokens would."""
RECENT_S = 10.0
"""What was sent to a server with events counts as cached for so long, until its events say so themselves."""
RECENT_BLOCKS = 1 << 16
UNKNOWN_TOKENS_PER_S = 1000.0
"""How fast a server is taken to compute prompts before it has computed one: a CPU is slower, a GPU faster."""
_PACE_TOKENS = 256
"""Of shorter prompts, most of the time is not computation."""
_PACE_SHARE = 0.3
"""Of the newest prompt in the mean."""


class ServerCandidate:
    """A server, as far as choosing needs to know it."""

    def __init__(self, name: str, router: Router, *, weight: float = 1.0, scheme: Scheme = TEXT) -> None:
        self.name = name
        self.weight = weight
        self.scheme = scheme
        self.event_bits: Mask = 0
        """The places of its events, while these are believed; else 0."""
        self.queued_tokens = 0
        self.num_queued = 0
        self.num_running = 0
        self.tokens_per_s = 0.0
        """How fast it has computed prompts lately; 0 while that is not known."""
        self.last_turn = 0
        """When it was chosen last: equals take turns."""
        self._router = router
        self.sent_bit, self.recent_bit = router.bits.take(), router.bits.take()

    @property
    def mask(self) -> Mask:
        """The bits that say it has a block."""
        return self.event_bits | self.recent_bit if self.event_bits else self.sent_bit

    @property
    def num_in_flight(self) -> int:
        """Requests that it has and has not finished."""
        return self.num_queued + self.num_running

    @property
    def load_tokens(self) -> float:
        """What stands in a new request's way."""
        return self.queued_tokens + RUNNING_TOKENS * self.num_running

    @property
    def queue_s(self) -> float:
        """About how long it takes until a prompt that is sent now is begun."""
        return self.queued_tokens / (self.tokens_per_s or UNKNOWN_TOKENS_PER_S)

    def note_pace(self, num_tokens: int, seconds: float) -> None:
        """It has computed so many tokens in that time: a prompt, and what was queued before it."""
        if num_tokens < _PACE_TOKENS or seconds <= 0:
            return
        pace = num_tokens / seconds
        self.tokens_per_s += (pace - self.tokens_per_s) * (_PACE_SHARE if self.tokens_per_s else 1.0)

    def forget(self) -> None:
        """It was restarted: what was sent to it is not there any more."""
        bits = self._router.bits
        for bit in (self.sent_bit, self.recent_bit):
            bits.give_back(bit)
        self.sent_bit, self.recent_bit = bits.take(), bits.take()


class ServerChoice(NamedTuple):
    """A server for a prompt, and what it has to compute for it."""

    server: ServerCandidate
    num_tokens: int
    cached_tokens: int

    @property
    def uncached_tokens(self) -> int:
        """Tokens of the prompt that the server lacks, as far as the router knows."""
        return self.num_tokens - self.cached_tokens


class RoutingTicket:
    """A request's part in the load of its server. Every method may be called twice."""

    def __init__(self, choice: ServerChoice) -> None:
        self._server = choice.server
        self._queued_tokens: int | None = choice.uncached_tokens
        self._is_open = True
        self._server.queued_tokens += choice.uncached_tokens
        self._server.num_queued += 1

    def begin(self) -> None:
        """Its prompt is computed: the first byte has come."""
        if self._is_open and self._queued_tokens is not None:
            self._leave_queue()
            self._server.num_running += 1

    def end(self) -> None:
        """It is finished, or was cancelled."""
        if not self._is_open:
            return
        self._is_open = False
        if self._queued_tokens is not None:
            self._leave_queue()
        else:
            self._server.num_running -= 1

    def _leave_queue(self) -> None:
        self._server.queued_tokens -= self._queued_tokens or 0
        self._server.num_queued -= 1
        self._queued_tokens = None


class Router:
    """The index of all servers, and the choice among some of them. Not thread-safe; nothing here waits."""

    def __init__(
        self,
        *,
        history_blocks: int = 200_000,
        history_age_s: float = 1800.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.bits = Bits(max(history_age_s, RECENT_S), clock)
        self.table = Table()
        self.sent = History(history_blocks, history_age_s, clock)
        self.recent = History(RECENT_BLOCKS, RECENT_S, clock)
        self._turn = 0

    def choose(self, prompt: PromptKeys, servers: Sequence[ServerCandidate]) -> ServerChoice:
        """The cheapest of the servers, of which there is at least one. Costs about the hashing of the prompt once more
        at most. Equals take turns."""
        return min(self.costs(prompt, servers), key=_cost)

    def round_robin(self, prompt: PromptKeys, servers: Sequence[ServerCandidate]) -> ServerChoice:
        """The next server, whatever it has: to compare with."""
        return min(self.costs(prompt, servers), key=lambda choice: choice.server.last_turn)

    def costs(self, prompt: PromptKeys, servers: Sequence[ServerCandidate]) -> list[ServerChoice]:
        """What each server would have to compute."""
        self.sent.turn()
        self.recent.turn()
        tables = (self.table.masks, self.recent.young, self.recent.old, self.sent.young, self.sent.old)
        by_scheme: dict[int, list[int]] = {}
        for number, server in enumerate(servers):
            by_scheme.setdefault(id(server.scheme), []).append(number)
        choices: list[ServerChoice | None] = [None] * len(servers)
        for numbers in by_scheme.values():
            keyed = prompt.of(servers[numbers[0]].scheme)
            lengths = runs(keyed.keys, [servers[number].mask for number in numbers], tables)
            for number, length in zip(numbers, lengths, strict=True):
                choices[number] = ServerChoice(servers[number], keyed.num_tokens, keyed.cached_tokens(length))
        return [choice for choice in choices if choice is not None]

    def send(self, prompt: PromptKeys, choice: ServerChoice) -> RoutingTicket:
        """Note that the prompt goes to its server."""
        server = choice.server
        self._turn += 1
        server.last_turn = self._turn
        keys = prompt.of(server.scheme).keys
        if server.event_bits:
            self.recent.note(keys, server.recent_bit)
        else:
            self.sent.note(keys, server.sent_bit)
        return RoutingTicket(choice)


def _cost(choice: ServerChoice) -> tuple[float, float, int]:
    server = choice.server
    tokens = choice.uncached_tokens + server.load_tokens
    return tokens / server.weight, server.num_in_flight / server.weight, server.last_turn


def without(servers: Sequence[ServerCandidate], tried: Collection[ServerCandidate]) -> list[ServerCandidate]:
    """The servers that were not tried."""
    return [server for server in servers if server not in tried]
