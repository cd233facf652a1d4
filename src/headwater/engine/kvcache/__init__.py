"""The paged KV cache: tensors of pages, in a layout of choice. Which page is whose is kept in `pages`, not here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwater.engine.kvcache.base import CachePlane, CacheView
from headwater.engine.kvcache.layout import LAYOUTS, describe_cache, page_bytes
from headwater.errors import EngineConfigError
from headwater.kv.spec import KVSpec
from headwater.kv.topology import Shard, Topology
from headwater.transfer.axes import Axes

if TYPE_CHECKING:
    import torch

    from headwater.engine.kvcache.paged import PagedKVCache

__all__ = ["LAYOUTS", "Axes", "CachePlane", "CacheView", "create_kv_cache", "kv_page_bytes"]


def create_kv_cache(
    spec: KVSpec,
    *,
    topology: Topology,
    tp_rank: int,
    num_pages: int,
    page_size: int,
    layout: str = "layer-first",
    device: torch.device | str = "cpu",
) -> PagedKVCache:
    """The cache of one tensor-parallel rank of a model with that spec, zeroed. One allocation.

    Raises TopologyError where the heads cannot be divided like that, EngineConfigError for sizes that cannot be, and
    MemoryBudgetError where the device has no room.
    """
    import torch

    from headwater.engine.kvcache.paged import PagedKVCache

    shard = _shard(spec, topology, tp_rank)
    view = describe_cache(spec, shard, num_pages=num_pages, page_size=page_size, layout=layout)
    return PagedKVCache(view, page_bytes(spec, shard, page_size), torch.device(device))


def kv_page_bytes(spec: KVSpec, *, topology: Topology, tp_rank: int, page_size: int) -> int:
    """Bytes of one page on one rank: what the number of pages is planned with, before there is a cache."""
    return page_bytes(spec, _shard(spec, topology, tp_rank), page_size)


def _shard(spec: KVSpec, topology: Topology, tp_rank: int) -> Shard:
    if topology.num_ranks != topology.tp or topology.dcp > 1:
        raise EngineConfigError(f"the engine runs tensor parallelism only; {topology} has more")
    return topology.shard(spec, tp_rank=tp_rank)
