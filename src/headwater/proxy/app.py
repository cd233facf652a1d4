"""The proxy as an ASGI application: OpenAI's routes, everything else under /v1 passed on, /health, /metrics, /admin."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headwater.errors import HeadwaterError, RequestError
from headwater.proxy.answers import CompletionAnswer, PassedAnswer
from headwater.proxy.calls import CallBody, parse_call
from headwater.proxy.choice import Choice, Router, without
from headwater.proxy.config import ProxyConfig
from headwater.proxy.fleet import Fleet, Role, Server
from headwater.proxy.keys import MAX_KEYED_BYTES, PromptKeys, Tokens, tokens_of
from headwater.proxy.legs import Attempt
from headwater.proxy.metrics import ProxyMetrics
from headwater.proxy.upstream import Headers, UpstreamError, end_to_end
from headwater.serve.connections import BodyBudget, BodyRoom
from headwater.serve.errors import error_reply, one_line, shown
from headwater.serve.guard import keep_pages_out, require_json, require_key

BODY_TIMEOUT_S = 60.0
LARGE_BODY_BYTES = 1 << 14
"""Larger prompts are parsed and tokenised in a thread."""
CLIENT_GONE = 499
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PASSED = ("/tokenize", "/detokenize", "/version", "/pooling", "/classify", "/score", "/rerank")
"""Paths besides those under /v1 that are passed on. Servers have others, which change them."""
NOT_PASSED = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""They change one server, and the proxy would choose which."""

_Result = TypeVar("_Result")
log = logging.getLogger("headwater.proxy")


class Proxy:
    """What all requests share: the servers, the index and the bounds."""

    def __init__(
        self, config: ProxyConfig, fleet: Fleet, router: Router, metrics: ProxyMetrics, tokenizer: Tokens | None = None
    ) -> None:
        self.config = config
        self.fleet = fleet
        self.router = router
        self.metrics = metrics
        self._tokenizer = tokenizer
        self._budget = BodyBudget(config.max_total_body_bytes)
        self._replies = BodyBudget(config.max_total_body_bytes)
        # One thread: a tokenizer releases the interpreter but for a short while, and its calls must not overlap.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="headwater-proxy")
        self.num_requests = 0
        self.is_draining = False

    def close(self) -> None:
        """Wait for nobody."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    # ---- choosing -----------------------------------------------------------------------------------------------
    async def keys_of(self, call: CallBody) -> PromptKeys:
        """The keys of a prompt. Long ones are tokenised in a thread."""
        if self._tokenizer is None or call.num_bytes > MAX_KEYED_BYTES:
            return PromptKeys(call, None)
        tokenizer = self._tokenizer
        if call.num_bytes <= LARGE_BODY_BYTES:
            return PromptKeys(call, tokens_of(call, tokenizer))
        return PromptKeys(call, await self._in_thread(lambda: tokens_of(call, tokenizer)))

    def attempt(
        self, call: CallBody, prompt: PromptKeys, target: str, headers: Headers, tried: Sequence[Server]
    ) -> Attempt | None:
        """The next try of a request, with its prefill leg if that is worth it; None when nobody is left to ask."""
        if len(tried) >= self.config.max_attempts:
            return None
        started = time.perf_counter()
        servers = without(self.fleet.of(Role.DECODE), tried) or without(self.fleet.last_resort(Role.DECODE), tried)[:1]
        if not servers:
            return None
        choose = self.router.choose if self.config.policy == "cost" else self.router.round_robin
        choice = choose(prompt, servers)
        self.metrics.decision_s.observe(time.perf_counter() - started)
        ticket = self.router.send(prompt, choice)
        attempt = Attempt(call, target, headers, choice, ticket, self.config, self.metrics, self._replies)
        if not tried:
            self.metrics.prompt_tokens.inc(choice.num_tokens)
            self.metrics.expected_tokens.inc(choice.cached_tokens)
        if self.config.prefill:
            prefill = self.fleet.of(Role.PREFILL)
            decision = self._prefill_decision(call, choice, prefill)
            self.metrics.prefills.labels(decision).inc()
            if decision == "remote":
                attempt.prefill(self.router, prompt, prefill)
        return attempt

    def _prefill_decision(self, call: CallBody, choice: Choice, servers: Sequence[Server]) -> str:
        assert isinstance(choice.server, Server)
        if not call.is_single:
            return "many"
        if choice.uncached_tokens < self.config.min_prefill_tokens:
            return "short"
        share = choice.uncached_tokens / max(1, choice.num_tokens)
        if choice.uncached_tokens < self.config.skip_prefill_tokens and share <= self.config.skip_prefill_share:
            return "short"
        if choice.server.peer is None:
            return "no_peer"
        return "remote" if servers else "no_server"

    def any_server(self, tried: Sequence[Server]) -> Server | None:
        """A decode server for what has no prompt: the one with the least to do."""
        servers = without(self.fleet.of(Role.DECODE), tried) or without(self.fleet.last_resort(Role.DECODE), tried)
        found = min(servers, key=lambda server: server.num_in_flight / server.weight, default=None)
        assert found is None or isinstance(found, Server)
        return found

    async def timely(self, work: Awaitable[_Result], *, first: bool) -> _Result:
        """What a server is waited for. Raises UpstreamError when that takes too long."""
        limit_s = self.config.first_byte_timeout_s if first else self.config.idle_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await work
        except TimeoutError:
            raise UpstreamError(f"nothing came for {limit_s:g} s", heard=True) from None

    # ---- endpoints ----------------------------------------------------------------------------------------------
    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._complete(request, is_chat=True)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._complete(request, is_chat=False)

    async def passed(self, request: Request) -> Response:
        """Whatever else servers offer: to any one of them, as it is."""
        path = request.url.path
        if path in NOT_PASSED:
            raise RequestError(f"{shown(path)} changes one server; ask that server itself", code="not_found")
        room = self._budget.room()
        with room.released_on_error():
            body = await self._body(request, room)
        return PassedAnswer(self, request.method, _target(request), _headers(request), body, room)

    async def health(self, request: Request) -> Response:
        """200 while a decode server is up, else 503; 503 also while the proxy itself is stopping."""
        counts = {role.value: len(self.fleet.of(role)) for role in Role}
        if self.is_draining:
            return _json({"status": "draining"} | counts, 503)
        is_ok = counts[Role.DECODE.value] > 0
        return _json({"status": "ok" if is_ok else "no decode server is up"} | counts, 200 if is_ok else 503)

    async def metrics_page(self, request: Request) -> Response:
        """GET /metrics, for Prometheus."""
        page, content_type = self.metrics.render(request.headers.get("accept", ""))
        return Response(page, headers={"content-type": content_type})

    async def servers(self, request: Request) -> Response:
        """GET /admin/servers."""
        return _json({"servers": [server.as_json() for server in self.fleet.servers]})

    async def drain(self, request: Request) -> Response:
        """POST /admin/drain and /admin/resume, with {"server": URL}: new requests go elsewhere, or come again."""
        room = self._budget.room()
        try:
            body = await self._body(request, room)
        finally:
            room.release()
        try:
            name = msgspec.json.decode(body, type=dict[str, str])["server"]
        except (msgspec.MsgspecError, KeyError):
            raise RequestError('expected {"server": URL}', param="server") from None
        found = self.fleet.find(name)
        if not found:
            raise RequestError(f"there is no server {shown(name)} here", param="server", code="not_found")
        for server in found:
            server.is_draining = request.url.path == "/admin/drain"
        return _json({"servers": [server.as_json() for server in found]})

    async def _complete(self, request: Request, *, is_chat: bool) -> Response:
        room = self._budget.room()
        with room.released_on_error():
            body = await self._body(request, room)
            if len(body) > LARGE_BODY_BYTES:
                call = await self._in_thread(lambda: _parse_large(body, is_chat))
            else:
                call = parse_call(body, is_chat=is_chat)
        headers = [(name, value) for name, value in _headers(request) if name != b"accept-encoding"]
        return CompletionAnswer(self, call, _target(request), headers, room)

    async def _body(self, request: Request, room: BodyRoom) -> bytes:
        limit = self.config.max_body_bytes
        too_large = RequestError(
            f"the body is larger than the {limit} bytes this proxy takes", code="request_too_large"
        )
        if int(request.headers.get("content-length", 0)) > limit:  # the parser has checked that it is a number
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for piece in request.stream():
                    body += piece
                    if len(body) > limit:
                        raise too_large
                    room.grow(len(body))
        except TimeoutError:
            text = f"the body did not arrive within {BODY_TIMEOUT_S:g} s"
            raise RequestError(text, code="request_timeout") from None
        return bytes(body)

    async def _in_thread(self, work: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    @contextmanager
    def admitted(self) -> Any:
        """A place among the requests that are taken at a time. Raises RequestError ("overloaded")."""
        if self.num_requests >= self.config.max_requests:
            text = f"{self.num_requests} requests are with the servers and no more are taken now; try later"
            raise RequestError(text, code="overloaded")
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1


def create_app(proxy: Proxy) -> ASGIApp:
    """The application around a proxy."""
    config = proxy.config
    routes = [
        Route(CHAT, proxy.chat, methods=["POST"]),
        Route(COMPLETIONS, proxy.completions, methods=["POST"]),
        Route("/health", proxy.health, methods=["GET"]),
        Route("/metrics", proxy.metrics_page, methods=["GET"]),
        Route("/admin/servers", proxy.servers, methods=["GET"]),
        Route("/admin/drain", proxy.drain, methods=["POST"]),
        Route("/admin/resume", proxy.drain, methods=["POST"]),
        Route("/v1/{path:path}", proxy.passed, methods=["GET", "POST", "DELETE"]),
        *(Route(path, proxy.passed, methods=["GET", "POST"]) for path in PASSED),
    ]
    handlers: dict[Any, Any] = {
        HeadwaterError: _on_error,
        HTTPException: _on_http_error,
        ClientDisconnect: _on_client_gone,
        Exception: _on_error,
    }
    inner = Starlette(routes=routes, exception_handlers=handlers)
    inner.router.redirect_slashes = False
    app = _admit(inner, proxy)
    if config.api_key is None:
        app = keep_pages_out(require_json(app, _refuse), config.host, _refuse)
    else:
        app = require_key(
            app, config.api_key, _refuse, lambda path: path != "/health" and not path.startswith("/admin")
        )
    app = _guard_admin(app, config.admin_key)
    return _count_requests(app, proxy.metrics)


def _parse_large(body: bytes, is_chat: bool) -> CallBody:
    call = parse_call(body, is_chat=is_chat)
    _ = call.prompt  # decoded here, in the thread
    return call


def _target(request: Request) -> str:
    raw: bytes = request.scope.get("raw_path") or request.url.path.encode()
    query: bytes = request.scope.get("query_string", b"")
    return (raw + (b"?" + query if query else b"")).decode("latin-1")


def _headers(request: Request) -> Headers:
    return end_to_end(request.scope["headers"])


def _admit(app: ASGIApp, proxy: Proxy) -> ASGIApp:
    async def admitted(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(("/health", "/metrics", "/admin")):
            await app(scope, receive, send)
            return
        try:
            with proxy.admitted():
                await app(scope, receive, send)
        except RequestError as error:  # nothing was sent: the application answers its own errors
            await _refuse(error, scope, receive, send)

    return admitted


def _is_for_clients(path: str) -> bool:
    return path != "/health" and not path.startswith("/admin")


def _guard_admin(app: ASGIApp, admin_key: str | None) -> ASGIApp:
    async def refused(scope: Scope, receive: Receive, send: Send) -> None:
        error = RequestError("this proxy was started without --admin-key; it cannot be administered", code="not_found")
        await _refuse(error, scope, receive, send)

    guarded = refused if admin_key is None else require_key(app, admin_key, _refuse, lambda path: True)

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        is_admin = scope["type"] == "http" and scope["path"].startswith("/admin")
        await (guarded if is_admin else app)(scope, receive, send)

    return checked


def _count_requests(app: ASGIApp, metrics: ProxyMetrics) -> ASGIApp:
    async def counted(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        status = CLIENT_GONE

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await app(scope, receive, noted)
        finally:
            path = scope["path"] if scope["path"] in (CHAT, COMPLETIONS, "/v1/models", "/health") else "other"
            metrics.requests.labels(path, str(status)).inc()

    return counted


def _json(fields: dict[str, Any], status: int = 200) -> Response:
    return Response(msgspec.json.encode(fields), status, media_type="application/json")


async def _refuse(error: RequestError, scope: Scope, receive: Receive, send: Send) -> None:
    status, body, headers = error_reply(error)
    await Response(body, status, headers, media_type="application/json")(scope, receive, send)


async def _on_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, RequestError):
        log.error("%s %s: %s", request.method, shown(request.url.path), one_line(repr(error)))
    status, body, headers = error_reply(error)
    return Response(body, status, headers, media_type="application/json")


async def _on_http_error(request: Request, error: HTTPException) -> Response:
    code = "method_not_allowed" if error.status_code == 405 else "not_found"
    text = f"{shown(request.method)} {shown(request.url.path)}: {error.detail}"
    return await _on_error(request, RequestError(text, code=code))


async def _on_client_gone(request: Request, error: Exception) -> Response:
    """It left in the middle of its own request. Nobody reads this."""
    return Response(status_code=CLIENT_GONE)
