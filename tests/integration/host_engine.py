"""What runs on a host of namespaces: an engine with a pool, told by lines of JSON which prompts to answer."""

from __future__ import annotations

import json
import sys
from typing import Any

from headwater.engine.config import EngineConfig
from headwater.engine.engine import Engine
from headwater.engine.params import SamplingParams


class Server:
    """One engine."""

    def __init__(self, model: str, url: str, tp: int) -> None:
        self.engine = Engine(
            EngineConfig(
                model=model,
                device="cpu",
                tensor_parallel_size=tp,
                max_model_len=600,
                num_pages=120,
                num_threads=1,
                pool=url,
            )
        )
        self._asked = 0

    def answer(self, prompt: list[int], num_tokens: int) -> dict[str, Any]:
        """Greedy tokens, and how many of the prompt's were not computed here."""
        self._asked += 1
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        self.engine.add(str(self._asked), prompt, params)
        tokens, cached = list[int](), 0
        while self.engine.has_work:
            for output in self.engine.step():
                tokens += output.token_ids
                cached = output.num_cached_tokens
        return {"tokens": tokens, "cached": cached}

    def saved(self, timeout_s: float) -> bool:
        """Until what was computed is in the first tier."""
        return self.engine.drain_saves(timeout_s)

    def forget(self) -> bool:
        """The engine's own cache, not the pool."""
        return bool(self.engine.reset_prefix_cache())


def main() -> None:
    server = Server(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        verb, *words = json.loads(line)
        print(json.dumps(getattr(server, verb)(*words)), flush=True)
    server.engine.close()


if __name__ == "__main__":
    main()
