"""A server that fails on time, for tests of the proxy: what it does with each request is a function of the test's.

It speaks just enough HTTP/1.1, on an event loop in a thread of its own, and notes every request and how it ended.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

Headers = dict[str, str]


@dataclass
class Asked:
    """A request that came, and when it began and ended."""

    method: str
    path: str
    headers: Headers
    body: Any
    began_s: float = field(default_factory=time.monotonic)
    ended_s: float | None = None
    was_cut: bool = False
    """The other side left before the answer was whole."""

    @property
    def params(self) -> Any:
        return (self.body or {}).get("kv_transfer_params", {}).get("headwater")


class Exchange:
    """One request, for behaviours."""

    def __init__(self, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked = asked
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def json(self, fields: Any, status: int = 200) -> None:
        body = json.dumps(fields).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        await self.send(head.encode() + body)

    async def start_stream(self) -> None:
        await self.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")

    async def event(self, fields: Any) -> None:
        data = b"data: " + (fields if isinstance(fields, bytes) else json.dumps(fields).encode()) + b"\n\n"
        await self.send(b"%x\r\n%s\r\n" % (len(data), data))

    async def end_stream(self) -> None:
        await self.event(b"[DONE]")
        await self.send(b"0\r\n\r\n")

    def cut(self) -> None:
        self.writer.transport.abort()


Behaviour = Callable[[Exchange], Awaitable[None]]


def usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


async def answers(
    exchange: Exchange, *, name: str = "x", num_events: int = 4, delay_s: float = 0, cached: int = 0
) -> None:
    """A whole answer, or a stream of so many events."""
    body = exchange.asked.body or {}
    if not body.get("stream"):
        await asyncio.sleep(delay_s)
        choices = [{"index": 0, "message": {"role": "assistant", "content": name * num_events}}]
        await exchange.json({"id": "1", "choices": choices, "usage": usage(100, num_events, cached)})
        return
    await exchange.start_stream()
    for number in range(num_events):
        await asyncio.sleep(delay_s)
        await exchange.event({"choices": [{"index": 0, "delta": {"content": f"{name}{number}"}}]})
    await exchange.event({"choices": [], "usage": usage(100, num_events, cached)})
    await exchange.end_stream()


class FakeUpstream:
    """A server with a behaviour. `behave` may be replaced at any time."""

    def __init__(self, behave: Behaviour = answers, *, peer: str | None = None) -> None:
        self.behave = behave
        self.peer = peer
        self.health_status = 200
        self.asked: list[Asked] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server: asyncio.Server | None = None
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def completions(self) -> list[Asked]:
        return [asked for asked in self.asked if asked.method == "POST"]

    def start(self) -> None:
        """Listen; on the same port, if it did before."""
        self._server = self._do(asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=1 << 20))
        self.port = self._server.sockets[0].getsockname()[1]

    def stop(self) -> None:
        """Refuse connections, and cut those there are, as a process that dies."""

        async def stop() -> None:
            assert self._server is not None
            self._server.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

        self._do(stop())

    def close(self) -> None:
        if self._loop.is_running():
            self.stop()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
            self._loop.close()

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._one(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.strip().split("\r\n")
        method, path, _ = first.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        raw = await reader.readexactly(int(headers.get("content-length", 0)))
        body = json.loads(raw) if raw else None
        asked = Asked(method, path, headers, body)
        exchange = Exchange(asked, reader, writer)
        if path == "/health":
            status = {"status": "ok"} | ({"peer": self.peer} if self.peer else {})
            await exchange.json(status, self.health_status)
            return True
        self.asked.append(asked)
        behaving = asyncio.ensure_future(self.behave(exchange))
        leaving = asyncio.ensure_future(reader.read(1))  # clients do not ask ahead: only an end can come
        try:
            await asyncio.wait({behaving, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not behaving.done():
                asked.was_cut = True
                return False
            behaving.result()
            return not writer.is_closing()
        except OSError:
            asked.was_cut = True
            return False
        finally:
            asked.ended_s = time.monotonic()
            for task in (behaving, leaving):
                task.cancel()
            await asyncio.gather(behaving, leaving, return_exceptions=True)
