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
