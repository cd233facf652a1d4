"""Decode steps as CUDA graphs: one launch a step instead of some hundreds.

Captured for a ladder of batch sizes over static inputs. A step that is smaller than its graph is padded with rows
that read and write the dummy page, so that no kernel branches on padding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwater.engine.batch import StepInput
from headwater.engine.inputs import resolve_tokens, stage
from headwater.kernels.attention.base import AttentionBatch
from headwater.models.context import StepContext

if TYPE_CHECKING:
    from headwater.engine.kvcache.paged import PagedKVCache
    from headwater.engine.runner import Runner

MAX_GRAPH_SIZE = 256


def graph_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, then multiples of 8 up to 64 and of 16 beyond; the last covers `max_num_seqs` or is MAX_GRAPH_SIZE."""
    ladder = [1, 2, 4, *range(8, 64, 8), *range(64, MAX_GRAPH_SIZE + 1, 16)]
    wanted = min(max_num_seqs, MAX_GRAPH_SIZE)
    return [size for size in ladder if size < wanted] + [min(size for size in ladder if size >= wanted)]


class DecodeGraphs:
    """The graphs of one runner. Construction captures them all, largest first, in one memory pool."""

    def __init__(self, runner: Runner, cache: PagedKVCache, max_num_seqs: int, max_model_len: int) -> None:
        self._runner = runner
        self._cache = cache
        self._max_len = max_model_len
        self._sizes = graph_sizes(max_num_seqs)
        self._page_size = page_size = cache.page_size
        self._dummy_page = cache.dummy_page
        size, width = self._sizes[-1], -(-max_model_len // page_size)
        device = runner.device
        self._token_ids = torch.zeros(size, dtype=torch.int64, device=device)
        self._positions = torch.zeros(size, dtype=torch.int64, device=device)
        self._slots = torch.full((size,), self._dummy_page * page_size, dtype=torch.int64, device=device)
        self._kv_lens = torch.ones(size, dtype=torch.int32, device=device)
        self._page_table = torch.full((size, width), self._dummy_page, dtype=torch.int32, device=device)
        self._query_starts = torch.arange(size + 1, dtype=torch.int32, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._logits: dict[int, Tensor] = {}
        self._capture()

    def fits(self, step: StepInput) -> bool:
        """Whether the step is all decodes, and few enough."""
        return step.num_rows <= self._sizes[-1] and step.num_rows == len(step.query_lens)

    def run(self, step: StepInput, previous: Tensor | None) -> Tensor:
        """Replay the smallest graph that holds the step. The logits are valid until the next replay."""
        used = step.num_rows
        size = next(size for size in self._sizes if size >= used)
        padded = step.padded(size, self._dummy_page, self._page_size)
        staged = stage(padded, self._runner.device)
        token_ids = resolve_tokens(staged.token_ids, previous) if step.has_in_flight else staged.token_ids
        self._token_ids[:size].copy_(token_ids)
        self._positions[:size].copy_(staged.positions)
        self._slots[:size].copy_(staged.slots)
        self._kv_lens[:size].copy_(staged.kv_lens)
        self._page_table[:size, : padded.page_table.shape[1]].copy_(staged.page_table)
        if self._runner.expert_rows is not None:
            self._runner.expert_rows.expect(used)
        self._graphs[size].replay()
        logits = self._logits[size][:used]
        return logits if len(step.sample_rows) == used else logits.index_select(0, staged.sample_rows)

    def _capture(self) -> None:
        pool = None
        for size in reversed(self._sizes):
            self._forward(size)  # outside the graph first: kernels compile, libraries allocate their workspaces
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # Another engine of this process may be moving KV meanwhile, in threads of its own.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                self._logits[size] = self._forward(size)
            pool = graph.pool()
            self._graphs[size] = graph

    @torch.inference_mode()
    def _forward(self, size: int) -> Tensor:
        runner = self._runner
        batch = AttentionBatch(
            self._query_starts[: size + 1],
            self._kv_lens[:size],
            self._page_table[:size],
            (1,) * size,
            (self._max_len,) * size,
            size,
            self._page_size,
        )
        plan = runner.attention.plan(batch)
        context = StepContext(self._positions[:size], self._slots[:size], runner.attention, batch, plan, self._cache)
        return runner.model.logits(runner.model.forward(self._token_ids[:size], context))
