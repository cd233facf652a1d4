"""Where vLLM keeps its KV: every layout that this build's own code can write is read and written bit for bit, and one
that is none of them is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from headwater.integrations.vllm.declined import DeclinedError
from headwater.integrations.vllm.layout import candidate_views
from headwater.integrations.vllm.probe import prove_view
from headwater.kv.spec import KVSpec
from headwater.kv.topology import Shard, whole_shard
from headwater.transfer.convert import PageSpan, gather, plan_spans, scatter
from headwater.transfer.view import PagedView

NUM_BLOCKS = 6


class Attention:
    """A layer of vLLM, as far as the probe knows it."""

    def __init__(self, cache: torch.Tensor, write: Any, **impl: Any) -> None:
        self.kv_cache = cache
        self.kv_cache_dtype = "auto"
        self._k_scale = torch.ones(1)
        self.impl = SimpleNamespace(do_kv_cache_update=write, **impl)


def cpu_write(isa: str) -> Any:
    """vLLM's own packing."""
    from vllm import _custom_ops as ops

    def write(layer: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        blocks, heads, tokens, _ = cache.shape
        keys, values = cache.view(blocks, heads, 2 * tokens, -1).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(key, value, keys, values, slots, isa)

    return write


def rows_write(layer: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """What FlashAttention, Triton and FlashInfer do: K and V side by side in [block, head, token, K ‖ V]."""
    size = cache.shape[2]
    cache[slots // size, :, slots % size] = torch.cat((key, value), dim=-1)


def mla_write(
    latent: torch.Tensor, rope: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, dtype: str, scale: torch.Tensor
) -> None:
    size = cache.shape[1]
    cache[slots // size, slots % size] = torch.cat((latent, rope), dim=-1)


def empty_cache(spec: KVSpec, block_size: int, order: str) -> list[torch.Tensor]:
    """A tensor for each layer, [block, head, token, width], in that order in memory."""
    sizes = {"b": NUM_BLOCKS, "h": spec.num_kv_heads, "n": block_size}
    width = sum(plane.width for plane in spec.planes)
    dtype = getattr(torch, spec.planes[0].dtype)
    made = []
    for _ in range(spec.num_layers):
        raw = torch.randn([sizes[axis] for axis in order] + [width]).to(dtype)
        made.append(raw.permute(*(order.index(axis) for axis in "bhn"), 3))
    return made


def check_both_ways(view: PagedView, shard: Shard, attention: list[Attention]) -> None:
    """vLLM writes and we read; we write and vLLM would have written the same bytes."""
    num_tokens, blocks = view.block_size + 7, [4, 2]
    plan = plan_spans(view, shard, [PageSpan(blocks, 0, num_tokens)])
    numbers = torch.arange(num_tokens)
    slots = torch.tensor(blocks)[numbers // view.block_size] * view.block_size + numbers % view.block_size
    dtype = attention[0].kv_cache.dtype
    planes = [torch.randn(num_tokens, len(view.heads), plane.width).to(dtype) for plane in view.spec.planes]
    for layer in attention:
        layer.impl.do_kv_cache_update(layer, *planes, layer.kv_cache, slots)
    staged = torch.empty(plan.staged_bytes(len(view.layers)), dtype=torch.uint8)
    gather(plan, view.layers, staged)
    tile = torch.cat([plane.permute(1, 0, 2).contiguous().view(torch.uint8).flatten(1) for plane in planes], dim=1)
    assert torch.equal(staged.view(len(view.layers), *tile.shape), tile.expand(len(view.layers), -1, -1))
    written = [layer.kv_cache.clone() for layer in attention]
    for layer in attention:
        layer.kv_cache[blocks] = 7
    scatter(plan, view.layers, staged)
    again = torch.empty_like(staged)
    gather(plan, view.layers, again)
    assert torch.equal(again, staged)
    for layer, copy in zip(attention, written, strict=True):
        assert torch.equal(layer.kv_cache[blocks[0]], copy[blocks[0]]), "a whole block differs from what vLLM writes"


@pytest.mark.parametrize("block_size", [32, 64, 128])
@pytest.mark.parametrize(("head_dim", "isa"), [(64, "vec"), (128, "vec"), (80, "vec16"), (32, "vec")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_vllm_packs_on_a_cpu_is_read_and_written(block_size: int, head_dim: int, isa: str, dtype: str) -> None:
    spec = KVSpec.gqa(num_layers=2, num_kv_heads=3, head_dim=head_dim, dtype=dtype)
    caches = empty_cache(spec, block_size, "bhn")
    before = [cache.clone() for cache in caches]
    attention = [Attention(cache, cpu_write(isa)) for cache in caches]
    view = prove_view(spec, whole_shard(spec), caches, range(2), attention)
    assert all(torch.equal(a, b) for a, b in zip(caches, before, strict=True)), "the probe left something behind"
    check_both_ways(view, whole_shard(spec), attention)


@pytest.mark.parametrize("order", ["bhn", "bnh", "hbn"])
def test_rows_side_by_side_in_any_order(order: str) -> None:
    """NHD, HND and heads before blocks."""
    spec = KVSpec.gqa(num_layers=2, num_kv_heads=3, head_dim=16, dtype="float16")
    caches = empty_cache(spec, 8, order)
    attention = [Attention(cache, rows_write) for cache in caches]
    view = prove_view(spec, whole_shard(spec), caches, range(2), attention)
    check_both_ways(view, whole_shard(spec), attention)


def test_mla_keeps_its_two_parts_in_one_row() -> None:
    spec = KVSpec.mla(num_layers=2, latent_dim=32, rope_dim=8, dtype="bfloat16")
    caches = empty_cache(spec, 16, "bhn")
    attention = [Attention(cache.squeeze(1), mla_write, kv_lora_rank=32) for cache in caches]
    view = prove_view(spec, whole_shard(spec), caches, range(2), attention)
    assert [plane.width for plane in view.spec.planes] == [32, 8]


def swapped(layer: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    rows_write(layer, value, key, cache, slots)


def tiled(layer: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Pairs of dimensions change places: a permutation that looks almost right."""
    rows_write(layer, key.unflatten(-1, (-1, 2)).flip(-1).flatten(-2), value, cache, slots)


def last_element(layer: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Right everywhere but in the very last element."""
    rows_write(layer, key, value, cache, slots)
    cache[slots[-1] // cache.shape[2], -1, slots[-1] % cache.shape[2], -1] += 1


@pytest.mark.parametrize("write", [swapped, tiled, last_element])
def test_a_layout_that_is_none_of_the_known_is_declined(write: Any) -> None:
    spec = KVSpec.gqa(num_layers=2, num_kv_heads=3, head_dim=16, dtype="float32")
    caches = empty_cache(spec, 8, "bhn")
    with pytest.raises(DeclinedError, match="none of the known ways"):
        prove_view(spec, whole_shard(spec), caches, range(2), [Attention(cache, write) for cache in caches])


def test_one_strange_layer_is_enough() -> None:
    spec = KVSpec.gqa(num_layers=2, num_kv_heads=3, head_dim=16, dtype="float32")
    caches = empty_cache(spec, 8, "bhn")
    attention = [Attention(caches[0], rows_write), Attention(caches[1], swapped)]
    with pytest.raises(DeclinedError):
        prove_view(spec, whole_shard(spec), caches, range(2), attention)


def test_caches_of_another_dtype_are_declined() -> None:
    spec = KVSpec.gqa(num_layers=1, num_kv_heads=1, head_dim=16, dtype="float32")
    cache = torch.zeros(NUM_BLOCKS, 1, 8, 32, dtype=torch.bfloat16)
    with pytest.raises(DeclinedError, match="the caches"):
        prove_view(spec, whole_shard(spec), [cache], range(1), [Attention(cache, rows_write)])


def test_every_candidate_is_another_layout() -> None:
    spec = KVSpec.gqa(num_layers=1, num_kv_heads=2, head_dim=16, dtype="float32")
    views = list(candidate_views(spec, whole_shard(spec), empty_cache(spec, 8, "bhn"), range(1)))
    seen = {np.array([plane.strides for plane in view.planes[0]]).tobytes() for view in views}
    assert len(seen) == len(views) == 3
