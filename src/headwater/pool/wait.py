"""How long somebody waits for chunks that others are still filling."""

from __future__ import annotations

from typing import NamedTuple


class Wait(NamedTuple):
    """How long a load follows chunks that are not there yet."""

    wait_s: float
    """In all; then it ends with what there is."""
    start_s: float
    """Where nobody has begun the next chunk. After the first chunk, four times the longest pause so far if that is
    more: whoever computes it does so step by step."""
    stall_s: float
    """Where somebody has begun the next chunk and commits nothing."""
