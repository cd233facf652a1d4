"""Callers' memory as tiles: the same bytes in place, never a copy, and a clear word where they do not fit."""

from __future__ import annotations

import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import BufferMismatchError, InvalidArgumentError
from headwater.pool.buffers import RawBuffer, as_tiles

SHAPE = (3, 2, 8)
SIZE = 3 * 2 * 8


def check(tiles: np.ndarray[Any, Any], expected: bytes, memory: Any) -> None:
    """The view holds these bytes, and writing through it changes the caller's memory."""
    assert tiles.shape == SHAPE
    assert tiles.dtype == np.uint8
    assert tiles.strides[2] == 1
    assert tiles.tobytes() == expected
    assert np.shares_memory(tiles, np.frombuffer(memory, np.uint8) if not isinstance(memory, np.ndarray) else memory)


def counting(count: int = SIZE) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.arange(count, dtype=np.uint8)


# ---- what is taken ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "view",
    [
        lambda flat: flat,
        lambda flat: flat.reshape(SHAPE),
        lambda flat: flat.reshape(6, 8),
        lambda flat: flat.view(np.float16),
        lambda flat: flat.view(np.float32).reshape(3, 2, 2),
        lambda flat: flat.view(np.int64).reshape(3, 2, 1, 1),
        lambda flat: flat.view(np.float16).reshape(3, 2, 2, 2),
    ],
)
def test_contiguous_arrays_of_any_type_and_shape(view: Any) -> None:
    flat = counting()
    tiles = as_tiles(view(flat), SHAPE, writable=True)
    check(tiles, flat.tobytes(), flat)
    tiles[2, 1, 7] = 99
    assert flat[-1] == 99


@pytest.mark.parametrize("make", [bytearray, memoryview, lambda data: array.array("B", data)])
def test_objects_with_a_buffer(make: Any) -> None:
    memory = make(bytearray(counting().tobytes()))
    tiles = as_tiles(memory, SHAPE, writable=True)
    check(tiles, bytes(memory), memory)
    tiles[0, 0, 0] = 200
    assert memory[0] == 200


def test_a_memoryview_of_another_type() -> None:
    memory = memoryview(bytearray(counting().tobytes())).cast("Q")
    check(as_tiles(memory, SHAPE, writable=True), counting().tobytes(), memory)


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32])
def test_strided_layers_and_heads(dtype: Any) -> None:
    """A piece of a larger cache: every tile is contiguous, layers and heads lie apart."""
    width = 8 // np.dtype(dtype).itemsize
    cache = np.zeros((5, 4, width), dtype)
    cache.view(np.uint8)[...] = counting(5 * 4 * 8).reshape(5, 4, 8)
    piece = cache[1:4, ::2]
    tiles = as_tiles(piece, SHAPE, writable=True)
    check(tiles, np.ascontiguousarray(piece).tobytes(), cache)
    tiles[...] = 7
    assert (cache[1:4, ::2].view(np.uint8) == 7).all()
    assert (cache[0].view(np.uint8) == counting(32).reshape(4, 8)).all()
    assert (cache[1:4, 1::2].view(np.uint8) != 7).any()


def test_heads_before_layers_and_backwards() -> None:
    """Strides may have any order and sign: the first axis is layers, the second heads, whatever memory does."""
    memory = counting().reshape(2, 3, 8)
    check(as_tiles(memory.transpose(1, 0, 2), SHAPE, writable=True), memory.transpose(1, 0, 2).tobytes(), memory)
    flipped = counting().reshape(SHAPE)[::-1, ::-1]
    check(as_tiles(flipped, SHAPE, writable=True), flipped.tobytes(), flipped)
    typed = counting().view(np.float16).reshape(2, 3, 2, 2).transpose(1, 0, 2, 3)
    check(as_tiles(typed, SHAPE, writable=True), typed.tobytes(), typed)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 9), st.integers(0, 3), st.integers(0, 3))
def test_any_piece_of_a_larger_array(layers: int, heads: int, size: int, more_layers: int, more_heads: int) -> None:
    cache = np.random.default_rng(0).integers(0, 256, (layers + more_layers, heads + more_heads, size), np.uint8)
    piece = cache[more_layers:, more_heads:]
    tiles = as_tiles(piece, (layers, heads, size), writable=True)
    assert tiles.tobytes() == piece.tobytes()
    assert np.shares_memory(tiles, cache)


def test_memory_by_address() -> None:
    memory = counting()
    check(as_tiles(RawBuffer(memory.ctypes.data), SHAPE, writable=True), memory.tobytes(), memory)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 8), st.integers(0, 5), st.integers(0, 5), st.booleans())
def test_memory_by_address_with_strides(
    layers: int, heads: int, size: int, head_gap: int, layer_gap: int, heads_outside: bool
) -> None:
    """tile (l, h) lies at address + l × layer_stride + h × head_stride, with layers outermost or heads outermost."""
    inner = size + head_gap
    outer = inner * (layers if heads_outside else heads) + layer_gap
    layer_stride, head_stride = (inner, outer) if heads_outside else (outer, inner)
    memory = np.random.default_rng(1).integers(0, 256, 4096, np.uint8)
    tiles = as_tiles(
        RawBuffer(memory.ctypes.data + 5, layer_stride=layer_stride, head_stride=head_stride),
        (layers, heads, size),
        writable=True,
    )
    for layer in range(layers):
        for head in range(heads):
            at = 5 + layer * layer_stride + head * head_stride
            assert tiles[layer, head].tobytes() == memory[at : at + size].tobytes()
    tiles[...] = 0
    assert np.shares_memory(tiles, memory)
    assert not memory[5 : 5 + size].any()


def test_strides_of_memory_by_address_default_to_packed_tiles() -> None:
    memory = counting(200)
    assert as_tiles(RawBuffer(memory.ctypes.data), SHAPE, writable=True).strides == (16, 8, 1)
    assert as_tiles(RawBuffer(memory.ctypes.data, head_stride=10), SHAPE, writable=True).strides == (20, 10, 1)
    assert as_tiles(RawBuffer(memory.ctypes.data, layer_stride=50), SHAPE, writable=True).strides == (50, 8, 1)


@pytest.mark.parametrize("buffer", [np.empty(0, np.uint8), bytearray(), np.empty((2, 3, 0), np.float16)])
def test_a_shard_without_rows_needs_no_memory(buffer: Any) -> None:
    assert as_tiles(buffer, (2, 3, 0), writable=True).shape == (2, 3, 0)


# ---- read-only memory -------------------------------------------------------------------------------------------
def readonly() -> np.ndarray[Any, np.dtype[np.uint8]]:
    memory = counting().reshape(2, 3, 8).transpose(1, 0, 2)
    memory.flags.writeable = False
    return memory


@pytest.mark.parametrize("buffer", [counting().tobytes(), memoryview(counting().tobytes()), readonly()])
def test_read_only_memory_can_be_written_from_but_not_read_into(buffer: Any) -> None:
    tiles = as_tiles(buffer, SHAPE, writable=False)
    assert not tiles.flags.writeable
    assert tiles.shape == SHAPE
    with pytest.raises(BufferMismatchError, match="the buffer to read into is read-only"):
        as_tiles(buffer, SHAPE, writable=True)


def test_a_read_only_array_of_another_type_stays_read_only() -> None:
    typed = counting().view(np.float16).reshape(2, 3, 4).transpose(1, 0, 2)
    typed.flags.writeable = False
    assert not as_tiles(typed, SHAPE, writable=False).flags.writeable


# ---- what is refused --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("buffer", "fragment"),
    [
        (np.zeros(SIZE - 1, np.uint8), "a buffer of 47 bytes was given for 3 layers × 2 heads × 8 bytes a tile = 48"),
        (np.zeros(SIZE + 1, np.uint8), "a buffer of 49 bytes"),
        (np.zeros(0, np.uint8), "a buffer of 0 bytes"),
        (np.zeros(SIZE, np.float16), "a buffer of 96 bytes"),
        (bytearray(SIZE - 1), "a buffer of 47 bytes"),
        (np.zeros((4, 2, 8), np.uint8)[:, :, ::1], "a buffer of 64 bytes"),
        (np.empty(SIZE // 8, object), "an array of object cannot hold KV"),
        (np.zeros((3, 2, 16), np.uint8)[:, :, ::2], "with each tile contiguous"),
        (np.zeros((8, 2, 3), np.uint8).T, "expected (layers, heads, …) with each tile contiguous"),
        (np.zeros((2, 3, 16), np.uint8)[:, :, ::2], "with each tile contiguous"),
        (np.zeros((12, 8), np.uint8)[::2], "an array of shape (6, 8) and strides (16, 1) was given"),
        (memoryview(bytearray(2 * SIZE))[::2], "cannot use memoryview as a buffer"),
        ([0] * SIZE, "cannot use list as a buffer"),
        (None, "cannot use NoneType as a buffer"),
        ("x" * SIZE, "cannot use str as a buffer"),
        (RawBuffer(0), "a raw buffer needs an address"),
        (RawBuffer(-8), "a raw buffer needs an address"),
        (RawBuffer(4096, head_stride=7), "strides that keep 3 × 2 tiles of 8 bytes apart, got address 0x1000"),
        (RawBuffer(4096, layer_stride=7), "layer_stride 7, head_stride 8"),
        (RawBuffer(4096, layer_stride=-16), "layer_stride -16"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
@pytest.mark.parametrize("writable", [False, True])
def test_memory_that_does_not_fit_is_refused(buffer: Any, fragment: str, writable: bool) -> None:
    with pytest.raises(BufferMismatchError) as caught:
        as_tiles(buffer, SHAPE, writable=writable)
    assert fragment in str(caught.value)
    assert isinstance(caught.value, InvalidArgumentError)


# ---- bugs that were ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("layer_stride", "head_stride"), [(8, 8), (12, 8), (8, 12)])
def test_tiles_by_address_that_overlap_are_refused(layer_stride: int, head_stride: int) -> None:
    """Each stride was compared with one tile only: a read then said OK for tiles that later ones had overwritten."""
    memory = counting(200)
    with pytest.raises(BufferMismatchError, match="strides that keep 3 × 2 tiles of 8 bytes apart"):
        as_tiles(
            RawBuffer(memory.ctypes.data, layer_stride=layer_stride, head_stride=head_stride), SHAPE, writable=True
        )


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 20), st.integers(0, 20))
def test_tiles_by_address_never_overlap(
    layers: int, heads: int, size: int, layer_stride: int, head_stride: int
) -> None:
    memory = np.zeros(200, np.uint8)
    try:
        tiles = as_tiles(
            RawBuffer(memory.ctypes.data, layer_stride=layer_stride, head_stride=head_stride),
            (layers, heads, size),
            writable=True,
        )
    except BufferMismatchError:
        return
    for layer in range(layers):
        for head in range(heads):
            tiles[layer, head] += 1
    assert memory.max() == 1
    assert memory.sum() == layers * heads * size
