"""Gathers that pack and scatters that unpack, in Triton; the contract is in `extent`, the format in `kv.packing`.

One program moves one block of a packed tile, up to 128 channels of one plane; long blocks are unpacked by several.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headwater.kernels.dispatch import require
from headwater.kernels.extent import Compact, Move, ceil_div, common_alignment, next_power_of_2
from headwater.kernels.extent_device import DeviceMove
from headwater.kernels.pack_kernels import fits_kernel, pack_kernel, unpack_kernel
from headwater.kv.packing import packed_blocks

_TILES = 256
_LEAST_ROWS = 64
"""Shorter spans are packed as if they were so long: each length would be compiled for itself."""
_MOST_ROWS = 256


class PackConfig(NamedTuple):
    """How a block is cut into steps. Its words per thread are the registers that it takes."""

    rows: int = 256
    """Rows that a program holds at once. Spans up to this length are read once, longer ones twice."""
    words: int = 64
    """Words of a thread, at most."""
    most_warps: int = 8
    registers: int = 128
    """Of a thread: so few that a multiprocessor holds two programs, of which one computes while the other loads."""


class UnpackConfig(NamedTuple):
    """How a block is cut into programs, and into steps."""

    rows: int = 32
    """Rows of a step."""
    words: int = 16
    """Words of a thread in a step."""
    most_warps: int = 8
    steps: int = 8
    """Steps of a program, at most: longer blocks are divided."""
    programs: int = 1024
    """Programs that a launch should have: in smaller ones, blocks are divided further to occupy the device."""


# To be tried on a GPU by tests/gpu/tune_packing.py.
PACK = PackConfig()
UNPACK = UnpackConfig()


def move_packed_triton(
    move: Move, device: DeviceMove, *, scatter: bool, config: PackConfig | UnpackConfig | None = None
) -> None:
    """The packed spans of a move, in either direction, in one launch on the current stream."""
    pages, spans, num_heads = move.pages, move.spans, len(move.heads)
    require(pages.alignment >= 2, "a cache of which every number is even", alignment=pages.alignment)
    assert spans.packed_bytes is not None
    most_rows = int(spans.num_rows[spans.packed_bytes > 0].max())
    staged = common_alignment([device.alignment, *pages.row_bytes])  # raw tiles may lie before a packed one
    place = {"BLOCK_SIZE": pages.block_size, "COMPACT": isinstance(move.staged, Compact)}
    place |= block_constants(pages.widths, pages.alignment if pages.dense else 2, staged)
    numbers = (
        pages.device_table,
        device.spans,
        device.targets,
        _block_table(pages.widths, pages.device),
        device.address,
        len(spans.num_rows),
        len(move.layers),
        device.staged_layers,
        device.first_staged,
        move.layers.start,
        move.layers.step,
        num_heads,
        move.heads.start,
    )
    programs = len(spans.num_rows) * len(move.layers) * place["NUM_BLOCKS"] * num_heads
    if scatter:
        unpack = config if isinstance(config, UnpackConfig) else UNPACK
        steps = ceil_div(most_rows, unpack.rows)
        wanted = max(ceil_div(steps, unpack.steps), min(steps, unpack.programs // programs))
        part_rows = ceil_div(steps, wanted) * unpack.rows
        parts = ceil_div(most_rows, part_rows)
        unpack_kernel[(programs * parts,)](
            *numbers,
            parts,
            part_rows,
            **place,
            ROWS=unpack.rows,
            num_warps=num_warps(unpack.rows * place["COLUMNS"], unpack),
        )
    else:
        pack = config if isinstance(config, PackConfig) else PACK
        # The kernel adds up the escapes of a step in 16 bits.
        require(pack.rows <= _MOST_ROWS, f"steps of at most {_MOST_ROWS} rows", rows=pack.rows)
        rows = min(pack.rows, max(_LEAST_ROWS, next_power_of_2(most_rows)))
        warps = num_warps(rows * place["COLUMNS"], pack)
        held = {"ROWS": rows, "HELD": most_rows <= rows}
        pack_kernel[(programs,)](*numbers, **place, **held, num_warps=warps, maxnreg=pack.registers)


@lru_cache(maxsize=64)
def block_constants(widths: tuple[int, ...], cache: int, staged: int) -> Mapping[str, int]:
    """What the kernels know of planes of these widths when they are compiled, and of the alignment of both sides:
    `cache` is 2 where rows are not dense."""
    blocks = packed_blocks(widths, 1)
    halves = [block.width // 2 for block in blocks]
    return {
        "NUM_PLANES": len(widths),
        "NUM_BLOCKS": len(blocks),
        "COLUMNS": next_power_of_2(max(halves)),
        "HALVES": common_alignment(halves),
        "CACHE": cache,
        "STAGED": staged,
        "SIGNS": min(8, common_alignment([staged, *(2 * half for half in halves)])),
        "CODES": min(4, common_alignment([staged, *halves])),
    }


def num_warps(num_words: int, config: PackConfig | UnpackConfig) -> int:
    """Of a program that has so many words at once."""
    return min(config.most_warps, max(1, num_words // (32 * config.words)))


def packed_fits_triton(tiles: Tensor, widths: tuple[int, ...], num_rows: int) -> Tensor:
    """`packed_fits`, on the current stream."""
    out = torch.empty(tiles.shape[:-1], dtype=torch.bool, device=tiles.device)
    shape, strides = (1, 1, 1, *tiles.shape[:-1])[-3:], (0, 0, 0, *tiles.stride()[:-1])[-3:]
    if out.numel():
        fits_kernel[(ceil_div(out.numel(), _TILES),)](
            tiles,
            out.view(torch.uint8),
            _block_table(widths, tiles.device),
            out.numel(),
            shape[1],
            shape[2],
            *strides,
            num_rows,
            NUM_BLOCKS=len(packed_blocks(widths, num_rows)),
            ALIGNMENT=common_alignment([tiles.data_ptr(), *strides]),
            TILES=_TILES,
        )
    return out


@lru_cache(maxsize=64)
def _block_table(widths: tuple[int, ...], device: torch.device) -> Tensor:
    """By block: its plane, its first channel and its width."""
    table = [(block.plane, block.first, block.width) for block in packed_blocks(widths, 1)]
    return torch.from_numpy(np.array(table, np.int32)).to(device)
