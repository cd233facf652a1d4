"""Flipping stored bits, in each kind of tier, and reading what was flipped: every flip must be noticed.

The chunks that are flipped belong to nobody else, so that it is known which flip a bad answer is about.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from headwater.bench.fleet_client import CHUNK_TOKENS, DEADLINE_S, SPEC, local_tiles
from headwater.errors import StoreError
from headwater.kv.encoding import PACKED
from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import whole_shard
from headwater.pool import Space
from headwater.stores.base import Piece, RootRef, Status
from headwater.stores.embedded.store import EmbeddedStore
from headwater.stores.encode import pack_piece
from headwater.stores.remote.store import RemoteStore

WHOLE = whole_shard(SPEC)
_FIRST = 1 << 31
"""Prompts of flipped chunks begin with tokens from here on, which no client uses."""
_PAUSE_S = 0.005
_PATIENCE_S = 30.0


class Flipper:
    """Writes a chunk to one tier, flips one of its bits there, and reads it through the whole pool."""

    def __init__(self, space: Space, root: RootRef, stores: dict[str, Any], seed: int) -> None:
        self._space = space
        self._root = root
        self._stores = stores
        self._rng = np.random.default_rng(seed)
        self._next = _FIRST
        self._flipped_at = time.monotonic()
        self.injected = dict.fromkeys(stores, 0)
        self.detected = dict.fromkeys(stores, 0)
        self.refused: dict[str, int] = {}
        """Writes that found no room, by status: nothing was flipped then."""
        self.wrong_bytes = 0
        self.packed = 0
        """Flips in packed chunks."""

    @property
    def flipped(self) -> int:
        """Flips so far."""
        return sum(self.injected.values())

    @property
    def progresses(self) -> bool:
        """Whether the store has lately taken something that could be flipped."""
        return time.monotonic() - self._flipped_at < _PATIENCE_S

    def flip_next(self) -> None:
        """One bit in the tier that has had the fewest."""
        self.flip(min(self.injected, key=lambda name: self.injected[name]))

    def flip(self, name: str) -> None:
        """One bit in one tier. Where the store has no room just now, nothing is flipped."""
        store = self._stores[name]
        chunk = self._space.keys(np.full(CHUNK_TOKENS, self._next, np.uint32)).ref(0)
        self._next += 1
        truth = local_tiles(chunk, WHOLE)
        piece = Piece(chunk, WHOLE, truth)
        if self._next % 2:
            piece = pack_piece(SPEC, piece)
        status = store.write(self._root, [piece], DEADLINE_S)[0]
        if status != Status.OK:
            self.refused[status.name] = self.refused.get(status.name, 0) + 1
            time.sleep(_PAUSE_S)  # whoever is refused comes back later; at once would only keep others from their work
            return
        lease = store.lease(self._root, chunk.key) if isinstance(store, EmbeddedStore) else None
        if isinstance(store, EmbeddedStore) and lease is None:
            return
        before = _record_id(store, chunk)
        bit = int(self._rng.integers(8 * piece.tiles.nbytes))
        if isinstance(store, EmbeddedStore):
            _flip_embedded(store, chunk, bit)
        else:
            _flip_remote(store, chunk, bit)
        self.injected[name] += 1
        self.packed += piece.encoding == PACKED
        self._flipped_at = time.monotonic()
        got = np.zeros_like(truth)
        status = self._space.read([chunk], WHOLE, [got], deadline_s=DEADLINE_S)[0]
        if lease is not None:
            lease.release()
        wrong = int(np.count_nonzero(got != truth)) if status == Status.OK else 0
        # Or somebody else found out first (who copies chunks to a slower tier reads them, too): a leased chunk goes for
        # no other reason. It may even be back, brought up from a tier that had a copy from before.
        found_by_others = before is not None and before != _record_id(store, chunk)
        self.wrong_bytes += wrong
        self.detected[name] += not wrong and (status == Status.DAMAGED or found_by_others)
        store.remove(self._root, [chunk.key])


def _record_id(store: object, chunk: ChunkRef) -> int | None:
    """Which copy of a chunk an embedded store has: another number is another copy."""
    entry = store._core.index.find(chunk.key) if isinstance(store, EmbeddedStore) else None
    return None if entry is None else entry.record.id


def _flip_embedded(store: EmbeddedStore, chunk: ChunkRef, bit: int) -> None:
    """In the mapping, or in the file."""
    core = store._core  # the benchmark plays the broken memory: it must get past everything that would notice
    entry = core.index.find(chunk.key)
    if entry is None:
        raise StoreError("a leased chunk is gone")
    at, mask = entry.record.offset + bit // 8, 1 << bit % 8
    if core.data.mapped:
        core.data.view(at, 1)[0] ^= mask
        return
    byte = np.zeros(1, np.uint8)
    deadline = time.monotonic() + DEADLINE_S
    if not core.data.load(at, [byte], deadline):
        raise StoreError("a stored byte cannot be read")
    byte[0] ^= mask
    core.data.save([(at, [byte])], deadline, lambda: None)


def _flip_remote(store: RemoteStore, chunk: ChunkRef, bit: int) -> None:
    """In the object that holds it."""
    deadline = time.monotonic() + DEADLINE_S
    client, names = store._client, store._names
    manifest = store._reader.manifests([chunk.key], set(), deadline)[chunk.key]
    if manifest is None:
        raise StoreError("a manifest that was just written is gone")
    at, number = bit // 8, 0
    while at >= (size := len(manifest.pieces[number]) * manifest.num_heads * manifest.tile_bytes):
        at, number = at - size, number + 1
    name = names.piece(manifest, number)
    value = np.frombuffer(client.fetch([name], 1 << 30, deadline)[0] or b"", np.uint8).copy()
    value[at] ^= 1 << bit % 8
    from headwater.stores.remote.base import NewObject

    client.write([NewObject(name, [value])], deadline)
