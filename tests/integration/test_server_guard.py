"""Web pages cannot use a server that asks for no key; HTTPS."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

pytest.importorskip("httpx")
pytest.importorskip("msgspec")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import httpx
from fake_server import Server, answer

from headwater.errors import EngineConfigError
from headwater.serve.tls import load_certificate

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("server") / "aborts")
    yield made
    made.close()


def status(server: Server, path: str, **headers: str) -> tuple[int, str | None]:
    """Status and code of a chat, or of a GET, with these headers."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    if path == "/v1/completions":
        reply = server.http.post(path, content=b'{"prompt": "say:hi"}', headers=JSON | named)
    else:
        reply = server.http.get(path, headers=named)
    return reply.status_code, reply.json()["error"]["code"] if reply.status_code >= 400 else None


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/metrics", "/health"])
@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "10.0.0.1",
             "localhost,evil.example", "evil@localhost", "[::2]:80", "localhost:80:80", "0.0.0.0", "[::1].evil.com",
             "localhost#.evil.com", "localhost?.evil.com", "[::1%evil]", "localhost:0", "localhost:", "::1"]
)  # fmt: skip
def test_only_loopback_names_are_answered_to(server: Server, path: str, host: str) -> None:
    assert status(server, path, host=host) == (403, "host_not_allowed")


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.0.0.1:99", "localhost", "LOCALHOST:8000", "localhost.", "[::1]", "[::1]:8000", "127.8.8.8"],
)
def test_all_loopback_names_are(server: Server, host: str) -> None:
    assert status(server, "/v1/completions", host=host) == (200, None)


def test_a_client_older_than_host_is_answered(server: Server) -> None:
    with server.connect(b"GET /health HTTP/1.0\r\n\r\n") as sock:
        assert answer(sock).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "http://127.0.0.1.evil.example",
        "null",
        "http://10.0.0.1",
        "chrome-extension://abc",
        "x",
        "http://localhost#.evil.com",
        "http://[::1%evil]",
        "http://[::1].evil.com",
        "//localhost",
        "file://localhost",
    ],
)
def test_foreign_pages_are_refused(server: Server, origin: str) -> None:
    assert status(server, "/v1/completions", origin=origin) == (403, "origin_not_allowed")
    assert status(server, "/v1/models", origin=origin) == (403, "origin_not_allowed")


@pytest.mark.parametrize("origin", ["http://localhost:3000", "http://127.0.0.1", "https://[::1]:8443"])
def test_pages_of_this_machine_are_not(server: Server, origin: str) -> None:
    assert status(server, "/v1/completions", origin=origin) == (200, None)


FORMS = [
    "",
    "text/plain",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
    "text/plain; application/json",
]


@pytest.mark.parametrize("kind", FORMS)
def test_a_form_is_no_json(server: Server, kind: str) -> None:
    headers = {"content-type": kind} if kind else {}
    reply = server.http.post("/v1/completions", content=b'{"prompt": "say:hi"}', headers=headers)
    assert (reply.status_code, reply.json()["error"]["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"])
def test_json_is(server: Server, kind: str) -> None:
    assert status(server, "/v1/completions", content_type=kind) == (200, None)


def test_a_key_is_proof_enough_of_who_asks_but_not_of_what(start: Callable[..., Server]) -> None:
    server = start(api_key="sesame")
    key = {"authorization": "Bearer sesame"}
    page = {"host": "llm.example", "origin": "https://chat.example"}
    assert status(server, "/v1/completions", **key, **page) == (200, None)
    assert status(server, "/v1/completions", **page) == (401, "invalid_api_key")
    assert status(server, "/v1/completions", **key, content_type="text/plain") == (415, "unsupported_media_type")


def test_a_server_of_a_network_has_names_that_nobody_told_it(start: Callable[..., Server]) -> None:
    server = start(host="0.0.0.0", insecure=True)
    assert status(server, "/v1/completions", host="llm.example") == (200, None)
    assert status(server, "/v1/completions", host="llm.example", origin="https://llm.example") == (200, None)
    foreign = status(server, "/v1/completions", host="llm.example", origin="https://evil.example")
    assert foreign == (403, "origin_not_allowed")


# HTTPS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl on the PATH to make a certificate with")
    directory = tmp_path_factory.mktemp("tls")
    cert, key = directory / "cert.pem", directory / "key.pem"
    made = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(cert)]
    subprocess.run([*made, *names, *files], check=True, capture_output=True, timeout=60)
    return cert, key


def test_https(start: Callable[..., Server], certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    server = start(ssl_certfile=str(cert), ssl_keyfile=str(key), header_timeout_s=1.0)
    assert server.url.startswith("https://127.0.0.1:")
    trusting = ssl.create_default_context(cafile=str(cert))
    with httpx.Client(base_url=server.url, verify=trusting, timeout=60) as client:
        reply = client.post("/v1/completions", json={"prompt": "say:hi", "stream": True})
        assert reply.status_code == 200
        assert '"text":"i"' in reply.text
        evil = client.get("/v1/models", headers={"host": "evil.example"})
        assert evil.status_code == 403
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{server.url}/health")
    with server.connect(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n") as plain:
        assert b"200" not in answer(plain)
    # A client that never shakes hands is not waited for either.
    with server.connect() as silent:
        silent.settimeout(30)
        assert answer(silent) == b""


def test_clients_that_never_shake_hands_make_room_for_others(
    start: Callable[..., Server], certificate: tuple[Path, Path]
) -> None:
    cert, key = certificate
    server = start(ssl_certfile=str(cert), ssl_keyfile=str(key), max_connections=4, header_timeout_s=120.0)
    trusting = ssl.create_default_context(cafile=str(cert))
    with ExitStack() as stack:
        silent = [stack.enter_context(server.connect()) for _ in range(20)]
        for sock in silent[:16]:
            sock.settimeout(30)
            with suppress(ConnectionResetError):
                assert sock.recv(1) == b""
        assert httpx.get(f"{server.url}/health", verify=trusting, timeout=60).status_code == 200


def test_certificates_that_cannot_be_used_are_named(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    cert, key = map(str, certificate)
    encrypted = tmp_path / "encrypted.pem"
    command = ["openssl", "ec", "-in", key, "-aes128", "-passout", "pass:x", "-out", str(encrypted)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    for files in ((str(tmp_path / "none"), None), (cert, None), (key, cert), (cert, str(encrypted))):
        with pytest.raises(EngineConfigError, match=r"--ssl-certfile .* cannot be used: .*without a passphrase"):
            load_certificate(*files)
    assert load_certificate(None, None) is None
