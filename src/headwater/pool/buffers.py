"""Callers' memory, whatever it is, as the (layers, heads, bytes) arrays that stores copy from and into."""

from __future__ import annotations

import ctypes
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from headwater.errors import BufferMismatchError
from headwater.stores.base import Tiles

_UINT8 = np.dtype(np.uint8)


@dataclass(frozen=True)
class RawBuffer:
    """Memory by address, for callers without arrays: tile (l, h) lies at `address + l*layer_stride + h*head_stride`.

    Strides default to tiles lying one after another. The address is not checked, and a wrong one crashes the process.
    """

    address: int
    _: KW_ONLY
    layer_stride: int | None = None
    head_stride: int | None = None


Buffer = np.ndarray[Any, Any] | bytearray | memoryview | RawBuffer


def as_tiles(buffer: Buffer, shape: tuple[int, int, int], *, writable: bool) -> Tiles:
    """View `buffer` as tiles of that shape, without copying. Raises BufferMismatchError saying what is expected.

    An array is taken if its first two axes are layers and heads and each tile is contiguous, or if it is
    contiguous as a whole and has the right number of bytes.
    """
    if isinstance(buffer, np.ndarray):
        if buffer.shape == shape and buffer.dtype is _UINT8 and buffer.strides[2] == 1:
            tiles = buffer
        else:
            tiles = _array_as_tiles(buffer, shape)
    elif isinstance(buffer, RawBuffer):
        tiles = _raw_as_tiles(buffer, shape)
    else:
        try:
            flat = np.frombuffer(buffer, np.uint8)
        except (TypeError, ValueError, BufferError) as error:
            raise BufferMismatchError(f"cannot use {type(buffer).__name__} as a buffer: {error}") from error
        tiles = _array_as_tiles(flat, shape)
    if writable and not tiles.flags.writeable:
        raise BufferMismatchError("the buffer to read into is read-only")
    return tiles


def _array_as_tiles(array: np.ndarray[Any, Any], shape: tuple[int, int, int]) -> Tiles:
    layers, heads, size = shape
    if array.dtype.hasobject:
        raise BufferMismatchError(f"an array of {array.dtype} cannot hold KV")
    if array.nbytes != layers * heads * size:
        raise BufferMismatchError(
            f"a buffer of {array.nbytes} bytes was given for {layers} layers × {heads} heads × {size} bytes a tile "
            f"= {layers * heads * size} bytes"
        )
    if array.flags.c_contiguous:
        return array.reshape(-1).view(np.uint8).reshape(shape)
    if array.ndim >= 3 and array.shape[:2] == (layers, heads) and array[0, 0].flags.c_contiguous:
        inner = array[0, 0].reshape(-1).view(np.uint8)
        return as_strided(inner, shape, (array.strides[0], array.strides[1], 1), writeable=array.flags.writeable)
    raise BufferMismatchError(
        f"an array of shape {array.shape} and strides {array.strides} was given; expected (layers, heads, …) "
        "with each tile contiguous"
    )


def _raw_as_tiles(raw: RawBuffer, shape: tuple[int, int, int]) -> Tiles:
    layers, heads, size = shape
    head_stride = size if raw.head_stride is None else raw.head_stride
    layer_stride = heads * head_stride if raw.layer_stride is None else raw.layer_stride
    heads_span, layers_span = (heads - 1) * head_stride + size, (layers - 1) * layer_stride + size
    apart = (heads == 1 or head_stride >= size) and (layers == 1 or layer_stride >= heads_span)
    apart = apart or (head_stride >= layers_span and (layers == 1 or layer_stride >= size))
    if raw.address <= 0 or head_stride < 0 or layer_stride < 0 or not apart:
        raise BufferMismatchError(
            f"a raw buffer needs an address and strides that keep {layers} × {heads} tiles of {size} bytes apart, "
            f"got address {raw.address:#x}, layer_stride {layer_stride}, head_stride {head_stride}"
        )
    span = (layers - 1) * layer_stride + (heads - 1) * head_stride + size
    flat = np.frombuffer((ctypes.c_uint8 * span).from_address(raw.address), np.uint8)
    return as_strided(flat, shape, (layer_stride, head_stride, 1))
