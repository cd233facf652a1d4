"""One request as the scheduler side sees it: its keys, its blocks, its load under way, and how far it is saved."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from headwater.connector.orders import ASYNC, LoadOrder
from headwater.kv.hashing import ChunkKeys, ChunkRef, Extra
from headwater.pool.match import Match
from headwater.pool.space import Space
from headwater.pool.wait import Wait

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from headwater.connector.fetches import FetchTicket
    from headwater.connector.transfers import Expected

RETRIES = 3
"""How often chunks that were not saved are ordered again."""
RETRY_STEPS = 4
"""Steps between a drop and the next try: staging and the pool need some time to have room again."""
LOG_EVERY_S = 60.0

BlockIds = Sequence[int] | npt.NDArray[np.int32]


class Inputs(NamedTuple):
    """What a request's KV depends on besides its tokens."""

    tenant: bytes = b""
    adapter: bytes = b""
    extras: tuple[Extra, ...] = ()


class Scheduled(NamedTuple):
    """One request in a step."""

    request_id: str
    num_computed: int
    """Tokens whose KV the engine takes for computed before the step."""
    num_scheduled: int
    """Tokens that the step computes."""
    block_ids: BlockIds
    """All its blocks, from the first token on."""
    is_new: bool = False
    """Its blocks were allocated for this step: some may be shared with requests that compute them in this very step."""


class SaveProgress:
    """How far a request is saved, and when chunks that were dropped are ordered again.

    0 ────────────── num_saved ────────────────── next
    │ in the pool, or on the way │ not yet │ when so many tokens are computed, there is something to save
    """

    __slots__ = (
        "_chunk_tokens",
        "_held_until",
        "_is_torn",
        "_min_tail",
        "_next",
        "_num_drops",
        "_prompt_limit",
        "num_saved",
    )

    def __init__(self, chunk_tokens: int, num_prompt: int, min_tail: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._min_tail = min_tail
        self._prompt_limit = self._worth(num_prompt)
        self.num_saved = 0
        self._next = 0
        self._num_drops = 0
        self._held_until = 0
        self._is_torn = False
        """Chunks before `num_saved` may be missing too: another request, or another server, was to save them."""

    @property
    def is_aborted(self) -> bool:
        """Whether chunks were dropped once too often: nothing behind them is of use."""
        return self._num_drops > RETRIES

    def is_due(self, num_tokens: int, step: int) -> bool:
        """Whether there may be something to save, now that so many tokens are computed. Cheap: asked in every step."""
        return num_tokens >= self._next and step >= self._held_until and not self.is_aborted

    def limit(self, num_tokens: int, *, ends: bool) -> int:
        """How far to save a request of which so many tokens are computed: whole chunks, or its prompt with a tail that
        is worth loading; at its end, also the tail of the whole."""
        if ends:
            return self._worth(num_tokens)
        whole = num_tokens // self._chunk_tokens * self._chunk_tokens
        is_prompt = whole < self._prompt_limit <= num_tokens and self.num_saved < self._prompt_limit
        return self._prompt_limit if is_prompt else whole

    def _worth(self, num_tokens: int) -> int:
        """As many of these tokens as are worth saving: a tail is, if it is worth loading."""
        tail = num_tokens % self._chunk_tokens
        return num_tokens if tail >= self._min_tail else num_tokens - tail

    def looked(self, num_tokens: int) -> None:
        """All that there was to save of the first `num_tokens` tokens has been ordered."""
        self._next = (num_tokens // self._chunk_tokens + 1) * self._chunk_tokens
        if num_tokens < self._prompt_limit:
            self._next = min(self._next, self._prompt_limit)

    def lower(self, first_token: int) -> bool:
        """Chunks from this token on are not in the pool after all; whether that was news."""
        if first_token >= self.num_saved:
            return False
        self.num_saved, self._next = first_token, 0
        return True

    def dropped(self, first_token: int, step: int) -> None:
        """The chunks from this token on were not saved: order them again after a few steps, and not for ever."""
        if self.lower(first_token):
            self._num_drops += 1
            self._held_until = step + RETRY_STEPS
            self._is_torn = True

    def chunks(self, keys: ChunkKeys, limit: int) -> list[ChunkRef]:
        """The chunks that hold what is not saved of the first `limit` tokens: complete ones, and perhaps a tail. After
        a drop all of them, because a chunk without its parent is dropped again."""
        size = self._chunk_tokens
        first, self._is_torn = 0 if self._is_torn else self.num_saved // size, False
        chunks = [keys.ref(number) for number in range(first, limit // size)]
        if tail := limit % size:
            chunks.append(keys.tail_ref(limit // size, tail))
        return chunks

    def num_lost(self, num_tokens: int) -> int:
        """Chunks of the first `num_tokens` tokens that are not saved."""
        return max(0, -(-num_tokens // self._chunk_tokens) - self.num_saved // self._chunk_tokens)


@dataclass(eq=False)
class Tracked:
    """One request. `tokens` is the engine's own sequence, which grows."""

    request_id: str
    tokens: Sequence[int]
    num_prompt: int
    inputs: Inputs | None
    """None: it is served without the pool."""
    space: Space
    keys: ChunkKeys
    saves: SaveProgress
    label: str | None = None
    """A name for listeners, an adapter's say."""
    block_ids: BlockIds = ()
    num_computed: int = 0
    """After the last step that was ordered."""
    num_most: int = 0
    """The most that were ever computed."""
    num_explained: int = 0
    """Tokens that this side knows the engine to have: found in its own cache, loaded by us, or computed."""
    match: Match | None = None
    is_fresh: bool = False
    """The match was made for the step that is ordered next, and all of it is in the first tier."""
    num_local: int = 0
    """Tokens that the engine had itself when it was last asked about."""
    wanted: tuple[ChunkRef, ...] = ()
    """What a load would bring."""
    mode: str = ASYNC
    wait: Wait | None = None
    """How long the load follows chunks that are still being filled; None: all of them are there."""
    expected: Expected | None = None
    """KV that another server is said to send."""
    ticket: FetchTicket | None = None
    is_queued: bool = False
    """It waits until another fetch has ended."""
    is_leased: bool = False
    load: LoadOrder | None = None
    """The load under way."""
    is_over: bool = False
    """The engine has ended it, and its load has not ended yet."""
    is_suspect: bool = False
    """Some of its blocks are, or were, spoiled."""
    is_foreign: bool = False
    """Some of its KV came from elsewhere, or was computed from such (see `origins`): nothing of it is saved."""
    num_noted: int = 0
    """Blocks whose origin is noted."""
    may_load: bool = True

    @property
    def is_busy(self) -> bool:
        """Whether the engine computes for it, or loads for it outside of the batch: a step that waits stalls it."""
        if self.load is not None and self.load.mode == ASYNC:
            return True
        return self.num_computed > 0 and not self.is_over

    def extend_keys(self, num_tokens: int) -> None:
        """Hash what is new of the first `num_tokens` tokens."""
        if num_tokens > self.keys.num_tokens:
            self.keys.extend(self.tokens[self.keys.num_tokens : num_tokens])

    @property
    def num_known(self) -> int:
        """Tokens whose KV can be named and is certain once it is computed. Not the last one that was sampled: its place
        may hold the KV of a draft that was rejected."""
        num_tokens = len(self.tokens)
        return num_tokens - (num_tokens > self.num_prompt)


class LateChunks:
    """Chunks that lower tiers had and did not bring in time; the log says so now and then."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._num_kept = self._num_wanted = 0
        self._next_s = 0.0

    def add(self, num_kept: int, num_wanted: int) -> None:
        """A request goes on with so many of the chunks that it wanted."""
        self._num_kept += num_kept
        self._num_wanted += num_wanted
        now = time.monotonic()
        if now >= self._next_s:
            self._next_s = now + LOG_EVERY_S
            log.warning(
                "%d of %d chunks came from lower tiers within %g s (load_deadline_s); the rest is computed",
                self._num_kept,
                self._num_wanted,
                self._deadline_s,
            )
            self._num_kept = self._num_wanted = 0


class LostChunks:
    """Chunks that were computed and are not in the pool; the log says so now and then."""

    def __init__(self) -> None:
        self.num_chunks = 0
        self._num_told = 0
        self._next_s = 0.0

    def add(self, num_chunks: int) -> None:
        """A request has ended with so many chunks unsaved."""
        self.num_chunks += num_chunks
        now = time.monotonic()
        if num_chunks and now >= self._next_s:
            self._next_s = now + LOG_EVERY_S
            log.warning(
                "%d chunks of KV were computed and not saved, for want of room in staging or in the pool; more staging "
                "memory (vLLM's option `staging`) or a larger pool (`capacity` in its URL) keeps them",
                self.num_chunks - self._num_told,
            )
            self._num_told = self.num_chunks
