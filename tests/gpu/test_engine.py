"""The engine on a GPU says what `transformers` says in float32, and the same with graphs, overlap and any kernel."""

from __future__ import annotations

import random
import secrets
from pathlib import Path
from typing import Any

import pytest
import torch

from headwater.engine.config import EngineConfig
from headwater.engine.engine import Engine
from headwater.engine.graphs import graph_sizes
from headwater.engine.params import SamplingParams
from headwater.stores.embedded import destroy
from headwater.stores.url import parse_url

from engine_models import VOCAB, Comparison, Reference, greedy_reference, load_transformers, save_random_checkpoint

pytestmark = pytest.mark.gpu

NUM_TOKENS = 32
LENGTHS = (1, 5, 31, 64, 200, 333)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Reference]]:
    path = save_random_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    rng = random.Random(1)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in LENGTHS]
    model = load_transformers(path)
    return path, [greedy_reference(model, prompt, NUM_TOKENS) for prompt in prompts]


def generate(
    path: Path, prompts: list[list[int]], params: SamplingParams, **settings: Any
) -> tuple[list[list[int]], Engine]:
    config = EngineConfig(model=str(path), device="cuda", max_model_len=512, **{"num_pages": 400, **settings})
    tokens: dict[str, list[int]] = {}
    with Engine(config) as engine:
        for number, prompt in enumerate(prompts):
            engine.add(str(number), prompt, params)
        while engine.has_work:
            for output in engine.step():
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
        engine.check_integrity()
    return [tokens[str(number)] for number in range(len(prompts))], engine


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"cuda_graphs": False},
        {"overlap": False},
        {"max_batched_tokens": 48, "max_num_seqs": 3},
        {"cache_layout": "page-first", "page_size": 1, "num_pages": 2000},
        {"page_size": 48, "attention_backend": "reference", "cuda_graphs": False},
        {"num_pages": 40, "max_num_seqs": 6},
    ],
    ids=str,
)
def test_float32_equals_transformers(oracle: tuple[Path, list[Reference]], settings: dict[str, Any]) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    path, references = oracle
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    got, _ = generate(path, [r.prompt for r in references], params, dtype="float32", **settings)
    compared = Comparison()
    for number, (reference, tokens) in enumerate(zip(references, got, strict=True)):
        compared.add(f"prompt {number}", reference, tokens)
    assert not compared.wrong, "\n".join(compared.wrong)


def test_sampling_draws_the_same_with_and_without_graphs(oracle: tuple[Path, list[Reference]]) -> None:
    path, references = oracle
    params = SamplingParams(temperature=0.7, top_p=0.9, seed=11, max_tokens=NUM_TOKENS, ignore_eos=True)
    prompts = [r.prompt for r in references]
    one, _ = generate(path, prompts, params, dtype="float32")
    other, _ = generate(path, prompts, params, dtype="float32", cuda_graphs=False, overlap=False)
    assert one == other


def test_bfloat16_runs(oracle: tuple[Path, list[Reference]]) -> None:
    path, references = oracle
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, repetition_penalty=1.2, logprobs=3)
    got, engine = generate(path, [r.prompt for r in references], params)
    assert engine.placement.dtype == "bfloat16"
    assert {len(tokens) for tokens in got} == {8}


def test_graph_sizes_cover_the_largest_batch() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(6) == [1, 2, 4, 8]
    assert graph_sizes(64)[-1] == 64
    assert graph_sizes(1000)[-1] == 256


@pytest.mark.parametrize("load", ["async", "blocking"])
def test_kv_comes_back_from_the_pool(tmp_path: Path, load: str) -> None:
    """A second engine, with another page size and layout, finds the prefix in the pool and says the same."""
    path = save_random_checkpoint("llama", tmp_path)
    rng = random.Random(9)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in (300, 530, 700)]
    model = load_transformers(path)
    references = [greedy_reference(model, prompt, NUM_TOKENS) for prompt in prompts]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    url = f"shm:///headwater-test-{secrets.token_hex(6)}?capacity=128MiB"
    common: dict[str, Any] = {"model": str(path), "device": "cuda", "dtype": "float32", "max_model_len": 1024}
    try:
        for number, settings in enumerate(({}, {"page_size": 48, "cache_layout": "page-first"})):
            config = EngineConfig(**common, num_pages=400, pool=url, pool_load=load, **settings)
            tokens: dict[str, list[int]] = {}
            cached: dict[str, int] = {}
            with Engine(config) as engine:
                for name, prompt in enumerate(prompts):
                    engine.add(str(name), prompt, params)
                while engine.has_work:
                    for output in engine.step():
                        tokens.setdefault(output.request_id, []).extend(output.token_ids)
                        cached[output.request_id] = output.num_cached_tokens
                engine.check_integrity()
                assert engine.drain_saves(10.0)
            compared = Comparison()
            for name, reference in enumerate(references):
                compared.add(f"engine {number}, prompt {name}", reference, tokens[str(name)])
            assert not compared.wrong, "\n".join(compared.wrong)
            if number:
                assert [cached[str(name)] for name in range(3)] >= [256, 512, 512]
    finally:
        destroy(parse_url(url))
