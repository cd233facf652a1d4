"""Runs steps on all ranks and samples on rank 0, without waiting: what a step gave is asked for later."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from headwater.engine.batch import StepInput
from headwater.engine.config import EngineConfig
from headwater.engine.device import Placement
from headwater.engine.ranks import RankGroup, set_num_threads
from headwater.engine.runner import Progress, Runner
from headwater.engine.sampler import Sampled, SamplingBatch, sample
from headwater.engine.sizing import PagePlan, plan_pages
from headwater.errors import EngineDeadError, HeadwaterError
from headwater.models.checkpoint import Checkpoint


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

    def close(self) -> None:
        """Free what it holds. Idempotent."""
        ...


class Executor:
    """All ranks of one engine, from rank 0. Construction loads the model everywhere and sizes the KV cache."""

    def __init__(
        self, checkpoint: Checkpoint, config: EngineConfig, placement: Placement, progress: Progress | None = None
    ) -> None:
        set_num_threads(config, placement)
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

    def close(self) -> None:
        """End the other ranks. Idempotent."""
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
