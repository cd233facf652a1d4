"""Packed tiles on a real device: gathered and scattered against `kv.packing`, bit for bit."""

import random

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="Triton is not installed: its kernels are not checked here")

from functools import partial  # noqa: E402

from headwater.bench.transfer_packing import PackedCache  # noqa: E402
from headwater.kernels.extent import gather_rows, scatter_rows  # noqa: E402
from headwater.kernels.extent_triton import move_rows_triton  # noqa: E402
from headwater.kernels.pack_triton import PackConfig, UnpackConfig  # noqa: E402
from headwater.kernels.xxh3 import unsigned, xxh3_tiles, xxh3_tiles_cpu  # noqa: E402
from headwater.kv.spec import KVSpec  # noqa: E402

from pack_cases import check_hostile, check_pack, check_unpack, every_pattern, full_of_escapes, random_packed_case  # noqa: E402
from transfer_cases import ORDERS  # noqa: E402

SHAPES = [
    *(KVSpec.gqa(num_layers=2, num_kv_heads=4, head_dim=dim, dtype="bfloat16") for dim in (64, 80, 96, 128, 256)),
    KVSpec.mla(num_layers=2, latent_dim=512, rope_dim=64, dtype="bfloat16"),
    KVSpec.gqa(num_layers=1, num_kv_heads=2, head_dim=10, v_head_dim=6, dtype="bfloat16"),
]
CONFIGS = [(PackConfig(), UnpackConfig()), (PackConfig(64), UnpackConfig(16, steps=2, programs=1))]


def seeded() -> random.Random:
    return random.Random(random.randrange(2**31))


@pytest.mark.parametrize(("pack", "unpack"), CONFIGS, ids=["held", "in steps"])
@pytest.mark.parametrize("draw", range(8))
def test_moves(draw, pack, unpack):
    check_pack(seeded(), "cuda", partial(move_rows_triton, packing=pack))
    check_unpack(seeded(), "cuda", partial(move_rows_triton, packing=unpack))


@pytest.mark.parametrize("order", ORDERS[:2], ids=["NHD", "HND"])
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("spec", SHAPES, ids=lambda spec: "x".join(str(plane.width) for plane in spec.planes))
def test_chunks_of_model_size_with_tails(spec, block_size, order):
    for check in (check_pack, check_unpack):
        rng = seeded()
        rows = [256, 256, rng.randint(3, 255)]
        case = random_packed_case(rng, "cuda", spec, num_rows=rows, order=order, block_size=block_size)
        check(rng, "cuda", move_rows_triton, case)


def test_a_span_too_long_to_be_held():
    rng = seeded()
    case = random_packed_case(rng, "cuda", SHAPES[3], num_rows=[1000, 3])
    check_pack(rng, "cuda", move_rows_triton, case)
    check_unpack(rng, "cuda", move_rows_triton, case)


@pytest.mark.parametrize("draw", range(8))
def test_a_hostile_tile_stays_in_its_rows(draw):
    check_hostile(seeded(), "cuda", move_rows_triton)


def test_every_value_comes_back():
    rng = seeded()
    assert check_pack(rng, "cuda", move_rows_triton, every_pattern(rng, "cuda")) == 1
    check_unpack(rng, "cuda", move_rows_triton, every_pattern(rng, "cuda"))


def test_as_many_escapes_as_there_is_room_for():
    rng = seeded()
    for more, fitting in ((0, 1), (1, 0)):
        assert check_pack(rng, "cuda", move_rows_triton, full_of_escapes(rng, "cuda", more)) == fitting
    check_unpack(rng, "cuda", move_rows_triton, full_of_escapes(rng, "cuda"))


def test_checksums_of_packed_tiles():
    spec = KVSpec.gqa(num_layers=2, num_kv_heads=8, head_dim=128, dtype="bfloat16")
    cache = PackedCache(spec, 1024, 256, 16, torch.device("cuda", 0))
    cache.check()
    gather_rows(cache.move)
    tiles = cache.staging.view(cache.num_tiles, -1)
    assert unsigned(xxh3_tiles(tiles)) == unsigned(xxh3_tiles_cpu(tiles.cpu()))


def test_addresses_beyond_two_to_the_31():
    """A cache and staging of five gigabytes; the last chunk is what the CPU packs."""
    spec = KVSpec.gqa(num_layers=40, num_kv_heads=8, head_dim=128, dtype="bfloat16")
    cache = PackedCache(spec, 32768, 256, 16, torch.device("cuda", 0))
    assert cache.packed_bytes > 2**31
    cache.check()
    gather_rows(cache.move)
    again = cache.staging.clone()
    for layer in cache.layers:
        layer.zero_()
    scatter_rows(cache.move)
    gather_rows(cache.move)
    assert torch.equal(cache.staging, again)
    assert np.count_nonzero(again[-1000:].cpu().numpy()) > 100
