"""The states of one rank's part of a chunk on its way into the pool: one table for every mover and every load.

    TAKEN ──reserve──▶ FILLING ──commit──▶ STORED
      │                   │
      ├──▶ SKIPPED        └──▶ ABORTED        (SKIPPED, STORED and ABORTED are final)
      └──▶ ABORTED

The index has the other half of the table (`stores.embedded.layout`): a record is PENDING while some rank's part is
FILLING, COMPLETE when every part is STORED, and in LIMBO once it was aborted while somebody still touches its bytes.
"""

from __future__ import annotations

from enum import IntEnum


class PartState(IntEnum):
    """What one rank has done with its part of a chunk."""

    TAKEN = 0  # it leaves the cache now, or lies in staging; no extent is reserved
    FILLING = 1  # its extent is reserved and open
    STORED = 2  # committed
    SKIPPED = 3  # nothing to do: the pool has it, or another server stores it
    ABORTED = 4  # it will not be stored; the chunk was aborted for the whole server

    @property
    def is_final(self) -> bool:
        """Whether nothing more happens to this part."""
        return self >= PartState.STORED
