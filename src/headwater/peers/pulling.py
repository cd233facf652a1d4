"""Tiles from a peer into memory of this process: batches over several connections, straight to where they belong.

Nothing is verified here; the checksums of the peer's records come along. What a call was to fill is written to by its
own threads only, all of which have ended when it returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headwater.errors import WireError
from headwater.kv.encoding import RAW, stored_tile_bytes
from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import Shard
from headwater.peers.channels import Channels
from headwater.peers.pull_wire import Read, decode_read_answer, decode_statuses
from headwater.peers.wire import Type, encoding_bits
from headwater.stores.base import RootRef, Status, Tiles
from headwater.stores.workers import run_in_threads

BATCH_BYTES = 16 << 20
"""Of one request, unless one chunk has more."""


class Wanted(NamedTuple):
    """Some tiles of one chunk, and where they go: (layers, heads, stored bytes of a tile), each tile contiguous."""

    chunk: ChunkRef
    shard: Shard
    tiles: Tiles
    encoding: int = RAW
    """Of tiles that go there."""
    others: int = 0
    """Further encodings that are taken, into memory of their own: see `wire.encoding_bits`."""


class Got(NamedTuple):
    """What became of one of them."""

    status: Status
    sums: npt.NDArray[np.uint64] | None = None
    """Of its tiles in [layer][head] order, where the status is OK."""
    encoding: int = RAW
    tiles: Tiles | None = None
    """Where they are."""


Answered = Callable[[int, Got], None]
"""Told the number of something that was wanted, and what became of it."""


def pull(channels: Channels, root: RootRef, wanted: Sequence[Wanted], deadline: float, answered: Answered) -> None:
    """Bring all of it. Raises PeerError where the peer fails; what has been answered by then is in place."""
    works = [partial(_pull, channels, root, wanted, batch, deadline, answered) for batch in batches(wanted, channels)]
    run_in_threads(works, min(channels.settings.connections, max(1, len(works))))


def batches(wanted: Sequence[Wanted], channels: Channels) -> list[list[int]]:
    """Numbers of what is wanted, by request: consecutive chunks of one chain and the same tiles of them, and no more of
    them than keep all connections busy."""
    total = sum([item.tiles.nbytes for item in wanted])
    most = max(1, min(BATCH_BYTES, -(-total // channels.settings.connections)))
    ordered = sorted(range(len(wanted)), key=lambda i: (_tiles(wanted[i].shard), wanted[i].chunk.number))
    found, size = list[list[int]](), 0
    for i in ordered:
        item, last = wanted[i], wanted[found[-1][-1]] if found else None
        follows = last is not None and last.chunk.key == item.chunk.parent and _tiles(last.shard) == _tiles(item.shard)
        if follows and size + item.tiles.nbytes <= most:
            found[-1].append(i)
            size += item.tiles.nbytes
        else:
            found.append([i])
            size = item.tiles.nbytes
    return found


def _tiles(shard: Shard) -> tuple[int, int, int, int, int]:
    return shard.layers.start, shard.layers.stop, shard.layers.step, shard.heads.start, shard.heads.stop


def _request(wanted: Sequence[Wanted], batch: Sequence[int], deadline: float, encodings: int) -> Read:
    """`encodings`: of the peer (`Welcome.encodings`)."""
    shard = Shard(wanted[batch[0]].shard.layers, wanted[batch[0]].shard.heads)
    within_ms = int(max(1.0, 1000 * (deadline - time.monotonic())))
    takes = [encoding_bits([wanted[i].encoding]) | wanted[i].others for i in batch] if encodings else []
    return Read(tuple(wanted[i].chunk for i in batch), shard, min(within_ms, 1 << 31), tuple(takes))


def _pull(
    channels: Channels,
    root: RootRef,
    wanted: Sequence[Wanted],
    batch: Sequence[int],
    deadline: float,
    answered: Answered,
) -> None:
    with channels.use(root.space, deadline) as channel:
        read = _request(wanted, batch, deadline, channel.encodings)
        header, meta = channel.ask(Type.READ, read.encode(), deadline)
        answer, spec = decode_read_answer(meta, read), root.space.spec
        sums, size, got = iter(answer.sums), 0, list[Got]()
        for i, status, encoding in zip(batch, answer.statuses, answer.encodings, strict=True):
            if status != Status.OK:
                got.append(Got(status))
                continue
            tile_bytes = stored_tile_bytes(spec, wanted[i].chunk.num_tokens, encoding)
            size += read.shard.num_tiles * tile_bytes
            got.append(Got(status, next(sums), encoding, _place(wanted[i], encoding, tile_bytes)))
        targets = [target for item in got if item.tiles is not None for target in _targets(item.tiles)]
        if header.data_bytes != size or size != sum([len(target) for target in targets]):
            raise WireError(f"an answer of {header.data_bytes} bytes; expected {size}")
        channel.connection.receive_into(targets, deadline)
    for i, item in zip(batch, got, strict=True):
        answered(i, item)


def _place(wanted: Wanted, encoding: int, tile_bytes: int) -> Tiles:
    """Where tiles go that come in an encoding which was asked for."""
    if encoding == wanted.encoding:
        return wanted.tiles
    return np.empty((*wanted.tiles.shape[:2], tile_bytes), np.uint8)


def _targets(tiles: Tiles) -> list[memoryview]:
    if tiles.flags.c_contiguous:
        return [tiles.reshape(-1).data] if tiles.size else []
    return [tiles[i, j].data for i in range(tiles.shape[0]) for j in range(tiles.shape[1])]


def judge(channels: Channels, root: RootRef, item: Wanted, deadline: float) -> Status:
    """Have the peer look at its own copy of some tiles, which did not verify here; it removes what is damaged."""
    with channels.use(root.space, deadline) as channel:
        _, meta = channel.ask(Type.JUDGE, _request([item], [0], deadline, 0).encode(), deadline)
        return decode_statuses(meta, 1)[0]
