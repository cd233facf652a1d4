"""Code blocks and commands of the documentation that need a server, run against real ones with a small model."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.errors import ModelError
from headwater.models.catalog import find_in_catalog
from headwater.stores.embedded import destroy
from headwater.stores.url import parse_url

from docs_commands import commands_of, head_of, words_of
from docs_pages import ROOT, Page, pages
from docs_python import run_python
from servers import free_port, redis_server
from support import WAIT_S, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ENGINE = ["--device", "cpu", "--num-pages", "256", "--max-model-len", "2048", "--num-threads", "1"]
ASKS = re.compile(r"http://(?:127\.0\.0\.1|localhost):8000")
WITH_SERVER = re.compile(r"127\.0\.0\.1:8000|\bclient\.chat\b")
ONE_MACHINE = "## On one machine\n"


@pytest.fixture(autouse=True, scope="module")
def model() -> None:
    try:
        find_in_catalog("smollm2")
    except ModelError as error:
        pytest.skip(str(error))


@contextlib.contextmanager
def running(words: list[str], ready: str) -> Iterator[str]:
    """A process of ours, from the line that says it is ready, which is yielded, until the end of the block."""
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "headwater", *words]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        said = []
        try:
            for line in process.stdout:
                said.append(line)
                if re.search(ready, line):
                    yield line
                    break
            else:
                raise AssertionError(f"{' '.join(words)} ended: {''.join(said)}")
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(WAIT_S)
            finally:
                process.kill()


@pytest.fixture(scope="module")
def server(model: None) -> Iterator[str]:
    pool = f"shm:///headwater-docs-{secrets.token_hex(6)}?capacity=256MiB"
    with running(["serve", "--port", "0", "--pool", pool, *ENGINE], r"ready\s+http") as line:
        found = re.search(r"http://\S+(?=/v1)", line)
        assert found is not None
        yield found[0]
    destroy(parse_url(pool))


def asking(page: Page) -> list[str]:
    """The page's `curl` commands for the server that the page has started."""
    lines = [line for block in page.blocks if not block.not_run for line in commands_of(block)]
    return [line for line in lines if head_of(line) == "curl" and ASKS.search(line) and "/v1/" in line]


@pytest.mark.parametrize("name", [page.name for page in pages() if asking(page)])
def test_curl_commands_are_answered(name: str, server: str) -> None:
    if shutil.which("curl") is None:
        pytest.skip("no curl on the PATH")
    for line in asking(Page(ROOT / name)):
        words = words_of(ASKS.sub(server, line))
        done = subprocess.run([*words, "--fail-with-body"], capture_output=True, text=True, timeout=WAIT_S)
        assert done.returncode == 0, f"{name}: {line}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize(
    "name", [p.name for p in pages() if any(WITH_SERVER.search(b.text) for b in p.blocks if b.language == "python")]
)
def test_python_blocks_that_ask_a_server_run(name: str, server: str, tmp_path: Path) -> None:
    page = Page(ROOT / name)
    blocks = [b for b in page.blocks if b.language == "python" and not b.not_run and WITH_SERVER.search(b.text)]
    ran = run_python(blocks, "shm:///headwater", tmp_path, replaced={"http://127.0.0.1:8000": server})
    assert ran.returncode == 0, (
        f"{name}: {ran.error}\n(names that the page takes for granted: SETUP in tests/docs_python.py)"
    )


def test_four_hosts_on_one_machine(tmp_path: Path) -> None:
    """The commands of four-hosts.md, with ports and pools of the test's own: the second server, and the one that has a
    peer instead of Redis, find what the first one computed."""
    text = (ROOT / "docs/four-hosts.md").read_text()
    page = Page(ROOT / "docs/four-hosts.md", text[text.index(ONE_MACHINE) :])
    lines = [line for block in page.blocks for line in commands_of(block)]
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(redis_server())
        places = {"6399": str(redis.port), **{port: str(free_port()) for port in ("8001", "8002", "8003", "7701")}}
        for host in "abc":
            places[f"shm:///host-{host}"] = f"shm:///headwater-docs-{secrets.token_hex(6)}"
            stack.callback(destroy, parse_url(places[f"shm:///host-{host}"]))
        answers: list[dict[str, int]] = []
        for line in lines:
            for theirs, ours in places.items():
                line = line.replace(theirs, ours)
            match words_of(line)[:3]:
                case ["redis-server", *_] | ["headwater", "pool", "clear"]:
                    continue  # started above; cleared below
                case ["headwater", "serve", _]:
                    stack.enter_context(running([*words_of(line)[1:], *ENGINE], r"ready\s+http"))
                case ["headwater", "pool", "receive"]:
                    stack.enter_context(running(words_of(line)[1:], r"listening on"))
                case _:
                    printed = _run(line, tmp_path)
                    if "/v1/chat" in line:
                        answers.append(_tokens(printed))
                        if len(answers) == 1:
                            _wait_copied(places["8001"], redis.port, -(-answers[0]["prompt_tokens"] // 256))
                    elif "/metrics" in line:
                        fetched = re.findall(r'tier_fetched_total\{tier="redis[^"]*"\} ([\d.]+)', printed)
                        assert [count for count in fetched if float(count) > 0], f"nothing came from Redis: {printed}"
    assert [answer["cached_tokens"] for answer in answers] == [0, *[answers[0]["prompt_tokens"] - 1] * 2]


def _run(line: str, folder: Path) -> str:
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", line], cwd=folder, env=env, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout


def _tokens(answer: str) -> dict[str, int]:
    usage = json.loads(answer)["usage"]
    return {"prompt_tokens": usage["prompt_tokens"], **usage["prompt_tokens_details"]}


def _wait_copied(port: str, redis_port: int, num_chunks: int) -> None:
    """Until the first server has copied the prompt to Redis; a reader waits a second."""

    def copied() -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_S) as page:
            found = re.search(
                rf'tier_stored_total{{tier="redis://127.0.0.1:{redis_port}/0"}} ([\d.]+)', page.read().decode()
            )
        return found is not None and float(found[1]) >= num_chunks

    wait_until(copied, what="the prompt's chunks are in Redis")
