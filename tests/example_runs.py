"""Examples run as a user runs them: one program as a process, with what it printed and what it left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
HELPERS = {"servers.py"}
"""Files of examples/ that are no programs."""


def run_example(name: str, *options: str, timeout_s: float, env: dict[str, str] | None = None) -> str:
    """What the example prints. Fails, with all of its output, where it fails or takes too long; nothing of it is left
    running then."""
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLES / name), *options],
        env=os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"} | (env or {}),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that it can be ended with all that it started
    )
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        raise AssertionError(f"{name} took longer than {timeout_s:g} s:\n{output}\n{errors}") from None
    assert process.returncode == 0, f"{name} ended with {process.returncode}:\n{output}\n{errors}"
    print(output)
    return output


def leftovers(mark: str) -> list[str]:
    """Shared memory, and processes, with this in their name."""
    found = [f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if mark in name]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
            except OSError:
                continue  # it has ended meanwhile
            if mark in command:
                found.append(f"process {entry.name}: {command}")
    return found
