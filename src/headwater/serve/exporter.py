"""`headwater pool exporter`: /metrics and /health for a pool, beside the engines that use it. It loads no engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from headwater.errors import InvalidArgumentError, RequestError
from headwater.serve.addresses import is_loopback
from headwater.serve.connections import Connections
from headwater.serve.errors import error_reply, shown
from headwater.serve.exported import ExporterMetrics, PoolWatch
from headwater.serve.guard import keep_pages_out, require_key
from headwater.serve.http import HttpServer, bound_socket, stop_signals, url_of
from headwater.serve.tls import load_certificate
from headwater.stores.config import find_pool
from headwater.stores.url import DEFAULT_URL

MAX_CONNECTIONS = 64
HEADER_TIMEOUT_S = 10.0
STOP_GRACE_S = 1.0


@dataclass(frozen=True, kw_only=True)
class ExporterConfig:
    """Every setting. Raises InvalidArgumentError for what would be unsafe."""

    pool: str = DEFAULT_URL
    host: str = "127.0.0.1"
    port: int = 9464
    api_key: str | None = field(default=None, repr=False)
    insecure: bool = False
    """Show the figures to a network without asking for a key."""
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None

    def __post_init__(self) -> None:
        if self.api_key is not None and not (self.api_key and self.api_key.isascii() and self.api_key.isprintable()):
            raise InvalidArgumentError("the API key must be printable ASCII and not empty")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise InvalidArgumentError("--ssl-keyfile needs --ssl-certfile")
        if not (self.api_key or self.insecure or is_loopback(self.host)):
            raise InvalidArgumentError(
                f"--host {self.host} can be reached from other machines; give --api-key (or HEADWATER_API_KEY), "
                "or --insecure to show the figures to everybody"
            )


def run_exporter(config: ExporterConfig, on_ready: Callable[[str, bool], None] = lambda url, is_up: None) -> int:
    """Serve until SIGINT or SIGTERM; returns 0. `on_ready` is told the address, and whether there is a pool. Raises
    OSError if the port cannot be had, and UrlError for a pool that is not on this host."""
    return asyncio.run(_run(config, on_ready))


async def _run(config: ExporterConfig, on_ready: Callable[[str, bool], None]) -> int:
    certificate = load_certificate(config.ssl_certfile, config.ssl_keyfile)
    watch = PoolWatch(find_pool(config.pool).urls)
    with bound_socket(config.host, config.port) as sock, stop_signals() as stop:
        watch.start()
        connections = Connections(MAX_CONNECTIONS, HEADER_TIMEOUT_S)
        server = HttpServer(create_app(watch, config), connections, certificate, grace_s=STOP_GRACE_S)
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        waiting = [asyncio.create_task(server.listening.wait()), asyncio.create_task(stop.wait())]
        try:
            await asyncio.wait({waiting[0], serving}, return_when=asyncio.FIRST_COMPLETED)
            scheme = "http" if certificate is None else "https"
            on_ready(url_of(scheme, config.host, sock.getsockname()[1]), watch.latest.is_up)
            await asyncio.wait({waiting[1], serving}, return_when=asyncio.FIRST_COMPLETED)
            server.should_exit = True
            await serving
            return 0
        finally:
            for task in waiting:
                task.cancel()
            watch.close()


def create_app(watch: PoolWatch, config: ExporterConfig) -> ASGIApp:
    """The application: two pages, and nothing that a client could change."""
    page = ExporterMetrics(lambda: watch.latest)

    async def metrics(request: Request) -> Response:
        body, content_type = page.render(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def health(request: Request) -> Response:
        """200 whether there is a pool or not: the exporter itself is well."""
        return _json(200, {"status": "ok", "pool": watch.latest.is_up})

    handlers: dict[Any, Any] = {HTTPException: _on_http_error, Exception: _on_error}
    routes = [Route("/metrics", metrics, methods=["GET"]), Route("/health", health, methods=["GET"])]
    inner = Starlette(routes=routes, exception_handlers=handlers)
    inner.router.redirect_slashes = False  # a redirect would name whichever host the client sent
    if config.api_key is not None:
        return require_key(inner, config.api_key, _refuse, lambda path: path != "/health")
    return keep_pages_out(inner, config.host, _refuse)


def _json(status: int, said: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(said), status, media_type="application/json")


def _answer(error: Exception) -> Response:
    status, body, headers = error_reply(error)
    return Response(body, status, headers, media_type="application/json")


async def _refuse(error: RequestError, scope: Scope, receive: Receive, send: Send) -> None:
    await _answer(error)(scope, receive, send)


async def _on_http_error(request: Request, error: HTTPException) -> Response:
    """Starlette's own: no such path, or not with this method."""
    code = "method_not_allowed" if error.status_code == 405 else "not_found"
    return _answer(RequestError(f"{shown(request.method)} {shown(request.url.path)}: {error.detail}", code=code))


async def _on_error(request: Request, error: Exception) -> Response:
    return _answer(error)
