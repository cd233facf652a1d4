"""From the order of the axes in memory to the strides of every plane: a layout is a row of a table, not a branch."""

from __future__ import annotations

from headwater.engine.kvcache.base import CachePlane, CacheView
from headwater.errors import EngineConfigError
from headwater.kv.spec import DTYPE_BYTES, KVSpec
from headwater.kv.topology import Shard
from headwater.transfer.axes import Axes

LAYOUTS: dict[str, tuple[str, ...]] = {
    # All of a layer together: what most attention kernels expect.
    "layer-first": ("layer", "plane", "page", "token", "head", "dim"),
    # All of a page together: one contiguous piece to move.
    "page-first": ("page", "layer", "plane", "token", "head", "dim"),
}
"""Axes from the outermost to the innermost."""

PLANE_ALIGNMENT = 16
"""Bytes of the widest load of a GPU thread; every plane starts at a multiple of it."""

MAX_PAGES = (1 << 31) - 2
"""Page tables hold int32, and the dummy page has a number too."""

MAX_BYTES = 1 << 60


def page_bytes(spec: KVSpec, shard: Shard, page_size: int) -> int:
    """Bytes that one page adds to the cache of a rank, at most (a layout may need less padding)."""
    num_rows = page_size * len(shard.heads)
    return len(shard.layers) * sum(_aligned(num_rows * plane.row_bytes) for plane in spec.planes)


def describe_cache(spec: KVSpec, shard: Shard, *, num_pages: int, page_size: int, layout: str) -> CacheView:
    """Lay out the cache of one rank, dummy page included. Raises EngineConfigError for what cannot be."""
    if layout not in LAYOUTS:
        raise EngineConfigError(f"cache layout is {layout!r}; expected one of {', '.join(LAYOUTS)}")
    if page_size < 1:
        raise EngineConfigError(f"page_size is {page_size}; expected at least 1")
    if not 1 <= num_pages <= MAX_PAGES:
        raise EngineConfigError(f"num_pages is {num_pages}; expected 1 to {MAX_PAGES}")
    if shard.split.parts > 1:
        raise EngineConfigError("this cache holds whole pages of tokens; context parallelism divides them")
    return arrange(spec, shard, num_pages, page_size, LAYOUTS[layout])


def arrange(spec: KVSpec, shard: Shard, num_pages: int, page_size: int, order: tuple[str, ...]) -> CacheView:
    """The cache whose axes follow each other in that order, outermost first.

    Inside the plane axis each plane has its own sizes; outside it, a step passes over all of them:

        [ layer 0                     ][ layer 1 …      layer-first with planes k and v
        [ k: pages … ][ v: pages …    ][ k …
    """
    heads, layers = len(shard.heads), len(shard.layers)
    sizes = {"layer": layers, "page": num_pages + 1, "token": page_size, "head": heads}
    inner = order[order.index("plane") + 1 :]
    outer = order[: order.index("plane")]

    # Bytes of one step along each axis: for each plane inside the plane axis, for all of them outside.
    steps: list[dict[str, int]] = []
    starts, span = [], 0
    for plane in spec.planes:
        step, extent = {}, DTYPE_BYTES[plane.dtype]
        for axis in reversed(inner):
            step[axis] = extent
            extent *= sizes.get(axis, plane.width)
        steps.append(step)
        starts.append(span)
        span += _aligned(extent)
    shared = {}
    for axis in reversed(outer):
        shared[axis] = span
        span *= sizes[axis]
    if span > MAX_BYTES:
        raise EngineConfigError(f"{num_pages} pages of {page_size} tokens would be {span:,} bytes; use fewer")

    def view(layer: int, number: int) -> CachePlane:
        plane, step = spec.planes[number], steps[number] | shared
        element = DTYPE_BYTES[plane.dtype]
        strides = Axes(*(step[axis] // element for axis in ("page", "token", "head", "dim")))
        shape = Axes(num_pages + 1, page_size, heads, plane.width)
        offset = starts[number] + layer * step["layer"]
        return CachePlane(shard.layers[layer], plane.name, plane.dtype, shape, strides, offset)

    planes = tuple(tuple(view(layer, number) for number in range(len(spec.planes))) for layer in range(layers))
    return CacheView(num_pages, page_size, shard.layers, shard.heads, planes, span)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // PLANE_ALIGNMENT) * PLANE_ALIGNMENT
