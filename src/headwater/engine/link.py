"""The engine's line to the pool, as its scheduler sees it: the connector's scheduler side, in terms of requests.

Requests are known to the pool by their arrival: their own ids may be used again while a load is still under way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from headwater.connector.finder import NOTHING, LoadPlan
from headwater.connector.metrics import Source, Values
from headwater.connector.orders import StepOrders, StepReport
from headwater.connector.published import figures
from headwater.connector.scheduler import SchedulerSide
from headwater.connector.stats import TransferStats
from headwater.connector.totals import Spread
from headwater.connector.tracker import BlockIds, Inputs, Scheduled
from headwater.engine.params import FinishReason

if TYPE_CHECKING:
    from headwater.connector.config import ConnectorConfig
    from headwater.engine.request import Request
    from headwater.engine.scheduler import Step
    from headwater.pool.space import Space


class RequestLoadEnd(NamedTuple):
    """A load is over: the request with that arrival has the KV of its first `num_tokens` tokens."""

    arrival: int
    num_tokens: int


class PushEnd(NamedTuple):
    """A push is over: of the request with that arrival, the KV of so many tokens is with the other host."""

    arrival: int
    num_tokens: int


class EngineLink(Protocol):
    """What the scheduler and the engine ask for. All of it is cheap: what takes long happens elsewhere."""

    @property
    def is_loading(self) -> bool:
        """Whether a load is under way."""
        ...

    @property
    def num_fetching(self) -> int:
        """What waiting requests wait for: fetches from lower tiers, and KV that another server is to send."""
        ...

    def add(self, request: Request) -> None:
        """A new request."""
        ...

    def match(self, request: Request, num_local: int) -> LoadPlan | None:
        """What can be loaded beyond the tokens that are here; None while it is being fetched: ask again."""
        ...

    def start_load(self, request: Request) -> None:
        """Load what was matched last into the request's pages; a `RequestLoadEnd` follows."""
        ...

    def release(self, request: Request) -> None:
        """The request is about to lose its pages; what is complete of it is kept, its tail included."""
        ...

    def finish(self, request: Request) -> None:
        """The request is over. If its load is under way, its end is still reported."""
        ...

    def is_flushing(self, request: Request) -> bool:
        """Whether a request that is over waits for its push: a `PushEnd` follows."""
        ...

    def stop_push(self, request: Request) -> None:
        """Nobody waits for the push of a request any more."""
        ...

    def take_pushed(self) -> list[PushEnd]:
        """Pushes that are over since the last call."""
        ...

    def order(self, step: Step | None) -> StepOrders:
        """What the ranks are to do with the coming step; None: with nothing to compute."""
        ...

    def step_failed(self, orders: StepOrders) -> None:
        """The step was not computed."""
        ...

    def handle_report(self, report: StepReport) -> list[RequestLoadEnd]:
        """What the ranks said; the loads that have ended on all of them."""
        ...

    def add_to(self, stats: TransferStats) -> TransferStats:
        """A rank's counts, with those of this side."""
        ...


class NoPool:
    """The null object: nothing is there, and nothing is kept."""

    is_loading = False
    num_fetching = 0

    def add(self, request: Request) -> None:
        """Nothing to do."""

    def match(self, request: Request, num_local: int) -> LoadPlan | None:
        """Nothing to load."""
        return NOTHING

    def start_load(self, request: Request) -> None:
        """Never called: nothing is matched."""
        raise AssertionError("a load without a pool")

    def release(self, request: Request) -> None:
        """Nothing to do."""

    def finish(self, request: Request) -> None:
        """Nothing to do."""

    def is_flushing(self, request: Request) -> bool:
        """Nothing is pushed."""
        return False

    def stop_push(self, request: Request) -> None:
        """Nothing is pushed."""

    def take_pushed(self) -> list[PushEnd]:
        """Nothing is pushed."""
        return []

    def order(self, step: Step | None) -> StepOrders:
        """Nothing to do."""
        return StepOrders()

    def step_failed(self, orders: StepOrders) -> None:
        """Nothing to do."""

    def handle_report(self, report: StepReport) -> list[RequestLoadEnd]:
        """Nothing is told."""
        return []

    def add_to(self, stats: TransferStats) -> TransferStats:
        """Nothing was moved."""
        return stats


class PoolLink:
    """A real line: the connector's scheduler side."""

    def __init__(
        self, space: Space, config: ConnectorConfig, *, page_size: int, num_ranks: int, dummy_page: int
    ) -> None:
        self._side = SchedulerSide(space, config, block_size=page_size, num_ranks=num_ranks, dummy_block=dummy_page)
        self._flushing: set[int] = set()
        self._pushed: list[PushEnd] = []

    @property
    def is_loading(self) -> bool:
        """Whether a load is under way."""
        return self._side.is_loading

    @property
    def num_fetching(self) -> int:
        """See `EngineLink`."""
        return self._side.num_fetching

    def add(self, request: Request) -> None:
        """Hash its prompt."""
        inputs = Inputs(tenant=request.tenant)
        self._side.add(str(request.arrival), request.tokens, request.num_prompt, inputs, transfer=request.transfer)

    def match(self, request: Request, num_local: int) -> LoadPlan | None:
        """Ask the pool, and begin to fetch what is far away."""
        return self._side.match(str(request.arrival), num_local)

    def start_load(self, request: Request) -> None:
        """Order the load, with the coming step."""
        self._side.start_load(str(request.arrival), _page_ids(request))

    def release(self, request: Request) -> None:
        """Order the save of what is left of it."""
        self._side.preempted(str(request.arrival), request.num_computed, _page_ids(request))

    def finish(self, request: Request) -> None:
        """Forget it, as soon as its load has ended."""
        self._side.finish(str(request.arrival), 0, ())
        is_wanted = request.finish_reason is not FinishReason.ABORT
        if self._side.pushes.finish(str(request.arrival), is_wanted=is_wanted):
            self._flushing.add(request.arrival)

    def is_flushing(self, request: Request) -> bool:
        """See `EngineLink`."""
        return request.arrival in self._flushing

    def stop_push(self, request: Request) -> None:
        """See `EngineLink`."""
        if request.arrival in self._flushing:
            self._flushing.remove(request.arrival)
            self._side.pushes.stop(str(request.arrival))

    def take_pushed(self) -> list[PushEnd]:
        """See `EngineLink`."""
        pushed, self._pushed = self._pushed, []
        return pushed

    def order(self, step: Step | None) -> StepOrders:
        """The loads that were started, and what is to be saved."""
        chunks = step.chunks if step is not None else ()
        return self._side.order(
            [
                Scheduled(str(chunk.request.arrival), chunk.start, chunk.num_tokens, _page_ids(chunk.request))
                for chunk in chunks
            ]
        )

    def step_failed(self, orders: StepOrders) -> None:
        """Order its saves again with a later step."""
        self._side.step_failed(orders)

    def handle_report(self, report: StepReport) -> list[RequestLoadEnd]:
        """The shortest rank decides how long a load is, and a push."""
        for name, num_tokens in self._side.pushes.handle_report(report):
            self._flushing.discard(int(name))
            self._pushed.append(PushEnd(int(name), num_tokens))
        return [RequestLoadEnd(int(name), num_tokens) for name, num_tokens in self._side.handle_report(report)]

    def add_to(self, stats: TransferStats) -> TransferStats:
        """Tokens that were looked up and loaded, and how long requests waited."""
        return self._side.add_to(stats)

    def figures(self) -> tuple[Values, Spread]:
        """The same, as it is published beside the pool. From any thread."""
        return figures(self.add_to(TransferStats()), Source.SCHEDULER)


def _page_ids(request: Request) -> BlockIds:
    return request.page_row[: len(request.pages)]
