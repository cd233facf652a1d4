"""The processes of `bench vllm --device cuda`: one vLLM engine each, and one for the bus alone.

    python -m headwater.bench.vllm_gpu.process engine|bus PARENT_PID

Both are driven by lines of JSON, as `bench.vllm_process` is. An engine's core lives in this process and steps only
while something is asked: `turn` gives it the steps that a server's own loop would make between two requests.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from headwater.bench.vllm_process import Commands, serve

LOAD_TIME = "headwater_pool_load_duration_seconds_sum"
"""The metric that grows by the time of each load, from its order on."""
_PR_SET_PDEATHSIG = 1
_WAKE_BYTES = 64 << 20
"""Copied before what is timed: an idle bus sleeps."""
_TURNS = 3
"""Steps after which a finished request is gone from the batch: one, and two that may be scheduled ahead."""


class EngineCommands(Commands):
    """The commands of an engine."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._timeline = None
        if settings.pop("timeline", False):
            from headwater.bench.vllm_gpu.watch import Timeline

            self._timeline = Timeline()
        self._num_streams = 0
        super().__init__(settings)

    def turn(self, count: int = _TURNS) -> None:
        """Let the engine step without a request, as a server's loop does after one has finished."""
        for _ in range(count):
            self.llm.llm_engine.step()

    def reset_within(self, seconds: float) -> bool:
        """Forget the local prefix cache, as soon as no block is in use any more; False where that does not come."""
        deadline = time.monotonic() + seconds
        while not self.reset():
            if time.monotonic() > deadline:
                return False
            self.turn(1)
        return True

    def after(self, prompt: list[int]) -> dict[str, Any]:
        """A prompt, and at once the same again: seconds of both, and the tokens that the second one found locally."""
        cold = self.generate([prompt], max_tokens=1)
        local = self.generate([prompt], max_tokens=1)
        return {"cold": cold["seconds"], "local": local["seconds"], "found": local["local"], "cold_hit": cold["cached"]}

    def stream(self, prompts: list[list[int]], at_once: int, max_tokens: int) -> dict[str, Any]:
        """All prompts, at most `at_once` at a time, each as soon as another one has finished."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            detokenize=False,
            ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        engine, waiting, num_running, num_tokens = self.llm.llm_engine, deque(prompts), 0, 0
        self._num_streams += 1
        before = self.metrics()
        start = time.perf_counter()
        while waiting or num_running:
            while waiting and num_running < at_once:
                name = f"stream-{self._num_streams}-{len(waiting)}"
                engine.add_request(name, {"prompt_token_ids": waiting.popleft()}, params.clone())
                num_running += 1
            for output in engine.step():
                if output.finished:
                    num_running -= 1
                    num_tokens += len(output.outputs[0].token_ids)
        seconds = time.perf_counter() - start
        hits = self.hits_since(before)
        return {"seconds": seconds, "output_tokens": num_tokens, **hits}

    def profile(self, prompt: list[int]) -> dict[str, Any]:
        """One first token, with the times of what led to it."""
        assert self._timeline is not None, "this engine was started without a timeline"
        before = self.metrics()
        with self._timeline.recording() as events:
            answer = self.generate([prompt], max_tokens=1)
        self.turn()
        answer["load_seconds"] = self.metrics().get(LOAD_TIME, 0.0) - before.get(LOAD_TIME, 0.0)
        return {**answer, "events": events}


class BusCommands:
    """A process without vLLM: copies to the device, and makes the checkpoint."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._device = settings["device"]
        self._here: Any = None
        self._there: Any = None

    def describe(self) -> dict[str, Any]:
        """The device and torch."""
        import torch

        if self._device != "cuda":
            return {"gpu": None, "torch": torch.__version__}
        if not torch.cuda.is_available():
            raise RuntimeError("torch finds no CUDA device")
        properties = torch.cuda.get_device_properties(0)
        return {
            "gpu": properties.name,
            "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
            "torch": torch.__version__,
        }

    def copy(self, num_bytes: int) -> float:
        """Seconds of one copy of so many pinned bytes to the device."""
        import torch

        if self._here is None or self._here.numel() < num_bytes:
            self._here = self._there = None
            self._here = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=self._device == "cuda")
            self._there = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        self._copy(min(num_bytes, _WAKE_BYTES))
        return self._copy(num_bytes)

    def _copy(self, num_bytes: int) -> float:
        self._wait()
        start = time.perf_counter()
        self._there[:num_bytes].copy_(self._here[:num_bytes], non_blocking=True)
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        import torch

        if self._device == "cuda":
            torch.cuda.synchronize()

    def make_model(self, shape: dict[str, int], directory: str, dtype: str) -> None:
        """Write a random checkpoint, and give the device's memory back."""
        import torch

        from headwater.bench.vllm_gpu.model import LlamaShape, write_checkpoint

        write_checkpoint(LlamaShape(**shape), Path(directory), dtype=dtype, device=self._device)
        if self._device == "cuda":
            torch.cuda.empty_cache()


def main() -> None:
    """Serve one engine, or the bus, until the input ends."""
    # A killed benchmark must not leave an engine behind that holds the GPU's memory.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    kind, parent = sys.argv[1:]
    if os.getppid() != int(parent):
        sys.exit("whoever started this has ended")
    if kind == "engine":
        import vllm  # noqa: F401  # slow, and processes that are started together do it at the same time
    serve(EngineCommands if kind == "engine" else BusCommands)


if __name__ == "__main__":
    main()
