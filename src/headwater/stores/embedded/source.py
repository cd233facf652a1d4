"""Filling extents of another store with chunks of this one, as they are stored: the way up from a slower tier.

Bytes are copied straight into the extents and not verified; their checksums come along, for whoever uses them. Several
chunks are copied at a time: one thread does not use what the page cache can give.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import numpy as np

from headwater.kv.encoding import can_decode, refuse
from headwater.kv.hashing import ChunkRef
from headwater.kv.spec import KVSpec
from headwater.kv.topology import Split
from headwater.stores.base import Filling, Form, RootRef, Status, Tiles, check_extents
from headwater.stores.embedded.core import Core
from headwater.stores.embedded.index import Entry
from headwater.stores.embedded.layout import COMPLETE
from headwater.stores.embedded.reader import Reader
from headwater.stores.workers import run_in_threads

_THREADS = 4


class ExtentSource:
    """The part of an embedded store that fills others' extents. Takes no lock."""

    def __init__(self, core: Core, reader: Reader) -> None:
        self._core = core
        self._reader = reader

    def forms(self, chunks: Sequence[ChunkRef]) -> list[Form | None]:
        """See `stores.base.ChunkSource.forms`."""
        return [self._form(self._core.index.find(chunk.key)) for chunk in chunks]

    def _form(self, entry: Entry | None) -> Form | None:
        if entry is None or entry.state != COMPLETE:
            return None
        record = entry.record
        if not can_decode(record.encoding):
            refuse(record.encoding, self._core.name)
            return None
        return Form(Split(record.parts, record.interleave), record.encoding)

    def fill(
        self, root: RootRef, chunks: Sequence[ChunkRef], extents: Sequence[Tiles], deadline: float
    ) -> list[Filling]:
        """See `stores.base.Source.fill`."""
        check_extents(chunks, extents)
        fillings = [Filling(Status.MISS)] * len(chunks)

        def work(i: int) -> None:
            fillings[i] = self._fill(root.space.spec, chunks[i], extents[i], deadline)

        run_in_threads((partial(work, i) for i in range(len(chunks))), min(_THREADS, len(chunks)))
        return fillings

    def _fill(self, spec: KVSpec, chunk: ChunkRef, extent: Tiles, deadline: float) -> Filling:
        if time.monotonic() >= deadline:
            return Filling(Status.TIMEOUT)
        entry = self._core.index.find(chunk.key)
        lease = self._reader.lease_entry(entry) if entry is not None and entry.state == COMPLETE else None
        if entry is None or lease is None:
            return Filling(Status.MISS)
        record = entry.record
        try:
            found = self._reader.peek(spec, chunk, entry)
            if found is None or record.length != extent.nbytes:
                return Filling(Status.MISS)
            if not self._core.data.load(record.offset, [extent.reshape(-1)], deadline):
                return Filling(Status.TIMEOUT)
        except (OSError, IndexError):  # a segment is gone or short
            self._reader.blame(entry, deadline)
            return Filling(Status.MISS)
        finally:
            lease.release()
        self._core.index.touch(entry.cell, time.time_ns())
        form = Form(Split(record.parts, record.interleave), record.encoding)
        return Filling(Status.OK, np.array(found.sums, np.uint64), form)
