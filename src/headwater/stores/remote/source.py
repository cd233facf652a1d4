"""Filling extents of a first tier with chunks of a remote store, as they are stored.

Pieces arrive where they belong in the extents and are not verified; the checksums of their manifests come along. What
the backend's client promises holds for the extents too: nothing is written to them after a call has returned.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from headwater.kv.encoding import ENCODINGS, can_decode, refuse
from headwater.kv.hashing import ChunkRef
from headwater.kv.spec import KVSpec
from headwater.kv.topology import WHOLE
from headwater.locks import ForkSafeLock
from headwater.stores.base import Filling, Form, Status, Tiles, check_extents
from headwater.stores.remote.base import ObjectClient, ObjectRange
from headwater.stores.remote.guard import Guard
from headwater.stores.remote.manifest import Manifest, Names
from headwater.stores.remote.memory import Memory
from headwater.stores.remote.reader import RemoteReader


class _Order(NamedTuple):
    """Chunks to be brought, and what has become of them."""

    spec: KVSpec
    chunks: Sequence[ChunkRef]
    extents: Sequence[Tiles]
    statuses: list[Status]
    used: dict[int, Manifest]
    """By chunk: the manifest that its bytes were read by."""
    misfits: set[int]
    """Chunks whose extents are not of their stored length: reserved for another encoding."""


class RemoteSource:
    """The part of a remote store that fills extents."""

    def __init__(
        self, client: ObjectClient, names: Names, guard: Guard, memory: Memory, reader: RemoteReader, lookup_s: float
    ) -> None:
        self._client = client
        self._names = names
        self._guard = guard
        self._memory = memory
        self._reader = reader
        self._lookup_s = lookup_s
        self._counting = ForkSafeLock()

    def forms(self, chunks: Sequence[ChunkRef]) -> list[Form | None]:
        """See `stores.base.ChunkSource.forms`. One question for those whose manifests are not known; it makes them
        known."""
        keys = [chunk.key for chunk in chunks]
        end = time.monotonic() + self._lookup_s
        work = partial(self._reader.manifests, keys, self._reader.known(keys), end)
        found = self._guard.run("look-up", work, end) or {}
        return [self._form(found.get(key)) for key in keys]

    def _form(self, manifest: Manifest | None) -> Form | None:
        if manifest is None:
            return None
        if not can_decode(manifest.encoding):
            refuse(manifest.encoding, self._guard.name)
            return None
        return Form(WHOLE, manifest.encoding)

    def fill(
        self, spec: KVSpec, chunks: Sequence[ChunkRef], extents: Sequence[Tiles], deadline: float
    ) -> list[Filling]:
        """See `stores.base.Source.fill`. Two round trips, one where the manifests are known."""
        check_extents(chunks, extents)
        order = _Order(spec, chunks, extents, [Status.MISS] * len(chunks), {}, set())
        undecided = self._reader.attempt(partial(self._attempt, order, deadline), order.statuses, deadline)
        keys = [chunk.key for chunk in chunks]
        self._reader.judge(keys, order.statuses, {*undecided, *order.misfits}, ENCODINGS)
        self._reader.count([extent.nbytes for extent in extents], order.statuses)
        return [
            Filling(status, order.used[i].sums, Form(WHOLE, order.used[i].encoding)) if not status else Filling(status)
            for i, status in enumerate(order.statuses)
        ]

    def _attempt(self, order: _Order, deadline: float, wanted: Sequence[int], use_memory: bool) -> list[int]:
        """One attempt at what is wanted. See `RemoteReader.attempt`."""
        chunks, statuses = order.chunks, order.statuses
        keys = [chunks[i].key for i in wanted]
        known = self._reader.known(keys) if use_memory else set[bytes]()
        for i in wanted:
            statuses[i] = Status.MISS  # until all of it is here
        manifests = self._reader.manifests(keys, known, deadline)
        spans, owners = list[ObjectRange](), list[int]()
        for i in wanted:
            manifest = manifests.get(chunks[i].key)
            if manifest is not None and self._suits(order, i, manifest):
                order.used[i] = manifest
                for number, layers in enumerate(manifest.pieces):
                    target = order.extents[i][layers.start : layers.stop].reshape(-1)
                    spans.append(ObjectRange(self._names.piece(manifest, number), 0, target.nbytes, [target], True))
                    owners.append(i)
        to_come = Counter(owners)

        def landed(number: int, targets: range) -> None:
            if targets:  # each span has one
                with self._counting:
                    to_come[owners[number]] -= 1

        try:
            if spans:
                self._client.read(spans, deadline, landed)
        finally:  # what has come before an error is here
            for i, left in to_come.items():
                statuses[i] = Status.MISS if left else Status.OK
        again = [i for i in wanted if statuses[i] != Status.OK and chunks[i].key in known]
        self._memory.forget({chunks[i].key for i in again})
        return again

    def _suits(self, order: _Order, i: int, manifest: Manifest) -> bool:
        """Whether a manifest describes what is asked for, and its tiles go into the extent."""
        if manifest.encoding not in ENCODINGS:
            refuse(manifest.encoding, self._guard.name)
            return False
        if manifest.num_bytes != order.extents[i].nbytes:
            order.misfits.add(i)
            return False
        return manifest.fits(order.chunks[i], order.spec)
