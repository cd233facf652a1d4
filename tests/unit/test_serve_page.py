"""The files and the data of the page that a server shows: who gets them, and what a browser is told about them."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec")
pytest.importorskip("starlette")

from headwater.kv.topology import whole_shard
from headwater.pool import open_pool
from headwater.pool.tenants import tenant_tag
from headwater.serve.app import AppConfig, create_app
from headwater.serve.messages import Stats
from headwater.serve.watching import PAGE_FILES, Watching
from serve_rig import Rig, with_rig

from support import gqa, identity, local_tiles, temporary_url

SPEC = gqa(layers=2, heads=2, dim=8)
PAGE = files("headwater.serve").joinpath("page")


class Reply:
    """What an application answered."""

    def __init__(self) -> None:
        self.status, self.headers, self.body = 0, dict[str, str](), b""

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.body += message.get("body", b"")


async def get(app: Any, path: str, query: str = "", method: str = "GET", **headers: str) -> Reply:
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": method, "path": path, "headers": named, "query_string": query.encode()}

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    reply = Reply()
    await app(scope | {"root_path": ""}, receive, reply)
    return reply


def app_of(rig: Rig, api_key: str | None = None, watching: Watching | None = None) -> Any:
    config = AppConfig(
        served_model_name="m",
        host="127.0.0.1",
        api_key=api_key,
        max_body_bytes=1 << 20,
        max_total_body_bytes=1 << 20,
        engine_timeout_s=60,
    )
    return create_app(rig.generator, config, watching=watching)


def test_the_files_need_no_key_and_hold_no_data() -> None:
    async def test(rig: Rig) -> None:
        app = app_of(rig, api_key="sesame")
        for path, (name, kind) in PAGE_FILES.items():
            reply = await get(app, path)
            assert (reply.status, reply.headers["content-type"]) == (200, kind)
            assert reply.body == PAGE.joinpath(name).read_bytes()
            policy = reply.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self';")
            assert "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy
            assert reply.headers["x-frame-options"] == "DENY"
            assert reply.headers["x-content-type-options"] == "nosniff"
            assert (await get(app, path, method="HEAD")).status == 200
        for path in ("/watch.json", "/metrics", "/v1/models", "/watch.html", "/index.html", "//", "/page/watch.js"):
            assert (await get(app, path)).status == 401
            assert (await get(app, path, authorization="Bearer wrong")).status == 401
        reply = await get(app, "/watch.json", authorization="Bearer sesame")
        assert (reply.status, reply.headers["cache-control"]) == (200, "no-store")
        assert json.loads(reply.body)["look"]["pool"]["state"] == "none"

    with_rig(test)


def test_without_a_key_only_pages_of_the_server_get_data() -> None:
    async def test(rig: Rig) -> None:
        app = app_of(rig)
        local = {"host": "127.0.0.1:8000"}
        assert (await get(app, "/watch.json", **local)).status == 200
        assert (await get(app, "/watch.json", **local, sec_fetch_site="same-origin")).status == 200
        for site in ("cross-site", "same-site", "anything"):
            assert (await get(app, "/watch.json", **local, sec_fetch_site=site)).status == 403
        for path in ("/", "/watch.json", "/watch.js"):
            assert (await get(app, path, host="evil.example")).status == 403
            assert (await get(app, path, **local, origin="https://evil.example")).status == 403

    with_rig(test)


def test_the_requests_are_counted_by_path() -> None:
    async def test(rig: Rig) -> None:
        for path in ("/", "/watch.css", "/watch.json", "/watch.png"):
            await get(rig.app, path, host="localhost")
        page = rig.generator.metrics.render("")[0].decode()
        counted = dict(re.findall(r'headwater_http_requests_total{path="([^"]+)",status="(\d+)"} 1.0', page))
        assert counted == {"/": "200", "/watch.css": "200", "/watch.json": "200", "other": "404"}

    with_rig(test)


def test_history_is_given_once_and_garbage_is_no_number() -> None:
    async def test(rig: Rig) -> None:
        watching = Watching(None, "m", Stats)
        app = app_of(rig, watching=watching)
        first = json.loads((await get(app, "/watch.json", host="localhost")).body)
        assert [point["number"] for point in first["points"]] == [1]
        session = f"session={first['session']}"
        again = json.loads((await get(app, "/watch.json", f"{session}&since=1", host="localhost")).body)
        assert again["points"] == []
        assert again["session"] == first["session"]
        for query in ("session=other&since=1", f"{session}&since=-1", f"{session}&since=" + "9" * 500, "since=%00"):
            answer = json.loads((await get(app, "/watch.json", query, host="localhost")).body)
            assert [point["number"] for point in answer["points"]] == [1], query
        watching.close()
        watching.close()

    with_rig(test)


@pytest.mark.parametrize("hides", [True, False])
def test_where_every_client_has_a_salt_none_sees_what_others_do(hides: bool, tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        with temporary_url("shm", tmp_path, "capacity=8MiB") as url, open_pool(url) as pool:
            watching = Watching(url, "m", Stats, hides_prefixes=hides)
            app = app_of(rig, watching=watching)
            await get(app, "/watch.json", host="localhost")
            space = pool.space(identity(), SPEC, chunk_tokens=16)
            chunks = space.keys(range(32), tenant=b"acme").chunks()
            space.write(chunks, whole_shard(SPEC), [local_tiles(SPEC, chunk, whole_shard(SPEC)) for chunk in chunks])
            watching._looked_at = watching._watcher._surveyed_at = float("-inf")
            reply = await get(app, "/watch.json", host="localhost")
            look, tenant = json.loads(reply.body)["look"], tenant_tag(b"acme").encode()
            assert look["store"]["chunks"] == 2
            assert [bool(look[name]) for name in ("prefixes", "holders", "events")] == [not hides] * 3
            assert (tenant in reply.body) == (not hides)
            watching._watcher.close()
            watching.close()

    with_rig(test)


def test_a_slow_look_stalls_nobody_and_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(rig: Rig) -> None:
        watching = Watching(None, "m", Stats)
        app, look, may_go = app_of(rig, watching=watching), watching._watcher.look, threading.Event()
        threads: list[int] = []

        def slow() -> Any:
            threads.append(threading.get_ident())
            may_go.wait(60)
            return look()

        monkeypatch.setattr(watching._watcher, "look", slow)
        asked = [asyncio.create_task(get(app, "/watch.json", host="localhost")) for _ in range(5)]
        while not threads:
            await asyncio.sleep(0.001)
        asked[0].cancel()  # whoever leaves does not end the look
        started = time.monotonic()
        assert (await get(app, "/v1/models", host="localhost")).status == 200
        assert time.monotonic() - started < 30
        may_go.set()
        assert {reply.status for reply in await asyncio.gather(*asked[1:])} == {200}
        assert len(threads) == 1
        assert threads[0] != threading.get_ident()
        watching.close()

    with_rig(test)


# ---- the files themselves ---------------------------------------------------------------------------------------
def test_the_page_asks_nobody_else_and_has_no_inline_code() -> None:
    html, css, script = (PAGE.joinpath(name).read_text(encoding="utf-8") for name, _ in PAGE_FILES.values())
    addresses = set(re.findall(r"https?://[^\s'\"%)]+", html + css + script))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert not re.search(r"\son\w+=|style=|javascript:|<style", html)
    assert re.findall(r"<script([^>]*)>", html) == [' src="/watch.js" defer']
    for unsafe in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "@import"):
        assert unsafe not in script + css
    assert sum(len(text.encode()) for text in (html, css, script)) < 64 << 10


def test_all_that_the_script_names_is_in_the_page() -> None:
    html, script = PAGE.joinpath("index.html").read_text(), PAGE.joinpath("watch.js").read_text()
    named = set(re.findall(r'\$\("([a-z-]+)"\)|(?:table|legend|big)\("([a-z-]+)"', script))
    assert {name for pair in named for name in pair if name} <= set(re.findall(r'id="([a-z-]+)"', html))
