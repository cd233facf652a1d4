"""The server's end of the socket to the engine process: what waits while the engine does not read, and the end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("msgspec")

from headwater.engine.params import SamplingParams
from headwater.errors import RequestError
from headwater.serve import client as client_module
from headwater.serve.client import EngineClient, GenerationJob
from headwater.serve.messages import Abort, FrameReader, Ready, Submit, ToEngine, decode_to_engine
from headwater.serve.process import EngineConnection

WAIT_S = 30.0
READY = Ready("m", 8192, 50_000, [0], 10, 16, 4, "", "")
JOB = GenerationJob([40_000] * 4000, SamplingParams())


class Process:
    """One that lives until `ended` is set, and is then gone before it can get a signal."""

    pid = 1 << 30  # nobody's

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.returncode = 0

    async def wait(self) -> int:
        await self.ended.wait()
        return 0

    def terminate(self) -> None:
        self.ended.set()
        raise ProcessLookupError


def with_client(test: Callable[[EngineClient, socket.socket], Any]) -> None:
    """Run a test with a client and the engine's end of its socket, which nobody reads."""

    async def run() -> None:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        process: Any = Process()
        with theirs:
            client = EngineClient(process, READY, EngineConnection(*await asyncio.open_connection(sock=ours)))
            try:
                async with asyncio.timeout(WAIT_S):
                    await test(client, theirs)
            finally:
                await client.close()

    asyncio.run(run())


def _is_last(message: ToEngine) -> bool:
    return isinstance(message, Submit) and message.prompt == [7]


async def submit_until_full(client: EngineClient, num_bytes: int) -> list[asyncio.Task[Any]]:
    """Calls of clients that wait, until so much waits for the engine."""
    calls = []
    while client._connection.num_waiting_bytes < num_bytes:
        calls.append(asyncio.create_task(client.submit([JOB] * 10)))
        await asyncio.sleep(0)
    return calls


def test_what_is_cancelled_before_the_engine_reads_takes_no_memory_and_never_reaches_it() -> None:
    async def test(client: EngineClient, theirs: socket.socket) -> None:
        calls = await submit_until_full(client, 1 << 20)
        for call in calls:
            call.cancel()
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if not isinstance(outcome, BaseException):
                outcome.close()
        assert client.num_in_flight == 0
        assert client._connection.num_waiting_bytes == 0
        assert client._connection._writer.transport.get_write_buffer_size() < 1 << 18
        last = asyncio.create_task(client.submit([GenerationJob([7], SamplingParams())]))
        read = await read_until(theirs, lambda messages: bool(messages) and _is_last(messages[-1]))
        await last
        submitted = {message.request_id for message in read if isinstance(message, Submit)}
        aborted = {message.request_id for message in read if isinstance(message, Abort)}
        assert len(submitted) == len(aborted) + 1 < 40, "only those that the socket had taken"

    with_client(test)


def test_a_server_whose_engine_does_not_read_takes_no_more_than_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_WAITING_BYTES", 1 << 20)

    async def test(client: EngineClient, theirs: socket.socket) -> None:
        calls = await submit_until_full(client, (1 << 20) + 1)
        num_before = client.num_in_flight
        with pytest.raises(RequestError, match="which does not read them; try again later") as caught:
            await client.submit([JOB])
        assert caught.value.code == "server_busy"
        assert client.num_in_flight == num_before
        # Everything that was taken arrives once the engine reads, in order.
        read = await read_until(theirs, lambda messages: len(messages) == num_before)
        assert [message.request_id for message in read if isinstance(message, Submit)] == list(
            map(str, range(num_before))
        )
        await asyncio.gather(*calls)
        await client.submit([JOB])

    with_client(test)


def test_an_engine_that_ends_just_before_it_is_told_to_is_no_error() -> None:
    async def test(client: EngineClient, theirs: socket.socket) -> None:
        await client.close()

    with_client(test)


async def read_until(theirs: socket.socket, is_all: Callable[[list[ToEngine]], bool]) -> list[ToEngine]:
    """Be the engine, and read until that is all."""
    reader, messages = FrameReader(), list[ToEngine]()
    while not is_all(messages):
        data = await asyncio.get_running_loop().sock_recv(theirs, 1 << 16)
        messages += map(decode_to_engine, reader.feed(data))
    return messages
