"""KV through the pool changes no token: any topology to any other, another server, a restarted one, under pressure."""

from __future__ import annotations

import os
import random
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headwater.engine.config import EngineConfig
from headwater.engine.engine import Engine
from headwater.engine.params import SamplingParams
from headwater.stores.embedded import destroy
from headwater.stores.url import parse_url

from covering import Row, covering_array

pytest.importorskip("transformers")

from engine_models import VOCAB, Comparison, Reference, greedy_reference, load_transformers, save_random_checkpoint

pytestmark = pytest.mark.slow

NUM_TOKENS = 40
MAX_RANKS = 4
"""Of both engines together, in a run that leaves the larger rows out."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
TP_SIZES = {1: (1, 2, 4), 2: (1, 2, 4), 4: (1, 2, 4), 6: (1, 2, 3), 8: (1, 2, 4)}
"""By number of KV heads."""

FACTORS: dict[str, list[Any]] = {
    "kv_heads": list(TP_SIZES),
    "write_tp": [1, 2, 3, 4],
    "read_tp": [1, 2, 3, 4],
    "write_page": [1, 16, 32, 48],
    "read_page": [1, 16, 32, 48],
    "write_layout": ["layer-first", "page-first"],
    "read_layout": ["layer-first", "page-first"],
    "load": ["async", "blocking"],
    "prefix": ["radix", "naive"],
    "memory": ["ample", "tight"],
    "server": ["same", "other", "restarted"],
}


def allowed(row: Row) -> bool:
    heads = [row["kv_heads"]] if "kv_heads" in row else list(TP_SIZES)
    sizes = [row[name] for name in ("write_tp", "read_tp") if name in row]
    tp_fits = any(set(sizes) <= set(TP_SIZES[count]) for count in heads)
    same = row.get("server") != "same" or all(
        row[f"write_{name}"] == row[f"read_{name}"]
        for name in ("tp", "page", "layout")
        if f"write_{name}" in row and f"read_{name}" in row
    )
    return tp_fits and same


ROWS = covering_array(FACTORS, allowed)
Oracle = Callable[[int], tuple[Path, list[Reference]]]
totals = Comparison()


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """(checkpoint, references) by number of KV heads, computed once."""
    known: dict[int, tuple[Path, list[Reference]]] = {}

    def ask(kv_heads: int) -> tuple[Path, list[Reference]]:
        if kv_heads not in known:
            heads = 12 if kv_heads == 6 else 8
            shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": 8 * heads}
            path = save_random_checkpoint("llama", tmp_path_factory.mktemp("model"), seed=kv_heads, **shape)
            rng = random.Random(kv_heads)
            first = [rng.randrange(3, VOCAB) for _ in range(530)]
            prompts = [first, [*first[:300], 5, 6, 7], [rng.randrange(3, VOCAB) for _ in range(270)]]
            torch.set_num_threads(1)
            model = load_transformers(path)
            known[kv_heads] = path, [greedy_reference(model, prompt, NUM_TOKENS) for prompt in prompts]
        return known[kv_heads]

    return ask


@pytest.fixture
def pool_url() -> Iterator[str]:
    url = f"shm:///headwater-test-{secrets.token_hex(6)}?capacity=64MiB"
    yield url
    destroy(parse_url(url))


def make_config(path: Path, row: Row, side: str, pool: str, references: list[Reference]) -> EngineConfig:
    page_size = row[f"{side}_page"]
    each = [-(-(len(r.prompt) + NUM_TOKENS) // page_size) for r in references]
    tight = row["memory"] == "tight" and (side == "read" or row["server"] == "same")
    return EngineConfig(
        model=str(path),
        device="cpu",
        tensor_parallel_size=row[f"{side}_tp"],
        max_model_len=max(len(r.prompt) for r in references) + NUM_TOKENS,
        page_size=page_size,
        num_pages=max(each) + 2 if tight else sum(each) + 8,
        cache_layout=row[f"{side}_layout"],
        prefix_cache=row["prefix"],
        num_threads=1,
        pool=pool,
        pool_load=row["load"],
    )


def generate(engine: Engine, references: list[Reference]) -> tuple[list[list[int]], list[int]]:
    """(tokens, cached tokens) of each prompt, all asked at once."""
    tokens: dict[str, list[int]] = {}
    cached: dict[str, int] = {}
    for number, reference in enumerate(references):
        engine.add(str(number), reference.prompt, GREEDY)
    while engine.has_work:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            cached[output.request_id] = output.num_cached_tokens
    engine.check_integrity()
    numbers = [str(number) for number in range(len(references))]
    return [tokens[n] for n in numbers], [cached[n] for n in numbers]


def check(where: str, references: list[Reference], got: list[list[int]]) -> None:
    compared = Comparison()
    for number, (reference, tokens) in enumerate(zip(references, got, strict=True)):
        compared.add(f"{where}, prompt {number}", reference, tokens)
    totals.num_tokens += compared.num_tokens
    totals.num_ties += compared.num_ties
    assert not compared.wrong, "\n".join(compared.wrong)


@pytest.mark.parametrize("row", ROWS, ids=[str(number) for number in range(len(ROWS))])
def test_same_tokens_whoever_computed_the_prefix(row: Row, oracle: Oracle, pool_url: str) -> None:
    if row["write_tp"] + row["read_tp"] > MAX_RANKS and not os.environ.get("HEADWATER_ALL_ROWS"):
        pytest.skip("many ranks: minutes on a small machine; HEADWATER_ALL_ROWS=1 runs them")
    path, references = oracle(row["kv_heads"])
    writer = Engine(make_config(path, row, "write", pool_url, references))
    reader = writer
    try:
        got, _ = generate(writer, references)
        check("writer", references, got)
        assert writer.drain_saves(10.0)
        writer.reset_prefix_cache()
        if row["server"] == "restarted":
            writer.close()
        if row["server"] != "same":
            reader = Engine(make_config(path, row, "read", pool_url, references))
        got, cached = generate(reader, references)
        check("reader", references, got)
        assert cached[0] >= 512, "two whole chunks of the first prompt are in the pool"
        assert cached[2] >= 256
    finally:
        writer.close()
        reader.close()


@pytest.fixture(scope="module", autouse=True)
def report(request: pytest.FixtureRequest) -> Iterator[None]:
    """Print the array and the count of ties, and hold the latter to its bound."""
    yield
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print("\nevery pair of settings, written by one engine and read by another:")
        for number, row in enumerate(ROWS):
            print(f"  {number:2}  " + "  ".join(f"{name}={value}" for name, value in row.items()))
        print(f"  {totals.num_tokens} tokens compared, {totals.num_ties} differed at a tie (margin below 1e-4)")
    assert totals.num_ties * 1000 <= totals.num_tokens


def test_six_turns_reuse_all_that_was_said(oracle: Oracle, pool_url: str) -> None:
    """Without a prefix cache of its own, each turn finds the whole turn before it in the pool, answers included."""
    path, references = oracle(4)
    config = EngineConfig(
        model=str(path),
        device="cpu",
        max_model_len=1024,
        num_pages=80,
        prefix_cache="naive",
        num_threads=1,
        pool=pool_url,
    )
    rng = random.Random(0)
    tokens = references[2].prompt[:100]
    before = 0
    with Engine(config) as engine:
        for turn in range(6):
            engine.add("turn", tokens, GREEDY)
            said: list[int] = []
            cached = 0
            while engine.has_work:
                for output in engine.step():
                    said += output.token_ids
                    cached = output.num_cached_tokens
            assert engine.drain_saves(10.0)
            assert cached >= before - 1, f"turn {turn} found {cached} of the {before} tokens of the turn before"
            before = len(tokens)
            tokens = tokens + said + [rng.randrange(3, VOCAB) for _ in range(30)]
