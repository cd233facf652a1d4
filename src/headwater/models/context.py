"""What layers need to know of one step beside the activations: where tokens stand, and where their KV goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from headwater.kernels.attention.base import AttentionBackend, AttentionBatch


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
    batch: AttentionBatch
    plan: Any
    """What `attention.plan` gave for `batch`."""
    cache: KVPlanes
    hooks: LayerHooks = NO_HOOKS
    shared: dict[str, Any] = field(default_factory=dict)
    """What the first layer that needed it made, for the others; see `once`."""

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """The value of that name, made by the first layer that asks in this step."""
        if name not in self.shared:
            self.shared[name] = make()
        return self.shared[name]
