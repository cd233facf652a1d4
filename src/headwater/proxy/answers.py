"""Answers to clients: a request is tried on one decode server after the other until one begins to answer."""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headwater.errors import RequestError
from headwater.proxy.calls import CallBody
from headwater.proxy.fleet import FleetServer
from headwater.proxy.legs import RETRIED, Attempt
from headwater.proxy.upstream import Headers, UpstreamError, end_to_end
from headwater.serve.connections import BodyRoom
from headwater.serve.errors import error_reply
from headwater.serve.sending import ClientStalledError, impatient, until_disconnect

if TYPE_CHECKING:
    from headwater.proxy.app import Proxy

log = logging.getLogger("headwater.proxy")


class _Refusal(NamedTuple):
    """What a server said instead of an answer, for the case that no other does better."""

    status: int
    headers: Headers
    body: bytes


class CompletionAnswer(Response):
    """The answer to a request for a completion, made while it is sent. Both legs end when the client leaves."""

    def __init__(self, proxy: Proxy, call: CallBody, target: str, headers: Headers, room: BodyRoom) -> None:
        super().__init__()
        self._proxy = proxy
        self._call: CallBody | None = call
        self._streams = call.streams
        self._target = target
        self._request_headers = headers
        self._room = room
        self._arrived_s = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._run(impatient(send)))
        except ClientStalledError as error:
            log.warning("%s: %s", scope["path"], error)
        finally:
            self._room.release()

    async def _run(self, send: Send) -> None:
        call, self._call = self._call, None
        assert call is not None
        prompt = await self._proxy.keys_of(call)
        refusal: _Refusal | None = None
        tried: list[FleetServer] = []
        next_attempt = partial(self._proxy.attempt, call, prompt, self._target, self._request_headers)
        while (attempt := next_attempt(tried)) is not None:
            tried.append(attempt.server)
            if len(tried) > 1:
                self._proxy.metrics.retries.inc()
            async with attempt:
                try:
                    await attempt.begin()
                except UpstreamError as error:
                    attempt.server.note_failure(error)
                    log.warning("no server answered a request: %s", error)
                    continue
                if attempt.status not in RETRIED:
                    # Streams may go on for long: nothing of the request stays.
                    del call, prompt, next_attempt
                    attempt.forget_request(self._room.release)
                    await self._relay(attempt, send)
                    return
                refusal = _Refusal(attempt.status, attempt.headers, attempt.body)
        if refusal is None:
            # Why is in the log: a client need not know the servers' addresses.
            raise RequestError(f"no server answered ({len(tried)} tried); try again later", code="no_server")
        await self._refuse(refusal, send)

    async def _relay(self, attempt: Attempt, send: Send) -> None:
        self._proxy.metrics.first_byte_s.observe(time.monotonic() - self._arrived_s)
        headers = end_to_end(attempt.headers)
        if attempt.is_whole:
            await _send_whole(send, attempt.status, headers, attempt.whole_answer())
            return
        await send({"type": "http.response.start", "status": attempt.status, "headers": headers})
        try:
            async for piece in attempt.pieces():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except UpstreamError as error:
            log.warning("an answer was cut off: %s", error)
            if not self._streams:
                return  # incomplete, which ends the connection: half an answer must not look like one
            event = b"data: " + error_reply(RequestError(f"the answer was cut off: {error}", code="no_server")).body
            await send({"type": "http.response.body", "body": event + b"\n\n", "more_body": False})
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _refuse(self, refusal: _Refusal, send: Send) -> None:
        status, headers, body = refusal
        if body.startswith(b"data: "):  # an error as the first event of a stream
            body = body.removeprefix(b"data: ").partition(b"\n\n")[0]
            headers = [(name, value) for name, value in headers if name != b"content-type"]
            headers.append((b"content-type", b"application/json"))
        await _send_whole(send, status, end_to_end(headers), body)


class PassedAnswer(Response):
    """The answer of one server to a request that the proxy does not understand."""

    def __init__(self, proxy: Proxy, method: str, target: str, headers: Headers, body: bytes, room: BodyRoom) -> None:
        super().__init__()
        self._proxy = proxy
        self._method = method
        self._target = target
        self._request_headers = headers
        self._body = body
        self._room = room

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._run(impatient(send)))
        except ClientStalledError as error:
            log.warning("%s: %s", scope["path"], error)
        finally:
            self._room.release()

    async def _run(self, send: Send) -> None:
        tried: list[FleetServer] = []
        while (server := self._proxy.any_server(tried)) is not None:
            tried.append(server)
            server.num_running += 1
            try:
                await self._pass(server, send)
                return
            except UpstreamError as error:
                server.note_failure(error)
                log.warning("no server answered a request: %s", error)
                if not (error.refused or self._method == "GET") or error.replied:
                    break  # it may have done what it was asked
            finally:
                server.num_running -= 1
        raise RequestError(f"no server answered ({len(tried)} tried); try again later", code="no_server")

    async def _pass(self, server: FleetServer, send: Send) -> None:
        timely = self._proxy.timely
        reply = await timely(
            server.upstream.request(self._method, self._target, self._request_headers, self._body), first=True
        )
        try:
            headers = end_to_end(reply.headers)
            await send({"type": "http.response.start", "status": reply.status, "headers": headers})
            try:
                while piece := await timely(reply.read(), first=False):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            except UpstreamError as error:
                log.warning("an answer was cut off: %s", error)
                return
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            reply.close()


async def _send_whole(send: Send, status: int, headers: Headers, body: bytes) -> None:
    fields = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body, "more_body": False})
