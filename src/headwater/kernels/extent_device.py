"""A move as the kernels of a GPU take it: its numbers where they can be read there."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headwater.kernels.extent import Compact, Move, common_alignment
from headwater.kernels.post import fetch


class DeviceMove(NamedTuple):
    """Where the spans of a move lie, on both sides."""

    spans: Tensor
    """What `Spans.upload` returned."""
    targets: Tensor
    """By span: the fields of `ExtentTarget`. Not read where staging is compact."""
    address: int
    staged_layers: int
    first_staged: int
    alignment: int
    """Of every number that says where a tile lies, but for the sizes of raw tiles before it."""


def upload_move(move: Move) -> DeviceMove:
    """On the current stream, without waiting; nothing where it has been uploaded before and staging is compact."""
    pages = move.pages
    spans = move.device_spans
    if spans is None:
        spans = move.spans.upload(pages.device, pages.token_bytes)
    if isinstance(move.staged, Compact):
        staged = move.staged
        alignment = common_alignment([staged.address])
        return DeviceMove(spans, spans, staged.address, staged.num_layers, staged.first_layer, alignment)
    table = np.array(move.staged, np.int64)
    alignment = common_alignment([int(np.bitwise_or.reduce(table, axis=None))])
    return DeviceMove(spans, fetch(torch.from_numpy(table), pages.device), 0, 0, 0, alignment)
