"""Who runs in the next step: continuous batching with chunked prefill, admission in pages, preemption by recompute.

Everything is ordered by arrival and nothing else, so equal inputs give equal schedules in every process. The
scheduler owns requests and their pages; it knows no tensors and waits for nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from headwater.connector.orders import ASYNC
from headwater.engine.draft import Drafter, NoDrafts
from headwater.engine.link import EngineLink, NoPool
from headwater.engine.params import FinishReason
from headwater.engine.request import SampleRow
from headwater.errors import EngineError

if TYPE_CHECKING:
    from headwater.connector.finder import LoadPlan
    from headwater.engine.pages import PagePool
    from headwater.engine.prefix.base import Handle, PrefixCache
    from headwater.engine.request import Request


LOOK_AHEAD = 64
"""Waiting requests that are looked at for one that can start, where older ones wait for a lower tier of the pool."""


class Chunk(NamedTuple):
    """Some tokens of one request, from `start` on; the last chunk before its next token also samples it.

    That one may end with drafts: the row of each gives the token that follows if the draft is right.

        tokens     … p q r          known          the row of
        drafts           a b        guessed        r samples the next token, whatever was drafted;
        sampled        x y z                       a the one after it, which counts if x is a
    """

    request: Request
    start: int
    num_tokens: int
    """Its rows, those of the drafts included."""
    samples: bool
    drafts: tuple[int, ...] = ()

    @property
    def num_samples(self) -> int:
        """Rows at its end that are sampled."""
        return 1 + len(self.drafts) if self.samples else 0


@dataclass(frozen=True, slots=True)
class Step:
    """What one forward pass computes: single tokens first, then the longer chunks, each in order of arrival."""

    chunks: tuple[Chunk, ...]

    @property
    def num_tokens(self) -> int:
        """Rows of this forward pass."""
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def is_loading(self) -> bool:
        """Whether some of its requests run with KV that is still coming."""
        return any(chunk.request.is_loading for chunk in self.chunks)

    @property
    def has_drafts(self) -> bool:
        """Whether it is known only afterwards how many tokens its requests get."""
        return any(chunk.drafts for chunk in self.chunks)

    @property
    def sampled(self) -> list[SampleRow]:
        """What is sampled, row by row."""
        return [SampleRow(c.request, c.drafts[:n]) for c in self.chunks for n in range(c.num_samples)]

    def samples(self) -> Iterator[tuple[Chunk, slice]]:
        """The chunks that sample, and where their rows are in `sampled`."""
        start = 0
        for chunk in self.chunks:
            if chunk.samples:
                yield chunk, slice(start, start + chunk.num_samples)
                start += chunk.num_samples


class Scheduler:
    """Waiting and running requests over one page pool and one prefix cache."""

    def __init__(
        self,
        pool: PagePool,
        prefix: PrefixCache,
        *,
        page_size: int,
        max_num_seqs: int,
        max_batched_tokens: int,
        link: EngineLink | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self._pool = pool
        self._prefix = prefix
        self._page_size = page_size
        self._max_num_seqs = max_num_seqs
        self._max_batched_tokens = max_batched_tokens
        self._link: EngineLink = link or NoPool()
        self._drafter: Drafter = drafter or NoDrafts()
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        """Ordered by arrival; some of them may wait for their KV from the pool."""
        self.abandoned: list[Request] = []
        """Over, but the pool may still write into their pages."""
        self.num_preemptions = 0

    def add(self, request: Request) -> None:
        """Queue a request. It must fit into an empty cache; whoever adds it has checked that."""
        self._link.add(request)
        self.waiting.append(request)

    def schedule(self) -> Step:
        """Choose the next step and give its requests the pages it writes to. Empty when nobody can run.

        Running requests go first, those that decode before those that are still computing their prompt; what is
        left of the token budget goes to newcomers. A request that needs a page when there is none takes it from
        the youngest request that is not in the step yet, which starts over when there is room again.
        """
        budget = self._max_batched_tokens
        chunks: list[Chunk] = []
        num_preemptions = self.num_preemptions
        ready = (r for r in self.running if r.wants_more and not r.is_loading)
        pending = deque(sorted(ready, key=lambda r: r.num_uncomputed > 1))
        while pending and budget:
            request = pending.popleft()
            count = min(request.num_uncomputed, budget)
            if self._make_room(request, request.num_computed + count, pending):
                drafts = self._draft(request, count, budget - count - len(pending))
                budget -= count + len(drafts)
                chunks.append(_chunk(request, count, drafts))
        # Whoever was just preempted would come straight back and take the pages away again.
        while budget and self.num_preemptions == num_preemptions and (newcomer := self._admit()):
            if newcomer.is_loading and not newcomer.num_assumed:
                continue
            count = min(newcomer.num_uncomputed, budget)
            budget -= count
            chunks.append(_chunk(newcomer, count))
        chunks.sort(key=lambda chunk: chunk.num_tokens > 1)
        return Step(tuple(chunks))

    def launched(self, step: Step) -> None:
        """The step is on its way: its KV counts as computed, and finished prompt pages may be shared.

        Sharing them before the device is done is safe, because whoever reads them does so in a later step.
        """
        for chunk, rows in step.samples():
            chunk.request.num_in_flight += chunk.num_samples
            chunk.request.sample_index = rows.stop - 1
        for chunk in step.chunks:
            request = chunk.request
            request.num_computed += chunk.num_tokens
            if request.is_loading:
                continue  # whether what it computes is right is known when the load has ended
            if chunk.num_tokens - len(chunk.drafts) > 1 or request.num_computed <= request.num_prompt:
                self._share(request)

    def loaded(self, request: Request, num_tokens: int) -> None:
        """The pool is done with the request's pages: the KV of its first `num_tokens` tokens is there."""
        num_tokens = min(num_tokens, len(request.tokens) - 1)
        if num_tokens < request.num_assumed:
            self._take_back(request, num_tokens)
        request.is_loading, request.num_assumed = False, 0
        if request.finish_reason is not None:
            self.abandoned.remove(request)
            self._release(request)
            return
        self._took_from_pool(request, num_tokens)

    def landed(self, chunk: Chunk, tokens: Sequence[int]) -> None:
        """The samples of a chunk have reached the host; `tokens`, at least one, are what counts of them.

        The KV of drafts that were wrong counts as computed no longer. It stays in the request's own pages, and is
        written anew before it is read: nothing is shared or saved beyond `tokens`.
        """
        request = chunk.request
        request.num_in_flight -= chunk.num_samples
        request.num_computed -= chunk.num_samples - len(tokens)
        request.tokens += tokens

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Take a request out, wherever it is, and give its pages back. A second call changes nothing."""
        if request.finish_reason is not None:
            return
        request.finish_reason = reason
        self._drafter.forget(request)
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        if request.is_loading:
            self.abandoned.append(request)
        else:
            self._release(request)
        self._link.finish(request)

    def check_integrity(self) -> None:
        """Verify that every page has the owner that requests and cache say it has. Raises EngineError."""
        self._pool.check_integrity()
        self._prefix.check_integrity()
        for request in self.waiting:
            if request.pages or request.handle is not None:
                raise EngineError(f"request {request.id} waits and holds {len(request.pages)} pages")
        if [r.arrival for r in self.running] != sorted(r.arrival for r in self.running):
            raise EngineError("running requests are out of order")
        num_owned = 0
        for request in (*self.running, *self.abandoned):
            shared = request.handle.num_tokens // self._page_size if request.handle else 0
            if request.handle and request.handle.pages != request.pages[:shared]:
                raise EngineError(f"request {request.id} points at other pages than those it pins")
            if request.page_row[: len(request.pages)].tolist() != request.pages:
                raise EngineError(f"the page table row of request {request.id} differs from its pages")
            self._pool.check_owned(request.id, request.pages[shared:])
            num_owned += len(request.pages) - shared
        if self._pool.num_free + self._prefix.num_pages + num_owned != self._pool.num_pages:
            raise EngineError(
                f"of {self._pool.num_pages} pages {self._pool.num_free} are free, {self._prefix.num_pages} cached and "
                f"{num_owned} held by running requests: some are lost"
            )

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)

    def _admit(self) -> Request | None:
        """Move the oldest waiting request that can run, or load, to the running ones, with pages for all its known
        tokens, if they fit. Those whose KV is on its way from a lower tier hold no pages and let others go first."""
        if len(self.running) >= self._max_num_seqs:
            return None
        for request in islice(self.waiting, LOOK_AHEAD):
            # All but the last token: its logits are what the next token is sampled from.
            tokens = request.tokens[:-1]
            match = self._prefix.match(tokens, request.tenant)
            missing = self._num_pages(request.num_tokens) - len(match.pages)
            # Asked before anything is pinned, since most questions are asked by a request that must go on waiting …
            if not self._has_room(missing):
                return None
            if (plan := self._link.match(request, match.num_tokens)) is not None:
                handle = self._prefix.lock(tokens, match.num_tokens, request.tenant)
                return request if self._start(request, handle, missing, plan) else None
        return None

    def _start(self, request: Request, handle: Handle, missing: int, plan: LoadPlan) -> bool:
        """Give a waiting request its pages, and have what the pool has brought into them; whether there was room."""
        # … and again afterwards: what is pinned cannot be evicted any more.
        if not self._has_room(missing):
            self._prefix.unlock(handle)
            return False
        request.handle = handle
        request.set_pages(list(handle.pages))
        request.num_computed = handle.num_tokens
        if not self._allocate(request, missing):
            self._release(request)
            if self._is_idle:
                raise EngineError(f"request {request.id} needs {missing} pages and an idle engine has none for it")
            return False
        if plan.num_tokens:
            self._link.start_load(request)
            request.is_loading = True
            if plan.mode != ASYNC:  # it runs at once, as if all of it were there
                request.num_computed = request.num_assumed = handle.num_tokens + plan.num_tokens
        if request.num_cached is None:
            request.num_cached = request.num_computed
        self.waiting.remove(request)
        # A request that was preempted comes back into its old place.
        at = len(self.running)
        while at and self.running[at - 1].arrival > request.arrival:
            at -= 1
        self.running.insert(at, request)
        return True

    def _take_back(self, request: Request, num_tokens: int) -> None:
        """A request ran with KV that did not come: what it computed is void, but for what was there before."""
        local = request.handle.num_tokens if request.handle else 0
        request.num_computed = max(num_tokens, local)
        request.num_in_flight = 0
        if request.num_outputs == 0 and request.num_cached == request.num_assumed:
            request.num_cached = request.num_computed

    def _took_from_pool(self, request: Request, num_tokens: int) -> None:
        if num_tokens > request.num_computed:
            if request.num_outputs == 0 and request.num_computed == (request.num_cached or 0):
                request.num_cached = num_tokens
            request.num_computed = num_tokens
        self._share(request)

    def _has_room(self, num_pages: int) -> bool:
        """Whether a newcomer may have that many pages: one for each running request stays, or it would be preempted
        again at once. An idle engine has room for every request."""
        free = self._pool.num_free + self._prefix.num_evictable
        return self._is_idle or num_pages + len(self.running) <= free

    @property
    def _is_idle(self) -> bool:
        return not self.running and not self.abandoned

    def _draft(self, request: Request, count: int, room: int) -> tuple[int, ...]:
        """At most `room` guesses at what follows, with pages for their KV, where the next `count` tokens are the last
        that are known. Nobody loses a page for them, and one stays for each running request."""
        most = min(room, request.room_for_drafts)
        if count < request.num_uncomputed or most < 1 or not self._drafter.wants(request):
            return ()
        drafts = self._drafter.propose(request, most)
        end = request.num_computed + count
        missing = self._num_pages(end + len(drafts)) - len(request.pages)
        if missing > 0 and not (self._has_room(missing) and self._allocate(request, missing)):
            drafts = drafts[: len(request.pages) * self._page_size - end]
        return drafts

    def _make_room(self, request: Request, num_tokens: int, pending: deque[Request]) -> bool:
        """Give `request` pages for `num_tokens`, preempting the youngest of it and `pending` until there are enough."""
        missing = self._num_pages(num_tokens) - len(request.pages)
        while not self._allocate(request, missing):
            victim = max((request, *pending), key=lambda r: r.arrival)
            self._preempt(victim)
            if victim is request:
                return False
            pending.remove(victim)
        return True

    def _allocate(self, request: Request, num_pages: int) -> bool:
        if num_pages <= 0:
            return True
        if (lacking := num_pages - self._pool.num_free) > 0:
            if lacking > self._prefix.num_evictable:
                return False
            self._prefix.evict(lacking)
        pages = self._pool.allocate(request.id, num_pages)
        if pages is None:
            return False
        request.add_pages(pages)
        return True

    def _preempt(self, request: Request) -> None:
        """Back to the queue, in order of arrival. Its whole pages stay in the prefix cache as long as there is room."""
        self.num_preemptions += 1
        self.running.remove(request)
        self._release(request)
        at = 0
        while at < len(self.waiting) and self.waiting[at].arrival < request.arrival:
            at += 1
        self.waiting.insert(at, request)

    def _share(self, request: Request) -> None:
        """Offer the whole pages that are computed to the prefix cache, and use its own where it has them already."""
        whole = min(request.num_computed, len(request.tokens)) // self._page_size
        shared = request.handle.num_tokens // self._page_size if request.handle else 0
        if request.handle is None or whole <= shared:
            return
        tokens = request.tokens[: whole * self._page_size]
        result = self._prefix.insert(tokens, request.pages[:whole], request.handle, request.id)
        request.handle = result.handle
        request.set_pages(list(result.pages) + request.pages[whole:])

    def _release(self, request: Request) -> None:
        """Give up all pages: shared ones are unpinned, own ones freed. Harmless when there are none."""
        if request.handle is None:
            return
        self._share(request)
        self._link.release(request)
        shared = request.handle.num_tokens // self._page_size
        self._prefix.unlock(request.handle)
        if own := request.pages[shared:]:
            self._pool.free(request.id, own)
        request.handle = None
        request.set_pages([])
        request.num_computed = 0


def _chunk(request: Request, count: int, drafts: tuple[int, ...] = ()) -> Chunk:
    samples = count == request.num_uncomputed
    return Chunk(request, request.num_computed, count + len(drafts), samples, drafts)
