"""How many rows went to each expert: counted on the device by the routing itself, and read without holding up a step.

The counts of a step under way are those of the layers that it has passed. Padding rows of CUDA graphs are not counted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwater.kernels.moe_reference import ExpertRows


class ExpertCounter:
    """The counts of one rank, int64 [sparse layers, experts]; every rank routes the same rows."""

    def __init__(self, rows: ExpertRows) -> None:
        self._rows = rows
        self._latest = torch.zeros(rows.counts.shape, dtype=torch.int64)
        self._copying: tuple[Tensor, torch.cuda.Event] | None = None
        self._stream = torch.cuda.Stream(rows.counts.device) if rows.counts.is_cuda else None

    def start(self) -> None:
        """Forget what was counted so far: nobody asked for it."""
        self._rows.counts.zero_()

    def expect(self, num_rows: int) -> None:
        """The next run of the model has so many rows that are not padding. Does not wait."""
        self._rows.live.fill_(num_rows)

    def read(self) -> Tensor:
        """The counts now, on the host. Waits for a copy of its own, not for the steps under way."""
        if self._stream is None:
            return self._rows.counts.clone()
        with torch.cuda.stream(self._stream):
            host = self._rows.counts.to("cpu", non_blocking=True)
        self._stream.synchronize()
        return host

    def peek(self) -> Tensor:
        """The counts when this was asked before, or earlier, and on a CPU those of now. Never waits: a copy is begun,
        and what the last one that is complete brought is returned."""
        if self._stream is None:
            return self._rows.counts.clone()
        if self._copying is not None and self._copying[1].query():
            self._latest, self._copying = self._copying[0], None
        if self._copying is None:
            with torch.cuda.stream(self._stream):
                host = self._rows.counts.to("cpu", non_blocking=True)
                self._copying = host, self._stream.record_event()
        return self._latest
