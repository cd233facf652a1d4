"""Servers in bfloat16 on one pool after another. A process of its own: `ONEDNN_MAX_CPU_ISA` must be set before torch is
imported. Prints one JSON object: tokens, tokens from the pool, and how many bytes the pool takes of the raw ones."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

from headwater.engine.config import EngineConfig
from headwater.engine.engine import Engine
from headwater.engine.params import SamplingParams
from headwater.pool.pool import open_pool


def ask(pool: str, prompts: list[list[int]], **settings: Any) -> dict[str, Any]:
    config = EngineConfig(device="cpu", dtype="bfloat16", num_pages=400, max_model_len=1024, pool=pool, **settings)
    tokens, cached = list[list[int]](), list[int]()
    with Engine(config) as engine:
        for number, prompt in enumerate(prompts):
            found: list[int] = []
            engine.add(str(number), prompt, SamplingParams(max_tokens=16, temperature=0))
            while engine.has_work:
                for output in engine.step():
                    found += output.token_ids
                    num_cached = output.num_cached_tokens
            tokens.append(found)
            cached.append(num_cached)
        assert engine.drain_saves(60)
    with open_pool(pool) as opened:
        return {"tokens": tokens, "cached": cached, "share": opened.stats().store.packed_share}


def main() -> None:
    case = json.loads(sys.argv[1])
    rng = np.random.default_rng(7)
    prefix = rng.integers(1, case["vocab"], 600).tolist()
    prompts = [prefix + rng.integers(1, case["vocab"], 40).tolist() for _ in range(2)]
    found = {}
    for name, url in case["pools"].items():
        found[name] = {
            "wrote": ask(url, prompts, model=case["model"], **case["write"]),
            "read": ask(url, prompts, model=case["model"], **case["read"]),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
