"""Where vLLM keeps its KV, as a view that `transfer` understands: candidates here, the proof in `probe`.

vLLM gives every layer as [block, head, token, K ‖ V]. What that means inside a block is the attention backend's own
business: FlashAttention, Triton and FlashInfer keep K and V side by side in a token's row; the CPU backend keeps a
plane of K before a plane of V, and turns K around. All of these are strides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headwater.errors import HeadwaterError
from headwater.integrations.vllm.declined import DeclinedError
from headwater.kv.spec import KVSpec
from headwater.kv.topology import Shard
from headwater.transfer.view import PagedView, view_tensors

Planes = list[Tensor]
"""One layer's planes, each as [block, token, head, dim]."""


class LayoutCandidate(NamedTuple):
    """A way in which a layer's tensor may be laid out."""

    name: str
    planes: Callable[[Tensor, KVSpec], Planes]


def _side_by_side(cache: Tensor, spec: KVSpec) -> Planes:
    """[block, head, token, K ‖ V], in any order in memory. MLA's latent and rotary parts lie the same way."""
    widths = [plane.width for plane in spec.planes]
    return [part.permute(0, 2, 1, 3) for part in cache.split(widths, dim=-1)]


def _plane_after_plane(cache: Tensor, spec: KVSpec) -> Planes:
    """In each block and head: all rows of K, then all of V."""
    return [plane.permute(0, 2, 1, 3) for plane in _halves(cache, spec)]


def _turned_keys(cache: Tensor, spec: KVSpec) -> Planes:
    """Like `_plane_after_plane`, but the plane of K is [dim, token]: what vLLM's CPU kernels call `vec`."""
    keys, values = _halves(cache, spec)
    turned = _reshaped(keys, keys.shape[3], keys.shape[2])
    return [turned.permute(0, 3, 1, 2), values.permute(0, 2, 1, 3)]


def _halves(cache: Tensor, spec: KVSpec) -> Planes:
    tokens, width = cache.shape[2:]
    if len(spec.planes) != 2 or spec.planes[0].width != spec.planes[1].width:
        raise ValueError("two planes of one width are needed")
    both = _reshaped(cache, 2 * tokens, width // 2)
    return list(both.split(tokens, dim=2))


def _reshaped(cache: Tensor, rows: int, width: int) -> Tensor:
    """The inside of each block and head as [rows, width]; ValueError where it does not lie in one piece."""
    blocks, heads = cache.shape[:2]
    if cache.stride()[2:] != (cache.shape[3], 1):
        raise ValueError("the inside of a block is not contiguous")
    stride = (cache.stride(0), cache.stride(1), width, 1)
    return cache.as_strided((blocks, heads, rows, width), stride, cache.storage_offset())


CANDIDATES = (
    LayoutCandidate("rows of K and V side by side", _side_by_side),
    LayoutCandidate("planes of K and V, K turned", _turned_keys),
    LayoutCandidate("planes of K and V", _plane_after_plane),
)


def layer_tensors(kv_caches: dict[str, Tensor], num_layers: int) -> tuple[list[str], list[Tensor], range]:
    """The caches in the order of their layers, and which layers of the model they are. Raises DeclinedError."""
    from vllm.model_executor.models.utils import extract_layer_index

    found: dict[int, str] = {}
    for name, cache in kv_caches.items():
        if not isinstance(cache, Tensor):
            raise DeclinedError(f"layer {name!r} keeps a state, and not KV")
        index = extract_layer_index(name)
        if index in found or not 0 <= index < num_layers:
            raise DeclinedError(f"layer {name!r} is none of the {num_layers} that this model's KV has")
        found[index] = name
    layers = range(min(found), max(found) + 1)
    if len(found) != len(layers):
        raise DeclinedError(f"layers {sorted(found)} are not consecutive")
    names = [found[layer] for layer in layers]
    tensors = [kv_caches[name] for name in names]
    if len({tensor.data_ptr() for tensor in tensors}) != len(tensors):
        raise DeclinedError("layers share their KV with each other")
    return names, [tensor if tensor.dim() == 4 else tensor.unsqueeze(1) for tensor in tensors], layers


def candidate_views(spec: KVSpec, shard: Shard, tensors: Sequence[Tensor], layers: range) -> Iterator[PagedView]:
    """The views that these tensors allow, one for each candidate that fits their shapes."""
    axes = ("block", "token", "head", "dim")
    for candidate in CANDIDATES:
        try:
            planes = [candidate.planes(tensor, spec) for tensor in tensors]
            yield view_tensors(spec, planes, axes, layers=layers, heads=shard.heads)
        except (ValueError, RuntimeError, HeadwaterError):
            continue


def check_dtype(spec: KVSpec, tensors: Sequence[Tensor]) -> None:
    """Raise DeclinedError where the tensors hold something else than the spec says."""
    expected = {getattr(torch, plane.dtype, None) for plane in spec.planes}
    if {tensor.dtype for tensor in tensors} != expected:
        raise DeclinedError(
            f"the caches are {sorted({str(t.dtype) for t in tensors})}; the spec says {spec.planes[0].dtype}"
        )
