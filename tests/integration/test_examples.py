"""Every program in examples/ does what it says, as a user would run it, and leaves nothing behind.

Those for vLLM are run in tests/with_vllm; here only what they choose for a machine is looked at.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import headwater as hw

from example_runs import EXAMPLES, HELPERS, ROOT, leftovers, run_example
from support import WAIT_S, wait_until

pytestmark = pytest.mark.slow

RUN_S = 600.0
MARK = "headwater-example-"
VLLM = ("vllm_one_server.py", "vllm_prefill_decode.py")


@pytest.fixture
def pool() -> Iterator[str]:
    """A pool that outlives a program, as one that a user names."""
    name = f"hwtest-{uuid.uuid4().hex[:12]}"
    yield f"shm:///{name}?capacity=128MiB"
    shutil.rmtree(f"/dev/shm/{name}", ignore_errors=True)


@pytest.fixture
def _nothing_left() -> Iterator[None]:
    before = set(leftovers(MARK))
    yield
    assert set(leftovers(MARK)) <= before


def numbers(pattern: str, output: str) -> list[tuple[int, ...]]:
    """The groups of every match, as numbers."""
    return [tuple(int(group) for group in match.groups()) for match in re.finditer(pattern, output)]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name.removesuffix('.py')}", EXAMPLES / name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


# ---- the library --------------------------------------------------------------------------------------------------


def test_library_numpy() -> None:
    output = run_example("library_numpy.py", "--tokens", "600", timeout_s=RUN_S)
    assert "prompt: 600 tokens in 3 chunks, 9,830,400 bytes" in output
    assert "writer 0 of 2: ['OK', 'OK', 'OK'], 0 tokens can be found" in output
    assert "writer 1 of 2: ['OK', 'OK', 'OK'], 600 tokens can be found" in output
    assert re.findall(r"event: (\w+) [0-9a-f]{8}, (\d+) tokens", output) == [
        ("stored", "256"),
        ("stored", "256"),
        ("stored", "88"),
    ]
    assert "another tenant finds 0 tokens" in output
    assert "a prompt of 700 tokens with the same beginning finds 600" in output
    assert "8 readers: 9,830,400 bytes, 0 wrong" in output
    assert "cleared 3 chunks of one tenant; 0 tokens can be found" in output


def test_library_torch() -> None:
    pytest.importorskip("torch")
    output = run_example("library_torch.py", "--tokens", "600", timeout_s=RUN_S)
    num_bytes = f"{600 * 8 * 4 * 64 * 2 * 2:,}"
    assert f"saved  {num_bytes} bytes" in output
    assert f"loaded {num_bytes} bytes into other blocks" in output
    assert "KV of 600 tokens is in place, equal in all 8 layers" in output


def test_own_connector(pool: str) -> None:
    """The second engine hits what the first one saved, and in a second process so does the first one."""
    pytest.importorskip("torch")
    found = r"(first|second) engine, request (\d): (\d+) of (\d+) prompt tokens from the pool"
    for first_hit in (0, 599):
        output = run_example("own_connector.py", "--tokens", "600", "--pool", pool, timeout_s=RUN_S)
        assert re.findall(found, output) == [
            ("first", "0", str(first_hit), "600"),
            ("first", "1", str(first_hit), "600"),
            ("second", "0", "599", "600"),
            ("second", "1", "599", "600"),
        ]
        assert "same answers: yes" in output


def test_a_connector_of_ones_own_computes_what_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool is emptied between the lookup and the load, and in another engine a step fails: no answer changes."""
    torch = pytest.importorskip("torch")
    example = load("own_connector.py")
    prompts = [torch.randint(example.VOCAB, (600,)).tolist() for _ in range(2)]
    model = example.Model()

    def answers(pool: hw.Pool) -> tuple[list[list[int]], list[int]]:
        engine = example.ToyEngine(model, pool, block_size=24)
        try:
            requests = engine.generate(prompts, max_tokens=4)
        finally:
            engine.connector.close()
        return [request.tokens for request in requests], [request.num_cached for request in requests]

    with hw.open_pool("memory://?capacity=64MiB") as pool:
        expected, found = answers(pool)
        assert found == [0, 0]
        assert answers(pool) == (expected, [599, 599])
        start_load = example.Connector.start_load
        with monkeypatch.context() as patch:
            patch.setattr(example.Connector, "start_load", lambda *args: (pool.clear(), start_load(*args)))
            assert answers(pool) == (expected, [0, 0])
        assert answers(pool) == (expected, [599, 599])  # what was computed again was saved again
        pool.clear()
        with monkeypatch.context() as patch:
            patch.setattr(example.Connector, "after_layer", lambda self, layer: 1 // (2 - layer))
            with pytest.raises(ZeroDivisionError):
                answers(pool)
        assert answers(pool) == (expected, [0, 0])  # nothing of the step that failed was stored


def test_the_walk_through_quotes_the_example() -> None:
    """Every line of Python on the page that shows the connector is a line of the program."""
    page = (ROOT / "docs" / "own-connector.md").read_text(encoding="utf-8")
    program = (EXAMPLES / "own_connector.py").read_text(encoding="utf-8")
    lines = {line.partition("  #")[0].strip() for line in program.splitlines()}
    quoted = page.partition("### (1)")[2].partition("### (5)")[0]
    blocks = re.findall(r"```python\n(.*?)```", quoted, re.DOTALL)
    assert len(blocks) == 3
    assert [line for block in blocks for line in block.splitlines() if line.strip() not in lines] == []
    for number in range(1, 7):
        assert f"### ({number})" in page
        assert f"# ({number})" in program


# ---- servers ------------------------------------------------------------------------------------------------------


def needs_serve() -> None:
    for package in ("torch", "transformers", "msgspec", "starlette", "uvicorn"):
        pytest.importorskip(package)


@pytest.mark.usefixtures("_nothing_left")
def test_chat_two_servers() -> None:
    needs_serve()
    options = ("--model", "random", "--days", "16", "--turns", "3", "--max-tokens", "6")
    output = run_example("chat_two_servers.py", *options, timeout_s=RUN_S)
    turns = numbers(r"turn (\d) on server (\d): (\d+) of (\d+) tokens found", output)
    assert [(turn, server) for turn, server, *_ in turns] == [(1, 1), (2, 2), (3, 1)]
    assert turns[0][2] < 256  # nobody has seen the document before
    for _, _, found, num_tokens in turns[1:]:
        assert 256 <= found < num_tokens
    total, computed = sum(turn[3] for turn in turns[1:]), sum(turn[3] - turn[2] for turn in turns[1:])
    assert f"after the first turn the servers computed {computed} of {total} prompt tokens" in output


@pytest.mark.usefixtures("_nothing_left")
def test_prefill_decode() -> None:
    needs_serve()
    options = ("--model", "random", "--days", "36", "--max-tokens", "6")
    output = run_example("prefill_decode.py", *options, timeout_s=RUN_S)
    asked = numbers(r"(?:directly|proxy|same): (\d+) of (\d+) prompt tokens computed there", output)
    (alone, prompt), (through, _), (again, _) = asked
    assert alone == prompt > 1024
    assert through < 256
    assert again < 256  # prefill computed it, though the proxy was asked
    assert "same answer: yes" in output


def test_an_example_that_is_stopped_takes_its_servers_and_its_pool_with_it() -> None:
    needs_serve()
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(EXAMPLES / "chat_two_servers.py"), "--model", "random"]
    before = set(leftovers(MARK))
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            wait_until(lambda: set(leftovers(MARK)) - before, what="a server that loads")
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_S) == 143
            assert set(leftovers(MARK)) <= before
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


# ---- all of them --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VLLM)
@pytest.mark.parametrize("is_cpu", [True, False], ids=["cpu", "gpu"])
def test_vllm_runs_as_it_likes_unless_on_a_cpu(name: str, is_cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    platforms = ModuleType("vllm.platforms")
    platforms.current_platform = SimpleNamespace(is_cpu=lambda: is_cpu)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    expected = {"dtype": "float32", "enforce_eager": True} if is_cpu else {}
    assert load(name).machine_settings() == expected
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    assert text.count("float32") == 2, "a data type is chosen elsewhere than for CPUs"


def test_every_example_is_run_and_described() -> None:
    """A program that no test runs rots. The tests name it as the first argument of `run_example`."""
    programs = {path.name for path in EXAMPLES.glob("*.py")} - HELPERS
    here = Path(__file__)
    tests = here.read_text(encoding="utf-8") + (here.parents[1] / "with_vllm" / here.name).read_text(encoding="utf-8")
    run = set(re.findall(r'run_example\(\s*"(\w+\.py)"', tests))
    assert run == programs
    described = set(re.findall(r"^\| `(\w+\.py)", (EXAMPLES / "README.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert described == programs
