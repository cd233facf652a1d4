"""The examples for vLLM, as a user would run them."""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from example_runs import leftovers, run_example

pytestmark = [pytest.mark.slow, pytest.mark.matrix, pytest.mark.timeout(1800)]

RUN_S = 900.0


@pytest.fixture
def pool() -> Iterator[dict[str, str]]:
    """The variable that tells an example which pool to use."""
    name = f"headwater-test-{uuid.uuid4().hex[:12]}"
    yield {"HEADWATER_POOL": f"shm:///{name}?capacity=512MiB&deadline=60"}
    shutil.rmtree(f"/dev/shm/{name}", ignore_errors=True)
    assert not leftovers(name)


def test_one_server(smollm2: Path, pool: dict[str, str]) -> None:
    output = run_example("vllm_one_server.py", str(smollm2), timeout_s=RUN_S, env=pool)
    answers = re.findall(r"^(\d): [\d.]+ s, (\d+) tokens from a cache: (.*)$", output, re.MULTILINE)
    assert [number for number, _, _ in answers] == ["1", "2"]
    assert int(answers[0][1]) == 0
    assert int(answers[1][1]) >= 768
    assert answers[0][2] == answers[1][2]


def test_prefill_and_decode(smollm2: Path, pool: dict[str, str]) -> None:
    output = run_example("vllm_prefill_decode.py", str(smollm2), timeout_s=RUN_S, env=pool)
    there = re.findall(r"^(kv_\w+): (\d+) tokens were there, said", output, re.MULTILINE)
    assert [role for role, _ in there] == ["kv_producer", "kv_consumer"]
    assert int(there[0][1]) == 0
    assert int(there[1][1]) >= 768
