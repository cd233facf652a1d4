"""Four simulated servers and a generated multi-turn workload, to compare ways of choosing a server.

Time is simulated; the router is the real one. Each server computes one prompt after the other, keeps blocks in a cache
of bounded size (least recently used goes first), and tells of them after a delay.
"""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from headwater.proxy.calls import CallBody
from headwater.proxy.choice import Router, RoutingTicket, ServerCandidate, ServerChoice
from headwater.proxy.keys import PromptKeys, TokenScheme

BLOCK_TOKENS = 256
NO_CALL = CallBody(False, {}, 0)
Tokens = npt.NDArray[np.uint32]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Conversations with applications: each has a system prompt, and every turn adds to the prompt."""

    num_requests: int = 12_000
    num_applications: int = 40
    system_tokens: tuple[int, int] = (300, 4000)
    question_tokens: tuple[int, int] = (20, 600)
    answer_tokens: tuple[int, int] = (20, 400)
    mean_turns: float = 5.0
    think_s: float = 15.0
    conversations_per_s: float = 8.0
    begins_alike: bool = False
    """All prompts of all applications begin with the same long system prompt."""
    seed: int = 18


@dataclass(frozen=True, kw_only=True)
class SimServers:
    """What the servers can do."""

    count: int = 4
    prefill_tokens_per_s: float = 6_000.0
    decode_tokens_per_s: float = 40.0
    cache_blocks: int = 800
    event_delay_s: float = 0.1


@dataclass
class Outcome:
    """What came of it."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: list[int] = field(default_factory=list)
    wait_s: list[float] = field(default_factory=list)

    @property
    def cached_share(self) -> float:
        """Of all prompt tokens: those that a server had."""
        return self.cached_tokens / max(1, self.prompt_tokens)

    @property
    def busiest_over_mean(self) -> float:
        """Prompt tokens that the busiest server computed, by the mean of all."""
        return max(self.computed_tokens) * len(self.computed_tokens) / max(1, sum(self.computed_tokens))

    @property
    def first_token_s(self) -> float:
        """Nine of ten requests wait no longer for their prompt."""
        return float(np.percentile(self.wait_s, 90))


class _Server:
    """A cache and a queue."""

    def __init__(self, candidate: ServerCandidate, plan: SimServers) -> None:
        self.candidate = candidate
        self.free_at_s = 0.0
        self.computed_tokens = 0
        self._plan = plan
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def run(self, keys: Sequence[bytes]) -> int:
        """How many of the blocks it has, from the start. They are used now."""
        length = 0
        while length < len(keys) and keys[length] in self._blocks:
            self._blocks.move_to_end(keys[length])
            length += 1
        return length

    def store(self, keys: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
        """Blocks that are new, and those that went for them."""
        new = [key for key in keys if key not in self._blocks]
        for key in keys:
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        gone = []
        while len(self._blocks) > self._plan.cache_blocks:
            gone.append(self._blocks.popitem(last=False)[0])
        return new, gone


Choose = Callable[[Router, PromptKeys, Sequence[ServerCandidate]], ServerChoice]


class Simulation:
    """One run of a workload with one way to choose. `delay_s` of events; None: there are none."""

    def __init__(self, work: Workload, plan: SimServers, choose: Choose, delay_s: float | None) -> None:
        self.now_s = 0.0
        self.router = Router(clock=lambda: self.now_s)
        self._work = work
        self._plan = plan
        self._choose = choose
        self._delay_s = delay_s
        self._dice = random.Random(work.seed)
        self._numbers = np.random.default_rng(work.seed)
        self._scheme = TokenScheme(BLOCK_TOKENS)
        self._servers = {}
        for number in range(plan.count):
            candidate = ServerCandidate(f"server {number}", self.router, scheme=self._scheme)
            if delay_s is not None:
                candidate.event_bits = self.router.bits.take()
            self._servers[candidate] = _Server(candidate, plan)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = self._num_requests = 0
        self.outcome = Outcome()

    def run(self) -> Outcome:
        """Simulate until the last request was sent."""
        shared = self._tokens(self._work.system_tokens[1])
        systems = [self._tokens(self._between(self._work.system_tokens)) for _ in range(self._work.num_applications)]
        if self._work.begins_alike:
            systems = [np.concatenate([shared, system[:100]]) for system in systems]
        self._begin(systems)
        while self._events and self._num_requests < self._work.num_requests:
            self.now_s, _, happen = heapq.heappop(self._events)
            happen()
        self.outcome.computed_tokens = [server.computed_tokens for server in self._servers.values()]
        return self.outcome

    def _begin(self, systems: list[Tokens]) -> None:
        """A conversation begins, and later the next one."""
        turns = 1 + int(self._dice.expovariate(1 / (self._work.mean_turns - 1)))
        self._turn(self._dice.choice(systems), turns)
        self._after(self._dice.expovariate(self._work.conversations_per_s), partial(self._begin, systems))

    def _turn(self, before: Tokens, turns_left: int) -> None:
        tokens = np.concatenate([before, self._tokens(self._between(self._work.question_tokens))])
        prompt = PromptKeys(NO_CALL, tokens)
        choice = self._choose(self.router, prompt, list(self._servers))
        ticket = self.router.send(prompt, choice)
        server = self._servers[choice.server]
        self._num_requests += 1
        start_s = max(self.now_s, server.free_at_s)
        keyed = prompt.of(self._scheme)
        # Looked up when its turn comes; the queue is first in, first out, so the time is known now.
        cached = keyed.cached_tokens(server.run(keyed.keys))
        computed = keyed.num_tokens - cached
        server.free_at_s = start_s + computed / self._plan.prefill_tokens_per_s
        server.computed_tokens += computed
        # Whoever comes later to this queue finds the blocks there.
        self._tell(server, keyed.keys, server.free_at_s)
        self.outcome.prompt_tokens += keyed.num_tokens
        self.outcome.cached_tokens += cached
        self.outcome.wait_s.append(server.free_at_s - self.now_s)
        self._at(server.free_at_s, partial(self._answer, tokens, turns_left, ticket))

    def _answer(self, tokens: Tokens, turns_left: int, ticket: RoutingTicket) -> None:
        ticket.begin()
        answer = self._tokens(self._between(self._work.answer_tokens))
        self._after(answer.size / self._plan.decode_tokens_per_s, ticket.end)
        if turns_left > 1:
            pause_s = answer.size / self._plan.decode_tokens_per_s + self._dice.expovariate(1 / self._work.think_s)
            self._after(pause_s, partial(self._turn, np.concatenate([tokens, answer]), turns_left - 1))

    def _tell(self, server: _Server, keys: Sequence[bytes], when_s: float) -> None:
        new, gone = server.store(keys)
        if self._delay_s is None:
            return
        if self._delay_s == 0:
            self._learn(server.candidate.event_bits, new, gone)
        else:
            self._at(when_s + self._delay_s, partial(self._learn, server.candidate.event_bits, new, gone))

    def _learn(self, bit: int, new: Sequence[bytes], gone: Sequence[bytes]) -> None:
        for key in new:
            self.router.table.add(key, bit)
        for key in gone:
            self.router.table.remove(key, bit)

    def _tokens(self, count: int) -> Tokens:
        return self._numbers.integers(1, 100_000, count, np.uint32)

    def _between(self, bounds: tuple[int, int]) -> int:
        """Many short ones, few long ones."""
        low, high = bounds
        return int(low * (high / low) ** self._dice.random())

    def _after(self, delay_s: float, happen: Callable[[], None]) -> None:
        self._at(self.now_s + delay_s, happen)

    def _at(self, when_s: float, happen: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (when_s, self._num_events, happen))


def by_cost(router: Router, prompt: PromptKeys, servers: Sequence[ServerCandidate]) -> ServerChoice:
    """The router's own way."""
    return router.choose(prompt, servers)


def in_turns(router: Router, prompt: PromptKeys, servers: Sequence[ServerCandidate]) -> ServerChoice:
    """Round robin."""
    return router.round_robin(prompt, servers)


def by_first_block(router: Router, prompt: PromptKeys, servers: Sequence[ServerCandidate]) -> ServerChoice:
    """The trap: the hash of the first block names the server."""
    choices = router.costs(prompt, servers)
    keys = prompt.of(servers[0].scheme).keys
    return choices[keys[0][0] % len(servers) if keys else 0]


def compare(work: Workload, plan: SimServers, note: Callable[[str], None]) -> dict[str, Any]:
    """The same workload, chosen in each way."""
    ways: dict[str, tuple[Choose, float | None]] = {
        "events": (by_cost, plan.event_delay_s),
        "ideal": (by_cost, 0.0),
        "history": (by_cost, None),
        "round_robin": (in_turns, None),
        "first_block": (by_first_block, None),
    }
    found = {}
    for name, (choose, delay_s) in ways.items():
        note(f"simulating {work.num_requests:,} requests: {name}{', all alike' if work.begins_alike else ''}")
        outcome = Simulation(work, plan, choose, delay_s).run()
        found[name] = {
            "cached_share": outcome.cached_share,
            "busiest_over_mean": outcome.busiest_over_mean,
            "first_token_p90_s": outcome.first_token_s,
        }
    return found
