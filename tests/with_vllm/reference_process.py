"""The reference engine in a process of its own: reads one JSON object, generates, and prints one."""

from __future__ import annotations

import json
import sys

from headwater.engine.config import EngineConfig
from headwater.engine.engine import Engine
from headwater.engine.params import SamplingParams


def main() -> None:
    task = json.load(sys.stdin)
    config = EngineConfig(model=task["model"], dtype="float32", max_model_len=2048, num_pages=512, pool=task["pool"])
    with Engine(config) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=task["max_tokens"], ignore_eos=True)
        for number, prompt in enumerate(task["prompts"]):
            engine.add(str(number), prompt, params, cache_salt=task["salt"])
        tokens: dict[str, list[int]] = {str(number): [] for number in range(len(task["prompts"]))}
        cached: dict[str, int] = {}
        while engine.has_work:
            for output in engine.step():
                tokens[output.request_id] += output.token_ids
                cached[output.request_id] = output.num_cached_tokens
        assert engine.drain_saves(120)
    print("@" + json.dumps({"tokens": list(tokens.values()), "cached": list(cached.values())}))


if __name__ == "__main__":
    main()
