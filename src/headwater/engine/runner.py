"""One rank at work: its weights, its KV cache, and the forward pass of a step.

A runner computes what it is told; who runs when is the scheduler's business, and who samples is rank 0's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from headwater.connector.arrivals import OnEnd
from headwater.connector.config import ConnectorConfig
from headwater.connector.orders import StepOrders
from headwater.connector.push_desk import OnPushed
from headwater.connector.worker import WorkerSide
from headwater.engine.batch import StepInput
from headwater.engine.config import EngineConfig
from headwater.engine.device import DevicePlacement, rank_device
from headwater.engine.expert_rows import ExpertCounter
from headwater.engine.graphs import DecodeGraphs
from headwater.engine.inputs import resolve_tokens, stage
from headwater.engine.kvcache import create_kv_cache, kv_page_bytes
from headwater.engine.kvcache.paged import PagedKVCache
from headwater.engine.sizing import MemoryReport, activation_peak, free_memory
from headwater.kernels.attention import create_attention_backend
from headwater.kernels.attention.base import AttentionBatch
from headwater.kernels.dtypes import TORCH_DTYPES
from headwater.kv.topology import Topology
from headwater.models.checkpoint import Checkpoint
from headwater.models.config import MLAConfig
from headwater.models.context import NO_HOOKS, StepContext
from headwater.models.decoder import build_model
from headwater.models.parallel import Ranks
from headwater.models.weights import load_weights
from headwater.pool.space import Space
from headwater.transfer.streams import switch_threads_often
from headwater.transfer.view import view_description

Progress = Callable[[int, int], None]

PROFILE_ROWS_CPU = 256
"""On a CPU the activation peak is measured over this many rows and scaled: a full budget would take seconds."""


class Runner:
    """One rank. Construction loads the weights; `allocate` must follow before the first `forward`."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        ranks: Ranks,
        config: EngineConfig,
        placement: DevicePlacement,
        *,
        progress: Progress | None = None,
    ) -> None:
        self.ranks = ranks
        """This rank's place in every group; those of KV and weights are ranks of tensor parallelism."""
        self.device = rank_device(placement.device, ranks.tp.rank)
        self._config = config
        self._dtype = placement.dtype
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.spec = checkpoint.config.kv_spec(placement.dtype)
        self._topology = Topology(tp=ranks.tp.size, block_size=config.page_size)
        self.attention = create_attention_backend(config.attention_backend, self.device)
        self.cache: PagedKVCache | None = None
        self._graphs: DecodeGraphs | None = None
        self.pool: WorkerSide | None = None
        """This rank's way to the pool, if there is one."""
        free_before = free_memory(self.device)
        self.model = build_model(
            checkpoint.config,
            ranks,
            dtype=TORCH_DTYPES[placement.dtype],
            device=self.device,
            max_len=config.max_model_len,
        )
        rows = self.model.expert_rows
        self.expert_rows = None if rows is None else ExpertCounter(rows)
        """Rows of each expert, of a mixture of experts."""
        load_weights(self.model, checkpoint, progress)
        free_after = free_memory(self.device)
        self.report = MemoryReport(free_before, free_after, self._activation_peak())

    @property
    def page_bytes(self) -> int:
        """Bytes of one page on this rank."""
        return kv_page_bytes(
            self.spec, topology=self._topology, tp_rank=self.ranks.tp.rank, page_size=self._config.page_size
        )

    def allocate(self, num_pages: int, max_model_len: int) -> None:
        """Make the KV cache, and on a GPU capture the decode graphs."""
        self.cache = self._create_cache(num_pages)
        if self.device.type == "cuda" and self._config.cuda_graphs:
            self._graphs = DecodeGraphs(self, self.cache, self._config.max_num_seqs, max_model_len)
        if self.expert_rows is not None:
            self.expert_rows.start()

    def connect(self, space: Space, config: ConnectorConfig, on_end: OnEnd, server: int, on_pushed: OnPushed) -> None:
        """Join this rank's cache to the pool, as a member of `server`. `on_end` is told of loads that end, `on_pushed`
        of pushes, each from a thread of its own."""
        assert self.cache is not None, "connect before allocate"
        if self.device.type == "cuda":
            switch_threads_often()  # this process launches steps and serves nobody else
        shard = self._topology.shard(self.spec, tp_rank=self.ranks.tp.rank)
        view = view_description(self.spec, self.cache.view, self.cache.data)
        # With the dummy page, which takes what must not be written over pages that others use.
        view = replace(view, num_blocks=self.cache.num_pages + 1)
        self.pool = WorkerSide(
            space,
            view,
            shard,
            config,
            dummy_block=self.cache.num_pages,
            on_end=on_end,
            server=server,
            rank=self.ranks.tp.rank,
            on_pushed=on_pushed,
        )

    def step(self, step: StepInput | None, orders: StepOrders, previous: Tensor | None) -> Tensor | None:
        """Carry out a step's orders and compute it; the logits of its samples, if it computes anything.

        Raises what computing raises; nothing that the step was to save is kept then.
        """
        if self.pool is None:
            return None if step is None else self.forward(step, previous)
        self.pool.start_step(orders)
        self.pool.start_loads(orders)
        if step is None:
            return None
        try:
            logits = self.forward(step, previous)
        except BaseException:
            self.pool.discard()
            raise
        self.pool.end_step()
        return logits

    @torch.inference_mode()
    def forward(self, step: StepInput, previous: Tensor | None) -> Tensor:
        """Logits of `step.sample_rows` [samples, vocab], on the device. `previous`: the samples of the step before."""
        assert self.cache is not None, "forward before allocate"
        pool = self.pool
        # A graph has no hooks: what it computes is saved at its end. Loads are waited for between the layers.
        if self._graphs is not None and not (pool and pool.needs_layers) and self._graphs.fits(step):
            return self._graphs.run(step, previous)
        hooks = pool if pool is not None and pool.follows_layers else NO_HOOKS
        staged = stage(step, self.device)
        token_ids = resolve_tokens(staged.token_ids, previous) if step.has_in_flight else staged.token_ids
        batch = AttentionBatch(
            staged.query_starts,
            staged.kv_lens,
            staged.page_table,
            tuple(step.query_lens.tolist()),
            tuple(step.kv_lens.tolist()),
            step.num_decodes,
            self._config.page_size,
        )
        plan = self.attention.plan(batch)
        context = StepContext(staged.positions, staged.slots, self.attention, batch, plan, self.cache, hooks)
        if self.expert_rows is not None:
            self.expert_rows.expect(step.num_rows)
        hidden = self.model.forward(token_ids, context)
        return self.model.logits(hidden.index_select(0, staged.sample_rows))

    def _create_cache(self, num_pages: int) -> PagedKVCache:
        return create_kv_cache(
            self.spec,
            topology=self._topology,
            tp_rank=self.ranks.tp.rank,
            num_pages=num_pages,
            page_size=self._config.page_size,
            layout=self._config.cache_layout,
            device=self.device,
        )

    def _activation_peak(self) -> int:
        """Bytes that the largest step needs besides weights and KV: measured by running one over a single page."""
        rows, samples = self._config.max_batched_tokens, self._config.max_samples
        measured = rows if self.device.type == "cuda" else min(rows, PROFILE_ROWS_CPU)
        self.cache = self._create_cache(1)
        # A chunk of latent attention may gather all of its context; on a GPU, that of others stays in its pages.
        gathers = self.device.type == "cuda" and isinstance(self.model.config.attention, MLAConfig)
        context = self.model.max_len if gathers else 0
        step = _worst_step(measured, self.model.max_len, self._config.page_size, context)
        hidden = torch.zeros(
            min(rows, samples), self.model.config.hidden_size, dtype=self.model.dtype, device=self.device
        )
        computing = activation_peak(lambda: self.forward(step, None), self.device)
        sampling = activation_peak(lambda: self._profile_sampling(hidden), self.device)
        self.cache = None
        return computing * -(-rows // measured) + sampling

    @torch.inference_mode()
    def _profile_sampling(self, hidden: Tensor) -> None:
        # The longest way through the sampler holds four float32 copies of the logits.
        logits = self.model.logits(hidden).float()
        torch.stack([logits] * 3)


def _worst_step(rows: int, max_len: int, page_size: int, context: int = 0) -> StepInput:
    """Prompts as long as may be, whose pages are all the same one: the shape counts, not the content. The longest ends
    a context of `context` tokens, if it is not longer itself."""
    lens = [max_len] * (rows // max_len) + [rows % max_len] * (rows % max_len > 0)
    lens.sort(key=lambda length: length > 1)
    positions = np.concatenate([np.arange(length, dtype=np.int64) for length in lens])
    kv_lens = [*lens[:-1], max(lens[-1], context)]
    return StepInput(
        token_ids=np.zeros(rows, dtype=np.int64),
        positions=positions,
        slots=positions % page_size,
        query_lens=np.array(lens, dtype=np.int32),
        kv_lens=np.array(kv_lens, dtype=np.int32),
        page_table=np.zeros((len(lens), -(-max(kv_lens) // page_size)), dtype=np.int32),
        sample_rows=np.array([rows - 1], dtype=np.int64),
    )
