"""End to end in real vLLM: two servers on one pool whose configs differ in a key that only vLLM reads. The second one
once loaded the first one's KV and answered with wrong tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_identity import changed

from headwater.bench.vllm_engine import engine

from vllm_models import hit_tokens, random_tokens, save_qwen3, settings_of, wait_for_hits

pytestmark = [pytest.mark.slow, pytest.mark.matrix, pytest.mark.timeout(1800)]

DYNAMIC = {"rope_theta": 10000.0, "rope_type": "dynamic", "factor": 4.0}
PROMPT = random_tokens(1, 600)
NUM_NEW = 12


def test_trained_positions_of_another_server_give_no_wrong_tokens(
    tmp_path: Path, pool_url: str, log_file: Path
) -> None:
    base = save_qwen3(tmp_path / "base", seed=0, rope_parameters=DYNAMIC)
    other = changed(base, tmp_path / "other", rope_parameters=DYNAMIC | {"max_trained_positions": 64})
    with engine(log_file, settings_of(base, pool_url)) as server:
        cold = server.ask("generate", prompts=[PROMPT], max_tokens=NUM_NEW)
        wait_for_hits(pool_url, [PROMPT])
        assert server.ask("reset")
        hit = server.ask("generate", prompts=[PROMPT], max_tokens=NUM_NEW)
        assert hit["external"] == hit_tokens(PROMPT)
        assert hit["tokens"] == cold["tokens"]
    with engine(log_file, settings_of(other, pool_url)) as server:
        cold_other = server.ask("generate", prompts=[PROMPT], max_tokens=NUM_NEW)
        assert cold_other["external"] == 0, "the KV of another model was found"
        assert cold_other["tokens"] != cold["tokens"], "both answer the same: this test tested nothing"


def test_all_processes_of_two_servers_find_one_name_for_a_model_that_the_reference_engine_does_not_run(
    moe: Path, pool_url: str, log_file: Path
) -> None:
    """Its scheduler and each worker have a copy of the config, and workers may change theirs."""
    with engine(log_file, settings_of(moe, pool_url)) as server:
        cold = server.ask("generate", prompts=[PROMPT], max_tokens=NUM_NEW)
        assert cold["external"] == 0
        wait_for_hits(pool_url, [PROMPT], whose=lambda identity: "config" in identity.settings)
    with engine(log_file, settings_of(moe, pool_url, tp=2)) as server:
        hit = server.ask("generate", prompts=[PROMPT], max_tokens=NUM_NEW)
        assert hit["external"] == hit_tokens(PROMPT)
        assert hit["tokens"] == cold["tokens"]
        other = random_tokens(2, 600)
        cold = server.ask("generate", prompts=[other], max_tokens=NUM_NEW)
        wait_for_hits(pool_url, [other], whose=lambda identity: "config" in identity.settings)
        assert server.ask("reset")
        hit = server.ask("generate", prompts=[other], max_tokens=NUM_NEW)
        assert (hit["external"], hit["tokens"]) == (hit_tokens(other), cold["tokens"])
