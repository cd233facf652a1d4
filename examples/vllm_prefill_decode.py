"""Prefill on one vLLM, decode on another, through the pool: two engines, one after the other, on one machine.

    python examples/vllm_prefill_decode.py MODEL

The producer computes the prompt and saves it; the consumer, a process of its own, loads it and goes on.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from typing import Any

POOL = os.environ.get("HEADWATER_POOL", "shm:///headwater")
PROMPT = "The river begins in the mountains. " * 120 + "Where does the river begin?"


def machine_settings() -> dict[str, Any]:
    """On a GPU, vLLM's own choice. On a CPU, float32, because few CPUs multiply bfloat16 and some crash trying; and no
    compilation, which takes longer there than this example."""
    from vllm.platforms import current_platform

    return {"dtype": "float32", "enforce_eager": True} if current_platform.is_cpu() else {}


def serve(model: str, role: str, max_tokens: int) -> None:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(
        kv_connector="HeadwaterConnector",
        kv_connector_module_path="headwater.integrations.vllm",
        kv_role=role,
        kv_connector_extra_config={"pool": POOL},
    )
    llm = LLM(model, max_model_len=2048, kv_transfer_config=transfer, **machine_settings())
    (output,) = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=max_tokens), use_tqdm=False)
    print(f"{role}: {output.num_cached_tokens} tokens were there, said {output.outputs[0].text!r}", flush=True)
    # multiprocessing waits for the engine's own process before vLLM would end it by itself.
    llm.llm_engine.engine_core.shutdown()


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    context = multiprocessing.get_context("spawn")
    for role, max_tokens in (("kv_producer", 1), ("kv_consumer", 24)):
        process = context.Process(target=serve, args=(sys.argv[1], role, max_tokens))
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(f"the {role} failed")


if __name__ == "__main__":
    main()
