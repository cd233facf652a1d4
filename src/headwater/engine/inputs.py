"""The arrays of a step on the device: one transfer, and the tokens that only the device knows filled in."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headwater.engine.batch import StepInput
from headwater.kernels.post import fetch


class Staged:
    """A step's arrays on the device, from one transfer."""

    __slots__ = ("kv_lens", "page_table", "positions", "query_starts", "sample_rows", "slots", "token_ids")

    def __init__(self, longs: list[Tensor], ints: list[Tensor]) -> None:
        self.token_ids, self.positions, self.slots, self.sample_rows = longs
        self.query_starts, self.kv_lens, self.page_table = ints


def stage(step: StepInput, device: torch.device) -> Staged:
    """Bring a step to the device, in one piece and past whatever a load has queued on the copy engines."""
    starts = np.zeros(len(step.query_lens) + 1, dtype=np.int32)
    np.cumsum(step.query_lens, out=starts[1:])
    longs: list[npt.NDArray[Any]] = [step.token_ids, step.positions, step.slots, step.sample_rows]
    ints: list[npt.NDArray[Any]] = [starts, step.kv_lens, step.page_table]
    packed = torch.from_numpy(np.frombuffer(b"".join(a.tobytes() for a in (*longs, *ints)), dtype=np.uint8).copy())
    packed = fetch(packed, device)
    at, tensors = 0, []
    for array in (*longs, *ints):
        dtype = torch.int64 if array.dtype == np.int64 else torch.int32
        tensors.append(packed[at : at + array.nbytes].view(dtype).view(array.shape))
        at += array.nbytes
    return Staged(tensors[:4], tensors[4:])


def resolve_tokens(token_ids: Tensor, previous: Tensor | None) -> Tensor:
    """Fill in the tokens that only the device knows (see `StepInput.token_ids`)."""
    assert previous is not None, "a token in flight without a step that sampled it"
    places = torch.where(token_ids < 0, -1 - token_ids, 0)
    return torch.where(token_ids < 0, previous[places], token_ids)
