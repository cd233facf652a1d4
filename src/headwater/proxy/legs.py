"""One try of a request: the decode leg, whose answer goes to the client, and the prefill leg beside it.

Both are sent at once. Nothing of an answer is passed on before its first byte (of a stream) or its end (otherwise)
has come, so that until then another decode server can take its place.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self

from headwater.errors import RequestError
from headwater.proxy.calls import CallBody
from headwater.proxy.choice import Router, RoutingTicket, ServerChoice, without
from headwater.proxy.config import ProxyConfig
from headwater.proxy.fleet import FleetServer, ServerRole
from headwater.proxy.keys import PromptKeys
from headwater.proxy.metrics import ProxyMetrics
from headwater.proxy.upstream import Headers, UpstreamError, UpstreamReply
from headwater.proxy.usage import EventFilter, cached_tokens, with_cached_tokens
from headwater.serve.connections import BodyBudget

RETRIED = frozenset({429, 500, 502, 503, 504})
"""Statuses after which another server may do better."""
MAX_WHOLE_BYTES = 16 << 20
"""A larger answer that is not streamed is passed on before its end has come."""
MAX_PREFILL_ANSWER_BYTES = 1 << 20
MAX_PREFILLS = 2
"""Prefill servers that are tried, one after the other, while decode waits."""
QUEUE_PATIENCE = 2.0
"""Decode waits so many times as long as the prefill server's queue should take: that is an estimate."""
_FIRST_ERROR = b'data: {"error"'

log = logging.getLogger("headwater.proxy")


class Attempt:
    """One decode server and, if `pushes`, a prefill server, for one request. Leaving the `with` block cancels what is
    still going on."""

    def __init__(
        self,
        call: CallBody,
        target: str,
        headers: Headers,
        choice: ServerChoice,
        ticket: RoutingTicket,
        config: ProxyConfig,
        metrics: ProxyMetrics,
        replies: BodyBudget,
    ) -> None:
        assert isinstance(choice.server, FleetServer)
        self.server = choice.server
        self._call: CallBody | None = call
        self._streams = call.streams
        self._room = replies.room()
        self.status = 0
        self.headers: Headers = []
        self.body = b""
        """What came first: the whole answer if `is_whole`."""
        self.is_whole = False
        self.prefill_cached_tokens = 0
        self._target = target
        self._request_headers = headers
        self._config = config
        self._metrics = metrics
        self._ticket = ticket
        self._reply: UpstreamReply | None = None
        self._transfer: str | None = None
        self._start_s = config.start_s
        self._prefilling: asyncio.Task[None] | None = None
        self._outcome = "cancelled"

    def prefill(self, router: Router, prompt: PromptKeys, servers: Sequence[FleetServer]) -> None:
        """Start the prefill leg, on the cheapest of the servers. Decode is told to wait for what is queued there."""
        assert self.server.peer is not None
        self._transfer = secrets.token_hex(16)
        assert self._call is not None
        body = self._call.for_prefill(self.server.peer, self._transfer)
        first = router.choose(prompt, servers)
        self._start_s = self._config.start_s + QUEUE_PATIENCE * first.server.queue_s
        self._prefilling = asyncio.create_task(self._prefill(router, prompt, servers, body, first))

    def forget_request(self, then: Callable[[], None]) -> None:
        """An answer has begun: the request is not needed again. `then` is called once no leg holds it any more."""
        self._call = None
        if self._prefilling is None or self._prefilling.done():
            then()
        else:
            self._prefilling.add_done_callback(lambda task: then())

    async def begin(self) -> None:
        """Wait for the first byte. Raises UpstreamError where none comes, or the server is found to be down."""
        first = asyncio.ensure_future(self._first())
        tasks: set[asyncio.Future[object]] = {first}  # type: ignore[arg-type]
        downing = None
        if self.server.is_up:
            downing = asyncio.ensure_future(self.server.went_down.wait())
            tasks.add(downing)  # type: ignore[arg-type]
        limit_s = self._config.first_byte_timeout_s
        try:
            await asyncio.wait(tasks, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if first.done():
                first.result()
            elif downing is not None and downing.done():
                raise UpstreamError(f"{self.server.name} went down before it answered")
            else:
                raise UpstreamError(f"{self.server.name} gave no answer within {limit_s:g} s")
        except UpstreamError:
            self._outcome = "failed"
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._outcome = "ok" if self.status < 400 else "status"
        self._ticket.begin()

    def whole_answer(self) -> bytes:
        """The answer if `is_whole`, with the larger count of cached tokens."""
        return with_cached_tokens(self.body, self.prefill_cached_tokens)

    async def pieces(self) -> AsyncIterator[bytes]:
        """The answer as it comes, with the larger count of cached tokens. Raises UpstreamError where it breaks off."""
        assert self._reply is not None
        events = EventFilter() if self._streams and self._transfer is not None else None
        piece = self.body
        while piece:
            if events is not None:
                events.at_least = self.prefill_cached_tokens
                piece = events.feed(piece)
            if piece:
                yield piece
            piece = await self._next_piece(self._reply)
        if events is not None and (rest := events.finish()):
            yield rest

    async def _next_piece(self, reply: UpstreamReply) -> bytes:
        limit_s = self._config.idle_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await reply.read()
        except TimeoutError:
            self._outcome = "broken"
            raise UpstreamError(f"{self.server.name} sent nothing for {limit_s:g} s", replied=True) from None
        except UpstreamError:
            self._outcome = "broken"
            raise

    async def _first(self) -> None:
        assert self._call is not None
        body = self._call.for_decode(self._transfer, self._config.wait_s, self._start_s)
        reply = self._reply = await self.server.upstream.request("POST", self._target, self._request_headers, body)
        self.status, self.headers = reply.status, reply.headers
        if reply.status == 200 and self._streams:
            await self._first_event(reply)
        else:
            await self._whole(reply)

    async def _first_event(self, reply: UpstreamReply) -> None:
        kind = reply.header(b"content-type")
        if not kind.lower().startswith(b"text/event-stream"):
            raise UpstreamError(f"{self.server.name} answered a stream with {kind[:100]!r}", replied=True)
        self.body = await reply.read()
        if not self.body:
            raise UpstreamError(f"{self.server.name} ended a stream before its first event", replied=True)
        if self.body.startswith(_FIRST_ERROR):
            # The status had gone out before the server knew better.
            self.status = 503

    async def _whole(self, reply: UpstreamReply) -> None:
        body = bytearray()
        while piece := await reply.read():
            body += piece
            if len(body) > MAX_WHOLE_BYTES or not self._has_room(len(body)):
                self.body = bytes(body)
                return
        self.body, self.is_whole = bytes(body), True
        if reply.status == 200 and not self.body.lstrip()[:1] == b"{":
            raise UpstreamError(f"{self.server.name} answered with something other than a JSON object", replied=True)

    def _has_room(self, num_bytes: int) -> bool:
        try:
            self._room.grow(num_bytes)
        except RequestError:
            return False
        return True

    async def _prefill(
        self, router: Router, prompt: PromptKeys, servers: Sequence[FleetServer], body: bytes, first: ServerChoice
    ) -> None:
        tried: list[FleetServer] = []
        while len(tried) < MAX_PREFILLS and (left := without(servers, tried)):
            choice = router.choose(prompt, left) if tried else first
            server = choice.server
            assert isinstance(server, FleetServer)
            tried.append(server)
            before, began = server.queued_tokens, time.monotonic()
            ticket = router.send(prompt, choice)
            outcome = "cancelled"
            try:
                status, answer = await self._timely(self._ask(server, body))
                outcome = "ok" if status == 200 else "status"
                if status == 200:
                    server.note_pace(before + choice.uncached_tokens, time.monotonic() - began)
                self.prefill_cached_tokens = cached_tokens(answer) if status == 200 else 0
                return
            except UpstreamError as error:
                outcome = "failed"
                server.note_failure(error)
                if not error.refused:
                    return  # it may have sent a part; decode computes the rest
            finally:
                ticket.end()
                self._metrics.legs.labels(server.name, ServerRole.PREFILL.value, outcome).inc()

    async def _ask(self, server: FleetServer, body: bytes) -> tuple[int, bytes]:
        reply = await server.upstream.request("POST", self._target, self._request_headers, body)
        try:
            return reply.status, await reply.read_all(MAX_PREFILL_ANSWER_BYTES)
        finally:
            reply.close()

    async def _timely(self, work: Awaitable[tuple[int, bytes]]) -> tuple[int, bytes]:
        limit_s = self._config.first_byte_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await work
        except TimeoutError:
            raise UpstreamError(f"no prefill within {limit_s:g} s") from None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._reply is not None:
            self._reply.close()
        self._room.release()
        self._ticket.end()
        if isinstance(value, asyncio.CancelledError | GeneratorExit):
            self._outcome = "cancelled"
        self._metrics.legs.labels(self.server.name, ServerRole.DECODE.value, self._outcome).inc()
        if self._prefilling is not None:
            self._prefilling.cancel()
            (result,) = await asyncio.gather(self._prefilling, return_exceptions=True)
            if isinstance(result, Exception):
                log.error("a prefill leg failed: %r", result)
