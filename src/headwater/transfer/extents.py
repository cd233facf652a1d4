"""Copies between staging and extents, as plain numbers: some layers and heads of many chunks in a few calls.

    extent   [layer][head][tile]   of the whole model, at an address of host memory
    staging  [chunk][layer][head][tile]   of one shard, at an address of the device

The layers of a chunk are rows at one pitch on both sides, and chunks that follow each other evenly go together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from headwater.kernels.touch import touch_rows
from headwater.kv.topology import Shard
from headwater.transfer.copy import Copy, CopyRows, fits_driver, join_copies, run_copies


class ExtentPiece(NamedTuple):
    """What is copied of each of some equal chunks."""

    shard: Shard
    """Layers and heads of the whole model."""
    tile_bytes: int
    first: int = 0
    step: int = 1
    """Which of the layers in staging these are."""


def copy_extents(
    piece: ExtentPiece,
    extents: Sequence[tuple[int, int, *tuple[object, ...]]],
    staged: Sequence[int],
    model_heads: int,
    device: torch.device,
    *,
    to_host: bool,
) -> None:
    """Copy the same piece of many chunks on the current stream, without waiting.

    Of each chunk: (which registration its extent lies in, the extent's address), and where it lies in staging. No copy
    crosses from one registration to the next, though they may be neighbours.
    """
    layers, heads, tile = piece.shard.layers, piece.shard.heads, piece.tile_bytes
    if not layers or not heads or not extents:
        return
    here = piece.first * len(heads) * tile
    pitches = layers.step * model_heads * tile, piece.step * len(heads) * tile
    rows = _rows(len(heads) * tile, len(layers), *(pitches if to_host else pitches[::-1]))
    stored = _stored(piece, extents, model_heads)
    ring = np.array(staged, np.int64) + here
    targets, sources = (stored, ring) if to_host else (ring, stored)

    def copies() -> Iterator[Copy]:
        for first, last in _stretches([extent[0] for extent in extents]):
            yield from join_copies(_even(rows, targets[first:last], sources[first:last]))

    run_copies(copies(), device)  # the first begins while the others are still being worked out


def touch_extents(
    piece: ExtentPiece, extents: Sequence[tuple[int, int, *tuple[object, ...]]], model_heads: int, device: torch.device
) -> None:
    """For copies to the host that are under way or about to begin: let the device translate where they go to.

    One launch on the current stream, where the rows of a chunk lie apart; `copy_extents` explains the arguments.
    """
    layers, heads, tile = piece.shard.layers, piece.shard.heads, piece.tile_bytes
    if len(layers) > 1 and heads and (layers.step, len(heads)) != (1, model_heads) and extents:
        starts = torch.from_numpy(_stored(piece, extents, model_heads))
        touch_rows(starts, len(heads) * tile, len(layers), layers.step * model_heads * tile, device)


def _stored(
    piece: ExtentPiece, extents: Sequence[tuple[int, int, *tuple[object, ...]]], model_heads: int
) -> npt.NDArray[np.int64]:
    """Where the piece of each chunk begins in its extent."""
    first = (piece.shard.layers.start * model_heads + piece.shard.heads.start) * piece.tile_bytes
    return np.array([extent[1] for extent in extents], np.int64) + first


def _stretches(segments: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(First, after the last) of each stretch of equal numbers."""
    first = 0
    for at in range(1, len(segments) + 1):
        if at == len(segments) or segments[at] != segments[first]:
            yield first, at
            first = at


def _even(rows: CopyRows, targets: np.ndarray, sources: np.ndarray) -> Iterator[Copy]:
    """Copies of stretches in which both sides go on at one distance; those of a few are left to `join_copies`."""
    to, of = np.diff(targets), np.diff(sources)
    bounds = [0, *(np.flatnonzero((to[1:] != to[:-1]) | (of[1:] != of[:-1])) + 2).tolist(), len(targets)]
    for first, last in pairwise(bounds):
        target, source, count = int(targets[first]), int(sources[first]), last - first
        whole = Copy(target, source, rows, count, int(to[first]), int(of[first])) if count > 1 else None
        if whole is not None and fits_driver(whole):
            yield whole
        else:
            for target, source in zip(targets[first:last].tolist(), sources[first:last].tolist(), strict=True):
                yield Copy(target, source, rows)


@lru_cache(maxsize=256)
def _rows(width: int, height: int, target_pitch: int, source_pitch: int) -> CopyRows:
    if height == 1 or target_pitch == source_pitch == width:
        return CopyRows(width * height, 1, 0, 0)
    return CopyRows(width, height, target_pitch, source_pitch)
