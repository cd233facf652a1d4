"""Loads that go along with a step in a vLLM that schedules the next step before it hears of them: the same tokens as
without a pool, whatever is damaged, shared, aborted or over before the end of the load is known."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from headwater.bench.vllm_engine import EngineProcess, engine

from vllm_models import random_tokens, settings_of, wait_for_hits, wait_for_metrics

pytestmark = [pytest.mark.slow, pytest.mark.matrix, pytest.mark.timeout(1800)]

HERE = Path(__file__).parent
NUM_NEW = 12
BASE = random_tokens(900, 700)
PROMPTS = {
    "whole": BASE,
    "longer": [*BASE, *random_tokens(901, 90)],
    "forks": [*BASE[:600], *random_tokens(902, 500)],  # what it computes itself takes several steps
    "other": random_tokens(903, 400),
}


@pytest.fixture(scope="module")
def said(qwen3: Path, log_file: Path) -> dict[str, list[int]]:
    """What a vLLM without a pool says, step by step."""
    with engine(log_file, settings_of(qwen3, None)) as plain:
        answers = plain.ask("generate", prompts=list(PROMPTS.values()), max_tokens=NUM_NEW)["tokens"]
    return dict(zip(PROMPTS, answers, strict=True))


@pytest.fixture(scope="module")
def ahead(qwen3: Path, pool_url: str, log_file: Path) -> Iterator[EngineProcess]:
    """With the options that there are when nothing is said."""
    settings = settings_of(
        qwen3,
        pool_url,
        block_size=32,
        max_num_batched_tokens=256,
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(HERE.parent)]))
        running = EngineProcess(log_file, settings, command=("ahead_process",))
    with closing(running):
        yield running


def fill(ahead: EngineProcess, pool_url: str, said: dict[str, list[int]], name: str = "whole") -> None:
    """The pool has a prompt, and vLLM's own cache has nothing."""
    assert ahead.ask("play", script=[["add", name, PROMPTS[name], NUM_NEW]]) == {name: said[name]}
    wait_for_hits(pool_url, [PROMPTS[name]])
    assert ahead.ask("reset")
    ahead.ask("take_modes")


def damage(pool_url: str) -> None:
    """Every chunk that the pool has."""
    for segment in (Path("/dev/shm") / pool_url.removeprefix("shm:///").partition("?")[0]).glob("data*"):
        with segment.open("r+b") as file:
            for offset in range(0, segment.stat().st_size, 96 << 10):
                file.seek(offset)
                file.write(os.urandom(16))


def adding(name: str, count: int = NUM_NEW) -> list[Any]:
    return ["add", name, PROMPTS[name], count]


def check_nothing_left(ahead: EngineProcess) -> None:
    assert ahead.ask("leftovers") == [0, 0, 0]
    assert ahead.ask("reset")


@pytest.mark.parametrize("count", [1, 2, NUM_NEW])
def test_a_hit_of_an_idle_engine_is_loaded_in_its_step(
    count: int, ahead: EngineProcess, pool_url: str, said: dict[str, list[int]]
) -> None:
    fill(ahead, pool_url, said)
    for name in ("whole", "longer", "forks"):
        assert ahead.ask("play", script=[adding(name, count)]) == {name: said[name][:count]}
        assert ahead.ask("take_modes") == ["layerwise"]
        check_nothing_left(ahead)


@pytest.mark.parametrize("count", [1, 2, NUM_NEW])
@pytest.mark.parametrize("name", ["whole", "longer", "forks"])
def test_damage_that_is_found_in_the_step_changes_no_token(
    name: str, count: int, ahead: EngineProcess, pool_url: str, said: dict[str, list[int]]
) -> None:
    fill(ahead, pool_url, said)
    damage(pool_url)
    assert ahead.ask("play", script=[adding(name, count)]) == {name: said[name][:count]}
    assert ahead.ask("take_modes") == ["layerwise"], "nothing was loaded: this test tested nothing"
    check_nothing_left(ahead)
    wait_for_metrics(ahead, lambda found: found["headwater_pool_damaged_chunks"] > 0)
    # What was computed instead is in the pool now, and is right.
    fill(ahead, pool_url, said)
    assert ahead.ask("play", script=[adding(name)]) == {name: said[name]}
    assert ahead.ask("take_modes") == ["layerwise"]


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_requests_that_share_damaged_blocks(
    num_steps: int, ahead: EngineProcess, pool_url: str, said: dict[str, list[int]]
) -> None:
    """In the step that loads them, and in those that are scheduled before and after its report."""
    fill(ahead, pool_url, said)
    damage(pool_url)
    script = [adding("whole"), ["step", num_steps], adding("longer"), adding("forks"), adding("other")]
    assert ahead.ask("play", script=script) == said
    assert "layerwise" in ahead.ask("take_modes")
    check_nothing_left(ahead)
    fill(ahead, pool_url, said)
    assert ahead.ask("play", script=[adding(name) for name in said]) == said


@pytest.mark.parametrize("num_steps", [1, 2])
def test_an_abort_before_the_end_of_the_load_is_known(
    num_steps: int, ahead: EngineProcess, pool_url: str, said: dict[str, list[int]]
) -> None:
    """vLLM has its blocks, which are wrong, in its prefix cache."""
    fill(ahead, pool_url, said)
    damage(pool_url)
    script = [adding("whole"), ["step", num_steps], ["abort", "whole"], adding("longer"), adding("forks")]
    found = ahead.ask("play", script=script)
    assert {name: found[name] for name in ("longer", "forks")} == {name: said[name] for name in ("longer", "forks")}
    check_nothing_left(ahead)
    fill(ahead, pool_url, said)
    assert ahead.ask("play", script=[adding("longer")]) == {"longer": said["longer"]}


def test_nobody_who_decodes_waits_for_a_load(ahead: EngineProcess, pool_url: str, said: dict[str, list[int]]) -> None:
    fill(ahead, pool_url, said)
    script = [adding("other"), ["step", 4], adding("whole")]
    assert ahead.ask("play", script=script) == {name: said[name] for name in ("other", "whole")}
    assert ahead.ask("take_modes")[-1] == "async"
    check_nothing_left(ahead)
