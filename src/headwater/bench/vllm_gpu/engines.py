"""The engines that are alive: started, asked, and ended, with the waits that make a measurement honest.

A hit in the pool counts only where vLLM has forgotten its own cache, what was to be saved is saved, and nobody else is
at work. Every wait is for a condition, and has a limit.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwater.bench.measure import Note
from headwater.bench.vllm_engine import EngineProcess
from headwater.bench.vllm_fair import wait_until_quiet
from headwater.bench.vllm_gpu.plan import CHUNK_TOKENS, GpuPlan
from headwater.bench.vllm_gpu.prompts import make_prompt
from headwater.bench.vllm_gpu.sides import Side, remove_pools
from headwater.errors import EngineError, HeadwaterError
from headwater.pool.pool import Pool, open_pool

RESET_S = 20.0
SAVED_S = 10.0
"""For one prompt's KV to be found."""
STALL_S = 2.0
"""Where nothing more has come for so long, nothing more is waited for."""
QUIET_S = 5.0
RESTLESS_S = 0.5
"""Instead, where an engine has not come to rest before."""
_NUM_LOOKS = 2
CLOSE_S = 10.0
POLL_S = 0.01
_NUM_NUDGE_TOKENS = 16
_MODULE = "headwater.bench.vllm_gpu.process"


@dataclass(frozen=True)
class Filled:
    """The outcome of computing a prompt, saving it, and asking for it again."""

    cold_s: float
    num_found: float
    """By the first request after everything was saved."""
    most_found: float
    """By any of them: some connectors save more when a prompt comes again."""


class Engine:
    """One side, running."""

    def __init__(self, side: Side, process: EngineProcess, answer_s: float) -> None:
        self.side = side
        self.process = process
        self._answer_s = answer_s
        self._pool: Pool | None = None
        self._num_nudges = 0
        self.least_found = float("inf")
        """Tokens that the worst of the timed hits found, since `watch_hits`."""

    def command(self, name: str, **arguments: Any) -> Any:
        """One command. Raises RuntimeError where it fails or takes too long."""
        return self.process.ask(name, timeout_s=self._answer_s, **arguments)

    def ask(self, prompts: Sequence[list[int]], max_tokens: int = 1) -> dict[str, Any]:
        """Answers to some prompts at once."""
        found: dict[str, Any] = self.command("generate", prompts=list(prompts), max_tokens=max_tokens)
        return found

    def reset(self) -> None:
        """Forget the local prefix cache. Raises EngineError where vLLM does not."""
        if not self.command("reset_within", seconds=RESET_S):
            raise EngineError(f"vLLM ({self.side.name}) does not give up its prefix cache within {RESET_S:.0f} s")

    def nudge(self) -> None:
        """A short request that nobody has asked: the device's clocks are up afterwards, and nothing is left over from
        the request before."""
        self._num_nudges += 1
        self.ask([make_prompt(1_000_000_000 + self._num_nudges, _NUM_NUDGE_TOKENS, vocab_size=1000)])
        self.command("turn")

    def fill(self, prompt: list[int], quiet: Callable[[], object]) -> Filled:
        """Compute a prompt, wait until it is saved, and ask for it until all of it is found outside."""
        whole = len(prompt) - 1
        self.reset()
        quiet()
        before = self._num_stored()
        first = self.ask([prompt])
        if first["external"] >= whole:
            return Filled(first["seconds"], first["external"], first["external"])
        already = int(first["external"]) // CHUNK_TOKENS
        self.command("turn")
        self.wait_stored(before + whole // CHUNK_TOKENS - already)
        quiet()
        found: list[float] = []
        now = time.monotonic()
        deadline, grown = now + SAVED_S, now
        while not found or (max(found) < whole and now < min(deadline, grown + STALL_S)):
            self.reset()
            found.append(self.ask([prompt])["external"])
            self.command("turn")
            now = time.monotonic()
            if found[-1] > max(found[:-1], default=0):
                grown = now
        return Filled(first["seconds"], found[0], max(found))

    def watch_hits(self) -> None:
        """Forget the worst hit so far."""
        self.least_found = float("inf")

    def hit(self, prompts: Sequence[list[int]], prepare: Callable[[], object]) -> float:
        """Seconds to the first tokens of prompts that the pool should have; `prepare` waits for quiet."""
        self.reset()
        prepare()
        self.nudge()
        answer = self.ask(prompts)
        self.least_found = min(self.least_found, answer["external"])
        return float(answer["seconds"])

    # ---- Headwater's pool ---------------------------------------------------------------------------------------
    @property
    def pool(self) -> Pool | None:
        """The pool of this side, opened by this process; None where it has none."""
        if self._pool is None and self.side.pool is not None:
            self._pool = open_pool(self.side.pool, create=False)
        return self._pool

    def _num_stored(self) -> int:
        return self.pool.stats().store.stored if self.pool is not None else 0

    def wait_stored(self, num_chunks: int) -> bool:
        """Wait until the pool has stored so many chunks since it was made, and nothing is pending. False where that
        does not come: the next hit will show what is missing."""
        if self.pool is None:
            return True
        now = time.monotonic()
        deadline, changed, last = now + SAVED_S, now, (-1, -1)
        while now < deadline and now < changed + STALL_S:
            stats = self.pool.stats().store
            if stats.stored >= num_chunks and not stats.pending_bytes:
                return True
            if last != (stats.stored, stats.pending_bytes):
                changed, last = now, (stats.stored, stats.pending_bytes)
            self.command("turn", count=1)
            time.sleep(POLL_S)
            now = time.monotonic()
        return False

    def close(self) -> None:
        """End it. Idempotent."""
        pool, self._pool = self._pool, None
        if pool is not None:
            with contextlib.suppress(HeadwaterError):
                pool.close()
        self.process.close(CLOSE_S)


class Engines:
    """Those that are alive. Sides that are wanted next stay, the others are ended."""

    def __init__(self, plan: GpuPlan, log: Path, note: Note) -> None:
        self._plan, self._log, self._note = plan, log, note
        self._alive: dict[tuple[str, str], Engine] = {}
        self.restless: set[str] = set()
        """Sides that did not come to rest between two measurements."""

    def require(self, sides: Sequence[Side]) -> tuple[dict[str, Engine], dict[str, str]]:
        """Engines of these sides by name, and why others could not be started, by label.

        All of them import vLLM at the same time, but each starts alone: vLLM measures the device's memory then.
        """
        wanted = {side.key for side in sides}
        for key in [key for key in self._alive if key not in wanted]:
            self._alive.pop(key).close()
        remove_pools(keep=[side.pool for side in sides if side.pool])
        spawned = {side.key: self._spawn(side) for side in sides if side.key not in self._alive}
        failures: dict[str, str] = {}
        try:
            for side in sides:
                if (process := spawned.get(side.key)) is None:
                    continue
                start = time.monotonic()
                try:
                    process.begin(self._plan.start_s)
                except (RuntimeError, OSError) as error:
                    failures[label(side)] = str(error)
                    self._note(f"{label(side)} does not start: {str(error)[-600:]}")
                else:
                    self._alive[side.key] = Engine(side, process, self._plan.answer_s)
                    self._note(f"{label(side)} started in {time.monotonic() - start:.0f} s")
        finally:
            for key, process in spawned.items():
                if key not in self._alive:
                    process.close(CLOSE_S)
        return {side.name: self._alive[side.key] for side in sides if side.key in self._alive}, failures

    def _spawn(self, side: Side) -> EngineProcess:
        settings = {**side.settings, "environment": side.environment}
        return EngineProcess(self._log, settings, command=(_MODULE, "engine", str(os.getpid())), begin=False)

    def quiet(self) -> None:
        """Wait until none of them is at work."""
        names = {label(engine.side) for engine in self._alive.values()}
        limit_s = RESTLESS_S if names <= self.restless else QUIET_S
        try:
            wait_until_quiet([engine.process for engine in self._alive.values()], limit_s, _NUM_LOOKS)
        except EngineError as error:
            if not names <= self.restless:
                self._note(f"{', '.join(sorted(names))}: {error}; measured all the same")
            self.restless |= names

    def close(self) -> None:
        """End all of them. Idempotent."""
        while self._alive:
            self._alive.popitem()[1].close()


def label(side: Side) -> str:
    """A side's name in records and messages."""
    return side.name + (f"@{side.variant}" if side.variant else "")


def start_bus(log: Path, device: str) -> EngineProcess:
    """The process that copies, and makes the checkpoint."""
    command = (_MODULE, "bus", str(os.getpid()))
    return EngineProcess(log, {"device": device}, command=command)
