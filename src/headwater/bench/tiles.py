"""Tiles through a pool, against the bare loop of copy and checksum that no pool can beat.

Both sides move the same pieces in the same random order between the same kinds of memory: the caller's (private,
touched before) and shared memory (mapped and populated before).
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from headwater.bench.measure import Timed, in_threads, stopwatch
from headwater.errors import StoreError
from headwater.kv.hashing import DEFAULT_CHUNK_TOKENS, ChunkRef
from headwater.kv.identity import Identity
from headwater.kv.spec import KVSpec
from headwater.kv.topology import Shard, whole_shard
from headwater.pool import Pool, Space
from headwater.stores.base import Piece, Status
from headwater.stores.embedded import SHM_ROOT

Bytes = npt.NDArray[np.uint8]

CHUNK_TOKENS = DEFAULT_CHUNK_TOKENS
SPEC = KVSpec.gqa(num_layers=8, num_kv_heads=8, head_dim=128, dtype="bfloat16")
TILE_BYTES = SPEC.tile_bytes(CHUNK_TOKENS)
CHUNK_BYTES = SPEC.extent_bytes(CHUNK_TOKENS)
BATCH_TILES = 128
"""Tiles in one call to read: one layer and head of as many chunks; so a rank of TP=8 loads a 32,768-token prompt."""
BATCH_CHUNKS = 16
"""Chunks in one call to write: 4,096 tokens of prefill."""
DEADLINE_S = 60.0
IDENTITY = Identity(weights="sha256:" + "0" * 64, run_dtype="bfloat16", kv_dtype="bfloat16", label="bench")
WHOLE = whole_shard(SPEC)

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14


class Batch(NamedTuple):
    """One call to read: a layer and head of some chunks, and one array for all of them."""

    layer: int
    head: int
    chunks: list[int]
    out: Bytes


class Caller:
    """The memory of whoever uses the pool: distinct random tiles to write, room to read them into, and the order."""

    def __init__(self, num_chunks: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        shape = (num_chunks, SPEC.num_layers, SPEC.num_kv_heads, TILE_BYTES)
        self.data: Bytes = self.rng.integers(0, 2**64, num_chunks * CHUNK_BYTES // 8, np.uint64).view(np.uint8)
        self.data = self.data.reshape(shape)
        self.out: Bytes = np.ones(shape, np.uint8)  # ones: zeros would not be backed by memory yet
        self.num_chunks = num_chunks
        self.chunk_order = self.rng.permutation(num_chunks).tolist()

    @property
    def num_bytes(self) -> int:
        """Bytes of all tiles."""
        return self.data.nbytes

    def head(self, num_chunks: int) -> Caller:
        """A caller with only the first chunks, sharing this one's memory."""
        part = object.__new__(Caller)
        part.rng, part.num_chunks = self.rng, min(num_chunks, self.num_chunks)
        part.data, part.out = self.data[: part.num_chunks], self.out[: part.num_chunks]
        part.chunk_order = self.rng.permutation(part.num_chunks).tolist()
        return part

    @cached_property
    def batches(self) -> list[Batch]:
        """Every tile once, in random order: batches of one layer and head of chunks picked at random, each batch with
        its own place in `out`."""
        batches, used = [], 0
        flat = self.out.reshape(-1, TILE_BYTES)
        shares = [range(i, min(i + BATCH_TILES, self.num_chunks)) for i in range(0, self.num_chunks, BATCH_TILES)]
        orders = {place: self.rng.permutation(self.num_chunks).tolist() for place in range(SPEC.num_tiles)}
        picks = [(place, share) for place in orders for share in shares]
        for number in self.rng.permutation(len(picks)).tolist():
            place, share = picks[number]
            layer, head = divmod(place, SPEC.num_kv_heads)
            chunks = [orders[place][i] for i in share]
            out = flat[used : used + len(chunks)].reshape(len(chunks), 1, 1, TILE_BYTES)
            batches.append(Batch(layer, head, chunks, out))
            used += len(chunks)
        return batches

    def forget_out(self) -> None:
        """Make sure that what is read next is not what was read before."""
        self.out.fill(0)

    def check_out(self) -> None:
        """Raise unless every tile was read, and to its place."""
        for layer, head, chunks, out in self.batches:
            if not np.array_equal(out[:, 0, 0], self.data[chunks, layer, head]):
                raise StoreError("what was read is not what was written")


# ---- the ceiling ------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def shared_memory(like: Bytes) -> Iterator[Bytes]:
    """Shared memory as a pool has it: a file on the same file system, mapped and populated, but nothing around it."""
    fd = os.open(SHM_ROOT, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, like.nbytes)
        mapping = mmap.mmap(fd, like.nbytes)
    finally:
        os.close(fd)
    with contextlib.suppress(OSError, ValueError):
        mapping.madvise(_POPULATE_WRITE)
    array = np.frombuffer(mapping, np.uint8).reshape(like.shape)
    array[:] = like
    yield array  # the mapping goes with its last view


class Ceiling:
    """Copy and checksum in a bare loop over views that were made before."""

    def __init__(self, caller: Caller, shared: Bytes) -> None:
        self._reads = [
            (out[i, 0, 0], shared[chunk, layer, head])
            for layer, head, chunks, out in caller.batches
            for i, chunk in enumerate(chunks)
        ]
        places = [(layer, head) for layer in range(SPEC.num_layers) for head in range(SPEC.num_kv_heads)]
        # Extents are handed out one after another, whatever the order of the chunks.
        self._writes = [
            (shared[i][at], caller.data[chunk][at]) for i, chunk in enumerate(caller.chunk_order) for at in places
        ]

    def memcpy(self) -> Timed:
        """Only the copy, from shared memory."""
        return stopwatch(partial(_copy, self._reads))

    def read(self, threads: int = 1) -> Timed:
        """Copy from shared memory; the checksum is taken where the tile landed."""
        return _over(_copy_and_sum_target, self._reads, threads)

    def write(self, threads: int = 1) -> Timed:
        """Copy to shared memory; the checksum is taken of the source."""
        return _over(_copy_and_sum_source, self._writes, threads)


Moves = Sequence[tuple[Bytes, Bytes]]


def _copy(moves: Moves) -> None:
    copy = np.copyto
    for target, source in moves:
        copy(target, source)


def _copy_and_sum_target(moves: Moves) -> None:
    copy, digest = np.copyto, xxhash.xxh3_64_intdigest
    for target, source in moves:
        copy(target, source)
        digest(target)


def _copy_and_sum_source(moves: Moves) -> None:
    copy, digest = np.copyto, xxhash.xxh3_64_intdigest
    for target, source in moves:
        copy(target, source)
        digest(source)


def _over(work: Callable[[Moves], None], moves: Moves, threads: int) -> Timed:
    if threads == 1:
        return stopwatch(partial(work, moves))
    shares = [list(moves[number::threads]) for number in range(threads)]
    return lambda: in_threads([partial(work, share) for share in shares])


# ---- the pool ---------------------------------------------------------------------------------------------------
class PoolSide:
    """The same pieces through the public API of a pool that nobody else uses."""

    def __init__(self, caller: Caller, pool: Pool) -> None:
        self._caller = caller
        self._pool = pool
        self._space: Space = pool.space(IDENTITY, SPEC, chunk_tokens=CHUNK_TOKENS)

    # Reading.
    def fill(self) -> None:
        """Write everything once, so that it can be read."""
        self._pool.clear()
        self._refs = self._new_refs()
        self._write_all(self._whole_writes(self._refs))

    def read(self, threads: int = 1) -> Timed:
        """Every tile in random order, verified in the caller's memory: batches of single tiles, each into one array."""
        reads = [
            ([self._refs[chunk] for chunk in chunks], _single(layer, head), out)
            for layer, head, chunks, out in self._caller.batches
        ]

        def work(share: Sequence[Write]) -> None:
            for refs, shard, out in share:
                _check(self._space.read(refs, shard, out, deadline_s=DEADLINE_S))

        if threads == 1:
            return stopwatch(partial(work, reads))
        return lambda: in_threads([partial(work, reads[number::threads]) for number in range(threads)])

    def read_pieces(self) -> Timed:
        """The same tiles, each as a piece with an array of its own."""
        batches = [
            [Piece(self._refs[chunk], _single(layer, head), out[i]) for i, chunk in enumerate(chunks)]
            for layer, head, chunks, out in self._caller.batches
        ]
        return stopwatch(partial(self._read_all, batches))

    def read_chunks(self) -> Timed:
        """Whole chunks in random order, as the single rank of a small server reads them."""
        pieces = [Piece(self._refs[c], WHOLE, self._caller.out[c]) for c in self._caller.chunk_order]
        batches = [pieces[i : i + BATCH_CHUNKS] for i in range(0, len(pieces), BATCH_CHUNKS)]
        return stopwatch(partial(self._read_all, batches))

    def _read_all(self, batches: Sequence[Sequence[Piece]]) -> None:
        read = self._space.read_pieces
        for batch in batches:
            _check(read(batch, deadline_s=DEADLINE_S))

    # Writing.
    def write(self, threads: int = 1) -> Timed:
        """Whole chunks, new ones each time; the pool is emptied before, outside the measured time."""

        def run() -> float:
            self._pool.clear()
            writes = self._whole_writes(self._new_refs())
            if threads == 1:
                return stopwatch(partial(self._write_all, writes))()
            return in_threads([partial(self._write_all, writes[number::threads]) for number in range(threads)])

        return run

    def write_tiles(self) -> Timed:
        """The same, one tile of each chunk at a time, as if each tile had a rank of its own."""
        shards = [_single(layer, head) for layer in range(SPEC.num_layers) for head in range(SPEC.num_kv_heads)]

        def run() -> float:
            self._pool.clear()
            writes = [
                (refs, shard, [tiles[shard.layers.start, None, shard.heads.start, None] for tiles in chunks])
                for refs, _, chunks in self._whole_writes(self._new_refs())
                for shard in shards
            ]
            return stopwatch(partial(self._write_all, writes))()

        return run

    def _whole_writes(self, refs: Sequence[ChunkRef]) -> list[Write]:
        # Reservations may take a quarter of the store, and two threads write at once.
        room = self._pool.stats().store.data_bytes // 8 // CHUNK_BYTES
        step, order, data = max(1, min(BATCH_CHUNKS, room)), self._caller.chunk_order, self._caller.data
        groups = [order[i : i + step] for i in range(0, len(order), step)]
        return [([refs[c] for c in group], WHOLE, [data[c] for c in group]) for group in groups]

    def _write_all(self, writes: Sequence[Write]) -> None:
        write = self._space.write
        for refs, shard, tiles in writes:
            _check(write(refs, shard, list(tiles), deadline_s=DEADLINE_S))

    def _new_refs(self) -> list[ChunkRef]:
        """One prompt of one chunk for each chunk: such chunks have no order among them."""
        prompts = self._caller.rng.integers(0, 2**32, (self._caller.num_chunks, CHUNK_TOKENS), np.uint32)
        return [self._space.keys(tokens).ref(0) for tokens in prompts]


Write = tuple[list[ChunkRef], Shard, Sequence[Bytes] | Bytes]


def _single(layer: int, head: int) -> Shard:
    return Shard(range(layer, layer + 1), range(head, head + 1))


def _check(statuses: Sequence[Status]) -> None:
    """A benchmark of misses would be fast: whatever is not OK ends it."""
    if any(statuses):
        bad = next(status for status in statuses if status)
        raise StoreError(f"the pool answered {bad.name} in the middle of the benchmark; is anybody else using it?")
