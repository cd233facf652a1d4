"""What is compared must be comparable: turns that favour nobody, and quiet around what is measured."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from headwater.bench import vllm_fair
from headwater.bench.measure import take_turns
from headwater.errors import EngineError

BUSY_UNTIL_A_LINE_COMES = """
import sys, threading
done = threading.Event()
def busy():
    while not done.is_set():
        pass
thread = threading.Thread(target=busy)
thread.start()
print("busy", flush=True)
sys.stdin.readline()
done.set()
thread.join()
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


def test_nobody_is_measured_while_another_engine_is_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_fair, "QUIET_S", 1.0)
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY_UNTIL_A_LINE_COMES],
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
        assert process.stdout.readline() == "busy\n"
        with pytest.raises(EngineError, match="did not come to rest"):
            vllm_fair.wait_until_quiet([engine])
        process.stdin.write("\n")
        monkeypatch.setattr(vllm_fair, "QUIET_S", 30.0)
        vllm_fair.wait_until_quiet([engine])
        process.stdin.write("\n")


def test_every_engine_is_given_the_same_cores_whatever_its_connector() -> None:
    cores = vllm_fair.same_cores()["VLLM_CPU_OMP_THREADS_BIND"]
    assert {int(core) for core in cores.split(",")} == os.sched_getaffinity(0)
