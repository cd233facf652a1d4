"""What a save on a GPU consists of: a job of some chunks, what was gathered of it, and batches under way.

Data for `device_saver`, whose thread launches, and for `device_sender`, whose thread does the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import Shard
from headwater.pool.space import Space
from headwater.stores.base import Reservation, Status
from headwater.transfer.convert import Plan
from headwater.transfer.device_ring import Room
from headwater.transfer.lanes import Mark


class Target(NamedTuple):
    """An extent that this rank fills its part of."""

    segment: int
    address: int
    extent: Reservation


@dataclass(eq=False)
class SaveJob:
    """Chunks that are saved together: all layers at once, or one group of layers after another."""

    chunks: Sequence[ChunkRef]
    plan: Plan
    groups: list[range]
    num_layers: int = 0
    """Layers that are computed. This and the next four belong to the thread that launches."""
    num_gathered: int = 0
    """Groups that have left the cache."""
    num_kept: int = field(init=False)
    """Chunks, from the first on, that have not been given up."""
    rooms: list[tuple[range, Room]] = field(default_factory=list)
    """Where the layers of the next group go to: numbers of chunks, and their place."""
    parts: list[Plan] = field(default_factory=list)
    """Their parts of the plan."""
    targets: dict[int, Target] = field(default_factory=dict)
    """By number of the chunk. This and all that follows belongs to the sender's thread."""
    is_open: bool = False
    """Its extents are reserved, all of them at once."""
    in_place: bool = True
    num_alive: int = field(init=False)
    ended: set[int] = field(default_factory=set)
    """Chunks of which nothing more is stored, and that are counted: there already, refused, or lost."""
    num_settled: int = 0
    sums: npt.NDArray[np.uint64] | None = None
    """(chunks, layers, heads), as far as they have come."""

    def __post_init__(self) -> None:
        self.num_kept = self.num_alive = len(self.chunks)

    @property
    def group(self) -> range:
        """The layers that leave the cache now."""
        return self.groups[self.num_gathered]

    def equal(self, spans: Sequence[int], shard: Shard) -> list[list[int]]:
        """Chunks of one size of which a rank writes the same layers."""
        groups: dict[tuple[int, int], list[int]] = {}
        for span in spans:
            chunk = self.chunks[span]
            groups.setdefault((chunk.num_tokens, chunk.number % shard.replicas), []).append(span)
        return list(groups.values())

    def by_owned(self, spans: Sequence[int], shard: Shard) -> Iterator[tuple[Shard, slice, list[int]]]:
        """Chunks of which a rank writes the same layers: (what it writes, which of its own layers, the chunks)."""
        if shard.replicas == 1:
            yield shard, slice(None), list(spans)
            return
        groups: dict[int, list[int]] = {}
        for span in spans:
            groups.setdefault(self.chunks[span].number % shard.replicas, []).append(span)
        for group in groups.values():
            owned, first, step = shard.owned(self.chunks[group[0]].number)
            yield owned, slice(first, None, step), group


@dataclass(eq=False)
class Gathered:
    """Some layers of some of a job's chunks, in the ring. No plan: the gather failed."""

    job: SaveJob
    spans: range
    layers: range
    plan: Plan | None
    flat: Tensor
    added_up: Tensor | None
    """What the gather added up for the checksums."""
    room: Room
    gathered: Mark
    is_last: bool
    """Nothing more of this job follows."""
    sums: Tensor | None = None
    """On the device, once they are being computed."""
    sums_here: Tensor | None = None
    hashed: Mark | None = None


class Open(NamedTuple):
    """Reserve a job's extents: its layers will follow."""

    job: SaveJob
    first_layer: Mark
    """The end of its first one on the device."""


class Cut(NamedTuple):
    """Give up a job's chunks from this number on."""

    job: SaveJob
    num_kept: int


class GiveUp(NamedTuple):
    """Chunks of which this rank brings nothing: the other ranks' parts of them are of no use."""

    chunks: Sequence[ChunkRef]


class TakeUp(NamedTuple):
    """Chunks that will be saved: what was given up of them before is given up no more."""

    chunks: Sequence[ChunkRef]


class PassOn(NamedTuple):
    """Give room back of which nothing will be stored."""

    room: Room
    unused: Mark
    """When nobody writes into it any more."""


class Batch(NamedTuple):
    """Chunks on their way into their extents."""

    work: Gathered
    spans: range
    """Numbers of the job's chunks."""
    num_bytes: int
    """Of the ring."""
    commits: range
    """What is complete when this batch is in."""
    copied: Mark


Item = Gathered | Open | Cut | GiveUp | TakeUp | PassOn
"""What the sender is told to do, in this order."""


def noted_tiles(space: Space, shard: Shard, chunks: Sequence[ChunkRef], extents: Sequence[Reservation]) -> list[int]:
    """By chunk: how many of the tiles that this rank writes are in, or 1 where it writes none."""
    found = [1] * len(chunks)
    rows = [row for row, extent in enumerate(extents) if extent.status == Status.OK]
    groups: dict[int, list[int]] = {}
    for row in rows:
        groups.setdefault(chunks[row].number % shard.replicas, []).append(row)
    for group in groups.values():
        owned = shard.owned(chunks[group[0]].number)[0]
        if owned.layers:
            counts = space.noted([extents[row] for row in group], owned)
            for row, count in zip(group, counts, strict=True):
                found[row] = count
    return found
