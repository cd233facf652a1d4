"""A deployment replaces the weights while a real vLLM starts: its KV is not found under the name of the new ones."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from headwater.bench.vllm_engine import SRC, engine

from vllm_models import hit_tokens, random_tokens, settings_of, wait_for_hits

pytestmark = [pytest.mark.slow, pytest.mark.matrix, pytest.mark.timeout(1800)]

NUM_NEW = 8
PROMPT = random_tokens(800, 600)


def test_weights_renamed_over_after_loading(
    qwen3: Path, qwen3_twin: Path, pool_url: str, log_file: Path, tmp_path: Path
) -> None:
    current = shutil.copytree(qwen3, tmp_path / "current")
    new = shutil.copy(qwen3_twin / "model.safetensors", tmp_path / "incoming")
    deploy = {
        "PYTHONPATH": f"{SRC}:{Path(__file__).parent}",
        "TEST_NEW_WEIGHTS": str(new),
        "TEST_CURRENT_WEIGHTS": str(current / "model.safetensors"),
    }
    extension = {"worker_extension_cls": "deploy_after_load.Extension", "environment": deploy}
    with engine(log_file, settings_of(current, pool_url, **extension)) as old:
        said = old.ask("generate", prompts=[PROMPT], max_tokens=NUM_NEW)["tokens"]
    assert not Path(new).exists(), "nothing was deployed: this test tested nothing"
    assert "Headwater is off" in log_file.read_text()
    assert "was replaced or changed while the server started" in log_file.read_text()
    with engine(log_file, settings_of(current, pool_url)) as running:
        cold = running.ask("generate", prompts=[PROMPT], max_tokens=NUM_NEW)
        assert cold["external"] == 0, "KV of the old weights was found under the name of the new ones"
        assert cold["tokens"] != said
        wait_for_hits(pool_url, [PROMPT])
        assert running.ask("reset")
        hit = running.ask("generate", prompts=[PROMPT], max_tokens=NUM_NEW)
        assert (hit["external"], hit["tokens"]) == (hit_tokens(PROMPT), cold["tokens"])
