"""A ticket: one process's right to fill one pending extent in place."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from headwater.errors import InvalidArgumentError, StoreClosedError
from headwater.kv.hashing import ChunkRef
from headwater.kv.spec import KVSpec
from headwater.kv.topology import Shard, Split
from headwater.stores.base import Status, Tiles
from headwater.stores.embedded.fill import Sums
from headwater.stores.embedded.index import Entry
from headwater.stores.embedded.reader import extent_tiles

if TYPE_CHECKING:
    from headwater.stores.embedded.writer import Writer


@lru_cache(maxsize=64)
def _check_place(layers: range, heads: range, parts: int, interleave: int, part: int) -> None:
    """Raise TopologyError where no rank holds that. A server commits the same place for every chunk."""
    Shard(layers, heads, Split(parts, interleave), part)


class Ticket:
    """This process's right to fill one pending extent. See `stores.base.Reservation`."""

    def __init__(
        self, writer: Writer, spec: KVSpec, chunk: ChunkRef, status: Status, entry: Entry | None, pid: int
    ) -> None:
        self.writer = writer
        self.spec = spec
        self.chunk = chunk
        self.status = status
        self.entry = entry
        self.is_open = entry is not None
        self.pid = pid

    @property
    def tiles(self) -> Tiles | None:
        """The extent's bytes as (layers, heads, tile bytes), to be filled in place; None where there is no extent."""
        core = self.writer.core
        if self.entry is None or not self._is_open or not core.data.mapped:
            return None
        with core.use():
            return extent_tiles(core, self.spec, self.entry)

    @property
    def _is_open(self) -> bool:
        # A forked child has published nothing, so its parent's tickets are not its own.
        return self.is_open and self.pid == os.getpid()

    def check_commit(
        self, layers: range, heads: range, part: int, sums: Sequence[int] | npt.NDArray[np.uint64]
    ) -> Commit | None:
        """What to commit; None where this process has no reservation. Raises InvalidArgumentError for a misfit."""
        if self.entry is None or self.pid != os.getpid():
            return None
        record = self.entry.record
        # A column of 64-bit numbers needs no look at each of them, and there may be hundreds a chunk.
        values: Sums = sums.ravel() if isinstance(sums, np.ndarray) and sums.dtype == np.uint64 else list(sums)
        _check_place(layers, heads, record.parts, max(record.interleave, 1), part)
        fits = layers.stop <= self.spec.num_layers and heads.stop <= self.spec.num_kv_heads
        in_range = not isinstance(values, list) or all(0 <= value < 1 << 64 for value in values)
        if not fits or len(values) != len(layers) * len(heads) or not in_range:
            raise InvalidArgumentError(
                f"{len(values)} checksums were given for {layers} × {heads} of {self.spec}; expected 64 bits for each"
            )
        return self, layers, heads, part, values

    def abort(self) -> None:
        """See `stores.base.Reservation.abort`."""
        with contextlib.suppress(StoreClosedError):
            if self._is_open:
                with self.writer.core.use():
                    self.writer.abort([self])

    def close(self) -> None:
        """See `stores.base.Reservation.close`."""
        close_all([self])


def close_all(tickets: Sequence[Ticket]) -> None:
    """Close tickets of one writer."""
    pid = os.getpid()  # the kernel's answer costs as much as the rest
    ids = [t.entry.record.id for t in tickets if t.entry is not None and t.is_open and t.pid == pid]
    for ticket in tickets:
        ticket.is_open = False
    if ids:
        tickets[0].writer.core.members.retract_all(ids)


Commit = tuple[Ticket, range, range, int, Sums]
