"""What connections may cost a server: slow headers, many connections, unfinished bodies; and an engine that hangs."""

from __future__ import annotations

import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("httpx")
pytest.importorskip("msgspec")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from fake_server import LONG, Server, answer, chat_body, request, wait_until

SOON_S = 15.0
MIB = 1 << 20


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that waits a second for headers."""
    made = Server(tmp_path_factory.mktemp("server") / "aborts", header_timeout_s=1.0)
    yield made
    made.close()


def is_closed(sock: socket.socket) -> bool:
    """Whether the other end has closed; what it said before is thrown away."""
    sock.setblocking(False)
    try:
        while sock.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


def memory_bytes(pid: int) -> int:
    """The most physical memory that a process has had."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) << 10


# Connections


def test_headers_that_come_slowly_are_not_waited_for(hasty: Server) -> None:
    with hasty.connect(b"GET /health HTTP/1.1\r\nhost: loc") as slow, hasty.connect() as silent:
        slow.settimeout(SOON_S)
        silent.settimeout(SOON_S)
        assert answer(slow).startswith(b"HTTP/1.1 408 ")
        assert answer(silent) == b""


def test_one_byte_at_a_time_does_not_put_the_end_off(hasty: Server) -> None:
    begin_s = time.monotonic()
    with hasty.connect(b"GET /health HTTP/1.1\r\n") as sock:
        while not is_closed(sock):
            assert time.monotonic() - begin_s < SOON_S
            try:
                sock.send(b"x: y\r\n")
            except BlockingIOError:
                pass
            except ConnectionError:
                break
            time.sleep(0.05)  # the pace of a slow client


def test_a_second_request_has_no_more_time_than_the_first(hasty: Server) -> None:
    with hasty.connect(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n") as sock:
        assert sock.recv(4096).startswith(b"HTTP/1.1 200 ")
        sock.sendall(b"GET /health HTTP/1.1\r\nhost")
        sock.settimeout(SOON_S)
        assert b"HTTP/1.1 408 " in answer(sock)


def test_a_request_that_takes_long_is_not_cut_off_by_the_clock_for_headers(hasty: Server) -> None:
    with hasty.connect(request({"prompt": "slow", "max_tokens": 75})) as sock:
        assert b" 200 OK" in answer(sock)


@pytest.mark.parametrize("part", [b"GET / HTTP/1.1\r\n", request({"prompt": "x"})[:-1]], ids=["head", "body"])
def test_connections_without_a_whole_request_make_room_for_others(start: Callable[..., Server], part: bytes) -> None:
    server = start(max_connections=4, header_timeout_s=60.0)
    with ExitStack() as stack:
        idle = [stack.enter_context(server.connect(part)) for _ in range(20)]
        assert server.chat("say:hi").status_code == 200
        wait_until(lambda: sum(map(is_closed, idle)) >= 16)


def test_too_many_connections_with_requests_are_told_to_come_back(start: Callable[..., Server]) -> None:
    server = start(max_connections=4)
    with ExitStack() as stack:
        sent = request({"prompt": "slow", "max_tokens": 10_000, "stream": True})
        for _ in range(4):
            sock = stack.enter_context(server.connect(sent))
            assert sock.recv(20).startswith(b"HTTP/1.1 200")
        said = answer(stack.enter_context(server.connect(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")))
        assert said.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1\r\n" in said
        assert b'"code":"server_busy"' in said
    wait_until(lambda: server.chat("say:hi").status_code == 200)


HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


def connect_narrow(server: Server, sent: bytes = b"") -> socket.socket:
    """A connection whose own buffer is small, so that little is on its way when nobody reads."""
    host, port = server.url.partition("://")[2].split(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect((host, int(port)))
    sock.sendall(sent)
    return sock


def health_status(server: Server) -> bytes:
    with server.connect(HEALTH) as sock:
        return sock.recv(12)[-3:]


def test_connections_that_ask_on_and_on_and_read_nothing_make_room_for_others(start: Callable[..., Server]) -> None:
    """It takes no key: each of the answers says that one is needed."""
    server = start(max_connections=4, api_key="k")
    with ExitStack() as stack:
        asking = HEALTH.replace(b"/health", b"/v1/models") * 1000
        for _ in range(4):
            sock = stack.enter_context(connect_narrow(server, asking))
            assert sock.recv(20).startswith(b"HTTP/1.1 401")
        assert [health_status(server) for _ in range(8)] == [b"200"] * 8


def test_a_connection_that_does_not_read_its_answer_makes_room_for_others(start: Callable[..., Server]) -> None:
    server = start(max_connections=1)
    sent = request({"prompt": "count", "max_tokens": 15_000, "stream": True, "logprobs": 20})
    with connect_narrow(server, sent) as sock:
        assert sock.recv(20).startswith(b"HTTP/1.1 200")
        assert health_status(server) == b"503", "it runs, and nobody knows yet that it is not read"
        began_s = time.monotonic()
        wait_until(lambda: health_status(server) == b"200")
        assert time.monotonic() - began_s < SOON_S, "long before it is given up"


def test_clients_that_leave_while_they_are_refused_are_nothing_to_log(start: Callable[..., Server]) -> None:
    server = start(max_connections=1)
    sent = request({"prompt": "slow", "max_tokens": 10_000, "stream": True})
    with server.connect(sent) as running:
        running.recv(20)
        # Leaving with something unread is a reset, which often meets the server in the middle of its answer.
        assert [health_status(server) for _ in range(60)] == [b"503"] * 60
    server.process.terminate()
    _, log = server.process.communicate(timeout=SOON_S)
    assert log == ""


def test_a_lack_of_file_descriptors_is_told_once_and_got_over(start: Callable[..., Server]) -> None:
    server = start()
    pid = server.process.pid
    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir(f"/proc/{pid}/fd"))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (highest + 3, hard))
    with ExitStack() as stack:
        for _ in range(20):  # it takes them three at a time, after a pause each
            stack.enter_context(server.connect())
        wait_until(lambda: len(os.listdir(f"/proc/{pid}/fd")) == highest + 3)  # none is left for the next one
    assert server.chat("say:hi").status_code == 200
    server.process.terminate()
    _, log = server.process.communicate(timeout=SOON_S)
    assert log.count("no connection can be accepted now") == 1
    assert "Traceback" not in log


# Bodies


def test_unfinished_bodies_are_bounded_in_sum_and_short_requests_get_through(start: Callable[..., Server]) -> None:
    server = start()
    before = memory_bytes(server.process.pid)
    part = request({"prompt": "x" * (15 * MIB)})[: 12 * MIB]
    with ExitStack() as stack:
        refused: list[bytes] = []
        for _ in range(16):
            sock = stack.enter_context(server.connect())
            try:
                sock.sendall(part)
            except ConnectionError:
                pass  # it was refused in the middle
            wait_until(lambda: server.http.get("/health").status_code == 200)
            sock.setblocking(False)
            try:
                refused.append(sock.recv(4096))
            except BlockingIOError:
                pass
        wait_until(
            lambda: server.chat("say:" + "x" * 40_000, max_tokens=1).status_code == 400
        )  # too long, not too many
        assert server.chat("say:hi").status_code == 200
        assert len(refused) >= 10
        assert all(b" 503 " in said and b"server_busy" in said for said in refused)
    assert memory_bytes(server.process.pid) - before < 160 * MIB
    # All room is back when the clients have left, and again after each request that fails, or runs.
    wait_until(lambda: server.http.post("/v1/completions", json={"prompt": "x" * (15 * MIB)}).status_code == 400)
    for _ in range(5):
        assert server.http.post("/v1/completions", json={"prompt": "x" * (15 * MIB)}).status_code == 400
    with ExitStack() as stack:
        fields = {"prompt": "slow", "user": "y" * (15 * MIB), "stream": True, "max_tokens": LONG}
        for _ in range(5):
            running = stack.enter_context(server.http.stream("POST", "/v1/completions", json=fields))
            assert running.status_code == 200


def test_a_client_that_is_still_sending_its_body_is_told_that_the_server_stops(start: Callable[..., Server]) -> None:
    server = start()
    with server.connect(request({"prompt": "x"})[:-1]) as sock:
        assert health_status(server) == b"200"  # what came before was read before
        server.process.terminate()
        said = answer(sock)
    _, log = server.process.communicate(timeout=SOON_S)
    assert said.startswith(b"HTTP/1.1 503 ")
    assert b'"code":"engine_dead"' in said
    assert (server.process.returncode, log) == (0, "")


# Errors


def test_an_error_is_one_short_line_whatever_was_sent(hasty: Server) -> None:
    server = hasty
    nasty = "\x1b[31m\n" + "x" * 10_000
    replies = [
        server.http.get("/" + "%1b%0a" + "y" * 10_000),
        server.http.get(f"/v1/models/{'%1b%0a' * 100}"),
        server.http.request("Z" * 5000, "/health"),
        server.http.post("/v1/completions", json={"prompt": "x", "model": nasty}),
        server.http.post("/v1/completions", json={"prompt": "x", nasty: 1, "n": nasty}),
        server.http.post("/v1/chat/completions", json={"messages": [{"role": nasty, "content": "x"}]}),
        server.http.post("/v1/completions", content=b"{", headers={"content-type": "text/" + "p" * 5000}),
    ]
    for reply in replies:
        assert 400 <= reply.status_code < 500
        error = reply.json()["error"]
        assert len(error["message"]) <= 500
        assert error["message"].isprintable()
        assert len(error["param"] or "") <= 100


# The engine's health


def is_hung(server: Server) -> bool:
    reply = server.http.get("/health")
    assert reply.status_code in (200, 503)
    return reply.status_code == 503 and reply.json()["error"]["code"] == "engine_hung"


def test_health_tells_a_step_that_hangs(start: Callable[..., Server]) -> None:
    server = start(engine_timeout_s=2.0)
    with server.connect(request({"prompt": "hang"})):
        wait_until(lambda: is_hung(server))
        assert server.metric("engine_silent_seconds") > 2
        assert "no heartbeat for" in server.http.get("/health").json()["error"]["message"]
        begin_s = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        assert time.monotonic() - begin_s < SOON_S


def test_health_tells_a_process_that_is_stopped_until_it_goes_on(start: Callable[..., Server]) -> None:
    server = start(engine_timeout_s=2.0)
    assert not is_hung(server)
    engine = server.engine_pid()
    os.kill(engine, signal.SIGSTOP)
    try:
        wait_until(lambda: is_hung(server))
    finally:
        os.kill(engine, signal.SIGCONT)
    wait_until(lambda: not is_hung(server))


def test_a_long_step_is_no_hang(start: Callable[..., Server]) -> None:
    server = start(engine_timeout_s=2.5)
    with server.connect(request(chat_body("toil", max_tokens=1), path="/v1/chat/completions")) as sock:
        sock.setblocking(False)
        begin_s, oldest_s = time.monotonic(), 0.0
        while True:
            oldest_s = max(oldest_s, server.metric("engine_silent_seconds"))
            assert not is_hung(server)
            try:
                assert b" 200 OK" in sock.recv(4096)
                break
            except BlockingIOError:
                pass
    assert time.monotonic() - begin_s > 2 * 2.5, "the step took far longer than a hang may"
    assert oldest_s < 2.5
