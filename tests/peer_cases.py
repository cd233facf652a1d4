"""Two hosts' pools and a push between them: what the tests of `peers` have in common."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headwater.kv.hashing import ChunkRef
from headwater.kv.spec import KVSpec
from headwater.kv.topology import Shard, Topology, whole_shard
from headwater.peers.address import PeerAddress, parse_address
from headwater.peers.caller import LinkSettings
from headwater.peers.receiver import Receiver, ReceiverSettings
from headwater.peers.sender import PeerSender
from headwater.pool.pool import Pool, open_pool
from headwater.pool.space import Space
from headwater.stores.base import Status

from support import gqa, identity, local_tiles, tile, wait_until

CHUNK = 16
SPEC = gqa(layers=6, heads=4, dim=8)
SECRET = b"a secret that both hosts have"
SRC = Path(__file__).resolve().parents[1] / "src"


def open_space(pool: Pool, spec: KVSpec = SPEC, tag: int = 0, chunk_tokens: int = CHUNK) -> Space:
    """The tests' space in a pool."""
    return pool.space(identity(tag), spec, chunk_tokens=chunk_tokens)


def prompt(space: Space, num_chunks: int, seed: int = 0, tail: int = 0) -> list[ChunkRef]:
    """The chunks of a prompt that differs by `seed`."""
    keys = space.keys([seed, *range(1, num_chunks * space.chunk_tokens + tail)])
    chunks = keys.refs(num_chunks)
    return [*chunks, keys.tail_ref(num_chunks, tail)] if tail else chunks


def save(
    space: Space, chunks: Sequence[ChunkRef], shard: Shard, layers: range | None = None, *, is_alone: bool = True
) -> None:
    """Write a rank's KV, or some layers of it, as a saver does: into extents, with their checksums noted. Whoever is
    not alone may find that somebody else writes them."""
    part = Shard(layers or shard.layers, shard.heads, replicas=shard.replicas, replica=shard.replica)
    before = range(shard.layers.start, part.layers.start) or None
    tiles = [local_tiles(space.spec, chunk, part) for chunk in chunks]
    statuses = space.write(chunks, part, tiles, before=before)
    assert not is_alone or all(status.stored for status in statuses), statuses


def check_arrived(space: Space, chunks: Sequence[ChunkRef], shard: Shard | None = None) -> None:
    """Fail unless a pool has these chunks, every byte right."""
    shard = shard or whole_shard(space.spec)
    out = [space.empty(chunk, shard) for chunk in chunks]
    assert space.read(chunks, shard, out, deadline_s=10.0) == [Status.OK] * len(chunks)
    for chunk, tiles in zip(chunks, out, strict=True):
        assert (tiles == local_tiles(space.spec, chunk, shard)).all()


def visible_layers(space: Space, chunks: Sequence[ChunkRef], heads: range) -> list[int]:
    """How many layers from the first on can be lent of each chunk, each with the right bytes."""
    counts = [0] * len(chunks)
    for layer in range(space.spec.num_layers):
        loan = space.lend(chunks, Shard(range(layer, layer + 1), heads))
        for i, place in enumerate(loan.places):
            if place is None or counts[i] < layer:
                continue
            counts[i] += 1
            size = space.spec.tile_bytes(chunks[i].num_tokens)
            for head in heads:
                at = place.offset + (layer * space.spec.num_kv_heads + head) * size
                stored = np.asarray(place.segment[at : at + size])
                assert (stored == tile(space.spec, chunks[i], layer, head)).all()
        loan.release()
    return counts


def transfer_id() -> str:
    """A fresh one."""
    return secrets.token_hex(8)


@contextlib.contextmanager
def receiving(pool: Pool, **settings: Any) -> Iterator[Receiver]:
    """A receiver in this process."""
    receiver = Receiver(pool, PeerAddress("127.0.0.1", 0), ReceiverSettings(**settings))
    receiver.start()
    try:
        yield receiver
    finally:
        receiver.close()


@contextlib.contextmanager
def sending(
    space: Space, topology: Topology | None = None, server: int = 77, **settings: Any
) -> Iterator[list[PeerSender]]:
    """One sender a rank."""
    shards = (topology or Topology()).shards(space.spec)
    senders = [
        PeerSender(space, shard, server=server, rank=rank, settings=LinkSettings(**settings))
        for rank, shard in enumerate(shards)
    ]
    try:
        yield senders
    finally:
        for sender in senders:
            sender.close()


@contextlib.contextmanager
def two_pools(options: str = "capacity=16MiB") -> Iterator[tuple[Pool, Pool]]:
    """Two hosts' pools, in memory of this process."""
    with open_pool(f"memory://?{options}&deadline=30") as one, open_pool(f"memory://?{options}&deadline=30") as other:
        yield one, other


class ReceiverProcess:
    """`headwater pool receive`, as a process."""

    def __init__(self, url: str, *options: str, listen: str = "127.0.0.1:0", prefix: Sequence[str] = ()) -> None:
        command = [*prefix, sys.executable, "-m", "headwater", "pool", "receive", url, "--listen", listen, "--json"]
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(SRC), os.environ.get("PYTHONPATH", "")])}
        self.process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True, env=env)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the receiver ended at its start"
        self.address = str(parse_address(json.loads(line)["listening"]))

    @property
    def num_fds(self) -> int:
        """Open descriptors."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    @property
    def rss_bytes(self) -> int:
        """Memory that is its own: without what it shares with the pool."""
        with open(f"/proc/{self.process.pid}/status") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))

    def signal(self, number: signal.Signals) -> None:
        """Send one."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """`kill -9`, and wait until it is gone."""
        self.process.kill()
        self.process.communicate(timeout=30)

    def close(self) -> dict[str, Any]:
        """End it as an operator would; what it says at the end."""
        if self.process.poll() is None:
            self.process.terminate()
        out, _ = self.process.communicate(timeout=30)
        lines = out.splitlines()
        return dict(json.loads(lines[-1])) if lines else {}


def nothing_pending(pool: Pool) -> None:
    """Wait until no byte of a pool is reserved by anybody."""
    wait_until(lambda: pool.stats().store.pending_bytes == 0, 10.0, "pending bytes are given back")
