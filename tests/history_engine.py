"""An engine over a device whose KV is the history itself, the answers that it must give, and what must hold afterwards.

The fake device keeps, for each slot, the tokens that led to the KV written there. A page freed too early, shared
wrongly, or written by two requests shows up as a wrong history at the first read. It carries out the orders of the real
connector, too: a chunk that is saved from pages which do not hold its tokens shows up at once.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import torch

from headwater.connector.config import ConnectorConfig
from headwater.connector.orders import StepOrders, StepReport
from headwater.connector.stats import TransferStats
from headwater.engine.batch import StepInput
from headwater.engine.config import EngineConfig
from headwater.engine.draft import Drafter
from headwater.engine.engine import Engine
from headwater.engine.executor import Pending
from headwater.engine.link import PoolLink
from headwater.engine.params import FinishReason, RequestOutput, SamplingParams
from headwater.engine.sampler import Sampled, SamplingBatch

from histories import EOS, POISON, VOCAB, HistoryCache, HistorySpace, next_token


class HistoryDevice(HistoryCache):
    """An executor over such a cache. Results are held back until asked for, as on a GPU."""

    def __init__(
        self, num_pages: int, page_size: int, max_model_len: int, space: HistorySpace | None = None, num_ranks: int = 1
    ) -> None:
        super().__init__(page_size, space, num_ranks)
        self.plan = SimpleNamespace(num_pages=num_pages, max_model_len=max_model_len, explanation="")
        self.vocab_size = VOCAB
        self._previous: list[int] = []
        self.max_rows = 0
        self.num_rows = 0
        self.is_waiting = False
        """No load ends before this is False."""
        self.failure: BaseException | None = None
        """What the next step fails with, once its orders have been begun."""

    def launch(self, step: StepInput, sampling: SamplingBatch, orders: StepOrders) -> Pending:
        self.start(orders)
        if self.failure is not None:
            error, self.failure = self.failure, None
            raise error
        self.max_rows = max(self.max_rows, step.num_rows)
        self.num_rows += step.num_rows
        assert sorted(step.query_lens.tolist(), key=lambda n: n > 1) == step.query_lens.tolist(), "decodes come first"
        assert len(set(step.slots.tolist())) == step.num_rows, "two rows write one slot"
        samples, row = [], 0
        for i, count in enumerate(step.query_lens.tolist()):
            for _ in range(count):
                position, token = int(step.positions[row]), int(step.token_ids[row])
                token = token if token >= 0 else self._previous[-1 - token]
                assert self._slot(step.page_table[i], position) == step.slots[row]
                history = self.compute(step.page_table[i], position, token)
                if row in step.sample_rows:
                    samples.append(EOS if history is POISON else next_token(history))
                row += 1
            assert position + 1 == step.kv_lens[i]
        self._previous = samples
        self.end(orders)
        return Pending(Sampled(torch.tensor(samples, dtype=torch.int64), None, None), None)

    def order(self, orders: StepOrders) -> None:
        self.start(orders)

    def discard(self, orders: StepOrders) -> None:
        """The orders were begun: the loads among them end some day."""

    def take_report(self) -> StepReport:
        if not self.is_waiting:
            self.land_some()
        return super().take_report()

    def drain(self, timeout_s: float) -> bool:
        return True

    def transfer_stats(self) -> TransferStats:
        return TransferStats()

    def store_stats(self) -> None:
        return None

    def expert_rows(self, *, wait: bool) -> None:
        return None

    def check_alive(self) -> None:
        pass

    def close(self) -> None:
        pass


def make_engine(*, drafter: Drafter | None = None, **settings_: Any) -> tuple[Engine, HistoryDevice]:
    num_pages = settings_.pop("num_pages", 32)
    max_model_len = settings_.pop("max_model_len", 64)
    pool_seed, mode = settings_.pop("pool_seed", None), settings_.pop("mode", "async")
    num_ranks, chunk_tokens = settings_.pop("num_ranks", 1), settings_.pop("chunk_tokens", 4)
    config = EngineConfig(model="fake", device="cpu", **{"page_size": 4, **settings_})
    space = HistorySpace(chunk_tokens, random.Random(pool_seed)) if pool_seed is not None else None
    max_model_len = min(max_model_len, num_pages * config.page_size)
    device = HistoryDevice(num_pages, config.page_size, max_model_len, space, num_ranks)
    checkpoint = SimpleNamespace(config=SimpleNamespace(eos_token_ids=(EOS,), max_position_embeddings=1 << 20))
    link = None
    if space is not None:
        connector = ConnectorConfig(pool="memory://", load_mode=mode, min_load_tokens=1)
        link = PoolLink(
            space,  # type: ignore[arg-type]
            connector,
            page_size=config.page_size,
            num_ranks=num_ranks,
            dummy_page=num_pages,
        )
    fakes: dict[str, Any] = {"checkpoint": checkpoint, "executor": device}
    return Engine(config, link=link, drafter=drafter, **fakes), device


def check_nothing_left(engine: Engine, device: HistoryDevice) -> None:
    """No page, lease or fetch is held by anybody."""
    stats = engine.stats()
    assert stats.num_pages_free + stats.num_pages_evictable == stats.num_pages, "a page is still held by somebody"
    if device.space is not None:
        assert not device.loads
        assert not device.space.leases
        assert not device.space.fetches
        link: Any = engine._link
        assert not link._side._tracked


def expected(prompt: list[int], params: SamplingParams, max_model_len: int) -> tuple[list[int], FinishReason]:
    tokens = list(prompt)
    limit = min(max_model_len - len(prompt), params.max_tokens or max_model_len)
    while True:
        tokens.append(next_token(tuple(tokens)))
        if tokens[-1] == EOS and not params.ignore_eos:
            return tokens[len(prompt) :], FinishReason.STOP
        if len(tokens) - len(prompt) >= limit:
            return tokens[len(prompt) :], FinishReason.LENGTH


def collect(outputs: list[RequestOutput], into: dict[str, list[int]], ends: dict[str, FinishReason]) -> None:
    for output in outputs:
        assert output.request_id not in ends, "an output after the end"
        into.setdefault(output.request_id, []).extend(output.token_ids)
        if output.finish_reason:
            ends[output.request_id] = output.finish_reason


def run(engine: Engine) -> tuple[dict[str, list[int]], dict[str, FinishReason]]:
    got: dict[str, list[int]] = {}
    ends: dict[str, FinishReason] = {}
    while engine.has_work:
        collect(engine.step(), got, ends)
        engine.check_integrity()
    return got, ends


GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
