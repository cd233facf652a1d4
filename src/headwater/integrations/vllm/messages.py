"""Orders and reports in vLLM's own classes: it carries them between its processes with every step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from headwater.connector.orders import StepOrders, StepReport


@dataclass
class StepMetadata(KVConnectorMetadata):
    """One step, from the scheduler side to all workers."""

    orders: StepOrders = field(default_factory=StepOrders)
    adapters: dict[int, bytes] = field(default_factory=dict)
    """Named LoRA adapters of the step, by id: the state of the files that each one's name was made from."""


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    """One step, from the workers to the scheduler side."""

    report: StepReport
    homes: frozenset[str] = frozenset()
    """`Membership.home` of the workers, in the first report of each."""
    stale: frozenset[int] = frozenset()
    """Epochs in which weights were changed: their KV is neither saved nor loaded any more."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMetadata:
        """The reports of two ranks as one."""
        assert isinstance(other, WorkerMetadata)
        return WorkerMetadata(self.report.merged(other.report), self.homes | other.homes, self.stale | other.stale)


@dataclass
class WorkerGreeting(KVConnectorHandshakeMetadata):
    """What a worker says of itself once, when its cache is there."""

    pool: str = field(repr=False)
    """As the options name it."""
    declined: str = ""
    home: str = ""
    """`Membership.home` of a worker that takes part."""
