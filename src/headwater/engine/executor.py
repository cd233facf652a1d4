"""Runs steps on all ranks and samples on rank 0, without waiting: what a step gave is asked for later."""

from __future__ import annotations

import secrets
import threading
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from headwater.connector.config import ConnectorConfig
from headwater.connector.metrics import Source, Values
from headwater.connector.orders import StepOrders, StepReport
from headwater.connector.published import Collect, Publisher, figures
from headwater.connector.staging import staging_bytes
from headwater.connector.stats import TransferStats
from headwater.connector.totals import Spread
from headwater.engine.batch import StepInput
from headwater.engine.config import EngineConfig
from headwater.engine.device import DevicePlacement
from headwater.engine.ranks import ENGINE, RankGroup, set_num_threads
from headwater.engine.runner import Progress, Runner
from headwater.engine.sampler import Sampled, SamplingBatch, sample
from headwater.engine.sizing import PagePlan, plan_pages
from headwater.errors import EngineDeadError, HeadwaterError
from headwater.kv.identity import Identity
from headwater.models.checkpoint import Checkpoint
from headwater.pool.pool import Pool, open_pool
from headwater.pool.space import Space
from headwater.stores.stats import StoreStats

NO_ORDERS = StepOrders()


class Pending(NamedTuple):
    """A step on its way. `wait` gives its samples on the host."""

    sampled: Sampled
    copied: torch.cuda.Event | None

    def wait(self) -> Sampled:
        """Block until the samples are on the host."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.sampled


class BaseExecutor(Protocol):
    """What the engine asks of whoever computes its steps."""

    plan: PagePlan

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        ...

    def launch(self, step: StepInput, sampling: SamplingBatch, orders: StepOrders) -> Pending:
        """Start a step, with its orders; steps run in the order of their launches."""
        ...

    def order(self, orders: StepOrders) -> None:
        """Carry out orders with nothing to compute."""
        ...

    def discard(self, orders: StepOrders) -> None:
        """The step with these orders failed: of its loads, those that were not begun have ended with nothing."""
        ...

    def take_report(self) -> StepReport:
        """What happened on all ranks since the last call. Does not wait."""
        ...

    def drain(self, timeout_s: float) -> bool:
        """Wait until the saves of all ranks are in the pool or given up; False if that takes longer."""
        ...

    def transfer_stats(self) -> TransferStats:
        """What rank 0 moved; all zero without a pool."""
        ...

    def store_stats(self) -> StoreStats | None:
        """The pool now, and what rank 0 did with each of its tiers; None without a pool. Asks no server."""
        ...

    def expert_rows(self, *, wait: bool) -> Tensor | None:
        """Rows that went to each expert of each sparse layer so far, int64 on the host; None for a dense model. Without
        `wait`, those of the last time this was asked."""
        ...

    def check_alive(self) -> None:
        """Raise EngineDeadError if some part of it is gone."""
        ...

    def close(self) -> None:
        """Free what it holds. Idempotent."""
        ...


class Executor:
    """All ranks of one engine, from rank 0. Construction loads the model everywhere and sizes the KV cache."""

    def __init__(
        self, checkpoint: Checkpoint, config: EngineConfig, placement: DevicePlacement, progress: Progress | None = None
    ) -> None:
        set_num_threads(config, placement)
        self._pool: Pool | None = None
        self._publisher: Publisher | None = None
        self._lock = threading.Lock()
        self._report = StepReport()
        """What rank 0 has to tell; its loads end in a thread of their own."""
        self._told: StepOrders | None = None
        """The orders that the other ranks were told last."""
        self._others = RankGroup(config, placement, checkpoint.config)
        try:
            self._runner = Runner(checkpoint, self._others.ranks, config, placement, progress=progress)
            self.plan = self._allocate(checkpoint, config, placement)
        except BaseException as error:
            reason = self._others.why_dead() if not isinstance(error, HeadwaterError) else None
            self.close()
            if reason is not None:
                raise EngineDeadError(reason) from error
            raise
        self._previous: Tensor | None = None
        self._shares_samples = config.tensor_parallel_size > 1 and placement.overlap

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return self._runner.model.config.vocab_size

    def launch(self, step: StepInput, sampling: SamplingBatch, orders: StepOrders = NO_ORDERS) -> Pending:
        """Start a step, with its orders, on all ranks: one message to each. On a GPU it returns while the device works.
        Raises EngineDeadError if a rank is gone."""
        try:
            self._told = orders
            self._others.step(step, orders, self._shares_samples)
            logits = self._runner.step(step, orders, self._previous)
            assert logits is not None
            sampled = sample(logits, sampling)
            if self._shares_samples and len(step.sample_rows):
                self._runner.ranks.tp.broadcast(sampled.token_ids)
        except Exception as error:
            if (reason := self._others.why_dead()) is not None:
                raise EngineDeadError(reason) from error
            raise
        self._previous = sampled.token_ids
        return _to_host(sampled)

    def order(self, orders: StepOrders) -> None:
        """Carry out orders with nothing to compute, on every rank."""
        self._told = orders
        self._others.step(None, orders, share_samples=False)
        self._runner.step(None, orders, None)

    def discard(self, orders: StepOrders) -> None:
        """The step with these orders failed. Of its loads, those that were not begun have ended with nothing."""
        if self._runner.pool is not None:
            self._runner.pool.discard(orders)
            if self._told is not orders:
                others = (0,) * (self._runner.ranks.tp.size - 1)
                self._add(StepReport(ended={load.job.request_id: others for load in orders.loads}))

    def check_alive(self) -> None:
        """Raise EngineDeadError if a rank is gone."""
        self._others.check_alive()

    def connect(self, config: ConnectorConfig, identity: Identity) -> Space:
        """Join all ranks to the pool; returns rank 0's view of it. Raises what opening a pool raises."""
        group = secrets.randbits(63)
        self._pool = open_pool(config.pool, group=group)
        space = self._pool.space(identity, self._runner.spec)
        self._runner.connect(space, config, self._load_ended, group, self._push_ended)
        self._others.connect(identity.canonical(), group)
        self._publisher = Publisher(self._pool, engine=ENGINE, model=identity.label)
        self._publisher.add("rank 0", self._figures)
        return space

    def publish(self, role: str, collect: Collect) -> None:
        """Publish what another part of this process counts beside the pool, if there is one."""
        if self._publisher is not None:
            self._publisher.add(role, collect)

    def _figures(self) -> tuple[Values, Spread]:
        return figures(self.transfer_stats(), Source.WORKER)

    def take_report(self) -> StepReport:
        """What happened on all ranks since the last call. Does not wait."""
        if self._runner.pool is None:
            return StepReport()
        report = self._runner.pool.take_report().merged(self._others.take_report())
        with self._lock:
            report, self._report = report.merged(self._report), StepReport()
        return report

    def transfer_stats(self) -> TransferStats:
        """What rank 0 moved; all zero without a pool."""
        return TransferStats() if self._runner.pool is None else self._runner.pool.stats()

    def store_stats(self) -> StoreStats | None:
        """The pool now, and what rank 0 did with each of its tiers; None without a pool. Asks no server."""
        return None if self._pool is None else self._pool.stats().store

    def expert_rows(self, *, wait: bool) -> Tensor | None:
        """Rank 0's, whose rows are those of every rank."""
        counter = self._runner.expert_rows
        if counter is None:
            return None
        return counter.read() if wait else counter.peek()

    def drain(self, timeout_s: float) -> bool:
        """Wait until the saves of all ranks are in the pool or given up; False if that takes longer."""
        if self._runner.pool is None:
            return True
        self._others.start_drain(timeout_s)
        return all((self._runner.pool.drain(timeout_s), *self._others.wait_drained()))

    def _load_ended(self, request_id: str, num_chunks: int) -> None:
        self._add(StepReport(ended={request_id: (num_chunks,)}))

    def _push_ended(self, request_id: str, num_tokens: int) -> None:
        self._add(StepReport(pushed={request_id: (num_tokens,)}))

    def _add(self, report: StepReport) -> None:
        with self._lock:
            self._report = self._report.merged(report)

    def close(self) -> None:
        """Finish what is being saved, and end the other ranks. Idempotent."""
        if (runner := getattr(self, "_runner", None)) is not None and runner.pool is not None:
            runner.pool.close()
        if self._publisher is not None:
            self._publisher.close()
        if self._pool is not None:
            self._pool.close()
        self._others.close()

    def _allocate(self, checkpoint: Checkpoint, config: EngineConfig, placement: DevicePlacement) -> PagePlan:
        plan = plan_pages(
            [self._runner.report, *self._others.reports()],
            page_bytes=self._runner.page_bytes,
            memory_ratio=placement.memory_ratio,
            page_size=config.page_size,
            max_model_len=config.max_model_len,
            model_max_len=checkpoint.config.max_position_embeddings,
            max_num_seqs=config.max_num_seqs,
            explicit=config.num_pages,
            shared=placement.device.type == "cpu",
            staging_bytes=staging_bytes(config.connector, placement.device.type),
        )
        self._others.allocate(plan.num_pages, plan.max_model_len)
        self._runner.allocate(plan.num_pages, plan.max_model_len)
        self._others.wait_ready()
        return plan


def _to_host(sampled: Sampled) -> Pending:
    if not sampled.token_ids.is_cuda:
        return Pending(sampled, None)
    host = Sampled(_copy(sampled.token_ids), _copy_any(sampled.logprobs), _copy_any(sampled.top_ids))
    copied = torch.cuda.Event()
    copied.record()
    return Pending(host, copied)


def _copy(tensor: Tensor) -> Tensor:
    """On the host, once the device is there: `to` gives pinned memory for a copy that does not block."""
    return tensor.to("cpu", non_blocking=True)


def _copy_any(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else _copy(tensor)
