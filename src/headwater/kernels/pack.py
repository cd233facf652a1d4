"""Packed tiles as kernels know them: planes of 2-byte elements by their widths, and many tiles at a time.

`kv.packing` defines the format. `extent` packs while it gathers and unpacks while it scatters; here is what callers ask
about such tiles, and the CPU's part.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headwater.kernels.dispatch import require, runs_triton
from headwater.kv.packing import fits_packed, pack_tile, packed_tile_bytes, unpack_tile
from headwater.kv.spec import KVSpec, Plane

Bytes = npt.NDArray[np.uint8]

MAX_LEADING_AXES = 3


@lru_cache(maxsize=512)
def packed_bytes(widths: tuple[int, ...], num_rows: int) -> int:
    """Stored bytes of a packed tile with planes of these widths; 0 where there is none."""
    return packed_tile_bytes(_spec(widths), num_rows)


def packed_fits(tiles: Tensor, widths: tuple[int, ...], num_rows: int) -> Tensor:
    """Which tiles can be read: of those that a gather has packed, those that fit. `tiles` are uint8
    [..., packed bytes] with up to three leading axes of any strides, the answer is bool [...] on their device. The
    others' chunks must be stored raw.

    On CUDA one launch on the current stream, without waiting. Raises InvalidArgumentError for tiles of another size.
    """
    expected = packed_bytes(widths, num_rows)
    require(
        tiles.dtype == torch.uint8
        and 1 <= tiles.dim() <= MAX_LEADING_AXES + 1
        and 0 < expected == tiles.shape[-1]
        and tiles.stride(-1) == 1,
        f"uint8 tiles of {expected} bytes and up to {MAX_LEADING_AXES} leading axes, each tile contiguous",
        tiles=tiles,
    )
    if runs_triton(tiles):
        from headwater.kernels.pack_triton import packed_fits_triton

        return packed_fits_triton(tiles, widths, num_rows)
    return packed_fits_cpu(tiles, widths, num_rows)


def packed_fits_cpu(tiles: Tensor, widths: tuple[int, ...], num_rows: int) -> Tensor:
    """`packed_fits` by numpy, from any device."""
    good = fits_packed(_spec(widths), num_rows, tiles.cpu().numpy())
    return torch.from_numpy(np.asarray(good)).to(tiles.device)


def pack_tiles(widths: tuple[int, ...], num_rows: int, raw: Bytes, out: Bytes) -> None:
    """Pack contiguous raw tiles, one by one, each into a row of `out`. Of one that does not fit, the first count says
    so."""
    for source, target in zip(raw, out, strict=True):
        if not pack_tile(_spec(widths), num_rows, source, target):
            target[:4] = 0xFF


def unpack_tiles(widths: tuple[int, ...], num_rows: int, packed: Bytes, out: Bytes) -> None:
    """The inverse. Zeros for a tile that nobody packed: what lay in `out` before is not the next reader's."""
    for source, target in zip(packed, out, strict=True):
        if not unpack_tile(_spec(widths), num_rows, source, target):
            target[:] = 0


@lru_cache(maxsize=64)
def _spec(widths: tuple[int, ...]) -> KVSpec:
    return KVSpec(1, 1, tuple(Plane(f"plane{i}", width, "bfloat16") for i, width in enumerate(widths)))
