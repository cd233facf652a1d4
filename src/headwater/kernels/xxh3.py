"""XXH3-64 (seed 0) of many tiles of one length, bit-equal to the C library on every device.

Checksums are int64 tensors that hold the 64 bits; `unsigned` turns them into the numbers that records keep. What a
tile is, is known to callers only.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
import xxhash
from torch import Tensor

from headwater.kernels.dispatch import require, runs_triton

MAX_LEADING_AXES = 3


def xxh3_tiles(tiles: Tensor, out: Tensor | None = None) -> Tensor:
    """Checksums of `tiles`, uint8 [..., bytes] with up to three leading axes of any strides: int64 [...].

    On CUDA: two launches on the current stream, one for tiles up to 240 bytes, without waiting; it needs a sixteenth
    of the tiles' bytes for a moment. Raises InvalidArgumentError for shapes and types that do not fit.
    """
    if runs_triton(tiles):
        from headwater.kernels.xxh3_triton import xxh3_tiles_triton

        return xxh3_tiles_triton(tiles, out)
    return xxh3_tiles_cpu(tiles, out)


def finish_tiles(tiles: Tensor, sums: Tensor, out: Tensor) -> None:
    """`xxh3_tiles` of contiguous tiles [a, b, c, bytes] on CUDA, of which a gather has left the sums (`extent.Move`).

    One launch on the current stream, without waiting, which reads a sixteenth of the bytes.
    """
    require(
        tiles.dim() == MAX_LEADING_AXES + 1
        and tiles.is_contiguous()
        and out.is_contiguous()
        and out.shape == tiles.shape[:-1]
        and sums.is_contiguous()
        and sums.numel() * 128 >= tiles.numel(),
        "contiguous tiles, an int64 for each and eight for each KiB of them",
        tiles=tiles,
        sums=sums,
        out=out,
    )
    from headwater.kernels.xxh3_triton import finish_tiles_triton

    if out.numel():
        finish_tiles_triton(tiles, sums, out)


def verify_tiles(tiles: Tensor, expected: Tensor) -> Tensor:
    """Whether each tile has the checksum that `expected` (int64 [...], on the same device) says: bool [...].

    Does not wait for the device: the answer lies there too.
    """
    require(
        expected.shape == tiles.shape[:-1] and expected.dtype == torch.int64 and expected.device == tiles.device,
        "an int64 checksum for each tile, on the tiles' device",
        tiles=tiles,
        checksums=expected,
    )
    return xxh3_tiles(tiles) == expected


def xxh3_tiles_cpu(tiles: Tensor, out: Tensor | None = None) -> Tensor:
    """`xxh3_tiles` by the C library, from any device."""
    out = check_tiles(tiles, out)
    data = tiles if tiles.device.type == "cpu" else tiles.cpu()
    # By address: a slice of a tensor, or of an array, costs more than the checksum of a small tile.
    starts = np.array(data.data_ptr(), np.int64)
    for size, stride in zip(data.shape[:-1], data.stride(), strict=False):
        starts = starts[..., None] + np.arange(size) * stride
    tile = ctypes.c_uint8 * data.shape[-1]
    sums = [xxhash.xxh3_64_intdigest(tile.from_address(start)) for start in starts.reshape(-1).tolist()]
    out.copy_(signed(sums).view(out.shape))
    return out


def check_tiles(tiles: Tensor, out: Tensor | None) -> Tensor:
    """What `xxh3_tiles` asks of its arguments; returns where the checksums go."""
    require(
        tiles.dtype == torch.uint8
        and 1 <= tiles.dim() <= MAX_LEADING_AXES + 1
        and (tiles.shape[-1] <= 1 or tiles.stride(-1) == 1),
        f"uint8 tiles of up to {MAX_LEADING_AXES} leading axes, each tile contiguous",
        tiles=tiles,
    )
    if out is None:
        return torch.empty(tiles.shape[:-1], dtype=torch.int64, device=tiles.device)
    require(
        out.shape == tiles.shape[:-1] and out.dtype == torch.int64 and out.device == tiles.device,
        "an int64 for each tile, on the tiles' device",
        tiles=tiles,
        out=out,
    )
    return out


def unsigned(sums: Tensor) -> list[int]:
    """Checksums, in the tensor's order, as the unsigned numbers of an index record. Waits for the device."""
    values: list[int] = sums.reshape(-1).cpu().numpy().view(np.uint64).tolist()
    return values


def signed(sums: list[int]) -> Tensor:
    """The inverse of `unsigned`, flat and on the CPU."""
    return torch.from_numpy(np.array(sums, np.uint64).view(np.int64))
