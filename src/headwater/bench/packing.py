"""`headwater bench packing`: how small packed tiles of real KV are, and how fast a CPU packs and unpacks them.

Beside it, from the same tiles in the same run: what other codes would take, compressors that others wrote, and a plain
copy. How the kernels for GPUs do is not measured here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np

from headwater.bench.measure import Note, gbps, in_threads, machine, next_of, stopwatch, take_turns
from headwater.bench.packing_codes import Packed, count_codes, pack_sample
from headwater.bench.packing_kv import FAMILIES, random_kv, real_kv
from headwater.bench.packing_rivals import RIVAL_FIGURES, bench_rivals
from headwater.bench.store import Bar
from headwater.errors import ModelError
from headwater.kv.packing import Bytes, pack_tile, pack_tiles, unpack_tile, unpack_tiles
from headwater.models.checkpoint import open_checkpoint


@dataclass(frozen=True)
class PackingBench:
    """What to measure."""

    model: str = "smollm2"
    """Whose KV of real texts is packed."""
    tokens_each: int = 512
    """Of each of the three texts."""
    families: tuple[str, ...] = tuple(FAMILIES)
    """Further ones, with random weights."""
    random_tokens: int = 512
    pairs: int = 9
    rival_bytes: int = 8 << 20
    """Of the model's tiles, at most, to other compressors, some of which are slow."""
    is_quick: bool = False


QUICK = PackingBench(
    tokens_each=256, families=("qwen3",), random_tokens=256, pairs=2, rival_bytes=1 << 18, is_quick=True
)
"""Everything once and small: whether it runs, not how fast."""

BARS = (Bar("packed_share", False, 0.76, None), Bar("misfit_tiles", False, 0, None))
SIZE_FIGURES = ("packed_share", "escapes", "escapes_worst", "misfit_tiles", "entropy_share", "three_bit_share")
_WINDOW_BYTES = 2 << 20
SPEED_FIGURES = ("pack_gbps_cpu", "unpack_gbps_cpu", "copy_gbps_cpu")


def run(bench: PackingBench, note: Note = lambda text: None) -> dict[str, Any]:
    """Measure everything; plain data for JSON. A minute or two, and the memory of a small model."""
    report: dict[str, Any] = {"bench": "packing", "machine": machine() | {"torch": version("torch")}}
    report |= dict.fromkeys((*SIZE_FIGURES, *SPEED_FIGURES, *RIVAL_FIGURES))
    try:
        checkpoint = open_checkpoint(bench.model)
    except ModelError as error:
        report["model_reason"] = str(error)
    else:
        report |= {"model": checkpoint.label, "model_reason": None}
        note(f"three texts of {bench.tokens_each} tokens through {checkpoint.label} in float32")
        sample = real_kv(checkpoint, bench.tokens_each)
        packed, sizes = pack_sample(sample)
        report |= {"tokens": 3 * bench.tokens_each, "raw_bytes": packed.raw.nbytes} | sizes | count_codes(sample)
        note("packing and unpacking, beside a plain copy")
        report |= _bench_speed(packed, bench.pairs)
        some = packed.raw[: max(1, bench.rival_bytes // packed.raw.shape[1])]
        note(f"{some.nbytes >> 10} KiB of the same tiles through zlib and ZipNN")
        report |= bench_rivals(some, bench.pairs)
    for family in bench.families:
        note(f"{bench.random_tokens} random tokens through random weights, as in {family}")
        _, sizes = pack_sample(random_kv(family, bench.random_tokens))
        report |= {f"{name}_{family}": value for name, value in sizes.items()}
    report["bars"] = {bar.figure: {"limit": bar.limit, "verdict": _verdict(bar, report, bench)} for bar in BARS}
    return report


def _bench_speed(tiles: Packed, pairs: int) -> dict[str, Any]:
    """GB/s of raw bytes, all tiles at once and one by one, and a copy of them. A repetition is a window of the tiles,
    the next one each time: so short that a busy neighbour disturbs few, and all of them more than a cache holds."""
    spec, num_tokens, raw = tiles.spec, tiles.num_tokens, tiles.raw
    packed, back = tiles.packed.copy(), raw.copy()
    in_window = max(1, _WINDOW_BYTES // raw.shape[1])
    windows = [slice(first, first + in_window) for first in range(0, len(raw) - in_window + 1, in_window)]

    def pack_each(raw: Bytes, packed: Bytes) -> None:
        for one, target in zip(raw, packed, strict=True):
            pack_tile(spec, num_tokens, one, target)

    def unpack_each(packed: Bytes, back: Bytes) -> None:
        for one, target in zip(packed, back, strict=True):
            unpack_tile(spec, num_tokens, one, target)

    works: dict[str, Callable[[slice], object]] = {
        "copy": lambda window: np.copyto(back[window], raw[window]),
        "pack": lambda window: pack_tiles(spec, num_tokens, raw[window], packed[window]),
        "unpack": lambda window: unpack_tiles(spec, num_tokens, packed[window], back[window]),
        "pack_tile": lambda window: pack_each(raw[window], packed[window]),
        "unpack_tile": lambda window: unpack_each(packed[window], back[window]),
    }
    runs = {}
    for number, (name, work) in enumerate(works.items()):
        first = number * len(windows) // len(works)  # nobody finds what another one has just brought into the cache
        runs[name] = next_of([stopwatch(partial(work, window)) for window in windows[first:] + windows[:first]])
    rounds = take_turns(runs, pairs * len(windows))
    report: dict[str, Any] = {}
    for name in works:
        verb, _, how = name.partition("_")
        figure = f"{verb}_gbps_cpu{'_' + how if how else ''}"
        report[figure] = gbps(in_window * raw.shape[1], rounds.time(name))
    for verb in ("pack", "unpack"):
        report[f"{verb}_over_copy"] = rounds.ratio(verb, "copy")
        report[f"{verb}_noise"] = max(rounds.spread(verb), rounds.spread("copy"))
    return report | _bench_threads(tiles, packed, back, pairs)


def _bench_threads(tiles: Packed, packed: Bytes, back: Bytes, pairs: int) -> dict[str, Any]:
    """The same in two threads, each with half of the tiles; where two cores are free, that is what they give."""
    spec, num_tokens, raw = tiles.spec, tiles.num_tokens, tiles.raw
    ends = (slice(0, len(raw) // 2), slice(len(raw) // 2, None))
    works = {
        "pack": [partial(pack_tiles, spec, num_tokens, raw[end], packed[end]) for end in ends],
        "unpack": [partial(unpack_tiles, spec, num_tokens, packed[end], back[end]) for end in ends],
    }
    rounds = take_turns({name: partial(in_threads, both) for name, both in works.items()}, pairs)
    return {f"{name}_gbps_cpu_2t": gbps(raw.nbytes, rounds.time(name)) for name in works}


def _verdict(bar: Bar, report: dict[str, Any], bench: PackingBench) -> str:
    return "not judged: too small a run" if bench.is_quick else bar.judge(report)
