"""The ways to run vLLM that are compared: plain, with Headwater, with vLLM's own OffloadingConnector and with LMCache.

A side is plain data: the arguments of `vllm.LLM` and the environment of its process. A variant of it differs in one
setting, the same for all sides that are compared. This module also removes the pools from shared memory.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headwater.bench.vllm_engine import SRC
from headwater.bench.vllm_gpu.plan import (
    HEADWATER,
    LAYERWISE,
    LMCACHE,
    LMCACHE_V3,
    OFFLOADING,
    PACKED,
    PLAIN,
    UNPACKED,
    GpuPlan,
)
from headwater.errors import EngineError
from headwater.stores.embedded import SHM_ROOT
from headwater.stores.url import format_size

BASE = ""
LARGE_STEPS = "large_steps"
DEFAULT_CAPACITY = "default_capacity"
NO_PREFIX_CACHE = "no_prefix_cache"
TIERS = "tiers"
PROFILED = "profiled"
VARIANTS = (BASE, LARGE_STEPS, DEFAULT_CAPACITY, NO_PREFIX_CACHE, TIERS, PROFILED)

_NAME = "headwater-bench-gpu"
_OFFLOAD_BLOCK = 64
"""Tokens, as in the example of vLLM's documentation."""
_LEAST_BYTES = 64 << 20


@dataclass(frozen=True)
class Side:
    """One way to run vLLM."""

    name: str
    variant: str
    settings: dict[str, Any]
    environment: dict[str, str]
    pool: str | None = None
    """The URL of Headwater's pool, if it has one."""

    @property
    def key(self) -> tuple[str, str]:
        """Which side, and how it was changed."""
        return self.name, self.variant


@dataclass(frozen=True)
class Places:
    """Where this run keeps things, and how much each connector may keep."""

    model: Path
    files: Path
    """A directory on a disk, for the lower tier."""
    capacity_bytes: int

    def url(self, variant: str, packing: str = "") -> str:
        """The pool of a variant. Sides that differ in how they load share one."""
        name = f"{_NAME}-{os.getpid()}" + (f"-{variant}" if variant in (DEFAULT_CAPACITY, TIERS) else "")
        if packing:
            return f"shm:///{name}-packing-{packing}?capacity={self.capacity_bytes}&packing={packing}"
        if variant == DEFAULT_CAPACITY:
            return f"shm:///{name}"
        if variant == TIERS:
            capacity = self.capacity_bytes // 2
            return f"shm:///{name}?capacity={capacity},file://{self.files}?capacity={capacity}"
        return f"shm:///{name}?capacity={self.capacity_bytes}"


def make_side(plan: GpuPlan, places: Places, name: str, variant: str) -> Side:
    """The settings of one side. Raises EngineError where it cannot be run here, saying why."""
    settings: dict[str, Any] = {
        "model": str(places.model),
        "dtype": plan.dtype,
        "enforce_eager": plan.is_eager,
        "max_model_len": plan.max_model_len,
        "max_num_batched_tokens": plan.large_batched_tokens if variant == LARGE_STEPS else plan.batched_tokens,
        "enable_prefix_caching": variant != NO_PREFIX_CACHE,
        **plan.more_settings,
    }
    # In one process, so that nothing but the connector differs, and its calls can be timed.
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if plan.device == "cuda":
        settings["gpu_memory_utilization"] = plan.memory_share
    else:
        settings["block_size"] = 128
        environment["VLLM_CPU_KVCACHE_SPACE"] = "1"
    side = Side(name, variant, settings, environment)
    return _CONNECTORS[name](side, plan, places)


def _plain(side: Side, plan: GpuPlan, places: Places) -> Side:
    return side


def _headwater(side: Side, plan: GpuPlan, places: Places) -> Side:
    url = places.url(side.variant, {PACKED: "on", UNPACKED: "off"}.get(side.name, ""))
    extra: dict[str, Any] = {"pool": url, "sample_weights": True}  # every byte of 16 GB takes longer than a start
    if side.name == LAYERWISE:
        extra["load_mode"] = "layerwise"
    if side.variant == PROFILED:
        side.settings["timeline"] = True
    transfer = {"kv_connector": "HeadwaterConnector", "kv_connector_module_path": "headwater.integrations.vllm"}
    return replace(_with_connector(side, transfer, extra), pool=url)


def _offloading(side: Side, plan: GpuPlan, places: Places) -> Side:
    if plan.device != "cuda":
        raise EngineError("OffloadingConnector runs on GPUs only")
    extra = {"cpu_bytes_to_use": places.capacity_bytes, "block_size": _OFFLOAD_BLOCK}
    return _with_connector(side, {"kv_connector": "OffloadingConnector"}, extra)


def _lmcache(side: Side, plan: GpuPlan, places: Places) -> Side:
    if plan.lmcache_path is None and find_spec("lmcache") is None:
        raise EngineError("LMCache is not installed in this environment")
    if plan.lmcache_path is not None:
        if not (plan.lmcache_path / "lmcache").is_dir():
            raise EngineError(f"there is no LMCache in {plan.lmcache_path}")
        paths = [str(SRC), str(plan.lmcache_path), os.environ.get("PYTHONPATH", "")]
        side.environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    side.environment.update(
        LMCACHE_CHUNK_SIZE="256",
        LMCACHE_LOCAL_CPU="True",
        LMCACHE_MAX_LOCAL_CPU_SIZE=f"{places.capacity_bytes / 2**30:g}",
        PYTHONHASHSEED="0",
    )
    if side.name == LMCACHE_V3:
        side.environment["LMCACHE_USE_GPU_CONNECTOR_V3"] = "True"
    return _with_connector(side, {"kv_connector": "LMCacheConnectorV1"}, {})


_CONNECTORS: dict[str, Callable[[Side, GpuPlan, Places], Side]] = {
    PLAIN: _plain,
    HEADWATER: _headwater,
    LAYERWISE: _headwater,
    PACKED: _headwater,
    UNPACKED: _headwater,
    OFFLOADING: _offloading,
    LMCACHE: _lmcache,
    LMCACHE_V3: _lmcache,
}


def _with_connector(side: Side, transfer: dict[str, Any], extra: dict[str, Any]) -> Side:
    side.settings["kv_transfer_config"] = transfer | {"kv_role": "kv_both", "kv_connector_extra_config": extra}
    return side


# ---- shared memory ----------------------------------------------------------------------------------------------
def usable_capacity(asked_bytes: int) -> int:
    """Bytes of shared memory that each of two connectors can have at the same time, at most `asked_bytes`.

    Raises EngineError where that is next to nothing.
    """
    free = shutil.disk_usage(SHM_ROOT).free
    capacity = min(asked_bytes, int(free * 0.47) >> 20 << 20)
    if capacity < _LEAST_BYTES:
        raise EngineError(f"{SHM_ROOT} has {format_size(free)} free; make room there for two pools")
    return capacity


def remove_pools(keep: Collection[str] = (), root: Path = Path(SHM_ROOT)) -> list[str]:
    """Remove this process's pools but those of these URLs, and those of runs that were killed. Returns their names."""
    removed, kept = [], {re.split(r"[?,]", url.removeprefix("shm:///"))[0] for url in keep}
    for directory in sorted(root.glob(f"{_NAME}-*")):
        found = re.match(rf"{_NAME}-(\d+)", directory.name)
        if not found or directory.name in kept:
            continue
        if int(found[1]) == os.getpid() or not Path(f"/proc/{found[1]}").exists():
            shutil.rmtree(directory, ignore_errors=True)
            removed.append(directory.name)
    return removed
