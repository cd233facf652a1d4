"""The scheduler side: which requests load what, and which of their chunks are saved, and when. It knows no memory.

A prompt is saved in the step that computes it, if all KV that this step builds on is certain to be right. Everything
else is saved before a later step writes anything: generated tokens, tails, what is preempted, what was dropped and is
tried again. So nothing waits for a save, and no block is held for one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from headwater.connector.config import AUTO, ConnectorConfig
from headwater.connector.events import EventListener, NoListener
from headwater.connector.finder import Finder, LoadPlan
from headwater.connector.misfits import Misfits
from headwater.connector.orders import ASYNC, LAYERWISE, LoadOrder, SaveOrder, StepOrders, StepReport, TransferJob
from headwater.connector.origins import Origins
from headwater.connector.pushes import Pushes
from headwater.connector.spoiled import Spoiled
from headwater.connector.stats import SchedulerCounts, TransferStats
from headwater.connector.tracker import BlockIds, Inputs, LostChunks, SaveProgress, Scheduled, Tracked
from headwater.connector.transfers import TransferParams
from headwater.connector.uncertain import Uncertain, followers
from headwater.errors import HeadwaterError
from headwater.pool.space import Space

log = logging.getLogger(__name__)

MAX_SHARED_BYTES = 16 << 30
"""When so much is loaded in a step, no other request joins it: all of them wait for the last load, a third of a second
here. Below that, one step for all is sooner over than a step for each that comes: they would be launched while the next
loads need the host, too."""
MAX_ENDED = 4096
"""Requests that are over, whose last saves may still be reported as dropped."""


class LoadEnd(NamedTuple):
    """A load has ended on all ranks: the KV of the request's first `num_tokens` tokens is there because of it."""

    request_id: str
    num_tokens: int


class _Held(NamedTuple):
    """A request that is over and whose last save waits until the loads that it builds on are known to be right."""

    tracked: Tracked
    num_computed: int
    block_ids: BlockIds


class SchedulerSide:
    """One engine's requests and one space of the pool. The scheduler's thread calls it.

    Request ids are the engine's. An id may be used again once `finish` was called for it. Until a load of its former
    owner has ended, its new one loads nothing, because workers tell loads apart by this id alone.
    """

    def __init__(
        self,
        space: Space,
        config: ConnectorConfig,
        *,
        block_size: int,
        num_ranks: int,
        dummy_block: int,
        listener: EventListener | None = None,
    ) -> None:
        """`dummy_block` may be written by any load: it takes what must not go into shared blocks."""
        self._space = space
        self._config = config
        self._block_size = block_size
        self._num_ranks = num_ranks
        self._dummy_block = dummy_block
        self._listener: EventListener = listener or NoListener()
        self.counts = SchedulerCounts()
        self.loads_in_step = True
        """Whether a load may go along with the step that needs it, where the configuration allows that."""
        self._finder = Finder(space.lookup_s, config, self.counts)
        self._tracked: dict[str, Tracked] = {}
        self._before: list[SaveOrder] = []
        self._loads: list[LoadOrder] = []
        self._cancelled: list[str] = []
        self._step = 0
        self._ended: dict[str, list[int]] = {}
        """Loads that have ended on some ranks."""
        self._former: dict[str, Tracked] = {}
        """By id that is used again: the former owner, whose load has not ended."""
        self._is_clean = True
        """Whether the engine's own cache holds KV of this epoch alone."""
        self._origins = Origins(block_size)
        self._uncertain = Uncertain()
        self._held: list[_Held] = []
        """Requests that are over, since the last step was ordered."""
        self._spoiled = Spoiled(block_size)
        self._lost = LostChunks()
        self._misfits = Misfits()
        self.pushes = Pushes(num_ranks)
        """Prompts whose KV goes to another host as well."""
        self._last_saves: dict[str, tuple[SaveProgress, int]] = {}
        """By request that is over: how far it is saved, if nothing is dropped any more."""

    # ---- requests -----------------------------------------------------------------------------------------------
    def add(
        self,
        request_id: str,
        tokens: Sequence[int],
        num_prompt: int,
        inputs: Inputs | None = Inputs(),  # noqa: B008
        *,
        label: str | None = None,
        transfer: TransferParams | None = None,
    ) -> None:
        """A new request. Hashes its prompt. Without `inputs` it is served without the pool."""
        inputs = inputs if self._is_clean else None
        if (former := self._tracked.pop(request_id, None)) is not None:  # an id that is used again
            if former.load is None:
                self._forget(former)
            else:
                self._former[request_id] = former
                if not former.is_over:
                    self.counts.load_cancelled(request_id)
                    self._cancelled.append(request_id)
        self._last_saves.pop(request_id, None)
        keys = self._space.keys()
        if inputs is not None:
            try:
                tenant, adapter, extras = inputs
                keys = self._space.keys(tokens, tenant=tenant, adapter=adapter, extras=extras)
            except HeadwaterError as error:
                log.warning("a request is served without the pool: %s", error)
                inputs = None
        saves = SaveProgress(self._space.chunk_tokens, num_prompt, self._config.min_load_tokens)
        self._tracked[request_id] = Tracked(
            request_id,
            tokens,
            num_prompt,
            inputs,
            self._space,
            keys,
            saves,
            label=label,
            may_load=request_id not in self._former,
        )
        if transfer is None or inputs is None:
            return
        if transfer.is_expected and self._config.loads:
            self._finder.expect(self._tracked[request_id], transfer)
        if transfer.push_to and self._config.saves:
            self.pushes.begin(self._tracked[request_id], transfer)

    def match(self, request_id: str, num_local: int) -> LoadPlan | None:
        """What can be loaded beyond the `num_local` tokens that the engine has itself. `num_tokens` 0: nothing that is
        worth it. None: it is being fetched from a lower tier, or waits for the end of a load in a step; ask again.
        Changes nothing that the engine sees."""
        tracked = self._tracked[request_id]
        if tracked.load is not None:
            return None
        plan = self._finder.find(tracked, num_local, self._mode(tracked))
        if plan is not None and tracked.match is not None:
            most = len(tracked.tokens) - 1
            self.counts.asked(request_id, most, min(tracked.match.num_tokens, most))
        is_rash = plan is not None and plan.num_tokens and plan.mode == ASYNC and num_local and self._uncertain
        if is_rash and self._config.load_mode == AUTO:
            return None  # it would hold blocks, some of them perhaps wrong: one step later that is known
        return plan

    def _mode(self, tracked: Tracked) -> str:
        """How a request is to wait for KV that is near, as things stand: in the step that needs it if that stalls
        nobody. Several requests may load in the same step, as long as they hardly wait for each other."""
        mode = self._config.load_mode if self.loads_in_step else ASYNC
        if mode != AUTO:
            return mode
        num_tokens = sum(chunk.num_tokens for load in self._loads for chunk in load.job.chunks)
        if self._space.spec.extent_bytes(1) * num_tokens > MAX_SHARED_BYTES:
            return ASYNC
        others = (*self._tracked.values(), *self._former.values())
        return ASYNC if any(other.is_busy for other in others if other is not tracked) else LAYERWISE

    def match_nothing(self, request_id: str, num_local: int) -> None:
        """The engine has `num_local` tokens of a request itself, and it is to load nothing."""
        tracked = self._tracked[request_id]
        tracked.num_local = tracked.num_explained = num_local

    def allocated(self, request_id: str, block_ids: BlockIds) -> None:
        """A request got these blocks. If it is not in the next step, and loads nothing from here, another connector
        loads into them."""
        self._origins.allocated[request_id] = block_ids

    def start_load(self, request_id: str, block_ids: BlockIds) -> None:
        """Order the load of what was matched last, into these blocks: the request's, from its first token on.

        Whole blocks that the engine has itself may belong to others too: what would go there goes to the dummy block.
        """
        tracked = self._tracked[request_id]
        assert tracked.inputs is not None, "nothing was matched for it"
        assert tracked.wanted, "start_load before match"
        self._finder.lease(tracked)
        # The last chunk may end beyond the blocks that there are: by the one token that is computed.
        num_blocks = max(len(block_ids), -(-len(tracked.tokens) // self._block_size))
        targets = np.full(num_blocks, self._dummy_block, np.int32)
        num_shared = tracked.num_local // self._block_size
        targets[num_shared : len(block_ids)] = block_ids[num_shared:]
        end = tracked.wanted[-1].first_token + tracked.wanted[-1].num_tokens
        tenant, adapter, _ = tracked.inputs
        job = TransferJob.of(request_id, tracked.wanted, targets)
        tracked.load = LoadOrder(job, tracked.num_local, tenant, adapter, tracked.mode, tracked.wait)
        if tracked.mode != ASYNC:
            self._uncertain.begin(request_id, block_ids[num_shared:])
        # Whether it is also in the tier that saves go to is no matter: until it has come, there is nothing to save.
        tracked.saves.num_saved = max(tracked.saves.num_saved, end)
        self._loads.append(tracked.load)
        if tracked.wait is not None:
            self.counts.followed()
        self.counts.load_started(request_id, range(tracked.num_local, min(end, len(tracked.tokens) - 1)))

    def preempted(self, request_id: str, num_computed: int | None = None, block_ids: BlockIds | None = None) -> None:
        """A request loses its blocks, which are still its own until the next step. None: as after the last step."""
        if (tracked := self._tracked.get(request_id)) is None:
            return
        blocks = tracked.block_ids if block_ids is None else block_ids
        if self.is_uncertain(blocks):
            self._uncertain.leave(blocks)
        else:
            self._save_last(tracked, tracked.num_computed if num_computed is None else num_computed, blocks)
        tracked.block_ids, tracked.num_computed = (), 0

    def finish(self, request_id: str, num_computed: int, block_ids: BlockIds) -> None:
        """A request is over; its blocks are its own until the next step, or until its load has ended."""
        if (tracked := self._tracked.get(request_id)) is None or tracked.is_over:
            return
        # What it has beyond that, somebody else loaded for a step that never came.
        num_computed = min(num_computed, tracked.num_computed)
        is_uncertain = self.is_uncertain(block_ids)
        if is_uncertain:
            self._uncertain.leave(block_ids)
            self._held.append(_Held(tracked, num_computed, block_ids))
        if tracked.load is not None:
            tracked.is_over = True
            if tracked.load.mode == ASYNC:  # others have gone along with a step that was computed
                self.counts.load_cancelled(request_id)
                self._cancelled.append(request_id)
            return
        del self._tracked[request_id]
        if not is_uncertain:
            self._save_last(tracked, num_computed, block_ids)
            self._forget(tracked)

    def start_epoch(self, space: Space, *, is_clean: bool = True) -> None:
        """From now on KV of other weights is computed. What is under way is neither saved nor loaded any more.

        Unless the engine's own cache `is_clean`, new requests may share old KV in it: until the next epoch they are
        served without the pool.
        """
        self._space = space
        self._is_clean = is_clean
        self._before.clear()
        self._origins.clear()
        for tracked in [*self._tracked.values()]:
            tracked.may_load, tracked.is_foreign = False, True
            if tracked.load is None:
                self._finder.drop_fetch(tracked)
                if is_clean and not len(tracked.block_ids):  # nothing of it is computed: it belongs to the new epoch
                    request = tracked.request_id, tracked.tokens, tracked.num_prompt, tracked.inputs
                    transfer = None if tracked.expected is None else tracked.expected.transfer
                    self.add(*request, label=tracked.label, transfer=transfer)

    # ---- steps --------------------------------------------------------------------------------------------------
    def order(self, scheduled: Sequence[Scheduled], *, is_idle: bool = False) -> StepOrders:
        """What the workers are to do with the step in which these requests are computed."""
        self._step += 1
        during: list[SaveOrder] = []
        self._drop_held()
        self._origins.note(scheduled, self._tracked)
        if self._uncertain:
            self._uncertain.spread([item.block_ids for item in scheduled])
        for item in scheduled:
            tracked = self._tracked[item.request_id]
            tracked.block_ids = item.block_ids
            if self._spoiled and self._spoiled.touches(item.block_ids):
                tracked.is_suspect = True
            if tracked.load is None:
                self._finder.drop_fetch(tracked)  # it computes what it could have loaded
                if not self.is_uncertain(item.block_ids):
                    during += self._save_step(tracked, item)
            tracked.is_fresh = False
            tracked.num_computed = tracked.num_explained = item.num_computed + item.num_scheduled
            self.pushes.computes(item.request_id, tracked.num_computed)
            tracked.num_most = max(tracked.num_most, tracked.num_computed)
        pushes, flushes = self.pushes.take()
        orders = StepOrders(
            epoch=self._space.identity.epoch,
            before=tuple(self._before),
            during=tuple(during),
            loads=tuple(self._loads),
            pushes=pushes,
            flushes=flushes,
            cancelled=tuple(filter(self._is_abandoned, self._cancelled)),
            wrong_blocks=self._look_for_wrong(scheduled) if self._spoiled else frozenset(),
            is_idle=is_idle,
        )
        self._before, self._loads, self._cancelled = [], [], []  # last: `leave` finds them where something went wrong
        return orders

    def _is_abandoned(self, request_id: str) -> bool:
        return request_id in self._former or (request_id in self._tracked and self._tracked[request_id].is_over)

    def leave(self) -> StepOrders:
        """The end of this side: orders without which requests would wait for ever."""
        return StepOrders(loads=tuple(self._loads), cancelled=tuple(self._cancelled))

    def step_failed(self, orders: StepOrders) -> None:
        """The step that these orders went with was not computed: what it was to save is to be saved again."""
        for order in (*orders.before, *orders.during):
            if (tracked := self._tracked.get(order.job.request_id)) is not None:
                tracked.saves.lower(order.job.chunks[0].first_token)

    def handle_report(self, report: StepReport | None, invalid_blocks: Iterable[int] = ()) -> list[LoadEnd]:
        """Take the workers' report of a step, and the blocks that the engine was told not to use. Returns the loads
        that have ended on all ranks."""
        invalid, report = set(invalid_blocks), report or StepReport()
        for request_id in report.ended:
            tracked = self._former.get(request_id) or self._tracked.get(request_id)
            if tracked is not None and tracked.load is not None and tracked.load.mode == ASYNC:
                invalid.difference_update(tracked.load.job.block_ids.tolist())  # nobody has used them
        if invalid:
            self._spoil(invalid)
        self._misfits.add(report.misfits)
        for request_id, first_token in report.unsaved.items():
            self._dropped(request_id, first_token)
        ends = []
        for request_id, counts in report.ended.items():
            ranks = self._ended.setdefault(request_id, [])
            ranks += counts
            if len(ranks) >= self._num_ranks:
                ends += self._end_load(request_id, min(self._ended.pop(request_id)))
        self._save_held()
        return ends

    def is_uncertain(self, block_ids: BlockIds) -> bool:
        """Whether one of these blocks depends on a load that goes along with a step and whose end is not known."""
        return bool(self._uncertain) and self._uncertain.touches(block_ids)

    def holds_uncertain(self, request_id: str) -> bool:
        """Whether a request has such blocks. Unknown requests have none."""
        return request_id in self._tracked and self.is_uncertain(self._tracked[request_id].block_ids)

    @property
    def wrong_blocks(self) -> set[int]:
        """Blocks that do not hold what the engine takes them for."""
        return self._spoiled.block_ids

    # ---- waiting ------------------------------------------------------------------------------------------------
    @property
    def is_loading(self) -> bool:
        """Whether a load is under way."""
        return bool(self._former) or any(tracked.load is not None for tracked in self._tracked.values())

    @property
    def num_fetching(self) -> int:
        """What requests without blocks wait for: fetches from lower tiers, and KV that another server is to send."""
        return self._finder.num_waiting

    def wait_fetch(self, timeout_s: float) -> None:
        """For an engine with nothing to compute: wait until a fetch has ended, at most that long."""
        self._finder.wait(timeout_s)

    def add_to(self, stats: TransferStats) -> TransferStats:
        """A rank's counts, with what only this side counts."""
        return self.counts.add_to(stats)

    # ---- saves --------------------------------------------------------------------------------------------------
    def _save_step(self, tracked: Tracked, item: Scheduled) -> list[SaveOrder]:
        """Order what was computed before this step, and return the order of what the step itself completes."""
        # Blocks that are new to the request may be another one's, which computes them in this very step.
        num_before = 0 if item.is_new else item.num_computed
        if num_before and tracked.saves.is_due(num_before, self._step):
            self._before += self._save(tracked, num_before)
        num_after = min(item.num_computed + item.num_scheduled, tracked.num_prompt)
        if item.num_computed < tracked.num_prompt and tracked.saves.is_due(num_after, self._step):
            return self._save(tracked, num_after)
        return []

    def _save(self, tracked: Tracked, num_computed: int, *, ends: bool = False) -> list[SaveOrder]:
        """The order for all that is complete and not saved of the first `num_computed` tokens: chunks, a prompt's tail,
        with `ends` the request's. What the pool has is left out, but for children of a chunk that it has not."""
        num_tokens = self._num_to_save(tracked, num_computed)
        if self._spoiled:
            num_tokens = self._spoiled.num_right(tracked.block_ids, num_tokens)
        tracked.saves.looked(num_tokens)
        limit = tracked.saves.limit(num_tokens, ends=ends)
        if limit <= tracked.saves.num_saved or not self._may_save(tracked):
            return []
        assert tracked.inputs is not None
        tracked.extend_keys(limit)
        chunks = self._finder.missing(tracked, tracked.saves.chunks(tracked.keys, limit))
        tracked.saves.num_saved = limit
        if not chunks:
            return []
        self._listener.saved(tracked.space, chunks, tracked.tokens, tracked.label)
        tenant, adapter, _ = tracked.inputs
        job = TransferJob.of(tracked.request_id, chunks, np.array(tracked.block_ids, np.int32))
        return [SaveOrder(job, tenant, adapter, self._misfits.raw(chunks))]

    def _may_save(self, tracked: Tracked) -> bool:
        return self._config.saves and tracked.inputs is not None and not tracked.is_foreign

    def _num_to_save(self, tracked: Tracked, num_computed: int) -> int:
        """Of the first `num_computed` tokens: those that can be named, and are wanted in the pool."""
        num_tokens = min(num_computed, tracked.num_known)
        return num_tokens if self._config.save_decoded else min(num_tokens, tracked.num_prompt)

    def _save_last(self, tracked: Tracked, num_computed: int, block_ids: BlockIds) -> None:
        """Order all that is left of a request that loses its blocks."""
        tracked.block_ids = block_ids
        if not tracked.saves.is_aborted:
            self._before += self._save(tracked, num_computed, ends=True)

    def _save_held(self) -> None:
        """Order the last save of requests that are over, and of which all is known now: their blocks are still theirs,
        since no step was ordered meanwhile."""
        waiting, self._held = self._held, []
        for held in waiting:
            if held.tracked.load is None and not self.is_uncertain(held.block_ids):
                self._save_last(*held)
                self._forget(held.tracked)
            else:
                self._held.append(held)

    def _drop_held(self) -> None:
        """Others may have the blocks of requests that are over from now on: too late for their last save."""
        dropped, self._held = self._held, []
        for held in dropped:
            if held.tracked.load is None:
                self._forget(held.tracked)

    def _dropped(self, request_id: str, first_token: int) -> None:
        """A rank had no room for some chunks of a request, or the pool had none."""
        if (tracked := self._tracked.get(request_id)) is not None:
            tracked.saves.dropped(first_token, self._step)
        elif (last := self._last_saves.pop(request_id, None)) is not None:
            progress, num_tokens = last
            progress.lower(first_token)
            self._lost.add(progress.num_lost(num_tokens))

    # ---- loads that end -----------------------------------------------------------------------------------------
    def _end_load(self, request_id: str, num_chunks: int) -> list[LoadEnd]:
        self._uncertain.end(request_id)
        if (former := self._former.pop(request_id, None)) is not None:
            self._finder.release(former)
            return []
        tracked = self._tracked.get(request_id)
        if tracked is None or tracked.load is None:
            return []
        load, tracked.load = tracked.load, None
        self._finder.release(tracked)
        chunks = load.job.chunks
        end = chunks[num_chunks - 1].first_token + chunks[num_chunks - 1].num_tokens if num_chunks else 0
        self.counts.load_ended(request_id, end)
        tracked.num_explained = max(tracked.num_explained, end)
        if load.mode == ASYNC and self._spoiled and num_chunks:
            self._spoiled.rewrite(load.job.block_ids.tolist(), load.num_local, end)
        self._finder.stop_expecting(tracked, is_short=num_chunks < len(chunks) and not tracked.is_over)
        if num_chunks < len(chunks):  # the engine computes the rest, which is then as good as new
            tracked.saves.lower(chunks[num_chunks].first_token)
            tracked.may_load = False  # once is enough: what failed would be found, and fail, again
        if tracked.is_over:
            del self._tracked[request_id]
            if all(held.tracked is not tracked for held in self._held):
                self._forget(tracked)
        return [LoadEnd(request_id, end)]

    def _forget(self, tracked: Tracked) -> None:
        """The end of a request that is not tracked any more."""
        self._finder.release(tracked)
        saves = tracked.saves
        if saves.is_aborted:
            num_tokens = self._num_to_save(tracked, tracked.num_most)
            self._lost.add(saves.num_lost(saves.limit(num_tokens, ends=True)))
        elif saves.num_saved:
            self._last_saves[tracked.request_id] = saves, saves.num_saved
            while len(self._last_saves) > MAX_ENDED:
                del self._last_saves[next(iter(self._last_saves))]

    # ---- blocks that are wrong ----------------------------------------------------------------------------------
    def _spoil(self, invalid_blocks: set[int]) -> None:
        """A load failed: its blocks are wrong, and so is what was computed from them since."""
        requests = (*self._tracked.values(), *self._former.values())
        wrong = followers(invalid_blocks, [*(tracked.block_ids for tracked in requests), *self._uncertain.left])
        self._spoiled.add(wrong)
        for tracked in requests:
            tracked.is_suspect |= not wrong.isdisjoint(tracked.block_ids)

    def _look_for_wrong(self, scheduled: Sequence[Scheduled]) -> frozenset[int]:
        """Blocks that this step takes for computed and that are not, though they may become so in this very step."""
        return self._spoiled.look([(item, self._tracked[item.request_id]) for item in scheduled])
