"""The server as a process, around an engine without a model: what clients see, and what happens when things die.

The engine's process is real, and so are the sockets; only the model is made up (`fake_engine.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx")
pytest.importorskip("msgspec")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")


from fake_server import LONG, ROOT, TIMEOUT_S, Server, answer, chat_body, events, is_alive, request, wait_until

from headwater.engine.config import EngineConfig
from headwater.engine.params import SamplingParams
from headwater.errors import EngineDeadError, EngineError, ModelError, RequestError
from headwater.serve import client as client_module
from headwater.serve.client import Arrival, EngineClient, Flight, GenerationJob

import fake_engine


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("server") / "aborts", max_waiting=4)
    yield made
    made.close()


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    with contextlib.ExitStack() as stack:

        def start(**options: Any) -> Server:
            made = Server(tmp_path / "aborts", **options)
            stack.callback(made.close)
            return made

        yield start


# What clients get


def test_chat(server: Server) -> None:
    body = server.chat("say:grüße").json()
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "grüße", "refusal": None}
    assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)
    assert (body["object"], body["model"]) == ("chat.completion", "fake")
    assert body["usage"] == {
        "prompt_tokens": 11,
        "completion_tokens": 8,
        "total_tokens": 19,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    again = server.chat("say:grüße").json()
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 10}
    assert again["id"] != body["id"]


def test_streamed_chat_is_the_same_text(server: Server) -> None:
    fields = {"stream": True, "stream_options": {"include_usage": True}, "n": 2}
    reply = server.chat("say:grüße", **fields)
    assert reply.headers["content-type"].startswith("text/event-stream")
    *chunks, last, done = events(reply.text)
    assert done is None
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 16
    assert all(chunk["usage"] is None and chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    for index in (0, 1):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in mine) == "grüße"
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["stop"]


def test_a_stream_without_options_has_no_usage(server: Server) -> None:
    *chunks, done = events(server.chat("say:hi", stream=True).text)
    assert done is None
    assert not any("usage" in chunk for chunk in chunks)


def test_length(server: Server) -> None:
    body = server.chat("count", max_tokens=3).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["choices"][0]["message"]["content"] == "abc"


def test_completions_of_several_prompts_and_choices(server: Server) -> None:
    fields = {"prompt": ["say:one", "count"], "n": 2, "seed": 5, "max_tokens": 4}
    body = server.http.post("/v1/completions", json=fields).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
        (0, "one"),
        (1, "one"),
        (2, "fghi"),
        (3, "ghij"),
    ]
    assert body["usage"]["prompt_tokens"] == 12
    ids = [list(b"say:x"), list(b"say:y")]
    body = server.http.post("/v1/completions", json={"prompt": ids}).json()
    assert [choice["text"] for choice in body["choices"]] == ["x", "y"]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_ends_the_text_and_the_work(server: Server, stream: bool) -> None:
    fields = {"prompt": "count", "max_tokens": 10_000, "stop": ["zzz", "fgh"], "stream": stream}
    reply = server.http.post("/v1/completions", json=fields)
    if stream:
        chunks = [chunk["choices"][0] for chunk in events(reply.text) if chunk]
        text, reason = "".join(chunk["text"] for chunk in chunks), chunks[-1]["finish_reason"]
    else:
        (choice,) = reply.json()["choices"]
        text, reason = choice["text"], choice["finish_reason"]
        assert reply.json()["usage"]["completion_tokens"] == 8
    assert (text, reason) == ("abcde", "stop")
    wait_until(lambda: server.metric("requests_running") == 0)


def test_logprobs(server: Server) -> None:
    content = server.chat("say:ab", logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert content[0] == {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [
            {"token": "a", "logprob": -0.5, "bytes": [97]},
            {"token": "b", "logprob": -1.5, "bytes": [98]},
        ],
    }
    assert [entry["token"] for entry in content] == ["a", "b"]
    body = server.http.post("/v1/completions", json={"prompt": "say:ab", "logprobs": 1}).json()
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"a": -0.5}, {"b": -0.5}],
        "text_offset": [0, 1],
    }


def test_logprobs_of_parts_of_characters_have_bytes(server: Server) -> None:
    content = server.chat("say:a€", logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert [(entry["token"], entry["bytes"]) for entry in content] == [
        ("a", [0x61]), (r"\xe2", [0xE2]), (r"\x82", [0x82]), (r"\xac", [0xAC]),
    ]  # fmt: skip
    body = server.http.post("/v1/completions", json={"prompt": "say:a€b", "logprobs": 1}).json()
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", r"bytes:\xe2", r"bytes:\x82", r"bytes:\xac", "b"]
    assert logprobs["text_offset"] == [0, 1, 1, 1, 2]
    *chunks, _ = events(server.chat("say:a€", logprobs=True, stream=True).text)
    told = [(chunk["choices"][0]["delta"].get("content"), chunk["choices"][0]["logprobs"]) for chunk in chunks]
    said = [(text, [entry["bytes"] for entry in found["content"]]) for text, found in told if found]
    assert said == [("a", [[0x61]]), ("€", [[0xE2], [0x82], [0xAC]]), (None, [])]


def test_clients_of_different_salts_learn_nothing_of_each_other(server: Server) -> None:
    def cached(**fields: Any) -> int:
        usage = server.chat("say:a secret", **fields).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    asked: list[dict[str, Any]] = [{}, {"cache_salt": "a"}, {"cache_salt": "b"}]
    assert [cached(**fields) for fields in asked] == [0, 0, 0]
    assert [cached(**fields) for fields in asked] == [11, 11, 11]


def test_a_server_may_require_salts(mortal: Callable[..., Server]) -> None:
    server = mortal(requires_cache_salt=True)
    for stream in (False, True):
        refused = server.chat("say:hi", stream=stream)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cache_salt")
    assert server.chat("say:hi", cache_salt="a").status_code == 200


def test_models_and_health(server: Server) -> None:
    (card,) = server.http.get("/v1/models").json()["data"]
    assert (card["id"], card["object"]) == ("fake", "model")
    assert server.http.get("/v1/models/fake").json()["id"] == "fake"
    assert server.http.get("/v1/models/other").status_code == 404
    assert server.http.get("/health").status_code == 200


# What clients get wrong


@pytest.mark.parametrize(
    ("path", "content", "status", "param", "code"),
    [
        ("/v1/chat/completions", b"{", 400, None, None),
        ("/v1/chat/completions", b"{}", 400, "messages", None),
        ("/v1/chat/completions", json.dumps(chat_body("x", n="two")).encode(), 400, "n", None),
        ("/v1/chat/completions", json.dumps(chat_body("x", model="no")).encode(), 404, "model", "model_not_found"),
        ("/v1/chat/completions", json.dumps(chat_body("x", n=9)).encode(), 400, "n", None),
        (
            "/v1/chat/completions",
            json.dumps(chat_body("x", audio={})).encode(),
            400,
            "audio",
            "unsupported_parameter",
        ),
        ("/v1/chat/completions", json.dumps(chat_body("x", topk=5)).encode(), 400, "topk", "unknown_parameter"),
        ("/v1/chat/completions", b'{"messages":[{"role":"king","content":"x"}]}', 400, "messages[0].role", None),
        ("/v1/chat/completions", b'{"messages":[{"role":"user","content":"no template"}]}', 400, "messages", None),
        ("/v1/completions", b'{"prompt":""}', 400, "prompt", None),
        ("/v1/completions", b'{"prompt":[299,300]}', 400, "prompt", None),
        ("/v1/completions", json.dumps({"prompt": [[1]] * 9}).encode(), 400, "prompt", None),
        ("/v1/completions", json.dumps({"prompt": "x", "max_tokens": 2**70}).encode(), 400, "max_tokens", None),
        ("/v1/completions", json.dumps({"prompt": [2**70]}).encode(), 400, "prompt", None),
        ("/v1/completions", b'{"prompt":"refuse"}', 400, "prompt", "refused"),
        ("/v1/completions", b'{"prompt":"refuse","stream":true}', 400, "prompt", "refused"),
        ("/v1/completions", json.dumps({"prompt": "x" * 20_000}).encode(), 400, "prompt", "context_length_exceeded"),
        ("/v1/completions", b"[" + b"1," * (9 << 20), 413, None, "request_too_large"),
        ("/v1/nothing", b"", 404, None, "not_found"),
        ("/health", b"", 405, None, "method_not_allowed"),
    ],
)
def test_errors_have_openais_shape(
    server: Server, path: str, content: bytes, status: int, param: str | None, code: str | None
) -> None:
    reply = server.http.post(path, content=content, headers={"content-type": "application/json"})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (status, param, code), error
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]


def test_too_many_at_once_are_told_to_come_back(server: Server) -> None:
    before, body = num_aborts(server), chat_body("slow", max_tokens=LONG, stream=True)
    with contextlib.ExitStack() as stack:
        for _ in range(8):  # four run, four wait
            reply = stack.enter_context(server.http.stream("POST", "/v1/chat/completions", json=body))
            assert reply.status_code == 200
        refused = server.chat("say:room")
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "overloaded"
    wait_until(lambda: num_aborts(server) == before + 8)
    wait_until(lambda: server.chat("say:room").status_code == 200)


def test_an_api_key_is_asked_for_everywhere_but_health(mortal: Callable[..., Server]) -> None:
    server = mortal(api_key="sesame")
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "sesame"}):
        for path in ("/v1/models", "/metrics", "/v1/chat/completions"):
            reply = server.http.get(path, headers=headers)
            assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/v1/models", headers={"authorization": "Bearer sesame"}).status_code == 200


# Clients that leave, or do not read


def num_aborts(server: Server) -> int:
    return len(server.aborts.read_text().splitlines()) if server.aborts.exists() else 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_aborted_and_its_pages_are_back(server: Server, stream: bool) -> None:
    before = num_aborts(server)
    fields = chat_body("slow", max_tokens=LONG, stream=stream, n=2)
    with server.connect(request(fields, path="/v1/chat/completions")):
        wait_until(lambda: server.metric("requests_running") == 2)
    wait_until(lambda: num_aborts(server) == before + 2)
    wait_until(lambda: server.metric("requests_running") == server.metric("kv_pages_used") == 0)
    assert 'headwater_sequences_total{outcome="abort"}' in server.http.get("/metrics").text


def test_a_client_that_leaves_in_its_own_body_does_no_harm(server: Server) -> None:
    whole = request({"prompt": "x" * 1000})
    for _ in range(3):
        server.connect(whole[:-1000]).close()
    assert server.chat("say:hi").status_code == 200


def test_a_client_that_does_not_read_takes_no_room_once_its_sequences_are_done(server: Server) -> None:
    """Two calls of four sequences are all that the server takes; their answers of some 14 MB each fill the kernel's
    buffers."""
    fields = {"prompt": "count", "n": 4, "max_tokens": 2600, "stream": True, "logprobs": 20}
    before = server.metric("generated_tokens_total")
    with server.connect(request(fields)), server.connect(request(fields)):
        wait_until(lambda: server.metric("generated_tokens_total") > before)  # they may not be seen running
        wait_until(lambda: server.chat("say:room", n=4).status_code == 200)
        wait_until(lambda: server.metric("requests_running") == 0)


def test_a_client_that_does_not_read_holds_nobody_up_and_is_cut_off(server: Server) -> None:
    # Some 20 MB of answer: more than the kernel's buffers take.
    fields = {"prompt": "count", "max_tokens": 15_000, "stream": True, "logprobs": 20}
    before, num_before = server.metric("generated_tokens_total"), num_aborts(server)
    with server.connect(request(fields)) as sock:
        wait_until(lambda: server.metric("generated_tokens_total") > before)
        assert server.chat("say:hi").json()["choices"][0]["message"]["content"] == "hi"
        wait_until(lambda: num_aborts(server) == num_before + 1)
        wait_until(lambda: server.metric("requests_running") == server.metric("kv_pages_used") == 0)
        tail = answer(sock)[-4096:]
    assert b'"code":"client_too_slow"' in tail
    assert b"[DONE]" not in tail


# Death


def test_killing_the_engine_ends_streams_with_an_error_and_the_server_with_a_failure(
    mortal: Callable[..., Server],
) -> None:
    server = mortal()
    with ThreadPoolExecutor(1) as threads:
        whole = threads.submit(server.chat, "slow", max_tokens=LONG)
        body = chat_body("slow", max_tokens=LONG, stream=True)
        with server.http.stream("POST", "/v1/chat/completions", json=body) as reply:
            lines = reply.iter_lines()
            next(lines)
            wait_until(lambda: server.metric("requests_running") == 2)
            os.kill(server.engine_pid(), signal.SIGKILL)
            *_, last = [line for line in lines if line]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_dead"
        assert whole.result().status_code == 503
        assert server.wait_exit() == 1
    assert server.process.stderr is not None
    assert "killed by SIGKILL" in server.process.stderr.read()


@pytest.mark.parametrize(("prompt", "reason"), [("crash", "broken, as asked"), ("exit", "exit code 3")])
def test_an_engine_that_fails_says_why_and_ends_the_server(
    mortal: Callable[..., Server], prompt: str, reason: str
) -> None:
    server = mortal()
    reply = server.chat(prompt)
    assert reply.status_code == 503
    assert reason in reply.json()["error"]["message"]
    assert server.wait_exit() == 1


def test_killing_the_server_leaves_no_engine_behind(mortal: Callable[..., Server]) -> None:
    server = mortal()
    engine = server.engine_pid()
    assert is_alive(engine)
    server.process.kill()
    wait_until(lambda: not is_alive(engine))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_server_cleanly_in_the_middle_of_a_stream(
    mortal: Callable[..., Server], number: signal.Signals
) -> None:
    server = mortal()
    engine = server.engine_pid()
    body = chat_body("slow", max_tokens=LONG, stream=True)
    with server.http.stream("POST", "/v1/chat/completions", json=body) as reply:
        lines = reply.iter_lines()
        next(lines)
        server.process.send_signal(number)
        *_, last = [line for line in lines if line]
    assert "stopping" in json.loads(last.removeprefix("data: "))["error"]["message"]
    assert server.wait_exit() == 0
    assert not is_alive(engine)
    assert server.process.stderr is not None
    assert "Traceback" not in server.process.stderr.read()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_signal_during_start_leaves_nothing_behind(number: signal.Signals, code: int) -> None:
    """Even of a kill that nobody can handle, and although the engine's main thread is busy and reads no socket."""
    path = os.pathsep.join([str(ROOT / "src"), str(Path(__file__).parent)])
    command = [sys.executable, fake_engine.__file__, "serve", '{"port": 0, "model": "hangs"}']
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, stderr=subprocess.DEVNULL)
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        wait_until(lambda: children.read_text() != "")
        engine = int(children.read_text())
        # It has a second thread when it has begun.
        wait_until(lambda: len(os.listdir(f"/proc/{engine}/task")) > 1)
        process.send_signal(number)
        assert process.wait(TIMEOUT_S) == code
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not is_alive(engine))


def test_a_port_is_taken_while_the_model_is_still_loading(mortal: Callable[..., Server]) -> None:
    path = os.pathsep.join([str(ROOT / "src"), str(Path(__file__).parent)])
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    options = json.dumps({"port": port, "model": "hangs"})
    command = [sys.executable, fake_engine.__file__, "serve", options]
    loading = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, stderr=subprocess.DEVNULL)
    try:
        children = Path(f"/proc/{loading.pid}/task/{loading.pid}/children")
        wait_until(lambda: children.read_text() != "")
        second = mortal(port=port)
        assert second.wait_exit() == 1
        assert second.process.stderr is not None
        assert f"cannot listen on 127.0.0.1 port {port}" in second.process.stderr.read()
    finally:
        loading.terminate()
        assert loading.wait(TIMEOUT_S) == 0


def test_a_busy_port_is_heard_of_before_the_engine_starts(server: Server, mortal: Callable[..., Server]) -> None:
    second = mortal(port=int(server.url.rpartition(":")[2]))
    assert second.wait_exit() == 1
    assert second.process.stderr is not None
    assert "cannot listen on 127.0.0.1 port" in second.process.stderr.read()


# The client by itself


def start_client(model: str = "fake", **options: Any) -> Any:
    return EngineClient.start(EngineConfig(model=model), command=fake_engine.WORKER, **options)


async def read_all(flight: Flight, found: list[Arrival] | None = None) -> list[Arrival]:
    """All arrivals; those before an error are in `found`."""
    found = [] if found is None else found
    while arrivals := await flight.next():
        found += arrivals
    return found


@pytest.fixture(autouse=True)
def _child_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(Path(__file__).parent)]))


@pytest.mark.parametrize(
    ("model", "kind", "text"),
    [
        ("bad", ModelError, "there is no such model"),
        ("dies", EngineDeadError, "exit code 7"),
        ("breaks", EngineError, "ZeroDivisionError: not on purpose"),
        ("hangs", EngineError, "not ready after 1 s"),
    ],
)
def test_an_engine_that_cannot_start_says_why(model: str, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        asyncio.run(start_client(model, timeout_s=1 if model == "hangs" else TIMEOUT_S))


def test_start_reports_progress_and_facts() -> None:
    async def run() -> None:
        seen: list[tuple[int, int]] = []
        client = await start_client(on_progress=lambda done, total: seen.append((done, total)))
        assert seen[-1] == (2, 2)
        assert (client.ready.model, client.ready.max_model_len) == ("fake", fake_engine.MAX_MODEL_LEN)
        await client.close()
        await client.close()
        with pytest.raises(EngineDeadError, match="stopping"):
            await client.submit([GenerationJob([1], SamplingParams())])

    asyncio.run(run())


def test_one_refused_job_fails_its_flight_and_no_other() -> None:
    async def run() -> None:
        client = await start_client()
        good = await client.submit([GenerationJob(list(b"slow"), SamplingParams(max_tokens=20))])
        bad = await client.submit(
            [GenerationJob(list(b"slow"), SamplingParams()), GenerationJob(list(b"refuse"), SamplingParams())]
        )
        with pytest.raises(RequestError, match="as asked"):
            await read_all(bad)
        assert sum(len(arrival.output.token_ids) for arrival in await read_all(good)) == 20
        assert client.num_in_flight == 0
        await client.close()

    asyncio.run(run())


def test_a_backlog_that_grows_too_long_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_BACKLOG_ITEMS", 1000)

    async def run() -> None:
        client = await start_client()
        flight = await client.submit([GenerationJob(list(b"count"), SamplingParams())])
        async with asyncio.timeout(TIMEOUT_S):
            while client.num_in_flight:
                await asyncio.sleep(0.01)  # a reader that does not come
        found: list[Arrival] = []
        with pytest.raises(RequestError, match="too slowly"):
            await read_all(flight, found)
        assert sum(len(arrival.output.token_ids) for arrival in found) == 1001
        await client.close()

    asyncio.run(run())
