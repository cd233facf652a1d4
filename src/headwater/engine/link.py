"""The engine's line to the pool, as the scheduler sees it: what is there, bring it, keep this.

Requests are known to the pool by their arrival: their own ids may be used again while a load is still under way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from headwater.connector.config import ConnectorConfig
from headwater.connector.jobs import Job, Loaded
from headwater.connector.scheduler import SchedulerHalf
from headwater.connector.stats import SchedulerCounts, TransferStats
from headwater.stores.stats import StoreStats

if TYPE_CHECKING:
    from headwater.engine.request import Request
    from headwater.pool.space import Space


class LoadEnd(NamedTuple):
    """A load is over: the request with that arrival has the KV of its first `num_tokens` tokens."""

    arrival: int
    num_tokens: int


class LoadStart(NamedTuple):
    """What became of a wish to load."""

    is_loading: bool
    """The request's pages are being written; a `LoadEnd` follows."""
    num_tokens: int
    """The request may go on as if the KV of its first so many tokens were there: it is, or each layer of it will be
    when the step gets there. Whether it was right is known when the load has ended."""


NOTHING = LoadStart(False, 0)


class Link(Protocol):
    """What the scheduler asks for. All of it is cheap: what takes long happens elsewhere."""

    def start_load(self, request: Request, num_shared: int) -> LoadStart:
        """Bring what the pool has beyond `request.num_computed`, if that is worth it."""
        ...

    def begin_save(self, request: Request, num_tokens: int) -> None:
        """Keep what the coming step completes: it computes the request's KV up to `num_tokens`."""
        ...

    def discard(self) -> None:
        """The coming step will not be, or has failed: nothing that was begun for it may be kept."""
        ...

    def save(self, request: Request, *, ends: bool) -> None:
        """Keep what has become complete; at the end of a request, or of its run, also its tail."""
        ...

    def end_step(self) -> None:
        """Nothing more will be saved for now."""
        ...

    def cancel(self, request: Request) -> None:
        """Nobody waits for this load any more."""
        ...

    def forget(self, request: Request) -> None:
        """The request is over."""
        ...

    def take_loaded(self, wait_s: float) -> list[LoadEnd]:
        """Loads that have ended since the last call; waits for one at most that long, if any is under way."""
        ...

    def drain(self, timeout_s: float) -> bool:
        """Wait until what was given to the pool is in it, or given up; False if that takes longer."""
        ...

    def stats(self) -> TransferStats:
        """What rank 0 moved."""
        ...

    def store_stats(self) -> StoreStats | None:
        """The pool now, and what rank 0 did with each of its tiers; None without a pool."""
        ...


class NoPool:
    """The null object: nothing is there, and nothing is kept."""

    def start_load(self, request: Request, num_shared: int) -> LoadStart:
        """Nothing to load."""
        return NOTHING

    def begin_save(self, request: Request, num_tokens: int) -> None:
        """Nothing to do."""

    def discard(self) -> None:
        """Nothing to do."""

    def save(self, request: Request, *, ends: bool) -> None:
        """Nothing to do."""

    def end_step(self) -> None:
        """Nothing to do."""

    def cancel(self, request: Request) -> None:
        """Nothing to do."""

    def forget(self, request: Request) -> None:
        """Nothing to do."""

    def take_loaded(self, wait_s: float) -> list[LoadEnd]:
        """Nothing to wait for."""
        return []

    def drain(self, timeout_s: float) -> bool:
        """Nothing to wait for."""
        return True

    def stats(self) -> TransferStats:
        """Nothing was moved."""
        return TransferStats()

    def store_stats(self) -> StoreStats | None:
        """There is none."""
        return None


class Mover(Protocol):
    """Whoever has the KV: all ranks of the engine."""

    def save(self, job: Job) -> None:
        """Take KV out of the cache, on every rank: at `take_saves`, or before anything is written there again."""
        ...

    def take_saves(self) -> None:
        """Take what is to be saved out of the cache now."""
        ...

    def begin_save(self, job: Job) -> None:
        """Take KV out of the cache in the course of the next step, on every rank."""
        ...

    def discard(self) -> None:
        """Give up what the next step was to save, on every rank."""
        ...

    def load(self, job: Job, *, layerwise: bool) -> None:
        """Bring KV into the cache, on every rank; with `layerwise` the next step waits for it layer by layer."""
        ...

    def cancel(self, request_id: str) -> None:
        """Stop a load."""
        ...

    def wait_loaded(self, timeout_s: float) -> list[Loaded]:
        """Loads that have ended on all ranks; waits for one at most that long."""
        ...

    def drain(self, timeout_s: float) -> bool:
        """Wait for the saves of all ranks."""
        ...

    def store_stats(self) -> StoreStats | None:
        """The pool now, and what rank 0 did with each of its tiers."""
        ...

    def transfer_stats(self) -> TransferStats:
        """What rank 0 moved."""
        ...


class PoolLink:
    """A real line: the connector's scheduler half, and the ranks that move the bytes."""

    def __init__(self, space: Space, config: ConnectorConfig, mover: Mover, *, dummy_page: int) -> None:
        self._half = SchedulerHalf(space, config)
        self._config = config
        self._mover = mover
        self._dummy_page = dummy_page
        self._counts = SchedulerCounts()

    def start_load(self, request: Request, num_shared: int) -> LoadStart:
        """Ask the pool, and start the load where it has enough. In blocking mode it has ended on return."""
        # The last token's KV may come along, but the token itself is computed: the next one is sampled from it.
        num_matched = self._half.num_matched(str(request.arrival), request.tokens, len(request.tokens))
        num_matched = min(num_matched, len(request.tokens) - 1)
        self._counts.asked(str(request.arrival), len(request.tokens) - 1, num_matched)
        if num_matched - request.num_computed < self._config.min_load_tokens:
            return NOTHING
        block_ids = request.page_row[: len(request.pages)]
        job = self._half.start_load(str(request.arrival), request.num_computed, block_ids, num_shared, self._dummy_page)
        self._counts.load_started(job.request_id, range(request.num_computed, num_matched))
        mode = self._config.load_mode
        self._mover.load(job, layerwise=mode == "layerwise")
        if mode == "async":
            return LoadStart(True, 0)
        if mode == "layerwise":
            return LoadStart(True, num_matched)
        while not (ended := self.take_loaded(wait_s=1.0)):
            pass
        return LoadStart(False, min(ended[0].num_tokens, len(request.tokens) - 1))

    def begin_save(self, request: Request, num_tokens: int) -> None:
        """Hash what is new, ask what is missing, and have the ranks take it layer by layer."""
        if (job := self._collect(request, num_tokens, ends=False)) is not None:
            self._mover.begin_save(job)

    def discard(self) -> None:
        """Have the ranks give up what was begun."""
        self._mover.discard()

    def save(self, request: Request, *, ends: bool) -> None:
        """Hash what is new, ask what is missing, and have the ranks take it."""
        num_tokens = min(request.num_computed, len(request.tokens))
        if (job := self._collect(request, num_tokens, ends=ends)) is not None:
            self._mover.save(job)

    def _collect(self, request: Request, num_tokens: int, *, ends: bool) -> Job | None:
        return self._half.collect(
            str(request.arrival),
            request.tokens,
            request.num_prompt,
            request.page_row[: len(request.pages)],
            ends=ends,
            num_computed=num_tokens,
        )

    def end_step(self) -> None:
        """Have the ranks take what is to be saved, all of it in one go."""
        self._mover.take_saves()

    def cancel(self, request: Request) -> None:
        """Stop its load; the end of it is still reported."""
        self._counts.load_cancelled(str(request.arrival))
        self._mover.cancel(str(request.arrival))

    def forget(self, request: Request) -> None:
        """Release what is remembered and leased."""
        self._half.forget(str(request.arrival))

    def take_loaded(self, wait_s: float) -> list[LoadEnd]:
        """Ask the ranks. Cheap where no load is under way."""
        ended = []
        for name, num_chunks in ((loaded.request_id, loaded.num_chunks) for loaded in self._mover.wait_loaded(wait_s)):
            num_tokens = self._half.finish_load(name, num_chunks)
            self._counts.load_ended(name, num_tokens)
            ended.append(LoadEnd(int(name), num_tokens))
        return ended

    def drain(self, timeout_s: float) -> bool:
        """Ask all ranks."""
        return self._mover.drain(timeout_s)

    def stats(self) -> TransferStats:
        """What was asked for here, and what rank 0 moved."""
        return self._counts.add_to(self._mover.transfer_stats())

    def store_stats(self) -> StoreStats | None:
        """The pool now, and what rank 0 did with each of its tiers."""
        return self._mover.store_stats()
