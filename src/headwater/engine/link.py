"""The engine's line to the pool, as the scheduler sees it: what is there, bring it, keep this.

Requests are known to the pool by their arrival: their own ids may be used again while a load is still under way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from headwater.connector.config import ConnectorConfig
from headwater.connector.jobs import Job, Loaded
from headwater.connector.scheduler import SchedulerHalf
from headwater.connector.stats import TransferStats

if TYPE_CHECKING:
    from headwater.engine.request import Request
    from headwater.pool.space import Space


class LoadEnd(NamedTuple):
    """A load is over: the request with that arrival has the KV of its first `num_tokens` tokens."""

    arrival: int
    num_tokens: int


class Link(Protocol):
    """What the scheduler asks for. All of it is cheap: what takes long happens elsewhere."""

    def start_load(self, request: Request, num_shared: int) -> bool:
        """Bring what the pool has beyond `request.num_computed`, if that is worth it. True: the request must wait."""
        ...

    def save(self, request: Request, *, ends: bool) -> None:
        """Keep what has become complete; at the end of a request, or of its run, also its tail."""
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


class NoPool:
    """The null object: nothing is there, and nothing is kept."""

    def start_load(self, request: Request, num_shared: int) -> bool:
        """Nothing to load."""
        return False

    def save(self, request: Request, *, ends: bool) -> None:
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


class Mover(Protocol):
    """Whoever has the KV: all ranks of the engine."""

    def save(self, job: Job) -> None:
        """Take KV out of the cache, on every rank."""
        ...

    def load(self, job: Job) -> None:
        """Bring KV into the cache, on every rank."""
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

    def start_load(self, request: Request, num_shared: int) -> bool:
        """Ask the pool, and start the load where it has enough. In blocking mode it has ended on return."""
        # The last token's KV may come along, but the token itself is computed: the next one is sampled from it.
        num_matched = self._half.num_matched(str(request.arrival), request.tokens, len(request.tokens))
        num_matched = min(num_matched, len(request.tokens) - 1)
        if num_matched - request.num_computed < self._config.min_load_tokens:
            return False
        block_ids = request.page_row[: len(request.pages)]
        job = self._half.start_load(str(request.arrival), request.num_computed, block_ids, num_shared, self._dummy_page)
        self._mover.load(job)
        if self._config.load_mode == "async":
            return True
        while not (ended := self.take_loaded(wait_s=1.0)):
            pass
        request.num_computed = max(request.num_computed, min(ended[0].num_tokens, len(request.tokens) - 1))
        return False

    def save(self, request: Request, *, ends: bool) -> None:
        """Hash what is new, ask what is missing, and have the ranks take it."""
        tokens = request.tokens[: min(request.num_computed, len(request.tokens))]
        block_ids = request.page_row[: len(request.pages)]
        job = self._half.collect(str(request.arrival), tokens, request.num_prompt, block_ids, ends=ends)
        if job is not None:
            self._mover.save(job)

    def cancel(self, request: Request) -> None:
        """Stop its load; the end of it is still reported."""
        self._mover.cancel(str(request.arrival))

    def forget(self, request: Request) -> None:
        """Release what is remembered and leased."""
        self._half.forget(str(request.arrival))

    def take_loaded(self, wait_s: float) -> list[LoadEnd]:
        """Ask the ranks. Cheap where no load is under way."""
        return [
            LoadEnd(int(loaded.request_id), self._half.finish_load(loaded.request_id, loaded.num_chunks))
            for loaded in self._mover.wait_loaded(wait_s)
        ]

    def drain(self, timeout_s: float) -> bool:
        """Ask all ranks."""
        return self._mover.drain(timeout_s)

    def stats(self) -> TransferStats:
        """Ask rank 0."""
        return self._mover.transfer_stats()
