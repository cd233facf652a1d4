"""The protocol between an engine and the pool: orders down with every step, a report back up. Plain data.

The scheduler side makes `StepOrders`, every worker side executes them and answers with a `StepReport`. An engine may
carry both in any way it has; `wire` gives them a bounded form that is never unpickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headwater.kv.hashing import ChunkRef
from headwater.pool.wait import Wait

ASYNC, LAYERWISE, BLOCKING = ORDER_MODES = ("async", "layerwise", "blocking")
"""How one load is waited for."""


class JobGroup(NamedTuple):
    """Consecutive chunks of one group of layers, and the request's blocks of that group from its first token on."""

    chunks: tuple[ChunkRef, ...]
    block_ids: npt.NDArray[np.int32]


@dataclass(frozen=True)
class TransferJob:
    """What is moved for one request: one entry per group of layers, and today there is one group."""

    request_id: str
    groups: tuple[JobGroup, ...]

    @classmethod
    def of(cls, request_id: str, chunks: Sequence[ChunkRef], block_ids: npt.NDArray[np.int32]) -> TransferJob:
        """The job of a model whose layers form one group."""
        return cls(request_id, (JobGroup(tuple(chunks), block_ids),))

    @property
    def chunks(self) -> tuple[ChunkRef, ...]:
        """The chunks of the only group."""
        return self.groups[0].chunks

    @property
    def block_ids(self) -> npt.NDArray[np.int32]:
        """The blocks of the only group."""
        return self.groups[0].block_ids


@dataclass(frozen=True)
class SaveOrder:
    """Chunks to save, and whose they are."""

    job: TransferJob
    tenant: bytes = b""
    adapter: bytes = b""
    raw: tuple[int, ...] = ()
    """Which of the chunks cannot be packed: a rank has tried. All ranks store a chunk in one form."""


@dataclass(frozen=True)
class LoadOrder:
    """Chunks to load. The KV of the first `num_local` tokens is there already."""

    job: TransferJob
    num_local: int = 0
    tenant: bytes = b""
    adapter: bytes = b""
    mode: str = ASYNC
    wait: Wait | None = None
    """How long chunks are followed that are still being filled; None: they are all there. Only for ASYNC."""

    def failed_blocks(self, num_chunks: int, block_size: int, dummy_block: int) -> set[int]:
        """The blocks that do not hold what they should when only the first `num_chunks` chunks are in place."""
        if num_chunks >= len(self.job.chunks):
            return set()
        first = max(self.num_local, self.job.chunks[num_chunks].first_token)
        return set(self.job.block_ids[first // block_size :].tolist()) - {dummy_block}


@dataclass(frozen=True)
class PushOrder:
    """Chunks of a request that go to another host's pool as well, as soon as this host's has them."""

    request_id: str
    transfer: str
    """Its id, in hex."""
    peer: str
    """HOST:PORT of the receiver."""
    chunks: tuple[ChunkRef, ...]
    tenant: bytes = b""
    adapter: bytes = b""


class FlushOrder(NamedTuple):
    """All chunks of a transfer are ordered: send the rest, and report how many tokens are with the peer."""

    request_id: str
    transfer: str
    deadline_s: float
    """Tokens that are not with the peer by then are dropped; 0: the request is gone, drop what is left."""


@dataclass(frozen=True)
class StepOrders:
    """One step, from the scheduler side to every worker side."""

    epoch: int | None = None
    """The state of the weights whose KV is meant; None: as before."""
    before: tuple[SaveOrder, ...] = ()
    """Saves to be taken before the step writes anything: their blocks may belong to others from then on."""
    during: tuple[SaveOrder, ...] = ()
    """Saves of what the step itself computes, to be taken layer by layer or at its end."""
    loads: tuple[LoadOrder, ...] = ()
    cancelled: tuple[str, ...] = ()
    """Requests whose load nobody waits for any more."""
    wrong_blocks: frozenset[int] = frozenset()
    """Blocks that the step takes for computed and that are not: to be reported like those of a failed load."""
    is_idle: bool = False
    """Nothing is computed in this step, so that it may wait for a load."""
    pushes: tuple[PushOrder, ...] = ()
    """Chunks that other hosts get as well; they are among the saves of this step or of later ones, or saved already."""
    flushes: tuple[FlushOrder, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether a worker side has nothing to do."""
        saves_or_loads = self.before or self.during or self.loads or self.cancelled or self.wrong_blocks
        return not (saves_or_loads or self.pushes or self.flushes)


@dataclass(frozen=True)
class StepReport:
    """What happened since the last report, from one worker side, or from several after `merged`."""

    ended: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Loads that have ended: by request, how many chunks each rank that is done has in place."""
    unsaved: dict[str, int] = field(default_factory=dict)
    """By request: the first token whose chunk was not saved, for want of room in staging or in the pool."""
    declined: str = ""
    """Why a worker side does not take part, if one does not."""
    pushed: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Flushes that are over: by request, how many tokens from its first on each rank that is done has sent."""

    misfits: tuple[bytes, ...] = ()
    """Keys of chunks of which some tile could not be packed, and which were not saved therefore."""

    def __bool__(self) -> bool:
        return bool(self.ended or self.unsaved or self.declined or self.pushed or self.misfits)

    def merged(self, other: StepReport) -> StepReport:
        """Two reports as one."""
        ended, unsaved, pushed = dict(self.ended), dict(self.unsaved), dict(self.pushed)
        for request_id, counts in other.ended.items():
            ended[request_id] = ended.get(request_id, ()) + counts
        for request_id, counts in other.pushed.items():
            pushed[request_id] = pushed.get(request_id, ()) + counts
        for request_id, first_token in other.unsaved.items():
            unsaved[request_id] = min(first_token, unsaved.get(request_id, first_token))
        return StepReport(ended, unsaved, self.declined or other.declined, pushed, self.misfits + other.misfits)
