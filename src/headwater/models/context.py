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


class LayerHooks(Protocol):
    """Who moves KV in and out of the cache while the layers run."""

    def before_layer(self, layer: int) -> None:
        """The layer is about to read its KV."""
        ...

    def after_layer(self, layer: int) -> None:
        """The step's KV of this layer has been written, and will be read no more by this step."""
        ...


class NoHooks:
    """The null object: nobody does."""

    def before_layer(self, layer: int) -> None:
        """Nothing to wait for."""

    def after_layer(self, layer: int) -> None:
        """Nothing to take."""


NO_HOOKS = NoHooks()


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
    hooks: LayerHooks = NO_HOOKS
