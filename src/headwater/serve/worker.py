"""The engine process: `python -m headwater.serve.worker FD`, one per server, started by `EngineClient`.

A thread reads messages from the socket FD at all times; the main one steps the engine while there is work, and sends
the outputs. The process lives no longer than its parent: when the socket closes, the whole process group (the ranks of
tensor parallelism too) goes at once.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple, Protocol

from headwater.connector.metrics import distributions, snapshot
from headwater.connector.transfers import TransferParams
from headwater.engine.config import EngineConfig
from headwater.engine.params import RequestOutput, SamplingParams
from headwater.errors import EngineError, HeadwaterError, RequestError
from headwater.extras import install_hint
from headwater.logs import adopt, set_up_logs
from headwater.serve.heartbeat import Heart
from headwater.serve.messages import (
    READ_BYTES,
    Abort,
    Failed,
    FrameReader,
    FromEngine,
    Heartbeat,
    Outputs,
    Progress,
    Ready,
    Rejected,
    Shutdown,
    Start,
    StartFailed,
    Stats,
    Submit,
    ToEngine,
    decode_to_engine,
    encode,
)

STATS_INTERVAL_S = 0.25
PROGRESS_INTERVAL_S = 0.05
IDLE_CHECK_S = 1.0  # a rank that dies while nothing runs is noticed so soon

log = logging.getLogger("headwater.serve.worker")


class EngineLike(Protocol):
    """What the worker needs of an engine; `headwater.engine.engine.Engine` is one, the tests' fake another."""

    @property
    def has_work(self) -> bool: ...
    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        cache_salt: str | None,
        transfer: TransferParams | None,
    ) -> Any: ...
    def abort(self, request_id: str) -> Any: ...
    def step(self) -> list[RequestOutput]: ...
    def check_alive(self) -> None: ...
    def close(self) -> None: ...


class Running(NamedTuple):
    """An engine and what the server must know of it."""

    engine: EngineLike
    ready: Ready
    stats: Callable[[], Stats]
    computes: bool = True
    """Whether the thread that steps the engine computes itself, and does not wait for a GPU to do so."""


Creator = Callable[[EngineConfig, Callable[[int, int], None]], Running]


class Inbox:
    """Messages that the engine has not seen yet, in order. A request that is aborted here never reaches it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._messages: dict[tuple[str, str], ToEngine] = {}
        """By kind and request."""
        self._end: Exception | None = None

    def put(self, message: ToEngine) -> None:
        """Add a message; an Abort takes the Submit that it is about with it, if that is still here."""
        request_id = message.request_id if isinstance(message, Submit | Abort) else ""
        with self._changed:
            if isinstance(message, Abort) and self._messages.pop((Submit.__name__, request_id), None) is not None:
                return
            self._messages[type(message).__name__, request_id] = message
            self._changed.notify()

    def end(self, reason: Exception) -> None:
        """Nothing more will come."""
        with self._changed:
            self._end = reason
            self._changed.notify()

    def take(self, wait_s: float | None) -> list[ToEngine]:
        """All messages; waits so long (None: for ever) for a first. Raises the reason of the end after the last."""
        with self._changed:
            self._changed.wait_for(lambda: self._messages or self._end is not None, wait_s)
            messages = list(self._messages.values())
            self._messages.clear()
            if not messages and self._end is not None:
                raise self._end
            return messages


class WorkerChannel:
    """The worker's end of the socket: whole messages, in order."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = threading.Lock()
        self._reader = FrameReader()
        self._last_progress_s = 0.0
        self._inbox = Inbox()
        # Also during a step: what clients that left have sent must neither reach the engine nor fill the server.
        threading.Thread(target=self._read, name="read-server", daemon=True).start()

    def send(self, message: FromEngine) -> None:
        """Send one message, from any thread; blocks while the server is not reading. Raises OSError if it is gone."""
        frame = encode(message)
        with self._sending:
            self._sock.sendall(frame)

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        """Report loading, often enough for a bar and no oftener."""
        now_s = time.monotonic()
        if done_bytes >= total_bytes or now_s - self._last_progress_s >= PROGRESS_INTERVAL_S:
            self._last_progress_s = now_s
            self.send(Progress(done_bytes, total_bytes))

    def receive(self, *, wait_s: float | None) -> list[ToEngine]:
        """All messages that have come; waits so long (None: for ever) for a first. Raises EOFError when the server is
        gone, EngineError for what is no message."""
        return self._inbox.take(wait_s)

    def _read(self) -> None:
        try:
            while data := self._sock.recv(READ_BYTES):
                for body in self._reader.feed(data):
                    self._inbox.put(decode_to_engine(body))
            self._inbox.end(EOFError("the server closed its end"))
        except (OSError, EngineError) as error:
            self._inbox.end(error)


def serve_engine(channel: WorkerChannel, running: Running) -> None:
    """Work until told to shut down. Raises what the engine raises; a bad request is only rejected."""
    with Heart(lambda still_s: channel.send(Heartbeat(still_s)), computes=running.computes) as heart:
        _serve_engine(channel, running, heart)


def _serve_engine(channel: WorkerChannel, running: Running, heart: Heart) -> None:
    engine = running.engine
    next_stats_s = 0.0
    while True:
        heart.turn()
        now_s = time.monotonic()
        if not engine.has_work or now_s >= next_stats_s:
            channel.send(running.stats())
            next_stats_s = now_s + STATS_INTERVAL_S
        messages = channel.receive(wait_s=0.0 if engine.has_work else IDLE_CHECK_S)
        if not messages and not engine.has_work:
            engine.check_alive()
        for message in messages:
            match message:
                case Submit():
                    _submit(channel, engine, message)
                case Abort(request_id):
                    engine.abort(request_id)
                case Shutdown():
                    return
                case Start():
                    raise EngineError("a second Start; the engine process builds one engine")
        if engine.has_work and (outputs := engine.step()):
            channel.send(Outputs(outputs))


def main(argv: Sequence[str], create: Creator) -> int:
    """Entry point of the process: FD of the socket in, exit code out (0 asked to stop, 1 failed)."""
    set_up_logs("engine", text="%(levelname)s engine: %(message)s")
    # A terminal's Ctrl-C reaches the server alone, which then tells us; `kill` unwinds like any other exit.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _stop)
    sock = socket.socket(fileno=int(argv[0]))
    sock.set_inheritable(False)
    _die_with(sock)
    channel = WorkerChannel(sock)
    try:
        running = _start(channel, create)
    except (OSError, EOFError):
        return 1
    if running is None:
        return 1
    try:
        channel.send(running.ready)
        serve_engine(channel, running)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 1
    except Exception as error:
        log.exception("the engine failed")
        _try_send(channel, Failed(f"{type(error).__name__}: {error}"))
        return 1
    finally:
        running.engine.close()
        # Only the interpreter's own end is left. A signal that came now would be reported as a failure of its.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return 0


def create_engine(config: EngineConfig, progress: Callable[[int, int], None]) -> Running:
    """The real engine. Torch is imported here, so that the socket is watched before that takes its time."""
    from headwater.engine.engine import Engine

    engine = Engine(config, progress=progress)
    adopt("transformers")
    model = engine.checkpoint.config

    def expert_rows() -> dict[int, list[int]]:
        rows = engine.expert_rows(wait=False)
        if rows is None or model.sparse is None:
            return {}
        return dict(zip(model.sparse.layers, rows.tolist(), strict=True))

    def stats() -> Stats:
        now = engine.stats()
        return Stats(
            num_running=now.num_running,
            num_waiting=now.num_waiting,
            num_pages=now.num_pages,
            num_used_pages=now.num_pages - now.num_pages_free - now.num_pages_evictable,
            num_cached_pages=now.num_pages_evictable,
            num_prompt_tokens=now.num_prompt_tokens,
            num_cached_tokens=now.num_cached_tokens,
            num_generated_tokens=now.num_generated_tokens,
            num_draft_tokens=now.num_draft_tokens,
            num_accepted_tokens=now.num_accepted_tokens,
            num_preemptions=now.num_preemptions,
            num_steps=now.num_steps,
            expert_rows=expert_rows(),
            pool=snapshot(now.pool, engine.store_stats()),
            pool_times=distributions(now.pool),
        )

    ready = Ready(
        model=engine.checkpoint.label,
        max_model_len=engine.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=list(model.eos_token_ids),
        num_pages=engine.plan.num_pages,
        page_size=config.page_size,
        max_num_seqs=config.max_num_seqs,
        placement=engine.placement.reason,
        sizing=engine.plan.explanation,
        pool_declined=engine.declined,
    )
    return Running(engine, ready, stats, computes=engine.placement.device.type == "cpu")


def _start(channel: WorkerChannel, create: Creator) -> Running | None:
    messages = channel.receive(wait_s=None)
    if len(messages) != 1 or not isinstance(messages[0], Start):
        raise EngineError(f"expected one Start, got {messages}")
    try:
        return create(messages[0].config, channel.progress)
    except HeadwaterError as error:
        _try_send(channel, StartFailed(str(error), type(error).__name__))
    except ImportError as error:
        _try_send(channel, StartFailed(f"{error}; {install_hint('serve')}", type(error).__name__))
    except (BrokenPipeError, ConnectionResetError):
        raise
    except Exception as error:
        log.exception("the engine could not start")
        _try_send(channel, StartFailed(f"{type(error).__name__}: {error}", type(error).__name__))
    return None


def _submit(channel: WorkerChannel, engine: EngineLike, message: Submit) -> None:
    try:
        engine.add(
            message.request_id,
            message.prompt,
            message.params,
            cache_salt=message.cache_salt,
            transfer=message.transfer,
        )
    except RequestError as error:
        channel.send(Rejected(message.request_id, str(error), error.param, error.code))


def _try_send(channel: WorkerChannel, message: FromEngine) -> None:
    try:
        channel.send(message)
    except OSError:
        pass  # the server is gone as well, and nobody is left to tell


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


def _die_with(sock: socket.socket) -> None:
    """Watch for the other end's death from a thread: the main one may be deep in a step, or in loading weights."""

    def watch() -> None:
        poll = select.poll()
        poll.register(sock.fileno(), select.POLLHUP | select.POLLRDHUP)
        poll.poll()
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpgrp(), signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], create_engine))
