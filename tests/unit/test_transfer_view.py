"""Views: the same bytes by every way of describing them, and clear words for what cannot be a cache."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from headwater.engine.kvcache import create_kv_cache
from headwater.errors import InvalidArgumentError
from headwater.kv.spec import KVSpec
from headwater.kv.topology import Topology, whole_shard
from headwater.transfer.convert import PageSpan, gather, plan_spans, scatter
from headwater.transfer.view import Axes, PagedView, PlaneView, view_description, view_tensors

GQA = KVSpec.gqa(num_layers=2, num_kv_heads=2, head_dim=4, dtype="float32")
MLA = KVSpec.mla(num_layers=2, latent_dim=6, rope_dim=2, dtype="bfloat16")
SIZES = {"plane": 2, "block": 5, "token": 3, "head": 2, "dim": 4}
SPANS = [PageSpan([4, 0, 2], 0, 4), PageSpan([4, 0, 2], 4, 4)]


def gathered(view: PagedView) -> torch.Tensor:
    plan = plan_spans(view, whole_shard(view.spec), SPANS)
    out = torch.empty(plan.staged_bytes(len(view.layers)), dtype=torch.uint8)
    gather(plan, view.layers, out)
    return out


@pytest.mark.parametrize("axes", list(itertools.permutations(SIZES))[::7])
def test_tensors_of_any_axis_order(axes: tuple[str, ...]) -> None:
    logical = torch.randn(2, *SIZES.values())
    order = [list(SIZES).index(axis) for axis in axes]
    tensors = [layer.permute(order).contiguous() for layer in logical]
    expected = []
    for blocks, first, count in SPANS:
        slots = [(blocks[t // 3], t % 3) for t in range(first, first + count)]
        rows = torch.stack([logical[:, :, block, token] for block, token in slots])  # token, layer, plane, head, dim
        expected.append(rows.permute(1, 3, 2, 0, 4).contiguous().view(torch.uint8).flatten())
    assert torch.equal(gathered(view_tensors(GQA, tensors, axes)), torch.cat(expected))


def test_separate_tensors_for_k_and_v() -> None:
    whole = [torch.randn(2, 5, 3, 2, 4) for _ in range(2)]
    axes = ("plane", "block", "token", "head", "dim")
    pairs = [(layer[0].clone(), layer[1].clone()) for layer in whole]
    assert torch.equal(gathered(view_tensors(GQA, pairs, axes[1:])), gathered(view_tensors(GQA, whole, axes)))


@pytest.mark.parametrize("places", [(0, 1, 2, 3), (3, 2, 1, 0), (0, 1, 3, 4), (4, 0, 1, 2), (0, 2, 4, 5)])
def test_layers_that_lie_anywhere(places: tuple[int, ...]) -> None:
    spec = KVSpec.gqa(num_layers=4, num_kv_heads=2, head_dim=4, dtype="float32")
    memory = torch.randn(6, *SIZES.values())
    scattered = gathered(view_tensors(spec, [memory[place] for place in places], tuple(SIZES)))
    together = gathered(view_tensors(spec, list(memory[list(places)].clone()), tuple(SIZES)))
    assert torch.equal(scattered, together)


def test_mla_keeps_its_planes_in_one_row() -> None:
    layers = [torch.randn(5, 3, 8).to(torch.bfloat16) for _ in range(2)]
    view = view_tensors(MLA, layers, ("block", "token", "dim"))
    apart = [(layer[:, :, :6].contiguous(), layer[:, :, 6:].contiguous()) for layer in layers]
    assert torch.equal(gathered(view), gathered(view_tensors(MLA, apart, ("block", "token", "dim"))))
    staged = gathered(view)
    for layer in layers:
        layer.zero_()
    scatter(plan_spans(view, whole_shard(MLA), SPANS), view.layers, staged)
    assert torch.equal(gathered(view), staged)
    assert not layers[0][1].any()


def test_one_byte_types_may_be_held_as_bytes() -> None:
    spec = KVSpec.gqa(num_layers=1, num_kv_heads=2, head_dim=4, dtype="fp8_e4m3")
    view = view_tensors(spec, [torch.zeros(2, 5, 3, 2, 4, dtype=torch.uint8)], tuple(SIZES))
    assert gathered(view).numel() == 8 * spec.token_bytes


@pytest.mark.parametrize("layout", ["layer-first", "page-first"])
@pytest.mark.parametrize("spec", [GQA, MLA], ids=["gqa", "mla"])
def test_the_engine_cache_is_the_same_by_its_description_and_by_its_tensors(spec: KVSpec, layout: str) -> None:
    cache = create_kv_cache(spec, topology=Topology(), tp_rank=0, num_pages=5, page_size=3, layout=layout)
    cache.data.random_(0, 256)
    described = view_description(spec, cache.view, cache.data)
    by_tensors = view_tensors(spec, [cache.planes(i) for i in range(2)], ("block", "token", "head", "dim"))
    assert described.num_blocks == 5  # the dummy page is nobody's
    assert described.planes == by_tensors.planes
    assert torch.equal(gathered(described), gathered(by_tensors))


def test_some_layers_and_heads() -> None:
    tensors = [torch.randn(2, 5, 3, 1, 4)]
    view = view_tensors(GQA, tensors, tuple(SIZES), layers=range(1, 2), heads=range(1, 2))
    shard = Topology(tp=2, pp=2).shard(GQA, tp_rank=1, pp_rank=1)
    out = [np.zeros(shard.local_shape(GQA, 0, 4), np.uint8)]
    gather(plan_spans(view, shard, SPANS[:1]), range(1, 2), out)
    assert out[0].tobytes()[:16] == tensors[0][0, 4, 0, 0].numpy().tobytes()


@pytest.mark.parametrize(
    ("tensors", "axes", "message"),
    [
        ([torch.zeros(2, 5, 3, 2, 4)], tuple(SIZES), "1 tensors were given for 2 layers"),
        ([torch.zeros(2, 5, 3, 2, 4).half()] * 2, tuple(SIZES), "the spec says float32"),
        ([torch.zeros(2, 5, 3, 3, 4)] * 2, tuple(SIZES), "3 heads of width 4; expected 2 of 4"),
        ([torch.zeros(3, 5, 3, 2, 4)] * 2, tuple(SIZES), "3 planes were given"),
        ([torch.zeros(5, 3, 2, 4)] * 2, tuple(SIZES), "planes were given"),
        ([torch.zeros(5, 3, 2, 9)] * 2, ("block", "token", "head", "dim"), "one after another"),
        ([torch.zeros(2, 5, 3, 2, 4), torch.zeros(2, 6, 3, 2, 4)], tuple(SIZES), "the same"),
        ([torch.zeros(2, 5, 3, 2, 4)] * 2, ("plane", "block", "token", "dim", "dim"), "axes are"),
        ([torch.zeros(2, 5, 3, 2, 4)] * 2, ("plane", "page", "token", "head", "dim"), "axes are"),
        ([torch.zeros(2, 5, 3, 1, 4).expand(2, 5, 3, 2, 4)] * 2, tuple(SIZES), "overlap"),
    ],
)
def test_tensors_that_are_not_this_cache(tensors: list[torch.Tensor], axes: tuple[str, ...], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        view_tensors(GQA, tensors, axes)


def test_layers_and_heads_that_the_model_does_not_have() -> None:
    tensors = [torch.zeros(2, 5, 3, 2, 4)] * 2
    for held in ({"layers": range(1, 3)}, {"heads": range(1, 3)}, {"layers": range(0)}, {"heads": range(0, 2, 2)}):
        with pytest.raises(InvalidArgumentError, match="were given; expected"):
            view_tensors(GQA, tensors, tuple(SIZES), **held)


def test_descriptions_that_do_not_fit() -> None:
    cache = create_kv_cache(GQA, topology=Topology(), tp_rank=0, num_pages=5, page_size=3, layout="page-first")
    with pytest.raises(InvalidArgumentError, match="beyond an allocation"):
        view_description(GQA, cache.view, cache.data[:-1])
    with pytest.raises(InvalidArgumentError, match="contiguous bytes"):
        view_description(GQA, cache.view, cache.data.view(torch.int8))
    other = KVSpec.gqa(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32")
    with pytest.raises(InvalidArgumentError, match="is described as"):
        view_description(other, cache.view, cache.data)


def test_addresses_by_hand() -> None:
    strides = Axes(block=96, token=32, head=16, dim=4)
    good = PlaneView(4096, strides)

    def build(plane: PlaneView, layers: int = 2, blocks: int = 5) -> PagedView:
        return PagedView(GQA, range(2), range(2), 3, blocks, ((plane, good),) * layers, torch.device("cpu"))

    assert build(good).pages.alignment == 16
    for plane, message in (
        (PlaneView(4096, strides, packing="vnni"), "packing 'vnni'"),
        (PlaneView(0, strides), "address 0"),
        (PlaneView(4096, strides._replace(head=8)), "overlap"),
        (PlaneView(4096, strides._replace(block=64)), "overlap"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            build(plane)
    with pytest.raises(InvalidArgumentError, match="expected 2 in each of 2 layers"):
        build(good, layers=1)
    with pytest.raises(InvalidArgumentError, match="at least one"):
        build(good, blocks=0)
