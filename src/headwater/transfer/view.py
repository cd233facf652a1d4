"""A view of a paged cache: where every plane of every layer lies, as numbers.

NHD or HND, layer-first or page-first, one allocation or a tensor per layer, K and V side by side or MLA's latent and
rotary parts in one row: all of it is addresses and strides. A view copies nothing and knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from headwater.errors import InvalidArgumentError
from headwater.kernels.dtypes import TORCH_DTYPES
from headwater.kernels.extent import Pages, PlaneRow
from headwater.kv.spec import DTYPE_BYTES, KVSpec, Plane
from headwater.transfer.axes import Axes

AXES = ("plane", "block", "token", "head", "dim")
"""Names for the axes of a cache's tensors."""

PACKINGS = ("rows",)
"""How a token's vector lies in the cache: `rows` is element after element, at the stride of `dim`."""


@dataclass(frozen=True, slots=True)
class PlaneView:
    """One plane of one layer: element (block, token, head, dim) lies at `address + Σ index × stride`."""

    address: int
    strides: Axes
    """In bytes."""
    packing: str = "rows"


class DescribedPlane(Protocol):
    """One plane as the reference engine describes it."""

    @property
    def layer(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, int, int, int]: ...
    @property
    def strides(self) -> tuple[int, int, int, int]: ...
    @property
    def offset_bytes(self) -> int: ...


class DescribedCache(Protocol):
    """A cache in one allocation, as the reference engine describes it (strides in elements)."""

    @property
    def num_pages(self) -> int: ...
    @property
    def page_size(self) -> int: ...
    @property
    def layers(self) -> range: ...
    @property
    def heads(self) -> range: ...
    @property
    def planes(self) -> Sequence[Sequence[DescribedPlane]]: ...


@dataclass(frozen=True)
class PagedView:
    """The paged cache of one rank. Make one with `view_description`, `view_tensors` or, from addresses, directly."""

    spec: KVSpec
    """The whole model's."""
    layers: range
    heads: range
    """Layers and heads that this cache holds, counted over the whole model."""
    block_size: int
    num_blocks: int
    """Blocks that requests can have; a view may leave out blocks at the end of the cache."""
    planes: tuple[tuple[PlaneView, ...], ...]
    """By layer of this rank, then in the spec's order."""
    device: torch.device
    owner: object = field(default=None, repr=False)
    """What keeps the memory alive."""

    def __post_init__(self) -> None:
        _check_held(self.spec, self.layers, self.heads)
        if self.block_size < 1 or self.num_blocks < 1:
            raise InvalidArgumentError(f"{self.num_blocks} blocks of {self.block_size} tokens; expected at least one")
        if [len(layer) for layer in self.planes] != [len(self.spec.planes)] * len(self.layers):
            raise InvalidArgumentError(
                f"planes of {[len(layer) for layer in self.planes]} were given by layer; expected "
                f"{len(self.spec.planes)} in each of {len(self.layers)} layers"
            )
        for layer, planes in zip(self.layers, self.planes, strict=True):
            for plane, view in zip(self.spec.planes, planes, strict=True):
                _check_plane(plane, view, self._shape(plane), f"layer {layer}, plane {plane.name!r}")

    def _shape(self, plane: Plane) -> Axes:
        return Axes(self.num_blocks, self.block_size, len(self.heads), plane.width)

    @cached_property
    def pages(self) -> Pages:
        """The numbers as kernels want them."""
        rows = tuple(tuple(PlaneRow(view.address, *view.strides) for view in layer) for layer in self.planes)
        return Pages(
            planes=rows,
            row_bytes=tuple(plane.row_bytes for plane in self.spec.planes),
            element_bytes=tuple(DTYPE_BYTES[plane.dtype] for plane in self.spec.planes),
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            num_heads=len(self.heads),
            device=self.device,
        )


def view_description(spec: KVSpec, cache: DescribedCache, data: Tensor) -> PagedView:
    """The view of a cache in one allocation, `data` (bytes), that is described as the reference engine does it.

    Raises InvalidArgumentError where the description does not fit the spec or reaches beyond the allocation.
    """
    if data.dtype != torch.uint8 or not data.is_contiguous():
        raise InvalidArgumentError(f"the allocation must be contiguous bytes, not {data.dtype} of {data.stride()}")
    _check_held(spec, cache.layers, cache.heads)
    layers = []
    for layer, described in zip(cache.layers, cache.planes, strict=True):
        views = []
        for plane, part in zip(spec.planes, described, strict=True):
            shape = (part.shape[0], cache.page_size, len(cache.heads), plane.width)
            found = (part.layer, part.name, part.dtype, tuple(part.shape))
            if found != (layer, plane.name, plane.dtype, shape) or part.shape[0] < cache.num_pages:
                raise InvalidArgumentError(
                    f"layer {layer}, plane {plane.name!r} is described as {found}; expected {plane} of shape {shape} "
                    f"with at least {cache.num_pages} pages"
                )
            strides = _byte_strides(plane, shape, part.strides)
            reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
            if part.offset_bytes < 0 or part.offset_bytes + reach + DTYPE_BYTES[plane.dtype] > data.numel():
                raise InvalidArgumentError(
                    f"layer {layer}, plane {plane.name!r} reaches from byte {part.offset_bytes} over {reach} more, "
                    f"beyond an allocation of {data.numel()}"
                )
            views.append(PlaneView(data.data_ptr() + part.offset_bytes, strides))
        layers.append(tuple(views))
    return PagedView(
        spec, cache.layers, cache.heads, cache.page_size, cache.num_pages, tuple(layers), data.device, data
    )


def view_tensors(
    spec: KVSpec,
    tensors: Sequence[Tensor | Sequence[Tensor]],
    axes: Sequence[str],
    *,
    layers: range | None = None,
    heads: range | None = None,
) -> PagedView:
    """The view of a cache that has, for each layer, one tensor, or one for each plane. `axes` names the axes of such a
    tensor in its own order, e.g. `("plane", "block", "token", "head", "dim")`.

    Where there is one tensor a layer and no axis is called `plane`, the planes lie one after another in `dim`, as MLA
    keeps them. `head` may be missing where there is one. Raises InvalidArgumentError for what does not fit.
    """
    layers = range(spec.num_layers) if layers is None else layers
    heads = range(spec.num_kv_heads) if heads is None else heads
    _check_held(spec, layers, heads)
    if len(set(axes)) != len(axes) or not {"block", "token", "dim"} <= set(axes) <= set(AXES):
        raise InvalidArgumentError(f"axes are {tuple(axes)}; expected block, token, dim and perhaps plane and head")
    if len(tensors) != len(layers):
        raise InvalidArgumentError(f"{len(tensors)} tensors were given for {len(layers)} layers")
    found = [
        _layer_planes(spec, tensor, axes, len(heads), layer) for layer, tensor in zip(layers, tensors, strict=True)
    ]
    sizes = {(tensor.shape[0], tensor.shape[1], tensor.device) for planes in found for tensor in planes}
    if len(sizes) != 1:
        raise InvalidArgumentError(
            f"all layers must have the same (blocks, block size, device), got {sorted(map(str, sizes))}"
        )
    num_blocks, block_size, device = sizes.pop()
    views = tuple(
        tuple(
            PlaneView(tensor.data_ptr(), _byte_strides(plane, tuple(tensor.shape), tensor.stride()))
            for plane, tensor in zip(spec.planes, planes, strict=True)
        )
        for planes in found
    )
    return PagedView(spec, layers, heads, block_size, num_blocks, views, device, found)


def _layer_planes(
    spec: KVSpec, given: Tensor | Sequence[Tensor], axes: Sequence[str], num_heads: int, layer: int
) -> list[Tensor]:
    """The planes of one layer, each as [block, token, head, dim]."""
    planes: list[Tensor]
    if not isinstance(given, Tensor):
        planes, names = list(given), [axis for axis in axes if axis != "plane"]
    elif "plane" in axes:
        at = list(axes).index("plane")
        planes, names = list(given.unbind(at)) if given.dim() == len(axes) else [given], [*axes[:at], *axes[at + 1 :]]
    else:
        names = list(axes)
        widths = [plane.width for plane in spec.planes]
        at = names.index("dim")
        if given.dim() != len(names) or given.shape[at] != sum(widths):
            raise InvalidArgumentError(
                f"layer {layer}: a tensor of shape {tuple(given.shape)} was given with axes {tuple(names)}; expected "
                f"planes of widths {widths} one after another in its dim"
            )
        planes = list(given.split(widths, dim=at))
    if len(planes) != len(spec.planes):
        raise InvalidArgumentError(f"layer {layer}: {len(planes)} planes were given; the spec has {len(spec.planes)}")
    found = []
    for plane, tensor in zip(spec.planes, planes, strict=True):
        label = f"layer {layer}, plane {plane.name!r}"
        expected = TORCH_DTYPES[plane.dtype]
        if tensor.dtype != expected and not (tensor.dtype == torch.uint8 and expected.itemsize == 1):
            raise InvalidArgumentError(f"{label} is {tensor.dtype}; the spec says {plane.dtype}")
        if tensor.dim() != len(names):
            raise InvalidArgumentError(f"{label} has shape {tuple(tensor.shape)}; expected axes {tuple(names)}")
        if "head" not in names:
            tensor = tensor.unsqueeze(-1)
        ordered = [*names, *(["head"] if "head" not in names else [])]
        tensor = tensor.permute(*(ordered.index(axis) for axis in ("block", "token", "head", "dim")))
        if tensor.shape[2:] != (num_heads, plane.width):
            raise InvalidArgumentError(
                f"{label} has {tensor.shape[2]} heads of width {tensor.shape[3]}; expected {num_heads} of {plane.width}"
            )
        found.append(tensor)
    return found


def _byte_strides(plane: Plane, shape: tuple[int, ...], strides: Sequence[int]) -> Axes:
    """Strides in bytes. An axis of one has no step; what stands there must neither look like an overlap nor like a
    vector in pieces."""
    element = DTYPE_BYTES[plane.dtype]
    fallback = (0, 0, 0, element)
    pairs = zip(shape, strides, fallback, strict=True)
    return Axes(*(stride * element if size > 1 else other for size, stride, other in pairs))


def _check_held(spec: KVSpec, layers: range, heads: range) -> None:
    if not layers or layers.step < 1 or layers.start < 0 or layers[-1] >= spec.num_layers:
        raise InvalidArgumentError(f"layers {layers} were given; expected ascending ones of {spec.num_layers}")
    if not heads or heads.step != 1 or heads.start < 0 or heads[-1] >= spec.num_kv_heads:
        raise InvalidArgumentError(f"heads {heads} were given; expected consecutive ones of {spec.num_kv_heads}")


def _check_plane(plane: Plane, view: PlaneView, shape: Axes, label: str) -> None:
    """No two elements may share a byte: a scatter would write one of them over the other."""
    if view.packing not in PACKINGS:
        raise InvalidArgumentError(f"{label} has packing {view.packing!r}; known are {', '.join(PACKINGS)}")
    if view.address <= 0:
        raise InvalidArgumentError(f"{label} lies at address {view.address}")
    span = DTYPE_BYTES[plane.dtype]
    for stride, size in sorted((stride, size) for stride, size in zip(view.strides, shape, strict=True) if size > 1):
        if stride < span:
            raise InvalidArgumentError(f"{label}: strides of {view.strides} bytes make elements of {shape} overlap")
        span += (size - 1) * stride
