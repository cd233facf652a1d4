"""The reference engine as a prefill server of two ranks: reads one JSON object, pushes, and prints what it has sent."""

from __future__ import annotations

import json
import sys

from headwater.connector.transfers import TransferParams
from headwater.engine.config import EngineConfig
from headwater.engine.engine import Engine
from headwater.engine.params import SamplingParams


def main() -> None:
    task = json.load(sys.stdin)
    config = EngineConfig(
        model=task["model"], dtype="float32", max_model_len=2048, num_pages=512, pool=task["pool"],
        tensor_parallel_size=2, max_batched_tokens=128,
    )  # fmt: skip
    with Engine(config) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=1)
        for number, prompt in enumerate(task["prompts"]):
            engine.add(str(number), prompt, params, transfer=TransferParams(id=f"{number:02x}", push_to=task["peer"]))
        sent: dict[str, int | None] = {}
        while engine.has_work:
            for output in engine.step():
                sent[output.request_id] = output.num_sent_tokens
    print("@" + json.dumps([sent[str(number)] for number in range(len(task["prompts"]))]))


if __name__ == "__main__":
    main()
