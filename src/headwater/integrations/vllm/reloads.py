"""Weights that vLLM changes while it runs: reloads, updates from a trainer, and sleep that throws them away.

vLLM tells no connector. `watch_reloads` counts, in each worker, every remote call that is not known to leave the
weights as they are, and the methods of vLLM's that change them. `Freshness` says which steps may still use the pool:
none of the epoch in which the weights were changed, since its name is that of the old ones.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from headwater.connector.orders import StepOrders
from headwater.integrations.vllm.declined import LOGGER, DeclinedError

_CALLS: dict[str, Callable[..., tuple[Any, Any, Any]]] = {
    "vllm.v1.executor.uniproc_executor:run_method": lambda worker, method, args, kwargs: (method, args, kwargs),
    "vllm.v1.executor.ray_utils:run_method": lambda worker, method, args, kwargs: (method, args, kwargs),
    "vllm.v1.executor.multiproc_executor:WorkerProc._execute_worker_rpc": lambda worker, request: request[:3],
}
"""Where a worker executes remote calls, by executor; and how (method, args, kwargs) follow from the arguments there."""

_KEEP_WEIGHTS: dict[str, str] = {
    "the start": """
        get_kv_cache_spec get_supported_kv_cache_layouts set_kv_cache_layout determine_available_memory
        initialize_from_config compile_or_warm_up_model get_kv_connector_handshake_metadata get_supported_tasks
        supports_draft_weight_updates init_weight_transfer_engine
    """,
    "a step": "execute_model sample_tokens execute_dummy_batch take_draft_token_ids synchronize_device",
    "adapters, which have names of their own (`adapters`)": "add_lora remove_lora pin_lora list_loras",
    "what is computed of media": "reset_mm_cache reset_encoder_cache release_late_interaction_query_cache",
    "looks": """
        check_health profile compute_weight_checksums get_model_inspection get_compilation_match_table
        get_encoder_timing_stats save_sharded_state save_tensorized_model
    """,
    "the end": "shutdown shutdown_weight_transfer_engine",
    "what is there again was there before": "wake_up",
}
KEEP_WEIGHTS = frozenset(name for names in _KEEP_WEIGHTS.values() for name in names.split())
"""Remote calls that leave the weights as they are. `sleep` and `discard` may or may not."""

_CHANGES: dict[str, tuple[str, ...]] = {
    "vllm.v1.worker.worker_base:WorkerBase": ("apply_model",),
    "vllm.v1.worker.gpu_worker:Worker": (
        "reload_weights",
        "reset_weights",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
        "sleep",
        "discard",
        "load_model",
    ),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": ("reload_weights", "load_model"),
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner": ("reload_weights", "load_model"),
}
"""What changes weights in a worker, for callers in its own process. `load_weights` of the model's own class is added:
the first call came before."""

SLEEP_THAT_KEEPS = 1
"""The deepest level of vLLM's sleep that keeps the weights."""

log = logging.getLogger(LOGGER)
_changes = [0]
"""How often weights were changed in this process."""


def watch_reloads(model_class: type) -> None:
    """From now on count every change of weights in this process, a model of that class being loaded. Idempotent.

    Raises DeclinedError where vLLM executes remote calls in a place that is not known.
    """
    _watch(model_class, "load_weights", lambda model, *args, **kwargs: ("load_weights", args, kwargs))
    for where, names in _CHANGES.items():
        imported, _, worker = where.partition(":")
        found = getattr(sys.modules.get(imported), worker, None)  # a worker has imported what it runs
        for name in names if found is not None else ():
            _watch(found, name, functools.partial(_own_call, name))
    places = {place: sys.modules[place.partition(":")[0]] for place in _CALLS if place.partition(":")[0] in sys.modules}
    for place, module in places.items():
        owner, _, name = place.partition(":")[2].rpartition(".")
        if not _watch(getattr(module, owner, None) if owner else module, name, _CALLS[place]):
            raise DeclinedError(f"this vLLM has no {place}, and it is not known when it changes weights")
    if not places:
        raise DeclinedError("this worker runs in an executor that is not vLLM's own, and may change its weights unseen")


def keeps_weights(method: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> bool:
    """Whether a call of a worker leaves its weights as they are. Nothing is known of a function that is sent there."""
    first = next(iter([*args, *(kwargs or {}).values()]), None)
    if method == "sleep":
        return first is None or (isinstance(first, int) and first <= SLEEP_THAT_KEEPS)
    if method == "discard":
        return isinstance(first, Sequence) and "weights" not in first
    return isinstance(method, str) and method in KEEP_WEIGHTS


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


def _changes_weights(call: Callable[..., tuple[Any, Any, Any]], args: Any, kwargs: Any) -> bool:
    try:
        return not keeps_weights(*call(*args, **kwargs))
    except Exception:  # arguments of a vLLM that is not known
        return True


def _own_call(name: str, worker: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
    return name, args, kwargs


def _watch(owner: Any, name: str, call: Callable[..., tuple[Any, Any, Any]]) -> bool:
    """Count the calls of a function that change weights; `call` makes them of its arguments. False: there is none."""
    change = getattr(owner, name, None)
    if change is None or hasattr(change, "headwater_watches"):
        return change is not None

    @functools.wraps(change)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if _changes_weights(call, args, kwargs):
            _changes[0] += 1  # before: a change that fails half-way is one
        return change(*args, **kwargs)

    watched.headwater_watches = True  # type: ignore[attr-defined]
    setattr(owner, name, watched)
    return True
