"""Look-ups across processes, for stores that live in one (`memory://`): a worker answers, a scheduler asks.

The worker's `LookupServer` owns the space; `LookupClient` offers what the scheduler half needs of one (`Lookup`). They
speak the frames of `wire` over a ZeroMQ socket in a directory that only this user can enter. Tiles never pass here.
"""

from __future__ import annotations

from headwater.connector.lookup.base import Lookup
from headwater.connector.lookup.client import LookupClient
from headwater.connector.lookup.server import LookupServer

__all__ = ["Lookup", "LookupClient", "LookupServer"]
