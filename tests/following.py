"""The matrix of loads that follow a filler: every mover, load mode and fate of the process that fills the chunks.

The filler is a process of another server, which the test leads step by step. At first it has completed some chunks and
brought the first layers of the others; a request that expects all of it is admitted then. A cell says what came.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from headwater.connector.config import ConnectorConfig
from headwater.connector.finder import LoadPlan
from headwater.connector.orders import LoadOrder, StepReport
from headwater.connector.scheduler import LoadEnd, SchedulerSide
from headwater.connector.transfers import TransferParams
from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import Topology
from headwater.pool import Pool, Space, open_pool
from transfer_pool_cases import BLOCK, SPEC

from data_path import CHUNK, TOKENS, WAIT_S, Rank, prompt_chunks, space_of
from support import local_tiles, temporary_url, wait_until

MOVERS = ("cpu", "cuda")
MODES = ("async", "layerwise", "blocking")
FATES = ("completes", "aborts", "dies", "slow", "two fillers")

NUM_FIRST = 3
"""Chunks that are complete before the request comes."""
FIRST_LAYERS, ALL_LAYERS = range(2), range(SPEC.num_layers)

FILLER = """
import sys
from dataclasses import replace
from data_path import prompt_chunks, space_of
from headwater.kv.topology import whole_shard
from headwater.pool import open_pool
from support import local_tiles
from transfer_pool_cases import SPEC
with open_pool(sys.argv[1], group=int(sys.argv[2])) as pool:
    space = space_of(pool)
    chunks = prompt_chunks(space)
    print("ready", flush=True)
    for line in sys.stdin:
        verb, *numbers = line.split()
        first, stop, layer, end = map(int, numbers)
        mine, shard = chunks[first:stop], replace(whole_shard(SPEC), layers=range(layer, end))
        if verb == "fill":
            before = range(layer) if layer else None
            tiles = [local_tiles(SPEC, chunk, shard) for chunk in mine]
            print([status.name for status in space.write(mine, shard, tiles, before=before, deadline_s=30)], flush=True)
        elif verb == "abort":
            print(space.abort(mine), flush=True)
"""


class Filler:
    """A process of another server that writes chunks of the prompt as it is told."""

    def __init__(self, url: str, group: int) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [sys.executable, "-c", FILLER, url, str(group)], stdin=pipe, stdout=pipe, text=True, env=environment
        )
        assert self._read() == "ready"

    def fill(self, first: int, stop: int, layers: range) -> None:
        """Write some layers of some chunks, and commit them."""
        said = self._ask(f"fill {first} {stop} {layers.start} {layers.stop}")
        assert said == str(["OK"] * (stop - first)), said

    def abort(self, first: int, stop: int) -> None:
        """Give chunks up."""
        assert self._ask(f"abort {first} {stop} 0 1") == str(stop - first)

    def kill(self) -> None:
        """As `kill -9` does it. Idempotent."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def _ask(self, line: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self._read()

    def _read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


class Engine:
    """The two sides of an engine, step by step."""

    def __init__(
        self,
        space: Space,
        mover: str,
        config: ConnectorConfig,
        topology: Topology = Topology(),  # noqa: B008
    ) -> None:
        self.space = space
        self.side = SchedulerSide(space, config, block_size=BLOCK, num_ranks=topology.tp, dummy_block=0)
        self.ranks = [
            Rank(space, topology.shard(SPEC, tp_rank=number), config, "cpu", 0, mover) for number in range(topology.tp)
        ]
        for rank in self.ranks:
            rank.blocks = self.ranks[0].blocks

    def add(self, name: str = "request", transfer: TransferParams | None = None) -> None:
        """A new request with the prompt."""
        self.side.add(name, TOKENS, len(TOKENS), transfer=transfer)

    def plan(self, name: str = "request") -> LoadPlan:
        """Ask until the pool answers."""
        end = time.monotonic() + WAIT_S
        while (plan := self.side.match(name, 0)) is None:
            assert time.monotonic() < end, "it is never admitted"
            self.side.wait_fetch(0.05)
        return plan

    def load(self, name: str = "request") -> LoadOrder:
        """Begin to load what was planned, outside the batch."""
        self.side.start_load(name, self.ranks[0].blocks)
        orders = self.side.order([], is_idle=False)
        (order,) = orders.loads
        for rank in self.ranks:
            rank.blocks = order.job.block_ids
            rank.side.start_step(orders)
            rank.side.start_loads(orders)
            rank.side.end_step()
        return order

    def admit(self, transfer: TransferParams | None = None) -> LoadOrder:
        """A new request whose load begins as soon as it can."""
        self.add(transfer=transfer)
        plan = self.plan()
        assert (plan.num_tokens, plan.mode) == (len(TOKENS) - 1, "async")
        return self.load()

    def step(self, **orders: Any) -> None:
        """A step that computes nothing."""
        made = self.side.order([], **orders)
        for rank in self.ranks:
            rank.side.start_step(made)
            rank.side.start_loads(made)
            rank.side.end_step()

    def hear(self) -> list[LoadEnd]:
        """Loads that have ended."""
        report = StepReport()
        for rank in self.ranks:
            report = report.merged(rank.side.take_report())
        return self.side.handle_report(report)

    def ended(self) -> LoadEnd:
        """Wait for the end of the load."""
        ends = list[LoadEnd]()

        def hear() -> bool:
            ends.extend(self.hear())
            return bool(ends)

        wait_until(hear)
        (end,) = ends
        return end

    def has(self, chunks: list[ChunkRef], layers: range | None = None) -> bool:
        """Whether the caches hold these chunks."""
        try:
            for rank in self.ranks:
                rank.check(chunks, layers)
        except AssertionError:
            return False
        return True

    def close(self) -> None:
        for rank in self.ranks:
            rank.side.close()


class Cell(NamedTuple):
    """One combination."""

    mover: str
    mode: str
    fate: str

    def __str__(self) -> str:
        return ", ".join(self)


def all_cells() -> list[Cell]:
    return [Cell(*values) for values in product(MOVERS, MODES, FATES)]


@contextmanager
def half_filled(url: str) -> Iterator[Filler]:
    """A filler that has completed the first chunks, and brought the first layers of the others."""
    filler = Filler(url, 4242)
    try:
        filler.fill(0, NUM_FIRST, ALL_LAYERS)
        filler.fill(NUM_FIRST, NUM_CHUNKS, FIRST_LAYERS)
        yield filler
    finally:
        filler.kill()


NUM_CHUNKS = len(TOKENS) // CHUNK + 1


def run_cell(cell: Cell, folder: Path) -> str:
    """Run one cell; what came. Fails where that is not what it should be."""
    with ExitStack() as stack:
        url = stack.enter_context(temporary_url("shm", folder, "capacity=16MiB"))
        pool = stack.enter_context(open_pool(url))
        space = space_of(pool)
        chunks = prompt_chunks(space)
        config = ConnectorConfig(pool="memory://", load_mode=cell.mode, min_load_tokens=1, load_deadline_s=WAIT_S)
        engine = Engine(space, cell.mover, config)
        stack.callback(engine.close)
        filler = stack.enter_context(half_filled(url))

        engine.add("another")  # it expects nothing, and is loaded as ever: what is complete
        assert engine.plan("another") == LoadPlan(NUM_FIRST * CHUNK, cell.mode)
        engine.side.finish("another", 0, [])

        patience_s = {"aborts": 0.3, "dies": 1.0}.get(cell.fate, WAIT_S)
        transfer = TransferParams(id="7", wait_s=4.0 if cell.fate == "slow" else WAIT_S, start_s=patience_s)
        engine.admit(transfer)
        wait_until(lambda: engine.has(chunks[:NUM_FIRST]) and engine.has(chunks, FIRST_LAYERS))
        assert not engine.hear(), "it ended although most layers are missing"
        end_filling(cell, filler, pool, url, stack)
        end = engine.ended()
        is_whole = cell.fate in ("completes", "two fillers")
        assert end.num_tokens == (len(TOKENS) if is_whole else NUM_FIRST * CHUNK), f"{end.num_tokens} tokens came"
        assert engine.has(chunks if is_whole else chunks[:NUM_FIRST]), "what came is not right"
        stats = engine.side.counts.stats()
        assert (stats.num_expected, stats.num_followed, stats.num_given_up) == (1, 1, int(not is_whole))
        engine.side.finish("request", 0, [])
        if is_whole:
            engine.add("again")
            assert engine.plan("again") == LoadPlan(len(TOKENS) - 1, cell.mode)
            engine.side.finish("again", 0, [])
        filler.kill()
        assert pool.verify().clean
        return f"{NUM_CHUNKS if is_whole else NUM_FIRST}/{NUM_CHUNKS}"


def end_filling(cell: Cell, filler: Filler, pool: Pool, url: str, stack: ExitStack) -> None:
    """What becomes of the filler, and of what it has begun."""
    if cell.fate == "completes":
        for layer in ALL_LAYERS[len(FIRST_LAYERS) :]:
            filler.fill(NUM_FIRST, NUM_CHUNKS, range(layer, layer + 1))
    elif cell.fate == "aborts":
        filler.abort(NUM_FIRST, NUM_CHUNKS)
    elif cell.fate == "dies":
        filler.kill()
        write_others(pool)
    elif cell.fate == "two fillers":
        filler.kill()
        other = Filler(url, 4243)
        stack.callback(other.kill)
        other.fill(NUM_FIRST, NUM_CHUNKS, range(1))
        other.fill(NUM_FIRST, NUM_CHUNKS, range(1, SPEC.num_layers))


def write_others(pool: Pool) -> None:
    """Other chunks over everything that a dead writer has left."""
    space, shard = space_of(pool), Topology().shard(SPEC)
    for number in range(2):
        keys = space.keys([100_000 + number, *range(1, 60 * CHUNK)])
        chunks = keys.refs(60)
        tiles = [local_tiles(SPEC, chunk, shard) for chunk in chunks]
        space.write(chunks, shard, tiles, deadline_s=WAIT_S)
    pool._store._core.transact(  # type: ignore[attr-defined]
        lambda: pool._store._core.janitor.sweep(),  # type: ignore[attr-defined]
        time.monotonic() + WAIT_S,
    )
    assert pool.stats().store.pending_bytes == 0, "what a dead writer has begun is still reserved"


def matrix_text(results: dict[Cell, str]) -> str:
    """The results as a table: a row for each mover and fate, a column for each mode."""
    lines = [f"{'':24}" + "".join(f"{mode:>12}" for mode in MODES)]
    for mover, fate in product(MOVERS, FATES):
        found = [results.get(Cell(mover, mode, fate), "·") for mode in MODES]
        lines.append(f"{mover:6}{fate:18}" + "".join(f"{text:>12}" for text in found))
    return "\n".join(lines)
