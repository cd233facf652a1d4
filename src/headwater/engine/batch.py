"""A step as arrays: what the scheduler chose, in the form that every rank computes it from.

Plain numpy, the same on all ranks, and small: it crosses process boundaries as bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from headwater.engine.scheduler import Chunk, Step

IntArray = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepInput:
    """One forward pass. Row r is one token; request i has `query_lens[i]` rows, and rows go request by request."""

    token_ids: IntArray
    """[rows]; where the token is still in flight: -1 - its place among the previous step's samples."""
    positions: IntArray
    slots: IntArray
    """[rows]: page × page_size + offset, where the row's KV goes."""
    query_lens: Int32Array
    kv_lens: Int32Array
    page_table: Int32Array
    """[requests, pages]; columns beyond a request's pages hold pages that are not its own and are never read."""
    sample_rows: IntArray
    """The rows whose logits are wanted."""

    @property
    def num_rows(self) -> int:
        """Tokens in this pass."""
        return len(self.token_ids)

    @property
    def num_decodes(self) -> int:
        """Requests with a single row; they come first."""
        return int((self.query_lens == 1).sum())

    @property
    def has_in_flight(self) -> bool:
        """Whether some token is known only to the device."""
        return bool((self.token_ids < 0).any())

    def padded(self, size: int, dummy_page: int, page_size: int) -> StepInput:
        """The same step, all decodes, with rows up to `size` that read and write only the dummy page."""
        extra = size - self.num_rows
        if not extra:
            return self
        return StepInput(
            np.pad(self.token_ids, (0, extra)),
            np.pad(self.positions, (0, extra)),
            np.pad(self.slots, (0, extra), constant_values=dummy_page * page_size),
            np.pad(self.query_lens, (0, extra), constant_values=1),
            np.pad(self.kv_lens, (0, extra), constant_values=1),
            np.pad(self.page_table, ((0, extra), (0, 0)), constant_values=dummy_page),
            self.sample_rows,
        )


def make_step_input(step: Step, page_size: int) -> StepInput:
    """Lay out a step. Cost: linear in its rows and pages."""
    chunks = step.chunks
    counts = np.array([chunk.num_tokens for chunk in chunks], dtype=np.int32)
    starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
    ends = np.cumsum(counts, dtype=np.int64)
    rows_before = ends - counts
    positions = np.arange(int(ends[-1]), dtype=np.int64) + np.repeat(starts - rows_before, counts)
    kv_lens = (starts + counts).astype(np.int32)
    width = -(-int(kv_lens.max()) // page_size)
    page_table = np.stack([chunk.request.page_row[:width] for chunk in chunks])
    token_ids = np.concatenate([_token_ids(chunk) for chunk in chunks])
    requests = np.repeat(np.arange(len(chunks)), counts)
    slots = page_table[requests, positions // page_size].astype(np.int64) * page_size + positions % page_size
    samples = np.array([chunk.num_samples for chunk in chunks], dtype=np.int64)
    number = np.arange(int(samples.sum()), dtype=np.int64) - np.repeat(np.cumsum(samples) - samples, samples)
    return StepInput(
        token_ids, positions, slots, counts, kv_lens, page_table, np.repeat(ends - samples, samples) + number
    )


def _token_ids(chunk: Chunk) -> IntArray:
    ids = [*chunk.request.tokens[chunk.start : chunk.start + chunk.num_tokens], *chunk.drafts]
    if len(ids) < chunk.num_tokens:  # only the last one can be in flight, and then nothing is drafted
        ids.append(-1 - chunk.request.sample_index)
    return np.array(ids, dtype=np.int64)
