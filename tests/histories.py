"""A device whose KV is the history itself: each slot holds the tokens that led to the KV written there.

It carries out the connector's orders and checks them: whatever is read, loaded or saved must be the prefix that it is
taken for. Loads fail at times, chunks find no room, and some of them are in a far tier.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from headwater.connector.orders import LoadOrder, SaveOrder, StepOrders, StepReport
from headwater.kv.hashing import KEY_BYTES, ChunkKeys, ChunkRef
from headwater.pool.match import Match

VOCAB = 50
EOS = 7
POISON: tuple[int, ...] = (-1,)
"""KV that did not verify, or was computed from such."""
ROOT = bytes(KEY_BYTES)


def next_token(prefix: tuple[int, ...]) -> int:
    """What the fake model says after a prefix. Few enough tokens that prefixes meet and EOS is hit."""
    return hash(prefix) % VOCAB if len(prefix) % 5 else hash(prefix) % 12


class HistoryFetch:
    """Chunks on their way from the far tier: done after some questions, and not always complete."""

    def __init__(self, space: HistorySpace, chunks: Sequence[ChunkRef]) -> None:
        self._space = space
        self._chunks = chunks
        self._num_questions = space.rng.randrange(6)
        self.num_kept = 0
        self.seconds = 0.5
        self.left_s = float("inf")

    @property
    def is_done(self) -> bool:
        self._num_questions -= 1
        if self._num_questions == 0:
            self.num_kept = self._space.rng.choice(
                [len(self._chunks), self._space.rng.randrange(len(self._chunks) + 1)]
            )
            self._space.far -= {chunk.key for chunk in self._chunks[: self.num_kept]}
        return self._num_questions <= 0

    def release(self) -> None:
        self._space.fetches.remove(self)


class HistorySpace:
    """A space of the pool whose chunks are histories, some of them in a far tier. Forgets some at times."""

    lookup_s = 0.0
    has_lower_tiers = True
    identity = SimpleNamespace(epoch=0)
    spec = SimpleNamespace(extent_bytes=lambda num_tokens: num_tokens)

    def __init__(self, chunk_tokens: int, rng: random.Random) -> None:
        self.chunk_tokens = chunk_tokens
        self.rng = rng
        self.kept: dict[bytes, tuple[int, ...]] = {ROOT: ()}
        self.far: set[bytes] = set()
        self.leases: set[str] = set()
        self.fetches: list[HistoryFetch] = []
        self.drop_rate, self.far_rate, self.fail_rate = 0.2, 0.3, 0.25

    def root(self, **names: bytes) -> None:
        pass

    def keys(self, tokens: Sequence[int] = (), *, tenant: bytes = b"", **names: Any) -> ChunkKeys:
        root = hashlib.sha256(tenant).digest() if tenant else ROOT
        self.kept.setdefault(root, ())
        return ChunkKeys(root, self.chunk_tokens, tokens)

    def match(self, keys: ChunkKeys, *, max_tokens: int) -> Match:
        chunks = [chunk for chunk in keys.chunks(tail=False) if chunk.first_token + chunk.num_tokens <= max_tokens]
        length = next((n for n, chunk in enumerate(chunks) if chunk.key not in self.kept), len(chunks))
        found = chunks[:length]
        room = min(self.chunk_tokens - 1, keys.num_tokens - length * self.chunk_tokens)
        tails = [keys.tail_ref(length, count) for count in range(room, 0, -1)]
        return Match((*found, *[tail for tail in tails if tail.key in self.kept][:1]))

    def exists(self, chunks: Sequence[ChunkRef]) -> list[bool]:
        return [chunk.key in self.kept and chunk.key not in self.far for chunk in chunks]

    def fetch(self, chunks: Sequence[ChunkRef], *, deadline_s: float) -> HistoryFetch | None:
        if all(self.exists(chunks)):
            return None
        self.fetches.append(HistoryFetch(self, chunks))
        return self.fetches[-1]

    def lease(self, match: Match, request_id: str) -> None:
        self.leases.add(request_id)

    def release(self, request_id: str) -> None:
        self.leases.remove(request_id)

    def store(self, chunk: ChunkRef, history: tuple[int, ...]) -> bool:
        if chunk.parent not in self.kept or self.rng.random() < self.drop_rate:
            return False
        self.kept[chunk.key] = history
        if self.rng.random() < self.far_rate:
            self.far.add(chunk.key)
        return True


class HistoryCache:
    """A paged cache of histories, and one server's way between it and the pool."""

    def __init__(self, block_size: int, space: HistorySpace | None = None, num_ranks: int = 1) -> None:
        self.block_size = block_size
        self.space = space
        self._num_ranks = num_ranks
        self.histories: dict[int, tuple[int, ...]] = {}
        self.loads: dict[str, LoadOrder] = {}
        self.ended: list[tuple[LoadOrder, int]] = []
        """Loads that have ended since this was last emptied, and how many chunks of each are in place."""
        self._report = StepReport()
        self.num_loads = self.num_failed = self.num_saved = self.num_dropped = self.num_during = 0

    def compute(self, block_ids: Any, position: int, token: int) -> tuple[int, ...]:
        """One row of a step: reads all before it, and writes its own."""
        slots = [self._slot(block_ids, at) for at in range(position + 1)]
        if any(self.histories.get(slot) is POISON for slot in slots[:-1]):
            self.histories[slots[-1]] = POISON
            return POISON
        history = (*self.histories.get(slots[position - 1], ()), token) if position else (token,)
        assert len(history) == position + 1, "the KV before this token is not there"
        for at, slot in enumerate(slots[:-1]):
            assert self.histories[slot] == history[: at + 1], f"position {at} holds another prefix"
        self.histories[slots[-1]] = history
        return history

    def start(self, orders: StepOrders) -> None:
        """What is done before a step computes anything. A load that is cancelled ends like others, some day."""
        for order in orders.before:
            self._save(order)
        for load in orders.loads:
            assert load.job.request_id not in self.loads
            self.loads[load.job.request_id] = load
            self.num_loads += 1
            if load.mode != "async":
                self._land(load)

    def end(self, orders: StepOrders) -> None:
        """What is done when a step is computed."""
        for order in orders.during:
            self._save(order)
        self.num_during += len(orders.during)

    def land_some(self) -> None:
        """Some of the loads under way end."""
        for load in list(self.loads.values()):
            if self.space is not None and self.space.rng.random() < 0.5:
                self._land(load)

    def take_report(self) -> StepReport:
        """What the workers say after a step."""
        report, self._report = self._report, StepReport()
        return report

    def _save(self, order: SaveOrder) -> None:
        """Keep what the blocks hold: it must be what the chunks' keys stand for."""
        assert self.space is not None
        job = order.job
        for chunk in job.chunks:
            end = chunk.first_token + chunk.num_tokens
            slots = [self._slot(job.block_ids, position) for position in range(chunk.first_token, end)]
            history = self.histories[slots[-1]]
            assert history is not POISON, "KV that is not known to be right is saved"
            assert [self.histories[slot] for slot in slots] == [
                history[: n + 1] for n in range(chunk.first_token, end)
            ], "blocks that hold something else are saved"
            whole, tail = divmod(end, self.space.chunk_tokens)
            keys = self.space.keys(history, tenant=order.tenant)
            assert chunk == (keys.tail_ref(whole, tail) if tail else keys.ref(whole - 1)), "another prefix is saved"
            if not self.space.store(chunk, history):
                unsaved = {job.request_id: chunk.first_token}
                self._report = self._report.merged(StepReport(unsaved=unsaved))
                self.num_dropped += 1
                return
            self.num_saved += 1

    def _land(self, load: LoadOrder) -> None:
        """Write into the request's blocks, whoever has them now: a later read shows if they are somebody else's."""
        assert self.space is not None
        job, rng = load.job, self.space.rng
        del self.loads[job.request_id]
        most = len(job.chunks)
        ranks = tuple(
            rng.randrange(most + 1) if rng.random() < self.space.fail_rate else most for _ in range(self._num_ranks)
        )
        for number, chunk in enumerate(job.chunks):
            is_good = number < min(ranks)
            history = self.space.kept[chunk.key]
            for position in range(chunk.first_token, chunk.first_token + chunk.num_tokens):
                slot = self._slot(job.block_ids, position)
                self.histories[slot] = history[: position + 1] if is_good else POISON
        self.num_failed += min(ranks) < most
        self.ended.append((load, min(ranks)))
        self._report = self._report.merged(StepReport(ended={job.request_id: ranks}))

    def _slot(self, block_ids: Any, position: int) -> int:
        return int(block_ids[position // self.block_size]) * self.block_size + position % self.block_size
