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
from headwater.kv.encoding import stored_tile_bytes
from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import Shard
from headwater.peers.channels import Channels
from headwater.peers.pull_wire import Read, decode_read_answer, decode_statuses
from headwater.peers.wire import Type
from headwater.stores.base import RootRef, Status, Tiles
from headwater.stores.workers import run_in_threads

BATCH_BYTES = 16 << 20
"""Of one request, unless one chunk has more."""


class Wanted(NamedTuple):
    """Some tiles of one chunk, and where they go: (layers, heads, stored bytes of a tile), each tile contiguous."""

    chunk: ChunkRef
    shard: Shard
    tiles: Tiles


class Got(NamedTuple):
    """What became of one of them."""

    status: Status
    sums: npt.NDArray[np.uint64] | None = None
    """Of its tiles in [layer][head] order, where the status is OK."""


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


def _request(wanted: Sequence[Wanted], batch: Sequence[int], deadline: float) -> Read:
    shard = Shard(wanted[batch[0]].shard.layers, wanted[batch[0]].shard.heads)
    within_ms = int(max(1.0, 1000 * (deadline - time.monotonic())))
    return Read(tuple(wanted[i].chunk for i in batch), shard, min(within_ms, 1 << 31))


def _pull(
    channels: Channels,
    root: RootRef,
    wanted: Sequence[Wanted],
    batch: Sequence[int],
    deadline: float,
    answered: Answered,
) -> None:
    with channels.use(root.space, deadline) as channel:
        read = _request(wanted, batch, deadline)
        header, meta = channel.ask(Type.READ, read.encode(), deadline)
        statuses, sums = decode_read_answer(meta, len(batch), read.shard.num_tiles)
        good = [i for i, status in zip(batch, statuses, strict=True) if status == Status.OK]
        spec = root.space.spec
        size = sum([read.shard.num_tiles * stored_tile_bytes(spec, wanted[i].chunk.num_tokens) for i in good])
        targets = [target for i in good for target in _targets(wanted[i].tiles)]
        if header.data_bytes != size or size != sum([len(target) for target in targets]):
            raise WireError(f"an answer of {header.data_bytes} bytes; expected {size}")
        channel.connection.receive_into(targets, deadline)
    for i, status in zip(batch, statuses, strict=True):
        answered(i, Got(status, sums[good.index(i)]) if status == Status.OK else Got(status))


def _targets(tiles: Tiles) -> list[memoryview]:
    if tiles.flags.c_contiguous:
        return [tiles.reshape(-1).data] if tiles.size else []
    return [tiles[i, j].data for i in range(tiles.shape[0]) for j in range(tiles.shape[1])]


def judge(channels: Channels, root: RootRef, item: Wanted, deadline: float) -> Status:
    """Have the peer look at its own copy of some tiles, which did not verify here; it removes what is damaged."""
    with channels.use(root.space, deadline) as channel:
        _, meta = channel.ask(Type.JUDGE, _request([item], [0], deadline).encode(), deadline)
        return decode_statuses(meta, 1)[0]
