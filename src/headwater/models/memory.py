"""Memory for what a model's config asks for: sizes come from outside, so an allocation can fail and must say how large
it was. The KV cache is sized elsewhere, by what is then left.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headwater.errors import MemoryBudgetError


def empty(*shape: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """An uninitialised tensor. Raises MemoryBudgetError, with its size, where there is no room for it."""
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except RuntimeError as error:  # torch's allocators, of all devices
        gib = math.prod(shape) * dtype.itemsize / 2**30
        raise MemoryBudgetError(
            f"no memory on {device} for a tensor of {gib:,.1f} GiB, {' x '.join(map(str, shape))} of {dtype}; use a "
            "smaller model or dtype, a shorter max_model_len, or more ranks"
        ) from error
