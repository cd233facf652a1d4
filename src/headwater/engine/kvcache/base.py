"""Where every byte of a paged KV cache lies, as plain data. No torch here: whoever moves KV reads these numbers too.

The cache's own tensors are made from the same numbers (see `paged`), so a description cannot disagree with them.
"""

from __future__ import annotations

from dataclasses import dataclass

from headwater.kv.spec import DTYPE_BYTES
from headwater.transfer.axes import Axes


@dataclass(frozen=True, slots=True)
class CachePlane:
    """One plane of one layer: element (block, token, head, dim) lies at `offset_bytes + Σ index × stride`."""

    layer: int
    """Counted over the whole model, whichever layers this rank holds."""
    name: str
    dtype: str
    shape: Axes
    strides: Axes
    """In elements."""
    offset_bytes: int
    """From the start of the allocation to element (0, 0, 0, 0); a multiple of the element's size."""

    @property
    def strides_bytes(self) -> Axes:
        """The strides in bytes."""
        return Axes(*(stride * self.element_bytes for stride in self.strides))

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class CacheView:
    """A whole paged cache of one rank, in one allocation of `total_bytes`."""

    num_pages: int
    """Pages for requests; one more, the dummy page, lies after them."""
    page_size: int
    layers: range
    heads: range
    """Heads that this rank holds, counted over the whole model."""
    planes: tuple[tuple[CachePlane, ...], ...]
    """By layer of this rank, then in the spec's order."""
    total_bytes: int
