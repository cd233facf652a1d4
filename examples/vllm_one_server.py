"""vLLM with Headwater, from Python: the second answer takes its prompt's KV from the pool.

    python examples/vllm_one_server.py MODEL

MODEL is a directory or a name that vLLM knows. Start it twice: the second process hits at once.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any


def machine_settings() -> dict[str, Any]:
    """On a GPU, vLLM's own choice. On a CPU, float32, because few CPUs multiply bfloat16 and some crash trying; and no
    compilation, which takes longer there than this example."""
    from vllm.platforms import current_platform

    return {"dtype": "float32", "enforce_eager": True} if current_platform.is_cpu() else {}


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(
        kv_connector="HeadwaterConnector",
        kv_connector_module_path="headwater.integrations.vllm",
        kv_role="kv_both",
        kv_connector_extra_config={"pool": os.environ.get("HEADWATER_POOL", "shm:///headwater")},
    )
    llm = LLM(sys.argv[1], max_model_len=2048, kv_transfer_config=transfer, **machine_settings())
    prompt = "The river begins in the mountains. " * 120 + "Where does the river begin?"
    for number in (1, 2):
        start = time.perf_counter()
        (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
        seconds = time.perf_counter() - start
        print(f"{number}: {seconds:.2f} s, {output.num_cached_tokens} tokens from a cache: {output.outputs[0].text!r}")
        while not llm.reset_prefix_cache():  # so that the second hit is the pool's, and not vLLM's own
            time.sleep(0.05)


if __name__ == "__main__":
    main()
