"""Gather, scatter and checksums in Triton against the plain way, in its interpreter; started by test_kernels_extent.py.

Not collected by itself: TRITON_INTERPRET must be set before Triton is first imported, so it needs its own process.
"""

import random
from functools import partial

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.kernels.extent_triton import CopyConfig, move_rows_triton
from headwater.kernels.pack_check import Coding, agrees
from headwater.kernels.pack_triton import PackConfig, UnpackConfig, packed_fits_triton
from headwater.kernels.post_triton import post_triton
from headwater.kernels.touch_triton import STEP_BYTES, touch_rows_triton
from headwater.kernels.xxh3 import unsigned
from headwater.kernels.xxh3_triton import HashConfig, finish_tiles_triton, xxh3_tiles_triton

from pack_cases import check_hostile, check_pack, check_unpack, every_pattern, full_of_escapes
from transfer_cases import SPECS, check_checksums, check_gather, check_scatter, check_sums

torch.set_num_threads(1)

CONFIGS = [CopyConfig(64, 1), CopyConfig(256, 2), CopyConfig(4096, 4)]
# Lengths at which XXH3 changes its ways, and around the ends of stripes and blocks.
LENGTHS = [0, 1, 2, 3, 4, 8, 9, 16, 17, 32, 33, 64, 65, 96, 97, 128, 129, 143, 144, 240]
LENGTHS += [241, 256, 257, 320, 321, 1023, 1024, 1025, 1088, 1089, 2048, 2049, 17 * 1024 + 1, 17 * 1024 + 8]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.tile_bytes}x{config.heads}")
@settings(max_examples=5)
@given(seed=st.integers(0, 2**31))
def test_moves(config, seed):
    move_rows = partial(move_rows_triton, config=config)
    check_gather(random.Random(seed), "cpu", move_rows)
    check_scatter(random.Random(seed + 1), "cpu", move_rows)


@settings(max_examples=3)
@given(seed=st.integers(0, 2**31))
def test_heads_that_do_not_fill_a_tile(seed):
    move_rows = partial(move_rows_triton, config=CopyConfig(256, 4))
    check_gather(random.Random(seed), "cpu", move_rows, SPECS[2])  # three heads
    check_scatter(random.Random(seed), "cpu", move_rows, SPECS[2])


PACKINGS = [(PackConfig(), UnpackConfig()), (PackConfig(8), UnpackConfig(8, steps=2, programs=1))]


def test_the_check_at_the_start_passes():
    gather, scatter = (partial(move_rows_triton, scatter=way) for way in (False, True))
    assert agrees(torch.device("cpu"), Coding(gather, scatter, packed_fits_triton))


@pytest.mark.parametrize(("pack", "unpack"), PACKINGS, ids=["held", "in steps"])
@settings(max_examples=8)
@given(seed=st.integers(0, 2**31))
def test_packed_moves(pack, unpack, seed):
    check_pack(random.Random(seed), "cpu", partial(move_rows_triton, packing=pack), fits=packed_fits_triton)
    check_unpack(random.Random(seed + 1), "cpu", partial(move_rows_triton, packing=unpack))


@pytest.mark.parametrize("unpack", [unpack for _, unpack in PACKINGS], ids=["at once", "in parts"])
@settings(max_examples=8)
@given(seed=st.integers(0, 2**31))
def test_hostile_tiles(unpack, seed):
    check_hostile(random.Random(seed), "cpu", partial(move_rows_triton, packing=unpack), packed_fits_triton)


@pytest.mark.parametrize(("pack", "unpack"), PACKINGS, ids=["held", "in steps"])
def test_every_value(pack, unpack):
    rng = random.Random(0)
    assert check_pack(rng, "cpu", partial(move_rows_triton, packing=pack), every_pattern(rng, "cpu")) == 1
    check_unpack(rng, "cpu", partial(move_rows_triton, packing=unpack), every_pattern(rng, "cpu"))


@pytest.mark.parametrize(("pack", "unpack"), PACKINGS, ids=["held", "in steps"])
def test_as_many_escapes_as_there_is_room_for(pack, unpack):
    rng = random.Random(0)
    for more, fitting in ((0, 1), (1, 0)):
        case = full_of_escapes(rng, "cpu", more)
        move_rows = partial(move_rows_triton, packing=pack)
        assert check_pack(rng, "cpu", move_rows, case, fits=packed_fits_triton) == fitting
    check_unpack(rng, "cpu", partial(move_rows_triton, packing=unpack), full_of_escapes(rng, "cpu"))


@settings(max_examples=10)
@given(seed=st.integers(0, 2**31), blocks=st.sampled_from((1, 4)), tiles=st.sampled_from((1, 4)))
def test_checksums(seed, blocks, tiles):
    check_checksums(random.Random(seed), "cpu", partial(xxh3_tiles_triton, config=HashConfig(blocks, 4, tiles)))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.tile_bytes}x{config.heads}")
def test_checksums_that_a_gather_begins(config):
    move_rows = partial(move_rows_triton, config=config)
    assert sum(check_sums(random.Random(seed), "cpu", move_rows, finish_tiles_triton) for seed in range(6))


@pytest.mark.parametrize("length", LENGTHS)
def test_checksums_of_every_class(length):
    tiles = torch.randint(0, 256, (2, length), dtype=torch.uint8)
    expected = [xxhash.xxh3_64_intdigest(bytes(tile.tolist())) for tile in tiles]
    assert unsigned(xxh3_tiles_triton(tiles)) == expected


@pytest.mark.parametrize("count", [0, 1, 1024, 3000])
def test_answers(count):
    for source in (torch.randint(-(2**63), 2**63 - 1, (count,)), torch.rand(count) < 0.5):
        target = torch.zeros_like(source)
        post_triton(source, target)
        assert torch.equal(target, source)


@pytest.mark.parametrize("width", [8, STEP_BYTES, STEP_BYTES + 8])
def test_touching_reads_inside_the_rows(width, monkeypatch):
    """Words that are read: of every row its first, and one of each further step; the last piece's are left behind."""
    height, pitch = 3, 2 * STEP_BYTES
    memory = torch.zeros(4 * height * pitch // 8, dtype=torch.int64)
    for piece in range(4):
        for row in range(height):
            for step in range(-(-width // STEP_BYTES)):
                memory[(piece * height * pitch + row * pitch + step * STEP_BYTES) // 8] = 1 + 10 * row + step
    found = torch.zeros(256, dtype=torch.int32)
    monkeypatch.setattr("headwater.kernels.touch_triton._nowhere", lambda device: found)
    starts = torch.tensor([memory.data_ptr() + piece * height * pitch for piece in range(4)])
    touch_rows_triton(starts, width, height, pitch, torch.device("cpu"))
    steps = range(-(-width // STEP_BYTES))
    expected = [1 + 10 * row + step for row in range(height) for step in steps]
    assert found[: len(expected)].tolist() == expected
    assert not found[len(expected) :].any()
