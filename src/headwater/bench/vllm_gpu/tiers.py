"""A hit in the lower of two tiers, against reading the same bytes of the same files with `preadv` alone.

The first tier is emptied before every hit, by a process that knows the first tier only. The files are in the page
cache: they were written a moment ago.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from headwater.bench.measure import in_threads, take_turns
from headwater.bench.vllm_gpu.figures import AGAIN, FILE
from headwater.bench.vllm_gpu.measures import Bench, Body, Sides
from headwater.bench.vllm_gpu.plan import CHUNK_TOKENS, HEADWATER
from headwater.errors import EngineError
from headwater.pool.pool import Pool, open_pool
from headwater.stores.url import split_urls

COPIED_S = 60.0
PIECE_BYTES = 8 << 20


def measure_tiers(bench: Bench, sides: Sides, tokens: int) -> Body:
    """First tokens of a prompt that only the files have."""
    (engine,) = sides.values()
    plan, prompt = bench.plan, bench.prompts.whole(tokens)
    engine.fill(prompt, bench.engines.quiet)
    url, pool = engine.side.pool, engine.pool
    assert url is not None
    assert pool is not None
    first_url, file_url = split_urls(url)
    num_chunks, num_bytes = tokens // CHUNK_TOKENS, tokens * plan.token_bytes
    with open_pool(first_url, create=False) as first, open_pool(file_url, create=False) as below:
        _wait_copied(pool, below, num_chunks)

        def hit() -> float:
            first.clear()
            return engine.hit([prompt], bench.engines.quiet)

        engine.watch_hits()
        files = sorted(Path(file_url.removeprefix("file://").partition("?")[0]).glob("data-*"))
        reader = FileReader(files, num_bytes, plan.tier_threads)

        def read() -> float:
            bench.engines.quiet()
            return reader.read()

        runs: dict[str, Callable[[], float]] = {HEADWATER: hit, FILE: read, AGAIN: hit}
        rounds = take_turns(runs, plan.pairs)
    found = {HEADWATER: engine.least_found}
    return {"seconds": rounds.seconds, "bytes": num_bytes, "threads": plan.tier_threads, "found": found}


def _wait_copied(pool: Pool, below: Pool, num_chunks: int) -> None:
    """Raises EngineError where the lower tier does not get what the first one has."""
    deadline = time.monotonic() + COPIED_S
    while time.monotonic() < deadline:
        if pool.flush(1.0) and below.stats().store.chunks >= num_chunks:
            return
        time.sleep(0.05)
    raise EngineError(f"the lower tier has {below.stats().store.chunks} of {num_chunks} chunks after {COPIED_S:.0f} s")


class FileReader:
    """Reads the first bytes of some files into memory of its own, in pieces, with several threads."""

    def __init__(self, files: list[Path], num_bytes: int, num_threads: int) -> None:
        """Raises EngineError where the files hold less than that."""
        pieces: list[tuple[Path, int, int]] = []
        left = num_bytes
        for file in files:
            size = file.stat().st_size
            for offset in range(0, min(size, left), PIECE_BYTES):
                pieces.append((file, offset, min(PIECE_BYTES, min(size, left) - offset)))
            left -= min(size, left)
        if left:
            raise EngineError(f"the files of the lower tier hold {left} bytes less than the {num_bytes} to be read")
        self.num_bytes = num_bytes
        self._shares = [pieces[first::num_threads] for first in range(num_threads)]
        # Touched, so that no page is missing when it counts.
        self._buffers = [np.ones(sum(size for _, _, size in share), np.uint8) for share in self._shares]

    def read(self) -> float:
        """Seconds to read all of it once."""
        return in_threads([partial(self._read_share, number) for number in range(len(self._shares))])

    def _read_share(self, number: int) -> None:
        memory, opened = memoryview(self._buffers[number]), {}
        try:
            at = 0
            for file, offset, size in self._shares[number]:
                if file not in opened:
                    opened[file] = os.open(file, os.O_RDONLY)
                done = 0
                while done < size:
                    got = os.preadv(opened[file], [memory[at + done : at + size]], offset + done)
                    if not got:
                        raise EngineError(f"{file.name} became shorter while it was read")
                    done += got
                at += size
        finally:
            for descriptor in opened.values():
                os.close(descriptor)
