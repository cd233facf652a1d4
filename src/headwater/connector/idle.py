"""A worker that does not take part in the pool. Every load that it is told to make fails at once."""

from __future__ import annotations

from headwater.connector.arrivals import Arrivals
from headwater.connector.orders import StepOrders, StepReport
from headwater.connector.stats import Times, TransferStats


class IdleWorker:
    """The null object of a worker side, with the reason why there is none."""

    follows_layers = needs_layers = False

    def __init__(self, reason: str, arrivals: Arrivals) -> None:
        """`arrivals`: those of a worker side that was left, if there was one."""
        self.reason = reason
        self._arrivals = arrivals

    def start_step(self, orders: StepOrders) -> None:
        """Nothing is saved."""

    def start_loads(self, orders: StepOrders) -> None:
        """Everything fails."""
        self._arrivals.fail_blocks(orders.wrong_blocks)
        self._arrivals.expect(orders.loads)
        for order in orders.loads:
            self._arrivals.end(order.job.request_id, 0)

    def before_layer(self, layer: int) -> None:
        """Nothing comes."""

    def wait_layers(self) -> None:
        """Nothing comes."""

    def after_layer(self, layer: int) -> None:
        """Nothing is saved."""

    def end_step(self) -> None:
        """Nothing is under way."""

    def end_loads(self) -> None:
        """Nothing is under way."""

    def discard(self) -> None:
        """Nothing was begun."""

    def take_finished(self) -> set[str]:
        """Requests that were to be loaded."""
        return self._arrivals.take_finished()

    def take_failed_blocks(self) -> set[int]:
        """Their blocks."""
        return self._arrivals.take_failed_blocks()

    def take_report(self) -> StepReport:
        """The scheduler side should stop asking."""
        return StepReport(declined=self.reason)

    def stats(self) -> TransferStats:
        """Nothing was moved."""
        return TransferStats()

    def take_times(self) -> Times:
        """Nothing was loaded or saved."""
        return {}

    def close(self) -> None:
        """Nothing to do."""
