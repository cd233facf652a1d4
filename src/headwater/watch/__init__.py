"""A pool for people who look: how full it is, what is in it, who uses it and what happens, again and again.

`Watcher.look` is one look, as plain data for JSON; `PoolHistory` keeps what a chart needs. The terminal and the
page that show it are elsewhere. Looking makes no pool, changes nothing in one beyond what every process
does that opens it, and takes a twentieth of a core at most.
"""

from headwater.watch.history import PoolHistory
from headwater.watch.watcher import Look, Watcher

__all__ = ["Look", "PoolHistory", "Watcher"]
