"""A worker's side: one rank's cache and the pool. Executes orders; decides nothing but whether it can take part at all.

A worker that cannot, or whose load failed, says so for every block it was to fill: vLLM computes those.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from headwater.connector.config import ConnectorConfig
from headwater.connector.jobs import Job, Loaded
from headwater.connector.stats import TransferStats
from headwater.connector.worker import WorkerHalf
from headwater.integrations.vllm.messages import LoadOrder, StepOrders, StepReport
from headwater.integrations.vllm.scheduling import NULL_BLOCK
from headwater.kv.topology import Shard
from headwater.pool.space import Space
from headwater.transfer.view import PagedView

IDLE_WAIT_S = 0.05
"""How long a step that has nothing to compute waits for a load: then vLLM looks for new requests."""


class Working:
    """Loads and saves of one rank. The thread that runs the model calls it."""

    def __init__(self, config: ConnectorConfig, shard: Shard, view: PagedView, *, block_size: int) -> None:
        self._config = config
        self._shard = shard
        self._view = view
        self._block_size = block_size
        self._ratio = block_size // view.block_size
        self._half: WorkerHalf | None = None
        self._space: Space | None = None
        self._loads: dict[str, LoadOrder] = {}
        self._arrived: deque[Loaded] = deque()
        self._arrival = threading.Condition()
        self._finished: set[str] = set()
        self._errors: set[int] = set()
        self._report = StepReport()

    def enter(self, space: Space) -> None:
        """Use this space from now on."""
        if self._half is not None:
            self._half.close()
        with _all_cores():
            self._half = WorkerHalf(space, self._view, self._shard, self._config, self._arrive)
        self._space = space

    @property
    def epoch(self) -> int | None:
        """The epoch of the space in use."""
        return None if self._space is None else self._space.identity.epoch

    # ---- a step -------------------------------------------------------------------------------------------------
    def save(self, orders: StepOrders) -> None:
        """Take what is to be saved out of the cache, before the step writes anything."""
        assert self._half is not None
        assert self._space is not None
        for request_id in orders.cancelled:
            self._half.cancel(request_id)
        for order in orders.saves:
            self._space.root(tenant=order.tenant, adapter=order.adapter)  # so that this process knows it
        self._half.save([self._kernel_job(order.job) for order in orders.saves])

    def load(self, orders: StepOrders) -> None:
        """Start loads; in blocking mode they have ended on return."""
        assert self._half is not None
        assert self._space is not None
        self._errors |= orders.wrong_blocks
        mode = self._config.load_mode
        for order in orders.loads:
            self._loads[order.job.request_id] = order
            self._space.root(tenant=order.tenant, adapter=order.adapter)  # for what is brought to a faster tier
            self._half.load(self._kernel_job(order.job), layerwise=mode == "layerwise")
        if mode == "blocking":
            self._wait(lambda: not self._loads, None)
        elif orders.is_idle and self._loads:
            self._wait(lambda: bool(self._finished), IDLE_WAIT_S)
        self._take_arrived()

    def wait_layer(self, layer: int) -> None:
        """Wait until a layer's KV is there."""
        if self._half is not None and self._half.follows_layers:
            self._half.before_layer(layer)

    def end_step(self) -> None:
        """The forward is over: of loads that went along with it, nothing is under way any more."""
        if self._config.load_mode == "layerwise":
            self._wait(lambda: not self._loads, None)
        self._take_arrived()

    def take_finished(self) -> set[str]:
        """Requests whose load has ended since the last call; only where vLLM waits for them."""
        finished, self._finished = self._finished, set()
        return finished if self._config.load_mode == "async" else set()

    def take_errors(self) -> set[int]:
        """Blocks that were to be filled and were not, since the last call."""
        errors, self._errors = self._errors, set()
        return errors

    def take_report(self) -> StepReport | None:
        """What the scheduler's side should know of this step."""
        report, self._report = self._report, StepReport()
        return report if report.num_chunks else None

    def stats(self) -> TransferStats:
        """Counts since the start, or since the last epoch began."""
        return TransferStats() if self._half is None else self._half.stats()

    def take_load_times(self) -> list[float]:
        """Seconds that each load took which has ended since the last call."""
        return [] if self._half is None else self._half.take_load_times()

    def close(self) -> None:
        """Finish what is being saved."""
        if self._half is not None:
            self._half.close()
            self._half = None

    def give_up(self) -> list[LoadOrder]:
        """Close it; the loads that it has not reported."""
        self.close()
        orders = [*self._loads.values()]
        self._loads.clear()
        return orders

    # ---- loads that end -----------------------------------------------------------------------------------------
    def _arrive(self, loaded: Loaded) -> None:
        with self._arrival:
            self._arrived.append(loaded)
            self._arrival.notify()

    def _wait(self, is_enough: Any, timeout_s: float | None) -> None:
        """Until something is enough. Every load ends by its deadline, so this does too."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._take_arrived()
            left_s = None if deadline is None else deadline - time.monotonic()
            if is_enough() or (left_s is not None and left_s <= 0):
                return
            with self._arrival:
                self._arrival.wait_for(lambda: bool(self._arrived), left_s)

    def _take_arrived(self) -> None:
        while self._arrived:
            loaded = self._arrived.popleft()
            order = self._loads.pop(loaded.request_id, None)
            if order is not None:
                self._end(order, loaded.num_chunks)

    def _end(self, order: LoadOrder, num_chunks: int) -> None:
        job = order.job
        self._finished.add(job.request_id)
        self._report.num_chunks.setdefault(job.request_id, []).append(num_chunks)
        if num_chunks < len(job.chunks):
            self._errors |= failed_blocks(order, num_chunks, self._block_size)

    def _kernel_job(self, job: Job) -> Job:
        """The job in blocks of the attention kernel, where those are smaller than vLLM's."""
        if self._ratio == 1:
            return job
        parts = np.arange(self._ratio, dtype=np.int32)
        ids: npt.NDArray[np.int32] = (job.block_ids[:, None] * self._ratio + parts).ravel()
        return Job(job.request_id, job.chunks, ids)


class Idle:
    """A worker that does not take part. Whatever it is to load, it reports as failed."""

    def __init__(self, reason: str, block_size: int, load_mode: str) -> None:
        self.reason = reason
        self.epoch: int | None = None
        self._block_size = block_size
        self._load_mode = load_mode
        self._finished: set[str] = set()
        self._errors: set[int] = set()

    def take_over(self, loads: list[LoadOrder]) -> None:
        """Report loads that somebody else has left."""
        self.load(StepOrders(loads=loads))

    def save(self, orders: StepOrders) -> None:
        """Nothing is saved."""

    def load(self, orders: StepOrders) -> None:
        """Everything fails."""
        self._errors |= orders.wrong_blocks
        for order in orders.loads:
            self._finished.add(order.job.request_id)
            self._errors |= failed_blocks(order, 0, self._block_size)

    def wait_layer(self, layer: int) -> None:
        """Nothing comes."""

    def end_step(self) -> None:
        """Nothing is under way."""

    def take_finished(self) -> set[str]:
        """Requests that were to be loaded."""
        finished, self._finished = self._finished, set()
        return finished if self._load_mode == "async" else set()

    def take_errors(self) -> set[int]:
        """Their blocks."""
        errors, self._errors = self._errors, set()
        return errors

    def take_report(self) -> StepReport | None:
        """The scheduler's side should stop asking."""
        return StepReport(declined=self.reason)

    def stats(self) -> TransferStats:
        """Nothing was moved."""
        return TransferStats()

    def take_load_times(self) -> list[float]:
        """Nothing was loaded."""
        return []

    def close(self) -> None:
        """Nothing to do."""


def failed_blocks(order: LoadOrder, num_chunks: int, block_size: int) -> set[int]:
    """The blocks of a load that hold tokens of a chunk which is not in place."""
    job = order.job
    if num_chunks >= len(job.chunks):
        return set()
    first = max(order.num_local, job.chunks[num_chunks].first_token)
    return set(job.block_ids[first // block_size :].tolist()) - {NULL_BLOCK}


@contextmanager
def _all_cores() -> Iterator[None]:
    """Threads that are started inside may run on every core that this process has.

    vLLM ties the threads of its CPU workers to a core each, and new threads inherit that of the one that starts them.
    """
    own = os.sched_getaffinity(0)
    cores = set(own)
    for task in os.listdir("/proc/self/task"):
        try:
            cores |= os.sched_getaffinity(int(task))
        except OSError:
            continue  # the thread has ended
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)
