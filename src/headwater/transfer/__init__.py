"""How bytes move: from an engine's paged cache into the pool's extents and back.

`view` says where a cache lies, `convert` turns it into extent order and back, `verify` proves what arrived and `copy`
carries it between the device and mapped memory. Which chunks move, and when, is decided by callers.

`view_tensors` describes a paged cache of torch tensors; a `Saver` and a `Loader` move its blocks without an engine
(examples/library_torch.py). The names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwater.lazy import names_on_demand

if TYPE_CHECKING:
    from headwater.transfer.load import Loader
    from headwater.transfer.save import Saver
    from headwater.transfer.view import PagedView, PlaneView, view_tensors

_HOMES = {
    "headwater.transfer.load": "Loader",
    "headwater.transfer.save": "Saver",
    "headwater.transfer.view": "PagedView PlaneView view_tensors",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = ["Loader", "PagedView", "PlaneView", "Saver", "view_tensors"]


__getattr__ = names_on_demand(__name__, _HOME_OF)


def __dir__() -> list[str]:
    return __all__
