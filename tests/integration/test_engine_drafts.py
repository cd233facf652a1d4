"""Drafts change how long an answer takes, and nothing that it says: real models, with and without, any sampling."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from headwater.engine.config import EngineConfig
from headwater.engine.draft import Drafter
from headwater.engine.engine import Engine, EngineStats
from headwater.engine.params import FinishReason, RequestOutput, SamplingParams
from headwater.engine.request import Request
from headwater.models.checkpoint import open_checkpoint

pytest.importorskip("transformers")

from engine_models import VOCAB, save_random_checkpoint

pytestmark = pytest.mark.slow

FAMILIES = ["llama", "qwen3_moe", "deepseek_v2"]
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "T 0.7": {"temperature": 0.7},
    "top-p": {"temperature": 0.7, "top_p": 0.8},
    "top-k, min-p": {"temperature": 0.9, "top_k": 12, "min_p": 0.02},
    "penalties": {"temperature": 0.5, "repetition_penalty": 1.02, "presence_penalty": 0.1, "frequency_penalty": 0.1},
    "logprobs": {"temperature": 0.0, "logprobs": 3},
}
Saved = Callable[[str], Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A random checkpoint by family."""
    known: dict[str, Path] = {}

    def ask(family: str) -> Path:
        if family not in known:
            known[family] = save_random_checkpoint(family, tmp_path_factory.mktemp(family))
        return known[family]

    return ask


class Answer(NamedTuple):
    token_ids: list[int]
    logprobs: list[tuple[int, float, list[int]]]
    finish_reason: FinishReason | None


class Replay:
    """Drafts the answers that are known from a run without drafts, right up to a random place."""

    def __init__(self, known: dict[str, Answer]) -> None:
        self._known = known
        self._rng = random.Random(0)

    def wants(self, request: Request) -> bool:
        return self._rng.random() < 0.9

    def propose(self, request: Request, most: int) -> tuple[int, ...]:
        said = len(request.tokens) - request.num_prompt
        count = min(most, self._rng.randrange(7))
        drafts = self._known[request.id].token_ids[said : said + count]
        wrong = self._rng.randrange(2 * len(drafts) + 1)
        return tuple(token if n < wrong else (token + 1) % VOCAB for n, token in enumerate(drafts))

    def landed(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        pass

    def forget(self, request: Request) -> None:
        pass


def prompts() -> dict[str, list[int]]:
    rng = random.Random(7)
    return {f"r{length}": [rng.randrange(3, VOCAB) for _ in range(length)] for length in (3, 17, 30, 64)}


def answers(
    asked: dict[str, list[int]], config: EngineConfig, params: SamplingParams, drafter: Drafter | None = None
) -> tuple[dict[str, Answer], EngineStats]:
    said: dict[str, list[RequestOutput]] = {}
    with Engine(config, drafter=drafter) as engine:
        for name, prompt in asked.items():
            engine.add(name, list(prompt), params)
        while engine.has_work:
            for output in engine.step():
                said.setdefault(output.request_id, []).append(output)
            engine.check_integrity()
        stats = engine.stats()
    return {name: joined(outputs) for name, outputs in said.items()}, stats


def joined(outputs: list[RequestOutput]) -> Answer:
    tokens = [token for output in outputs for token in output.token_ids]
    best = [entry for output in outputs for entry in output.logprobs or []]
    logprobs = [(entry.token_id, round(entry.logprob, 3), [token for token, _ in entry.top]) for entry in best]
    return Answer(tokens, logprobs, outputs[-1].finish_reason)


def small(path: Path, **options: Any) -> EngineConfig:
    return EngineConfig(model=str(path), device="cpu", max_model_len=160, num_pages=80, num_threads=1, **options)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_seed_gives_the_same_answer_with_drafts(family: str, sampling: str, saved: Saved) -> None:
    config = small(saved(family))
    params = SamplingParams(max_tokens=48, seed=3, ignore_eos=True, **SAMPLINGS[sampling])
    plain, without = answers(prompts(), config, params)
    drafted, stats = answers(prompts(), config, params, Replay(plain))
    assert drafted == plain
    assert without.num_draft_tokens == 0
    assert stats.num_draft_tokens > stats.num_accepted_tokens > 40
    assert stats.num_steps < without.num_steps
    assert all(len(answer.logprobs) == (48 if sampling == "logprobs" else 0) for answer in drafted.values())


@pytest.mark.parametrize(
    "options",
    [
        {"overlap": True},
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "overlap": True},
        {"max_batched_tokens": 9, "attention_backend": "reference"},
        {"num_pages": 200, "page_size": 1},
    ],
    ids=str,
)
def test_drafts_go_with_every_way_to_run(options: dict[str, Any], saved: Saved) -> None:
    params = SamplingParams(max_tokens=48, seed=3, temperature=0.7, ignore_eos=True)
    config = small(saved("llama"))
    plain, _ = answers(prompts(), config, params)
    drafted, stats = answers(prompts(), replace(config, **options), params, Replay(plain))
    assert drafted == plain
    assert stats.num_accepted_tokens > 40
    assert (stats.num_preemptions > 0) == ("num_pages" in options)


def test_a_stop_token_among_drafts_ends_the_answer_where_it_does_without(saved: Saved) -> None:
    config = small(saved("llama"))
    params = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)
    free, _ = answers(prompts(), config, params)
    stops = tuple({answer.token_ids[30] for answer in free.values()})
    stopping = replace(params, stop_token_ids=stops)
    plain, _ = answers(prompts(), config, stopping)
    drafted, _ = answers(prompts(), config, stopping, Replay(free))  # it drafts beyond the end
    assert drafted == plain
    assert all(answer.finish_reason is FinishReason.STOP for answer in drafted.values())


TEXT = "The keeper of the lighthouse wrote down every ship that passed in thirty-one years, and each day's weather."


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_smollm2_says_the_same_with_ngram_drafts(sampling: str) -> None:
    """It repeats a text, so drafts are right, and sometimes not."""
    checkpoint = open_checkpoint("smollm2", "auto")
    task = f"Repeat the following text word for word, three times:\n\n{TEXT}"
    prompt = checkpoint.load_tokenizer().apply_chat_template([{"role": "user", "content": task}])
    config = EngineConfig(model="smollm2", device="cpu", max_model_len=256, num_pages=20)
    params = SamplingParams(max_tokens=64, seed=3, **SAMPLINGS[sampling])
    plain, without = answers({"a": prompt}, config, params)
    drafted, stats = answers({"a": prompt}, replace(config, speculative_ngram=6), params)
    assert drafted == plain
    assert stats.num_draft_tokens >= stats.num_accepted_tokens >= 6
    # Each step gives a token of its own besides, but for the last one, where a draft was the end.
    assert stats.num_steps <= without.num_steps - stats.num_accepted_tokens + 1
