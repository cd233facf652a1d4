"""An engine without a model behind the benchmark's protocol: it computes nothing, but it uses a real pool.

    python -m fake_vllm engine|bus PARENT_PID

Its seconds follow from what a request finds, so that figures can be foretold. `faults` in its settings says which side
fails, and how. A save starts with the next step, as in vLLM, and becomes visible some time later.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

import headwater as hw
from headwater.bench.vllm_process import serve

CHUNK = 256
SECONDS_COLD = 1e-4
"""For each token that is computed."""
SECONDS_HIT = {"headwater": 2e-6, "headwater_layerwise": 1e-6, "lmcache": 4e-6, "offloading": 5e-6}
SECONDS_LOCAL = {"plain": 1e-6, "headwater": 3e-6}
BASE_S = 1e-3
SAVE_S = 0.15
BUS_BYTES_A_SECOND = 1e9
NAMES = {"HeadwaterConnector": "headwater", "LMCacheConnectorV1": "lmcache", "OffloadingConnector": "offloading"}


class FakeEngine:
    """vLLM, seen from outside."""

    def __init__(self, settings: dict[str, Any]) -> None:
        transfer = settings.get("kv_transfer_config") or {}
        extra = transfer.get("kv_connector_extra_config", {})
        self.name = NAMES[transfer["kv_connector"]] if transfer else "plain"
        if extra.get("load_mode") == "layerwise":
            self.name = "headwater_layerwise"
        self.fault = settings.get("faults", {}).get(self.name)
        if self.fault == "start":
            raise RuntimeError(f"{self.name} cannot start")
        self.has_local = settings["enable_prefix_caching"]
        self.local: set[bytes] = set()
        self.outside: set[bytes] = set()
        self.unsaved: list[list[int]] = []
        self.space = None
        if "pool" in extra:
            config = json.loads(Path(settings["model"], "config.json").read_text())
            spec = hw.KVSpec.gqa(
                num_layers=config["num_hidden_layers"],
                num_kv_heads=config["num_key_value_heads"],
                head_dim=config["head_dim"],
                dtype="float32",
            )
            identity = hw.Identity(weights=f"sha256:{7:064x}", run_dtype="float32", kv_dtype="float32")
            self.pool = hw.open_pool(extra["pool"], group=secrets.randbits(62) | 1)
            self.space = self.pool.space(identity, spec)
            self.shard = hw.Topology().shard(spec)
        self.num_commands = 0

    def generate(self, prompts: list[list[int]], max_tokens: int = 1) -> dict[str, Any]:
        self.num_commands += 1
        if self.fault == "die" and len(prompts[0]) > 2 * CHUNK:
            os._exit(3)
        if self.fault == "raise" and len(prompts[0]) > 2 * CHUNK:
            raise ValueError("as it was told")
        seconds, local, external, tokens = BASE_S, 0, 0, []
        for prompt in prompts:
            found_local, found_outside = self._find(prompt)
            seconds += SECONDS_COLD * (len(prompt) - 1 - found_local - found_outside)
            seconds += SECONDS_LOCAL.get(self.name, 2e-6) * found_local
            seconds += SECONDS_HIT.get(self.name, 0.0) * found_outside
            local, external = local + found_local, external + found_outside
            answer = [sum(prompt) % 1000 + number for number in range(max_tokens)]
            if self.fault == "differ" and found_outside:
                answer[-1] += 1
            tokens.append(answer)
            self.unsaved.append(prompt)
            self.local |= set(self._names(prompt)) if self.has_local else set()
        return {"tokens": tokens, "seconds": seconds, "local": local, "external": external, "cached": []}

    def _find(self, prompt: list[int]) -> tuple[int, int]:
        names = self._names(prompt)[: (len(prompt) - 1) // CHUNK]
        num_local = 0
        while num_local < len(names) and names[num_local] in self.local:
            num_local += 1
        num = num_local
        if self.space is not None:
            keys = self.space.keys(prompt)
            num = max(num, self.space.match(keys, max_tokens=len(prompt) - 1).num_tokens // CHUNK)
            if self.fault == "half":
                num = max(num_local, num // 2)
        else:
            while num < len(names) and names[num] in self.outside:
                num += 1
        return num_local * CHUNK, (num - num_local) * CHUNK

    def _names(self, prompt: list[int]) -> list[bytes]:
        tokens = np.asarray(prompt, np.int64)
        return [tokens[: end + CHUNK].tobytes() for end in range(0, len(prompt) // CHUNK * CHUNK, CHUNK)]

    def turn(self, count: int = 1) -> None:
        prompts, self.unsaved = self.unsaved, []
        if prompts and self.name != "plain":
            saving = threading.Timer(SAVE_S, self._save, [prompts])
            saving.daemon = True
            saving.start()

    def _save(self, prompts: list[list[int]]) -> None:
        for prompt in prompts:
            if self.space is None:
                self.outside |= set(self._names(prompt))
            elif chunks := self.space.keys(prompt).chunks(tail=False):
                self.space.write(chunks, self.shard, [self.space.empty(chunk, self.shard) for chunk in chunks])

    def reset_within(self, seconds: float) -> bool:
        self.turn()
        self.local = set()
        return self.fault != "never reset"

    def after(self, prompt: list[int]) -> dict[str, Any]:
        cold = self.generate([prompt])
        local = self.generate([prompt])
        return {"cold": cold["seconds"], "local": local["seconds"], "found": local["local"]}

    def stream(self, prompts: list[list[int]], at_once: int, max_tokens: int) -> dict[str, Any]:
        answer = self.generate(prompts, max_tokens)
        return {
            "seconds": answer["seconds"],
            "output_tokens": max_tokens * len(prompts),
            "external": answer["external"],
        }

    def profile(self, prompt: list[int]) -> dict[str, Any]:
        events = [["request begins", 1.0, 0], ["request ends", 1.001, 0], ["answer ends", 1.02, 1]]
        return {**self.generate([prompt]), "events": events, "load_seconds": 0.01}


class FakeBus:
    """The bus at one gigabyte a second."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.device = settings["device"]

    def describe(self) -> dict[str, Any]:
        return {"gpu": None, "torch": "none"}

    def copy(self, num_bytes: int) -> float:
        return num_bytes / BUS_BYTES_A_SECOND

    def make_model(self, shape: dict[str, int], directory: str, dtype: str) -> None:
        from headwater.bench.vllm_gpu.model import LlamaShape

        Path(directory).mkdir()
        Path(directory, "config.json").write_text(json.dumps(LlamaShape(**shape).config(dtype)))


if __name__ == "__main__":
    serve(FakeEngine if sys.argv[1] == "engine" else FakeBus)
