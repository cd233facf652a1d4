"""What a load on a GPU consists of: the request, the parts of it that were looked up together, and batches under way.

Plain data for `device_loader`, which does the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from headwater.kv.hashing import ChunkRef
from headwater.stores.base import Loan
from headwater.transfer.convert import Plan
from headwater.transfer.lanes import OVER, Mark


@dataclass(eq=False)
class Load:
    """A request's chunks on their way into its blocks."""

    name: str
    chunks: Sequence[ChunkRef]
    block_ids: npt.NDArray[np.int32]
    groups: list[range]
    """Layers that come together."""
    layerwise: bool
    asked: Mark
    """When it was asked for: what the engine did with these blocks before must have ended."""
    deadline: float
    num_good: int = field(init=False)
    """Chunks, from the first on, of which nothing is missing or damaged so far as is known."""
    marks: list[Mark] = field(default_factory=list)
    """By group: when it is in place. As many as have been launched."""
    is_cancelled: bool = False
    is_given_up: bool = False
    """Not all of it will come: nobody need wait for the rest."""
    is_damaged: bool = False
    """Something did not verify on the device."""
    is_missed: bool = False
    """Somebody who waited for a layer went on without it: whatever comes now, it came too late."""

    def __post_init__(self) -> None:
        self.num_good = len(self.chunks)

    def has_launched(self, layer: int) -> bool:
        """Whether a layer (of the whole model) is in place in the order of the device, or nobody need wait for it."""
        return self.is_given_up or len(self.marks) > self._group_of(layer)

    def mark_of(self, layer: int) -> Mark | None:
        """When a layer that was launched is in place; None where it is given up."""
        group = self._group_of(layer)
        return self.marks[group] if group < len(self.marks) else None

    def _group_of(self, layer: int) -> int:
        return next(number for number, group in enumerate(self.groups) if layer <= group[-1])


class Stored(NamedTuple):
    """Where one chunk's extent lies."""

    segment: int
    address: int


@dataclass(eq=False)
class Part:
    """Consecutive chunks of a load that were looked up together. Without a loan the processor reads them."""

    first: int
    """Number of its first chunk in the load."""
    chunks: Sequence[ChunkRef]
    plan: Plan
    is_whole: bool
    """Whether all that was looked up was there."""
    loan: Loan | None = None
    stored: list[Stored] = field(default_factory=list)
    sums: Tensor | None = None
    """Checksums (chunks, layers, heads), in pinned memory."""
    expected: Tensor | None = None
    """The same on the device, once the first copy was started."""

    @property
    def stop(self) -> int:
        """Number of the chunk after its last."""
        return self.first + len(self.chunks)


@dataclass(eq=False)
class Batch:
    """Some layers of some of a part's chunks, on their way to the device."""

    part: Part
    spans: range
    """Which of the part's chunks."""
    plan: Plan
    flat: Tensor
    num_bytes: int
    """Of the ring."""
    good: Tensor | None = None
    """By chunk, on the host once `checked`: whether all its tiles verified."""
    checked: Mark = OVER
    done: Mark = OVER
    """When its room in the ring is free again."""
    held: object = None
    """Device memory that must live until then."""

    @property
    def num_good(self) -> int:
        """Chunks that verified, counted from the first. To be asked when `checked` is over."""
        flags = [False] if self.good is None else self.good.tolist()
        return flags.index(False) if False in flags else len(flags)
