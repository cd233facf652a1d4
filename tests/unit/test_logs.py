"""`--log-format json`: every line that a command writes to stderr is one JSON object, also those of its children."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headwater.logs import MAX_CHARS, JsonFormatter

SRC = Path(__file__).resolve().parents[2] / "src"
FIELDS = {"time", "level", "logger", "process", "pid", "message"}


def run(*command: str, **more: str) -> tuple[int, list[str]]:
    """The exit status and the lines on stderr."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(SRC), os.environ.get("PYTHONPATH")]))}
    for name in ("HEADWATER_LOG_FORMAT", "HEADWATER_API_KEY"):
        env.pop(name, None)
    done = subprocess.run([sys.executable, *command], env=env | more, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stderr.splitlines()


def record(message: str, *args: object, **more: Any) -> logging.LogRecord:
    return logging.LogRecord("headwater.x", logging.WARNING, __file__, 1, message, args, more.get("exc_info"))


def said(made: logging.LogRecord) -> dict[str, Any]:
    line = JsonFormatter("engine").format(made)
    assert "\n" not in line
    assert line.isascii()
    found: dict[str, Any] = json.loads(line)
    return found


def test_a_line_has_what_programs_look_for() -> None:
    found = said(record("%s of %d\n\x1b[31m…", "one", 2))
    assert found.keys() == FIELDS
    assert found["message"] == "one of 2\n\x1b[31m…"
    assert (found["level"], found["logger"], found["process"]) == ("warning", "headwater.x", "engine")
    assert found["pid"] == os.getpid()
    assert found["time"].endswith("Z")
    assert len(found["time"]) == len("2026-01-01T00:00:00.000Z")


def test_an_argument_that_cannot_be_shown_breaks_no_line() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError("half made")

    assert said(record("it is %s", Broken()))["message"] == "it is %s (RuntimeError in its arguments)"
    assert said(record(Broken()))["message"] == "(RuntimeError in its arguments)"  # type: ignore[arg-type]


def test_exceptions_are_text_and_nothing_is_too_long_or_breaks_it() -> None:
    try:
        raise ValueError("bad\nluck")
    except ValueError:
        found = said(record("x", exc_info=sys.exc_info()))
    assert "ValueError: bad\nluck" in found["exception"]
    assert "test_logs.py" in found["exception"]
    assert len(said(record("x" * (2 * MAX_CHARS)))["message"]) == MAX_CHARS
    assert said(record("%d", "no number"))["message"] == "%d ('no number',)"
    assert said(record("\ud800"))["message"] == "\ud800"


CHILD = """
import logging, threading, warnings
from headwater.logs import adopt, note, set_up_logs
set_up_logs("child", text="%(levelname)s child: %(message)s")
logging.getLogger("uvicorn.error").error("from %s", "uvicorn")
logging.getLogger("headwater.x").info("not shown")
note("loading")
note("take care", logging.WARNING)
library = logging.getLogger("library")
library.addHandler(logging.StreamHandler())
library.propagate = False
adopt("library")
library.warning("from a library")
thread = threading.Thread(target=lambda: 1 / 0, name="worker")
thread.start()
thread.join()
warnings.warn("old")
raise RuntimeError("the end")
"""


def test_a_child_process_reads_the_format_from_its_environment() -> None:
    code, lines = run("-c", CHILD, HEADWATER_LOG_FORMAT="json")
    found = [json.loads(line) for line in lines]
    assert code == 1
    assert all(line.keys() >= FIELDS and line["process"] == "child" for line in found)
    assert [line["message"] for line in found[:4]] == ["from uvicorn", "loading", "take care", "from a library"]
    assert found[4]["message"] == "uncaught ZeroDivisionError in worker"
    assert "UserWarning: old" in found[5]["message"]
    assert found[6]["message"] == "uncaught RuntimeError"
    assert "RuntimeError: the end" in found[6]["exception"]
    assert [line["level"] for line in found] == [
        *("error", "info", "warning", "warning", "critical", "warning", "critical")
    ]


@pytest.mark.parametrize(
    ("module", "process"),
    [("headwater.serve.worker", "engine"), ("headwater.engine.rank", "rank"), ("headwater.peers.process", "receiver")],
)
def test_each_child_that_cannot_begin_says_so_in_json(module: str, process: str) -> None:
    pytest.importorskip("msgspec")
    code, lines = run("-m", module, "no descriptor", HEADWATER_LOG_FORMAT="json")
    (found,) = map(json.loads, lines)
    assert code == 1
    assert (found["level"], found["process"]) == ("critical", process)
    assert "Traceback" in found["exception"]


@pytest.mark.parametrize("value", ["", "text", "nonsense"])
def test_for_people_lines_are_as_they_were(value: str) -> None:
    code, lines = run("-c", CHILD, HEADWATER_LOG_FORMAT=value)
    assert code == 1
    assert lines[:4] == ["ERROR child: from uvicorn", "loading", "warning: take care", "from a library"]
    assert lines[-1] == "RuntimeError: the end"


@pytest.mark.parametrize(
    ("command", "exit_code"),
    [
        (("serve", "--model", "/no/such/model", "--no-pool"), 1),
        (("serve", "--dtype", "float7"), 2),
        (("router", "http://127.0.0.1:1", "--host", "0.0.0.0"), 2),
        (("proxy", "--decode", "http://127.0.0.1:1", "--host", "no-such-host.invalid"), 2),
        (("pool", "receive", "memory://", "--listen", "127.0.0.1:0"), 1),
        (("pool", "exporter", "redis://cache"), 1),
        (("pool", "exporter", "--prot", "1"), 2),
        (("serve", "--no-such-option"), 2),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, tuple) else str(value),
)
def test_every_command_that_serves_fails_in_json(command: tuple[str, ...], exit_code: int) -> None:
    pytest.importorskip("uvicorn")
    pytest.importorskip("prometheus_client")
    code, lines = run("-m", "headwater", *command, "--log-format", "json")
    found = [json.loads(line) for line in lines]
    assert code == exit_code
    assert found[-1]["level"] == "error"
    assert not found[-1]["message"].startswith("error")
    assert {line["process"] for line in found} <= {"server", "engine", "router", "proxy", "receiver", "exporter"}
    assert all(line.keys() >= FIELDS for line in found)
    code, plain = run("-m", "headwater", *command)
    assert code == exit_code
    assert plain[-1].lower() == f"error: {found[-1]['message']}".lower()  # Click writes `Error`


def test_an_option_without_its_value_fails_in_json() -> None:
    code, lines = run("-m", "headwater", "pool", "exporter", "--port", HEADWATER_LOG_FORMAT="json")
    (line,) = (json.loads(line) for line in lines)
    assert (code, line["process"], line["level"]) == (2, "exporter", "error")


def test_a_format_that_there_is_not_is_refused() -> None:
    pytest.importorskip("prometheus_client")
    code, lines = run("-m", "headwater", "pool", "exporter", "--log-format", "xml")
    assert code == 2
    assert "'xml' is not one of 'text', 'json'" in lines[-1]
    code, lines = run("-m", "headwater", "pool", "exporter", HEADWATER_LOG_FORMAT="xml")
    assert code == 2
