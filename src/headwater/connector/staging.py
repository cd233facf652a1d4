"""How much memory lies between an engine's cache and the pool: rings for loads and for saves, on the cache's device.

Where a ring is full, loads wait and saves are dropped; so rings are sized from what one step can compute.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from headwater.connector.config import ConnectorConfig
from headwater.transfer.ring import sums_bytes

DEFAULT_STAGING_BYTES = {"cpu": 256 << 20, "cuda": 512 << 20}
"""On a GPU two halves of it are under way at a time, and copies below 64 MiB do not fill the bus."""
MAX_STAGING_BYTES = 2 << 30
"""Of each ring, unless more is asked for."""


def staging_bytes(config: ConnectorConfig | None, device_type: str) -> int:
    """Memory of a device that one rank's worker side takes, both directions together; none without a pool."""
    if config is None:
        return 0
    load, save = ring_bytes(config, device_type)
    return load + save + (sums_bytes(save) if device_type == "cuda" else 0)


def ring_bytes(config: ConnectorConfig, device_type: str) -> tuple[int, int]:
    """For loads, and for saves."""
    load = config.staging_bytes or DEFAULT_STAGING_BYTES[device_type]
    return load, config.save_staging_bytes or load


def with_staging(config: ConnectorConfig, step_bytes: int, device: torch.device) -> ConnectorConfig:
    """The config with rings sized from the KV that one step can compute on a rank, unless it says how large they are.

    On a CPU all of it, since all of it may have to leave the cache at once, and memory that is never used costs nothing
    there. On a GPU an engine launches a whole step ahead of the device if its thread need not wait for room, so saves
    get all of it and a quarter, unless that is more than a quarter of the device's free memory.
    """
    if config.staging_bytes is not None:
        return config
    if device.type == "cpu":
        return replace(config, staging_bytes=max(DEFAULT_STAGING_BYTES["cpu"], min(MAX_STAGING_BYTES, step_bytes)))
    least, (free, _) = DEFAULT_STAGING_BYTES["cuda"], torch.cuda.mem_get_info(device)
    loads = max(least, min(MAX_STAGING_BYTES, step_bytes // 4))
    saves = max(least, min(MAX_STAGING_BYTES, step_bytes * 5 // 4, free // 4))
    return replace(config, staging_bytes=loads, save_staging_bytes=saves)
