"""Running `headwater proxy` and `headwater router`: stopping, draining, keys, bounds, weights, what is passed on."""

from __future__ import annotations

import json
import signal
import socket
from collections import Counter
from functools import partial
from threading import Thread
from typing import Any

import pytest

pytest.importorskip("msgspec")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")

import httpx
from fake_upstream import Exchange, answers

from proxy_process import ProxyProcess, chat_body
from support import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WAIT_S = 20.0
slow = partial(answers, num_events=40, delay_s=0.05)


class Reading:
    """A stream that is read in a thread."""

    def __init__(self, front: ProxyProcess) -> None:
        self.text = ""
        self._thread = Thread(target=self._read, args=(front.url,), daemon=True)
        self._thread.start()

    def _read(self, url: str) -> None:
        body = chat_body("hello", stream=True)
        try:
            with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=WAIT_S) as response:
                for piece in response.iter_text():
                    self.text += piece
        except httpx.HTTPError as error:
            self.text += f"<{type(error).__name__}>"

    def join(self) -> str:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        return self.text


def test_sigterm_lets_streams_end_and_takes_no_more(upstream: Any, proxy: Any) -> None:
    front = proxy("router", upstream(slow).url)
    reading = Reading(front)
    wait_until(lambda: "x0" in reading.text, WAIT_S)
    front.terminate()
    wait_until(lambda: not _connects(front), WAIT_S, "the port is closed")
    assert "[DONE]" not in reading.text, "the stream goes on meanwhile"
    assert "x39" in reading.join()
    assert "[DONE]" in reading.text
    assert front.process.wait(WAIT_S) == 0


def test_a_second_signal_ends_streams(upstream: Any, proxy: Any) -> None:
    server = upstream(partial(answers, num_events=10_000, delay_s=0.05))
    front = proxy("router", server.url)
    reading = Reading(front)
    wait_until(lambda: "x0" in reading.text, WAIT_S)
    front.terminate()
    wait_until(lambda: any("stopping" in line for line in front.errors), WAIT_S)
    front.process.send_signal(signal.SIGINT)
    assert front.process.wait(WAIT_S) == 0
    reading.join()
    wait_until(lambda: server.completions[0].was_cut, WAIT_S)


def test_one_server_is_drained_and_comes_back(upstream: Any, proxy: Any) -> None:
    one, two = upstream(partial(answers, name="1")), upstream(partial(answers, name="2"))
    front = proxy("router", one.url, two.url, "--admin-key", "secret")
    admin = {"authorization": "Bearer secret"}
    assert front.http.post("/admin/drain", json={"server": one.url}).status_code == 401
    assert front.http.post("/admin/drain", json={"server": "http://nowhere"}, headers=admin).status_code == 404
    assert front.http.post("/admin/drain", json=[1], headers=admin).status_code == 400
    answer = front.http.post("/admin/drain", json={"server": one.url + "/v1/"}, headers=admin).json()
    assert answer["servers"][0]["draining"] is True
    for number in range(6):
        front.chat(f"{number} hello")
    assert not one.completions
    assert front.http.get("/health").json() == {"status": "ok", "prefill": 0, "decode": 1}
    front.http.post("/admin/resume", json={"server": one.url}, headers=admin)
    for number in range(6):
        front.chat(f"{number} hello again")
    assert len(one.completions) == 3
    listed = front.http.get("/admin/servers", headers=admin).json()["servers"]
    assert [server["server"] for server in listed] == [one.url, two.url]


def test_without_an_admin_key_nothing_can_be_drained(upstream: Any, proxy: Any) -> None:
    server = upstream()
    front = proxy("router", server.url, "--api-key", "k")
    for headers in ({}, {"authorization": "Bearer k"}):
        assert front.http.post("/admin/drain", json={"server": server.url}, headers=headers).status_code == 404


def test_keys_are_checked_here_and_passed_on(upstream: Any, proxy: Any) -> None:
    server = upstream()
    front = proxy("router", server.url, "--api-key", "k")
    assert front.chat("hello").status_code == 401
    assert front.http.get("/metrics").status_code == 401
    assert front.http.get("/health").status_code == 200
    assert front.chat("hello", headers={"authorization": "Bearer k"}).status_code == 200
    assert server.completions[0].headers["authorization"] == "Bearer k"
    open_front = proxy("router", server.url)
    open_front.chat("hello", headers={"authorization": "Bearer of the client"})
    assert server.completions[1].headers["authorization"] == "Bearer of the client"


def test_web_pages_cannot_use_a_proxy_that_asks_for_no_key(upstream: Any, proxy: Any) -> None:
    server = upstream()
    front = proxy("router", server.url)
    assert front.chat("hello", headers={"host": "evil.example"}).status_code == 403
    assert front.chat("hello", headers={"origin": "http://evil.example"}).status_code == 403
    form = front.http.post("/v1/chat/completions", content=b"{}", headers={"content-type": "text/plain"})
    assert form.status_code == 415
    assert not server.completions


def test_bodies_and_requests_have_bounds(upstream: Any, proxy: Any) -> None:
    server = upstream(partial(answers, delay_s=0.5))
    front = proxy("router", server.url, "--max-body-bytes", "10000", "--max-requests", "2")
    assert front.chat("x" * 10_000).status_code == 413
    chunked = front.http.post(
        "/v1/completions", content=(b"x" * 1000 for _ in range(50)), headers={"content-type": "application/json"}
    )
    assert chunked.status_code == 413
    assert front.http.post("/v1/completions", content=b"[1]", headers=JSON).status_code == 400
    assert front.http.post("/v1/completions", content=b"\xff{", headers=JSON).status_code == 400
    assert not server.completions
    statuses: list[int] = []
    threads = [Thread(target=lambda: statuses.append(front.chat("hello").status_code)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert Counter(statuses) == {200: 2, 429: 4}
    wait_until(lambda: front.chat("hello").status_code == 200, WAIT_S, "their places are given back")


JSON = {"content-type": "application/json"}


def test_huge_heads_of_requests_are_refused(upstream: Any, proxy: Any) -> None:
    front = proxy("router", upstream().url)
    assert front.chat("hello", headers={"x-huge": "y" * 50_000}).status_code == 431
    assert front.chat("hello", headers={f"x-{n}": "y" for n in range(300)}).status_code == 431


def test_weights_share_the_work(upstream: Any, proxy: Any) -> None:
    small, large = upstream(partial(answers, delay_s=0.3)), upstream(partial(answers, delay_s=0.3))
    front = proxy("router", f"{small.url},weight=1", f"{large.url},weight=3")
    threads = [Thread(target=front.chat, args=(f"{n} " + "word " * 400,)) for n in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert 1.5 < len(large.completions) / len(small.completions) < 6


def test_other_paths_are_passed_on_and_those_that_change_servers_are_not(upstream: Any, proxy: Any) -> None:
    async def echoes(exchange: Exchange) -> None:
        await exchange.json({"method": exchange.asked.method, "path": exchange.asked.path, "body": exchange.asked.body})

    server, dead = upstream(echoes), upstream()
    front = proxy("router", server.url + "/v1", dead.url, "--health-interval", "100")
    dead.stop()
    for _ in range(3):
        assert front.http.get("/v1/models?x=1").json() == {"method": "GET", "path": "/v1/models?x=1", "body": None}
    answer = front.http.post("/v1/embeddings", json={"input": "a"})
    assert answer.json() == {"method": "POST", "path": "/v1/embeddings", "body": {"input": "a"}}
    assert answer.headers["content-type"] == "application/json"
    assert front.http.post("/tokenize", json={}).status_code == 200
    for path in ("/v1/load_lora_adapter", "/reset_prefix_cache", "/sleep", "/collective_rpc"):
        assert front.http.post(path, json={}).status_code == 404
    asked = {asked.path for asked in server.asked}
    assert asked == {"/v1/models?x=1", "/v1/embeddings", "/tokenize"}


def test_health_says_when_nobody_can_answer(upstream: Any, proxy: Any) -> None:
    server = upstream()
    front = proxy("router", server.url, "--health-interval", "0.05")
    assert front.http.get("/health").status_code == 200
    server.stop()
    wait_until(lambda: front.http.get("/health").status_code == 503, WAIT_S)
    server.start()
    wait_until(lambda: front.http.get("/health").status_code == 200, WAIT_S)


def test_fields_that_nobody_knows_arrive_as_they_were_written(upstream: Any, proxy: Any) -> None:
    server = upstream()
    front = proxy("router", server.url)
    odd = '{"messages": [], "x": 1.10, "y": 12345678901234567890123, "stream": false, "z": {"a": [1e400, "\\u00e9"]}}'
    front.http.post("/v1/chat/completions", content=odd.encode(), headers=JSON)
    assert server.completions[0].body == json.loads(odd)


def _connects(front: ProxyProcess) -> bool:
    try:
        socket.create_connection(("127.0.0.1", int(front.url.rpartition(":")[2])), timeout=1).close()
    except OSError:
        return False
    return True
