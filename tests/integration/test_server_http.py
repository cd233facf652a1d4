"""What a request may look like on the wire: chunks, heads, lengths, encodings; and who holds a connection up."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("httpx")
pytest.importorskip("msgspec")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from fake_server import Server, answer, request, wait_until

SOON_S = 15.0
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("server") / "aborts", header_timeout_s=120.0)
    yield made
    made.close()


def send(sock: socket.socket, data: bytes) -> None:
    """Send, though the other end may close meanwhile."""
    sock.settimeout(SOON_S)
    try:
        sock.sendall(data)
    except ConnectionError:
        pass


def said(sock: socket.socket) -> tuple[int, str | None]:
    """Status and code of an answer after which the connection ends."""
    sock.settimeout(SOON_S)
    head, _, body = answer(sock).partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head
    return int(head.split()[1]), json.loads(body)["error"]["code"]


def chunked(body: bytes, size: int) -> bytes:
    """A body in chunks of so many bytes."""
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


# Chunks


def test_a_body_of_tiny_chunks_is_refused_long_before_its_end(server: Server) -> None:
    with server.connect(CHUNKED) as sock:
        send(sock, b"1\r\n \r\n" * 5_000)
        assert said(sock) == (413, "request_too_large")


@pytest.mark.parametrize(("num_bytes", "size"), [(300, 1), (2_000_000, 4096)], ids=["few", "large"])
def test_ordinary_chunks_are_taken(server: Server, num_bytes: int, size: int) -> None:
    body = b'{"prompt": "say:hi", "max_tokens": 1}'.ljust(num_bytes)
    with server.connect(CHUNKED.replace(b"\r\nhost", b"\r\nconnection: close\r\nhost")) as sock:
        send(sock, chunked(body, size))
        assert answer(sock).startswith(b"HTTP/1.1 200 ")


def test_what_follows_a_refused_head_is_not_read_to_its_end(start: Callable[..., Server]) -> None:
    server = start(api_key="k", header_timeout_s=120.0)
    with server.connect(HEAD + b"content-length: 15000000\r\n\r\n") as sock:
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 401 ")
        send(sock, b" " * 10_000_000)
        with pytest.raises(ConnectionError):
            wait_until(lambda: sock.send(b" ") == 0)


def test_a_short_body_after_a_refused_head_keeps_the_connection(start: Callable[..., Server]) -> None:
    server = start(api_key="k")
    with server.connect(HEAD + b"content-length: 10\r\n\r\n") as sock:
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 401 ")
        sock.sendall(b" " * 10 + HEALTH.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
        assert b"HTTP/1.1 200 " in answer(sock)


def test_requests_sent_ahead_are_answered_in_turn(server: Server) -> None:
    with server.connect(HEALTH * 2_000 + request({"prompt": "say:hi"})) as sock:
        text = answer(sock)
        assert text.count(b'{"status":"ok"}') == 2_000
        assert b'"text":"hi"' in text


# Heads


@pytest.mark.parametrize("field", [b"a:\r\n" * 200, b"a: " + b"x" * 20_000 + b"\r\n"], ids=["many", "long"])
def test_large_heads_are_refused(server: Server, field: bytes) -> None:
    with server.connect(HEALTH[:-2] + field + b"\r\n") as sock:
        assert said(sock) == (431, "headers_too_large")


def test_a_head_of_usual_size_is_taken(server: Server) -> None:
    fields = b"a: b\r\n" * 90 + b"cookie: " + b"x" * 8_000 + b"\r\nconnection: close\r\n"
    with server.connect(HEALTH[:-2] + fields + b"\r\n") as sock:
        assert answer(sock).startswith(b"HTTP/1.1 200 ")


def test_endless_trailers_are_refused(server: Server) -> None:
    with server.connect(CHUNKED + b"0\r\n") as sock:
        send(sock, b"a:\r\n" * 4_000)
        assert said(sock) == (431, "headers_too_large")


# Framing and paths


@pytest.mark.parametrize(
    "lines",
    [
        b"nonsense\r\n\r\n",
        HEAD + b"content-length: x\r\n\r\n",
        HEAD + b"content-length: " + b"9" * 5_000 + b"\r\n\r\n",
        HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        CHUNKED + b"zz\r\n",
    ],
    ids=["line", "length", "digits", "both", "chunk"],
)
def test_what_is_no_http_is_told_so_like_every_error(server: Server, lines: bytes) -> None:
    with server.connect(lines) as sock:
        assert said(sock) == (400, "invalid_http")


def test_a_body_that_says_that_it_is_too_large_is_refused_unread(server: Server) -> None:
    with server.connect(HEAD + b"connection: close\r\ncontent-length: 999999999999\r\n\r\n") as sock:
        assert said(sock) == (413, "request_too_large")


def test_a_compressed_body_is_refused(server: Server) -> None:
    with server.connect(request({"prompt": "say:hi"}, "content-encoding: gzip")) as sock:
        assert said(sock) == (415, "unsupported_media_type")
    with server.connect(request({"prompt": "say:hi"}, "content-encoding: identity")) as sock:
        assert answer(sock).startswith(b"HTTP/1.1 200 ")


def test_no_path_is_redirected(server: Server) -> None:
    assert server.http.get("/health/").status_code == 404
