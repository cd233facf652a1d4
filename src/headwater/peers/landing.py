"""Chunks that peers are filling in this host's pool: reservations, whose they are, and how they end.

A chunk belongs to one prefill server; its ranks (sessions) fill their parts of the same extent, and another server gets
BUSY. A part that its session cannot finish aborts the chunk for the whole server. Peers have a share of the pool's
pending room of their own. A reservation is closed only when no thread receives into its extent any more: until then the
pool does not reuse the bytes, whatever became of the chunk.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from headwater.errors import HeadwaterError, WireError
from headwater.kv.encoding import stored_extent_bytes
from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import Shard
from headwater.peers.tiles import Layout
from headwater.pool.space import Space
from headwater.stores.base import Place, Reservation, Status

RESERVE_S = 0.25
"""How long a put may wait for the pool's lock; then it is TIMEOUT."""
COMMIT_S = 2.0


@dataclass(eq=False)
class PushedChunk:
    """One chunk that a server's ranks fill together."""

    space: Space
    chunk: ChunkRef
    encoding: int
    server: int
    num_bytes: int
    tiles_left: int
    parts: list[PushedPart] = field(default_factory=list)
    touched_s: float = field(default_factory=time.monotonic)
    is_dead: bool = False


@dataclass(eq=False)
class PushedPart:
    """What one session fills of a chunk."""

    filling: PushedChunk
    session: object
    shard: Shard
    """The tiles that it sends."""
    reservation: Reservation
    place: Place
    tiles_left: int
    begun: set[int] = field(default_factory=set)
    """Layers that have come, or are coming."""
    num_users: int = 0
    """Threads that receive into the extent now."""
    is_closed: bool = False


class Landing:
    """See the module. Thread-safe."""

    def __init__(self, share_bytes: int) -> None:
        self.share_bytes = share_bytes
        self.counts: Counter[str] = Counter()
        self._pending_bytes = 0
        self._fillings: dict[bytes, PushedChunk] = {}
        self._lock = threading.Lock()
        self._reserving = threading.Lock()
        self._untidy: list[Space] = []
        """Where records were taken away while their extents were open (with their parents, say): in limbo since."""

    @property
    def pending_bytes(self) -> int:
        """What peers have reserved and not completed."""
        return self._pending_bytes

    # ---- reserving ----------------------------------------------------------------------------------------------
    def reserve(
        self,
        session: object,
        server: int,
        space: Space,
        chunks: Sequence[ChunkRef],
        encodings: Sequence[int],
        shard: Shard,
    ) -> list[PushedPart | Status]:
        """A part to fill for each chunk, stored so, or why there is none: EXISTS, BUSY, FULL, NO_PARENT, TIMEOUT; LOST
        where this very server's last attempt at it is not over, or is in another encoding: it may ask again. OK as a
        status: this rank is to send nothing of it. Waits for nobody but the pool's lock, and that briefly."""
        with self._reserving:
            found: list[PushedPart | Status] = [Status.EXISTS if there else Status.OK for there in space.exists(chunks)]
            with self._lock:
                self._claim(found, server, space, chunks, encodings, shard)
            wanted = [i for i, status in enumerate(found) if status == Status.OK]
            if wanted:
                self._open(found, wanted, session, server, space, chunks, encodings, shard)
        named = [s for s in found if isinstance(s, Status) and s not in (Status.OK, Status.LOST)]
        self.counts.update(f"chunks_{status.name.lower()}" for status in named)
        return found

    def _claim(
        self,
        found: list[PushedPart | Status],
        server: int,
        space: Space,
        chunks: Sequence[ChunkRef],
        encodings: Sequence[int],
        shard: Shard,
    ) -> None:
        """Mark what another server or session fills as BUSY, and what has no room in the peers' share as FULL."""
        room = self.share_bytes - self._pending_bytes
        for i, chunk in enumerate(chunks):
            if found[i] != Status.OK:
                continue
            filling = self._fillings.get(chunk.key)
            if filling is not None:
                owned = shard.owned(chunk.number)[0]
                is_taken = any(_overlap(owned, part.shard) for part in filling.parts)
                # Another length, say, would lie beyond the end of the extent.
                is_other = filling.chunk != chunk or filling.space is not space or filling.server != server
                if not is_other and (filling.is_dead or filling.encoding != encodings[i]):
                    found[i] = Status.LOST
                elif is_taken or is_other or filling.is_dead:
                    found[i] = Status.BUSY
                continue
            room -= stored_extent_bytes(space.spec, chunk.num_tokens, encodings[i])
            if room < 0:
                found[i] = Status.FULL

    def _open(
        self,
        found: list[PushedPart | Status],
        wanted: Sequence[int],
        session: object,
        server: int,
        space: Space,
        chunks: Sequence[ChunkRef],
        encodings: Sequence[int],
        shard: Shard,
    ) -> None:
        some, forms = [chunks[i] for i in wanted], [encodings[i] for i in wanted]
        opened = space.reserve(some, Shard(range(1), range(1)), encodings=forms, deadline_s=RESERVE_S)
        try:
            places, noted = self._look_at(space, opened)
        except BaseException:
            space.close_all(opened)
            self._untidy.append(space)
            raise
        refused = list[Reservation]()
        with self._lock:
            for row, (i, reservation, place) in enumerate(zip(wanted, opened, places, strict=True)):
                chunk, owned = chunks[i], shard.owned(chunks[i].number)[0]
                filling = self._fillings.get(chunk.key)
                if place is None or row not in noted:
                    found[i] = reservation.status or Status.FULL
                elif (filling is None and noted[row]) or (filling is not None and filling.is_dead):
                    # A record of this process that nobody fills: its abort came too late, or has not come yet.
                    found[i] = Status.BUSY
                else:
                    if filling is None:
                        filling = self._begin(server, space, chunk, encodings[i])
                    found[i] = self._part(filling, session, owned, reservation, place)
                    continue
                refused.append(reservation)
        if refused:
            space.close_all(refused)

    @staticmethod
    def _look_at(space: Space, opened: Sequence[Reservation]) -> tuple[list[Place | None], dict[int, int]]:
        """Where each reserved chunk lies, and by row of those that can be filled how many tiles somebody has noted."""
        places = space.places(opened)
        good = [
            row for row, (r, place) in enumerate(zip(opened, places, strict=True)) if place is not None and not r.status
        ]
        whole = Shard(range(space.spec.num_layers), range(space.spec.num_kv_heads))
        return places, dict(zip(good, space.noted([opened[row] for row in good], whole), strict=True))

    def _begin(self, server: int, space: Space, chunk: ChunkRef, encoding: int) -> PushedChunk:
        """Under the lock: a chunk whose first part comes."""
        size = stored_extent_bytes(space.spec, chunk.num_tokens, encoding)
        begun = self._fillings[chunk.key] = PushedChunk(space, chunk, encoding, server, size, space.spec.num_tiles)
        self._pending_bytes += size
        self.counts["chunks_begun"] += 1
        return begun

    def _part(
        self, filling: PushedChunk, session: object, owned: Shard, reservation: Reservation, place: Place
    ) -> PushedPart:
        """Under the lock: a session's part of a chunk, the chunk's first one or a further one."""
        part = PushedPart(filling, session, owned, reservation, place, owned.num_tiles)
        filling.parts.append(part)
        if not owned.num_tiles:  # reserved all the same: what follows needs a parent
            self._close([part])
        return part

    # ---- filling ------------------------------------------------------------------------------------------------
    def enter(self, parts: Sequence[tuple[PushedPart, Sequence[int]]]) -> list[bool]:
        """Before receiving layers into parts' extents; False where the chunk is dead and the bytes are for nobody.

        Raises WireError, and enters none, where one of the layers has come or is coming: it may be in use by now."""
        with self._lock:
            if any(not part.begun.isdisjoint(layers) for part, layers in parts):
                raise WireError("tiles were sent twice")
            alive = [not part.filling.is_dead and not part.is_closed for part, _ in parts]
            for (part, layers), is_alive in zip(parts, alive, strict=True):
                part.begun.update(layers)
                part.num_users += is_alive
        return alive

    def leave(self, parts: Iterable[PushedPart]) -> None:
        """After it. Dead chunks that nobody receives into any more are buried now."""
        left = list(parts)
        with self._lock:
            for part in left:
                part.num_users -= 1
            self._close([part for part in left if not part.tiles_left])
        self._bury([part.filling for part in left if part.filling.is_dead])

    def commit(self, parts: Sequence[PushedPart], layout: Layout, sums: npt.NDArray[np.uint64]) -> list[Status]:
        """Note the checksums of tiles that have come, the same ones of each part: (parts, layers, heads)."""
        space = parts[0].filling.space
        if any(part.filling.is_dead for part in parts):
            alive = [row for row, part in enumerate(parts) if not part.filling.is_dead]
            outcome = self.commit([parts[row] for row in alive], layout, sums[alive]) if alive else []
            found = dict(zip(alive, outcome, strict=True))
            return [found.get(row, Status.LOST) for row in range(len(parts))]
        try:
            statuses = space.commit_shard([p.reservation for p in parts], layout.shard, sums, deadline_s=COMMIT_S)
        except HeadwaterError:
            statuses = [Status.LOST] * len(parts)
        now, tiles = time.monotonic(), layout.num_tiles
        lost = list[PushedChunk]()
        with self._lock:
            for part, status in zip(parts, statuses, strict=True):
                filling = part.filling
                if status != Status.OK:
                    lost.append(filling)
                    continue
                part.tiles_left -= tiles
                filling.tiles_left -= tiles
                filling.touched_s = now
                if not filling.tiles_left and self._fillings.get(filling.chunk.key) is filling:
                    del self._fillings[filling.chunk.key]
                    self._pending_bytes -= filling.num_bytes
                    self.counts["chunks_stored"] += 1
            self._close([part for part in parts if not part.tiles_left])
        self.abort(lost, "chunks_lost")
        if lost:
            self._untidy.append(space)
        return statuses

    # ---- giving up ----------------------------------------------------------------------------------------------
    def abort(self, fillings: Iterable[PushedChunk], why: str = "chunks_aborted") -> None:
        """Give chunks up for the whole server. Those that are complete stay."""
        with self._lock:
            dead = [f for f in dict.fromkeys(fillings) if self._fillings.get(f.chunk.key) is f and not f.is_dead]
            for filling in dead:
                filling.is_dead = True
        self.counts[why] += len(dead)
        self._bury(dead)

    def _bury(self, fillings: Iterable[PushedChunk]) -> None:
        """Abort dead chunks in the pool, children before parents, as soon as no thread receives into their extents: an
        extent that is still open would only go into limbo."""
        with self._lock:
            going = [
                filling
                for filling in dict.fromkeys(fillings)
                if self._fillings.get(filling.chunk.key) is filling and not any(p.num_users for p in filling.parts)
            ]
            for filling in going:
                self._close(filling.parts)
        going.sort(key=lambda filling: -filling.chunk.number)
        for space in {id(filling.space): filling.space for filling in going}.values():
            with contextlib.suppress(HeadwaterError):  # what is not aborted now expires
                mine = [filling.chunk for filling in going if filling.space is space]
                if space.abort(mine) < len(mine):
                    self._untidy.append(space)
        with self._lock:
            for filling in going:
                if self._fillings.get(filling.chunk.key) is filling:
                    del self._fillings[filling.chunk.key]
                    self._pending_bytes -= filling.num_bytes

    def abort_parts(self, parts: Iterable[PushedPart]) -> None:
        """A session will not finish some parts: give their chunks up, unless the parts have come."""
        self.abort([part.filling for part in parts if part.tiles_left])

    def sweep(self, patience_s: float) -> None:
        """Give up chunks whose sessions have sent their parts, and which wait for a rank that does not come."""
        now = time.monotonic()
        with self._lock:
            stale = [
                filling
                for filling in self._fillings.values()
                if now - filling.touched_s > patience_s and not any(part.tiles_left for part in filling.parts)
            ]
        self.abort(stale, "chunks_orphaned")

    def tidy(self) -> None:
        """Have the pool free what lay in limbo because it was open here."""
        spaces, self._untidy = self._untidy, []
        for space in {id(space): space for space in spaces}.values():
            with contextlib.suppress(HeadwaterError):
                space.tidy()

    def _close(self, parts: Sequence[PushedPart]) -> None:
        """Under the lock: let go of extents that nobody receives into any more."""
        going = [part for part in parts if not part.num_users and not part.is_closed]
        for part in going:
            part.is_closed = True
            part.reservation.close()


def _overlap(one: Shard, other: Shard) -> bool:
    heads = max(one.heads.start, other.heads.start) < min(one.heads.stop, other.heads.stop)
    return heads and not set(one.layers).isdisjoint(other.layers)
