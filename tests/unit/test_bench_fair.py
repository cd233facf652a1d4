"""What is compared must be comparable: turns that favour nobody, and quiet around what is measured."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from headwater.bench import vllm_fair
from headwater.bench.measure import take_turns
from headwater.errors import EngineError

BUSY_FOR_A_WHILE = """
import sys, threading, time
def busy():
    while time.process_time() < 0.5:
        pass
thread = threading.Thread(target=busy)
thread.start()
thread.join()
print("done", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("names", ["ab", "abc"])
def test_everybody_comes_first_last_and_in_between_equally_often(names: str) -> None:
    called: list[str] = []

    def turn(name: str) -> float:
        called.append(name)
        return 0.0

    size = len(names)
    take_turns({name: lambda name=name: turn(name) for name in names}, 2 * size)  # type: ignore[misc]
    rounds = ["".join(called[i : i + size]) for i in range(size, len(called), size)]
    for place in range(size):
        assert Counter(one[place] for one in rounds) == dict.fromkeys(names, 2), rounds


def test_the_time_of_an_engine_is_that_of_its_whole_session_and_of_nobody_else() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY_FOR_A_WHILE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        start_new_session=True,
    )
    engine: Any = SimpleNamespace(pid=process.pid)
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "done\n"
        assert 0.4 < vllm_fair._cpu_seconds([engine]) < 5
        assert vllm_fair._cpu_seconds([]) == 0
        process.stdin.write("\n")


def test_nobody_is_measured_before_all_engines_have_come_to_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [0.0, 0.1, 0.2, 0.21, 0.22, 0.32, 0.33, 0.33, 0.34, 0.44]
    monkeypatch.setattr(vllm_fair, "_cpu_seconds", lambda engines: left.pop(0))
    monkeypatch.setattr(vllm_fair.time, "sleep", lambda seconds: None)
    vllm_fair.wait_until_quiet([])
    assert left == [0.44], "three quiet looks in a row are needed, and enough"
    busy = count()
    monkeypatch.setattr(vllm_fair, "_cpu_seconds", lambda engines: next(busy))
    monkeypatch.setattr(vllm_fair, "QUIET_S", 0.05)
    with pytest.raises(EngineError, match="did not come to rest"):
        vllm_fair.wait_until_quiet([])


def test_every_engine_is_given_the_same_cores_whatever_its_connector() -> None:
    cores = vllm_fair.same_cores()["VLLM_CPU_OMP_THREADS_BIND"]
    assert {int(core) for core in cores.split(",")} == os.sched_getaffinity(0)
