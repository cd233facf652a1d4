"""Strided copies between a device and registered host memory, by the copy engine alone.

One rank's tiles of a chunk are a strided piece of its extent: a row for each layer, whose pitch is the whole model's.
torch would copy such a piece through a temporary; the driver's own 2-D and 3-D copies do not. No kernel runs, and
nothing waits.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from headwater.errors import EngineError

_UNIFIED = 4  # CU_MEMORYTYPE_UNIFIED: the driver knows by the address where it lies
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context

_thread = threading.local()


class _Copy3D(ctypes.Structure):
    """CUDA_MEMCPY3D of the driver's interface."""

    _fields_ = [
        ("srcXInBytes", ctypes.c_size_t),
        ("srcY", ctypes.c_size_t),
        ("srcZ", ctypes.c_size_t),
        ("srcLOD", ctypes.c_size_t),
        ("srcMemoryType", ctypes.c_int),
        ("srcHost", ctypes.c_void_p),
        ("srcDevice", ctypes.c_uint64),
        ("srcArray", ctypes.c_void_p),
        ("reserved0", ctypes.c_void_p),
        ("srcPitch", ctypes.c_size_t),
        ("srcHeight", ctypes.c_size_t),
        ("dstXInBytes", ctypes.c_size_t),
        ("dstY", ctypes.c_size_t),
        ("dstZ", ctypes.c_size_t),
        ("dstLOD", ctypes.c_size_t),
        ("dstMemoryType", ctypes.c_int),
        ("dstHost", ctypes.c_void_p),
        ("dstDevice", ctypes.c_uint64),
        ("dstArray", ctypes.c_void_p),
        ("reserved1", ctypes.c_void_p),
        ("dstPitch", ctypes.c_size_t),
        ("dstHeight", ctypes.c_size_t),
        ("WidthInBytes", ctypes.c_size_t),
        ("Height", ctypes.c_size_t),
        ("Depth", ctypes.c_size_t),
    ]


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D of the driver's interface."""

    _fields_ = [
        ("srcXInBytes", ctypes.c_size_t),
        ("srcY", ctypes.c_size_t),
        ("srcMemoryType", ctypes.c_int),
        ("srcHost", ctypes.c_void_p),
        ("srcDevice", ctypes.c_uint64),
        ("srcArray", ctypes.c_void_p),
        ("srcPitch", ctypes.c_size_t),
        ("dstXInBytes", ctypes.c_size_t),
        ("dstY", ctypes.c_size_t),
        ("dstMemoryType", ctypes.c_int),
        ("dstHost", ctypes.c_void_p),
        ("dstDevice", ctypes.c_uint64),
        ("dstArray", ctypes.c_void_p),
        ("dstPitch", ctypes.c_size_t),
        ("WidthInBytes", ctypes.c_size_t),
        ("Height", ctypes.c_size_t),
    ]


class CopyRows(NamedTuple):
    """Equal rows of bytes, at one pitch on each side."""

    width: int
    height: int
    target_pitch: int
    source_pitch: int


class Copy(NamedTuple):
    """One call of the driver: `depth` times the rows, at one distance on each side."""

    target: int
    source: int
    rows: CopyRows
    depth: int = 1
    target_step: int = 0
    source_step: int = 0


def run_copies(copies: Iterable[Copy], device: torch.device) -> None:
    """Carry copies out on the current stream of a device, without waiting; on a CPU at once. Addresses are trusted."""
    if device.type == "cpu":
        for copy in copies:
            _replay(copy)
        return
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device)
        if not getattr(_thread, "entered", False):
            # The driver, unlike the runtime, does not make a context current in a thread that has used none.
            stream.query()
            _thread.entered = True
        for copy in copies:
            _issue(copy, stream.cuda_stream)


def register_host(memory: npt.NDArray[np.uint8]) -> None:
    """Pin memory that exists (a segment of a mapped store), so that the device can copy from and into it.

    Takes 0.05 s a gigabyte if its pages have been touched. Raises EngineError where the driver refuses.
    """
    address = memory.__array_interface__["data"][0]
    result = int(torch.cuda.cudart().cudaHostRegister(address, memory.nbytes, _PORTABLE))
    if result:
        raise EngineError(
            f"cudaHostRegister refused {memory.nbytes:,} bytes at {address:#x} with error {result}; "
            "check `ulimit -l` and that the memory is not registered already"
        )


def unregister_host(memory: npt.NDArray[np.uint8]) -> None:
    """The inverse of `register_host`. No copy may be under way."""
    torch.cuda.cudart().cudaHostUnregister(memory.__array_interface__["data"][0])


def join_copies(pieces: Iterable[Copy]) -> Iterator[Copy]:
    """The same in fewer calls: pieces that follow each other evenly on both sides become one."""
    last: Copy | None = None
    for piece in pieces:
        joined = _join(last, piece) if last is not None else None
        if joined is None and last is not None:
            yield last
        last = joined or piece
    if last is not None:
        yield last


def _join(last: Copy, piece: Copy) -> Copy | None:
    """Both in one call, where the piece goes on at the distance of those before it."""
    rows = last.rows
    if piece.rows != rows or piece.depth > 1:
        return None
    target_step, source_step = (
        (last.target_step, last.source_step)
        if last.depth > 1
        else (piece.target - last.target, piece.source - last.source)
    )
    if piece.target - last.target != last.depth * target_step or piece.source - last.source != last.depth * source_step:
        return None
    both = Copy(last.target, last.source, rows, last.depth + 1, target_step, source_step)
    return both if fits_driver(both) else None


def fits_driver(copy: Copy) -> bool:
    """Whether the driver can do that in one call: it counts distances in rows, and pieces must not overlap."""
    rows = copy.rows
    for step, pitch in ((copy.target_step, rows.target_pitch), (copy.source_step, rows.source_pitch)):
        if step < (pitch * rows.height if rows.height > 1 else rows.width) or (rows.height > 1 and step % pitch):
            return False
    return True


def _issue(copy: Copy, stream: int) -> None:
    """Start one copy."""
    width, height, target_pitch, source_pitch = copy.rows
    depth = copy.depth
    if height == 1 and depth > 1:
        height, depth, target_pitch, source_pitch = depth, 1, copy.target_step, copy.source_step
    if height == depth == 1:  # most are: a fifth of the host's time for one with pitches
        if result := _driver().cuMemcpyAsync(copy.target, copy.source, width, stream):
            raise EngineError(f"a copy of {width} bytes failed with CUDA error {result}")
        return
    sides: dict[str, int] = {"srcMemoryType": _UNIFIED, "srcDevice": copy.source, "srcPitch": source_pitch}
    sides |= {"dstMemoryType": _UNIFIED, "dstDevice": copy.target, "dstPitch": target_pitch}
    sides |= {"WidthInBytes": width, "Height": height}
    if depth == 1:
        result = _driver().cuMemcpy2DAsync_v2(ctypes.byref(_Copy2D(**sides)), ctypes.c_void_p(stream))
    else:
        heights = {"srcHeight": copy.source_step // source_pitch, "dstHeight": copy.target_step // target_pitch}
        box = _Copy3D(**sides, **heights, Depth=depth)
        result = _driver().cuMemcpy3DAsync_v2(ctypes.byref(box), ctypes.c_void_p(stream))
    if result:
        raise EngineError(f"a copy of {depth} × {height} rows of {width} bytes failed with CUDA error {result}")


def _replay(copy: Copy) -> None:
    """One copy, by the processor."""
    rows = copy.rows
    for slice_ in range(copy.depth):
        target, source = copy.target + slice_ * copy.target_step, copy.source + slice_ * copy.source_step
        for row in range(rows.height):
            ctypes.memmove(target + row * rows.target_pitch, source + row * rows.source_pitch, rows.width)


@cache
def _driver() -> Any:
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuMemcpyAsync.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    return driver
