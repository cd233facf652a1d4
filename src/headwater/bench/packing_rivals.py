"""Compressors that others wrote, on the same bytes as `headwater bench packing`: zlib, and ZipNN where it is installed.

Their output has no fixed length, so that no extent could be reserved for it. Here they count as limits and rivals.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt

from headwater.bench.measure import Timed, gbps, next_of, stopwatch, take_turns
from headwater.errors import EngineError

ZLIB_LEVEL = 1
_TOGETHER_BYTES = 256 << 10
"""As ZipNN cuts what it is given."""
RIVAL_FIGURES = ("zlib_share", "zlib_gbps_cpu", "unzlib_gbps_cpu", "zipnn_share", "zipnn_gbps_cpu", "unzipnn_gbps_cpu")


def bench_rivals(tiles: npt.NDArray[np.uint8], rounds: int) -> dict[str, Any]:
    """Shares and speeds of one thread. Some tiles are compressed together, which favours the rivals."""
    together = max(1, _TOGETHER_BYTES // tiles.shape[1])
    pieces = [tiles[first : first + together].tobytes() for first in range(0, len(tiles), together)]
    report: dict[str, Any] = dict.fromkeys(RIVAL_FIGURES)
    coders: dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]] = {
        "zlib": (lambda data: zlib.compress(data, ZLIB_LEVEL), zlib.decompress)
    }
    try:
        zipnn = import_module("zipnn")
    except ImportError as error:
        report["zipnn_reason"] = f"not measured: {error}"
    else:
        report |= {"zipnn_reason": None, "zipnn_version": version("zipnn")}
        coder = zipnn.ZipNN(bytearray_dtype="bfloat16", input_format="byte", threads=1)
        # It works in place: what it is given is lost.
        coders["zipnn"] = (lambda data: coder.compress(bytearray(data)), lambda data: coder.decompress(bytearray(data)))
    runs: dict[str, Timed] = {}
    for name, (compress, decompress) in coders.items():
        small = [bytes(compress(piece)) for piece in pieces]
        if [bytes(decompress(piece)) for piece in small] != pieces:
            raise EngineError(f"{name} gave other bytes back")
        report[f"{name}_share"] = sum(map(len, small)) / tiles.nbytes
        runs[name] = next_of([stopwatch(partial(compress, piece)) for piece in pieces])
        runs[f"un{name}"] = next_of([stopwatch(partial(decompress, piece)) for piece in small])
    found = take_turns(runs, max(rounds, len(pieces)))
    return report | {f"{name}_gbps_cpu": gbps(len(pieces[0]), found.time(name)) for name in runs}
