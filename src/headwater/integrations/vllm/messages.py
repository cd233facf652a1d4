"""What the two sides of the connector tell each other in every step. vLLM carries it between its own processes."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from headwater.connector.jobs import Job


@dataclass(frozen=True)
class SaveOrder:
    """Chunks to save, and whose they are."""

    job: Job
    tenant: bytes
    adapter: bytes


@dataclass(frozen=True)
class LoadOrder:
    """Chunks to load. Tokens before `num_local` are there already."""

    job: Job
    num_local: int
    tenant: bytes = b""
    adapter: bytes = b""


@dataclass
class StepOrders(KVConnectorMetadata):
    """One step, from the scheduler's side to all workers."""

    epoch: int | None = None
    """None: as before."""
    saves: list[SaveOrder] = field(default_factory=list)
    """To be taken before the step computes anything: their blocks may be others' from then on."""
    loads: list[LoadOrder] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    is_idle: bool = False
    """Nothing is computed in this step."""
    wrong_blocks: frozenset[int] = frozenset()
    """Blocks that the step takes for computed and that are not: to be reported like those of a failed load."""


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """One step, from the workers to the scheduler's side."""

    num_chunks: dict[str, list[int]] = field(default_factory=dict)
    """Loads that ended: for each rank that is done, how many chunks are in place."""
    declined: str = ""
    """Why a worker does not take part, if one does not."""
    homes: set[str] = field(default_factory=set)
    """`Pool.home` of the workers, in the first report of each."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReport:
        """The reports of two ranks as one."""
        assert isinstance(other, StepReport)
        for request_id, counts in other.num_chunks.items():
            self.num_chunks.setdefault(request_id, []).extend(counts)
        self.declined = self.declined or other.declined
        self.homes |= other.homes
        return self


@dataclass
class Greeting(KVConnectorHandshakeMetadata):
    """What a worker says of itself once, when its cache is there."""

    pool: str
    """As the options name it."""
    declined: str = ""
    home: str = ""
    """`Pool.home` of a worker that takes part."""
