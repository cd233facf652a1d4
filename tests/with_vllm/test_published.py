"""Real vLLM publishes its figures beside the pool, and an exporter in another process shows them: also after the last
step of a burst, and after the engine has been killed."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("httpx")

from headwater.bench.vllm_engine import engine
from headwater.connector.published import published
from headwater.stores.embedded import store_directory
from headwater.stores.url import parse_url

from exporter_process import ExporterProcess
from support import wait_until
from vllm_models import hit_tokens, random_tokens, settings_of, wait_for_hits

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PROMPTS = [random_tokens(1, 520), random_tokens(2, 300)]
ENGINES = 'headwater_store_engine_processes{engine="vllm"}'


def test_an_exporter_shows_what_vllm_counts(qwen3: Path, pool_url: str, log_file: Path) -> None:
    directory = store_directory(parse_url(pool_url))
    exporter = ExporterProcess(pool_url.partition("?")[0])
    try:
        with engine(log_file, settings_of(qwen3, pool_url)) as running:
            running.ask("generate", prompts=PROMPTS, max_tokens=2)
            wait_for_hits(pool_url, PROMPTS)
            assert running.ask("reset")
            hit = running.ask("generate", prompts=PROMPTS, max_tokens=2)
            assert hit["external"] == sum(map(hit_tokens, PROMPTS))
            # vLLM is idle from here on, and its own page stands still.
            wait_until(lambda: exporter.page()["headwater_pool_loaded_tokens_total"] == hit["external"], what="loads")
            wait_until(lambda: exporter.page()["headwater_pool_load_duration_seconds_count"] == 2, what="load times")
            wait_until(lambda: exporter.page()["headwater_pool_save_duration_seconds_count"] > 0, what="save times")
            page = exporter.page()
            assert page["headwater_pool_asked_tokens_total"] >= 2 * sum(map(hit_tokens, PROMPTS))
            assert page["headwater_pool_saved_bytes_total"] > 0
            assert page["headwater_pool_step_seconds_total"] > 0
            assert page["headwater_store_members"] == page[ENGINES] >= 1
            roles = ", ".join(record.role for record in published(directory))
            assert "scheduler" in roles
            assert "rank 0" in roles
            assert {record.model for record in published(directory)} == {qwen3.name}
            assert "could not be published" not in log_file.read_text()
        wait_until(lambda: ENGINES not in exporter.page(), what="the engine's end")
        assert exporter.page()["headwater_pool_loaded_tokens_total"] == hit["external"]
    finally:
        exporter.close()
