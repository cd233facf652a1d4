"""The page at `/` of `headwater serve`, in a real browser: a save and a hit are seen as they happen."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("msgspec")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")
pytest.importorskip("websockets")

import httpx
from fake_server import Server as FakeServer
from roles_process import Serve, cached_of, small_model

from browser import Page, browser
from support import temporary_url, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CHUNK = 256
WINDOWS = [(1440, 900), (1024, 768), (390, 844)]
LONG = {"model": "SmolLM2-135M-Instruct.Q4_1.gguf", "tenant": "b2312c1b82f2fba6", "role": "scheduler, rank 0"}
LONG |= {"loaded_bytes": 123 << 30, "saved_bytes": 123 << 30, "num_tokens": 123456789, "num_bytes": 123 << 30}
ALL_WORDS = [f"t{3 + i * 7 % 500}" for i in range(5 * CHUNK)]


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with browser() as opened:
        yield opened


@pytest.fixture
def tab(page: Page) -> Page:
    """The same browser, with nothing to complain about yet."""
    page.open("data:text/html,<title>empty</title>")
    page.complaints, page.asked, page.refused = [], [], []
    return page


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = small_model(tmp_path_factory.mktemp("model"))
    settings = directory / "tokenizer_config.json"
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": template}))
    return directory


@pytest.fixture
def servers(model: Path, tmp_path: Path) -> Iterator[tuple[Serve, Serve]]:
    """Two on one pool."""
    with ExitStack() as stack:
        pool = stack.enter_context(temporary_url("shm", tmp_path, "capacity=64MiB"))
        pair = Serve(model, pool, "--served-model-name", "tiny"), Serve(model, pool, "--served-model-name", "tiny")
        for server in pair:
            stack.callback(server.close)
        for server in pair:
            server.wait_ready()
        yield pair


def chat(server: Serve, num_tokens: int) -> int:
    """Send a chat of so many tokens; how many of them the server did not have to compute."""
    body = {"messages": [{"role": "user", "content": " ".join(ALL_WORDS[:num_tokens])}], "max_tokens": 4}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).raise_for_status()
    return cached_of(reply.json())


def entries(tab: Page, kind: str) -> list[int]:
    """Tokens of the entries of one kind, the newest first."""
    found: list[str] = tab.run(
        f"[...document.querySelectorAll('#activity [data-kind={kind}]')].map((e) => e.dataset.tokens)"
    )
    return [int(tokens) for tokens in found]


def is_wider_than_the_window(tab: Page) -> bool:
    return bool(tab.run("document.documentElement.scrollWidth > innerWidth"))


def test_a_save_and_a_hit_are_seen_as_they_happen(tab: Page, servers: tuple[Serve, Serve], tmp_path: Path) -> None:
    first, second = servers
    tab.open(f"{first.url}/")
    tab.wait_for("document.querySelector('#status').textContent === 'Live'")
    tab.wait_for("document.querySelector('#attached').innerText.startsWith('2')", "both servers are attached")
    assert tab.text("#model") == "tiny"
    assert entries(tab, "saved") == entries(tab, "hit") == []
    assert "Nothing is stored yet" in tab.text("#prefixes")

    assert chat(first, 3 * CHUNK) == 0
    tab.wait_for("document.querySelector('#activity [data-kind=saved]')", "a save")
    wait_until(lambda: sum(entries(tab, "saved")) >= 3 * CHUNK, what="all of the prompt is saved")
    tab.wait_for("document.querySelectorAll('#prefixes tbody td.key').length === 1", "a prefix is listed")
    row = "document.querySelector('#prefixes tbody tr').innerText.split('\\t')"
    assert tab.run(row)[3] == "0"  # hits
    assert tab.run("!document.querySelector('#fillnote').textContent.startsWith('0 B')")
    assert entries(tab, "hit") == []

    num_cached = chat(second, 3 * CHUNK)
    assert num_cached >= 3 * CHUNK - 1
    tab.wait_for("document.querySelector('#activity [data-kind=hit]')", "a hit")
    assert entries(tab, "hit")[0] - num_cached in (0, 1)  # the last token of a prompt is always computed
    tab.wait_for(f"{row}[3] === '1'", "the hit is counted")
    tab.wait_for("document.querySelector('#outnote').textContent.endsWith('in 1 load')", "the load is counted")
    tab.wait_for("/^[1-9]/.test(document.querySelector('#rate').textContent)", "a hit rate")
    tab.wait_for("document.querySelector('#rate-chart .line')", "its chart")
    assert re.fullmatch("[0-9a-f]{8}", tab.run(row)[0])
    assert tab.text("#activity .hit .key") in tab.run(
        "[...document.querySelectorAll('#activity .saved .key')].map((e) => e.innerText)"
    )

    for (width, height), scheme in product(WINDOWS, ["light", "dark"]):
        tab.look_like(width, height, scheme)
        assert not is_wider_than_the_window(tab), width
        tab.photograph(tmp_path / f"{width}-{scheme}.png", whole=True)
        assert (tmp_path / f"{width}-{scheme}.png").stat().st_size > 10_000
    # Names as long as real ones, at the width of a small laptop: no table has to be scrolled sideways.
    tab.look_like(1280, 800, "light")
    tab.run(
        "drawTables({...state.look, holders: state.look.holders.map((row) => ({...row, ...LONG})),"
        " processes: state.look.processes.map((row) => ({...row, ...LONG}))})".replace("LONG", json.dumps(LONG))
    )
    wide = (
        "[...document.querySelectorAll('.scroll')].filter((e) => e.scrollWidth > e.clientWidth).map((e) => e.innerText)"
    )
    assert tab.run(wide) == []
    # Opened after all requests: the tile has their sum, and the chart says why it is empty.
    tab.open(f"{second.url}/")
    tab.wait_for("document.querySelector('#ratenote').textContent.includes('tokens since start')", "the sums")
    tab.wait_for("document.querySelector('#rate-chart .empty')", "an empty chart")
    assert (
        tab.run("document.querySelector('#rate-chart .empty').textContent") == "No request since this page was opened"
    )
    tab.open(f"{first.url}/")
    tab.wait_for("document.querySelector('#status').textContent === 'Live'")
    colours = []
    for scheme in ("light", "dark"):
        tab.look_like(1024, 768, scheme)
        colours.append(tab.run("getComputedStyle(document.body).backgroundColor"))
    assert len(set(colours)) == 2

    assert tab.complaints == []
    assert {address.split("?")[0] for address in tab.asked if not address.startswith("data:")} == {
        f"{server.url}/{path}" for server in servers for path in ("", "watch.css", "watch.js", "watch.json")
    }
    second.close()
    tab.wait_for("document.querySelector('#activity [data-kind=left]')", "a server that left")
    first.process.terminate()
    tab.wait_for("document.querySelector('#status').textContent === 'No answer'", "a server that is gone")


def test_the_page_asks_for_the_key_and_keeps_it_to_itself(tab: Page, start: Callable[..., FakeServer]) -> None:
    server = start(api_key="sesame")
    tab.open(f"{server.url}/")
    tab.wait_for("!document.querySelector('#ask').hidden", "the form")
    assert tab.refused
    assert {status for status, _ in tab.refused} == {401}
    give = "document.querySelector('#key').value = {!r}; document.querySelector('#ask button').click()"
    tab.run(give.format("wrong"))
    tab.wait_for("!document.querySelector('#refused').hidden", "a refusal")
    tab.run(give.format("sesame"))
    tab.wait_for("document.querySelector('#status').textContent === 'Live'")
    assert tab.text("#notice h2") == "This server runs without a pool"
    tab.open(f"{server.url}/")
    tab.wait_for("document.querySelector('#status').textContent === 'Live'", "the key is known to the tab")
    tab.run("document.querySelector('#forget').click()")
    assert tab.run("sessionStorage.length") == 0
    assert not any("sesame" in address for address in tab.asked)


@pytest.fixture
def elsewhere() -> Iterator[str]:
    """The address of another page on this machine, which forbids itself nothing."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>elsewhere</title><link rel=icon href=data:,>")

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{made.server_port}/"
        made.shutdown()
        thread.join()


def test_another_page_learns_nothing(tab: Page, start: Callable[..., FakeServer], elsewhere: str) -> None:
    """It can send requests to this machine; it must neither read an answer nor show the page in a frame."""
    server = start()
    tab.open(elsewhere)
    for options in ("{}", "{mode: 'no-cors'}"):
        read = f"fetch('{server.url}/watch.json', {options}).then((r) => r.text(), () => 'refused')"
        assert tab.run(read) in ("", "refused")
    frame = f"Object.assign(document.createElement('iframe'), {{src: '{server.url}/', onload: done}})"
    tab.run(f"new Promise((done) => document.body.append({frame})).then(() => 1)")
    counted = server.http.get("/metrics").text
    assert 'path="/watch.json",status="403"} 2.0' in counted
    assert 'path="/",status="200"} 1.0' in counted
    assert 'path="/watch.js"' not in counted  # what was framed was not the page
