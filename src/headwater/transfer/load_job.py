"""A load as plain data: the request, the parts of it that were looked up together, and batches on their way.

`load` does the work, with the help of a mover.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from headwater.kv.hashing import ChunkRef
from headwater.stores.base import Loan
from headwater.transfer.convert import ConversionPlan
from headwater.transfer.copy_threads import Gate
from headwater.transfer.streams import PAST, DeviceEvent


@dataclass(eq=False)
class Load:
    """A request's chunks on their way into its blocks."""

    name: str
    chunks: Sequence[ChunkRef]
    block_ids: npt.NDArray[np.int32]
    groups: list[range]
    """Layers that come together."""
    layerwise: bool
    asked: DeviceEvent
    """When it was asked for: whatever the engine did with these blocks before must have ended."""
    deadline: float
    num_before: int = 0
    """Chunks before these that are in place already: they count in the report."""
    started_s: float = 0.0
    parts: list[LoadPart] = field(default_factory=list)
    num_issued: int = 0
    """Chunks whose copies were begun."""
    num_done: int = 0
    """Chunks, from the first on, that verified and are being written."""
    num_in_flight: int = 0
    """Batches that have not been given back."""
    is_going: bool = True
    """Whether more of it is to be brought."""
    is_wanted: bool = True
    """Whether what is on its way is still of use."""
    may_land: bool = True
    """Whether chunks that the first tier does not have may be read from further down."""
    is_segment: bool = False
    """It is a part of a load that follows its chunks while they are filled: see `follow`."""
    num_good: int = field(init=False)
    """Layer by layer: chunks, from the first on, of which nothing is known to be missing or damaged."""
    events: list[DeviceEvent] = field(default_factory=list)
    """By group: when it is in place. As many as have been launched."""
    next_part: int = 0
    """Of the group that is being launched: how many parts have been."""
    is_handed: bool = False
    """The engine's thread launches its further groups, in `wait_layer`."""
    is_launched: threading.Event = field(default_factory=threading.Event)
    """Nothing more of it will be launched."""
    is_cancelled: bool = False
    is_aborted: bool = False
    """It was cancelled, or is too late: nothing of it counts, and nobody need wait for the rest."""
    is_damaged: bool = False
    """Something did not verify."""
    is_missed: bool = False
    """Somebody who waited for a layer went on without it: whatever comes now, it came too late."""
    unawaited: set[int] = field(init=False)
    """Layer by layer: layers that the step has not waited for. It may have read them before they came."""
    num_settled: int | None = None
    """Layer by layer: chunks that are in place and verified, when the step has not waited for all layers yet."""
    gate: Gate = field(default_factory=Gate)
    """Closed when the load ends: from then on nothing may be written into its blocks."""

    def __post_init__(self) -> None:
        self.num_good = len(self.chunks)
        self.unawaited = {layer for group in self.groups for layer in group} if self.layerwise else set()

    @property
    def layers(self) -> range:
        """All layers that it brings."""
        return range(self.groups[0].start, self.groups[-1].stop, self.groups[0].step)

    def has_launched(self, layer: int) -> bool:
        """Whether a layer (of the whole model) is in place in the order of the device, or nobody need wait for it."""
        return self.is_aborted or len(self.events) > self.group_of(layer)

    def event_of(self, layer: int) -> DeviceEvent | None:
        """When a layer that was launched is in place; None where it is given up."""
        group = self.group_of(layer)
        return self.events[group] if group < len(self.events) else None

    def group_of(self, layer: int) -> int:
        """The number of the group that a layer belongs to."""
        return next(number for number, group in enumerate(self.groups) if layer <= group[-1])


class Stored(NamedTuple):
    """Where one chunk's extent lies."""

    segment: int
    address: int


@dataclass(eq=False)
class LoadPart:
    """Consecutive chunks of a load that were looked up together. Without a loan they are read into private memory."""

    load: Load
    first: int
    """Number of its first chunk in the load."""
    chunks: Sequence[ChunkRef]
    plan: ConversionPlan
    loan: Loan | None = None
    stored: list[Stored] = field(default_factory=list)
    encodings: Sequence[int] = ()
    """By chunk: how the lent tiles are stored."""
    sums: Tensor | npt.NDArray[np.uint64] | None = None
    """Checksums (chunks, layers, heads), as the mover keeps them."""
    expected: Tensor | None = None
    """The same on the device, once the first copy was begun."""

    @property
    def stop(self) -> int:
        """Number of the chunk after its last."""
        return self.first + len(self.chunks)


@dataclass(eq=False)
class LoadBatch:
    """Some layers of some of a part's chunks, on their way."""

    load: Load
    part: LoadPart
    spans: range
    """Which of the part's chunks."""
    plan: ConversionPlan
    flat: Tensor | None = None
    num_bytes: int = 0
    """Of the staging."""
    good: Tensor | None = None
    """By chunk, on the host once `checked`: whether all its tiles verified."""
    is_late: bool = False
    """It was stopped because the load is over, not because something was wrong."""
    is_placed: bool = False
    """The mover has put it into the cache already."""
    checked: DeviceEvent = PAST
    done: DeviceEvent = PAST
    """When its room in the staging is free again."""
    held: object = None
    """Device memory that must live until then."""

    @property
    def num_good(self) -> int:
        """Chunks that verified, counted from the first. To be asked when `checked` is over."""
        flags = [False] if self.good is None else self.good.tolist()
        return flags.index(False) if False in flags else len(flags)
