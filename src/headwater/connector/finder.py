"""What the pool has for a request, whether it is near enough to be loaded now, and how the request is to wait for it.

A match whose chunks are not all in the first tier starts a fetch. Until that has ended, or nearly so, the request holds
no blocks, and the engine is told to ask again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from headwater.connector.config import AUTO, ConnectorConfig
from headwater.connector.fetches import POLL_S, Fetches
from headwater.connector.lookups import LookupRunner
from headwater.connector.orders import ASYNC
from headwater.connector.stats import SchedulerCounts
from headwater.connector.tracker import LateChunks, Tracked
from headwater.connector.transfers import Expected, TransferParams
from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import whole_shard
from headwater.pool.match import Match
from headwater.pool.wait import Wait

FOLLOW_S = 0.5
"""A fetch whose rest takes no longer than this, at the rate so far, is followed by the load: the request gets its
blocks at once, and each chunk is placed as soon as it has come. Longer than this, no blocks are held for a lower
tier."""


class LoadPlan(NamedTuple):
    """What can be loaded: so many tokens beyond those that the engine has, and how the request waits for them."""

    num_tokens: int
    mode: str


NOTHING = LoadPlan(0, ASYNC)


class Finder:
    """Looks up, fetches and leases for one scheduler side. Its thread calls it."""

    def __init__(self, lookup_s: float, config: ConnectorConfig, counts: SchedulerCounts) -> None:
        self._config = config
        self._counts = counts
        self._late = LateChunks(config.load_deadline_s)
        self._lookups = LookupRunner(lookup_s)
        # In the other modes a step waits for the load, which must then wait for nobody.
        near_s = FOLLOW_S if config.load_mode in (AUTO, ASYNC) else 0.0
        self._held: dict[str, Tracked] = {}
        """Requests that wait until somebody announces the KV that they expect."""
        self.fetches = Fetches(config.load_deadline_s, counts.fetch_times.add, near_s=near_s)

    def find(self, tracked: Tracked, num_local: int, mode: str) -> LoadPlan | None:
        """What can be loaded beyond the `num_local` tokens that the engine has, in this mode if all of it is near; None
        while it is being fetched.

        Cost: hashing what is new of the tokens, and a few microseconds a chunk; where the pool's index is not on this
        host, what `connector.lookups` allows at most. Asked again, it looks again, unless a fetch is under way.
        """
        tracked.num_local = tracked.num_explained = num_local
        if not self._config.loads or tracked.inputs is None or not tracked.may_load:
            return NOTHING
        if tracked.is_queued and self.fetches.is_full:
            return None
        if tracked.match is None or (tracked.ticket is None and not tracked.is_queued):
            tracked.match = self._look_up(tracked)
        wanted = tuple(c for c in tracked.match.chunks if c.first_token + c.num_tokens > num_local)
        if self._is_expecting(tracked, tracked.match):
            return self._follow(tracked, tracked.match, wanted)
        if self._num_new(tracked, wanted) and tracked.ticket is None and not self._fetch(tracked, wanted):
            return None
        is_near = tracked.ticket is not None and tracked.ticket.is_near
        if tracked.ticket is not None and not is_near and not tracked.ticket.is_over:
            return None
        return self._plan(tracked, wanted, mode, is_near=is_near)

    def _look_up(self, tracked: Tracked) -> Match:
        num_tokens = len(tracked.tokens)
        tracked.extend_keys(num_tokens)
        space, inputs = tracked.space, tracked.inputs
        # Named again: between two questions of one request, the space may have seen many other tenants.
        if inputs is not None and (inputs.tenant or inputs.adapter):
            space.root(tenant=inputs.tenant, adapter=inputs.adapter)
        match = self._lookups.run(lambda: space.match(tracked.keys, max_tokens=num_tokens), Match(()))
        tracked.is_fresh = not space.has_lower_tiers
        return match

    def _num_new(self, tracked: Tracked, wanted: Sequence[ChunkRef]) -> int:
        """Tokens that a load of these chunks spares the engine; 0 where that is not worth a load. The last token of a
        request is computed in any case: the next one is sampled from it."""
        if not wanted:
            return 0
        end = wanted[-1].first_token + wanted[-1].num_tokens
        num_new = min(end, len(tracked.tokens) - 1) - tracked.num_local
        return num_new if num_new >= self._config.min_load_tokens else 0

    def _fetch(self, tracked: Tracked, wanted: Sequence[ChunkRef]) -> bool:
        """Begin a fetch if one is needed; False where it is needed and has to wait for its turn."""
        if self.fetches.is_full and not all(self.exist(tracked, wanted)):
            tracked.is_queued = True
            return False
        tracked.is_queued = False
        tracked.ticket = self.fetches.begin(tracked.space, wanted)
        return True

    # ---- KV that is said to come --------------------------------------------------------------------------------
    def expect(self, tracked: Tracked, transfer: TransferParams) -> None:
        """Another server is said to send KV of this prompt: whatever this side would save of it, it may expect."""
        limit = tracked.saves.limit(tracked.num_prompt, ends=False)
        tracked.expected = Expected(transfer, tuple(tracked.saves.chunks(tracked.keys, limit)))
        self._counts.expected()

    def stop_expecting(self, tracked: Tracked, *, is_short: bool) -> None:
        """What there is now is all. Idempotent."""
        self._held.pop(tracked.request_id, None)
        if tracked.expected is not None and not tracked.expected.is_over:
            tracked.expected.is_over = True
            if is_short:
                self._counts.gave_up()

    def _is_expecting(self, tracked: Tracked, match: Match) -> bool:
        """Whether KV is still to come that is worth waiting for."""
        expected = tracked.expected
        if expected is None or expected.is_over:
            return False
        expected.look(len(match.chunks))
        is_here, is_worth = match.num_tokens >= expected.num_tokens, self._num_new(tracked, _beyond(expected, tracked))
        is_late = expected.is_late and not self._is_announced(tracked, match, expected)
        if is_here or not is_worth or is_late or not expected.left_s:
            self.stop_expecting(tracked, is_short=not is_here)
        return not expected.is_over

    def _is_announced(self, tracked: Tracked, match: Match, expected: Expected) -> bool:
        """Whether something has come since the first look, or somebody fills the chunk after what is there. A first
        tier that is not mapped shows nobody who fills it."""
        space = tracked.space
        if not space.mapped:
            return False
        if len(match.chunks) > expected.num_first:
            return True
        # The match may end with a tail of another prompt, inside the chunk that is to come.
        chunk = next((c for c in expected.chunks if c.first_token + c.num_tokens > match.num_tokens), None)
        if chunk is None:
            return False
        return self._lookups.run(lambda: space.arrived([chunk], whole_shard(space.spec))[0].is_announced, False)

    def _follow(self, tracked: Tracked, match: Match, here: tuple[ChunkRef, ...]) -> LoadPlan | None:
        """A load that follows what comes, once something does; None until then."""
        expected = tracked.expected
        assert expected is not None
        if not self._is_announced(tracked, match, expected):
            self._held[tracked.request_id] = tracked
            return None
        keys = {chunk.key for chunk in expected.chunks}
        here = tuple(chunk for chunk in here if chunk.key in keys)
        if here and tracked.ticket is None and not self._fetch(tracked, here):  # some of it may be in a lower tier
            return None
        self._held.pop(tracked.request_id, None)
        tracked.wanted, tracked.mode = _beyond(expected, tracked), ASYNC
        tracked.wait = Wait(expected.left_s, expected.transfer.start_s, expected.left_s)
        return LoadPlan(self._num_new(tracked, tracked.wanted), ASYNC)

    @property
    def num_waiting(self) -> int:
        """What requests without blocks wait for: fetches, and KV that nobody has announced."""
        return self.fetches.num_waiting + sum([not self._is_due(tracked) for tracked in self._held.values()])

    def _is_due(self, tracked: Tracked) -> bool:
        """Whether a request that is held should be asked about again."""
        expected, match = tracked.expected, tracked.match
        if expected is None or match is None or expected.is_over or expected.is_late or not expected.left_s:
            return True
        return self._is_announced(tracked, match, expected)

    def wait(self, timeout_s: float) -> None:
        """Until one of those is over, or a moment has passed; at once where there is none."""
        num_waiting, deadline = self.num_waiting, time.monotonic() + timeout_s
        while num_waiting and self.num_waiting == num_waiting and time.monotonic() < deadline:
            time.sleep(POLL_S)

    # ---- plans --------------------------------------------------------------------------------------------------
    def _plan(self, tracked: Tracked, wanted: tuple[ChunkRef, ...], mode: str, *, is_near: bool) -> LoadPlan:
        ticket, tracked.wait = tracked.ticket, None
        if is_near:  # the load follows the rest
            deadline_s = self._config.load_deadline_s
            mode, tracked.wait = ASYNC, Wait(deadline_s, min(FOLLOW_S, deadline_s), min(FOLLOW_S, deadline_s))
        elif ticket is not None:
            num_kept = ticket.num_kept(wanted)
            if ticket.is_late:  # slower than computing it may take: go ahead with what there is
                if num_kept < len(wanted) and not ticket.is_told:
                    ticket.is_told = True
                    self._counts.fetch_late()
                    self._late.add(num_kept, len(wanted))
                wanted = wanted[:num_kept]
            if num_kept < len(wanted):  # the rest is read from further down, and a step must not wait for that
                mode = ASYNC
        num_new = self._num_new(tracked, wanted)
        if not num_new:
            if ticket is not None and ticket.is_late:
                tracked.may_load = False  # asked again, it would wait as long again
            self.drop_fetch(tracked)
            return NOTHING
        tracked.wanted, tracked.mode = wanted, mode
        return LoadPlan(num_new, mode)

    def drop_fetch(self, tracked: Tracked) -> None:
        """The request needs nothing more of lower tiers, or of others. Idempotent."""
        self._held.pop(tracked.request_id, None)
        ticket, tracked.ticket, tracked.is_queued = tracked.ticket, None, False
        if ticket is not None:
            ticket.release()

    def lease(self, tracked: Tracked) -> None:
        """Keep what is to be loaded from eviction."""
        space, match = tracked.space, Match(tracked.wanted)
        tracked.is_leased, tracked.is_fresh = True, False
        self._lookups.run(lambda: space.lease(match, tracked.request_id), None)

    def release(self, tracked: Tracked) -> None:
        """End the request's lease and fetch. Idempotent."""
        self.drop_fetch(tracked)
        if tracked.is_leased:
            tracked.is_leased = False
            space, request_id = tracked.space, tracked.request_id
            self._lookups.post(lambda: space.release(request_id))

    def exist(self, tracked: Tracked, chunks: Sequence[ChunkRef]) -> list[bool]:
        """Whether each chunk is in the first tier; none where the pool cannot be asked. What was found a moment ago,
        for the step that is being ordered, is not looked for again."""
        match = tracked.match if tracked.is_fresh else None
        found = {chunk.key for chunk in match.chunks} if match is not None else set()
        rest = [chunk for chunk in chunks if chunk.key not in found]
        answers = iter(self._lookups.run(lambda: tracked.space.exists(rest), [False] * len(rest)) if rest else ())
        return [chunk.key in found or next(answers) for chunk in chunks]

    def missing(self, tracked: Tracked, chunks: list[ChunkRef]) -> list[ChunkRef]:
        """From the first chunk on that is not in the first tier."""
        exist = self.exist(tracked, chunks)
        return chunks[exist.index(False) :] if False in exist else []


def _beyond(expected: Expected, tracked: Tracked) -> tuple[ChunkRef, ...]:
    """The chunks that hold tokens which the engine does not have itself."""
    return tuple(c for c in expected.chunks if c.first_token + c.num_tokens > tracked.num_local)
