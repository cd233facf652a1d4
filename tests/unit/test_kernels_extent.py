"""Runs the Triton kernels of transfers in Triton's interpreter, in a process of its own, where no GPU is needed."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from test_kernels_triton import PROBE

TESTS = Path(__file__).resolve().parent


@pytest.mark.slow
def test_transfer_kernels_equal_their_references_in_the_interpreter(tmp_path):
    for package in ("torch", "triton"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed: Triton kernels are not checked here")
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    (tmp_path / "probe.py").write_text(PROBE)
    probe = subprocess.run([sys.executable, "probe.py"], cwd=tmp_path, env=env, capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"Triton's interpreter does not work here: {probe.stderr.strip().splitlines()[-1]}")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS / "interpreted_transfer.py")]
    run = subprocess.run(command, cwd=TESTS.parent.parent, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
