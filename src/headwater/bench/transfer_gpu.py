"""The measurements of `headwater bench transfer`.

Every round saves new chunks and loads them again, with one large pinned copy of the same bytes, and the same pages
copied without re-ordering, beside it; a round that does not count comes first and pays for compiling, for new segments
and for registering them. *Saved* is visible and checksummed in the pool, *loaded* is verified and in the cache.
"""

from __future__ import annotations

import os
import queue
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headwater.bench.measure import Note, Rounds, gbps, take_turns
from headwater.errors import EngineError
from headwater.kernels.dtypes import TORCH_DTYPES
from headwater.kv.hashing import ChunkRef
from headwater.kv.identity import Identity
from headwater.kv.spec import KVSpec
from headwater.kv.topology import Shard
from headwater.pool.pool import Pool, open_pool
from headwater.pool.space import Space
from headwater.stores.embedded import destroy
from headwater.stores.url import format_size, parse_url
from headwater.transfer.load import Loader
from headwater.transfer.save import Saver
from headwater.transfer.streams import SWITCH_S, switch_threads_often
from headwater.transfer.view import PagedView, view_tensors

Blocks = npt.NDArray[np.int32]

AXES = ("plane", "block", "token", "head", "dim")
LATENT_AXES = ("block", "token", "dim")
_DEADLINE_S = 30.0
_PYTHONS_SWITCH_S = 0.005
_SHM = "/dev/shm"


@dataclass(frozen=True)
class TransferBench:
    """What to move: the KV of an 8B-class model."""

    num_layers: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    num_tokens: int = 65536
    chunk_tokens: int = 256
    block_size: int = 16
    staging_bytes: int = 1 << 30
    pairs: int = 7
    num_products: int = 128
    product_size: int = 8192
    naive_copies: int = 4000
    is_quick: bool = False
    latent: tuple[int, int] | None = None
    """Widths of latent and rotary key: MLA's KV instead, in one row of each layer's tensor."""
    packed: bool = False
    """Values that can be packed, instead of noise."""

    def spec(self, device: torch.device) -> KVSpec:
        """One token's KV; on a CPU in float32, unless it is to be packed."""
        dtype = "bfloat16" if device.type == "cuda" or self.packed else "float32"
        if self.latent is not None:
            latent, rope = self.latent
            return KVSpec.mla(num_layers=self.num_layers, latent_dim=latent, rope_dim=rope, dtype=dtype)
        return KVSpec.gqa(
            num_layers=self.num_layers, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, dtype=dtype
        )


def bench_transfer(bench: TransferBench, note: Note, device: torch.device) -> dict[str, Any]:
    """All figures. Raises what the pool raises where /dev/shm has no room at all."""
    switch_threads_often()
    spec = bench.spec(device)
    extent = spec.extent_bytes(bench.chunk_tokens)
    asked = spec.extent_bytes(bench.num_tokens)
    # Pending bytes take a quarter of a pool at most, and seven of eight ranks leave all theirs pending.
    free = shutil.disk_usage(_SHM).free
    capacity = min(int(4.6 * asked) + (64 << 20), int(free * 0.9))
    tokens = min(bench.num_tokens, int(capacity * 0.9) // extent * bench.chunk_tokens)
    tokens_tp8 = min(bench.num_tokens, int(capacity * 0.95) // 4 // extent * bench.chunk_tokens)
    report: dict[str, Any] = {"tokens": tokens, "tokens_tp8": tokens_tp8, "shm_free_gib": free / 2**30, "note": None}
    if min(tokens, tokens_tp8) < bench.num_tokens:
        report["note"] = f"/dev/shm has {format_size(free)} free: {tokens:,} and (tp8) {tokens_tp8:,} tokens instead"
        note(report["note"])
    url = f"shm:///headwater-bench-{os.getpid()}"
    try:
        with open_pool(f"{url}?capacity={capacity}&packing=off") as pool:
            identity = Identity(weights=f"sha256:{1:064x}", run_dtype="bfloat16", kv_dtype="bfloat16")
            space = pool.space(identity, spec, chunk_tokens=bench.chunk_tokens)
            for measure, count in ((_one_rank, tokens), (_one_of_eight, tokens_tp8)):
                report |= measure(bench, pool, space, count, note, device)
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    finally:
        destroy(parse_url(url))
    return report


# ---- one rank that holds everything -----------------------------------------------------------------------------
def _one_rank(
    bench: TransferBench, pool: Pool, space: Space, tokens: int, note: Note, device: torch.device
) -> dict[str, Any]:
    spec, total = space.spec, space.spec.extent_bytes(tokens)
    with open_rank(bench, pool, space, range(spec.num_kv_heads), tokens, device) as rank:
        large = LargeCopy(total, device)
        raw = _RawPages(rank, large)
        note(f"TP=1: {tokens:,} tokens, {format_size(total)}, {bench.pairs} rounds")
        work = {"out": large.copy_out, "save": rank.save, "in": large.copy_in, "load": rank.load}
        rounds = run_rounds(work | {"raw_save": raw.save, "raw_load": raw.load}, bench.pairs, rank.renew, device)
        rank.check_loaded()
        note("one chunk at a time")
        save_ms, load_ms = _fixed(rank, total / rounds.time("out"), total / rounds.time("in"))
        report = speed_ratios(rounds, total, "") | {"save_fixed_ms": save_ms, "load_fixed_ms": load_ms}
        report |= {"raw_save_gbps": gbps(total, rounds.time("raw_save"))}
        report |= {"raw_load_gbps": gbps(total, rounds.time("raw_load"))}
        report["equal_topology_ratio"] = min(rounds.ratio("raw_save", "save"), rounds.ratio("raw_load", "load"))
        report["equal_topology_noise"] = max(rounds.spread("raw_save"), rounds.spread("raw_load"))
        note(f"a copy per head and token, {bench.naive_copies:,} of them")
        naive_s = _naive(bench, rank, large, device)
        rows = tokens * spec.num_layers * spec.num_kv_heads * len(spec.planes)
        report |= {"naive_save_s": naive_s * rows, "naive_ratio": rounds.time("out") / (naive_s * rows)}
        report["naive_note"] = f"extrapolated from {bench.naive_copies:,} of {rows:,} copies"
        note("matrix products beside saving")
        report |= interference(bench, rank, total / rounds.time("out"), device)
    return report


# ---- one rank of eight ------------------------------------------------------------------------------------------
def _one_of_eight(
    bench: TransferBench, pool: Pool, space: Space, tokens: int, note: Note, device: torch.device
) -> dict[str, Any]:
    heads = space.spec.num_kv_heads
    total = space.spec.extent_bytes(tokens) // heads
    note(f"one rank of TP={heads}: {tokens:,} tokens, {format_size(total)}, {bench.pairs} rounds")
    with (
        open_rank(bench, pool, space, range(1), tokens, device) as rank,
        open_rank(bench, pool, space, range(1, heads), tokens, device, doubled=False) as others,
    ):
        large = LargeCopy(total, device)

        def renew() -> None:
            rank.renew()
            others.chunks = rank.chunks
            others.store()

        work = {"out": large.copy_out, "save": rank.save, "in": large.copy_in, "load": rank.load}
        rounds = run_rounds(work, bench.pairs, renew, device)
        rank.check_loaded()
    return speed_ratios(rounds, total, "_tp8")


class BenchRank:
    """A rank's cache and its ways into the pool and out of it. Chunks are loaded into other blocks than they left."""

    def __init__(
        self,
        bench: TransferBench,
        pool: Pool,
        space: Space,
        heads: range,
        tokens: int,
        device: torch.device,
        doubled: bool,
    ) -> None:
        self.bench, self.space, self.tokens = bench, space, tokens
        self._pool = pool
        spec = space.spec
        num_blocks = tokens // bench.block_size
        count = num_blocks * (1 + doubled)
        shape: tuple[int, ...] = (len(spec.planes), count, bench.block_size, len(heads), bench.head_dim)
        axes: tuple[str, ...] = AXES
        if bench.latent is not None:
            shape, axes = (count, bench.block_size, sum(bench.latent)), LATENT_AXES
        dtype, fill = TORCH_DTYPES[spec.planes[0].dtype], _values if bench.packed else _noise
        self.layers = [fill(shape, dtype, device) for _ in range(spec.num_layers)]
        self.view: PagedView = view_tensors(spec, self.layers, axes, heads=heads)
        order = np.random.default_rng(7).permutation(count).astype(np.int32)
        self.blocks: Blocks = order[:num_blocks]
        self.other_blocks: Blocks = order[-num_blocks:]
        self.shard = Shard(range(spec.num_layers), heads)
        self._ends: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self.saver = Saver(space, self.view, self.shard, staging_bytes=bench.staging_bytes, deadline_s=_DEADLINE_S)
        self.loader = Loader(
            space,
            self.view,
            self.shard,
            staging_bytes=bench.staging_bytes,
            deadline_s=_DEADLINE_S,
            on_done=lambda name, count: self._ends.put((name, count)),
        )
        self.saver.wait_prepared()
        self._number = 0
        self.chunks: list[ChunkRef] = []

    def renew(self) -> None:
        """Other tokens, so other chunks; the old ones go."""
        self._number += 1
        self._pool.clear(space=self.space)
        tokens = np.random.default_rng(self._number).integers(0, 1 << 30, self.tokens)
        self.chunks = self.space.keys(tokens).refs(self.tokens // self.bench.chunk_tokens)

    def store(self, chunks: Sequence[ChunkRef] | None = None) -> None:
        """Save, and wait until it is done. Like an engine that has nothing else to do, it waits instead of dropping."""
        chunks, saver, done = self.chunks if chunks is None else chunks, self.saver, 0
        while done < len(chunks):
            # Few large calls, as an engine makes them: two threads in turns cost the interpreter more than either.
            saver.wait_for_room(min(saver.ring.count // 4, len(chunks) - done), _DEADLINE_S)
            count = min(saver.ring.num_free, len(chunks) - done)
            saver.save("bench", chunks[done : done + count], self.blocks)
            done += count
        if not saver.drain(_DEADLINE_S) or saver.num_dropped:
            raise EngineError(f"{saver.num_dropped} chunks were dropped: {dict(saver.statuses)}")

    def save(self, chunks: Sequence[ChunkRef] | None = None) -> None:
        """`store`, and see that all can be found."""
        chunks = self.chunks if chunks is None else chunks
        self.store(chunks)
        if not self.space.exists([chunks[-1]])[0]:
            raise EngineError(f"what was saved cannot be found: {dict(self.saver.statuses)}")

    def load(self, chunks: Sequence[ChunkRef] | None = None) -> None:
        """Load, and see that all arrived."""
        chunks = self.chunks if chunks is None else chunks
        self.loader.load("bench", chunks, self.other_blocks)
        _, count = self._ends.get(timeout=_DEADLINE_S)
        if count != len(chunks):
            raise EngineError(f"{count} of {len(chunks)} chunks arrived: {dict(self.loader.statuses)}")

    def check_loaded(self) -> None:
        """What was loaded into the other blocks is what was saved."""
        device = self.view.device
        here, there = (torch.from_numpy(b.astype(np.int64)).to(device) for b in (self.blocks, self.other_blocks))
        for layer in (self.layers[0], self.layers[-1]):
            bits = layer.view(torch.int16 if layer.dtype == torch.bfloat16 else torch.int32)
            axis = 0 if self.bench.latent is not None else 1
            if not torch.equal(bits.index_select(axis, here), bits.index_select(axis, there)):
                raise EngineError("what was loaded is not what was saved")

    def close(self) -> None:
        self.saver.close()
        self.loader.close()
        self.layers = []


@contextmanager
def open_rank(
    bench: TransferBench,
    pool: Pool,
    space: Space,
    heads: range,
    tokens: int,
    device: torch.device,
    doubled: bool = True,
) -> Iterator[BenchRank]:
    rank = BenchRank(bench, pool, space, heads, tokens, device, doubled=doubled)
    try:
        yield rank
    finally:
        rank.close()


class LargeCopy:
    """One large copy, each way: the speed of the bus."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.there = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.here = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.here.zero_()

    def copy_out(self) -> None:
        self.here.copy_(self.there, non_blocking=True)

    def copy_in(self) -> None:
        self.there.copy_(self.here, non_blocking=True)


class _RawPages:
    """What an engine could do whose peers are all like itself: its pages as they are, layer by layer, unchecked."""

    def __init__(self, rank: BenchRank, large: LargeCopy) -> None:
        self._layers, self._large = rank.layers, large
        device = rank.view.device
        self._ids = [torch.from_numpy(b.astype(np.int64)).to(device) for b in (rank.blocks, rank.other_blocks)]
        shape = (rank.layers[0].shape[0], len(rank.blocks), *rank.layers[0].shape[2:])
        self._stages = [torch.empty(shape, dtype=rank.layers[0].dtype, device=device) for _ in range(3)]
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    def save(self) -> None:
        self._through(self._gather, self._out)

    def load(self) -> None:
        self._through(self._in, self._scatter)

    def _through(self, first: Callable[[int, Tensor], None], second: Callable[[int, Tensor], None]) -> None:
        """Both for every layer, with the copies on a stream of their own."""
        if self._copies is None:
            for number in range(len(self._layers)):
                first(number, self._stages[0])
                second(number, self._stages[0])
            return
        own, copies = torch.cuda.current_stream(), self._copies
        streams = (own, copies) if first == self._gather else (copies, own)
        free: list[torch.cuda.Event | None] = [None] * len(self._stages)
        for number in range(len(self._layers)):
            at = number % len(self._stages)
            with torch.cuda.stream(streams[0]):
                if (event := free[at]) is not None:
                    streams[0].wait_event(event)
                first(number, self._stages[at])
                ready = streams[0].record_event()
            with torch.cuda.stream(streams[1]):
                streams[1].wait_event(ready)
                second(number, self._stages[at])
                free[at] = streams[1].record_event()

    def _gather(self, number: int, stage: Tensor) -> None:
        torch.index_select(self._layers[number], 1, self._ids[0], out=stage)

    def _scatter(self, number: int, stage: Tensor) -> None:
        self._layers[number].index_copy_(1, self._ids[1], stage)

    def _out(self, number: int, stage: Tensor) -> None:
        self._place(number, stage).copy_(stage.view(torch.uint8).flatten(), non_blocking=True)

    def _in(self, number: int, stage: Tensor) -> None:
        stage.view(torch.uint8).flatten().copy_(self._place(number, stage), non_blocking=True)

    def _place(self, number: int, stage: Tensor) -> Tensor:
        size = stage.numel() * stage.element_size()
        return self._large.here[number * size : (number + 1) * size]


def _fixed(rank: BenchRank, out_rate: float, in_rate: float) -> tuple[float, float]:
    """Milliseconds of saving and loading one chunk, beyond what its bytes take on the bus."""
    rank.renew()
    chunks = rank.chunks[:16]
    size = rank.space.spec.extent_bytes(rank.bench.chunk_tokens)
    times: dict[str, list[float]] = {"save": [], "load": []}
    for chunk in chunks:
        for name, work in (("save", rank.save), ("load", rank.load)):
            start = time.perf_counter()
            work([chunk])
            times[name].append(time.perf_counter() - start)
    save_s, load_s = (float(np.median(times[name])) for name in ("save", "load"))
    return 1000 * (save_s - size / out_rate), 1000 * (load_s - size / in_rate)


def _naive(bench: TransferBench, rank: BenchRank, large: LargeCopy, device: torch.device) -> float:
    """Seconds of one copy of one token of one head."""
    layer, width = rank.layers[0], rank.layers[0].shape[-1]
    rng = np.random.default_rng(3)
    places = [tuple(rng.integers(0, size) for size in layer.shape[:-1]) for _ in range(bench.naive_copies)]
    target = large.here[: bench.naive_copies * width * layer.element_size()].view(layer.dtype).view(-1, width)
    pairs = [(target[i], layer[place]) for i, place in enumerate(places)]
    _wait_for(device)
    start = time.perf_counter()
    for to, source in pairs:
        to.copy_(source, non_blocking=True)
    _wait_for(device)
    return (time.perf_counter() - start) / len(pairs)


def interference(bench: TransferBench, rank: BenchRank, out_rate: float, device: torch.device) -> dict[str, float]:
    """Matrix products alone and beside saves that keep the bus busy, all launched by one thread as an engine does it.

    A product stands for a layer. Its KV leaves layer by layer, as an engine saves a prompt; and, for comparison, in one
    piece after each product (`at_once`). How many tokens a step has is chosen so that the bus has just enough to do.
    """
    usual_s = _PYTHONS_SWITCH_S
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left = torch.randn(bench.product_size, bench.product_size, dtype=dtype, device=device)
    right, out = torch.randn_like(left), torch.empty_like(left)
    saver, num_layers, extent = rank.saver, bench.num_layers, rank.space.spec.extent_bytes(bench.chunk_tokens)
    num_steps = max(1, round(bench.num_products / num_layers))
    saved: dict[str, list[float]] = {"layers": [], "at_once": []}
    dropped: Counter[str] = Counter()

    def products(after: Callable[[int], object], num_products: int = num_steps * num_layers) -> None:
        ahead: list[torch.cuda.Event] = []
        for number in range(num_products):
            torch.mm(left, right, out=out)
            after(number)
            if device.type == "cuda":
                ahead.append(torch.cuda.current_stream().record_event())
                if len(ahead) > 2:  # an engine is a step or two ahead of its device, too
                    ahead.pop(0).synchronize()

    def timed(name: str, after: Callable[[int], object], switch_s: float = SWITCH_S) -> float:
        sys.setswitchinterval(switch_s)
        rank.renew()
        products(lambda number: None, num_layers)  # the clock of a device that did nothing is another one
        _wait_for(device)
        before, dropped_before, start = saver.num_bytes, saver.num_dropped, time.perf_counter()
        products(after)
        _wait_for(device, all_streams=False)
        seconds = time.perf_counter() - start
        saver.drain(_DEADLINE_S)
        if name in saved:
            saved[name].append((saver.num_bytes - before) / (time.perf_counter() - start))
            dropped[name] += saver.num_dropped - dropped_before
        return seconds

    step_s = min(timed("", lambda number: None) for _ in range(3)) / num_steps
    per_step = int(np.clip(0.75 * step_s * out_rate / extent, 1, len(rank.chunks) // num_steps))

    def layer(number: int) -> None:
        step, layer = divmod(number, num_layers)
        if not layer:
            saver.begin("bench", rank.chunks[step * per_step : (step + 1) * per_step], rank.blocks)
        saver.layer_done(layer)

    def whole(number: int) -> None:
        chunks = rank.chunks[number * per_step // num_layers : (number + 1) * per_step // num_layers]
        if chunks and saver.ring.num_free >= len(chunks):
            saver.save("bench", chunks, rank.blocks)

    turns = {"alone": lambda number: None, "layers": layer, "at_once": whole, "again": lambda number: None}
    works = {name: partial(timed, name, after) for name, after in turns.items()}
    works["left_alone"] = partial(timed, "left_alone", layer, usual_s)
    try:
        rounds = take_turns(works, 3 * bench.pairs)
    finally:
        switch_threads_often()
    saver.drain(_DEADLINE_S)
    return {
        "interference": rounds.ratio("layers", "alone"),
        "interference_switch_interval_left_alone": rounds.ratio("left_alone", "alone"),
        "interference_noise": rounds.noise("again", "alone"),
        "interference_saving_gbps": float(np.median(saved["layers"])) / 1e9,
        "interference_at_once": rounds.ratio("at_once", "alone"),
        "interference_at_once_saving_gbps": float(np.median(saved["at_once"])) / 1e9,
        "interference_dropped": dropped["layers"],
        "interference_at_once_dropped": dropped["at_once"],
    }


def run_rounds(
    work: Mapping[str, Callable[[], object]],
    count: int,
    renew: Callable[[], None],
    device: torch.device,
) -> Rounds:
    """Once around without counting, then in turns; what has to come before a round is not measured."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for number in range(count + 1):
        renew()
        for name, run in work.items():
            _wait_for(device)
            start = time.perf_counter()
            run()
            _wait_for(device)
            took = time.perf_counter() - start
            if number:
                seconds[name].append(took)
    return Rounds(seconds)


def speed_ratios(rounds: Rounds, total: int, suffix: str) -> dict[str, Any]:
    """The speeds of a rank, and what they are of the bus's."""
    report: dict[str, Any] = {}
    for verb, bus in (("save", "out"), ("load", "in")):
        report[f"{verb}_ratio{suffix}"] = rounds.ratio(bus, verb)
        report[f"{verb}_noise{suffix}"] = max(rounds.spread(verb), rounds.spread(bus))
        report[f"{verb}_gbps{suffix}"] = gbps(total, rounds.time(verb))
        report[f"copy_{bus}_gbps{suffix}"] = gbps(total, rounds.time(bus))
    return report


def _noise(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    words = (*shape[:-1], shape[-1] * dtype.itemsize // 4)
    return torch.randint(-(2**31), 2**31 - 1, words, dtype=torch.int32, device=device).view(dtype)


def _values(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Normal values, each channel (and head, and plane) on a scale of its own."""
    values = torch.randn(shape, device=device, dtype=dtype)
    scales = torch.exp2(4 * torch.rand((*(1 for _ in shape[:-2]), *shape[-2:]), device=device) - 2)
    return values.mul_(scales.to(dtype))


def _wait_for(device: torch.device, *, all_streams: bool = True) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize() if all_streams else torch.cuda.current_stream().synchronize()
