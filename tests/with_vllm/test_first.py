"""The first things to know of the connector in real vLLM, in six starts of an engine: same tokens as without it, on a
hit, in another process, with another tensor-parallel size and block size, from a damaged pool, in every load mode; and
no sharing where there must be none.

Engines are started in the order of the tests; each is ended before the next one begins.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.bench.vllm_engine import EngineProcess, engine
from headwater.connector.metrics import POOL_METRICS
from headwater.connector.published import published
from headwater.stores.embedded import store_directory
from headwater.stores.url import parse_url

from listening import doors
from metric_cases import samples
from pool_waits import wait_saved
from support import wait_until
from vllm_models import hit_tokens, random_tokens, settings_of, wait_for_hits, wait_for_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PROMPTS = [random_tokens(1, 700, 40000), random_tokens(2, 300, 40000), random_tokens(3, 1030, 40000)]
"""Two whose ends are worth a tail of their own, and one whose is not."""
LATER = random_tokens(4, 600, 40000)
NUM_NEW = 12


def listeners(running: EngineProcess) -> Counter[tuple[str, str]]:
    """How many sockets of an engine listen on each address; of unix sockets, how many do."""
    found = doors(running.pid)
    return Counter((door.protocol, "" if door.protocol == "unix" else door.address) for door in found)


@pytest.fixture(scope="module")
def own_listeners() -> Counter[tuple[str, str]]:
    """Those of vLLM itself, once `expected` has run."""
    return Counter()


@pytest.fixture(scope="module")
def expected(smollm2: Path, log_file: Path, own_listeners: Counter[tuple[str, str]]) -> dict[str, list[list[int]]]:
    """What vLLM says without a connector. (The first start.)"""
    with engine(log_file, settings_of(smollm2, None)) as plain:
        own_listeners.update(listeners(plain))
        found = plain.ask("generate", prompts=[*PROMPTS, LATER], max_tokens=NUM_NEW)["tokens"]
        turn = [*PROMPTS[0], *found[0], *random_tokens(5, 40, 40000)]
        return {"tokens": found, "turn": [turn, *plain.ask("generate", prompts=[turn], max_tokens=NUM_NEW)["tokens"]]}


@pytest.fixture(scope="module")
def server(smollm2: Path, pool_url: str, log_file: Path, expected: object) -> Iterator[EngineProcess]:
    """One rank, blocks of 128, prompts in chunks of 512 tokens, asynchronous loads. (The second start.)"""
    with engine(log_file, settings_of(smollm2, pool_url, max_num_batched_tokens=512)) as running:
        yield running


def test_a_second_request_hits_and_says_the_same(
    server: EngineProcess, pool_url: str, expected: dict[str, list[list[int]]]
) -> None:
    cold = server.ask("generate", prompts=PROMPTS, max_tokens=NUM_NEW)
    assert cold["tokens"] == expected["tokens"][:3]
    assert cold["external"] == 0
    wait_for_hits(pool_url, PROMPTS)
    assert server.ask("reset")
    hit = server.ask("generate", prompts=PROMPTS, max_tokens=NUM_NEW)
    assert hit["tokens"] == cold["tokens"]
    assert hit["local"] == 0
    assert hit["external"] == sum(map(hit_tokens, PROMPTS))
    counted = ("headwater_pool_saved_bytes", "headwater_store_used_bytes")
    metrics = wait_for_metrics(server, lambda found: all(found.get(name, 0) > 0 for name in counted), 40000)
    # A prompt's last token comes along, though it is computed.
    num_loaded = hit["external"] + sum(hit_tokens(prompt) == len(prompt) - 1 for prompt in PROMPTS)
    assert metrics["headwater_pool_loaded_bytes"] == num_loaded * 30 * 3 * 2 * 64 * 4
    assert not metrics.get("headwater_pool_dropped_chunks")
    assert metrics["headwater_pool_asked_tokens"] >= 2 * sum(len(prompt) - 1 for prompt in PROMPTS)
    assert metrics["headwater_pool_loaded_tokens"] == metrics["headwater_pool_matched_tokens"] == hit["external"]
    assert metrics["headwater_pool_load_duration_seconds_count"] == len(PROMPTS)
    assert metrics["headwater_store_used_bytes"] <= metrics["headwater_store_data_bytes"] < 1 << 30


def test_the_connector_listens_nowhere(server: EngineProcess, own_listeners: Counter[tuple[str, str]]) -> None:
    assert own_listeners, "none of vLLM's own sockets were seen: this test tested nothing"
    assert listeners(server) == own_listeners


def test_an_exporter_beside_it_shows_what_it_counts(server: EngineProcess, pool_url: str) -> None:
    """vLLM is idle meanwhile, and its own page stands still."""
    pytest.importorskip("httpx")
    from exporter_process import ExporterProcess

    exporter = ExporterProcess(pool_url.partition("?")[0])
    try:
        num_hit = sum(map(hit_tokens, PROMPTS))
        wait_until(lambda: exporter.page()["headwater_pool_loaded_tokens_total"] == num_hit, what="loaded tokens")
        wait_until(lambda: exporter.page()["headwater_pool_load_duration_seconds_count"] == len(PROMPTS), what="loads")
        wait_until(lambda: exporter.page()["headwater_pool_save_duration_seconds_count"] > 0, what="saves")
        page = exporter.page()
        assert page["headwater_pool_asked_tokens_total"] >= 2 * num_hit
        assert page["headwater_pool_saved_bytes_total"] > 0 < page["headwater_pool_step_seconds_total"]
        assert page["headwater_store_members"] == page['headwater_store_engine_processes{engine="vllm"}'] >= 1
        records = published(store_directory(parse_url(pool_url)))
        roles = ", ".join(record.role for record in records)
        assert "scheduler" in roles
        assert "rank 0" in roles
        assert {record.model for record in records} == {"smollm2"}
    finally:
        exporter.close()


def test_two_equal_prompts_of_one_step_are_saved_right(server: EngineProcess, pool_url: str) -> None:
    """The second one shares blocks that the first computes in the same step."""
    prompt = random_tokens(6, 420, 40000)
    cold = server.ask("generate", prompts=[prompt, prompt], max_tokens=NUM_NEW)
    assert cold["local"] > 0, "nothing was shared: this test tested nothing"
    assert cold["tokens"][0] == cold["tokens"][1]
    wait_for_hits(pool_url, [prompt])
    assert server.ask("reset")
    hit = server.ask("generate", prompts=[prompt], max_tokens=NUM_NEW)
    assert hit["external"] == hit_tokens(prompt)
    assert hit["tokens"] == cold["tokens"][:1]


def test_the_next_turn_finds_what_was_generated(
    server: EngineProcess, pool_url: str, expected: dict[str, list[list[int]]]
) -> None:
    """The tail that the request ended with is in the pool, and it ends inside a chunk."""
    num_computed = len(PROMPTS[0]) + NUM_NEW - 1
    wait_saved(pool_url, [(expected["turn"][0], num_computed)])
    assert server.ask("reset")
    turn = server.ask("generate", prompts=[expected["turn"][0]], max_tokens=NUM_NEW)
    assert turn["tokens"] == expected["turn"][1:]
    assert turn["external"] == num_computed, "the last token generated was never computed"


def test_salts_do_not_share(server: EngineProcess, pool_url: str, expected: dict[str, list[list[int]]]) -> None:
    for salt in ("tenant a", "tenant b"):
        assert server.ask("reset")
        first = server.ask("generate", prompts=[PROMPTS[0]], max_tokens=NUM_NEW, salt=salt)
        assert first["external"] == 0, "another tenant's KV was found"
        wait_for_hits(pool_url, [PROMPTS[0]], tenant=salt.encode())
        assert server.ask("reset")
        again = server.ask("generate", prompts=[PROMPTS[0]], max_tokens=NUM_NEW, salt=salt)
        assert again["external"] == hit_tokens(PROMPTS[0])
        assert first["tokens"] == again["tokens"] == [expected["tokens"][0]]


def test_after_a_reset_of_the_connector_nothing_old_is_found(
    server: EngineProcess, pool_url: str, expected: dict[str, list[list[int]]]
) -> None:
    """And nobody else's chunks are gone: the next test, in another process, finds them."""
    assert server.ask("reset", connector=True)
    fresh = server.ask("generate", prompts=[PROMPTS[0]], max_tokens=NUM_NEW)
    assert fresh["external"] == 0
    wait_for_hits(pool_url, [PROMPTS[0]], whose=lambda identity: identity.epoch > 0)
    assert server.ask("reset")
    again = server.ask("generate", prompts=[PROMPTS[0]], max_tokens=NUM_NEW)
    assert again["external"] == hit_tokens(PROMPTS[0])
    assert fresh["tokens"] == again["tokens"] == [expected["tokens"][0]]


def test_three_ranks_read_and_write_what_one_rank_does(
    smollm2: Path,
    pool_url: str,
    log_file: Path,
    expected: dict[str, list[list[int]]],
    server: EngineProcess,
    tmp_path: Path,
) -> None:
    """Blocks of 32, layer by layer, and a second tier. (The third start.)"""
    server.close()
    below = f"file://{tmp_path}/below?capacity=512MiB"
    settings = settings_of(smollm2, f"{pool_url},{below}", tp=3, block_size=32, extra={"load_mode": "layerwise"})
    with engine(log_file, settings) as ranks:
        hit = ranks.ask("generate", prompts=PROMPTS, max_tokens=NUM_NEW)
        assert hit["external"] == sum(map(hit_tokens, PROMPTS))
        later = ranks.ask("generate", prompts=[LATER], max_tokens=NUM_NEW)
        assert later["external"] == 0
        assert [*hit["tokens"], *later["tokens"]] == expected["tokens"]
        wait_for_hits(pool_url, [LATER])
        check_page_of_ranks(ranks)


def check_page_of_ranks(ranks: EngineProcess) -> None:
    """vLLM's page has every metric; what only ranks know has come from the ranks, and the store's figures from one
    process alone. Steps carry the figures out, and the copier is a process of its choice."""
    found: dict[str, dict[str, float]] = {}
    models = set[str]()

    def is_copied() -> bool:
        ranks.ask("generate", prompts=[random_tokens(6, 16, 40000)], max_tokens=2)
        shown = samples(ranks.ask("page"), only={"engine": "0"}, start="headwater_")
        for name, value in shown.items():
            plain, _, labels = name.partition("{")
            models.add(labels.partition('model_name="')[2].partition('"')[0])
            found.setdefault(plain, {})[labels.partition('tier="')[2].partition(":")[0]] = value
        tiers, chunks = found.get("headwater_tier_stored_total", {}), found.get("headwater_store_chunks", {}).get("")
        stored = found.get("headwater_store_stored_total", {}).get("")
        return tiers.keys() == {"shm", "file"} and {*tiers.values(), stored} == {chunks}

    wait_until(is_copied, what="all chunks are in both tiers, and counted")
    (model,) = models
    assert model
    missing = {metric.name for metric in POOL_METRICS if metric.kind != "histogram"} - found.keys()
    assert not missing
    assert found["headwater_store_members"][""] >= 4, "three ranks and the scheduler"
    assert found["headwater_tier_hits_total"]["shm"] > 0 == found["headwater_tier_hits_total"]["file"]
    assert found["headwater_tier_breaker_open"] == {"shm": 0, "file": 0}
    assert found["headwater_pool_load_duration_seconds_count"][""] == 3 * len(PROMPTS)


def test_a_restarted_server_with_other_blocks_hits_and_survives_a_damaged_pool(
    smollm2: Path, pool_url: str, log_file: Path, expected: dict[str, list[list[int]]]
) -> None:
    """Blocks of 64, blocking loads. (The fourth start.)"""
    with engine(log_file, settings_of(smollm2, pool_url, block_size=64, extra={"load_mode": "blocking"})) as restarted:
        hit = restarted.ask("generate", prompts=[*PROMPTS, LATER], max_tokens=NUM_NEW)
        assert hit["tokens"] == expected["tokens"]
        assert hit["external"] == sum(map(hit_tokens, [*PROMPTS, LATER])), "what three ranks wrote was not found"
        assert restarted.ask("reset")
        damage(pool_url)
        hurt = restarted.ask("generate", prompts=[*PROMPTS, LATER], max_tokens=NUM_NEW)
        assert hurt["tokens"] == expected["tokens"]
        metrics = restarted.ask("metrics")
        assert metrics["headwater_pool_damaged_chunks"] > 0, "nothing of the damage was read"
        assert restarted.ask("reset")
        healed = restarted.ask("generate", prompts=[*PROMPTS, LATER], max_tokens=NUM_NEW)
        assert healed["tokens"] == expected["tokens"]


def damage(pool_url: str) -> None:
    """Overwrite bytes all over the pool's data."""
    directory = Path("/dev/shm") / pool_url.removeprefix("shm:///").partition("?")[0]
    segments = [file for file in directory.iterdir() if file.name.startswith("data")]
    assert segments, f"no data files in {os.listdir(directory)}"
    for segment in segments:
        with segment.open("r+b") as file:
            for offset in range(0, segment.stat().st_size, 1 << 20):
                file.seek(offset + 4096)
                file.write(b"\xa5" * 64)


QWEN_PROMPTS = [random_tokens(10 + i, 300) for i in range(4)]


@pytest.fixture(scope="module")
def said(qwen3: Path, pool_url: str, log_file: Path) -> list[list[int]]:
    """Four requests in a cache that holds two of them. (The fifth start.)"""
    settings = settings_of(qwen3, pool_url, block_size=32, num_gpu_blocks_override=34, max_model_len=512)
    with engine(log_file, settings) as small:
        alone = [small.ask("generate", prompts=[prompt], max_tokens=150)["tokens"][0] for prompt in QWEN_PROMPTS]
        wait_for_hits(pool_url, QWEN_PROMPTS)
        assert small.ask("reset")
        together = small.ask("generate", prompts=QWEN_PROMPTS, max_tokens=150)
        assert together["tokens"] == alone
        assert small.ask("metrics")["vllm:num_preemptions"] > 0, "nobody was preempted: this test tested nothing"
        assert together["external"] > 0
        return alone


def test_preempted_requests_say_the_same(said: list[list[int]]) -> None:
    assert len(said) == len(QWEN_PROMPTS)


def test_two_checkpoints_of_one_name_do_not_share(
    qwen3: Path, qwen3_twin: Path, pool_url: str, log_file: Path, said: list[list[int]]
) -> None:
    """(The sixth start.)"""
    assert qwen3.name == qwen3_twin.name
    with engine(log_file, settings_of(qwen3_twin, pool_url, block_size=32, max_model_len=512)) as twin:
        other = twin.ask("generate", prompts=QWEN_PROMPTS, max_tokens=NUM_NEW)
        assert other["external"] == 0
        assert other["tokens"] != [tokens[:NUM_NEW] for tokens in said]
