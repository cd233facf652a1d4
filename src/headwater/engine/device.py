"""What to run on and in which precision, with the reason, so that nobody has to guess what was chosen."""

from __future__ import annotations

from typing import NamedTuple

import torch

from headwater.engine.config import EngineConfig
from headwater.errors import EngineConfigError

DEFAULT_MEMORY_RATIO = {"cuda": 0.9, "cpu": 0.3}


class DevicePlacement(NamedTuple):
    """Where rank 0 runs, and how."""

    device: torch.device
    dtype: str
    memory_ratio: float
    overlap: bool
    reason: str


def choose_placement(config: EngineConfig) -> DevicePlacement:
    """Resolve "auto". Raises EngineConfigError where what was asked for is not there."""
    device, why_device = _choose_device(config)
    dtype, why_dtype = config.dtype, "as asked"
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" else "float32"
        why_dtype = "the default on a GPU" if device.type == "cuda" else "the fast and exact choice on a CPU"
    ratio = config.memory_ratio if config.memory_ratio is not None else DEFAULT_MEMORY_RATIO[device.type]
    overlap = device.type == "cuda" if config.overlap is None else config.overlap
    return DevicePlacement(device, dtype, ratio, overlap, f"{device.type} ({why_device}), {dtype} ({why_dtype})")


def rank_device(device: torch.device, rank: int) -> torch.device:
    """The device of one rank: GPUs in order, or the one CPU."""
    return torch.device("cuda", rank) if device.type == "cuda" else device


def device_kind(device: torch.device) -> str:
    """The kind of device: random numbers made on another kind are others."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _choose_device(config: EngineConfig) -> tuple[torch.device, str]:
    if config.device not in ("auto", "cpu", "cuda"):
        raise EngineConfigError(f"device is {config.device!r}; expected auto, cpu or cuda")
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.device == "cpu":
        return torch.device("cpu"), "as asked"
    if config.device == "auto" and not num_gpus:
        return torch.device("cpu"), "no CUDA device found"
    if not num_gpus:
        raise EngineConfigError("device is 'cuda' and this machine has no GPU that torch can use; try --device cpu")
    if num_gpus < config.tensor_parallel_size:
        raise EngineConfigError(
            f"tensor_parallel_size is {config.tensor_parallel_size} and this machine has {num_gpus} GPU(s); "
            "choose a smaller one, or --device cpu"
        )
    return torch.device("cuda", 0), "as asked" if config.device == "cuda" else f"{num_gpus} found"
