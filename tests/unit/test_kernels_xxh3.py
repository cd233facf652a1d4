"""Checksums of tiles on the CPU: the C library's, over any strides."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import InvalidArgumentError
from headwater.kernels.xxh3 import signed, unsigned, verify_tiles, xxh3_tiles
from headwater.kv.format import checksum

from transfer_cases import check_checksums


@given(seed=st.integers(0, 2**31))
def test_equals_the_library(seed: int) -> None:
    check_checksums(random.Random(seed), "cpu", xxh3_tiles)


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_unsigned_and_signed_are_inverse(sums: list[int]) -> None:
    assert unsigned(signed(sums)) == sums


def test_one_tile_without_leading_axes() -> None:
    tile = torch.arange(100, dtype=torch.uint8)
    assert unsigned(xxh3_tiles(tile)) == [checksum(bytes(range(100)))]


def test_result_into_a_strided_slice() -> None:
    tiles = torch.randint(0, 256, (3, 2, 300), dtype=torch.uint8)
    sums = torch.zeros((3, 4), dtype=torch.int64)
    xxh3_tiles(tiles, sums[:, 1:3])
    assert unsigned(sums[:, 1:3]) == [checksum(bytes(tile.tolist())) for tile in tiles.view(6, 300)]
    assert not sums[:, 0].any()
    assert not sums[:, 3].any()


def test_verify_names_the_damaged_tile() -> None:
    tiles = torch.randint(0, 256, (2, 3, 300), dtype=torch.uint8)
    sums = xxh3_tiles(tiles)
    tiles[1, 2, 299] ^= 128
    assert verify_tiles(tiles, sums).tolist() == [[True] * 3, [True, True, False]]


def test_arguments_that_do_not_fit() -> None:
    tiles = torch.zeros((2, 8), dtype=torch.uint8)
    for call in (
        lambda: xxh3_tiles(tiles.to(torch.int8)),
        lambda: xxh3_tiles(tiles[:, ::2]),
        lambda: xxh3_tiles(tiles.view(1, 1, 1, 2, 8)),
        lambda: xxh3_tiles(tiles, torch.zeros(3, dtype=torch.int64)),
        lambda: xxh3_tiles(tiles, torch.zeros(2)),
        lambda: verify_tiles(tiles, torch.zeros(1, dtype=torch.int64)),
    ):
        with pytest.raises(InvalidArgumentError, match="expected"):
            call()
