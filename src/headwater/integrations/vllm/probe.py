"""The proof that a view says where vLLM keeps its KV: vLLM itself writes a pattern, and the view must read it.

It is done once, before the first request, with the function that every step uses, for every layer. Whatever the
pattern does not prove switches the connector off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headwater.integrations.vllm.declined import DeclinedError
from headwater.integrations.vllm.layout import CANDIDATES, candidate_views, check_dtype
from headwater.kv.spec import KVSpec
from headwater.kv.topology import Shard
from headwater.transfer.convert import PageSpan, gather, plan_spans
from headwater.transfer.view import PagedView

DIGIT = 128
"""Patterns are written as digits of this base: whole numbers below 256 are exact in every float type."""


def prove_view(
    spec: KVSpec, shard: Shard, tensors: Sequence[Tensor], layers: range, attention: Sequence[Any]
) -> PagedView:
    """The view that reads what `attention`, vLLM's own layers, write. Raises DeclinedError where there is none.

    Costs some milliseconds a layer, and leaves the caches as they were.
    """
    check_dtype(spec, tensors)
    for view in candidate_views(spec, shard, tensors, layers):
        if _reads_patterns(view, shard, tensors, attention):
            return view
    raise DeclinedError(
        f"the attention backend {type(attention[0].impl).__name__} lays its KV out in none of the known ways "
        f"({'; '.join(candidate.name for candidate in CANDIDATES)})"
    )


def _reads_patterns(view: PagedView, shard: Shard, tensors: Sequence[Tensor], attention: Sequence[Any]) -> bool:
    # Two blocks that are not neighbours, the second before the first, and more tokens than one block holds.
    blocks = [min(3, view.num_blocks - 1), min(1, view.num_blocks - 1)]
    num_tokens = 2 * view.block_size if blocks[0] != blocks[1] else view.block_size
    blocks = blocks[: num_tokens // view.block_size]
    plan = plan_spans(view, shard, [PageSpan(blocks, 0, num_tokens)])
    kept = [tensor[blocks].clone() for tensor in tensors]
    try:
        for digit in range(_num_digits(view.spec, num_tokens, len(shard.heads))):
            patterns = []
            for layer, tensor, module in zip(view.layers, tensors, attention, strict=True):
                planes = _pattern(view.spec, num_tokens, len(shard.heads), digit, layer, tensor)
                _write(module, planes, _slots(blocks, view.block_size, tensor.device))
                patterns.append(planes)
            if not _same(plan, patterns, view):
                return False
        return True
    finally:
        for tensor, before in zip(tensors, kept, strict=True):
            tensor[blocks] = before


def _num_digits(spec: KVSpec, num_tokens: int, num_heads: int) -> int:
    """So many that every element of a layer has a number of its own."""
    elements, digits = num_tokens * num_heads * sum(plane.width for plane in spec.planes), 1
    while elements > DIGIT**digits:
        digits += 1
    return digits


def _pattern(spec: KVSpec, num_tokens: int, num_heads: int, digit: int, layer: int, like: Tensor) -> list[Tensor]:
    """Planes [token, head, dim]: one digit of each element's number, moved on by the layer's."""
    planes, first = [], 0
    for plane in spec.planes:
        numbers = torch.arange(first, first + num_tokens * num_heads * plane.width) // DIGIT**digit + layer + 1
        planes.append((numbers % DIGIT).view(num_tokens, num_heads, plane.width).to(like.dtype).to(like.device))
        first += numbers.numel()
    return planes


def _slots(blocks: list[int], block_size: int, device: torch.device) -> Tensor:
    starts = torch.tensor(blocks, dtype=torch.int64)[:, None] * block_size
    return (starts + torch.arange(block_size)).flatten().to(device)


def _write(module: Any, planes: list[Tensor], slots: Tensor) -> None:
    """What a step of vLLM does with its keys and values."""
    impl, cache = module.impl, module.kv_cache
    if getattr(impl, "kv_lora_rank", None) is not None:
        latent, rope = (plane.squeeze(1) for plane in planes)
        impl.do_kv_cache_update(latent, rope, cache, slots, module.kv_cache_dtype, module._k_scale)
    else:
        impl.do_kv_cache_update(module, planes[0], planes[1], cache, slots)


def _same(plan: Any, patterns: list[list[Tensor]], view: PagedView) -> bool:
    """Whether the view reads the patterns, in extent order, bit for bit."""
    shape = (len(view.layers), len(view.heads), plan.tile_bytes(0))
    staged = torch.empty(plan.staged_bytes(len(view.layers)), dtype=torch.uint8, device=view.device)
    gather(plan, view.layers, staged)
    for tiles, planes in zip(staged.view(shape), patterns, strict=True):
        wanted = [plane.permute(1, 0, 2).contiguous().view(torch.uint8).flatten(1) for plane in planes]
        if not torch.equal(tiles, torch.cat(wanted, dim=1)):
            return False
    return True
