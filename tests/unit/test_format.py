"""The extent format: rows of a part out of a tile and back, and the checksums that prove them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from headwater.kv.format import (
    EMPTY_CHECKSUM,
    checksum,
    gather_part,
    part_checksums,
    part_rows,
    scatter_part,
)
from headwater.kv.spec import KVSpec, Plane
from headwater.kv.topology import WHOLE, Split

Bytes = npt.NDArray[np.uint8]

SPECS = [
    KVSpec.gqa(num_layers=2, num_kv_heads=3, head_dim=4, dtype="float16"),
    KVSpec.gqa(num_layers=1, num_kv_heads=1, head_dim=5, dtype="int8", v_head_dim=2),
    KVSpec.mla(num_layers=2, latent_dim=7, rope_dim=3, dtype="fp8_e4m3", rope_dtype="bfloat16"),
    KVSpec(1, 1, (Plane("a", 1, "float32"), Plane("b", 1, "int8"), Plane("c", 3, "float16"))),
]
CASES = st.tuples(
    st.sampled_from(SPECS),
    st.builds(Split, st.integers(1, 6), st.integers(1, 6)),
    st.integers(0, 300),
    st.integers(1, 24),
    st.integers(0, 2**32 - 1),
)
Case = tuple[KVSpec, Split, int, int, int]


def random_tile(spec: KVSpec, num_tokens: int, seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, spec.tile_bytes(num_tokens), np.uint8)


def naive_part(spec: KVSpec, split: Split, part: int, first: int, num_tokens: int, tile: Bytes) -> bytes:
    """Row by row from the definition: plane after plane, tokens ascending, those of this part only."""
    out, start = b"", 0
    for plane in spec.planes:
        for row in range(num_tokens):
            if ((first + row) // split.interleave) % split.parts == part:
                at = start + row * plane.row_bytes
                out += tile[at : at + plane.row_bytes].tobytes()
        start += num_tokens * plane.row_bytes
    return out


# ---- checksums --------------------------------------------------------------------------------------------------
def test_checksum_is_xxh3_64_with_seed_zero() -> None:
    """Known values of the reference library."""
    assert checksum(b"") == EMPTY_CHECKSUM == 0x2D06800538D394C2
    assert checksum(b"headwater") == xxhash.xxh3_64_intdigest(b"headwater", seed=0)
    assert checksum(b"headwater") != xxhash.xxh3_64_intdigest(b"headwater", seed=1)
    assert checksum(np.arange(1000, dtype=np.uint8)) == checksum(bytes(i % 256 for i in range(1000)))


@given(CASES)
def test_part_checksums_are_those_of_a_loop_over_rows(case: Case) -> None:
    spec, split, first, num_tokens, seed = case
    tile = random_tile(spec, num_tokens, seed)
    parts = [naive_part(spec, split, part, first, num_tokens, tile) for part in range(split.parts)]
    assert part_checksums(spec, split, first, num_tokens, tile) == [checksum(part) for part in parts]


@given(CASES)
def test_a_tile_in_one_piece_has_the_checksum_of_its_bytes(case: Case) -> None:
    spec, _, first, num_tokens, seed = case
    tile = random_tile(spec, num_tokens, seed)
    assert part_checksums(spec, WHOLE, first, num_tokens, tile) == [checksum(tile.tobytes())]


@given(CASES, st.data())
def test_one_wrong_byte_is_noticed_by_exactly_the_part_that_holds_it(case: Case, data: st.DataObject) -> None:
    spec, split, first, num_tokens, seed = case
    tile = random_tile(spec, num_tokens, seed)
    damaged = tile.copy()
    place = data.draw(st.integers(0, tile.size - 1))
    damaged[place] ^= data.draw(st.integers(1, 255))
    start = 0
    for plane in spec.planes:
        end = start + num_tokens * plane.row_bytes
        if start <= place < end:
            row = (place - start) // plane.row_bytes
        start = end
    before, after = (part_checksums(spec, split, first, num_tokens, some) for some in (tile, damaged))
    wrong = [part for part in range(split.parts) if before[part] != after[part]]
    assert wrong == [((first + row) // split.interleave) % split.parts]


# ---- rows -------------------------------------------------------------------------------------------------------
@given(CASES)
def test_part_rows_are_the_splits_own(case: Case) -> None:
    _, split, first, num_tokens, _ = case
    for part in range(split.parts):
        rows = part_rows(split, part, first, num_tokens)
        assert rows.tolist() == split.rows(part, first, num_tokens).tolist()
        assert rows.tolist() == part_rows(split, part, first + split.parts * split.interleave, num_tokens).tolist()


def test_cached_rows_cannot_be_changed_by_who_got_them() -> None:
    rows = part_rows(Split(2, 1), 0, 0, 8)
    with pytest.raises(ValueError, match="read-only"):
        rows[0] = 7


# ---- gather and scatter -----------------------------------------------------------------------------------------
@given(CASES)
def test_gather_takes_the_rows_of_a_part_plane_after_plane(case: Case) -> None:
    spec, split, first, num_tokens, seed = case
    tile = random_tile(spec, num_tokens, seed)
    for part in range(split.parts):
        rows = part_rows(split, part, first, num_tokens)
        out = np.full(len(rows) * spec.row_bytes + 3, 0xEE, np.uint8)
        gather_part(spec, tile, rows, num_tokens, out[:-3])
        assert out[:-3].tobytes() == naive_part(spec, split, part, first, num_tokens, tile)
        assert (out[-3:] == 0xEE).all()


@given(CASES)
def test_scatter_of_all_parts_is_the_inverse_of_gather(case: Case) -> None:
    spec, split, first, num_tokens, seed = case
    tile = random_tile(spec, num_tokens, seed)
    again = np.full_like(tile, 0xEE)
    for part in range(split.parts):
        rows = part_rows(split, part, first, num_tokens)
        buffer = np.empty(len(rows) * spec.row_bytes, np.uint8)
        gather_part(spec, tile, rows, num_tokens, buffer)
        scatter_part(spec, buffer, rows, num_tokens, again)
    assert again.tobytes() == tile.tobytes()


@given(CASES, st.integers(0, 5))
def test_gather_of_what_was_scattered_is_the_part_and_other_rows_stay(case: Case, part: int) -> None:
    spec, split, first, num_tokens, seed = case
    part %= split.parts
    rows = part_rows(split, part, first, num_tokens)
    tile = random_tile(spec, num_tokens, seed)
    before = tile.copy()
    new = np.random.default_rng(seed + 1).integers(0, 256, len(rows) * spec.row_bytes, np.uint8)
    scatter_part(spec, new, rows, num_tokens, tile)
    back = np.empty_like(new)
    gather_part(spec, tile, rows, num_tokens, back)
    assert back.tobytes() == new.tobytes()
    for other in set(range(split.parts)) - {part}:
        args = (spec, split, other, first, num_tokens)
        assert naive_part(*args, tile) == naive_part(*args, before)


def test_a_part_without_rows_moves_nothing() -> None:
    spec: Any = SPECS[0]
    rows = part_rows(Split(4, 8), 3, 0, 8)
    assert len(rows) == 0
    tile, empty = random_tile(spec, 8, 0), np.empty(0, np.uint8)
    before = tile.copy()
    gather_part(spec, tile, rows, 8, empty)
    scatter_part(spec, empty, rows, 8, tile)
    assert tile.tobytes() == before.tobytes()
    assert part_checksums(spec, Split(4, 8), 0, 8, tile)[1:] == [EMPTY_CHECKSUM] * 3
