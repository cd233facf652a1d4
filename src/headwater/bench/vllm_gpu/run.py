"""One run of `bench vllm --device cuda`: stage by stage, each result kept as soon as it is there.

A side that is absent or fails is reported, and the rest goes on. Nothing is begun that would not end in time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any

from headwater.bench.measure import Note, machine
from headwater.bench.vllm_engine import EngineProcess
from headwater.bench.vllm_gpu import figures
from headwater.bench.vllm_gpu.engines import Engine, Engines, label, start_bus
from headwater.bench.vllm_gpu.measures import Bench
from headwater.bench.vllm_gpu.model import is_checkpoint, read_shape
from headwater.bench.vllm_gpu.plan import GpuPlan
from headwater.bench.vllm_gpu.prompts import Prompts
from headwater.bench.vllm_gpu.records import (
    ABSENT,
    FAILED,
    FORMAT,
    MEASURED,
    RUN,
    Journal,
    Record,
    check_together,
    read_records,
)
from headwater.bench.vllm_gpu.sides import Places, Side, make_side, remove_pools, usable_capacity
from headwater.bench.vllm_gpu.stages import Measure, Stage, stages
from headwater.errors import EngineError
from headwater.stores.url import format_size

START_ESTIMATE_S = {"eager": 30.0, "compiled": 100.0}
_MAX_FAILURES = 2
"""In one stage, until it is left."""


def run(plan: GpuPlan, note: Note) -> dict[str, Any]:
    """Measure everything; plain data for JSON. Raises EngineError where not even the device is there."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_ended_by_signals())
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headwater-bench-")))
        for name in remove_pools():
            note(f"removed {name}, which a killed run had left")
        stack.callback(remove_pools)
        log = directory / "engines.log" if plan.out is None else plan.out.with_suffix(".log")
        try:
            bus = start_bus(log, plan.device)
            stack.callback(bus.close)
            described = bus.ask("describe")
        except RuntimeError as error:
            raise EngineError(f"nothing can be measured here: {error}") from error
        plan, model = _model(plan, directory, bus, note)
        capacity = usable_capacity(plan.capacity_bytes)
        if capacity < plan.capacity_bytes:
            note(f"shared memory is short: every connector gets {format_size(capacity)}")
        places = Places(model, directory / "tier", capacity)
        journal = Journal(plan.out, _run_record(plan, described, capacity), again=plan.again)
        engines = Engines(plan, log, note)
        stack.callback(engines.close)
        bench = Bench(plan, engines, bus, Prompts(plan.shape.vocab_size, seed=1 + len(journal.records)), note)
        is_whole = False
        try:
            Runner(bench, places, journal).run()
            is_whole = True
        except KeyboardInterrupt:
            note("interrupted; what was measured is reported")
    return figures.report(journal.records) | {"interrupted": not is_whole, "restless": sorted(engines.restless)}


def merge(paths: Sequence[Path], *, mixed: bool = False) -> dict[str, Any]:
    """The figures of results that earlier runs kept. Raises EngineConfigError where they do not belong together."""
    records = read_records(paths)
    check_together(records, mixed=mixed)
    return figures.report(records)


class Runner:
    """Goes through the stages."""

    def __init__(self, bench: Bench, places: Places, journal: Journal) -> None:
        self._bench, self._places, self._journal = bench, places, journal
        self._plan, self._note = bench.plan, bench.note
        self._deadline = time.monotonic() + bench.plan.seconds
        self._absent: dict[str, str] = {}

    def run(self) -> None:
        """Go through all stages, and note failures."""
        for stage in stages(self._plan):
            sides = self._sides(stage)
            if not stage.can_run([side.name for side in sides]):
                continue
            names = [side.name for side in sides]
            wanted = [one for one in stage.measures if one.can_run(names)]
            pending = [one for one in wanted if not self._journal.is_done(self._record(stage, one, names))]
            if not pending:
                self._note(f"{stage.name}: measured before")
            elif self._has_time(stage, START_ESTIMATE_S[self._plan.mode] + pending[0].seconds):
                self._stage(stage, sides, pending)

    def _stage(self, stage: Stage, sides: Sequence[Side], pending: Sequence[Measure]) -> None:
        num_failures = 0
        for measure in pending:
            if num_failures == _MAX_FAILURES:
                self._fail(stage, measure, [], "left out after failures in the same stage")
                continue
            if not self._has_time(stage, measure.seconds):
                return
            engines = self._start(sides)
            if not stage.can_run(engines):
                return
            if not measure.can_run(engines):
                continue
            if not self._measure(stage, measure, engines):
                num_failures += 1
                self._bench.engines.close()  # whatever they are doing, the next measurement begins anew

    def _measure(self, stage: Stage, measure: Measure, engines: dict[str, Engine]) -> bool:
        what = f"{measure.name} {measure.tokens:,}" if measure.tokens else measure.name
        begin = time.monotonic()
        try:
            body = measure.run(self._bench, engines)
        except Exception as error:
            self._fail(stage, measure, engines, f"{type(error).__name__}: {error}")
            return False
        took = time.monotonic() - begin
        about = self._record(stage, measure, engines)
        self._journal.add({"kind": MEASURED, **about, "took_s": round(took, 1), **body})
        self._note(f"{stage.name}: {what} ({', '.join(engines)}) in {took:.0f} s")
        return True

    def _sides(self, stage: Stage) -> list[Side]:
        """Those that can be run here; why others cannot is noted once."""
        found = []
        for name, variant in stage.sides:
            try:
                found.append(make_side(self._plan, self._places, name, variant))
            except EngineError as error:
                self._leave_out(name, str(error))
        return [side for side in found if label(side) not in self._absent]

    def _start(self, sides: Sequence[Side]) -> dict[str, Engine]:
        wanted = [side for side in sides if label(side) not in self._absent]
        engines, failures = self._bench.engines.require(wanted)
        for name, reason in failures.items():
            self._leave_out(name, reason)
        return engines

    def _leave_out(self, name: str, reason: str) -> None:
        if name not in self._absent:
            self._absent[name] = reason
            self._journal.add({"kind": ABSENT, "mode": self._plan.mode, "side": name, "reason": reason[-2000:]})
            self._note(f"without {name}: {reason.strip().splitlines()[-1] if reason.strip() else 'no reason given'}")

    def _fail(self, stage: Stage, measure: Measure, sides: Iterable[str], reason: str) -> None:
        self._journal.add({"kind": FAILED, **self._record(stage, measure, sides), "reason": reason[-2000:]})
        self._note(f"{stage.name}: {measure.name} failed: {reason[-600:]}")

    def _has_time(self, stage: Stage, seconds: float) -> bool:
        left = self._deadline - time.monotonic()
        if self._plan.is_quick or left >= seconds:
            return True
        self._note(f"{stage.name}: {max(0, left):.0f} s are left, which is not enough; run again with the same --out")
        return False

    def _record(self, stage: Stage, measure: Measure, sides: Iterable[str]) -> Record:
        return measure.record(self._plan.mode, stage.name, sides)


def _model(plan: GpuPlan, directory: Path, bus: EngineProcess, note: Note) -> tuple[GpuPlan, Path]:
    """The checkpoint, made where there is none, and the plan for its shape."""
    model = plan.model or directory / "model"
    if is_checkpoint(model):
        return replace(plan, shape=read_shape(model)), model
    note(f"writing a random Llama of {plan.shape.num_layers} layers")
    bus.ask("make_model", timeout_s=plan.start_s, shape=plan.shape.as_dict(), directory=str(model), dtype=plan.dtype)
    return plan, model


def _run_record(plan: GpuPlan, described: dict[str, Any], capacity: int) -> Record:
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = boot.read_text() if boot.exists() else ""
    return {
        "kind": RUN,
        "format": FORMAT,
        "run": f"{time.time_ns():x}-{os.getpid()}",
        "machine": machine(),
        "machine_id": hashlib.sha256(name.encode()).hexdigest()[:12],
        "versions": described | {name: _version(name, plan) for name in ("vllm", "lmcache", "triton")},
        "sizes": plan.fingerprint(),
        "pairs": plan.pairs,
        "capacity_bytes": capacity,
        "mode": plan.mode,
    }


def _version(package: str, plan: GpuPlan) -> str | None:
    """Of an installed package. vLLM's build for CPUs has a name of its own, and LMCache may have a place of its own."""
    if package == "lmcache" and plan.lmcache_path is not None:
        return next((one.version for one in distributions(name=package, path=[str(plan.lmcache_path)])), None)
    for name in (package, f"{package}-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            return version(name)
    return None


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM end the run as Ctrl-C does: engines are stopped and shared memory is removed."""

    def end(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
