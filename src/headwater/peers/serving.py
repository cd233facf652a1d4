"""The serving side of a pull: another host's look-ups, and its reads out of lent extents of this host's first tier.

Only the first tier is served: a caller has slower tiers of its own, and two hosts that read from each other must not
ask in circles. Tiles leave from where they lie, under a lease that ends when the kernel has the last byte, and with the
checksums of their record: whatever happens on the way, the caller finds out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headwater.errors import PeerTimeoutError, WireError
from headwater.kv.encoding import RAW, stored_extent_bytes
from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import WHOLE, Shard
from headwater.peers.carriers.tcp import Connection
from headwater.peers.hello import Hello
from headwater.peers.pull_wire import (
    MAX_READ_BYTES,
    UNSPECIFIED,
    Exists,
    Read,
    decode_run,
    encode_ages,
    encode_read_answer,
    encode_run_answer,
)
from headwater.peers.tiles import layouts_of, pieces_of
from headwater.peers.wire import MAX_DATA_BYTES, Header, Type, encode_frame, encoding_bits
from headwater.pool.space import Space
from headwater.stores.base import Piece, Place, RootRef, Status, Store, Tiles
from headwater.stores.remote.plan import tile_sums

_ANSWER_S = 5.0
_LONGEST_READ_S = 60.0
_SLOW_READS = 4

Sums = npt.NDArray[np.uint64]


class PeerSession:
    """The connections of a session that has nothing to give up when they end."""

    def __init__(self, hello: Hello) -> None:
        self.hello = hello
        self.last_frame_s = time.monotonic()
        self._lock = threading.Lock()
        self._connections: list[Connection] = []
        self.is_over = False

    @property
    def has_begun(self) -> bool:
        """Silence is no failure: nothing waits for the caller."""
        return False

    def join(self, connection: Connection) -> bool:
        """One more connection; False where the session is over."""
        with self._lock:
            if not self.is_over:
                self._connections.append(connection)
            return not self.is_over

    def end(self) -> None:
        """End all connections. Idempotent."""
        with self._lock:
            connections, self._connections, self.is_over = self._connections, [], True
        for connection in connections:
            connection.shut()


class PullSession(PeerSession):
    """One caller's look-ups and reads in one space."""

    _slow = threading.BoundedSemaphore(_SLOW_READS)
    """Reads that need memory of this process, which is bounded by that."""

    def __init__(self, hello: Hello, space: Space, store: Store) -> None:
        super().__init__(hello)
        self._space = space
        self._store = store

    def handle(self, connection: Connection, header: Header, meta: bytes, deadline: float) -> None:
        """Do what a frame says, and answer it. Raises PeerError where the connection must be closed."""
        if header.data_bytes:
            raise WireError("a pull request must not carry data")
        if header.type == Type.READ:
            self._read(connection, header.number, self._decode(meta))
            return
        if header.type == Type.RUN:
            root, keys = decode_run(meta)
            body = encode_run_answer(self._store.run(self._root(root), keys))
        elif header.type == Type.EXISTS:
            body = self._exists(Exists.decode(meta))
        elif header.type == Type.JUDGE:
            body = bytes(self._judge(self._decode(meta)))
        elif header.type == Type.PING:
            body = b""
        else:
            raise WireError(f"a {header.type.name} frame is not allowed in a pull")
        connection.send(encode_frame(Type.ANSWER, body, number=header.number), time.monotonic() + _ANSWER_S)

    def _exists(self, asked: Exists) -> bytes:
        chunks = [ChunkRef(key, parent, 0, 0, 1, b"") for key, parent in asked.pairs]
        keys = [chunk.key for chunk in chunks]
        there = self._store.exists(self._root(b""), chunks)
        if UNSPECIFIED in [chunk.parent for chunk in chunks]:  # to keep one that was found before
            is_pending = self._store.being_filled(keys)
            there = [
                seen or (c.parent == UNSPECIFIED and not p)
                for c, seen, p in zip(chunks, there, is_pending, strict=True)
            ]
        used = [age if seen else 0 for age, seen in zip(self._store.ages(keys), there, strict=True)]
        if asked.is_use:
            for chunk, age in zip(chunks, used, strict=True):
                if age:
                    self._store.touch(chunk.key)
        return encode_ages(used, self._encodings(chunks) if asked.tell_encodings else ())

    def _encodings(self, chunks: Sequence[ChunkRef]) -> list[int]:
        """How each chunk's tiles would be sent: as they are stored, where they can be lent."""
        mapped = self._store.mapped
        if mapped is None:
            return [RAW] * len(chunks)
        forms = mapped.forms(chunks)
        return [RAW if form is None or form.split != WHOLE else form.encoding for form in forms]

    def _root(self, key: bytes) -> RootRef:
        return RootRef(self._space.ref, key, b"")

    def _decode(self, meta: bytes) -> Read:
        spec = self._space.spec
        read = Read.decode(meta, self._space.chunk_tokens, spec.num_layers, spec.num_kv_heads)
        size = sum([stored_extent_bytes(spec, chunk.num_tokens) for chunk in read.chunks])
        size = size * read.shard.num_tiles // spec.num_tiles
        if size > MAX_DATA_BYTES or (size > MAX_READ_BYTES and len(read.chunks) > 1):
            raise WireError(f"a read of {size} bytes in {len(read.chunks)} chunks")
        return read

    # ---- reading ------------------------------------------------------------------------------------------------
    def _read(self, connection: Connection, number: int, read: Read) -> None:
        """Send tiles from where they lie; those that cannot be lent (files, tiles in parts), or not in an encoding that
        is taken, from a verified copy that is raw."""
        deadline = time.monotonic() + min(read.within_ms / 1000, _LONGEST_READ_S)
        root, chunks, shard = self._root(read.chunks[0].root), read.chunks, read.shard
        mapped = self._store.mapped
        loan = None if mapped is None else mapped.lend(root, chunks, shard)
        takes = read.takes or [encoding_bits([RAW])] * len(chunks)
        try:
            places: list[Place | None] = [None] * len(chunks)
            encodings = [RAW] * len(chunks)
            for i, place in enumerate([] if loan is None else loan.places):
                if loan is not None and takes[i] >> loan.encodings[i] & 1:
                    places[i], encodings[i] = place, loan.encodings[i] if place is not None else RAW
            rest = [i for i, place in enumerate(places) if place is None]
            copies, statuses = dict[int, Tiles](), [Status.OK] * len(chunks)
            if rest and not self._slow.acquire(timeout=max(0.0, deadline - time.monotonic())):
                raise PeerTimeoutError("too many reads at once")
            try:
                for i in rest:
                    statuses[i], copies[i] = Status.MISS, np.empty(0, np.uint8)
                    if takes[i] >> RAW & 1:
                        statuses[i], copies[i] = self._copy(root, chunks[i], shard, deadline)
                pieces, sums = list[memoryview](), list[Sums]()
                spec = self._space.spec
                for i, layout in enumerate(layouts_of(spec, shard, chunks, encodings, range(spec.num_layers))):
                    place = places[i]
                    if place is not None and loan is not None:
                        pieces += pieces_of(place, layout)
                        sums.append(loan.sums[i])
                    elif statuses[i] == Status.OK:
                        pieces.append(copies[i].reshape(-1).data)
                        sums.append(tile_sums(copies[i]))
                size = sum([len(piece) for piece in pieces])
                answer = encode_read_answer(statuses, sums, encodings if read.takes else ())
                connection.send(encode_frame(Type.ANSWER, answer, data_bytes=size, number=number), deadline, pieces)
            finally:
                if rest:
                    self._slow.release()
        finally:
            if loan is not None:
                loan.release()

    def _copy(self, root: RootRef, chunk: ChunkRef, shard: Shard, deadline: float) -> tuple[Status, Tiles]:
        """A chunk that cannot be lent, read and verified here."""
        if not self._store.ages([chunk.key])[0]:
            return Status.MISS, np.empty(0, np.uint8)
        tiles = self._space.empty(chunk, shard)
        (status,) = self._store.read(root, [Piece(chunk, shard, tiles)], max(0.0, deadline - time.monotonic()))
        return status, tiles

    def _judge(self, read: Read) -> list[Status]:
        """A caller's copies did not verify: what is damaged here is removed, and counted."""
        deadline = time.monotonic() + min(read.within_ms / 1000, _LONGEST_READ_S)
        statuses = []
        if not self._slow.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise PeerTimeoutError("too many reads at once")
        try:
            for chunk in read.chunks:
                piece = Piece(chunk, read.shard, self._space.empty(chunk, read.shard))
                left_s = max(0.0, deadline - time.monotonic())
                statuses.append(self._store.judge(self._root(chunk.root), piece, left_s))
        finally:
            self._slow.release()
        return statuses
