"""Movers: how bytes get between staging, extents and a paged cache on one kind of device. They decide nothing.

`cpu` copies, hashes and turns each piece while it is in the processor's cache; `cuda` launches on streams of its own
and lets the device hash and verify. Both run the same saves and loads (`transfer.save`, `transfer.load`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwater.errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch

    from headwater.kv.topology import Shard
    from headwater.pool.space import Space
    from headwater.transfer.movers.base import Placer, Storer
    from headwater.transfer.view import PagedView

MOVERS = ("cpu", "cuda")


def mover_of(device: torch.device, name: str | None = None) -> str:
    """The mover for a device's cache, or the one that was asked for by name (tests run CUDA's over CPU tensors)."""
    found = name or ("cuda" if device.type == "cuda" else "cpu")
    if found not in MOVERS:
        raise InvalidArgumentError(f"mover is {found!r}; expected one of {', '.join(MOVERS)}")
    return found


def make_storer(name: str, space: Space, view: PagedView, shard: Shard) -> Storer:
    """The half of a mover that fills extents."""
    if name == "cuda":
        from headwater.transfer.movers.cuda import CudaStorer

        return CudaStorer(space, view, shard)
    from headwater.transfer.movers.cpu import CpuStorer

    return CpuStorer(space, view, shard)


def make_placer(name: str, space: Space, view: PagedView, shard: Shard, staging_bytes: int) -> Placer:
    """The half of a mover that fills the cache."""
    if name == "cuda":
        from headwater.transfer.movers.cuda import CudaPlacer

        return CudaPlacer(space, view, shard, staging_bytes)
    from headwater.transfer.movers.cpu import CpuPlacer

    return CpuPlacer(space, view, shard)
