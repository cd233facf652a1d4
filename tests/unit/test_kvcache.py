"""The paged cache: what is written is read back, nothing overlaps, and the description addresses the same bytes."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwater.engine.config import LAYOUTS as CONFIG_LAYOUTS
from headwater.engine.kvcache import LAYOUTS, create_kv_cache, kv_page_bytes
from headwater.engine.kvcache.layout import PLANE_ALIGNMENT, arrange
from headwater.engine.kvcache.paged import TORCH_DTYPES, PagedKVCache
from headwater.errors import EngineConfigError, MemoryBudgetError, TopologyError
from headwater.kernels.store import store_kv
from headwater.kv.spec import DTYPE_BYTES, KVSpec, Plane
from headwater.kv.topology import Topology

SPECS = [
    KVSpec.gqa(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32"),
    KVSpec.gqa(num_layers=3, num_kv_heads=4, head_dim=6, v_head_dim=5, dtype="bfloat16"),
    KVSpec.mla(num_layers=2, latent_dim=512, rope_dim=64, dtype="bfloat16", rope_dtype="float32"),
    KVSpec.mla(num_layers=1, latent_dim=3, rope_dim=1, dtype="fp8_e4m3", rope_dtype="float32"),
    KVSpec(2, 2, (Plane("a", 1, "int8"), Plane("b", 3, "float32"), Plane("c", 5, "float16"))),
]
SMALL_PLANES = st.lists(st.tuples(st.integers(1, 5), st.sampled_from(sorted(DTYPE_BYTES))), min_size=1, max_size=3)
ORDERS = [(*order, "dim") for order in itertools.permutations(("layer", "plane", "page", "token", "head"))]


def cache_of(spec: KVSpec, *, num_pages: int = 3, page_size: int = 2, layout: str, tp: int = 1) -> PagedKVCache:
    return create_kv_cache(
        spec, topology=Topology(tp=tp), tp_rank=0, num_pages=num_pages, page_size=page_size, layout=layout
    )


def addressed(cache: PagedKVCache) -> list[int]:
    """Every byte address that the descriptions name, element by element."""
    found: list[int] = []
    for view in itertools.chain.from_iterable(cache.views):
        index = torch.tensor(view.offset_bytes)
        for size, stride in zip(view.shape, view.strides_bytes, strict=True):
            index = index.unsqueeze(-1) + torch.arange(size) * stride
        found += (index.reshape(-1, 1) + torch.arange(view.element_bytes)).flatten().tolist()
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_no_two_elements_share_a_byte_and_all_lie_inside(spec: KVSpec, layout: str) -> None:
    cache = cache_of(spec, layout=layout)
    found = addressed(cache)
    assert len(set(found)) == len(found) == (cache.num_pages + 1) * cache.page_size * spec.token_bytes
    assert min(found) >= 0
    assert max(found) < cache.view.total_bytes == cache.data.numel()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_row_holds_its_own_number(spec: KVSpec, layout: str) -> None:
    cache = cache_of(spec, layout=layout)
    rows = [
        (plane, row)
        for layer in range(spec.num_layers)
        for plane in cache.planes(layer)
        for row in itertools.product(*map(range, plane.shape[:3]))
    ]
    # As bytes, so that every type holds every number.
    assert len(rows) < 256
    for number, (plane, row) in enumerate(rows, start=1):
        assert not plane[row].view(torch.uint8).any()
        plane[row].view(torch.uint8).fill_(number)
    for number, (plane, row) in enumerate(rows, start=1):
        assert plane[row].view(torch.uint8).eq(number).all()


@given(
    order=st.sampled_from(ORDERS),
    planes=SMALL_PLANES,
    layers=st.integers(1, 3),
    heads=st.integers(1, 3),
    num_pages=st.integers(1, 3),
    page_size=st.integers(1, 3),
)
def test_any_order_of_axes_gives_a_layout(
    order: tuple[str, ...], planes: list[tuple[int, str]], layers: int, heads: int, num_pages: int, page_size: int
) -> None:
    spec = KVSpec(layers, heads, tuple(Plane(f"p{i}", width, dtype) for i, (width, dtype) in enumerate(planes)))
    shard = Topology().shard(spec)
    view = arrange(spec, shard, num_pages, page_size, order)
    # Where heads or tokens lie outside the planes, their steps must suit every plane's type; padding sees to it.
    cache = PagedKVCache(view, 0, torch.device("cpu"))
    found = addressed(cache)
    assert len(set(found)) == len(found) == (num_pages + 1) * page_size * spec.token_bytes
    assert max(found) < view.total_bytes
    for layer, views in enumerate(cache.views):
        for tensor, plane in zip(cache.planes(layer), views, strict=True):
            assert tensor.data_ptr() == cache.data.data_ptr() + plane.offset_bytes
            assert (tuple(tensor.shape), tensor.stride()) == (plane.shape, plane.strides)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_description_addresses_what_the_tensors_hold(spec: KVSpec, layout: str) -> None:
    cache = cache_of(spec, layout=layout)
    cache.data.copy_(torch.randint(0, 256, cache.data.shape, dtype=torch.uint8, generator=torch.manual_seed(0)))
    raw = cache.data.numpy()
    for layer, views in enumerate(cache.views):
        for tensor, view in zip(cache.planes(layer), views, strict=True):
            assert (view.layer, tensor.dtype) == (layer, TORCH_DTYPES[view.dtype])
            assert tensor.stride(-1) == 1
            assert view.offset_bytes % PLANE_ALIGNMENT == 0
            for index in itertools.product(*map(range, view.shape[:3])):
                begin = view.offset_bytes + sum(i * s for i, s in zip(index, view.strides_bytes[:3], strict=True))
                bytes_there = raw[begin : begin + view.shape.dim * view.element_bytes]
                assert tensor[index].view(torch.uint8).tolist() == bytes_there.tolist()


def test_layouts_are_what_they_say() -> None:
    spec = KVSpec.gqa(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32")
    page = 2 * 2 * 8 * 4
    by_layer = cache_of(spec, layout="layer-first").views
    assert [[view.offset_bytes for view in layer] for layer in by_layer] == [[0, 4 * page], [8 * page, 12 * page]]
    assert by_layer[0][0].strides == (page // 4, 16, 8, 1)
    by_page = cache_of(spec, layout="page-first").views
    assert [[view.offset_bytes for view in layer] for layer in by_page] == [[0, page], [2 * page, 3 * page]]
    assert by_page[0][0].strides_bytes == (4 * page, 64, 32, 4)
    assert set(LAYOUTS) == set(CONFIG_LAYOUTS)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_page_bytes_are_enough_for_every_page_and_without_padding_exact(spec: KVSpec, layout: str) -> None:
    cache = cache_of(spec, num_pages=5, layout=layout)
    assert cache.page_bytes == kv_page_bytes(spec, topology=Topology(), tp_rank=0, page_size=2)
    assert 6 * 2 * spec.token_bytes <= cache.view.total_bytes <= 6 * cache.page_bytes
    if all(2 * spec.num_kv_heads * plane.row_bytes % PLANE_ALIGNMENT == 0 for plane in spec.planes):
        assert cache.view.total_bytes == 6 * cache.page_bytes == 12 * spec.token_bytes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_kernels_store_into_every_layer_and_the_dummy_page(layout: str) -> None:
    spec = KVSpec.gqa(num_layers=2, num_kv_heads=2, head_dim=8, v_head_dim=4, dtype="float32")
    cache = cache_of(spec, layout=layout, num_pages=3, page_size=2)
    slots = torch.tensor([5, 0, cache.dummy_page * 2 + 1])
    written = []
    for layer in range(2):
        k, v = torch.randn(3, 2, 8), torch.randn(3, 2, 4)
        store_kv(k, v, *cache.planes(layer), slots)
        written.append((k, v))
    for layer, (k, v) in enumerate(written):
        for plane, rows in zip(cache.planes(layer), (k, v), strict=True):
            assert torch.equal(plane[slots // 2, slots % 2], rows)
            plane[slots // 2, slots % 2] = 0
            assert not plane.any()


def test_heads_are_divided_and_then_replicated() -> None:
    spec = KVSpec.gqa(num_layers=1, num_kv_heads=2, head_dim=4, dtype="float32")
    for tp, expected in ((1, [(0, 2)]), (2, [(0, 1), (1, 2)]), (4, [(0, 1), (0, 1), (1, 2), (1, 2)])):
        for rank, heads in enumerate(expected):
            cache = create_kv_cache(spec, topology=Topology(tp=tp), tp_rank=rank, num_pages=1, page_size=1)
            assert cache.view.heads == range(*heads)
            assert cache.planes(0)[0].shape == (2, 1, heads[1] - heads[0], 4)
            assert cache.page_bytes == (heads[1] - heads[0]) * 32
    with pytest.raises(TopologyError, match="tp=3"):
        create_kv_cache(spec, topology=Topology(tp=3), tp_rank=0, num_pages=1, page_size=1)


def test_a_large_cache_takes_no_memory_until_it_is_used() -> None:
    def resident_kib() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

    before = resident_kib()
    spec = KVSpec.gqa(num_layers=16, num_kv_heads=8, head_dim=64, dtype="float32")
    cache = cache_of(spec, layout="page-first", num_pages=511, page_size=16)
    assert cache.view.total_bytes == 1 << 29
    assert not cache.planes(3)[0][100].any()
    assert resident_kib() - before < 100 << 10
    assert cache.data.data_ptr() % 256 == 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layout": "sideways"}, "expected one of layer-first, page-first"),
        ({"num_pages": 0}, "num_pages is 0"),
        ({"num_pages": 1 << 31}, "num_pages is 2147483648"),
        ({"page_size": 0}, "page_size is 0"),
        ({"num_pages": (1 << 31) - 2, "page_size": 1 << 30}, "bytes; use fewer"),
        ({"topology": Topology(pp=2)}, "tensor parallelism only"),
        ({"topology": Topology(tp=2, dcp=2)}, "tensor parallelism only"),
    ],
)
def test_what_cannot_be_is_said(changed: dict[str, object], message: str) -> None:
    spec = KVSpec.gqa(num_layers=2, num_kv_heads=1, head_dim=4, dtype="float32")
    arguments = {"topology": Topology(), "tp_rank": 0, "num_pages": 1, "page_size": 1} | changed
    with pytest.raises(EngineConfigError, match=message):
        create_kv_cache(spec, **arguments)  # type: ignore[arg-type]


def test_no_room_says_how_much_was_wanted() -> None:
    spec = KVSpec.gqa(num_layers=64, num_kv_heads=8, head_dim=128, dtype="float32")
    with pytest.raises(MemoryBudgetError, match=r"no room for a KV cache of [0-9,]+ bytes on cpu.*--num-pages"):
        cache_of(spec, layout="layer-first", num_pages=1 << 30, page_size=64)
