"""The whole matrix in real vLLM: every direction of block sizes and tensor-parallel sizes, many requests in every load
mode, and the reference engine on the same pool. Engines live one at a time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headwater.bench.vllm_engine import SRC, EngineProcess, engine
from headwater.models.config import FAMILIES
from headwater.models.config_experts import EXPERTS

from pool_waits import wait_saved
from vllm_models import hit_tokens, random_tokens, save_experts, settings_of, wait_for_hits

pytestmark = [pytest.mark.slow, pytest.mark.matrix, pytest.mark.timeout(1800)]

CHUNK = 256
NUM_NEW = 10
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


# Each line: (tensor-parallel size, block size, which prompts must be hits, which prompt it writes)
WALK: list[tuple[int, int, tuple[int, ...], int | None]] = [
    (1, 32, (), 0),
    (1, 64, (0,), 1),
    (1, 128, (0, 1), 2),
    (1, 32, (1, 2), None),
    (2, 64, (0, 2), 3),
    (1, 128, (3,), None),
]


def test_every_direction_of_block_sizes_and_between_one_and_two_ranks(
    qwen3: Path, pool_url: str, log_file: Path
) -> None:
    """A prompt is computed once, by whoever comes first; all others find it and say the same."""
    prompts = [random_tokens(100 + i, 520 + 30 * i) for i in range(4)]
    with engine(log_file, settings_of(qwen3, None)) as plain:
        expected = plain.ask("generate", prompts=prompts, max_tokens=NUM_NEW)["tokens"]
    for tp, block_size, hits, writes in WALK:
        with engine(log_file, settings_of(qwen3, pool_url, tp=tp, block_size=block_size)) as running:
            for number in hits:
                hit = running.ask("generate", prompts=[prompts[number]], max_tokens=NUM_NEW)
                assert hit["external"] == hit_tokens(prompts[number]), (tp, block_size, number)
                assert hit["tokens"] == [expected[number]], (tp, block_size, number)
            if writes is not None:
                cold = running.ask("generate", prompts=[prompts[writes]], max_tokens=NUM_NEW)
                assert cold["external"] == 0
                assert cold["tokens"] == [expected[writes]]
                wait_for_hits(pool_url, [prompts[writes]])


PREFIXES = [random_tokens(200 + i, 300) for i in range(4)]
MANY = [[*PREFIXES[i % 4], *random_tokens(300 + i, 37 * (i + 1))] for i in range(16)]
"""Sixteen prompts of 337 to 892 tokens; four of them begin with the same 300."""


@pytest.fixture(scope="module")
def said(qwen3: Path, log_file: Path) -> list[list[int]]:
    with engine(log_file, settings_of(qwen3, None)) as plain:
        return [plain.ask("generate", prompts=[prompt], max_tokens=NUM_NEW)["tokens"][0] for prompt in MANY]


@pytest.mark.parametrize("load_mode", ["auto", "async", "layerwise", "blocking"])
def test_sixteen_at_once(load_mode: str, qwen3: Path, pool_url: str, log_file: Path, said: list[list[int]]) -> None:
    """Computed in parts of 256 tokens, with prefixes in common, and then loaded, all at once."""
    epoch = 1 + len(load_mode)
    extra = {"load_mode": load_mode, "epoch": epoch}  # each mode computes everything anew
    more: dict[str, Any] = {"max_num_batched_tokens": 256, "extra": extra}
    with engine(log_file, settings_of(qwen3, pool_url, block_size=32, **more)) as running:
        cold = running.ask("generate", prompts=MANY, max_tokens=NUM_NEW)
        assert cold["tokens"] == said
        whole = [(prompt, len(prompt) // CHUNK * CHUNK) for prompt in MANY]
        wait_saved(pool_url, whole, whose=lambda identity: identity.epoch == epoch)
        assert running.ask("reset")
        hit = running.ask("generate", prompts=MANY, max_tokens=NUM_NEW)
        assert hit["tokens"] == said
        assert hit["external"] + hit["local"] >= sum(num_tokens for _, num_tokens in whole)
        assert hit["external"] > 0
        assert running.ask("reset")
        # What only the beginning is known of.
        changed = [[*prompt[:-20], *random_tokens(400, 20)] for prompt in MANY[:4]]
        partly = running.ask("generate", prompts=changed, max_tokens=NUM_NEW)
        assert partly["external"] == sum((len(prompt) - 20) // CHUNK * CHUNK for prompt in changed)


def reference(model: Path, pool: str, prompts: list[list[int]], salt: str | None = None) -> dict[str, Any]:
    """What the reference engine says, on the same pool."""
    task = {"model": str(model), "pool": pool, "prompts": prompts, "max_tokens": NUM_NEW, "salt": salt}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("reference_process.py"))],
        input=json.dumps(task),
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("@")]
    assert lines, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(lines[-1][1:])
    return found


def check_salts_are_shared(model: Path, pool_url: str, running: EngineProcess) -> None:
    """Both engines find what the other one computed with the same salt, and nothing of any other."""
    ours, theirs = random_tokens(502, 600), random_tokens(503, 530)
    first = reference(model, pool_url, [ours], salt="tenant a")
    assert first["cached"] == [0]
    for salt, num_found in (("tenant b", 0), (None, 0), ("tenant a", hit_tokens(ours))):
        found = running.ask("generate", prompts=[ours], max_tokens=NUM_NEW, salt=salt)
        assert (found["external"], found["local"]) == (num_found, 0)
        assert found["tokens"] == first["tokens"]
    cold = running.ask("generate", prompts=[theirs], max_tokens=NUM_NEW, salt="tenant a")
    wait_for_hits(pool_url, [theirs], tenant=b"tenant a")
    assert reference(model, pool_url, [theirs])["cached"] == [0]
    again = reference(model, pool_url, [theirs], salt="tenant a")
    assert again["cached"] == [hit_tokens(theirs)]
    assert again["tokens"] == cold["tokens"]


@pytest.mark.parametrize("name", ["qwen3", "smollm2"])
def test_the_reference_engine_and_vllm_share(
    name: str, request: pytest.FixtureRequest, pool_url: str, log_file: Path
) -> None:
    """The same checkpoint directory, the same pool, both ways, and the same continuation."""
    model: Path = request.getfixturevalue(name)
    ours, theirs = random_tokens(500, 600), random_tokens(501, 530)
    first = reference(model, pool_url, [ours])
    assert first["cached"] == [0]
    with engine(log_file, settings_of(model, pool_url)) as running:
        hit = running.ask("generate", prompts=[ours], max_tokens=NUM_NEW)
        assert hit["external"] == hit_tokens(ours), "what the reference engine wrote was not found"
        assert hit["tokens"] == first["tokens"]
        cold = running.ask("generate", prompts=[theirs], max_tokens=NUM_NEW)
        assert cold["external"] == 0
        wait_for_hits(pool_url, [theirs])
        check_salts_are_shared(model, pool_url, running)
    again = reference(model, pool_url, [theirs])
    assert again["cached"] == [hit_tokens(theirs)], "what vLLM wrote was not found"
    assert again["tokens"] == cold["tokens"]


@pytest.mark.parametrize("family", [name for name in EXPERTS if name in FAMILIES])
def test_the_reference_engine_and_vllm_share_models_with_experts(
    family: str, tmp_path: Path, pool_url: str, log_file: Path
) -> None:
    """Both ways, from one rank to two and back, with the routing of each family."""
    model = save_experts(tmp_path / family, family, vocab_size=512)
    seed = 600 + 10 * list(EXPERTS).index(family)
    ours, theirs = random_tokens(seed, 600), random_tokens(seed + 1, 530)
    first = reference(model, pool_url, [ours])
    assert first["cached"] == [0]
    # vLLM's latent attention on CPUs has one block size.
    block_size = 128 if FAMILIES[family].q_latent_dim is None else 16
    with engine(log_file, settings_of(model, pool_url, tp=2, block_size=block_size)) as running:
        hit = running.ask("generate", prompts=[ours], max_tokens=NUM_NEW)
        assert hit["external"] == hit_tokens(ours), "what the reference engine wrote was not found"
        assert hit["tokens"] == first["tokens"]
        cold = running.ask("generate", prompts=[theirs], max_tokens=NUM_NEW)
        assert cold["external"] == 0
        wait_for_hits(pool_url, [theirs])
    again = reference(model, pool_url, [theirs])
    assert again["cached"] == [hit_tokens(theirs)], "what vLLM wrote was not found"
    assert again["tokens"] == cold["tokens"]


def test_latent_attention_in_vllm_says_what_transformers_says(tmp_path: Path, pool_url: str, log_file: Path) -> None:
    """DeepSeek-V2-Lite's kind (no latent of queries, no groups) with plain rope: computed, loaded, and grown."""
    import torch
    import transformers

    model = save_experts(tmp_path / "model", "deepseek_v2, greedy", vocab_size=512, rope_parameters=dict(PLAIN_ROPE))
    oracle = transformers.AutoModelForCausalLM.from_pretrained(model).float().eval()

    def greedy(prompt: list[int]) -> list[int]:
        with torch.no_grad():
            found = oracle.generate(
                torch.tensor([prompt]), max_new_tokens=NUM_NEW, min_new_tokens=NUM_NEW, do_sample=False, pad_token_id=0
            )
        return [int(token) for token in found[0, len(prompt) :]]

    prompt = random_tokens(700, 300)
    options = {"block_size": 16, "compilation_config": {"custom_ops": ["-rotary_embedding"]}}
    with engine(log_file, settings_of(model, pool_url, **options)) as running:
        cold = running.ask("generate", prompts=[prompt], max_tokens=NUM_NEW)
        assert cold["external"] == 0
        assert cold["tokens"] == [greedy(prompt)]
        wait_for_hits(pool_url, [prompt])
        hit = running.ask("generate", prompts=[prompt], max_tokens=NUM_NEW)
        assert hit["external"] == hit_tokens(prompt)
        assert hit["tokens"] == cold["tokens"]
        turn = [*prompt, *cold["tokens"][0], *random_tokens(701, 22)]
        wait_saved(pool_url, [(turn, len(prompt) + NUM_NEW - 1)])
        grown = running.ask("generate", prompts=[turn], max_tokens=NUM_NEW)
        assert grown["external"] == len(prompt) + NUM_NEW - 1, "the last token generated was never computed"
        assert grown["tokens"] == [greedy(turn)]
