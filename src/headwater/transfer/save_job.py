"""A save as plain data: a job of some chunks, the parts of it that were gathered, and batches on their way.

`save` fills these in the thread that launches, `sender` in its own; each field says whose it is.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import Shard
from headwater.pool.space import Space
from headwater.stores.base import Reservation, Status
from headwater.transfer.convert import ConversionPlan, join_plans
from headwater.transfer.ring import Room
from headwater.transfer.states import PartState
from headwater.transfer.streams import DeviceEvent


class SaveRequest(NamedTuple):
    """Chunks of one request (in order, parents first), and its blocks from its first token on."""

    name: str
    chunks: Sequence[ChunkRef]
    block_ids: npt.NDArray[np.int32]
    raw: Collection[bytes] = frozenset()
    """Keys of chunks whose tiles cannot be packed, by any rank: they are stored raw."""

    def left(self, chunks: Sequence[ChunkRef]) -> SaveRequest:
        """What is left of it: some of its chunks."""
        return self._replace(chunks=chunks)


class SaveTarget(NamedTuple):
    """An extent that this rank fills its part of."""

    segment: int
    address: int
    extent: Reservation
    memory: npt.NDArray[np.uint8]
    """The segment: it stays mapped as long as somebody fills it, whoever closes the pool meanwhile."""


@dataclass(eq=False)
class SaveJob:
    """Chunks that are saved together: all layers at once, or one group of layers after another."""

    chunks: Sequence[ChunkRef]
    names: Sequence[str]
    """By chunk: the request that it was taken from."""
    encodings: Sequence[int]
    """By chunk: how its tiles are to be stored, by all ranks."""
    plan: ConversionPlan
    groups: list[range]
    raw: frozenset[bytes] = frozenset()
    """Keys of chunks whose tiles cannot be packed, by any rank."""
    taken_s: float = field(default_factory=time.monotonic)
    num_layers: int = 0
    """Layers that are computed. This and the next four belong to the thread that launches."""
    num_gathered: int = 0
    """Groups that have left the cache."""
    num_kept: int = field(init=False)
    """Chunks, from the first on, that there was room for."""
    rooms: list[tuple[range, Room]] = field(default_factory=list)
    """Where the layers of the next group go to: numbers of chunks, and their place."""
    parts: list[ConversionPlan] = field(default_factory=list)
    """Their parts of the plan."""
    states: list[PartState] = field(init=False)
    """By chunk. This and everything below belongs to the sender's thread."""
    targets: dict[int, SaveTarget] = field(default_factory=dict)
    """By number of the chunk: the open extents, one for each part that is FILLING."""
    is_open: bool = False
    """Its extents are reserved all at once: its layers come in groups."""
    in_place: bool = True
    """Whether extents can be filled where they lie; otherwise the bytes go through `Space.write`."""
    sums: npt.NDArray[np.uint64] | None = None
    """(chunks, layers, heads), as far as they have come."""
    is_shown: bool = False
    """Somebody awaits its layers: the checksums of each group are noted as soon as it is in."""
    shown: Counter[int] = field(default_factory=Counter)
    """By number of the chunk: layers whose checksums are noted already."""
    misfits: set[int] = field(default_factory=set)
    """Numbers of chunks of which a tile could not be packed."""
    doomed: dict[int, SaveTarget | None] = field(default_factory=dict)
    """Chunks that will be aborted when nothing is under way, and where they were going: nothing commits them now."""

    def __post_init__(self) -> None:
        self.num_kept = len(self.chunks)
        self.states = [PartState.TAKEN] * len(self.chunks)

    def add(self, others: Sequence[SaveJob]) -> None:
        """Take more chunks along, before the first layer."""
        every = [self, *others]
        self.plan = join_plans([job.plan for job in every])
        self.chunks = [chunk for job in every for chunk in job.chunks]
        self.names = [name for job in every for name in job.names]
        self.encodings = [encoding for job in every for encoding in job.encodings]
        self.raw = self.raw.union(*[job.raw for job in others])
        self.__post_init__()

    def doom_misfits(self) -> list[bytes]:
        """Store nothing more of chunks of which a tile could not be packed, and of those behind them, which nobody
        could find: of all that is not settled. The keys of the former."""
        found = [self.chunks[span].key for span in self.alive(sorted(self.misfits - self.doomed.keys()))]
        self.misfits.clear()
        lost = set(found)
        for span in self.alive(range(len(self.chunks))) if lost else ():
            chunk = self.chunks[span]
            if chunk.key in lost or chunk.parent in lost:
                lost.add(chunk.key)
                self.doomed.setdefault(span, self.targets.pop(span, None))
        return found

    @property
    def group(self) -> range:
        """The layers that leave the cache now."""
        return self.groups[self.num_gathered]

    def alive(self, spans: Iterable[int]) -> list[int]:
        """Those of some chunks of which more is to be stored."""
        return [span for span in spans if not self.states[span].is_final]

    def equal(self, spans: Sequence[int], shard: Shard) -> list[list[int]]:
        """Chunks of one size and encoding of which a rank writes the same layers."""
        groups: dict[tuple[int, int, int], list[int]] = {}
        for span in spans:
            chunk = self.chunks[span]
            kind = chunk.num_tokens, self.encodings[span], chunk.number % shard.replicas
            groups.setdefault(kind, []).append(span)
        return list(groups.values())

    def by_owned(self, spans: Sequence[int], shard: Shard) -> Iterator[tuple[Shard, slice, list[int]]]:
        """Chunks of which a rank writes the same layers: (the layers it writes, their slice of its own, the chunks)."""
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
    plan: ConversionPlan | None
    flat: Tensor
    added_up: Tensor | None
    """What the gather added up for the checksums."""
    room: Room
    gathered: DeviceEvent
    is_last: bool
    """Nothing more of this job follows."""
    sums: Tensor | None = None
    """On the device, once they are being computed. This and the next two belong to the mover."""
    sums_here: Tensor | None = None
    hashed: DeviceEvent | None = None
    fits_here: Tensor | None = None
    """By chunk, with the checksums: whether all its tiles could be packed. None where none is."""
    held: object = None
    """Device memory that must live until then."""


class Open(NamedTuple):
    """Reserve a job's extents: its layers will follow."""

    job: SaveJob
    first_layer: DeviceEvent
    """The end of its first one on the device."""


class Cut(NamedTuple):
    """Abort a job's chunks from this number on."""

    job: SaveJob
    num_kept: int


class SaveAbort(NamedTuple):
    """Chunks of which this rank brings nothing: the other ranks' parts of them are of no use."""

    tries: Sequence[tuple[str, ChunkRef]]
    """With the requests that they were to be saved for."""


class Resume(NamedTuple):
    """Chunks that will be saved: earlier aborts of them are not repeated any more."""

    chunks: Sequence[ChunkRef]


class PassOn(NamedTuple):
    """Give room back of which nothing will be stored."""

    room: Room
    unused: DeviceEvent
    """When nobody writes into it any more."""


class SaveBatch(NamedTuple):
    """Chunks on their way into their extents."""

    work: Gathered
    spans: range
    """Numbers of the job's chunks."""
    num_bytes: int
    """Of the ring."""
    commits: range
    """Chunks that are complete when this batch is in."""
    copied: DeviceEvent


Item = Gathered | Open | Cut | SaveAbort | Resume | PassOn
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
