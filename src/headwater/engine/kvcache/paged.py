"""The paged KV cache of one rank: one allocation, and a strided tensor for each layer and plane of it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headwater.engine.kvcache.base import CachePlane, CacheView
from headwater.errors import MemoryBudgetError
from headwater.kernels.dtypes import TORCH_DTYPES

BASE_ALIGNMENT = 256


class PagedKVCache:
    """Tensors over one allocation of zeros; `view` says where everything lies, for whoever moves KV without torch."""

    def __init__(self, view: CacheView, page_bytes: int, device: torch.device) -> None:
        self.view = view
        self.page_bytes = page_bytes
        """Bytes that one page takes, padding included."""
        self.data = _allocate(view.total_bytes, device)
        """All of it, as bytes."""
        self._planes = tuple(tuple(_tensor(self.data, plane) for plane in layer) for layer in view.planes)

    def planes(self, layer: int) -> tuple[Tensor, ...]:
        """The planes of this rank's `layer`-th layer, in the spec's order, each [pages, page_size, heads, width].

        The last page is the dummy page.
        """
        return self._planes[layer]

    @property
    def views(self) -> tuple[tuple[CachePlane, ...], ...]:
        """Where the tensors of `planes` lie, by layer and plane."""
        return self.view.planes

    @property
    def num_layers(self) -> int:
        """Layers that this rank holds."""
        return len(self._planes)

    @property
    def num_pages(self) -> int:
        """Pages that requests can have."""
        return self.view.num_pages

    @property
    def dummy_page(self) -> int:
        """The page after the last: never allocated, so that rows that only fill up a batch have where to write."""
        return self.view.num_pages

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.view.page_size


def _allocate(num_bytes: int, device: torch.device) -> Tensor:
    try:
        if device.type != "cpu":
            return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        # numpy's zeros come from the operating system page by page, when first touched; torch's are all written here
        # and now, so that a cache for requests that never come would still take its memory.
        data = torch.from_numpy(np.zeros(num_bytes + BASE_ALIGNMENT, dtype=np.uint8))
        return data[-data.data_ptr() % BASE_ALIGNMENT :][:num_bytes]
    except (MemoryError, RuntimeError, ValueError) as error:
        # torch.OutOfMemoryError is a RuntimeError; numpy raises ValueError for what no machine could have.
        raise MemoryBudgetError(
            f"no room for a KV cache of {num_bytes:,} bytes on {device}: {error}; "
            "use fewer pages (--num-pages) or a smaller --memory-ratio"
        ) from error


def _tensor(data: Tensor, plane: CachePlane) -> Tensor:
    elements = data.view(TORCH_DTYPES[plane.dtype])
    offset = elements.storage_offset() + plane.offset_bytes // plane.element_bytes
    return elements.as_strided(tuple(plane.shape), tuple(plane.strides), offset)
