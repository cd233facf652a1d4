"""One caller's pushes: its puts, their data straight into extents, and the end of all of it when it goes.

A session is all connections of one rank to this receiver. They fail together: whatever the session began and
did not finish is aborted when the first of them ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headwater.errors import PeerError, PeerRefusedError, WireError
from headwater.kv.encoding import stored_tile_bytes
from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import Shard
from headwater.peers.carriers.tcp import Connection
from headwater.peers.exposing import Exposure, decode_written
from headwater.peers.hello import CarrierBit, Hello
from headwater.peers.landing import Landing, PushedPart
from headwater.peers.tiles import Layout, alike, layouts_of, pieces_of
from headwater.peers.wire import Data, Header, Put, Refusal, Stop, Type, encode_frame
from headwater.pool.match import Match
from headwater.pool.space import Space
from headwater.stores.base import Status

log = logging.getLogger("headwater")

MAX_PUTS = 1024
MAX_OPEN_CHUNKS = 1 << 16
"""Of all puts of a session, whether they were wanted or not: each costs this process memory until the END."""
_SCRATCH_BYTES = 1 << 20
_ANSWER_S = 5.0


@dataclass(eq=False)
class OpenPut:
    """Chunks that a session has announced."""

    chunks: tuple[ChunkRef, ...]
    encodings: tuple[int, ...]
    shard: Shard
    parts: list[PushedPart | Status]


class _Piece(NamedTuple):
    """One chunk's part of a data frame."""

    number: int
    layout: Layout
    first_sum: int
    part: PushedPart | None
    """None: its bytes are for nobody."""


class _Incoming(NamedTuple):
    """A group of layers on its way into extents, one way or another."""

    put: OpenPut
    data: Data
    pieces: list[_Piece]
    entered: list[_Piece]
    num_bytes: int

    @property
    def parts(self) -> list[PushedPart]:
        """Those that are fenced meanwhile."""
        return [piece.part for piece in self.entered if piece.part is not None]


class PushSession:
    """See the module. Each connection has a thread of its own, which calls `handle`."""

    def __init__(self, hello: Hello, space: Space, landing: Landing) -> None:
        self.hello = hello
        self._space = space
        self._landing = landing
        self._puts: dict[int, OpenPut] = {}
        self._opening: set[int] = set()
        """Numbers of puts whose chunks are being reserved."""
        self._lock = threading.Lock()
        self._connections: list[Connection] = []
        self._is_over = False
        self.last_frame_s = time.monotonic()
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._exposure: Exposure | None = None
        self._writes: dict[int, _Incoming] = {}
        """Of the exposure: what is being written, by number of its WRITE."""

    @property
    def is_over(self) -> bool:
        """Whether `end` was called."""
        return self._is_over

    def choose_carrier(self, accepted: int) -> int:
        """Which of the carriers that the caller offers, and this receiver accepts, is used; 0 for the connection. Half
        a second where there is one."""
        if not self.hello.carriers & accepted & CarrierBit.NIXL or self._exposure is not None:
            return 0
        try:
            self._exposure = Exposure(self._landing)
        except PeerError as error:
            log.warning("NIXL is not used, a peer that offers it is answered with TCP: %s", error)
            return 0
        return int(CarrierBit.NIXL)

    def help_on(self, connection: Connection, is_over: Callable[[], bool]) -> None:
        """Before waiting for a frame: see `Exposure.help_on`."""
        if self._exposure is not None and self._exposure.is_open:
            self._exposure.help_on(connection, is_over)

    def settle(self, connection: Connection, is_over: Callable[[], bool]) -> None:
        """After `end`, by the thread of the connection: see `Exposure.settle`."""
        if self._exposure is not None:
            self._exposure.settle(connection, is_over)

    @property
    def has_begun(self) -> bool:
        """Whether something is pending that only this session can finish."""
        with self._lock:
            parts = [part for put in self._puts.values() for part in put.parts if isinstance(part, PushedPart)]
        return any(part.tiles_left and not part.filling.is_dead for part in parts)

    def join(self, connection: Connection) -> bool:
        """Another connection of the session; False where it is over."""
        with self._lock:
            if self._is_over:
                return False
            self._connections.append(connection)
            return True

    def end(self) -> None:
        """Give everything up, and end all connections. Idempotent."""
        with self._lock:
            connections, self._connections = self._connections, []
            puts, self._puts = list(self._puts.values()), {}
            self._is_over = True
        for connection in connections:
            if self._exposure is None:
                connection.shut()
            else:  # the other side's end is still to be heard
                connection.shut_out()
        self._landing.abort_parts([part for put in puts for part in put.parts if isinstance(part, PushedPart)])

    # ---- frames -------------------------------------------------------------------------------------------------
    def handle(self, connection: Connection, header: Header, meta: bytes, deadline: float) -> None:
        """Do what a frame says, and answer it. Raises PeerError where the connection must be closed."""
        body = b""
        if header.type == Type.PUT:
            body = self._put(Put.decode(meta, self._space.chunk_tokens))
        elif header.type == Type.DATA:
            body = self._data(connection, Data.decode(meta), header.data_bytes, deadline)
        elif header.type == Type.WRITE:
            body = self._write(header.number, Data.decode(meta))
        elif header.type == Type.WRITTEN:
            body = self._written(decode_written(meta))
        elif header.type in (Type.END, Type.ABORT):
            self._stop(Stop.decode(meta), is_end=header.type == Type.END)
        elif header.type != Type.PING:
            raise WireError(f"a {header.type.name} frame is not allowed in a push")
        connection.send(encode_frame(Type.ANSWER, body, number=header.number), time.monotonic() + _ANSWER_S)

    def _put(self, put: Put) -> bytes:
        spec, shard = self._space.spec, put.shard
        if shard.layers.stop > spec.num_layers or shard.heads.stop > spec.num_kv_heads or not shard.num_tiles:
            raise WireError(f"a put of layers {shard.layers} and heads {shard.heads} of {spec}")
        for tokens, encoding in {(c.num_tokens, e) for c, e in zip(put.chunks, put.by_chunk, strict=True)}:
            if not stored_tile_bytes(spec, tokens, encoding):
                raise WireError(f"a put of {tokens} tokens in encoding {encoding}, which is not defined for {spec}")
        with self._lock:
            if put.put in self._puts or put.put in self._opening:
                raise WireError("a put under a number that is taken")
            num_chunks = sum([len(other.chunks) for other in self._puts.values()])
            if len(self._puts) + len(self._opening) >= MAX_PUTS or num_chunks > MAX_OPEN_CHUNKS:
                raise PeerRefusedError(f"{MAX_PUTS} puts, or {MAX_OPEN_CHUNKS} chunks, are open", Refusal.TOO_MANY)
            self._opening.add(put.put)
        parts: list[PushedPart | Status] = []
        is_open = False
        try:
            self._space.adopt(put.chunks[0].root, put.root_payload)
            parts = self._landing.reserve(self, self.hello.server, self._space, put.chunks, put.by_chunk, shard)
            there = [chunk for chunk, part in zip(put.chunks, parts, strict=True) if part == Status.EXISTS]
            if there:  # about to be read: not the next to be evicted
                self._space.lease(Match((there[-1],)), f"peer-{id(self)}", is_hit=False).release()
            with self._lock:
                is_open = not self._is_over
                if is_open:
                    self._puts[put.put] = OpenPut(put.chunks, put.by_chunk, shard, parts)
        finally:
            with self._lock:
                self._opening.discard(put.put)
            if not is_open:
                self._landing.abort_parts([part for part in parts if isinstance(part, PushedPart)])
        return bytes([Status.OK if isinstance(part, PushedPart) else part for part in parts])

    def _data(self, connection: Connection, data: Data, num_bytes: int, deadline: float) -> bytes:
        """Receive straight into extents. Nothing is received before every length has been checked."""
        incoming = self._enter(data, num_bytes)
        inside = {piece.number for piece in incoming.entered}
        targets: list[memoryview] = []
        for piece in incoming.pieces:
            if piece.part is not None and piece.number in inside:
                targets += pieces_of(piece.part.place, piece.layout)
            else:
                targets += self._waste(piece.layout.num_bytes)
        try:
            connection.receive_into(targets, deadline)
            statuses = self._commit(incoming)
        finally:
            self._landing.leave(incoming.parts)
        return self._taken(incoming, statuses)

    def _write(self, number: int, data: Data) -> bytes:
        """Say where some layers go, and fence that until `_written`."""
        if self._exposure is None:
            raise WireError("a one-sided write came without a carrier for it")
        incoming = self._enter(data, None)
        inside = {piece.number: piece.part.place for piece in incoming.entered if piece.part is not None}
        targets = self._exposure.expose(number, incoming.parts, [inside.get(p.number) for p in incoming.pieces])
        self._writes[number] = incoming
        return targets.encode()

    def _written(self, number: int) -> bytes:
        if self._exposure is None:
            raise WireError("the end of a one-sided write came without a carrier for it")
        parts, incoming = self._exposure.written(number), self._writes.pop(number)
        try:
            statuses = self._commit(incoming)
        finally:
            self._landing.leave(parts)
        return self._taken(incoming, statuses)

    def _enter(self, data: Data, num_bytes: int | None) -> _Incoming:
        """What a group of layers means for each of its chunks; those that are wanted are fenced from here on. Raises
        WireError, and fences nothing, where it was not put, or is not so many bytes."""
        put, spec = self._puts.get(data.put), self._space.spec
        if put is None or data.chunks[-1] >= len(put.chunks) or data.layers.stop > spec.num_layers:
            raise WireError("data of chunks or layers that were not put")
        chunks, encodings = [put.chunks[n] for n in data.chunks], [put.encodings[n] for n in data.chunks]
        layouts = layouts_of(spec, put.shard, chunks, encodings, data.layers)
        pieces, size, num_sums = list[_Piece](), 0, 0
        for number, layout in zip(data.chunks, layouts, strict=True):
            part = put.parts[number]
            pieces.append(_Piece(number, layout, num_sums, part if isinstance(part, PushedPart) else None))
            size += layout.num_bytes
            num_sums += layout.num_tiles
        if num_bytes not in (None, size) or num_sums != data.sums.size:
            raise WireError(f"data of {num_bytes} bytes and {data.sums.size} checksums; expected {size} and {num_sums}")
        wanted = [(p, p.part) for p in pieces if p.part is not None and p.layout.num_bytes]
        alive = self._landing.enter([(part, p.layout.shard.layers) for p, part in wanted])
        entered = [p for (p, _), is_alive in zip(wanted, alive, strict=True) if is_alive]
        return _Incoming(put, data, pieces, entered, size)

    def _taken(self, incoming: _Incoming, statuses: Sequence[Status]) -> bytes:
        """Count it, and give up what cannot be found any more. One status a chunk."""
        self._landing.counts["bytes"] += incoming.num_bytes
        if any(statuses):
            pieces = zip(incoming.pieces, statuses, strict=True)
            self._cut(incoming.put, min(piece.number for piece, status in pieces if status))
        return bytes(statuses)

    def _commit(self, incoming: _Incoming) -> list[Status]:
        data, pieces, entered = incoming.data, incoming.pieces, incoming.entered
        statuses = {piece.number: Status.LOST if piece.layout.num_bytes else Status.OK for piece in pieces}
        for group in alike([piece.layout for piece in entered]).values():
            members = [entered[at] for at in group]
            layout = members[0].layout
            rows = np.array([piece.first_sum for piece in members])[:, None] + np.arange(layout.num_tiles)
            shape = len(members), len(layout.shard.layers), len(layout.shard.heads)
            parts = [piece.part for piece in members if piece.part is not None]
            outcome = self._landing.commit(parts, layout, data.sums[rows].reshape(shape))
            statuses.update(zip([piece.number for piece in members], outcome, strict=True))
        return [statuses[piece.number] for piece in pieces]

    def _waste(self, size: int) -> list[memoryview]:
        whole, rest = divmod(size, _SCRATCH_BYTES)
        return [self._scratch] * whole + ([self._scratch[:rest]] if rest else [])

    def _stop(self, stop: Stop, *, is_end: bool) -> None:
        put = self._puts.get(stop.put)
        if put is None:
            return
        if is_end:
            with self._lock:
                self._puts.pop(stop.put, None)
            self._landing.abort_parts([part for part in put.parts if isinstance(part, PushedPart)])
        elif stop.chunks:
            self._cut(put, min(stop.chunks))

    def _cut(self, put: OpenPut, first: int) -> None:
        """Chunks of a put from this one on will not be complete: without it nobody could find the others."""
        self._landing.abort_parts([part for part in put.parts[first:] if isinstance(part, PushedPart)])
