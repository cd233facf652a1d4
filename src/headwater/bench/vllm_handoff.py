"""`headwater bench peers --vllm`: prefill in one real vLLM, decode in another, through Headwater's connector and
through vLLM's own NixlConnector. On a CPU, with equal parallelism; the same prompts, in turns.

NIXL's agents keep a thread that spins. So the two servers of a pair are stopped (SIGSTOP) while the other pair is
measured: each has the machine to itself.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import count as count_from
from pathlib import Path
from typing import Any, NamedTuple

from headwater.bench.measure import Note, Rounds, Timed, machine, take_turns
from headwater.bench.vllm import BLOCK_SIZE, prompt_of, reset
from headwater.bench.vllm_engine import ANSWER_S, EngineProcess, engine
from headwater.bench.vllm_fair import wait_until_quiet
from headwater.bench.vllm_peers import LIGHT, BenchModel, free_port
from headwater.errors import EngineError
from headwater.peers.carriers import nixl

_WAIT_S, _START_S = 60.0, 10.0


@dataclass(frozen=True)
class HandoffBench:
    """What to measure, and how often."""

    model: BenchModel = LIGHT
    prompt_len: int = 4096
    pairs: int = 9


QUICK = HandoffBench(prompt_len=512, pairs=1)


class Handoff(NamedTuple):
    """One prompt, from its arrival to decode's first token."""

    seconds: float
    after_prefill_s: float
    """Since prefill's own answer."""
    prefill_tokens: list[int]
    tokens: list[int]
    external: float
    """Prompt tokens that decode did not compute."""


def why_not() -> str | None:
    """Why nothing can be measured here: what is missing."""
    if find_spec("vllm") is None:
        return "vLLM is not installed in this environment; `make test-vllm` creates one with it"
    return nixl.why_not() or (None if find_spec("nixl") else "vLLM needs the package `nixl` (pip install nixl)")


def run(plan: HandoffBench, note: Note) -> dict[str, Any]:
    """The report. Raises EngineError where a server does not do what was asked."""
    report: dict[str, Any] = {"machine": machine(), "prompt_len": plan.prompt_len, "pairs": plan.pairs}
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as directory:
        path, log = plan.model.save(Path(directory, plan.model.name)), Path(directory, "engines.log")
        with contextlib.ExitStack() as stack:
            duos: list[Duo] = []
            for make in (HeadwaterDuo, NixlDuo):
                note(f"starting {make.name}")
                duos.append(stack.enter_context(make(path, log, plan).running()))
                duos[-1].hand_over(prompt_of(1, plan.prompt_len))
                duos[-1].stop()
            ours, theirs = duos
            note(f"{plan.pairs} pairs of prompts of {plan.prompt_len} tokens")
            report |= _compare(ours, theirs, plan)
            note("prefill is killed between the two")
            report |= {f"killed_tokens_{duo.name}": _killed(duo, plan) for duo in duos}
    return report


def _compare(ours: Duo, theirs: Duo, plan: HandoffBench) -> dict[str, Any]:
    after: dict[str, list[float]] = {"headwater": [], "nixl": [], "again": []}

    def timed(name: str, duo: Duo, first_seed: int) -> Timed:
        seeds = count_from(first_seed)

        def once() -> float:
            found = duo.measure(prompt_of(next(seeds), plan.prompt_len))
            if found.tokens != found.prefill_tokens or found.external < plan.prompt_len - 2 * BLOCK_SIZE:
                raise EngineError(f"decode of {duo.name} computed the prompt, or said something else: {found}")
            after[name].append(found.after_prefill_s)
            return found.seconds

        return once

    runs = {
        "headwater": timed("headwater", ours, 100),
        "nixl": timed("nixl", theirs, 100),
        "again": timed("again", theirs, 10_000),
    }
    total = take_turns(runs, plan.pairs)
    later = Rounds({name: seconds[1:] for name, seconds in after.items()})
    return {
        "ttft_vs_nixl": total.ratio("headwater", "nixl"),
        "ttft_noise": total.noise("nixl", "again"),
        "ttft_headwater_s": total.time("headwater"),
        "ttft_nixl_s": total.time("nixl"),
        "after_prefill_headwater_s": later.time("headwater"),
        "after_prefill_nixl_s": later.time("nixl"),
    }


def _killed(duo: Duo, plan: HandoffBench) -> int:
    """How many right tokens decode says, of four, where prefill is killed when it has answered. Its last round."""
    prompt = prompt_of(7, plan.prompt_len)
    duo.go_on()
    expected = duo.prefill.ask("generate", prompts=[prompt], max_tokens=4)["tokens"][0]
    duo.forget()
    found = duo.orphan(prompt, max_tokens=4)
    right = [a == b for a, b in zip(found, expected, strict=False)]
    return right.index(False) if False in right else len(right)


class Duo:
    """A server for prefill and one for decode, with half of the cores each."""

    name = ""

    def __init__(self, path: Path, log: Path, plan: HandoffBench) -> None:
        self._path, self._log, self._plan = path, log, plan
        self.prefill: EngineProcess
        self.decode: EngineProcess

    @contextlib.contextmanager
    def running(self) -> Iterator[Duo]:
        """Both servers, ended in any case."""
        cores = sorted(os.sched_getaffinity(0))
        half = max(1, len(cores) // 2)
        with contextlib.ExitStack() as stack:
            for role, mine in (("prefill", cores[:half]), ("decode", cores[-half:])):
                transfer, environment = self._settings(role, stack)
                binds = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, mine)), "VLLM_CPU_KVCACHE_SPACE": "1"}
                settings: dict[str, Any] = {
                    "model": str(self._path),
                    "block_size": BLOCK_SIZE,
                    "max_model_len": self._plan.prompt_len + 256,
                    "environment": binds | environment,
                    "kv_transfer_config": transfer,
                }
                setattr(self, role, stack.enter_context(engine(self._log, settings)))
            stack.callback(self.go_on)  # a process that is stopped does not end gently
            yield self

    def _settings(self, role: str, stack: contextlib.ExitStack) -> tuple[dict[str, Any], dict[str, str]]:
        """The connector of one of the two, and what its process needs."""
        raise NotImplementedError

    def _to_prefill(self) -> dict[str, Any]:
        """`kv_transfer_params` of the next prompt for prefill."""
        raise NotImplementedError

    def _to_decode(self, answered: dict[str, Any] | None) -> dict[str, Any]:
        """The same for decode; `answered`: what prefill has returned as its own."""
        raise NotImplementedError

    def hand_over(self, prompt: list[int]) -> Handoff:
        """One prompt: decode is asked when prefill has answered."""
        began = time.monotonic()
        first = self._ask(self.prefill, prompt, 1, self._to_prefill())
        between = time.monotonic()
        found = self._ask(self.decode, prompt, 1, self._to_decode(first["transfers"][0]))
        ended = time.monotonic()
        return Handoff(ended - began, ended - between, first["tokens"][0], found["tokens"][0], found["external"])

    def orphan(self, prompt: list[int], max_tokens: int) -> list[int]:
        """What decode says where the prefill server is killed as soon as it has answered."""
        first = self._ask(self.prefill, prompt, 1, self._to_prefill())
        os.killpg(self.prefill.pid, signal.SIGKILL)
        tokens: list[int] = self._ask(self.decode, prompt, max_tokens, self._to_decode(first["transfers"][0]))[
            "tokens"
        ][0]
        return tokens

    def measure(self, prompt: list[int]) -> Handoff:
        """One prompt that neither server knows, when both have come to rest."""
        self.go_on()
        self.forget()
        self._rest()
        found = self.hand_over(prompt)
        self._rest()
        self.stop()
        return found

    def _rest(self) -> None:
        """Wait until neither server computes any more."""

    def forget(self) -> None:
        """Both local prefix caches."""
        for running in (self.prefill, self.decode):
            reset(running)

    def stop(self) -> None:
        """Leave the machine to others."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """After `stop`. Idempotent."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for running in (self.prefill, self.decode):
            with contextlib.suppress(ProcessLookupError):  # killed
                os.killpg(running.pid, number)

    def _ask(self, role: EngineProcess, prompt: list[int], max_tokens: int, transfer: Any) -> dict[str, Any]:
        answer: dict[str, Any] = role.ask("generate", prompts=[prompt], max_tokens=max_tokens, transfer=transfer)
        return answer


class HeadwaterDuo(Duo):
    """Pools of their own; prefill pushes, and decode is asked at the same moment, as `headwater proxy` does."""

    name = "headwater"

    def _settings(self, role: str, stack: contextlib.ExitStack) -> tuple[dict[str, Any], dict[str, str]]:
        name = f"headwater-bench-{secrets.token_hex(6)}"
        stack.callback(partial(shutil.rmtree, f"/dev/shm/{name}", ignore_errors=True))
        extra: dict[str, Any] = {"pool": f"shm:///{name}?capacity=2GiB"}
        if role == "decode":
            self._peer = extra["peer_listen"] = f"127.0.0.1:{free_port()}"
        transfer = {
            "kv_connector": "HeadwaterConnector",
            "kv_connector_module_path": "headwater.integrations.vllm",
            "kv_role": {"prefill": "kv_producer", "decode": "kv_consumer"}[role],
            "kv_connector_extra_config": extra,
        }
        return transfer, {}

    def _to_prefill(self) -> dict[str, Any]:
        self._transfer = secrets.token_hex(8)
        return {"headwater": {"push_to": self._peer, "transfer": self._transfer}}

    def _to_decode(self, answered: dict[str, Any] | None) -> dict[str, Any]:
        return {"headwater": {"transfer": self._transfer, "wait_s": _WAIT_S, "start_s": _START_S}}

    def hand_over(self, prompt: list[int]) -> Handoff:
        answers: list[tuple[float, list[int]]] = []
        to_prefill = self._to_prefill()

        def prefill() -> None:
            said = self._ask(self.prefill, prompt, 1, to_prefill)["tokens"][0]
            answers.append((time.monotonic(), said))

        first, began = threading.Thread(target=prefill), time.monotonic()
        first.start()
        found = self._ask(self.decode, prompt, 1, self._to_decode(None))
        ended = time.monotonic()
        first.join(ANSWER_S)
        if not answers:
            raise EngineError("prefill did not answer")
        at, said = answers[0]
        return Handoff(ended - began, ended - at, said, found["tokens"][0], found["external"])

    def _rest(self) -> None:
        wait_until_quiet([self.prefill, self.decode])


class NixlDuo(Duo):
    """vLLM's own: decode is told where the blocks are when prefill has answered, and reads them."""

    name = "nixl"

    def _settings(self, role: str, stack: contextlib.ExitStack) -> tuple[dict[str, Any], dict[str, str]]:
        transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
        return transfer, {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()), "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1"}

    def _to_prefill(self) -> dict[str, Any]:
        nothing = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
        return {"do_remote_decode": True, "do_remote_prefill": False, **nothing}

    def _to_decode(self, answered: dict[str, Any] | None) -> dict[str, Any]:
        if answered is None:
            raise EngineError("NIXL's prefill server did not say where its blocks are")
        return answered
