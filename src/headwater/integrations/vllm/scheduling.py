"""The scheduler's side: which requests load what, which blocks are to be saved, and when.

A save is ordered with the step after the one that computed it, and taken by the workers before that step computes
anything. So nothing waits for a save, and no block is held for one: vLLM may give a finished or preempted request's
blocks to others at once, since they are read before they are written.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headwater.connector.config import ConnectorConfig
from headwater.connector.jobs import Job
from headwater.connector.scheduler import SchedulerHalf
from headwater.connector.stats import SchedulerCounts
from headwater.errors import HeadwaterError
from headwater.integrations.vllm.declined import LOGGER
from headwater.integrations.vllm.events import Events, NoEvents
from headwater.integrations.vllm.inputs import Adapters, Inputs, request_inputs
from headwater.integrations.vllm.messages import LoadOrder, SaveOrder, StepOrders, StepReport
from headwater.integrations.vllm.spoiled import Spoiled
from headwater.pool.space import Space

log = logging.getLogger(LOGGER)

NULL_BLOCK = 0
"""vLLM never reads this block: what must not be written elsewhere may be written here."""


@dataclass
class _Tracked:
    """One request of vLLM."""

    request: Any
    inputs: Inputs | None
    """None: it is served without the pool."""
    half: SchedulerHalf
    space: Space
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    """After the last step that was ordered."""
    num_local: int = 0
    next_save: int = 0
    """From so many computed tokens on there is a further chunk to save."""
    job: Job | None = None
    """The load under way."""
    is_over: bool = False
    is_suspect: bool = False
    """Some of its blocks are, or were, spoiled."""
    may_load: bool = True
    may_save: bool = True


class Scheduling:
    """One server's requests and the pool. The scheduler's thread calls it."""

    def __init__(
        self,
        space: Space,
        config: ConnectorConfig,
        events: Events | NoEvents,
        *,
        block_size: int,
        num_ranks: int,
        hashes_inputs: bool = True,
    ) -> None:
        """`hashes_inputs`: whether vLLM names images and sounds by their content."""
        self._config = config
        self._block_size = block_size
        self._chunk_tokens = space.chunk_tokens
        self._num_ranks = num_ranks
        self._events = events
        self._enter(space)
        self._adapters = Adapters()
        self._tracked: dict[str, _Tracked] = {}
        self._orders = StepOrders()
        self._ended: dict[str, list[int]] = {}
        """Loads that have ended on some ranks."""
        self._spoiled = Spoiled(block_size)
        self._hashes_inputs = hashes_inputs
        self.counts = SchedulerCounts()

    # ---- what the pool has --------------------------------------------------------------------------------------
    def add(self, request: Any) -> None:
        """A new request. Hashes its prompt."""
        self._track(request)

    def match(self, request: Any, num_computed: int) -> int:
        """How many tokens beyond `num_computed` can be loaded; 0 where that is not worth it."""
        tracked = self._track(request)
        if tracked.inputs is None or not tracked.may_load:
            return 0
        num_tokens: int = request.num_tokens
        num_matched = tracked.half.num_matched(request.request_id, request.all_token_ids, num_tokens)
        # The last token is computed in any case: the next one is sampled from it.
        num_matched = min(num_matched, num_tokens - 1)
        self.counts.asked(request.request_id, num_tokens - 1, num_matched)
        num_new = num_matched - num_computed
        if num_new < self._config.min_load_tokens:
            return 0
        tracked.num_local = num_computed
        return num_new

    def allocated(self, request: Any, block_ids: list[int], num_external: int) -> None:
        """Blocks for a request, `num_external` tokens of which are to be loaded."""
        if not num_external:
            return
        tracked = self._tracked[request.request_id]
        num_shared = tracked.num_local // self._block_size
        end = max(len(block_ids), -(-request.num_tokens // self._block_size))
        # The last chunk may end beyond the blocks that there are: by the one token that is computed.
        targets = np.full(end, NULL_BLOCK, np.int32)
        targets[: len(block_ids)] = block_ids
        tracked.job = tracked.half.start_load(
            request.request_id, tracked.num_local, targets, num_shared, dummy_block=NULL_BLOCK
        )
        assert tracked.inputs is not None, "nothing was matched for it"
        tenant, adapter = tracked.inputs.tenant, tracked.inputs.adapter
        self._orders.loads.append(LoadOrder(tracked.job, tracked.num_local, tenant, adapter))
        self.counts.load_started(request.request_id, range(tracked.num_local, tracked.num_local + num_external))

    # ---- steps --------------------------------------------------------------------------------------------------
    def order(self, step: Any) -> StepOrders:
        """What the workers are to do with this step."""
        for request_id in step.preempted_req_ids or ():
            if (tracked := self._tracked.get(request_id)) is not None:
                self._save(tracked, tracked.num_computed, ends=True)
                tracked.block_ids, tracked.num_computed = [], 0
        self._note_blocks(step)
        for request_id, num_scheduled in step.num_scheduled_tokens.items():
            tracked = self._tracked[request_id]
            num_computed = tracked.request.num_computed_tokens
            if num_computed >= tracked.next_save:
                self._save(tracked, num_computed, ends=False)
            tracked.num_computed = num_computed + num_scheduled
        orders = self._orders
        orders.epoch = self._space.identity.epoch
        orders.is_idle = not step.total_num_scheduled_tokens
        if self._spoiled:
            orders.wrong_blocks = self._look_for_wrong(step)
        self._orders = StepOrders()  # last: `leave` finds them where something went wrong before
        return orders

    def leave(self) -> StepOrders:
        """The end of this side: orders without which requests would wait for ever."""
        return StepOrders(loads=self._orders.loads, cancelled=self._orders.cancelled)

    def _look_for_wrong(self, step: Any) -> frozenset[int]:
        """Blocks that this step takes for computed and that are not, though they may become so in this very step."""
        suspects = [
            (tracked, num_scheduled)
            for request_id, num_scheduled in step.num_scheduled_tokens.items()
            if (tracked := self._tracked[request_id]).is_suspect
        ]
        for tracked, num_scheduled in suspects:
            # A load that fails is reported, and spoils its blocks again.
            num_computed = tracked.request.num_computed_tokens
            start = num_computed if tracked.job is None else tracked.num_local
            self._spoiled.rewrite(tracked.block_ids, start, num_computed + num_scheduled)
        wrong = set[int]()
        for tracked, _ in suspects:
            found = self._spoiled.wrong(tracked.block_ids, tracked.request.num_computed_tokens)
            wrong |= found
            tracked.is_suspect = bool(found) or self._spoiled.touches(tracked.block_ids)
        return frozenset(wrong)

    def finish(self, request: Any, block_ids: list[int]) -> None:
        """A request is over; its blocks are its own until the next step."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        if tracked.job is not None:
            tracked.is_over = True
            self.counts.load_cancelled(request.request_id)
            self._orders.cancelled.append(request.request_id)
            return
        tracked.block_ids = block_ids
        self._save(tracked, request.num_computed_tokens, ends=True)
        self._forget(tracked)

    def hear(self, report: StepReport | None, invalid_blocks: set[int]) -> None:
        """What the workers said after a step."""
        if invalid_blocks and self._config.load_mode != "async":  # there, nobody has used them
            self._spoil(invalid_blocks)
        for request_id, counts in (report.num_chunks if report is not None else {}).items():
            ranks = self._ended.setdefault(request_id, [])
            ranks += counts
            if len(ranks) >= self._num_ranks:
                del self._ended[request_id]
                self._end_load(request_id, min(ranks))

    def _spoil(self, invalid_blocks: set[int]) -> None:
        """A load failed: its blocks are wrong, and so is what was computed from them in the same step."""
        self._spoiled.add(invalid_blocks)
        for tracked in self._tracked.values():
            ids = tracked.block_ids
            first = next((number for number, block in enumerate(ids) if block in invalid_blocks), None)
            if first is not None:
                self._spoiled.add(ids[first:])
                tracked.is_suspect = True

    def start_epoch(self, space: Space) -> None:
        """From now on KV of other weights is computed. What is under way is neither saved nor loaded any more."""
        self._enter(space)
        self._orders.saves.clear()
        for tracked in self._tracked.values():
            tracked.may_save = tracked.may_load = False

    # ---- helpers ------------------------------------------------------------------------------------------------
    def _enter(self, space: Space) -> None:
        self._space = space
        self._half = SchedulerHalf(space, self._config)

    def _track(self, request: Any) -> _Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is not None and tracked.request is not request:  # an id that is used again
            self._forget(tracked)
            tracked = None
        if tracked is None:
            inputs = self._inputs(request)
            tracked = _Tracked(request, inputs, self._half, self._space)
            tracked.next_save = min(self._chunk_tokens, request.num_prompt_tokens)
            self._tracked[request.request_id] = tracked
            if inputs is not None:
                tokens, (tenant, adapter, extras) = request.all_token_ids, inputs
                try:
                    tracked.half.begin(request.request_id, tokens, tenant=tenant, adapter=adapter, extras=extras)
                except HeadwaterError as error:
                    log.warning("a request is served without the pool: %s", error)
                    tracked.inputs = None
        return tracked

    def _inputs(self, request: Any) -> Inputs | None:
        if request.mm_features and not self._hashes_inputs:
            return None
        return request_inputs(request, self._adapters)

    def _note_blocks(self, step: Any) -> None:
        for new in step.scheduled_new_reqs:
            self._tracked[new.req_id].block_ids = list(new.block_ids[0])
            self._suspect(self._tracked[new.req_id], new.block_ids[0])
        cached = step.scheduled_cached_reqs
        for request_id, new_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            tracked = self._tracked[request_id]
            if request_id in cached.resumed_req_ids:
                tracked.block_ids = list(new_ids[0]) if new_ids else []
            elif new_ids:
                tracked.block_ids += new_ids[0]
            if new_ids:
                self._suspect(tracked, new_ids[0])

    def _suspect(self, tracked: _Tracked, block_ids: list[int]) -> None:
        if self._spoiled and self._spoiled.touches(block_ids):
            tracked.is_suspect = True

    def _save(self, tracked: _Tracked, num_computed: int, *, ends: bool) -> None:
        """Order what is complete: chunks, a prompt's tail, with `ends` the request's.

        Tokens that are not known do not count, nor does the last one that was sampled: its place may hold the KV of a
        draft that was rejected.
        """
        request = tracked.request
        num_tokens = min(num_computed, request.num_tokens - (request.num_tokens > request.num_prompt_tokens))
        if self._spoiled:
            num_tokens = self._spoiled.num_right(tracked.block_ids, num_tokens)
        tracked.next_save = (num_tokens // self._chunk_tokens + 1) * self._chunk_tokens
        if num_tokens < request.num_prompt_tokens:
            tracked.next_save = min(tracked.next_save, request.num_prompt_tokens)
        if tracked.inputs is None or not tracked.may_save or not num_tokens:
            return
        job = tracked.half.collect(
            request.request_id,
            request.all_token_ids,
            request.num_prompt_tokens,
            np.array(tracked.block_ids, np.int32),
            ends=ends,
            num_computed=num_tokens,
        )
        if job is not None:
            self._orders.saves.append(SaveOrder(job, tracked.inputs.tenant, tracked.inputs.adapter))
            lora = request.lora_request
            self._events.saved(tracked.space, job.chunks, request.all_token_ids, lora.lora_name if lora else None)

    def _end_load(self, request_id: str, num_chunks: int) -> None:
        tracked = self._tracked.get(request_id)
        if tracked is None or tracked.job is None:
            return
        is_whole = num_chunks >= len(tracked.job.chunks)
        tracked.job = None
        self.counts.load_ended(request_id, tracked.half.finish_load(request_id, num_chunks))
        if tracked.is_over:
            self._forget(tracked)
        elif not is_whole:
            tracked.may_load = False  # once is enough: what failed would be found, and fail, again

    def _forget(self, tracked: _Tracked) -> None:
        del self._tracked[tracked.request.request_id]
        tracked.half.forget(tracked.request.request_id)
