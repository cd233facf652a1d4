"""Chunks of an embedded store for those who copy them elsewhere: found by key alone, with all that a copy needs."""

from __future__ import annotations

import json
import time
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headwater.errors import SpecError
from headwater.kv.encoding import RAW
from headwater.kv.hashing import ChunkRef
from headwater.kv.spec import KVSpec
from headwater.kv.topology import whole_shard
from headwater.stores.base import Lease, Piece, RootRef, SpaceRef, Status, Tiles
from headwater.stores.embedded.core import Core
from headwater.stores.embedded.index import Entry
from headwater.stores.embedded.layout import CHUNK, COMPLETE, PENDING, ROOT, SPACE
from headwater.stores.embedded.reader import Reader, extent_tiles

_DEEPEST = 1 << 20
_LOOK_EVERY_S = 0.02


class Exported(NamedTuple):
    """A complete chunk as it is stored. Tiles with checksums are not verified: whoever copies them takes both along."""

    root: RootRef
    chunk: ChunkRef
    tiles: Tiles
    sums: npt.NDArray[np.uint64] | None
    """In [layer][head] order; None where the tiles were verified on the way and have none of their own."""
    lease: Lease | None
    is_held: bool = False
    """Whether anybody has a lease on this very chunk, or it is pinned."""
    encoding: int = RAW
    """Of the tiles."""
    record_id: int = 0
    """Which copy of the chunk it is."""
    is_fetched: bool = False
    """Whether it came from a lower tier: then nobody may have verified it yet."""

    def release(self) -> None:
        """The copy has ended. Idempotent."""
        if self.lease is not None:
            self.lease.release()


class Exporter:
    """Finds and opens chunks for copying. What it learns about roots it remembers."""

    def __init__(self, core: Core, reader: Reader) -> None:
        self._core = core
        self._reader = reader
        self._roots: dict[int, RootRef] = {}
        self._published: set[int] = set()
        self._looked_at = 0.0

    def locate(self, key: bytes) -> tuple[RootRef, ChunkRef] | None:
        """The names of a complete chunk; None where it is not here (any more). Chunks before it may still be pending:
        a rank of a context-parallel server completes some before its peers have filled those."""
        entry = self._core.index.find(key)
        return None if entry is None else self._names(entry)

    def _names(self, entry: Entry) -> tuple[RootRef, ChunkRef] | None:
        index = self._core.index
        if entry.state != COMPLETE or entry.record.kind != CHUNK:
            return None
        parent_key, above = b"", entry
        for _ in range(_DEEPEST):
            parent = index.entry(above.record.parent_cell)
            if parent is None or parent.record.id != above.record.parent_id:
                return None
            if parent.state not in (PENDING, COMPLETE):
                return None
            parent_key = parent_key or parent.record.key
            if parent.record.kind == ROOT:
                root = self._roots.get(parent.record.id) or self._describe(parent)
                if root is None:
                    return None
                r = entry.record
                return root, ChunkRef(r.key, parent_key, r.number, r.first_token, r.num_tokens, root.key)
            above = parent
        return None

    def _describe(self, entry: Entry) -> RootRef | None:
        index = self._core.index
        space = index.entry(entry.record.parent_cell)
        if space is None or space.record.id != entry.record.parent_id or space.record.kind != SPACE:
            return None
        described, payload = index.payload(space), index.payload(entry)
        try:
            spec = KVSpec.from_canonical(json.loads(described or b"")["spec"])
        except (ValueError, KeyError, TypeError, SpecError):
            return None
        if described is None or payload is None:
            return None
        ref = SpaceRef(spec, entry.record.chunk_tokens, space.record.key, described)
        root = self._roots[entry.record.id] = RootRef(ref, entry.record.key, payload)
        return root

    def export(self, key: bytes, deadline: float, *, in_place: bool) -> Exported | None:
        """Open one chunk for copying: where it lies, under a lease, if it is mapped and that is wanted; else as a copy
        that was verified. Only who carries the checksums along may copy in place: whoever makes new ones would make
        damage look right."""
        entry = self._core.index.find(key)
        names = None if entry is None else self._names(entry)
        if entry is None or names is None:
            return None
        root, chunk = names
        spec, shard = root.space.spec, whole_shard(root.space.spec)
        is_held = self._is_held(entry)
        lease = self._reader.lease_entry(entry)
        found = self._reader.load(spec, chunk) if lease is not None else None
        if found is None:
            if lease is not None:
                lease.release()
            return None
        if found.exportable and in_place:
            tiles, encoding = extent_tiles(self._core, spec, found.entry), found.entry.record.encoding
            sums, record = np.array(found.sums, np.uint64), found.entry.record
            return Exported(root, chunk, tiles, sums, lease, is_held, encoding, record.id, record.is_exclusive)
        record = found.entry.record
        encoding = record.encoding if record.parts == 1 else RAW
        try:
            if encoding != RAW:
                status, tiles = self._reader.read_stored(spec, found, deadline)
            else:
                tiles = np.empty(shard.local_shape(spec, chunk.first_token, chunk.num_tokens), np.uint8)
                status = self._reader.read(root, [Piece(chunk, shard, tiles)], deadline)[0]
        finally:
            if lease is not None:
                lease.release()
        return Exported(root, chunk, tiles, None, None, is_held, encoding) if status == Status.OK else None

    def _is_held(self, entry: Entry) -> bool:
        """Whether anybody holds a chunk. Who holds what is looked up once for many."""
        now = time.monotonic()
        if now >= self._looked_at + _LOOK_EVERY_S:
            self._published, self._looked_at = self._core.members.published(), now
        return bool(self._core.index.counts(entry.cell)[1]) or entry.record.id in self._published
