"""The HTTP side: an ASGI application with OpenAI's routes, /health, /metrics and the page, before one `Generator`.

A request is read and checked, then answered by a response object that watches for the client's leaving all the time: a
disconnect cancels the work, and leaving the generation's `with` block aborts it in the engine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headwater.errors import EngineDeadError, HeadwaterError, RequestError
from headwater.serve.connections import BodyBudget, BodyRoom
from headwater.serve.errors import error_reply, one_line, shown
from headwater.serve.generation import Generation, Generator
from headwater.serve.guard import keep_pages_out, require_json, require_key
from headwater.serve.metrics import ServerMetrics
from headwater.serve.openai import LARGE_BODY_BYTES, Call, Limits, parse_chat, parse_completion
from headwater.serve.peers import NO_PEERS, Peers, reachable
from headwater.serve.replies import ChatReply, Choice, CompletionReply, Reply
from headwater.serve.sending import ClientStalledError, impatient, until_disconnect
from headwater.serve.watching import PAGE_FILES, Watching

BODY_TIMEOUT_S = 60.0
OPEN_PATHS = frozenset({"/health", *PAGE_FILES})
"""What needs no API key: a load balancer and a browser ask without one. The page alone holds no data."""
SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"
CLIENT_GONE = 499
"""What a client that left before any answer would have got, as in nginx' logs."""

log = logging.getLogger("headwater.serve")


@dataclass(frozen=True, kw_only=True)
class AppConfig:
    """How the server presents itself."""

    served_model_name: str
    host: str
    """The address it listens on."""
    api_key: str | None
    max_body_bytes: int
    max_total_body_bytes: int
    engine_timeout_s: float
    requires_cache_salt: bool = False


def create_app(
    generator: Generator, config: AppConfig, peers: Peers = NO_PEERS, watching: Watching | None = None
) -> ASGIApp:
    """The application. It keeps no state of its own besides the metrics. Without `watching` its page shows no pool."""
    server = _Server(generator, config, peers)
    watching = watching or Watching(None, config.served_model_name, lambda: generator.client.stats)
    routes = [
        Route("/v1/chat/completions", server.chat, methods=["POST"]),
        Route("/v1/completions", server.completions, methods=["POST"]),
        Route("/v1/models", server.models, methods=["GET"]),
        Route("/v1/models/{name:path}", server.model, methods=["GET"]),
        Route("/health", server.health, methods=["GET"]),
        Route("/metrics", server.metrics, methods=["GET"]),
        *watching.routes,
    ]
    handlers: dict[Any, Any] = {
        HeadwaterError: _on_error,
        HTTPException: _on_http_error,
        ClientDisconnect: _on_client_gone,
        Exception: _on_error,
    }
    inner = Starlette(routes=routes, exception_handlers=handlers)
    inner.router.redirect_slashes = False  # a redirect would name whichever host the client sent
    app: ASGIApp = require_json(inner, _refuse)
    if config.api_key is not None:
        app = require_key(app, config.api_key, _refuse, lambda path: path not in OPEN_PATHS)
    else:
        app = keep_pages_out(app, config.host, _refuse)
    paths = frozenset(route.path for route in routes)
    return _count_requests(app, generator.metrics, paths)


class _Server:
    """The endpoints."""

    def __init__(self, generator: Generator, config: AppConfig, peers: Peers) -> None:
        self._peers = peers
        self._generator = generator
        self._config = config
        self._started = int(time.time())
        self._budget = BodyBudget(config.max_total_body_bytes)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._answer(request, parse_chat, ChatReply)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._answer(request, parse_completion, CompletionReply)

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        return _json({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME."""
        self._check_model(request.path_params["name"])
        return _json(self._card())

    async def health(self, request: Request) -> Response:
        """200 while the engine lives, 503 when it is gone or hangs. (Before it is ready, connections wait.)"""
        client = self._generator.client
        if client.death is not None:
            raise client.death
        if client.silent_s > self._config.engine_timeout_s:
            text = (
                f"the engine gave no sign of life for {client.silent_s:.1f} s; expected one within "
                f"{self._config.engine_timeout_s:g} s"
            )
            raise RequestError(text, code="engine_hung")
        local = request.scope.get("server")
        peer = reachable(self._peers.address, local[0] if local else None)
        return _json({"status": "ok"} | ({"peer": peer} if peer else {}))

    async def metrics(self, request: Request) -> Response:
        """GET /metrics, for Prometheus."""
        page, content_type = self._generator.metrics.render(request.headers.get("accept", ""))
        return Response(page, headers={"content-type": content_type})

    async def _answer(self, request: Request, parse: Callable[[bytes, Limits], Call], kind: type[Reply]) -> Response:
        room = self._budget.room()
        with room.released_on_error():
            call = await self._call(request, parse, room)
            self._check_model(call.model)
            if self._config.requires_cache_salt and call.cache_salt is None:
                raise RequestError("this server needs a cache_salt in every request", param="cache_salt")
        reply = kind(
            self._config.served_model_name,
            self._generator.tokenizer,
            with_logprobs=call.params.logprobs is not None,
            include_usage=call.include_usage,
        )
        return (StreamedAnswer if call.stream else WholeAnswer)(self._generator, call, reply, room)

    async def _call(self, request: Request, parse: Callable[[bytes, Limits], Call], room: BodyRoom) -> Call:
        body = await self._body(request, room)
        if len(body) > LARGE_BODY_BYTES:
            return await self._generator.workers.call(lambda: parse(body, self._generator.limits))
        return parse(body, self._generator.limits)

    async def _body(self, request: Request, room: BodyRoom) -> bytes:
        limit = self._config.max_body_bytes
        too_large = RequestError(
            f"the body is larger than the {limit} bytes this server takes", code="request_too_large"
        )
        # The parser has checked that it is a number.
        if int(request.headers.get("content-length", 0)) > limit:
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

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._config.served_model_name:
            text = f"there is no model {shown(name)} here; this server has {self._config.served_model_name!r}"
            raise RequestError(text, param="model", code="model_not_found")

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._config.served_model_name,
            "object": "model",
            "created": self._started,
            "owned_by": "headwater",
            "max_model_len": self._generator.client.ready.max_model_len,
        }


class _Answer(Response):
    """A response that is made while it is sent, and no longer than somebody waits for it."""

    def __init__(self, generator: Generator, call: Call, reply: Reply, room: BodyRoom) -> None:
        super().__init__()
        self._room = room
        self._generator = generator
        self._call = call
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._run(scope, receive, impatient(send)))
        except ClientStalledError as error:
            # Nothing can be said to it. The response stays incomplete, and the connection is closed for that.
            log.warning("%s: %s", scope["path"], error)
        finally:
            self._room.release()

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = self._call
        del self._call
        with await self._generator.begin(call) as generation:
            del call  # only tokens are left of the body
            self._room.release()
            await self._send(generation, scope, receive, send)

    async def _send(self, generation: Generation, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError


class WholeAnswer(_Answer):
    """All at once, when all choices have ended."""

    async def _send(self, generation: Generation, scope: Scope, receive: Receive, send: Send) -> None:
        choices = [Choice() for _ in range(generation.num_sequences)]
        while deltas := await generation.next():
            for index, delta in deltas:
                self._reply.add(index, choices[index], delta)
        parts = deque(self._reply.whole(choices, generation.usage, generation.transfer_params))
        headers = [
            (b"content-length", str(sum(map(len, parts))).encode()),
            (b"content-type", b"application/json"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while parts:
            part = parts.popleft()
            await send({"type": "http.response.body", "body": part, "more_body": bool(parts)})


class StreamedAnswer(_Answer):
    """Server-sent events. What fails before the first token still gets a proper status; later, an error event."""

    _started = False

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super()._run(scope, receive, send)
        except Exception as error:
            if not self._started or isinstance(error, ClientStalledError):
                raise
            if not isinstance(error, HeadwaterError):
                log.exception("a stream failed")
            event = b"data: " + error_reply(error).body + b"\n\n"
            await send({"type": "http.response.body", "body": event, "more_body": False})

    async def _send(self, generation: Generation, scope: Scope, receive: Receive, send: Send) -> None:
        deltas = await generation.next()
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
        opened: set[int] = set()
        while deltas:
            events = []
            for index, delta in deltas:
                if index not in opened:
                    opened.add(index)
                    events.append(_event(self._reply.opening(index)))
                events.append(_event(self._reply.chunk(index, delta)))
            await send({"type": "http.response.body", "body": b"".join(events), "more_body": True})
            deltas = await generation.next()
        last = _event(self._reply.closing(generation.usage)) + DONE
        await send({"type": "http.response.body", "body": last, "more_body": False})


def _count_requests(app: ASGIApp, metrics: ServerMetrics, paths: frozenset[str]) -> ASGIApp:
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
            path = scope["path"] if scope["path"] in paths else "other"
            metrics.http_requests.labels(path, str(status)).inc()

    return counted


def _json(fields: dict[str, Any], status: int = 200) -> Response:
    return Response(msgspec.json.encode(fields), status, media_type="application/json")


def _event(fields: dict[str, Any] | None) -> bytes:
    return b"" if fields is None else b"data: " + msgspec.json.encode(fields) + b"\n\n"


def _error_response(error: Exception) -> Response:
    status, body, headers = error_reply(error)
    return Response(body, status, headers, media_type="application/json")


async def _refuse(error: RequestError, scope: Scope, receive: Receive, send: Send) -> None:
    await _error_response(error)(scope, receive, send)


async def _on_error(request: Request, error: Exception) -> Response:
    # The engine's death is reported once, by whoever ends the server.
    if isinstance(error, HeadwaterError) and not isinstance(error, RequestError | EngineDeadError):
        log.error("%s %s: %s", request.method, shown(request.url.path), one_line(str(error)))
    return _error_response(error)


async def _on_http_error(request: Request, error: HTTPException) -> Response:
    """Starlette's own: no such path, or not with this method."""
    code = "method_not_allowed" if error.status_code == 405 else "not_found"
    text = f"{shown(request.method)} {shown(request.url.path)}: {error.detail}"
    return _error_response(RequestError(text, code=code))


async def _on_client_gone(request: Request, error: Exception) -> Response:
    """It left in the middle of its own request. Nobody reads this."""
    return Response(status_code=CLIENT_GONE)
