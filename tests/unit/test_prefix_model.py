"""Random requests on a radix cache that is too small for them, against a plain model, all invariants after each step.

The model is a dictionary from every cached prefix (a tenant and whole pages of tokens) to its page and its last use,
from which eviction is predicted page by page. `written` says what KV each page would hold, so that a page that was
freed while somebody still used it shows up as wrong content, not only as wrong bookkeeping.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from headwater.engine.pages import CACHED, PageId, PagePool
from headwater.engine.prefix import Handle, create_prefix_cache
from headwater.errors import EngineError

NUM_PAGES = 14
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=16)
TENANTS = st.sampled_from([b"", b"a"])
Prefix = tuple[bytes | int, ...]


@dataclass
class Request:
    """A request as an engine would keep it: its table is `shared under the handle | own`."""

    name: str
    tokens: list[int]
    handle: Handle
    table: list[PageId]
    num_computed: int
    tenant: bytes
    stale: list[Handle] = field(default_factory=list)


class PrefixModel(RuleBasedStateMachine):
    page_size = 1

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.cache = create_prefix_cache("radix", self.pool, self.page_size)
        self.requests: list[Request] = []
        self.dead: list[Request] = []
        self.cached: dict[Prefix, tuple[PageId, int]] = {}
        self.written: dict[PageId, Prefix] = {}
        self.now = 0
        self.num_started = 0

    # ---- the model ----------------------------------------------------------------------------------------------
    def prefixes(self, tokens: list[int], tenant: bytes) -> list[Prefix]:
        return [(tenant, *tokens[:end]) for end in range(self.page_size, len(tokens) + 1, self.page_size)]

    def expected_pages(self, tokens: list[int], tenant: bytes) -> list[PageId]:
        pages = []
        for prefix in self.prefixes(tokens, tenant):
            if prefix not in self.cached:
                break
            pages.append(self.cached[prefix][0])
        return pages

    def touch(self, tokens: list[int], tenant: bytes) -> None:
        self.now += 1
        for prefix in self.prefixes(tokens, tenant):
            self.cached[prefix] = (self.cached[prefix][0], self.now)

    def locked(self) -> set[Prefix]:
        return {prefix for r in self.requests for prefix in self.prefixes(r.tokens[: r.handle.num_tokens], r.tenant)}

    def expect_eviction(self, wanted: int) -> list[Prefix]:
        locked, gone = self.locked(), []
        while len(gone) < wanted:
            parents = {prefix[: -self.page_size] for prefix in self.cached}
            leaves = [p for p in self.cached if p not in parents and p not in locked]
            if not leaves:
                break
            ages = sorted(self.cached[leaf][1] for leaf in leaves)
            assert len(set(ages)) == len(ages), "the model would not know which leaf goes"
            oldest = min(leaves, key=lambda leaf: self.cached[leaf][1])
            del self.cached[oldest]
            gone.append(oldest)
        return gone

    # ---- operations ---------------------------------------------------------------------------------------------
    def evict_pages(self, wanted: int) -> int:
        gone = self.expect_eviction(wanted)
        assert self.cache.evict(wanted) == len(gone)
        return len(gone)

    def insert(self, request: Request) -> None:
        whole = request.num_computed // self.page_size
        if whole * self.page_size < request.handle.num_tokens:
            return
        tokens, old = request.tokens[: whole * self.page_size], request.handle
        had = len(self.expected_pages(tokens, request.tenant))
        num_free = self.pool.num_free
        result = self.cache.insert(tokens, request.table[:whole], old, request.name)
        assert result.num_duplicate == had - old.num_tokens // self.page_size
        assert self.pool.num_free == num_free + result.num_duplicate
        for prefix, page in list(zip(self.prefixes(tokens, request.tenant), request.table[:whole], strict=True))[had:]:
            self.cached[prefix] = (page, 0)
        self.touch(tokens, request.tenant)
        assert result.pages == self.expected_pages(tokens, request.tenant) == result.handle.pages
        assert result.handle.num_tokens == len(tokens)
        request.table[:whole] = result.pages
        request.handle = result.handle
        request.stale.append(old)

    def leave(self, request: Request) -> None:
        self.requests.remove(request)
        own = request.table[request.handle.num_tokens // self.page_size :]
        self.cache.unlock(request.handle)
        self.cache.unlock(request.handle)
        self.pool.free(request.name, own)
        self.dead.append(request)

    @initialize(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        """Without this, most runs would never come to evict or split anything."""
        for _ in range(data.draw(st.integers(0, 4), "requests before")):
            request = self.begin(data.draw(TOKENS), data.draw(TENANTS))
            self.advance(request, len(request.tokens))
            self.insert(request)
            self.leave(request)

    @rule(tokens=TOKENS, tenant=TENANTS, data=st.data())
    def start(self, tokens: list[int], tenant: bytes, data: st.DataObject) -> None:
        if len(self.requests) < 4:
            # Half of them repeat what a request before them had, whole or in part.
            known = [r.tokens for r in [*self.requests, *self.dead]]
            if known and data.draw(st.booleans(), "repeat"):
                other = data.draw(st.sampled_from(known))
                tokens = other[: data.draw(st.integers(0, len(other)), "shared")] + tokens
            self.begin(tokens, tenant)

    def begin(self, tokens: list[int], tenant: bytes) -> Request:
        match = self.cache.match(tokens[:-1], tenant)
        handle = self.cache.lock(tokens, match.num_tokens, tenant)
        assert handle.pages == match.pages
        assert handle.num_tokens == match.num_tokens < len(tokens)
        self.touch(tokens[: match.num_tokens], tenant)
        self.num_started += 1
        request = Request(f"r{self.num_started}", tokens, handle, match.pages, match.num_tokens, tenant)
        self.requests.append(request)
        return request

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), num_tokens=st.integers(1, 8))
    def compute(self, data: st.DataObject, num_tokens: int) -> None:
        self.advance(data.draw(st.sampled_from(self.requests)), num_tokens)

    def advance(self, request: Request, num_tokens: int) -> None:
        target = min(len(request.tokens), request.num_computed + num_tokens)
        missing = -(-target // self.page_size) - len(request.table)
        pages = self.pool.allocate(request.name, max(missing, 0))
        if pages is None:
            self.evict_pages(missing - self.pool.num_free)
            pages = self.pool.allocate(request.name, missing)
            if pages is None:
                assert self.cache.num_evictable == 0
                return
        for page in pages:
            self.written[page] = ()
        request.table += pages
        for position in range(request.num_computed, target):
            page = request.table[position // self.page_size]
            assert self.pool.owner_of(page) == request.name, "it would write into a page that is not its own"
            self.written[page] = (request.tenant, *request.tokens[: position + 1])
        request.num_computed = target

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def offer(self, data: st.DataObject) -> None:
        self.insert(data.draw(st.sampled_from(self.requests)))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), num_tokens=st.integers(1, 6), offers=st.booleans())
    def decode(self, data: st.DataObject, num_tokens: int, offers: bool) -> None:
        request = data.draw(st.sampled_from(self.requests))
        if len(request.tokens) < 24:
            request.tokens = request.tokens + data.draw(st.lists(st.integers(0, 1), max_size=num_tokens))
        self.advance(request, num_tokens)
        if offers:
            self.insert(request)

    @precondition(lambda self: 0 < len(self.requests) < 4)
    @rule(data=st.data(), tail=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def fork(self, data: st.DataObject, tail: list[int]) -> None:
        """A request that begins with exactly what another has pinned: two handles with the same end."""
        other = data.draw(st.sampled_from(self.requests))
        self.begin(other.tokens[: other.handle.num_tokens] + tail, other.tenant)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        self.insert(request)
        self.leave(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.leave(data.draw(st.sampled_from(self.requests)))

    @precondition(lambda self: self.dead)
    @rule(data=st.data())
    def result_after_the_end(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.dead))
        self.cache.unlock(request.handle)
        with pytest.raises(EngineError):
            self.cache.insert([], [], request.handle, request.name)
        with pytest.raises(EngineError, match="unlocked"):
            _ = request.handle.pages

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def unlock_a_handle_that_was_replaced(self, data: st.DataObject) -> None:
        for handle in data.draw(st.sampled_from(self.requests)).stale:
            self.cache.unlock(handle)

    @rule(tokens=TOKENS, tenant=TENANTS | st.just(b"nobody"), data=st.data())
    def lock_part_and_unlock(self, tokens: list[int], tenant: bytes, data: st.DataObject) -> None:
        have = len(self.expected_pages(tokens, tenant))
        part = data.draw(st.integers(0, have)) * self.page_size
        handle = self.cache.lock(tokens, part, tenant)
        self.touch(tokens[:part], tenant)
        assert handle.pages == self.expected_pages(tokens[:part], tenant)
        self.cache.unlock(handle)
        if (have + 1) * self.page_size <= len(tokens):
            with pytest.raises(EngineError, match="match again"):
                self.cache.lock(tokens, (have + 1) * self.page_size, tenant)

    @rule(num_pages=st.integers(0, NUM_PAGES))
    def evict(self, num_pages: int) -> None:
        self.evict_pages(num_pages)

    @rule()
    def reset(self) -> None:
        gone = self.expect_eviction(NUM_PAGES)
        assert self.cache.reset() == len(gone)
        assert self.cache.num_evictable == 0
        assert self.cache.num_pages == len(self.locked())

    @rule(tokens=TOKENS, tenant=TENANTS | st.just(b"nobody"))
    def match(self, tokens: list[int], tenant: bytes) -> None:
        match = self.cache.match(tokens, tenant)
        assert match.pages == self.expected_pages(tokens, tenant)
        assert match.num_tokens == len(match.pages) * self.page_size

    # ---- the whole state ----------------------------------------------------------------------------------------
    @invariant()
    def whole(self) -> None:
        self.pool.check_integrity()
        self.cache.check_integrity()

    @invariant()
    def cache_is_the_model(self) -> None:
        assert self.cache.num_pages == len(self.cached) == len(self.pool.pages_of(CACHED))
        assert self.cache.num_evictable == len(self.cached) - len(self.locked())
        for prefix, (page, _) in self.cached.items():
            tenant, *tokens = prefix
            assert isinstance(tenant, bytes)
            assert self.cache.match([int(token) for token in tokens], tenant).pages[-1] == page
            assert self.written[page] == prefix

    @invariant()
    def requests_read_what_was_written_for_them(self) -> None:
        for request in self.requests:
            shared = request.handle.num_tokens // self.page_size
            assert request.table[:shared] == request.handle.pages
            assert sorted(request.table[shared:]) == self.pool.pages_of(request.name)
            for number, page in enumerate(request.table):
                end = min((number + 1) * self.page_size, request.num_computed)
                assert self.written[page] == (request.tenant, *request.tokens[:end])

    def teardown(self) -> None:
        for request in list(self.requests):
            self.leave(request)
        self.cache.reset()
        assert self.pool.num_free == NUM_PAGES
        self.whole()


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_random_requests_against_a_model(page_size: int) -> None:
    machine = type("Machine", (PrefixModel,), {"page_size": page_size})
    chosen = settings(stateful_step_count=40, suppress_health_check=list(HealthCheck))
    run_machine(machine, settings=chosen)
