"""Strided copies: what the driver would be asked to do, replayed by its own rules, moves exactly the pieces."""

from __future__ import annotations

from collections.abc import Iterable
from unittest.mock import patch

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwater.kv.topology import Shard
from headwater.transfer import extents
from headwater.transfer.copy import Copy
from headwater.transfer.extents import ExtentPiece, copy_extents

CPU = torch.device("cpu")


def asked(
    piece: ExtentPiece, stored: list[tuple[int, int]], staged: list[int], heads: int, *, to_host: bool
) -> list[Copy]:
    """What the driver would be asked to do."""
    calls = list[Copy]()

    def note(copies: Iterable[Copy], device: torch.device) -> None:
        calls.extend(copies)

    with patch.object(extents, "run_copies", note):
        copy_extents(piece, stored, staged, heads, CPU, to_host=to_host)
    return calls


def replay(copies: list[Copy], target: np.ndarray, source: np.ndarray) -> None:
    """What the copy engine does, on two flat allocations. It counts the distance of slices in whole rows."""
    for copy in copies:
        rows = copy.rows
        steps = [copy.target_step, copy.source_step]
        if rows.height > 1:
            steps[0] = copy.target_step // rows.target_pitch * rows.target_pitch
            steps[1] = copy.source_step // rows.source_pitch * rows.source_pitch
        for z in range(copy.depth):
            for y in range(rows.height):
                to = copy.target - target.ctypes.data + z * steps[0] + y * rows.target_pitch
                of = copy.source - source.ctypes.data + z * steps[1] + y * rows.source_pitch
                assert 0 <= to <= len(target) - rows.width
                assert 0 <= of <= len(source) - rows.width
                target[to : to + rows.width] = source[of : of + rows.width]


@given(st.data(), st.booleans())
def test_the_planned_copies_move_exactly_the_pieces(data: st.DataObject, to_host: bool) -> None:
    num_layers, num_heads, tile = (data.draw(st.integers(1, 5)) for _ in range(3))
    first_layer, step = data.draw(st.integers(0, num_layers - 1)), data.draw(st.integers(1, 3))
    layers = range(first_layer, data.draw(st.integers(first_layer + 1, num_layers)), step)
    first_head = data.draw(st.integers(0, num_heads - 1))
    heads = range(first_head, data.draw(st.integers(first_head + 1, num_heads)))
    extent, gap = num_layers * num_heads * tile, data.draw(st.integers(0, 3))
    places = data.draw(st.permutations(range(6)))[: data.draw(st.integers(1, 6))]
    if data.draw(st.booleans()):
        places = sorted(places)
    host = np.random.default_rng(1).integers(0, 256, 6 * (extent + gap), dtype=np.uint8)
    # Staging may hold more layers than these: `first` and `step` say which of them.
    first, stride = data.draw(st.integers(0, 2)), data.draw(st.integers(1, 2))
    rows = first + stride * len(layers)
    ring = np.random.default_rng(2).integers(0, 256, len(places) * rows * len(heads) * tile, dtype=np.uint8)
    stored = [(place // 3, host.ctypes.data + place * (extent + gap)) for place in places]
    staged = [ring.ctypes.data + number * rows * len(heads) * tile for number in range(len(places))]
    copies = asked(ExtentPiece(Shard(layers, heads), tile, first, stride), stored, staged, num_heads, to_host=to_host)
    want_host, want_ring = host.copy(), ring.copy()
    for number, place in enumerate(places):
        there = want_host[place * (extent + gap) :][:extent].reshape(num_layers, num_heads, tile)
        here = want_ring.reshape(len(places), rows, len(heads), tile)[number]
        for i, layer in enumerate(layers):
            if to_host:
                there[layer, heads.start : heads.stop] = here[first + i * stride]
            else:
                here[first + i * stride] = there[layer, heads.start : heads.stop]
    replay(copies, *((host, ring) if to_host else (ring, host)))
    assert np.array_equal(host, want_host)
    assert np.array_equal(ring, want_ring)


def test_evenly_spaced_chunks_are_one_copy() -> None:
    host, ring = np.zeros((6, 4 * 8 * 16), np.uint8), np.zeros((6, 4 * 2 * 16), np.uint8)  # 4 layers of 8 heads
    stored = [(0, host.ctypes.data + i * host.shape[1]) for i in range(6)]
    staged = [ring.ctypes.data + i * ring.shape[1] for i in range(6)]
    piece = ExtentPiece(Shard(range(4), range(2, 4)), 16)
    copies = asked(piece, stored, staged, 8, to_host=True)
    assert [(copy.depth, copy.rows.height, copy.rows.width) for copy in copies] == [(6, 4, 32)]
    some = [stored[i] for i in (0, 1, 2, 4, 5)]
    assert [copy.depth for copy in asked(piece, some, staged[:5], 8, to_host=True)] == [3, 2]
    whole = ExtentPiece(Shard(range(4), range(8)), 16)
    everything = np.zeros((6, 512), np.uint8)
    staged = [everything.ctypes.data + i * 512 for i in range(6)]
    copies = asked(whole, stored, staged, 8, to_host=True)
    assert [(copy.depth, copy.rows.height, copy.rows.width) for copy in copies] == [(6, 1, 512)]
