"""Hundreds of random requests, aborts at any moment, and a cache too small for them: no page is lost, nothing grows."""

from __future__ import annotations

import gc
import random
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from headwater.engine.config import EngineConfig
from headwater.engine.engine import Engine
from headwater.engine.params import FinishReason, SamplingParams

from engine_models import VOCAB, save_random_checkpoint

pytestmark = pytest.mark.slow

NUM_REQUESTS = 300
MAX_GROWTH = 24 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("overlap", [False, True])
def test_soak(overlap: bool, tmp_path: Path) -> None:
    rng = random.Random(overlap)
    config = EngineConfig(
        model=str(save_random_checkpoint("qwen3", tmp_path)),
        device="cpu",
        max_model_len=256,
        num_pages=32,
        max_num_seqs=12,
        max_batched_tokens=96,
        overlap=overlap,
        num_threads=1,
    )
    prefixes = [[rng.randrange(3, VOCAB) for _ in range(rng.randrange(20, 120))] for _ in range(6)]
    ends: Counter[FinishReason] = Counter()
    live: set[str] = set()
    with Engine(config) as engine:
        after_warm_up = 0

        def take_step() -> None:
            for output in engine.step():
                if output.finish_reason is not None:
                    ends[output.finish_reason] += 1
                    live.remove(output.request_id)

        for number in range(NUM_REQUESTS):
            prompt = rng.choice(prefixes)[: rng.randrange(1, 100)] + [rng.randrange(3, VOCAB) for _ in range(8)]
            params = SamplingParams(
                max_tokens=rng.choice([rng.randrange(1, 20), rng.randrange(60, 130)]),
                temperature=rng.choice([0.0, 0.0, 1.0]),
                top_p=rng.choice([1.0, 0.8]),
                repetition_penalty=rng.choice([1.0, 1.0, 1.0, 1.3]),
                logprobs=rng.choice([None, None, 3]),
                ignore_eos=rng.random() < 0.5,
            )
            engine.add(str(number), prompt, params)
            live.add(str(number))
            for _ in range(rng.randrange(0, 6)):
                take_step()
            while len(live) > 40:
                take_step()
            if rng.random() < 0.2:
                engine.abort(rng.choice(sorted(live)) if live else "nobody")
            if number % 20 == 0:
                engine.check_integrity()
            if number == NUM_REQUESTS // 3:
                gc.collect()
                after_warm_up = resident_bytes()
        while engine.has_work:
            take_step()
        engine.check_integrity()
        stats = engine.stats()
        gc.collect()
        grown = resident_bytes() - after_warm_up
    print(f"{dict(ends)}, {stats.num_preemptions} preemptions, {stats.num_steps} steps, grown by {grown >> 10} KiB")
    assert sum(ends.values()) == NUM_REQUESTS
    assert ends[FinishReason.ABORT] > NUM_REQUESTS // 20
    assert stats.num_preemptions > 10
    assert stats.num_cached_tokens > 0
    assert stats.num_pages_free + stats.num_pages_evictable == stats.num_pages, "a page has no way back"
    assert not live
    assert grown < MAX_GROWTH
