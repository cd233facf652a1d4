"""The scheduler half: what the pool has for a request, and what of a request the pool should have. Knows no memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headwater.connector.asker import Asker
from headwater.connector.config import ConnectorConfig
from headwater.connector.jobs import Job
from headwater.kv.hashing import ChunkKeys, ChunkRef, Extra
from headwater.pool.match import Match
from headwater.pool.space import Space


class _Known:
    """What is remembered of one request."""

    __slots__ = ("adapter", "is_leased", "job", "keys", "match", "num_saved", "tenant")

    def __init__(self, keys: ChunkKeys, tenant: bytes = b"", adapter: bytes = b"") -> None:
        self.keys = keys
        self.tenant = tenant
        self.adapter = adapter
        self.match: Match | None = None
        self.job: Job | None = None
        """The load under way."""
        self.is_leased = False
        self.num_saved = 0
        """Tokens, from the first on, that are in the pool or on their way there."""


class SchedulerHalf:
    """One engine's view of one space. Not thread-safe: the scheduler's thread calls it."""

    def __init__(self, space: Space, config: ConnectorConfig) -> None:
        self._space = space
        self._config = config
        self._asker = Asker(space.lookup_s)
        self._known: dict[str, _Known] = {}

    def begin(
        self,
        request_id: str,
        tokens: Sequence[int],
        *,
        tenant: bytes = b"",
        adapter: bytes = b"",
        extras: Sequence[Extra] = (),
    ) -> None:
        """Name a request whose KV depends on more than its tokens, before anything else is asked about it.

        `tokens` is its whole prompt, some of which the extras stand for.
        """
        keys = self._space.keys(tokens, tenant=tenant, adapter=adapter, extras=extras)
        self._known[request_id] = _Known(keys, tenant, adapter)

    def num_matched(self, request_id: str, tokens: Sequence[int], max_tokens: int) -> int:
        """How many of the first `max_tokens` tokens the pool has. No side effects; asked again, it looks again.

        Cost: hashing what is new of the tokens, and a few microseconds a chunk; where the pool's index is not on this
        host, what `asker` allows at most.
        """
        if not self._config.loads:
            return 0
        known = self._know(request_id, tokens, len(tokens))
        # Named again: between two questions of one request, the space may have seen many other tenants.
        if known.tenant or known.adapter:
            self._space.root(tenant=known.tenant, adapter=known.adapter)
        known.match = self._asker.ask(lambda: self._space.match(known.keys, max_tokens=max_tokens), Match(()))
        return known.match.num_tokens

    def start_load(
        self, request_id: str, num_local: int, block_ids: npt.NDArray[np.int32], num_shared: int, dummy_block: int
    ) -> Job:
        """The job that brings what was matched beyond the `num_local` tokens the engine has. Takes a lease.

        The first `num_shared` blocks belong to others too and must not be written; what would go there goes to the
        dummy block.
        """
        known = self._known[request_id]
        match = known.match
        assert match is not None, "start_load before num_matched"
        known.is_leased = True
        self._asker.ask(lambda: self._space.lease(match, request_id), None)
        wanted = tuple(c for c in match.chunks if c.first_token + c.num_tokens > num_local)
        targets = block_ids.copy()
        targets[:num_shared] = dummy_block
        known.job = Job(request_id, wanted, targets)
        # Whether it is also in the tier that saves go to is no matter: until it has come, there is nothing to save.
        known.num_saved = max(known.num_saved, match.num_tokens)
        return known.job

    def finish_load(self, request_id: str, num_chunks: int) -> int:
        """A load has ended on all ranks; returns how many tokens, from the first on, are there because of it."""
        known = self._known.get(request_id)
        if known is None or known.job is None:
            return 0
        job, known.job = known.job, None
        self._release(request_id, known)
        if num_chunks < len(job.chunks):  # the engine computes the rest, which is then as good as new
            known.num_saved = min(known.num_saved, job.chunks[num_chunks].first_token)
        if not num_chunks:
            return 0
        last = job.chunks[num_chunks - 1]
        return last.first_token + last.num_tokens

    def collect(
        self,
        request_id: str,
        tokens: Sequence[int],
        num_prompt: int,
        block_ids: npt.NDArray[np.int32],
        *,
        ends: bool,
        num_computed: int | None = None,
    ) -> Job | None:
        """The job that saves the chunks which have become complete; when a prompt is, and when a request `ends`, also
        the tail: whoever sends the same prompt again does not know what was said after it.

        The KV of the first `num_computed` tokens (None: of all) is in the blocks. What the pool has already is left
        out. Asked at every step, so that most calls, which find nothing new, cost a microsecond.
        """
        if not self._config.saves:
            return None
        num_tokens = len(tokens) if num_computed is None else num_computed
        if not self._config.save_decoded:
            num_tokens = min(num_tokens, num_prompt)
        seen = self._known.get(request_id)
        num_saved = 0 if seen is None else seen.num_saved
        limit = num_tokens if ends else self._limit(num_tokens, num_prompt, num_saved)
        if limit <= num_saved:
            return None
        known = self._know(request_id, tokens, limit)
        chunks = self._chunks(known.keys, known.num_saved, limit)
        known.num_saved = limit
        exist = self._asker.ask(lambda: self._space.exists(chunks), [False] * len(chunks))
        missing = [chunk for chunk, there in zip(chunks, exist, strict=True) if not there]
        # Children of what is missing are sent too: the pool takes chunks in order, parents before children.
        chunks = chunks[chunks.index(missing[0]) :] if missing else []
        return Job(request_id, tuple(chunks), block_ids.copy()) if chunks else None

    def _limit(self, num_tokens: int, num_prompt: int, num_saved: int) -> int:
        """How far to save a request that goes on: whole chunks, or a prompt with a tail worth loading."""
        size = self._space.chunk_tokens
        whole = num_tokens // size * size
        has_tail = num_prompt % size >= self._config.min_load_tokens
        return num_prompt if has_tail and whole < num_prompt <= num_tokens and num_saved < num_prompt else whole

    def forget(self, request_id: str) -> None:
        """The request is over. Idempotent."""
        if (known := self._known.pop(request_id, None)) is not None:
            self._release(request_id, known)

    def _release(self, request_id: str, known: _Known) -> None:
        if known.is_leased:
            known.is_leased = False
            self._asker.tell(lambda: self._space.release(request_id))

    def _know(self, request_id: str, tokens: Sequence[int], limit: int) -> _Known:
        """What is remembered of a request, with the keys of its first `limit` tokens at least."""
        known = self._known.get(request_id)
        if known is None:
            known = self._known[request_id] = _Known(self._space.keys())
        if limit > known.keys.num_tokens:
            known.keys.extend(tokens[known.keys.num_tokens : limit])
        return known

    def _chunks(self, keys: ChunkKeys, start: int, limit: int) -> list[ChunkRef]:
        """The chunks that hold tokens `start` to `limit`: complete ones, and perhaps a tail."""
        size = self._space.chunk_tokens
        chunks = [keys.ref(number) for number in range(start // size, limit // size)]
        if tail := limit % size:
            chunks.append(keys.tail_ref(limit // size, tail))
        return chunks
