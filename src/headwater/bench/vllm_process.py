"""One vLLM engine in a process of its own, driven by lines of JSON: what the benchmark, and the tests, talk to.

It reads one line of settings and then one command a line; every answer is one line that begins with `@`.
`vllm_engine` is the other side.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

EXTERNAL_HITS = "vllm:external_prefix_cache_hits"
LOCAL_HITS = "vllm:prefix_cache_hits"


def answer(value: Any) -> None:
    """Say one thing to whoever drives this process."""
    sys.stdout.write("@" + json.dumps(value) + "\n")
    sys.stdout.flush()


class Commands:
    """What can be asked of an engine."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        transfer = settings.pop("kv_transfer_config", None)
        if transfer is not None:
            settings["kv_transfer_config"] = KVTransferConfig(**transfer)
        defaults = {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True, "disable_log_stats": False}
        self.llm = LLM(**{**defaults, **settings})

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int = 8,
        salt: str | None = None,
        lora: dict[str, Any] | None = None,
        logprobs: int | None = None,
        transfer: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Greedy continuations of some prompts, all at once, and how long they took. `transfer`: the requests'
        `kv_transfer_params`."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        params = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            detokenize=False,
            ignore_eos=True,
            prompt_logprobs=logprobs,
            extra_args=None if transfer is None else {"kv_transfer_params": transfer},
        )
        given: list[Any] = [{"prompt_token_ids": tokens} | ({"cache_salt": salt} if salt else {}) for tokens in prompts]
        request = LoRARequest(**lora) if lora else None
        before = self.metrics()
        start = time.perf_counter()
        outputs = self.llm.generate(given, params, use_tqdm=False, lora_request=request)
        seconds = time.perf_counter() - start
        return {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
            "transfers": [output.kv_transfer_params for output in outputs],
            "seconds": seconds,
            **self.hits_since(before),
        }

    def hits_since(self, before: dict[str, float]) -> dict[str, float]:
        """Tokens that were found since then: by the connector, and in the local prefix cache."""
        now = self.metrics()
        names = {"external": EXTERNAL_HITS, "local": LOCAL_HITS}
        return {key: now.get(name, 0.0) - before.get(name, 0.0) for key, name in names.items()}

    def reset(self, connector: bool = False, running: bool = False) -> bool:
        """Forget the local prefix cache; False means that nothing was forgotten."""
        return bool(self.llm.reset_prefix_cache(reset_running_requests=running, reset_connector=connector))

    def metrics(self) -> dict[str, float]:
        """Every counter and gauge of vLLM and of Headwater, by name. (vLLM's `get_metrics` knows only its own, as whole
        numbers.)"""
        from prometheus_client import REGISTRY

        found: dict[str, float] = {}
        for metric in REGISTRY.collect():
            for sample in metric.samples:
                if sample.name.startswith(("vllm:", "headwater_")) and not sample.name.endswith(
                    ("_created", "_bucket")
                ):
                    name = sample.name.removesuffix("_total")
                    found[name] = found.get(name, 0.0) + sample.value
        return found

    def page(self) -> str:
        """What vLLM's /metrics would answer."""
        from prometheus_client import generate_latest
        from vllm.v1.metrics.prometheus import get_prometheus_registry

        return generate_latest(get_prometheus_registry()).decode()


def serve(make: Callable[[dict[str, Any]], Any]) -> None:
    """Make what the first line of the input describes, then do what is asked of it until the input ends."""
    line = sys.stdin.readline()
    if not line:
        return  # the caller has closed it before it began
    settings = json.loads(line)
    os.environ.update({name: str(value) for name, value in settings.pop("environment", {}).items()})
    try:
        commands = make(settings)
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}"})
        raise
    answer({"ready": True})
    for line in sys.stdin:
        name, arguments = json.loads(line)
        if name == "close":
            break
        try:
            answer({"value": getattr(commands, name)(**arguments)})
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})
    del commands


if __name__ == "__main__":
    serve(Commands)
