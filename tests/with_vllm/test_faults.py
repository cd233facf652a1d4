"""What goes wrong with a pool costs time and never a wrong token: full, deleted, slow, damaged. A worker that dies is a
clean error."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from headwater.bench.vllm_engine import engine

from vllm_models import random_tokens, settings_of, wait_for_hits, wait_for_metrics

pytestmark = [pytest.mark.slow, pytest.mark.matrix, pytest.mark.timeout(1800)]

NUM_NEW = 10
PROMPTS = [random_tokens(600 + i, 700) for i in range(4)]


@pytest.fixture(scope="module")
def said(qwen3: Path, log_file: Path) -> list[list[int]]:
    with engine(log_file, settings_of(qwen3, None)) as plain:
        return plain.ask("generate", prompts=PROMPTS, max_tokens=NUM_NEW)["tokens"]  # type: ignore[no-any-return]


def files_of(pool_url: str) -> Path:
    return Path("/dev/shm") / pool_url.removeprefix("shm:///").partition("?")[0]


@pytest.mark.parametrize("load_mode", ["auto", "async", "layerwise", "blocking"])
def test_damage_in_every_load_mode(
    load_mode: str, qwen3: Path, pool_url: str, log_file: Path, said: list[list[int]]
) -> None:
    epoch = 1 + len(load_mode)
    more: dict[str, Any] = {"extra": {"load_mode": load_mode, "epoch": epoch}}
    with engine(log_file, settings_of(qwen3, pool_url, **more)) as running:
        for _ in range(3):
            assert running.ask("generate", prompts=PROMPTS, max_tokens=NUM_NEW)["tokens"] == said
            wait_for_hits(pool_url, PROMPTS, epoch=epoch)
            assert running.ask("reset")
            for segment in files_of(pool_url).glob("data*"):
                with segment.open("r+b") as file:
                    for offset in range(0, segment.stat().st_size, 96 << 10):
                        file.seek(offset)
                        file.write(os.urandom(16))
            hurt = running.ask("generate", prompts=PROMPTS, max_tokens=NUM_NEW)
            assert hurt["tokens"] == said
            assert running.ask("reset")
        wait_for_metrics(running, lambda found: found["headwater_pool_damaged_chunks"] > 0)


def test_a_pool_that_is_too_small_is_only_a_small_pool(
    qwen3: Path, tmp_path: Path, log_file: Path, said: list[list[int]]
) -> None:
    pool = f"file://{tmp_path}/pool?capacity=16MiB"
    with engine(log_file, settings_of(qwen3, pool, extra={"staging": "1MiB"})) as running:
        for _ in range(3):
            assert running.ask("generate", prompts=PROMPTS, max_tokens=NUM_NEW)["tokens"] == said
            assert running.ask("reset")


def test_a_pool_whose_files_are_deleted_is_empty(
    qwen3: Path, pool_url: str, log_file: Path, said: list[list[int]]
) -> None:
    with engine(log_file, settings_of(qwen3, pool_url, extra={"epoch": 99})) as running:
        assert running.ask("generate", prompts=PROMPTS, max_tokens=NUM_NEW)["tokens"] == said
        wait_for_hits(pool_url, PROMPTS, epoch=99)
        assert running.ask("reset")
        shutil.rmtree(files_of(pool_url))
        for _ in range(2):
            assert running.ask("generate", prompts=PROMPTS, max_tokens=NUM_NEW)["tokens"] == said
            assert running.ask("reset")


@pytest.mark.parametrize("load_mode", ["async", "layerwise", "blocking"])
def test_a_store_that_is_slower_than_its_deadline_is_a_miss(
    load_mode: str, qwen3: Path, pool_url: str, log_file: Path, said: list[list[int]]
) -> None:
    """No load can be done in a microsecond: every one ends late, and everything is computed."""
    epoch = 11 + len(load_mode)
    more: dict[str, Any] = {"extra": {"load_mode": load_mode, "load_deadline_s": 1e-6, "epoch": epoch}}
    with engine(log_file, settings_of(qwen3, pool_url, **more)) as running:
        for _ in range(2):
            assert running.ask("generate", prompts=PROMPTS, max_tokens=NUM_NEW)["tokens"] == said
            wait_for_hits(pool_url, PROMPTS, epoch=epoch)
            assert running.ask("reset")
        wait_for_metrics(running, lambda found: found["headwater_pool_failed_loads"] > 0)


def test_a_worker_that_is_killed_is_a_clean_error(qwen3: Path, pool_url: str, log_file: Path) -> None:
    with engine(log_file, settings_of(qwen3, pool_url, tp=2)) as running:
        running.ask("generate", prompts=PROMPTS[:1], max_tokens=NUM_NEW)
        os.kill(workers_of(running.pid)[-1], signal.SIGKILL)
        with pytest.raises(RuntimeError, match=r"Dead|dead|died|has ended"):
            running.ask("generate", prompts=PROMPTS, max_tokens=NUM_NEW, timeout_s=120)
    with engine(log_file, settings_of(qwen3, pool_url)) as next_one:
        assert next_one.ask("generate", prompts=PROMPTS[:1], max_tokens=NUM_NEW)["tokens"]


def workers_of(pid: int) -> list[int]:
    """The processes of an engine that hold a cache, in the order of their start."""
    children: dict[int, list[int]] = {}
    names: dict[int, str] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path("/proc", entry, "stat").read_text()
                names[int(entry)] = Path("/proc", entry, "cmdline").read_text()
            except OSError:
                continue
            children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry))
    found, todo = [], [pid]
    while todo:
        here = todo.pop()
        todo += children.get(here, [])
        if "Worker" in names.get(here, ""):
            found.append(here)
    assert found, "no workers"
    return sorted(found)


def test_prompt_logprobs_are_right(qwen3: Path, pool_url: str, log_file: Path, said: list[list[int]]) -> None:
    """They need every position computed, so vLLM must not be given KV for such a request."""
    with engine(log_file, settings_of(qwen3, pool_url, extra={"epoch": 55})) as running:
        assert running.ask("generate", prompts=PROMPTS, max_tokens=NUM_NEW)["tokens"] == said
        wait_for_hits(pool_url, PROMPTS, epoch=55)
        assert running.ask("reset")
        asked = running.ask("generate", prompts=PROMPTS[:1], max_tokens=NUM_NEW, logprobs=1)
        assert asked["tokens"] == said[:1]
        assert asked["external"] == 0
