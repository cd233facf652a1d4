"""Whether a device packs as the processor does: asked once a process and device, before anything packed is stored.

Checksums are over packed bytes, so they would prove a tile that was packed wrongly. A compiler or a device that differs
from those that the kernels were tested on must not cost a token: where a small case with every kind of value does not
come out bit for bit, tiles are stored raw, and packed ones are decoded by the processor.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headwater.kernels.extent import Compact, Move, Pages, PlaneRow, Spans, gather_rows, scatter_rows
from headwater.kernels.pack import packed_bytes, packed_fits

log = logging.getLogger(__name__)

_WIDTHS = (192, 64)
"""Of two planes: two blocks of columns in the first one."""
_LAYERS, _HEADS, _BLOCK, _NUM_BLOCKS = 2, 3, 16, 12
_ROWS = (100, 37)
"""Of two spans, which begin in the middle of a block."""


@lru_cache(maxsize=16)
def packs_rightly(device: torch.device) -> bool:
    """Pack and unpack a small cache on a device and on the processor, and compare. Waits for the device; the first call
    compiles kernels that are needed anyway."""
    if device.type == "cpu":
        return True
    try:
        is_right = agrees(device)
    except Exception:
        log.exception("packing on %s cannot be checked", device)
        is_right = False
    if not is_right:
        log.error("packing on %s does not give what it should: KV is stored raw there; please report this", device)
    return is_right


class Coding(NamedTuple):
    """What is checked."""

    gather: Callable[[Move], None] = gather_rows
    scatter: Callable[[Move], None] = scatter_rows
    fits: Callable[[Tensor, tuple[int, ...], int], Tensor] = packed_fits


def agrees(device: torch.device, coding: Coding = Coding()) -> bool:  # noqa: B008 - it is frozen
    """Whether a device's gather, scatter and look at what fits give what the processor's do, bit for bit."""
    cache = _values()
    here, fits_here = _gathered(cache, Coding())
    there, fits_there = _gathered(cache.to(device), coding)
    if fits_here.all() or not fits_here.any() or not torch.equal(fits_there.cpu(), fits_here):
        return False
    if not torch.equal(there.cpu(), here):
        return False
    back, wanted = torch.zeros_like(cache, device=device), torch.zeros_like(cache)
    coding.scatter(_move(back, there))
    scatter_rows(_move(wanted, here))
    for found in (back, wanted):  # what comes out of a tile that did not fit does not matter: nobody places it
        found[-1, :, :, -1] = 0
    return torch.equal(back.cpu(), wanted)


def _values() -> Tensor:
    """A cache of [layer, block, token, head, channel] as 16 bits: exponents close together, with zeros, denormals,
    infinities and NaNs here and there; the last head of the second layer cannot be packed."""
    rng = np.random.default_rng(11)
    shape = (_LAYERS, _NUM_BLOCKS, _BLOCK, _HEADS, sum(_WIDTHS))
    words = rng.integers(0, 1 << 16, shape, np.uint16) & 0x807F | rng.integers(116, 131, shape, np.uint16) << 7
    rare = rng.random(shape) < 0.0005
    words[rare] = words[rare] & 0x807F | rng.choice([0, 3, 255], int(rare.sum())).astype(np.uint16) << 7
    words[0, :, :, 0, 5] |= 0x7F80  # a channel without a finite value
    words[0, :, :, 1, 9] &= 0x807F  # one of zeros and denormals
    words[1, :, :, -1] = rng.integers(0, 1 << 16, words[1, :, :, -1].shape, np.uint16)
    return torch.from_numpy(words.view(np.int16))


def _move(cache: Tensor, staged: Tensor) -> Move:
    element, (layer, block, token, head, _) = cache.element_size(), cache.stride()
    starts = [element * sum(_WIDTHS[:number]) for number in range(len(_WIDTHS))]
    planes = tuple(
        tuple(
            PlaneRow(cache.data_ptr() + element * at * layer + start, *(element * s for s in (block, token, head, 1)))
            for start in starts
        )
        for at in range(_LAYERS)
    )
    sizes = tuple(element * width for width in _WIDTHS)
    pages = Pages(planes, sizes, (element,) * len(_WIDTHS), _BLOCK, _NUM_BLOCKS, _HEADS, cache.device)
    blocks = np.random.default_rng(5).permutation(_NUM_BLOCKS).astype(np.int64)
    spans = Spans(blocks, np.array([0, 7]), np.array([3, 9]), np.array(_ROWS), np.array(_sizes(), np.int64))
    return Move(pages, spans, range(_LAYERS), range(_HEADS), Compact(staged.data_ptr(), _LAYERS))


def _sizes() -> list[int]:
    return [packed_bytes(_WIDTHS, rows) for rows in _ROWS]


def _gathered(cache: Tensor, coding: Coding) -> tuple[Tensor, Tensor]:
    """What a gather gives, and which tiles fit. One that does not may hold anything: it is blotted out."""
    staged = torch.zeros(sum(_sizes()) * _LAYERS * _HEADS, dtype=torch.uint8, device=cache.device)
    coding.gather(_move(cache, staged))
    fits = list[Tensor]()
    for tiles, rows in zip(_tiles(staged), _ROWS, strict=True):
        fits.append(coding.fits(tiles, _WIDTHS, rows))
        tiles[~fits[-1]] = 0xFF
    return staged, torch.stack(fits)


def _tiles(staged: Tensor) -> list[Tensor]:
    """The tiles of each span: (layers, heads, packed bytes)."""
    found, at = list[Tensor](), 0
    for size in _sizes():
        end = at + size * _LAYERS * _HEADS
        found.append(staged[at:end].view(_LAYERS, _HEADS, size))
        at = end
    return found
