"""The demo from beginning to end: make a pool, write as one server, read as two others, say what came of it."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from headwater.cli.demo.cache import SPEC
from headwater.cli.demo.ranks import Report
from headwater.cli.demo.servers import Server, run_server, uninterrupted
from headwater.errors import StoreError, UrlError
from headwater.kv.topology import Topology
from headwater.pool import Pool, open_pool
from headwater.stores.base import Progress
from headwater.stores.embedded import destroy
from headwater.stores.stats import StoreStats
from headwater.stores.url import parse_url

SERVERS = (
    Server("writer", Topology(tp=4, pp=2, block_size=16)),
    Server("reader", Topology(tp=8, pp=1, block_size=64)),
    Server("reader", Topology(tp=1, pp=3, block_size=48)),  # 16 layers in 3 stages, blocks that divide no chunk
)
_MIN_CAPACITY = 256 << 20


@dataclass(frozen=True)
class ServerResult:
    """What the ranks of one server did together."""

    server: Server
    reports: list[Report]

    @property
    def reads(self) -> bool:
        """Whether it read, and so compared."""
        return self.server.role == "reader"

    @property
    def num_tokens(self) -> int:
        """Tokens that every rank had."""
        return min(report.num_tokens for report in self.reports)

    @property
    def num_bytes(self) -> int:
        """Bytes that went through the pool."""
        return sum(report.num_bytes for report in self.reports)

    @property
    def seconds(self) -> float:
        """From the first rank's beginning to the last one's end, paged caches included."""
        return max(report.ended_s for report in self.reports) - min(report.started_s for report in self.reports)

    @property
    def wrong_bytes(self) -> int:
        """Bytes that are not what the model computes."""
        return sum(report.wrong_bytes for report in self.reports)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        topology = self.server.topology
        shape = {"tp": topology.tp, "pp": topology.num_stages, "block_size": topology.block_size}
        moved = {"tokens": self.num_tokens, "bytes": self.num_bytes, "seconds": round(self.seconds, 6)}
        return {"role": self.server.role, **shape, "ranks": len(self.reports), **moved, "wrong_bytes": self.wrong_bytes}


@dataclass(frozen=True)
class Outcome:
    """What the demo shows."""

    url: str
    kept: bool
    is_own: bool
    """Whether the pool was made for the demo."""
    note: str
    num_tokens: int
    results: list[ServerResult]
    store: StoreStats

    @property
    def correct(self) -> bool:
        """Every reader found the whole prompt, and every byte of it was right."""
        return all(r.num_tokens == self.num_tokens and not r.wrong_bytes for r in self.results)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        runs = [result.as_dict() for result in self.results]
        about = {"url": self.url, "kept": self.kept, "note": self.note, "spec": SPEC.canonical()}
        about |= {"tokens": self.num_tokens, "correct": self.correct}
        return {**about, "servers": runs, "store": asdict(self.store)}


def run_demo(url: str | None, num_tokens: int, keep: bool, progress: Progress) -> Outcome:
    """Run it, in `url` or in a pool of its own that goes afterwards unless it is to be kept."""
    numbers, total = count(1), sum(server.topology.num_ranks for server in SERVERS)

    def done() -> None:
        progress(next(numbers), total)

    with _pool_url(url, num_tokens, keep) as (place, note):
        # Open throughout, so that the pool is there before the first rank and can be asked after the last.
        with held_pool(place) as pool:
            results = [ServerResult(server, run_server(server, place, num_tokens, done)) for server in SERVERS]
            store = pool.stats().store
        return Outcome(place, keep or url is not None, url is None, note, num_tokens, results, store)


@contextmanager
def _pool_url(url: str | None, num_tokens: int, keep: bool) -> Iterator[tuple[str, str]]:
    """The pool to use, and a remark about it."""
    if url is None:
        with own_pool(2 * SPEC.extent_bytes(num_tokens), keep) as made:
            yield made
        return
    if parse_url(url).scheme == "memory":
        raise UrlError(f"{url} is private to one process, and the demo's ranks are many; use shm:// or file://")
    yield url, ""


@contextmanager
def own_pool(capacity_bytes: int, keep: bool) -> Iterator[tuple[str, str]]:
    """A pool of the demo's own, and a remark about it: in shared memory, or else in a temporary directory."""
    settings = f"?capacity={max(_MIN_CAPACITY, capacity_bytes)}"
    place, note = f"shm:///headwater-demo-{secrets.token_hex(4)}", ""
    try:
        with uninterrupted():  # a pool that was left half open cannot be deleted
            try:
                open_pool(place + settings).close()
            except StoreError as error:
                destroy(parse_url(place))
                place = Path(tempfile.mkdtemp(prefix="headwater-demo-")).as_uri()
                note = f"shared memory cannot be used here ({error}), so the demo's pool is in files"
                open_pool(place + settings).close()
        yield place, note
    finally:
        if not keep:
            with uninterrupted():
                destroy(parse_url(place))


@contextmanager
def held_pool(url: str) -> Iterator[Pool]:
    """An open pool that is closed afterwards, whenever Ctrl-C comes."""
    pool = None
    try:
        with uninterrupted():
            pool = open_pool(url)
        yield pool
    finally:
        with uninterrupted():
            if pool is not None:
                pool.close()
