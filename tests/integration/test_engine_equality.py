"""The engine says what `transformers` says, token for token, whatever its settings: every pair of them is tried."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headwater.connector.orders import StepOrders, StepReport
from headwater.connector.stats import TransferStats
from headwater.engine.batch import StepInput
from headwater.engine.config import EngineConfig
from headwater.engine.engine import Engine
from headwater.engine.executor import Pending
from headwater.engine.params import SamplingParams
from headwater.engine.sampler import Sampled, SamplingBatch
from headwater.engine.sizing import PagePlan

from covering import Row, covering_array

pytest.importorskip("transformers")

from engine_models import (
    TP_SIZES,
    VOCAB,
    Comparison,
    Reference,
    greedy_reference,
    load_transformers,
    report_rows,
    save_random_checkpoint,
)

pytestmark = pytest.mark.slow

PROMPT_LENGTHS = (3, 31, 97, 140)
SMOLLM2_PROMPTS = (1, 2, 4, 5)
"""The real model is forty times the size of the others, so it gets fewer prompts."""

FACTORS: dict[str, list[Any]] = {
    "model": list(TP_SIZES),
    "tp": [1, 2, 3, 4],
    "batch": ["alone", "together"],
    "chunk": [13, 64, 2048],
    "page_size": [1, 16, 48],
    "layout": ["layer-first", "page-first"],
    "prefix": ["naive", "radix", "radix, second time"],
    "memory": ["ample", "tight"],
    "overlap": [False, True],
    "attention": ["cpu", "reference"],
}


def allowed(row: Row) -> bool:
    fits = "model" not in row or row.get("tp", 1) in TP_SIZES[row["model"]]
    # The real model on three ranks takes minutes on a small machine, so that is asked of one request at a time.
    slow = row.get("model") == "smollm2" and row.get("tp") == 3
    slow = slow and (row.get("batch") == "together" or row.get("memory") == "tight")
    # One request alone is never preempted.
    return fits and not slow and not (row.get("memory") == "tight" and row.get("batch") == "alone")


ROWS = covering_array(FACTORS, allowed)
Oracle = Callable[[str], tuple[Path, list[Reference]]]
totals = Comparison()


def prompts(vocab_size: int) -> list[list[int]]:
    rng = random.Random(5)
    shared = [rng.randrange(3, vocab_size) for _ in range(50)]
    made = [[rng.randrange(3, vocab_size) for _ in range(length)] for length in PROMPT_LENGTHS]
    return [*made, shared + made[0], shared + made[1]]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """(checkpoint, references) by model, computed once."""
    known: dict[str, tuple[Path, list[Reference]]] = {}

    def ask(name: str) -> tuple[Path, list[Reference]]:
        if name not in known:
            if name == "smollm2":
                from headwater.models.catalog import find_in_catalog

                path, vocab_size = find_in_catalog(name), 49152
            else:
                path, vocab_size = save_random_checkpoint(name, tmp_path_factory.mktemp(name)), VOCAB
            model, asked = load_transformers(path), prompts(vocab_size)
            if name == "smollm2":
                asked = [asked[number] for number in SMOLLM2_PROMPTS]
            torch.set_num_threads(1)  # small models, and large ones on a busy machine, only wait for their threads
            known[name] = path, [greedy_reference(model, prompt) for prompt in asked]
        return known[name]

    return ask


class Clockwork:
    """An executor that computes nothing: enough to see what the scheduler does with a number of pages."""

    def __init__(self, config: EngineConfig) -> None:
        self.plan = PagePlan(config.num_pages or 0, config.max_model_len or 0, "")
        self.vocab_size = 1 << 20

    def launch(self, step: StepInput, sampling: SamplingBatch, orders: StepOrders) -> Pending:
        return Pending(Sampled(torch.full((len(step.sample_rows),), 5), None, None), None)

    def order(self, orders: StepOrders) -> None:
        pass

    def take_report(self) -> StepReport:
        return StepReport()

    def transfer_stats(self) -> TransferStats:
        return TransferStats()

    def check_alive(self) -> None:
        pass

    def close(self) -> None:
        pass


def num_pages(config: EngineConfig, references: list[Reference], row: Row) -> int:
    """Enough for all, or, where memory is to be tight, a number with which somebody is preempted."""
    each = [-(-(len(r.prompt) + len(r.token_ids)) // row["page_size"]) for r in references]
    if row["memory"] == "ample":
        return sum(each) + 8
    checkpoint = SimpleNamespace(config=SimpleNamespace(eos_token_ids=(2,), max_position_embeddings=1 << 20))
    for pages in sorted(range(max(each), sum(each)), key=lambda pages: abs(pages - sum(each) // 2))[:60]:
        trial = replace(config, num_pages=pages)
        engine = Engine(trial, checkpoint=checkpoint, executor=Clockwork(trial))  # type: ignore[arg-type]
        generate(engine, references, together=True)
        if engine.stats().num_preemptions:
            return pages
    raise AssertionError("no number of pages makes the scheduler preempt")


def generate(engine: Engine, references: list[Reference], *, together: bool) -> list[list[int]]:
    tokens: dict[str, list[int]] = {}
    for number, reference in enumerate(references):
        greedy = SamplingParams(temperature=0.0, max_tokens=len(reference.token_ids), ignore_eos=True)
        engine.add(str(number), reference.prompt, greedy)
        while engine.has_work and (not together or number == len(references) - 1):
            for output in engine.step():
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
    engine.check_integrity()
    return [tokens[str(number)] for number in range(len(references))]


@pytest.fixture(scope="module", autouse=True)
def report(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from report_rows(request, "every pair of settings, greedy, 64 tokens a prompt", ROWS, totals)


@pytest.mark.parametrize("row", ROWS, ids=[str(number) for number in range(len(ROWS))])
def test_equal_to_transformers(row: Row, oracle: Oracle) -> None:
    path, references = oracle(row["model"])
    is_smollm2 = row["model"] == "smollm2"
    if row["batch"] == "alone":
        references = references[:2] if is_smollm2 else references[1:3]
    elif is_smollm2:
        references = [references[0], *references[2:]]  # the first, and the two that share a prefix
    config = EngineConfig(
        model=str(path),
        device="cpu",
        tensor_parallel_size=row["tp"],
        max_model_len=max(len(r.prompt) + len(r.token_ids) for r in references),
        page_size=row["page_size"],
        cache_layout=row["layout"],
        prefix_cache=row["prefix"].split(",")[0],
        max_batched_tokens=row["chunk"],
        overlap=row["overlap"],
        attention_backend=row["attention"],
        num_threads=1,
    )
    config = replace(config, num_pages=num_pages(config, references, row))
    compared = Comparison()
    with Engine(config) as engine:
        together = row["batch"] == "together"
        got = generate(engine, references, together=together)
        if row["prefix"].endswith("second time"):
            got = generate(engine, references, together=together)
            # Where memory is tight, the others' pages may push out each prompt before it comes round again.
            assert engine.stats().num_cached_tokens > 0 or row["memory"] == "tight"
        assert (engine.stats().num_preemptions > 0) == (row["memory"] == "tight")
    for number, (reference, tokens) in enumerate(zip(references, got, strict=True)):
        compared.add(f"prompt {number}", reference, tokens)
    totals.num_tokens += compared.num_tokens
    totals.num_ties += compared.num_ties
    assert not compared.wrong, "\n".join(compared.wrong)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_sampling_with_a_seed_is_reproducible(family: str, oracle: Oracle) -> None:
    """Alone, in a batch, in chunks, after preemption and with overlap: the same seed draws the same tokens."""
    path, references = oracle(family)
    params = [
        SamplingParams(seed=n, temperature=0.8, top_p=0.95, top_k=50, max_tokens=32, ignore_eos=True) for n in range(6)
    ]

    def run(**settings: Any) -> list[list[int]]:
        config = EngineConfig(model=str(path), device="cpu", max_model_len=256, num_threads=1, **settings)
        tokens: dict[str, list[int]] = {}
        with Engine(config) as engine:
            for number, reference in enumerate(references):
                engine.add(str(number), reference.prompt, params[number])
                while settings.get("max_num_seqs") == 1 and engine.has_work:
                    for output in engine.step():
                        tokens.setdefault(output.request_id, []).extend(output.token_ids)
            while engine.has_work:
                for output in engine.step():
                    tokens.setdefault(output.request_id, []).extend(output.token_ids)
        return [tokens[str(number)] for number in range(len(references))]

    alone = run(num_pages=64, max_num_seqs=1)
    assert run(num_pages=64) == alone
    assert run(num_pages=17, overlap=True, max_batched_tokens=20) == alone
    assert len({tuple(tokens) for tokens in alone}) == len(alone)
