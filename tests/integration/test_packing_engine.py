"""Servers in bfloat16 that share packed KV: the tokens of raw KV, in any topology, in three quarters of the bytes.

Products of bfloat16 crash on processors that announce AMX and have none, so the servers run in a process in which the
library uses older instructions.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.stores.embedded import destroy
from headwater.stores.url import parse_url

pytest.importorskip("transformers")

from engine_models import VOCAB, save_random_checkpoint

pytestmark = pytest.mark.slow

SHARE = 0.8
"""Packed bytes over raw ones, with tails that stay raw; the narrow heads of small models pack a little worse."""


@pytest.fixture
def pools() -> Iterator[dict[str, str]]:
    name = f"shm:///headwater-test-{secrets.token_hex(6)}"
    urls = {packing: f"{name}-{packing}?capacity=128MiB&deadline=60&packing={packing}" for packing in ("on", "off")}
    yield urls
    for url in urls.values():
        destroy(parse_url(url))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("load", ["async", "layerwise"])
@pytest.mark.parametrize(
    ("family", "shape", "write", "read"),
    [
        ("llama", {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2}, (1, 16), (2, 48)),
        ("qwen3", {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2}, (2, 32), (1, 16)),
        ("deepseek_v3", {}, (1, 16), (2, 32)),
    ],
    ids=["llama", "qwen3", "latent"],
)
def test_packed_kv_gives_the_tokens_of_raw_kv(
    family: str,
    shape: dict[str, int],
    write: tuple[int, int],
    read: tuple[int, int],
    load: str,
    pools: dict[str, str],
    tmp_path: Path,
) -> None:
    model = save_random_checkpoint(family, tmp_path / "model", seed=3, **shape)
    sides = {
        name: {"tensor_parallel_size": tp, "page_size": page, "pool_load": load, "num_threads": 1}
        for name, (tp, page) in (("write", write), ("read", read))
    }
    case = {"model": str(model), "vocab": VOCAB, "pools": pools, **sides}
    here = Path(__file__).parent
    run = subprocess.run(
        [sys.executable, str(here / "packing_process.py"), json.dumps(case)],
        env=os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"},
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    found = json.loads(run.stdout.splitlines()[-1])
    packed, raw = found["on"], found["off"]
    assert packed["wrote"]["share"] < SHARE < raw["wrote"]["share"] == 1.0
    assert packed["wrote"]["cached"] == raw["wrote"]["cached"]
    assert packed["read"]["cached"] == raw["read"]["cached"]
    assert min(packed["read"]["cached"]) >= 512, "the reader computed what the pool has"
    assert packed["wrote"]["tokens"] == raw["wrote"]["tokens"]
    assert packed["read"]["tokens"] == raw["read"]["tokens"], "the same KV, other tokens"
