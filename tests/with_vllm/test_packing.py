"""Real vLLM in bfloat16 on pools with packed tiles: its hits are the KV of a pool without, from either topology.

Products of bfloat16 crash on processors that announce AMX and have none, so the engines use older instructions.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.bench.vllm_engine import engine
from headwater.pool.pool import open_pool
from headwater.stores.embedded import destroy
from headwater.stores.url import parse_url

from vllm_models import hit_tokens, random_tokens, save_qwen3, settings_of, wait_for_hits

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PROMPTS = [random_tokens(1, 700), random_tokens(2, 1030)]
NUM_NEW = 12


@pytest.mark.parametrize(
    "read_tp", [pytest.param(1), pytest.param(2, marks=pytest.mark.matrix)], ids=["equal", "another topology"]
)
def test_packed_kv_gives_the_tokens_of_raw_kv(
    read_tp: int, tmp_path: Path, pool_url: str, log_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    model = save_qwen3(tmp_path / "model", 5)
    found, shares = {}, {}
    for packing in ("off", "on"):
        url = f"{pool_url.partition('?')[0]}-{packing}?capacity=128MiB&deadline=60&packing={packing}"
        with engine(log_file, settings_of(model, url, dtype="bfloat16")) as writer:
            cold = writer.ask("generate", prompts=PROMPTS, max_tokens=NUM_NEW)
            wait_for_hits(url, PROMPTS)
        with engine(log_file, settings_of(model, url, dtype="bfloat16", tensor_parallel_size=read_tp)) as reader:
            hit = reader.ask("generate", prompts=PROMPTS, max_tokens=NUM_NEW)
        assert cold["external"] == 0
        assert hit["external"] == sum(map(hit_tokens, PROMPTS))
        found[packing] = cold["tokens"], hit["tokens"]
        with open_pool(url) as pool:
            shares[packing] = pool.stats().store.packed_share
        destroy(parse_url(url))
    assert found["on"] == found["off"]
    assert shares["off"] == 1.0
    assert shares["on"] < 0.8, "hardly anything is packed"
