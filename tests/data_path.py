"""The matrix of the data path: every mover, shape of pool, state of the first tier, packing there, load mode and
topology.

A cell saves one prompt, puts the first tier into some state, and lets an engine's two sides bring the prompt back into
a paged cache: the same bytes, everything that some tier has, and afterwards kept in the first tier where that can be. A
cell that means nothing says why.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headwater.connector.config import ConnectorConfig
from headwater.connector.orders import StepReport
from headwater.connector.scheduler import SchedulerSide
from headwater.connector.tracker import Scheduled
from headwater.connector.worker import WorkerSide
from headwater.kv.encoding import RAW, packed_or_raw
from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import Shard, Topology, whole_shard
from headwater.peers.address import PeerAddress
from headwater.peers.receiver import Receiver
from headwater.pool import open_pool
from headwater.pool.pool import Pool
from headwater.pool.space import Space
from headwater.stores.base import Form, Piece, Status
from transfer_pool_cases import BLOCK, CHUNK, SPEC, make_cache, tiles_of

from support import identity, local_tiles, temporary_url
from transfer_cases import ORDERS

MOVERS = ("cpu", "cuda")
POOLS = ("shm", "file", "memory", "shm+file", "shm+redis", "shm+mooncake", "shm+peer")
STATES = ("has it", "emptied", "too small", "full of leases", "suffix only", "another server fills it")
PACKINGS = ("auto", "on")
"""Of the first tier. The KV is bfloat16, so lower tiers hold packed chunks either way."""
MODES = ("async", "layerwise", "blocking")
TOPOLOGIES = ("equal", "other")

NUM_CHUNKS = 8
TOKENS = list(range(NUM_CHUNKS * CHUNK + 5))
SUFFIX_FROM = 3
EXTENT = SPEC.extent_bytes(CHUNK)
FIXED_BYTES = 4096 + 128 * 8192 + (128 << 10)
"""Of a small store: members and index."""
WAIT_S = 60.0


class Cell(NamedTuple):
    """One combination."""

    mover: str
    pool: str
    state: str
    packing: str
    mode: str
    topology: str

    def __str__(self) -> str:
        return ", ".join(self)


@dataclass(frozen=True)
class Places:
    """Where the servers are, and a folder; None for a server that cannot be had here."""

    folder: Path
    redis: str | None = None
    mooncake: str | None = None


def all_cells(movers: tuple[str, ...] = MOVERS) -> list[Cell]:
    """Every combination."""
    return [Cell(*values) for values in product(movers, POOLS, STATES, PACKINGS, MODES, TOPOLOGIES)]


def why_not(cell: Cell) -> str:
    """Why a cell means nothing; empty for one that does."""
    if "+" in cell.pool or cell.state == "has it":
        return ""
    return {
        "emptied": "no tier has it",
        "too small": "one tier cannot hold what does not fit it",
        "full of leases": "one tier has it, or has it not",
        "suffix only": "one tier never has a chunk without its parents",
        "another server fills it": "nobody finds it before it is complete",
    }[cell.state]


def is_kept(cell: Cell) -> bool:
    """Whether everything should be in the first tier afterwards."""
    return cell.state in ("has it", "emptied")


# ---- pools ------------------------------------------------------------------------------------------------------
@contextmanager
def lower_url(cell: Cell, places: Places) -> Iterator[str]:
    """The URL of the lower tier, or nothing."""
    kind = cell.pool.partition("+")[2]
    unique = os.urandom(6).hex()
    if kind == "file":
        with temporary_url("file", places.folder, "capacity=16MiB") as url:
            yield url
    elif kind == "redis":
        yield f"{places.redis}?prefix=m{unique}&lookup=10&deadline=30"
    elif kind == "mooncake":
        yield f"{places.mooncake}?prefix=m{unique}&lookup=10&deadline=30&segment=32MiB&buffer=16MiB"
    elif kind == "peer":
        with another_host(cell, places) as url:
            yield url
    else:
        yield ""


@contextmanager
def another_host(cell: Cell, places: Places) -> Iterator[str]:
    """A host that has the prompt in its pool, and a receiver: nothing is copied to it from here."""
    options = f"capacity=16MiB&packing={cell.packing}"
    with temporary_url("shm", places.folder, options) as url, open_pool(url) as pool:
        write(pool, prompt_chunks(space_of(pool)), writer_of(cell))
        receiver = Receiver(pool, PeerAddress("127.0.0.1", 0))
        receiver.start()
        try:
            yield f"peer://{receiver.address}?lookup=10&deadline=30"
        finally:
            receiver.close()


def writer_of(cell: Cell) -> Topology:
    """Who has stored the prompt."""
    return Topology(tp=4) if cell.topology == "other" else Topology()


def join(*urls: str) -> str:
    return ",".join(url for url in urls if url)


def space_of(pool: Pool) -> Space:
    return pool.space(identity(), SPEC, chunk_tokens=CHUNK)


def prompt_chunks(space: Space) -> list[ChunkRef]:
    keys = space.keys(TOKENS)
    return [*keys.refs(NUM_CHUNKS), keys.tail_ref(NUM_CHUNKS, len(TOKENS) - NUM_CHUNKS * CHUNK)]


def write(pool: Pool, chunks: list[ChunkRef], topology: Topology) -> None:
    """Store chunks as the ranks of some topology."""
    for rank in range(topology.tp):
        shard = topology.shard(SPEC, tp_rank=rank)
        tiles = [local_tiles(SPEC, chunk, shard) for chunk in chunks]
        statuses = space_of(pool).write(chunks, shard, tiles, deadline_s=WAIT_S)
        assert all(status.stored for status in statuses), statuses


@contextmanager
def prepared(cell: Cell, places: Places) -> Iterator[Pool]:
    """A pool of that shape that has the prompt somewhere, and whose first tier is in that state."""
    with ExitStack() as stack:
        lower = stack.enter_context(lower_url(cell, places))
        scheme = cell.pool.partition("+")[0]
        options = f"packing={cell.packing}&capacity"
        first = stack.enter_context(temporary_url(scheme, places.folder, f"{options}=16MiB"))
        pool = stack.enter_context(open_pool(join(first, lower)))
        chunks = prompt_chunks(space_of(pool))
        write(pool, chunks, writer_of(cell))
        packs = cell.packing == "on" or scheme == "file"
        wanted = [Form(encoding=packed_or_raw(SPEC, chunk.num_tokens) if packs else RAW) for chunk in chunks]
        assert pool.first_tier.forms(chunks) == wanted  # type: ignore[attr-defined]
        assert pool.flush(WAIT_S)
        if cell.state in ("emptied", "suffix only", "another server fills it"):
            pool._store._front.clear(None)  # type: ignore[attr-defined]
        if cell.state == "another server fills it":
            stack.enter_context(another_server(first))
        if cell.state in ("too small", "full of leases"):
            num_chunks = NUM_CHUNKS - 2 if cell.state == "too small" else 3 * NUM_CHUNKS
            capacity = FIXED_BYTES + num_chunks * EXTENT
            small = stack.enter_context(temporary_url(scheme, places.folder, f"{options}={capacity}"))
            pool = stack.enter_context(open_pool(join(small, lower)))
            if cell.state == "full of leases":
                fill_with_leases(pool)
        yield pool


def fill_with_leases(pool: Pool) -> None:
    """Other chunks in every unit of the first tier, none of which may go. They end with the pool."""
    space = space_of(pool)
    for number in range(64):
        keys = space.keys([100_000 + number, *range(1, 4 * CHUNK)])
        chunks = keys.refs(4)
        shard = whole_shard(SPEC)
        front = pool._store._front  # type: ignore[attr-defined]
        root = space._roots.find(chunks[0].root)
        pieces = [Piece(chunk, shard, local_tiles(SPEC, chunk, shard)) for chunk in chunks]
        statuses = front.write(root, pieces, WAIT_S)
        for chunk, status in zip(chunks, statuses, strict=True):
            if status.stored:
                assert front.lease(root, chunk.key) is not None
        if Status.FULL in statuses:
            return
    raise AssertionError("the first tier is never full")


OTHER_SERVER = """
import sys
from data_path import prompt_chunks, space_of
from headwater.kv.topology import whole_shard
from headwater.pool import open_pool
from transfer_pool_cases import SPEC
with open_pool(sys.argv[1], group=4242) as pool:
    space = space_of(pool)
    extents = space.reserve(prompt_chunks(space)[:4], whole_shard(SPEC), deadline_s=30)
    print([extent.status.name for extent in extents], flush=True)
    sys.stdin.read()
"""


@contextmanager
def another_server(url: str) -> Iterator[None]:
    """A process of another server that has begun the prompt's first chunks in the first tier, and does not go on."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", OTHER_SERVER, url], stdin=pipe, stdout=pipe, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == str(["OK"] * 4)
            yield
        finally:
            process.kill()


# ---- an engine --------------------------------------------------------------------------------------------------
class Rank:
    """One rank's cache and worker side."""

    def __init__(
        self, space: Space, shard: Shard, config: ConnectorConfig, device: str, number: int, mover: str
    ) -> None:
        self.shard = shard
        self.view, blocks = make_cache(shard, device, ORDERS[number % len(ORDERS)])
        self.blocks = blocks[blocks > 0][: -(-len(TOKENS) // BLOCK)]
        self.side = WorkerSide(space, self.view, shard, config, dummy_block=0, mover=mover)

    def check(self, chunks: list[ChunkRef], layers: range | None = None) -> None:
        """The cache holds these chunks' one true content."""
        found = tiles_of(self.view, self.shard, chunks, self.blocks)
        for chunk, got in zip(chunks, found, strict=True):
            want = local_tiles(SPEC, chunk, self.shard)
            part = slice(None) if layers is None else slice(layers.start, layers.stop)
            assert np.array_equal(got[part], want[part]), f"chunk {chunk.number} differs"


def run_cell(cell: Cell, places: Places, device: str = "cpu") -> str:
    """Run one cell; what it brought and kept. Fails where that is not what it should be."""
    if reason := why_not(cell):
        return f"n/a, {reason}"
    for kind, place in (("redis", places.redis), ("mooncake", places.mooncake)):
        if kind in cell.pool and place is None:
            return f"not run, no {kind} server here"
    config = ConnectorConfig(pool="memory://", load_mode=cell.mode, min_load_tokens=1, load_deadline_s=WAIT_S)
    topology = Topology(tp=2) if cell.topology == "other" else Topology()
    with prepared(cell, places) as pool, ExitStack() as stack:
        space = space_of(pool)
        chunks = prompt_chunks(space)
        num_local = SUFFIX_FROM * CHUNK if cell.state == "suffix only" else 0
        wanted = chunks[num_local // CHUNK :]
        ranks = []
        for number in range(topology.tp):
            rank = Rank(space, topology.shard(SPEC, tp_rank=number), config, device, number, cell.mover)
            stack.callback(rank.side.close)
            ranks.append(rank)
        side = SchedulerSide(space, config, block_size=BLOCK, num_ranks=len(ranks), dummy_block=0)
        mode = load(side, ranks, wanted, num_local)
        assert mode == (cell.mode if is_kept(cell) else "async"), f"loaded in mode {mode}"
        for rank in ranks:
            rank.check(wanted)
        kept = space.exists(chunks).count(True)
        assert kept == len(chunks) or not is_kept(cell), f"{kept} of {len(chunks)} chunks are in the first tier"
        side.finish("request", len(TOKENS), [])
        assert pool.verify().clean
        return f"{len(wanted)}/{len(wanted)}, {kept} kept"


def load(side: SchedulerSide, ranks: list[Rank], wanted: list[ChunkRef], num_local: int) -> str:
    """Match, fetch and load the prompt as an engine does; the mode that was chosen."""
    side.add("request", TOKENS, len(TOKENS))
    end = time.monotonic() + WAIT_S
    # A far index that answers late, on a busy machine, is a miss: an engine asks again with its next step.
    while (plan := side.match("request", num_local)) is None or (not plan.num_tokens and time.monotonic() < end):
        assert time.monotonic() < end, "a fetch does not end"
        side.wait_fetch(0.05)
    assert plan.num_tokens == len(TOKENS) - 1 - num_local, f"{plan.num_tokens} tokens can be loaded"
    side.start_load("request", ranks[0].blocks)
    step = [Scheduled("request", len(TOKENS) - 1, 1, ranks[0].blocks, is_new=True)]
    orders = side.order([] if plan.mode == "async" else step, is_idle=plan.mode == "async")
    for rank in ranks:
        rank.blocks = orders.loads[0].job.block_ids
        rank.side.start_step(orders)
        rank.side.start_loads(orders)
        if rank.side.needs_layers:
            for layer in range(SPEC.num_layers):
                rank.side.before_layer(layer)
                rank.check(wanted, range(layer, layer + 1))
                rank.side.after_layer(layer)
        rank.side.end_step()
    ends: list[Any] = []
    while not ends:
        assert time.monotonic() < end, "a load does not end"
        report = StepReport()
        for rank in ranks:
            report = report.merged(rank.side.take_report())
        ends = side.handle_report(report)
    (ended,) = ends
    assert ended.num_tokens >= len(TOKENS) - 1, f"only {ended.num_tokens} tokens came"
    return plan.mode


# ---- printing ---------------------------------------------------------------------------------------------------
def matrix_text(results: dict[Cell, str]) -> str:
    """The results as a table: a row for each mover, pool, state and packing, a column for each mode and topology."""
    columns = [(mode, topology) for mode in MODES for topology in TOPOLOGIES]
    lines = [f"{'':50}" + "".join(f"{mode + ' ' + topology:>22}" for mode, topology in columns)]
    rows = dict.fromkeys((cell.mover, cell.pool, cell.state, cell.packing) for cell in results)
    for row in rows:
        found = [results.get(Cell(*row, mode, topology), "") for mode, topology in columns]
        name = f"{row[0]:5}{row[1]:14}{row[2]:25}{row[3]:6}"
        if len(set(found)) == 1 and found[0].startswith("n/a"):
            lines.append(name + found[0])
        else:
            lines.append(name + "".join(f"{text or '·':>22}" for text in found))
    return "\n".join(lines)


def run_all(places: Places, device: str, movers: tuple[str, ...], note: Callable[[str], None]) -> dict[Cell, str]:
    """Every cell; those that fail say so."""
    results = dict[Cell, str]()
    for cell in all_cells(movers):
        try:
            results[cell] = run_cell(cell, places, device)
        except AssertionError as error:
            results[cell] = f"FAILED: {error}"
            note(f"{cell}: {error}")
    return results
