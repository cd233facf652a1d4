"""The engine process's end of the socket: all is read before a step, and a cancelled call costs none."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

pytest.importorskip("msgspec")

from headwater.connector.transfers import TransferParams
from headwater.engine.params import FinishReason, RequestOutput, SamplingParams
from headwater.errors import EngineError
from headwater.serve.messages import Abort, Ready, Shutdown, Stats, Submit, encode
from headwater.serve.worker import Running, WorkerChannel, serve_engine

from support import wait_until

WAIT_S = 30.0
READY = Ready("m", 8192, 50_000, [0], 10, 16, 4, "", "")


class Engine:
    """Notes what reaches it. Its first step begins and ends when the test says so; each gives every request its end."""

    def __init__(self) -> None:
        self.added: list[str] = []
        self.aborted: list[str] = []
        self.num_steps = 0
        self.in_step, self.go_on = threading.Event(), threading.Event()
        self._requests: list[str] = []

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        cache_salt: str | None,
        transfer: TransferParams | None,
    ) -> None:
        self.added.append(request_id)
        self._requests.append(request_id)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        if request_id in self._requests:
            self._requests.remove(request_id)

    def step(self) -> list[RequestOutput]:
        self.in_step.set()
        assert self.go_on.wait(WAIT_S)
        self.num_steps += 1
        ended, self._requests = self._requests[:1], self._requests[1:]
        return [RequestOutput(request_id, [1], None, FinishReason.LENGTH, 1, 0) for request_id in ended]

    def check_alive(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, WorkerChannel]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(WAIT_S)
        yield ours, WorkerChannel(theirs)


def test_a_call_that_is_cancelled_in_a_step_costs_no_further_step(ends: tuple[socket.socket, WorkerChannel]) -> None:
    """A megabyte of prompts and their aborts are read while the engine is in a step, and none of them reaches it."""
    server, channel = ends
    engine = Engine()
    running = Running(engine, READY, Stats)
    serving = threading.Thread(target=serve_engine, args=(channel, running), daemon=True)
    serving.start()
    threading.Thread(target=_read_all, args=(server,), daemon=True).start()
    server.sendall(encode(Submit("first", [1], SamplingParams())))
    assert engine.in_step.wait(WAIT_S)
    prompts = [str(number) for number in range(100)]
    try:
        for request_id in prompts:
            server.sendall(encode(Submit(request_id, [40_000] * 4000, SamplingParams())))
        for request_id in prompts:
            server.sendall(encode(Abort(request_id)))
        server.sendall(encode(Submit("last", [1], SamplingParams())))
        wait_until(lambda: ("Submit", "last") in channel._inbox._messages, WAIT_S, "all is read")
    finally:
        engine.go_on.set()
    server.sendall(encode(Shutdown()))
    serving.join(WAIT_S)
    assert not serving.is_alive()
    assert set(engine.added) <= {"first", "last"}
    assert engine.aborted == []
    assert engine.num_steps <= 2


def test_an_abort_of_what_the_engine_has_reaches_it(ends: tuple[socket.socket, WorkerChannel]) -> None:
    server, channel = ends
    server.sendall(encode(Submit("a", [1], SamplingParams())))
    assert channel.receive(wait_s=WAIT_S) == [Submit("a", [1], SamplingParams())]
    server.sendall(encode(Abort("a")))
    assert channel.receive(wait_s=WAIT_S) == [Abort("a")]
    assert channel.receive(wait_s=0.0) == []


def test_the_end_of_the_stream_and_garbage_are_told_after_all_messages(
    ends: tuple[socket.socket, WorkerChannel],
) -> None:
    server, channel = ends
    server.sendall(encode(Abort("a")))
    assert channel.receive(wait_s=WAIT_S) == [Abort("a")]
    server.shutdown(socket.SHUT_WR)
    with pytest.raises(EOFError, match="closed"):
        channel.receive(wait_s=WAIT_S)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"\xff\xff\xff\xff")
        with pytest.raises(EngineError, match="announces"):
            WorkerChannel(theirs).receive(wait_s=WAIT_S)


def _read_all(sock: socket.socket) -> Any:
    try:
        while sock.recv(1 << 16):
            pass
    except OSError:
        pass
