"""Runs steps on all ranks and samples on rank 0, without waiting: what a step gave is asked for later."""

from __future__ import annotations

import queue
import secrets
import time
from contextlib import suppress
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from headwater.connector.config import ConnectorConfig
from headwater.connector.jobs import Job, Loaded
from headwater.connector.stats import TransferStats
from headwater.connector.worker import WorkerHalf, staging_bytes
from headwater.engine.batch import StepInput
from headwater.engine.config import EngineConfig
from headwater.engine.device import Placement
from headwater.engine.ranks import RankGroup, set_num_threads
from headwater.engine.runner import Progress, Runner
from headwater.engine.sampler import Sampled, SamplingBatch, sample
from headwater.engine.sizing import PagePlan, plan_pages
from headwater.errors import EngineDeadError, HeadwaterError
from headwater.kv.identity import Identity
from headwater.models.checkpoint import Checkpoint
from headwater.pool.pool import Pool, open_pool
from headwater.pool.space import Space
from headwater.stores.stats import StoreStats

LOAD_POLL_S = 0.0005


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

    def launch(self, step: StepInput, sampling: SamplingBatch) -> Pending:
        """Start a step; steps run in the order of their launches."""
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
        self, checkpoint: Checkpoint, config: EngineConfig, placement: Placement, progress: Progress | None = None
    ) -> None:
        set_num_threads(config, placement)
        self._pool: Pool | None = None
        self._half: WorkerHalf | None = None
        self._unsaved: list[Job] = []
        """To be taken out of the cache together: see `save`."""
        self._own_loaded: queue.SimpleQueue[Loaded] = queue.SimpleQueue()
        self._loads: dict[str, list[int]] = {}
        """By request: how many chunks each rank that is done has in place."""
        self._ranks = RankGroup(config, placement)
        try:
            self._runner = Runner(checkpoint, self._ranks.parallel, config, placement, progress=progress)
            self.plan = self._allocate(checkpoint, config, placement)
        except BaseException as error:
            reason = self._ranks.why_dead() if not isinstance(error, HeadwaterError) else None
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

    def launch(self, step: StepInput, sampling: SamplingBatch) -> Pending:
        """Start a step. On a GPU it returns while the device works. Raises EngineDeadError if a rank is gone."""
        try:
            self.take_saves()
            self._ranks.step(step, self._shares_samples)
            logits = self._runner.forward(step, self._previous)
            sampled = sample(logits, sampling)
            if self._shares_samples and len(step.sample_rows):
                self._runner.parallel.broadcast(sampled.token_ids)
        except Exception as error:
            if (reason := self._ranks.why_dead()) is not None:
                raise EngineDeadError(reason) from error
            raise
        self._previous = sampled.token_ids
        return _to_host(sampled)

    def check_alive(self) -> None:
        """Raise EngineDeadError if a rank is gone."""
        self._ranks.check_alive()

    def connect(self, config: ConnectorConfig, identity: Identity) -> Space:
        """Join all ranks to the pool; returns rank 0's view of it. Raises what opening a pool raises."""
        group = secrets.randbits(63)
        self._pool = open_pool(config.pool, group=group)
        space = self._pool.space(identity, self._runner.spec)
        self._half = self._runner.connect(space, config, self._own_loaded.put)
        self._ranks.connect(identity.canonical(), group)
        return space

    def save(self, job: Job) -> None:
        """Take KV out of the cache, on every rank, before anything is written there again: `take_saves`."""
        self._unsaved.append(job)

    def take_saves(self) -> None:
        """Take what is to be saved out of the cache now. Whatever may write there calls this first."""
        if self._unsaved:
            assert self._half is not None
            jobs, self._unsaved = self._unsaved, []
            self._ranks.save(jobs)
            self._half.save(jobs)

    def begin_save(self, job: Job) -> None:
        """Take KV out of the cache in the course of the next step, on every rank."""
        assert self._half is not None
        self.take_saves()
        self._ranks.begin_save(job)
        self._half.begin_save(job)

    def discard(self) -> None:
        """Give up what the next step was to save, on every rank: its blocks may soon hold something else."""
        assert self._half is not None
        self._half.discard()
        self._ranks.discard()

    def load(self, job: Job, *, layerwise: bool) -> None:
        """Bring KV into the cache, on every rank; with `layerwise` the next step waits for it layer by layer."""
        assert self._half is not None
        self.take_saves()
        self._loads[job.request_id] = []
        self._ranks.load(job, layerwise=layerwise)
        self._half.load(job, layerwise=layerwise)

    def cancel(self, request_id: str) -> None:
        """Stop a load."""
        assert self._half is not None
        self._ranks.cancel(request_id)
        self._half.cancel(request_id)

    def wait_loaded(self, timeout_s: float) -> list[Loaded]:
        """Loads that have ended on all ranks: what the rank that got least has. Waits for one at most that long."""
        deadline = time.monotonic() + timeout_s
        while True:
            ended = self._take_loaded()
            if ended or not self._loads or time.monotonic() >= deadline:
                return ended
            time.sleep(LOAD_POLL_S)

    def transfer_stats(self) -> TransferStats:
        """What rank 0 moved; all zero without a pool."""
        return TransferStats() if self._half is None else self._half.stats()

    def store_stats(self) -> StoreStats | None:
        """The pool now, and what rank 0 did with each of its tiers; None without a pool. Asks no server."""
        return None if self._pool is None else self._pool.stats().store

    def drain(self, timeout_s: float) -> bool:
        """Wait until the saves of all ranks are in the pool or given up; False if that takes longer."""
        if self._half is None:
            return True
        self.take_saves()
        self._ranks.start_drain(timeout_s)
        return all((self._half.drain(timeout_s), *self._ranks.wait_drained()))

    def _take_loaded(self) -> list[Loaded]:
        for loaded in (*_take_all(self._own_loaded), *self._ranks.take_loaded()):
            self._loads[loaded.request_id].append(loaded.num_chunks)
        size = self._runner.parallel.size
        ended = [Loaded(name, min(counts)) for name, counts in self._loads.items() if len(counts) == size]
        for loaded in ended:
            del self._loads[loaded.request_id]
        return ended

    def close(self) -> None:
        """Finish what is being saved, and end the other ranks. Idempotent."""
        with suppress(HeadwaterError):  # a rank may be gone
            self.take_saves()
        if self._half is not None:
            self._half.close()
        if self._pool is not None:
            self._pool.close()
        self._ranks.close()

    def _allocate(self, checkpoint: Checkpoint, config: EngineConfig, placement: Placement) -> PagePlan:
        plan = plan_pages(
            [self._runner.report, *self._ranks.reports()],
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
        self._ranks.allocate(plan.num_pages, plan.max_model_len)
        self._runner.allocate(plan.num_pages, plan.max_model_len)
        self._ranks.wait_ready()
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


def _take_all(source: queue.SimpleQueue[Loaded]) -> list[Loaded]:
    found = []
    while not source.empty():
        found.append(source.get())
    return found
