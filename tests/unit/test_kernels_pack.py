"""Packed tiles through gather and scatter on the CPU: equal to `kv.packing` bit for bit, and bounded."""

from __future__ import annotations

import random

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="kernels need torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from headwater.errors import InvalidArgumentError  # noqa: E402
from headwater.kernels.extent import Compact, Spans, adds_up  # noqa: E402
from headwater.kernels.extent_cpu import SpanWriter, move_rows_cpu  # noqa: E402
from headwater.kernels.pack import packed_bytes, packed_fits  # noqa: E402
from headwater.kv.packing import packed_tile_bytes  # noqa: E402

from pack_cases import (  # noqa: E402
    PACKED_SPECS,
    check_hostile,
    check_pack,
    check_unpack,
    every_pattern,
    random_packed_case,
)

SEEDS = st.integers(0, 2**32)


@given(seed=SEEDS)
def test_a_gather_packs(seed: int) -> None:
    check_pack(random.Random(seed), "cpu", move_rows_cpu)


@given(seed=SEEDS)
def test_a_scatter_unpacks_and_writes_nothing_else(seed: int) -> None:
    check_unpack(random.Random(seed), "cpu", move_rows_cpu)


@given(seed=SEEDS)
def test_a_hostile_tile_stays_in_its_rows(seed: int) -> None:
    check_hostile(random.Random(seed), "cpu", move_rows_cpu)


def test_every_value_comes_back() -> None:
    rng = random.Random(1)
    assert check_pack(rng, "cpu", move_rows_cpu, every_pattern(rng, "cpu")) == 1
    check_unpack(rng, "cpu", move_rows_cpu, every_pattern(rng, "cpu"))


@given(seed=SEEDS)
def test_a_writer_unpacks_what_a_scatter_does(seed: int) -> None:
    rng = random.Random(seed)
    case = random_packed_case(rng, "cpu")
    total = int(case.spans.tile_bytes(case.spec.row_bytes).sum()) * len(case.layers) * len(case.heads)
    flat = torch.zeros(total, dtype=torch.uint8)
    staged = Compact(flat.data_ptr(), len(case.layers))
    move_rows_cpu(case.move(staged), scatter=False)
    before = torch.randint(0, 256, case.data.shape, dtype=torch.uint8)
    case.data.copy_(before)
    move_rows_cpu(case.move(staged), scatter=True)
    expected = case.data.clone()
    case.data.copy_(before)
    writer, start = SpanWriter(case.view.pages, case.spans, case.layers), 0
    for span in range(len(case.raw)):
        shape = (len(case.layers), len(case.heads), case.stored_bytes(span))
        size = int(np.prod(shape))
        tiles = flat[start : start + size].numpy().reshape(shape)
        start += size
        for i, layer in enumerate(case.layers):
            for j, head in enumerate(case.heads):
                writer.write(span, range(layer, layer + 1), range(head, head + 1), tiles[i : i + 1, j : j + 1])
    assert torch.equal(case.data, expected)


@pytest.mark.parametrize("spec", PACKED_SPECS, ids=lambda spec: "x".join(str(plane.width) for plane in spec.planes))
def test_kernels_and_records_agree_on_sizes(spec) -> None:
    widths = tuple(plane.width for plane in spec.planes)
    for rows in (1, 3, 17, 256):
        assert packed_bytes(widths, rows) == packed_tile_bytes(spec, rows)


def test_sums_are_left_for_raw_spans_only() -> None:
    case = random_packed_case(random.Random(2), "cpu", PACKED_SPECS[2], num_rows=[64, 64], order=None)
    packed = packed_bytes(case.view.pages.widths, 64)
    numbers = np.array([64, 64], np.int64)
    spans = Spans(case.spans.blocks, numbers, numbers, numbers, np.array([packed, 0], np.int64))
    pages = random_packed_case(
        random.Random(2), "cpu", PACKED_SPECS[2], order=("layer", "plane", "page", "token", "head", "dim")
    ).view.pages
    assert pages.adds_up
    assert [adds_up(pages, spans, span, 0) for span in (0, 1)] == [False, True]
    assert not adds_up(pages, spans, 1, packed)  # not where a KiB begins


def test_sizes_that_cannot_be_are_refused() -> None:
    case = random_packed_case(random.Random(3), "cpu", PACKED_SPECS[0], num_rows=[20])
    room = torch.zeros(1 << 20, dtype=torch.uint8)
    for sizes in ([case.stored_bytes(0) - 16], [case.stored_bytes(0), 0]):
        spans = case.spans
        case.spans = Spans(spans.blocks, spans.first_block, spans.offset, spans.num_rows, np.array(sizes, np.int64))
        with pytest.raises(InvalidArgumentError, match="packed"):
            move_rows_cpu(case.move(Compact(room.data_ptr(), len(case.layers))), scatter=False)
    with pytest.raises(InvalidArgumentError, match="uint8 tiles of"):
        packed_fits(torch.zeros(2, 100, dtype=torch.uint8), (16, 16), 20)
