"""The axes of a paged cache. No torch here: whoever describes a cache need not have it."""

from __future__ import annotations

from typing import NamedTuple


class Axes(NamedTuple):
    """One number for each axis of a plane in the cache: its shape, or its strides."""

    block: int
    token: int
    head: int
    dim: int
