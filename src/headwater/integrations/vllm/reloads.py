"""Weights that vLLM changes while it runs: reloads, updates from a trainer, and sleep that throws them away.

vLLM tells no connector. `watch_reloads` wraps the functions that do it, in each worker, and `Freshness` says which
steps may still use the pool: none of the epoch in which the weights were changed, since its name is that of the old
ones.
"""

from __future__ import annotations

import functools
import logging
import sys
from dataclasses import replace
from typing import Any

from headwater.connector.orders import StepOrders
from headwater.integrations.vllm.declined import LOGGER

_CHANGES: dict[str, tuple[str, ...]] = {
    "vllm.v1.worker.gpu_worker:Worker": ("reload_weights", "start_weight_update", "update_weights", "sleep"),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": ("reload_weights",),
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner": ("reload_weights",),
}
"""What changes weights in a worker. `load_weights` of the model's own class is added: the first call came before."""

KEEPS_WEIGHTS = 1
"""The deepest level of vLLM's sleep that keeps the weights."""

log = logging.getLogger(LOGGER)
_changes = [0]
"""How often weights were changed in this process."""


def watch_reloads(model_class: type) -> None:
    """From now on count every change of weights in this process, a model of that class being loaded. Idempotent."""
    _watch(model_class, "load_weights")
    for place, names in _CHANGES.items():
        module, _, owner = place.partition(":")
        found = getattr(sys.modules.get(module), owner, None)  # a worker has imported what it runs
        for name in names if found is not None else ():
            _watch(found, name)


class Freshness:
    """Whether the KV that a worker computes is still that of the weights that its epoch stands for."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._seen = _changes[0]
        self._stale: int | None = None

    def admit(self, orders: StepOrders) -> StepOrders:
        """The orders of a step, without its saves where the weights are not those of the epoch any more."""
        if self._seen != _changes[0]:
            self._seen, self._stale = _changes[0], self._epoch
            log.warning(
                "Headwater: the weights were changed while vLLM runs, so nothing is saved or loaded any more; call "
                "reset_prefix_cache(reset_connector=True) to use the pool again"
            )
        if orders.epoch is not None:
            self._epoch = orders.epoch
        return replace(orders, before=(), during=()) if self.is_stale else orders

    @property
    def is_stale(self) -> bool:
        """Whether the last step that was admitted belongs to an epoch in which the weights were changed."""
        return self._stale == self._epoch

    def epochs(self) -> frozenset[int]:
        """The epoch of the last step, if its KV is neither saved nor loaded."""
        return frozenset([self._epoch] if self.is_stale else ())


def _watch(owner: Any, name: str) -> None:
    change = getattr(owner, name, None)
    if change is None or hasattr(change, "headwater_watches"):
        return

    @functools.wraps(change)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        level = kwargs.get("level", args[0] if args else KEEPS_WEIGHTS)
        if name != "sleep" or level > KEEPS_WEIGHTS:
            _changes[0] += 1  # before: a change that fails half-way is one
        return change(self, *args, **kwargs)

    watched.headwater_watches = True  # type: ignore[attr-defined]
    setattr(owner, name, watched)
