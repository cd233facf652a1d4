"""KV through the pool changes no token: any topology to any other, another server, a restarted one, under pressure."""

from __future__ import annotations

import json
import os
import random
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from headwater.connector.orders import StepOrders
from headwater.connector.worker import WorkerSide
from headwater.engine.config import EngineConfig
from headwater.engine.engine import Engine
from headwater.engine.params import SamplingParams
from headwater.engine.runner import Runner
from headwater.errors import ModelError
from headwater.models.catalog import find_in_catalog
from headwater.stores import open_store
from headwater.stores.embedded import destroy
from headwater.stores.url import parse_url

from covering import Row, covering_array

pytest.importorskip("transformers")

from engine_models import EXPERT_SHAPES, LATENT_SHAPES, VOCAB, Comparison, Reference, report_rows
from pool_cases import (
    GREEDY,
    NUM_TOKENS,
    Oracle,
    check_tokens,
    generate,
    make_family_oracle,
    make_oracle,
    small_config,
)
from support import WAIT_S, wait_until

pytestmark = pytest.mark.slow

MAX_RANKS = 4
"""Of both engines together, in a run that leaves the larger rows out."""
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
    "load": ["async", "layerwise", "blocking"],
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


ROWS = covering_array(FACTORS, allowed, seed=32)  # of forty seeds the one with the fewest ranks in its small rows
totals = Comparison()


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return make_oracle(tmp_path_factory)


ExpertOracle = Callable[[str], tuple[Path, list[Reference]]]
"""(checkpoint, references) by family."""


@pytest.fixture(scope="module")
def expert_oracle(tmp_path_factory: pytest.TempPathFactory) -> ExpertOracle:
    return make_family_oracle(tmp_path_factory)


@pytest.fixture
def pool_url() -> Iterator[str]:
    url = f"shm:///headwater-test-{secrets.token_hex(6)}?capacity=64MiB&deadline=60"
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
        pool_group_bytes=1,  # these layers are small, and would all travel together
    )


@pytest.mark.parametrize("row", ROWS, ids=[str(number) for number in range(len(ROWS))])
def test_same_tokens_whoever_computed_the_prefix(row: Row, oracle: Oracle, pool_url: str) -> None:
    if row["write_tp"] + row["read_tp"] > MAX_RANKS and not os.environ.get("HEADWATER_ALL_ROWS"):
        pytest.skip("many ranks: minutes on a small machine; HEADWATER_ALL_ROWS=1 runs them")
    path, references = oracle(row["kv_heads"])
    writer = Engine(make_config(path, row, "write", pool_url, references))
    reader = writer
    try:
        got, _ = generate(writer, references)
        check_tokens("writer", references, got, totals)
        assert writer.drain_saves(WAIT_S)
        writer.reset_prefix_cache()
        if row["server"] == "restarted":
            writer.close()
        if row["server"] != "same":
            reader = Engine(make_config(path, row, "read", pool_url, references))
        got, cached = generate(reader, references)
        check_tokens("reader", references, got, totals)
        assert cached[0] >= 512, "two whole chunks of the first prompt are in the pool"
        assert cached[2] >= 256
    finally:
        writer.close()
        reader.close()


@pytest.mark.parametrize(
    ("family", "write_tp", "read_tp"),
    [
        *((family, 1, 2) for family in EXPERT_SHAPES),
        *(("mixtral", 2, 1), ("glm4_moe", 2, 1), ("deepseek_v2", 2, 1), ("deepseek_v3", 2, 4), ("glm4_moe_lite", 4, 1)),
    ],
)
def test_experts_on_other_numbers_of_ranks_share(
    family: str, write_tp: int, read_tp: int, expert_oracle: ExpertOracle, pool_url: str
) -> None:
    """Both say what `transformers` says, and the second one computes no chunk again."""
    path, references = expert_oracle(family)
    with Engine(small_config(path, pool=pool_url, tensor_parallel_size=write_tp)) as writer:
        got, cached = generate(writer, references)
        check_tokens("writer", references, got, totals)
        assert writer.drain_saves(WAIT_S)
    with Engine(small_config(path, pool=pool_url, tensor_parallel_size=read_tp, page_size=32)) as reader:
        got, cached = generate(reader, references)
        check_tokens("reader", references, got, totals)
        assert cached[0] >= 512, "two whole chunks of the first prompt are in the pool"
        assert cached[2] >= 256


@pytest.mark.parametrize("load", ["async", "layerwise", "blocking"])
def test_latents_are_loaded_in_every_way_into_every_layout(
    load: str, expert_oracle: ExpertOracle, pool_url: str
) -> None:
    path, references = expert_oracle("deepseek_v3, yarn")
    with Engine(small_config(path, pool=pool_url, cache_layout="page-first", page_size=48)) as writer:
        got, _ = generate(writer, references)
        check_tokens("writer", references, got, totals)
        assert writer.drain_saves(WAIT_S)
        writer.reset_prefix_cache()
        got, cached = generate(writer, references)
        check_tokens("writer, second time", references, got, totals)
        assert cached[0] >= 512
    with Engine(small_config(path, pool=pool_url, pool_load=load, tensor_parallel_size=2, page_size=32)) as reader:
        got, cached = generate(reader, references)
        check_tokens("reader", references, got, totals)
        assert cached[0] >= 512


@pytest.mark.parametrize(("family", "tp"), [("deepseek_v2", 2), ("deepseek_v3", 4), ("glm4_moe_lite", 2)])
def test_every_rank_holds_the_latents_and_one_writes_them(
    family: str, tp: int, expert_oracle: ExpertOracle, pool_url: str
) -> None:
    """A token takes layers × (latent + rope) in the pool however many ranks hold it, and rank 0 moves its share."""
    path, references = expert_oracle(family)
    shape, num_layers = LATENT_SHAPES[family], 3
    row_bytes = (shape["kv_lora_rank"] + shape["qk_rope_head_dim"]) * 4
    with Engine(small_config(path, pool=pool_url, tensor_parallel_size=tp)) as writer:
        generate(writer, references)
        assert writer.drain_saves(WAIT_S)
        saved_bytes = writer.stats().pool.saved_bytes
    with closing(open_store(pool_url)) as store:
        chunks = list(store.scan())
    assert chunks
    assert [chunk.num_bytes for chunk in chunks] == [chunk.num_tokens * num_layers * row_bytes for chunk in chunks]
    written = [len([layer for layer in range(num_layers) if (chunk.number + layer) % tp == 0]) for chunk in chunks]
    assert saved_bytes == sum(n * chunk.num_tokens * row_bytes for n, chunk in zip(written, chunks, strict=True))


def test_another_routing_rule_is_another_model(expert_oracle: ExpertOracle, tmp_path: Path, pool_url: str) -> None:
    """The same bytes of weights, one expert fewer for each token: nothing of the pool fits."""
    path, references = expert_oracle("mixtral")
    with Engine(small_config(path, pool=pool_url)) as writer:
        generate(writer, references[:1])
        assert writer.drain_saves(WAIT_S)
    other = tmp_path / "other"
    shutil.copytree(path, other)
    values = json.loads((other / "config.json").read_text())
    values["num_experts_per_tok"] -= 1
    (other / "config.json").write_text(json.dumps(values))
    with Engine(small_config(other, pool=pool_url)) as reader:
        got, cached = generate(reader, references[:1])
        assert cached == [0]
        assert got[0] != references[0].token_ids, "both say the same: this test tested nothing"


@pytest.fixture(scope="module", autouse=True)
def report(request: pytest.FixtureRequest) -> Iterator[None]:
    title = "every pair of settings, written by one engine and read by another"
    yield from report_rows(request, title, ROWS, totals)


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
            assert engine.drain_saves(WAIT_S)
            assert cached >= before - 1, f"turn {turn} found {cached} of the {before} tokens of the turn before"
            before = len(tokens)
            tokens = tokens + said + [rng.randrange(3, VOCAB) for _ in range(30)]


def test_requests_that_end_together_are_saved_together(
    oracle: Oracle, pool_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And before anything is computed that might be given their pages."""
    path, references = oracle(4)
    config = EngineConfig(model=str(path), device="cpu", max_model_len=600, num_pages=120, num_threads=1, pool=pool_url)
    calls: list[list[str]] = []
    start_step, forward = WorkerSide.start_step, Runner.forward

    def started(side: WorkerSide, orders: StepOrders) -> None:
        if orders.before:
            calls.append([order.job.request_id for order in orders.before])
        start_step(side, orders)

    def computed(runner: Runner, *args: Any) -> Any:
        calls.append([])
        return forward(runner, *args)

    monkeypatch.setattr(WorkerSide, "start_step", started)
    monkeypatch.setattr(Runner, "forward", computed)
    with Engine(config) as engine:
        got, _ = generate(engine, references)
        check_tokens("together", references, got, totals)
        assert sorted(calls[-1]) == ["0", "1", "2"], "each with the end of its answer"
        engine.add("stays", references[2].prompt[:200], GREEDY)
        engine.add("goes", references[0].prompt[:200], GREEDY)
        while engine.stats().num_generated_tokens < 3 * NUM_TOKENS + 10:
            engine.step()
        engine.abort("goes")
        engine.step()
        assert calls[-2:] == [["4"], []], "what goes is saved, and then the next token of what stays is computed"
        while engine.has_work:
            engine.step()


def test_a_real_model_on_one_rank_and_on_three(pool_url: str) -> None:
    """SmolLM2 has three KV heads: what one rank computed three load, and the other way round."""
    try:
        find_in_catalog("smollm2")
    except ModelError as error:
        pytest.skip(str(error))
    rng = random.Random(8)
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    settings: dict[str, Any] = {
        "model": "smollm2",
        "device": "cpu",
        "max_model_len": 320,
        "num_pages": 44,
        "prefix_cache": "naive",
        "num_threads": 1,
        "pool": pool_url.replace("64MiB", "128MiB"),
    }
    one, three = (Engine(EngineConfig(tensor_parallel_size=size, **settings)) for size in (1, 3))
    with one, three:
        for writer, reader in ((one, three), (three, one)):
            # Its first answer is computed without the pool, which has nothing of this prompt.
            prompt = Reference([rng.randrange(3, 49152) for _ in range(300)], [], [])
            computed, cached = generate(writer, [prompt], params=params)
            assert cached == [0]
            assert writer.drain_saves(WAIT_S)
            loaded, cached = generate(reader, [prompt], params=params)
            assert cached == [299], "a chunk and the tail; the last token is computed"
            assert loaded == computed


def test_prompts_of_one_step_that_begin_alike_are_found_again(oracle: Oracle, pool_url: str) -> None:
    """With one size of groups of layers, two prompts of different length are cut in different places."""
    path, references = oracle(4)
    both = [Reference(references[0].prompt[:256], [], []), references[0]]
    config = small_config(path, pool=pool_url, pool_group_bytes=3 * 4 * 256 * 8 * 4)  # a chunk and a half of one layer
    with Engine(config) as engine:
        generate(engine, both)
        assert engine.drain_saves(WAIT_S)
        assert engine.stats().pool.num_dropped == 0
    with Engine(config) as engine:
        got, cached = generate(engine, both)
        check_tokens("found again", both[1:], got[1:], totals)
        assert cached[0] == 255
        assert cached[1] >= 512


def test_saves_are_drained_while_two_ranks_load(oracle: Oracle, pool_url: str) -> None:
    path, references = oracle(4)
    with Engine(small_config(path, pool=pool_url, tensor_parallel_size=2)) as engine:
        generate(engine, references[:1])
        assert engine.drain_saves(WAIT_S)
        engine.reset_prefix_cache()
        # The load ends on the other rank while the last one is computed, and says so before it says that it is drained.
        drains = [lambda: wait_until(lambda: engine.drain_saves(10.0))] * 3
        got, cached = generate(engine, [references[0], references[2]], between=drains)
        check_tokens("drained", [references[0], references[2]], got, totals)
        assert cached == [512, 0]


def test_the_same_weights_under_another_config_share_nothing(oracle: Oracle, pool_url: str, tmp_path: Path) -> None:
    path, references = oracle(4)
    other = tmp_path / "other"
    shutil.copytree(path, other)
    config = json.loads((path / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    with Engine(small_config(path, pool=pool_url)) as engine:
        generate(engine, references)
        assert engine.drain_saves(WAIT_S)
    with Engine(small_config(other)) as engine:
        alone, _ = generate(engine, references)
    assert alone != [reference.token_ids for reference in references], "this epsilon changes nothing"
    with Engine(small_config(other, pool=pool_url)) as engine:
        got, cached = generate(engine, references)
    assert cached[0] == cached[2] == 0
    assert got == alone
