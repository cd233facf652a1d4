"""Strided copies: what the driver would be asked to do, replayed byte by byte, equals a plain copy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import BufferMismatchError
from headwater.transfer.copy import Copy, copy_pieces, copy_tiles, plan_copies


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


@given(st.data())
def test_the_planned_copies_move_exactly_the_pieces(data: st.DataObject) -> None:
    chunks, layers, heads, size = (data.draw(st.integers(1, 4)) for _ in range(4))
    flat = [np.random.default_rng(i).integers(0, 256, 4 * (5 * 6 * 7 + 3), dtype=np.uint8) for i in range(2)]
    sides = []
    for memory in flat:
        extents = memory[: 4 * 5 * 6 * 7].reshape(4, 5, 6, 7)[:, :, :, :size]
        dense = memory[: 4 * 5 * 6 * size].reshape(4, 5, 6, size)
        apart = memory.reshape(4, -1)[:, : 5 * 6 * size].reshape(4, 5, 6, size)  # at no multiple of a row
        assert np.shares_memory(apart, memory)
        whole = data.draw(st.sampled_from((dense, extents, apart)))
        first_layer, first_head = data.draw(st.integers(0, 5 - layers)), data.draw(st.integers(0, 6 - heads))
        order = data.draw(st.permutations(range(4)))[:chunks] if data.draw(st.booleans()) else range(chunks)
        part = whole[:, first_layer : first_layer + layers, first_head : first_head + heads]
        sides.append([part[chunk] for chunk in order])
    try:
        copies = list(plan_copies(*sides))
    except BufferMismatchError:
        assert layers > 1  # heads that do not touch, in layers that are apart: no rows at one pitch
        assert heads > 1
        return
    image = flat[0].copy()
    want = flat[0]
    for target, source in zip(*sides, strict=True):
        np.copyto(target, source)
    shifted = [copy._replace(target=copy.target - flat[0].ctypes.data + image.ctypes.data) for copy in copies]
    replay(shifted, image, flat[1])
    assert np.array_equal(image, want)


def test_evenly_spaced_pieces_are_one_copy() -> None:
    extents = np.zeros((6, 4, 8, 16), np.uint8)  # chunks of 4 layers, 8 heads
    ring = np.zeros((6, 4, 2, 16), np.uint8)
    copies = list(plan_copies([extents[i, :, 2:4] for i in range(6)], list(ring)))
    assert [(copy.depth, copy.rows.height, copy.rows.width) for copy in copies] == [(6, 4, 32)]
    some = [0, 1, 2, 4, 5]
    copies = list(plan_copies([extents[i, :, 2:4] for i in some], [ring[i] for i in range(5)]))
    assert [copy.depth for copy in copies] == [3, 2]
    whole = np.zeros((6, 4, 8, 16), np.uint8)
    copies = list(plan_copies(list(extents), list(whole)))
    assert [(copy.depth, copy.rows.height, copy.rows.width) for copy in copies] == [(6, 1, 512)]


def test_a_tail_is_a_copy_of_its_own() -> None:
    memory, ring = np.zeros((3, 64), np.uint8), np.zeros((3, 64), np.uint8)
    sizes = (32, 32, 16)
    sides = [[side[i, :n].reshape(2, 2, -1) for i, n in enumerate(sizes)] for side in (memory, ring)]
    assert [(copy.depth, copy.rows.width) for copy in plan_copies(*sides)] == [(2, 32), (1, 16)]


def test_on_the_cpu_it_is_a_copy() -> None:
    target, source = np.zeros((3, 4, 8), np.uint8), torch.randint(0, 256, (2, 2, 8), dtype=torch.uint8)
    copy_tiles(target[1:, 1:3], source)
    assert np.array_equal(target[1:, 1:3], source.numpy())
    assert not target[0].any()


def test_pieces_that_do_not_fit() -> None:
    tiles = np.zeros((2, 3, 8), np.uint8)
    for targets, sources in (
        ([tiles], [tiles, tiles]),
        ([tiles], [tiles[:1]]),
    ):
        with pytest.raises(BufferMismatchError):
            copy_pieces(targets, sources)
    wide = np.zeros((4, 6, 16), np.uint8)[::2, ::2, :8]
    for target in (wide, np.zeros((2, 3, 16), np.uint8)[:, :, ::2], np.zeros((2, 3, 8), np.int8)):
        with pytest.raises(BufferMismatchError):
            list(plan_copies([target], [np.zeros((2, 3, 8), np.uint8)]))
