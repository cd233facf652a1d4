"""What layers need to know of one step beside the activations: where tokens stand, and where their KV goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from headwater.kernels.attention.base import AttentionBackend


class KVPlanes(Protocol):
    """A KV cache as the layers see it."""

    def planes(self, layer: int) -> tuple[Tensor, ...]:
        """The pages of one layer, one tensor [pages, page_size, heads, width] per plane of the spec."""
        ...


@dataclass(frozen=True, slots=True)
class StepContext:
    """One step. The tensors lie on the model's device; in a captured graph they are the static input buffers."""

    positions: Tensor
    """int64 [rows]."""
    slots: Tensor
    """int64 [rows]: where each row's KV is written."""
    attention: AttentionBackend
    plan: Any
    """What `attention.plan` gave for this step."""
    cache: KVPlanes
