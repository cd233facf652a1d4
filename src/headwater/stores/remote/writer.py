"""Writing to a remote store: complete chunks, pieces first and then the manifests that make them visible."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headwater.kv.encoding import RAW
from headwater.kv.hashing import ChunkRef
from headwater.stores.base import RootRef, Status, Tiles
from headwater.stores.events import EventKind
from headwater.stores.remote.announce import Announcer, LogEvent
from headwater.stores.remote.base import NewManifest, NewObject, ObjectClient
from headwater.stores.remote.guard import Guard
from headwater.stores.remote.manifest import GENERATION_BYTES, Manifest, Names
from headwater.stores.remote.memory import Memory
from headwater.stores.remote.plan import is_right, layers_per_piece, tile_sums


class WholeChunk(NamedTuple):
    """A complete chunk to be stored: its tiles as (layers, heads, tile bytes), and their checksums, if known."""

    root: RootRef
    chunk: ChunkRef
    tiles: Tiles
    sums: npt.NDArray[np.uint64] | None
    is_held: bool = False
    """Whether an engine holds it, by a lease or a pin."""
    encoding: int = RAW
    """Of the tiles; `sums` are over the bytes as they are here."""
    is_doubtful: bool = False
    """Whether tiles are to be compared with `sums`."""

    @property
    def raw_bytes(self) -> int:
        """What its tiles take when they are raw."""
        return self.root.space.spec.extent_bytes(self.chunk.num_tokens)


class _Hashing:
    """Fills in checksums that nobody knows yet, in a thread, until the end of the `with`."""

    def __init__(self, items: Sequence[tuple[Manifest, WholeChunk]]) -> None:
        self._items = [item for item in items if item[1].sums is None]
        self._thread = threading.Thread(target=self._run, name="headwater-hashing", daemon=True)

    def _run(self) -> None:
        for manifest, item in self._items:
            manifest.sums[:] = tile_sums(item.tiles)

    def __enter__(self) -> None:
        if self._items:
            self._thread.start()

    def __exit__(self, *exc: object) -> None:
        if self._items:
            self._thread.join()


class RemoteWriter:
    """The writing half of a remote store."""

    def __init__(
        self,
        client: ObjectClient,
        names: Names,
        guard: Guard,
        memory: Memory,
        announcer: Announcer,
        piece_bytes: int,
    ) -> None:
        self._client = client
        self._names = names
        self._announcer = announcer
        self._guard = guard
        self._memory = memory
        self._piece_bytes = piece_bytes
        self._described: set[bytes] = set()

    def store(self, chunks: Sequence[WholeChunk], deadline: float, *, ask: bool = True) -> list[Status]:
        """Store complete chunks, unless they are there, which need not be asked if it just was. TIMEOUT where the
        backend was too slow, BUSY where it could not be used, DAMAGED where doubtful tiles did not verify.

        Never tried twice here: whoever has a queue tries again when the breaker is closed.
        """
        stored = self._guard.run("write", lambda: self._store(chunks, ask, deadline), deadline, retry=False)
        if stored is None:
            return [Status.TIMEOUT if time.monotonic() >= deadline else Status.BUSY] * len(chunks)
        return stored

    def _store(self, chunks: Sequence[WholeChunk], ask: bool, deadline: float) -> list[Status]:
        there = [False] * len(chunks)
        if ask:
            there = self._client.survey([self._names.manifest(c.chunk.key) for c in chunks], (), deadline).present
        statuses = [Status.EXISTS if present else Status.OK for present in there]
        new = [i for i, present in enumerate(there) if not present]
        if not new:
            return statuses
        manifests = {i: self._manifest(chunks[i]) for i in new}
        self._write(chunks, manifests, statuses, deadline)
        good = [i for i in new if statuses[i] == Status.OK]
        if good:
            told = [LogEvent.of(EventKind.STORED, manifests[i]) for i in good]
            notice = self._announcer.notice(told)
            entries = zip(good, notice.values, strict=True)
            manifested = [self._announce(manifests[i], chunks[i].is_held, entry) for i, entry in entries]
            roots = {chunks[i].root.key: chunks[i].root for i in good if chunks[i].root.key not in self._described}
            described = [NewManifest(self._names.root(key), _description(root), None, 0) for key, root in roots.items()]
            published = self._client.publish([*described, *manifested], deadline, notice.log)
            said, published = published[: len(described)], published[len(described) :]
            self._described |= {key for key, status in zip(roots, said, strict=True) if status.stored}
            for i, status in zip(good, published, strict=True):
                statuses[i] = status
            self._announcer.happened([told[k] for k, status in enumerate(published) if status == Status.OK])
        orphaned = [name for i in new if statuses[i] != Status.OK for name in self._names.all_of(manifests[i])[1:]]
        if orphaned:
            self._client.remove(orphaned, deadline)
        self._memory.forget([chunks[i].chunk.key for i in new])
        stored = [manifests[i].num_bytes for i in new if statuses[i] == Status.OK]
        raw = [chunks[i].raw_bytes for i in new if statuses[i] == Status.OK]
        self._guard.count(
            stored=len(stored),
            stored_bytes=sum(stored),
            stored_raw_bytes=sum(raw),
            full=statuses.count(Status.FULL),
        )
        return statuses

    def _write(
        self, chunks: Sequence[WholeChunk], manifests: dict[int, Manifest], statuses: list[Status], deadline: float
    ) -> None:
        """All pieces, in one call. Doubtful tiles are verified after they were sent, where they lie: a bit that flips
        before they are on their way is then seen, and their manifest is not published."""
        objects = [self._objects(chunks[i], manifest) for i, manifest in manifests.items()]
        with _Hashing([(manifest, chunks[i]) for i, manifest in manifests.items()]):  # while bytes are on their way
            outcome = iter(self._client.write([item for items in objects for item in items], deadline))
        for i, items in zip(manifests, objects, strict=True):
            statuses[i] = max([next(outcome) for _ in items])
            if statuses[i] == Status.OK and chunks[i].is_doubtful and not is_right(chunks[i].tiles, chunks[i].sums):
                statuses[i] = Status.DAMAGED

    def forget_descriptions(self) -> None:
        """Say again what each root is: the store was emptied."""
        self._described.clear()

    def _manifest(self, item: WholeChunk) -> Manifest:
        spec, chunk_tokens = item.root.space.spec, item.root.space.chunk_tokens
        step = layers_per_piece(spec, chunk_tokens, self._piece_bytes, item.encoding)
        generation = os.urandom(GENERATION_BYTES)
        sums = np.zeros(spec.num_tiles, np.uint64) if item.sums is None else item.sums.reshape(-1)
        return Manifest.of(item.chunk, spec, chunk_tokens, step, generation, time.time_ns(), sums, item.encoding)

    def _objects(self, item: WholeChunk, manifest: Manifest) -> list[NewObject]:
        objects = []
        for number, layers in enumerate(manifest.pieces):
            part = item.tiles[layers.start : layers.stop]
            whole = part if part.flags.c_contiguous else np.ascontiguousarray(part)
            objects.append(NewObject(self._names.piece(manifest, number), [whole.reshape(-1)], item.is_held))
        return objects

    def _announce(self, manifest: Manifest, is_held: bool, entry: bytes) -> NewManifest:
        is_tail = manifest.num_tokens < manifest.chunk_tokens
        tails = self._names.tails(manifest.parent) if is_tail else None
        name = self._names.manifest(manifest.key)
        return NewManifest(name, manifest.encode(), tails, manifest.num_tokens, is_held, entry)


def _description(root: RootRef) -> bytes:
    """What a root is, for listings."""
    return json.dumps([json.loads(root.space.payload), json.loads(root.payload)]).encode()
