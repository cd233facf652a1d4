"""How an engine plugs into the pool: a scheduler side that knows requests, a worker side that knows memory.

Between them there is one protocol for every engine: `StepOrders` go down with each step, a `StepReport` comes up. The
reference engine calls both sides directly; adapters for other engines translate and decide nothing.

An engine author needs the names of `__all__` and nothing else; docs/own-connector.md walks through an adapter. They are
imported on first use, so that a process which only carries orders loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwater.lazy import names_on_demand

if TYPE_CHECKING:
    from headwater.connector.config import ConnectorConfig
    from headwater.connector.finder import LoadPlan
    from headwater.connector.orders import ASYNC, BLOCKING, LAYERWISE, StepOrders, StepReport
    from headwater.connector.scheduler import LoadEnd, SchedulerSide
    from headwater.connector.stats import TransferStats
    from headwater.connector.tracker import Inputs, Scheduled
    from headwater.connector.wire import orders_from_wire, orders_to_wire, report_from_wire, report_to_wire
    from headwater.connector.worker import WorkerSide
    from headwater.transfer.view import PagedView, PlaneView, view_tensors

_HOMES = {
    "headwater.connector.config": "ConnectorConfig",
    "headwater.connector.finder": "LoadPlan",
    "headwater.connector.orders": "ASYNC BLOCKING LAYERWISE StepOrders StepReport",
    "headwater.connector.scheduler": "LoadEnd SchedulerSide",
    "headwater.connector.stats": "TransferStats",
    "headwater.connector.tracker": "Inputs Scheduled",
    "headwater.connector.wire": "orders_from_wire orders_to_wire report_from_wire report_to_wire",
    "headwater.connector.worker": "WorkerSide",
    "headwater.transfer.view": "PagedView PlaneView view_tensors",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = [
    "ASYNC",
    "BLOCKING",
    "ConnectorConfig",
    "Inputs",
    "LAYERWISE",
    "LoadEnd",
    "LoadPlan",
    "PagedView",
    "PlaneView",
    "Scheduled",
    "SchedulerSide",
    "StepOrders",
    "StepReport",
    "TransferStats",
    "WorkerSide",
    "orders_from_wire",
    "orders_to_wire",
    "report_from_wire",
    "report_to_wire",
    "view_tensors",
]


__getattr__ = names_on_demand(__name__, _HOME_OF)


def __dir__() -> list[str]:
    return __all__
