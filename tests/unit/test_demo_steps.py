"""What a demo says while it works, and how much it asks of a slow machine."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.cli.demo import steps as steps_module
from headwater.cli.demo.pace import (
    ANSWER_TOKENS,
    END_S,
    LEAST_ANSWER_TOKENS,
    LEAST_TOKENS,
    LIMIT_S,
    MOST_TOKENS,
    Pace,
)
from headwater.cli.demo.steps import Steps

SRC = str(Path(__file__).resolve().parents[2] / "src")
WAIT_S = 60.0


def wait_for(out: io.StringIO, pattern: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not re.search(pattern, out.getvalue()):
        assert time.monotonic() < deadline, f"waited in vain for {pattern!r} in {out.getvalue()!r}"
        time.sleep(0.005)


# ---- steps ------------------------------------------------------------------------------------------------------
def test_plain_lines_have_times() -> None:
    out = io.StringIO()
    with Steps(out, live=False) as steps:
        steps("one")
        steps("two")
    assert re.fullmatch(r"\[ +\d+\.\d s\] one\n\[ +\d+\.\d s\] two\n", out.getvalue())


def test_a_long_step_says_that_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_module, "_REDRAW_S", 0.01)
    monkeypatch.setattr(steps_module, "_REMIND_S", 0.05)
    out = io.StringIO()
    with Steps(out, live=False) as steps:
        steps("long")
        wait_for(out, r"still at it\n.*still at it\n")


def test_a_terminal_sees_the_seconds_pass_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_module, "_REDRAW_S", 0.01)
    out = io.StringIO()
    with Steps(out, live=True) as steps:
        steps("one")
        wait_for(out, r"\r\x1b\[K\[ +\d+\.\d s\] one, 0 s\r")
        wait_for(out, r"one, 1 s")
    assert out.getvalue().count("\n") == 1
    assert re.search(r"\r\x1b\[K\[ +\d+\.\d s\] one: \d\.\d s\n\r\x1b\[K$", out.getvalue())


def test_a_line_is_never_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    out = io.StringIO()

    def fail_in_a_step() -> None:
        with Steps(out, live=True) as steps:
            steps("x" * 200)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_in_a_step()
    lines = [line for line in out.getvalue().split("\r\x1b[K") if line]
    assert lines
    assert max(map(len, lines)) < 40
    assert "\n" not in out.getvalue(), "a step that failed is not reported as done"


def test_closing_twice_and_a_stream_that_is_gone_do_no_harm() -> None:
    out = io.StringIO()
    steps = Steps(out, live=True)
    out.close()
    steps("nobody sees this")
    steps.close()
    steps.close()


SCRIPT = """
import time
from headwater.cli.demo.steps import Steps
with Steps() as steps:
    steps("first")
    time.sleep(0.5)
"""


def test_a_real_terminal_is_told_at_once() -> None:
    """Before anything slow is imported: the first line is there while the first step runs."""
    ours, theirs = pty.openpty()
    env = os.environ | {"PYTHONPATH": SRC, "COLUMNS": "80"}
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stderr=theirs, env=env) as process:
        os.close(theirs)
        seen = b""
        while chunk := _read(ours):
            seen += chunk
        assert process.wait(WAIT_S) == 0
    os.close(ours)
    assert re.search(rb"\[ +0\.0 s\] first, 0 s", seen)
    assert re.search(rb"first: 0\.\d s", seen)


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 4096)
    except OSError:  # what Linux answers when the other side of a terminal is closed
        return b""


# ---- pace -------------------------------------------------------------------------------------------------------
SPEEDS = st.floats(0.1, 1e6)


@given(SPEEDS, SPEEDS, st.floats(0, 300), st.integers(1, 4), st.integers(1, 20), st.integers(1, 8000))
def test_what_is_planned_is_within_bounds(
    prefill: float, decode: float, elapsed_s: float, documents: int, answers: int, most: int
) -> None:
    plan = Pace(prefill, decode).plan(elapsed_s, documents=documents, answers=answers, most=most)
    assert min(LEAST_TOKENS, most) <= plan.document_tokens <= min(MOST_TOKENS, most)
    assert LEAST_ANSWER_TOKENS <= plan.answer_tokens <= ANSWER_TOKENS


@given(SPEEDS, SPEEDS, st.floats(0, 100), st.integers(1, 4), st.integers(1, 20))
def test_what_is_more_than_the_least_ends_in_time(
    prefill: float, decode: float, elapsed_s: float, documents: int, answers: int
) -> None:
    plan = Pace(prefill, decode).plan(elapsed_s, documents=documents, answers=answers)
    left_s = LIMIT_S - END_S - elapsed_s
    assert plan.document_s is not None
    if plan.document_tokens > LEAST_TOKENS:
        assert documents * plan.document_s <= left_s / 2 * 1.001
    if plan.answer_tokens > LEAST_ANSWER_TOKENS:
        assert answers * plan.answer_tokens / decode <= left_s / 4 * 1.001


def test_a_quick_machine_gets_the_whole_document_and_a_slow_one_less() -> None:
    quick, slow = Pace(1000.0, 60.0), Pace(100.0, 3.0)
    assert quick.plan(15.0, documents=1, answers=2).document_tokens == MOST_TOKENS
    assert slow.plan(48.0, documents=1, answers=2).document_tokens == 1200
    assert slow.plan(48.0, documents=1, answers=2).soon == " (about 19 s)"
