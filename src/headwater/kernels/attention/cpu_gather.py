"""Gathering a step's KV out of pages into scratch memory that stays in the processor's cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headwater.kernels.attention.cpu_plan import GatheredTokens


class CpuPlane(NamedTuple):
    """One plane of one layer: its pages, and the same as [rows, heads * dim] where the strides allow that."""

    name: str
    pages: Tensor
    rows: Tensor | None
    """Rows between two pages belong to others, another layer say, and are never asked for."""
    rows_per_page: int


def cpu_plane(name: str, pages: Tensor) -> CpuPlane:
    """Whole rows are gathered up to three times as fast as heads one after the other."""
    num_pages, page_size, heads, dim = pages.shape
    page_stride, token_stride, head_stride, _ = pages.stride()
    if head_stride != dim or token_stride == 0 or page_stride % token_stride:
        return CpuPlane(name, pages, None, 0)
    rows_per_page = page_stride // token_stride
    num_rows = (num_pages - 1) * rows_per_page + page_size
    return CpuPlane(name, pages, pages.as_strided((num_rows, heads * dim), (token_stride, 1)), rows_per_page)


class Gatherer:
    """Scratch memory, a piece for each plane's name."""

    def __init__(self) -> None:
        self._scratch: dict[str, Tensor] = {}

    def gather(self, plane: CpuPlane, tokens: GatheredTokens) -> Tensor:
        """The KV of `tokens` as [tokens, heads, dim], in scratch memory that the next gather of this name reuses."""
        if plane.rows is None:
            return plane.pages[tokens.pages, tokens.offsets]
        _, _, heads, dim = plane.pages.shape
        rows = tokens.rows(plane.rows_per_page)
        size = rows.numel() * heads * dim
        scratch = self._scratch.get(plane.name)
        if scratch is None or scratch.numel() < size or scratch.dtype != plane.rows.dtype:
            scratch = self._scratch[plane.name] = torch.empty(size, dtype=plane.rows.dtype)
        target = scratch[:size].view(-1, heads * dim)
        torch.index_select(plane.rows, 0, rows, out=target)
        return target.view(-1, heads, dim)
