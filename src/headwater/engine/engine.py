"""The engine: requests in, tokens out, one step at a time.

It joins scheduler, executor and sampler and has no thread of its own: whoever calls `step` drives it. Tokens only;
text, and stopping at strings, is the business of whoever has the tokenizer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple

from torch import Tensor

from headwater.connector.pushes import FLUSH_S
from headwater.connector.stats import TransferStats
from headwater.connector.transfers import TransferParams
from headwater.engine.batch import make_step_input
from headwater.engine.config import EngineConfig
from headwater.engine.device import choose_placement, device_kind
from headwater.engine.draft import Drafter, accept, create_drafter
from headwater.engine.executor import BaseExecutor, Executor, Pending
from headwater.engine.identity import engine_identity
from headwater.engine.link import EngineLink, NoPool, PoolLink
from headwater.engine.pages import PagePool
from headwater.engine.params import FinishReason, RequestOutput, SamplingParams, TokenLogprobs
from headwater.engine.prefix import create_prefix_cache
from headwater.engine.request import Request
from headwater.engine.runner import Progress
from headwater.engine.sampler import SamplingBatch, make_sampling_batch, unpack_logprobs
from headwater.engine.scheduler import Chunk, Scheduler, Step
from headwater.errors import (
    EngineConfigError,
    EngineDeadError,
    EngineError,
    HeadwaterError,
    RequestError,
    WeightsChangedError,
)
from headwater.models.checkpoint import Checkpoint, open_checkpoint
from headwater.pool.tenants import tenant_of
from headwater.stores.stats import StoreStats

log = logging.getLogger("headwater.engine")

LOAD_WAIT_S = 0.05
"""How long a step waits for the pool when it has nothing else to do; then its caller may look around."""
LOAD_POLL_S = 0.0005
OVERTIME_S = 1.0
"""How much longer than its deadline a flush is waited for, where a rank does not say how it ended."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Numbers of this moment, and counts since the start."""

    num_running: int
    num_waiting: int
    num_pages: int
    num_pages_free: int
    num_pages_cached: int
    """Held by the prefix cache, in use by requests or not."""
    num_pages_evictable: int
    """Of those: free as soon as somebody needs them."""
    num_steps: int
    num_preemptions: int
    num_prompt_tokens: int
    num_cached_tokens: int
    """Of the prompt tokens: found in the cache instead of computed."""
    num_generated_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    """Of the draft tokens: those that became part of an answer."""
    pool: TransferStats
    """What rank 0 moved to and from the pool."""


class _InFlight(NamedTuple):
    step: Step
    sampling: SamplingBatch
    pending: Pending


class _Flushing(NamedTuple):
    request: Request
    output: RequestOutput
    until_s: float


class Engine:
    """One model, served. Not thread-safe: one caller at a time. `close` it, or use it as a context manager."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        checkpoint: Checkpoint | None = None,
        executor: BaseExecutor | None = None,
        link: EngineLink | None = None,
        drafter: Drafter | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.checkpoint = checkpoint or open_checkpoint(config.model, config.load_format)
        self.config = config
        _check_length(config, self.checkpoint)
        self.placement = choose_placement(config)
        self._overlap = self.placement.overlap
        self._executor = executor or Executor(self.checkpoint, config, self.placement, progress)
        self.plan = self._executor.plan
        self.max_model_len = self.plan.max_model_len
        self._pool = PagePool(self.plan.num_pages)
        self._prefix = create_prefix_cache(config.prefix_cache, self._pool, config.page_size)
        self.declined = ""
        """Why there is no pool, where one was asked for."""
        try:
            self._link = link or self._connect()
        except BaseException:
            self._executor.close()
            raise
        self._drafter = drafter or create_drafter(config.speculative_ngram)
        self._scheduler = Scheduler(
            self._pool,
            self._prefix,
            page_size=config.page_size,
            max_num_seqs=config.max_num_seqs,
            max_batched_tokens=config.max_batched_tokens,
            link=self._link,
            drafter=self._drafter,
        )
        self._requests: dict[str, Request] = {}
        self._arrivals = count()
        self._in_flight: _InFlight | None = None
        self._is_closed = False
        self._aborted: list[RequestOutput] = []
        self._flushing: dict[int, _Flushing] = {}
        """By arrival: requests that are over, and whose answer waits until another host has their KV."""
        self._num_steps = self._num_prompt_tokens = self._num_cached_tokens = self._num_generated_tokens = 0
        self._num_draft_tokens = self._num_accepted_tokens = 0

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        cache_salt: str | None = None,
        transfer: TransferParams | None = None,
    ) -> None:
        """Queue a request. It uses, and leaves behind, KV of its salt alone; a `transfer` says that another server
        sends KV of its prompt. Raises RequestError for what can never be served, and then nothing has changed."""
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is in use; ids of live requests must differ")
        tokens = self._check_prompt(prompt)
        self._check_stop_tokens(params)
        arrival = next(self._arrivals)
        room = self.max_model_len - len(tokens)
        request = Request(
            request_id,
            tokens,
            params,
            arrival=arrival,
            max_tokens=min(room, params.max_tokens or room),
            stop_ids=self._stop_ids(params),
            seed=params.seed if params.seed is not None else _spread(self.config.seed, arrival),
            max_pages=-(-self.max_model_len // self.config.page_size),
            tenant=tenant_of(cache_salt),
            transfer=transfer,
        )
        self._requests[request_id] = request
        self._scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """End a request now and take its pages back; its last output comes with the next step. Unknown ids are fine."""
        if (request := self._requests.get(request_id)) is not None:
            self._aborted += self._finish(request, FinishReason.ABORT, [], None)
        for arrival, (held, output, _) in list(self._flushing.items()):
            if held.id == request_id:
                self._link.stop_push(held)
                del self._flushing[arrival]
                self._aborted.append(output)

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        is_open = self._requests or self._in_flight or self._aborted or self._flushing
        return bool(is_open or self._scheduler.abandoned)

    def step(self) -> list[RequestOutput]:
        """Launch the next step, then read the one before it, which the device computed in the meantime.

        Without overlap the step is read at once. An output comes at most once per request and call.
        """
        outputs, self._aborted = self._aborted, []
        self._handle_report()
        if not self._may_overlap():
            outputs += self._land()
        step = self._scheduler.schedule()
        launched = self._launch(step) if step.chunks else None
        if launched is None:
            self._flush()
            if self._in_flight is None:
                self._wait_for_pool()
        outputs += self._land()
        self._in_flight = launched
        if not self._overlap or step.is_loading:
            outputs += self._land()
        outputs += self._take_flushed()
        if not self.has_work:
            self._flush()  # no step follows that the last saves could go with
        return outputs

    def stats(self) -> EngineStats:
        """Cheap enough to call at every step."""
        return EngineStats(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            num_pages=self._pool.num_pages,
            num_pages_free=self._pool.num_free,
            num_pages_cached=self._prefix.num_pages,
            num_pages_evictable=self._prefix.num_evictable,
            num_steps=self._num_steps,
            num_preemptions=self._scheduler.num_preemptions,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_generated_tokens=self._num_generated_tokens,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=self._num_accepted_tokens,
            pool=self._link.add_to(self._executor.transfer_stats()),
        )

    def store_stats(self) -> StoreStats | None:
        """The pool now, and what rank 0 did with each of its tiers; None without a pool. Asks no server."""
        return self._executor.store_stats()

    def expert_rows(self, *, wait: bool = True) -> Tensor | None:
        """Rows that went to each expert of each sparse layer so far, int64 [sparse layers, experts] on the host; None
        for a dense model. Waits for a copy of a few KiB; without `wait` a GPU's are those of the last time that this
        was asked, and nothing waits."""
        return self._executor.expert_rows(wait=wait)

    def reset_prefix_cache(self) -> int:
        """Forget all cached KV that no request is using; returns how many pages that was."""
        return self._prefix.reset()

    def drain_saves(self, timeout_s: float) -> bool:
        """Wait until what was given to the pool is in it, or given up, on every rank; False if that takes longer."""
        self._flush()
        return self._executor.drain(timeout_s)

    def check_alive(self) -> None:
        """Raise EngineDeadError if a rank is gone. A step would find out as well; this is for when there is none."""
        self._executor.check_alive()

    def check_integrity(self) -> None:
        """Verify the owner of every page. Raises EngineError. For tests: it looks at everything."""
        self._scheduler.check_integrity()
        live = {r.id for r in (*self._scheduler.waiting, *self._scheduler.running)}
        if live != self._requests.keys():
            raise EngineError(f"requests {sorted(live ^ self._requests.keys())} are known to only one side")

    def close(self) -> None:
        """Take what is to be saved, and end the other ranks. Idempotent; requests that are not finished are
        forgotten."""
        if not self._is_closed:
            self._is_closed = True
            with suppress(HeadwaterError):  # a rank may be gone
                self._flush()
        self._executor.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _connect(self) -> EngineLink:
        """Join the pool, if one is wanted, and if the files that all ranks have loaded are still those that there
        were before: otherwise nobody knows the name of what runs."""
        connector = self.config.connector
        if connector is None:
            return NoPool()
        assert isinstance(self._executor, Executor), "only real ranks have KV to share"
        try:
            identity = engine_identity(
                self.checkpoint, self.placement.dtype, self.config.load_format, device_kind(self.placement.device)
            )
        except WeightsChangedError as error:
            self.declined = str(error)
            log.warning("no pool: %s", error)
            return NoPool()
        space = self._executor.connect(connector, identity)
        link = PoolLink(
            space,
            connector,
            page_size=self.config.page_size,
            num_ranks=self.config.tensor_parallel_size,
            dummy_page=self.plan.num_pages,
        )
        self._executor.publish("scheduler", link.figures)
        return link

    def _handle_report(self) -> bool:
        """Let requests go on whose KV has come from the pool; whether there were any."""
        ends = self._link.handle_report(self._executor.take_report())
        for arrival, num_tokens in ends:
            waiting = (*self._scheduler.running, *self._scheduler.abandoned)
            self._scheduler.loaded(next(r for r in waiting if r.arrival == arrival), num_tokens)
        return bool(ends)

    def _wait_for_pool(self) -> None:
        """There is nothing to compute: wait a moment for a load, or for KV that comes from a lower tier."""
        num_fetching, deadline = self._link.num_fetching, time.monotonic() + LOAD_WAIT_S
        num_flushing = self._num_flushing
        while num_fetching or self._link.is_loading or num_flushing:
            has_news = (
                self._handle_report() or self._link.num_fetching != num_fetching or self._num_flushing != num_flushing
            )
            if has_news or time.monotonic() >= deadline:
                return
            time.sleep(LOAD_POLL_S)

    @property
    def _num_flushing(self) -> int:
        return sum(self._link.is_flushing(held.request) for held in self._flushing.values())

    def _take_flushed(self) -> list[RequestOutput]:
        """The answers whose KV is with another host, and those that wait for that no longer."""
        outputs = []
        for arrival, num_tokens in self._link.take_pushed():
            if (held := self._flushing.pop(arrival, None)) is not None:
                outputs.append(replace(held.output, num_sent_tokens=num_tokens))
        now = time.monotonic()
        for arrival, held in [(a, h) for a, h in self._flushing.items() if h.until_s <= now]:
            self._link.stop_push(held.request)
            del self._flushing[arrival]
            outputs.append(replace(held.output, num_sent_tokens=0))
        return outputs

    def _flush(self) -> None:
        """Have orders carried out that no step takes along."""
        orders = self._link.order(None)
        if not orders.is_empty:
            self._executor.order(orders)

    def _may_overlap(self) -> bool:
        """Penalties and drafts look at every token said so far, so the last one must be known before the next step; and
        what a step with drafts has computed is known when it lands."""
        if self._in_flight is not None and self._in_flight.step.has_drafts:
            return False
        running = self._scheduler.running
        return not any(request.params.has_penalties or self._drafter.wants(request) for request in running)

    def _launch(self, step: Step) -> _InFlight:
        sampling = make_sampling_batch(step.sampled, self._executor.vocab_size)
        step_input = make_step_input(step, self.config.page_size)
        orders = self._link.order(step)
        try:
            pending = self._executor.launch(step_input, sampling, orders)
        except BaseException:
            with suppress(EngineDeadError):
                self._link.step_failed(orders)
                self._executor.discard(orders)
            raise
        self._scheduler.launched(step)
        self._num_steps += 1
        return _InFlight(step, sampling, pending)

    def _land(self) -> list[RequestOutput]:
        """Wait for the step in flight, if there is one, and tell its requests what they got."""
        if self._in_flight is None:
            return []
        step, sampling, pending = self._in_flight
        self._in_flight = None
        sampled = pending.wait()
        while step.is_loading:  # computed with KV that came meanwhile: was it right?
            self._executor.check_alive()
            if not self._handle_report():
                time.sleep(LOAD_POLL_S)
        logprobs = unpack_logprobs(sampling, sampled)
        token_ids, outputs = sampled.token_ids.tolist(), []
        for chunk, rows in step.samples():
            request = chunk.request
            if request.finish_reason is not None or not request.num_in_flight:
                continue  # it stopped or was aborted while this step was on its way, or its step was taken back
            said = [logprobs[row] for row in range(rows.start, rows.stop) if row in logprobs]
            outputs += self._take(chunk, accept(chunk.drafts, token_ids[rows]), said)
        return outputs

    def _take(self, chunk: Chunk, tokens: list[int], logprobs: list[TokenLogprobs]) -> list[RequestOutput]:
        """Give a request its next tokens, up to the one that ends it."""
        request = chunk.request
        num_known = len(request.tokens) - request.num_prompt  # further ones may be in flight already
        if num_known == 0:
            self._num_prompt_tokens += request.num_prompt
            self._num_cached_tokens += request.num_cached or 0
        num_right = len(tokens) - 1
        self._drafter.landed(request, len(chunk.drafts), num_right)
        reasons = (self._why_over(request, number, token) for number, token in enumerate(tokens, num_known + 1))
        count, reason = next(((n, why) for n, why in enumerate(reasons, 1) if why is not None), (len(tokens), None))
        tokens, said = tokens[:count], logprobs[:count] or None
        self._scheduler.landed(chunk, tokens)
        self._num_generated_tokens += count
        self._num_draft_tokens += len(chunk.drafts)
        self._num_accepted_tokens += min(num_right, count)
        if reason is not None:
            return self._finish(request, reason, tokens, said)
        return [_make_output(request, tokens, said)]

    @staticmethod
    def _why_over(request: Request, number: int, token: int) -> FinishReason | None:
        """Why a request is over with its `number`-th token, if it is."""
        if token in request.stop_ids and number > request.params.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if number >= request.max_tokens else None

    def _finish(
        self, request: Request, reason: FinishReason, tokens: list[int], logprobs: list[TokenLogprobs] | None
    ) -> list[RequestOutput]:
        """End a request; its last output, unless that waits until another host has its KV."""
        self._scheduler.finish(request, reason)
        del self._requests[request.id]
        output = _make_output(request, tokens, logprobs)
        if self._link.is_flushing(request):
            self._flushing[request.arrival] = _Flushing(request, output, time.monotonic() + FLUSH_S + OVERTIME_S)
            return []
        if request.transfer is not None and request.transfer.push_to:
            output = replace(output, num_sent_tokens=0)
        return [output]

    def _check_prompt(self, prompt: Sequence[int]) -> list[int]:
        tokens = [int(token) for token in prompt]
        if not tokens:
            raise RequestError("the prompt is empty; expected at least one token", param="prompt")
        if len(tokens) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens and this model's context holds {self.max_model_len}, the answer "
                "included; shorten the prompt",
                param="prompt",
                code="context_length_exceeded",
            )
        vocab_size = self._executor.vocab_size
        if min(tokens) < 0 or max(tokens) >= vocab_size:
            raise RequestError(f"token ids must be 0 to {vocab_size - 1}", param="prompt")
        return tokens

    def _check_stop_tokens(self, params: SamplingParams) -> None:
        vocab_size = self._executor.vocab_size
        if unknown := [i for i in params.stop_token_ids if not 0 <= i < vocab_size]:
            raise RequestError(
                f"stop_token_ids has {unknown[0]}; token ids of this model are 0 to {vocab_size - 1}",
                param="stop_token_ids",
            )

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        eos = () if params.ignore_eos else self.checkpoint.config.eos_token_ids
        # A config may name an end token that its vocabulary does not have; it is never sampled, and never banned.
        known = (token for token in eos if 0 <= token < self._executor.vocab_size)
        return frozenset((*known, *params.stop_token_ids))


def _check_length(config: EngineConfig, checkpoint: Checkpoint) -> None:
    """Before anything is loaded, and before tables of that length are made."""
    most = checkpoint.config.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > most:
        raise EngineConfigError(f"--max-model-len is {config.max_model_len:,}; the model was made for {most:,} tokens")


def _make_output(request: Request, tokens: list[int], logprobs: list[TokenLogprobs] | None) -> RequestOutput:
    return RequestOutput(
        request.id, tokens, logprobs, request.finish_reason, request.num_prompt, request.num_cached or 0
    )


def _spread(seed: int, number: int) -> int:
    """A seed for a request that brought none: the same in every run, far from its neighbours'."""
    return (seed * 0x9E3779B1 + number * 0x85EBCA6B + 0x27D4EB2F) & ((1 << 63) - 1)
