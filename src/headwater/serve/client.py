"""The server's side of the engine process: sending requests, handing out what comes back, noticing its death.

Everything here runs on one event loop and never blocks it. What the engine sends is always read, however slow a client
is: each flight keeps a bounded backlog, and one that overflows is aborted instead of growing. If the server itself is
behind, the engine waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple, Self

from headwater import errors
from headwater.connector.transfers import TransferParams
from headwater.engine.config import EngineConfig
from headwater.engine.params import RequestOutput, SamplingParams
from headwater.errors import EngineDeadError, EngineError, HeadwaterError, RequestError
from headwater.serve.messages import (
    Abort,
    Failed,
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
)
from headwater.serve.process import LAST_WORDS_S, EngineConnection, ended, exit_code, kill, spawn
from headwater.serve.turns import PIECE_VALUES, Turns

# -P: what lies in the current directory must not be imported in place of a package.
WORKER_COMMAND = (sys.executable, "-P", "-m", "headwater.serve.worker")
START_TIMEOUT_S = 1800.0
"""Loading a large model from a slow disk takes long; a process that dies is noticed at once all the same."""
SHUTDOWN_S = 0.3
TERMINATE_S = 0.7
"""There is nothing to save: a step that does not end in this time is killed."""
MAX_BACKLOG_ITEMS = 1 << 16
"""Token ids and log-probabilities that wait for one slow reader; some megabytes at most."""

MAX_WAITING_BYTES = 32 << 20
"""Prompts that an engine process which does not read has not taken yet; beyond them requests are refused."""


class GenerationJob(NamedTuple):
    """One sequence to generate."""

    prompt: list[int]
    params: SamplingParams
    cache_salt: str | None = None
    transfer: TransferParams | None = None


class Arrival(NamedTuple):
    """One output, which of the flight's jobs it belongs to, and when it came."""

    job: int
    output: RequestOutput
    time_s: float


class Flight:
    """The jobs of one call, on their way. Close it (or leave its `with` block) and what still runs is aborted."""

    def __init__(self, client: EngineClient, request_ids: Sequence[str]) -> None:
        self._client = client
        self._open = {request_id: index for index, request_id in enumerate(request_ids)}
        self._request_ids = list(request_ids)
        self._arrivals: deque[Arrival] = deque()
        self._num_items = 0
        self._error: HeadwaterError | None = None
        self._news = asyncio.Event()
        self._has_reader = False
        """Whether somebody waits in `next`: then a backlog is not the client's fault."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def next(self) -> list[Arrival]:
        """What arrived since the last call, at least one; empty when every job has ended. A long backlog comes in
        pieces, for which streams take turns.

        Raises RequestError if the engine refused a job or the reader was too slow, EngineDeadError if the engine died.
        """
        self._has_reader = True
        try:
            while not self._arrivals and self._error is None and self._open:
                self._news.clear()
                await self._news.wait()
            if self._error is not None and not self._arrivals:
                raise self._error
            await self._client.turns.wait()
        finally:
            self._has_reader = False
        arrivals, num_items = [], 0
        while self._arrivals and num_items < PIECE_VALUES:
            arrivals.append(arrival := self._arrivals.popleft())
            num_items += _num_items(arrival.output)
        self._num_items -= num_items
        self._client.turns.use(num_items)
        return arrivals

    @property
    def is_behind(self) -> bool:
        """Whether the engine should wait, since this server takes no more text out of it now."""
        return self._has_reader and self._num_items > MAX_BACKLOG_ITEMS

    def finish(self, index: int) -> None:
        """Nothing more of this job is wanted (its stop string was found). Idempotent."""
        request_id = self._request_ids[index]
        if self._open.pop(request_id, None) is not None:
            self._client._release(request_id, abort=True)

    def close(self) -> None:
        """Abort what still runs. Idempotent, and never fails."""
        for index in range(len(self._request_ids)):
            self.finish(index)

    def _deliver(self, output: RequestOutput) -> None:
        index = self._open[output.request_id]
        self._arrivals.append(Arrival(index, output, time.monotonic()))
        self._num_items += _num_items(output)
        if output.finish_reason is not None:
            del self._open[output.request_id]
            self._client._release(output.request_id, abort=False)
        elif self._num_items > MAX_BACKLOG_ITEMS and not self._has_reader:
            text = f"the client reads too slowly: more than {MAX_BACKLOG_ITEMS} values are waiting for it"
            self._fail(RequestError(text, code="client_too_slow"))
        self._news.set()

    def _fail(self, error: HeadwaterError) -> None:
        self._error = self._error or error
        self.close()
        self._news.set()


class EngineClient:
    """A running engine process. Make one with `EngineClient.start`; `ready` has its facts, `stats` a snapshot."""

    def __init__(self, process: asyncio.subprocess.Process, ready: Ready, connection: EngineConnection) -> None:
        self.ready = ready
        self.stats = Stats()
        self.turns = Turns()
        """For everybody who reads what the engine says."""
        self._process = process
        self._connection = connection
        self._flights: dict[str, Flight] = {}
        self._num_requests = 0
        self._death: EngineDeadError | None = None
        self._dead = asyncio.Event()
        self._last_life_s = time.monotonic()
        self._reading = asyncio.create_task(self._read())
        self._watching = asyncio.create_task(self._watch())

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        command: Sequence[str] = WORKER_COMMAND,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        timeout_s: float = START_TIMEOUT_S,
    ) -> EngineClient:
        """Start the engine process and wait until it can take requests.

        Raises what the engine raised where that is one of ours (ModelError, MemoryBudgetError, …), EngineError for the
        rest and for a time-out, EngineDeadError if the process died without a word. Nothing is left running then.
        """
        process, connection = await spawn(command)
        try:
            connection.send(Start(config))
            ready = await asyncio.wait_for(_handshake(process, connection, on_progress), timeout_s)
        except BaseException as error:
            connection.close()
            await kill(process)
            if isinstance(error, TimeoutError):
                raise EngineError(f"the engine was not ready after {timeout_s:g} s") from None
            raise
        return cls(process, ready, connection)

    @property
    def death(self) -> EngineDeadError | None:
        """Why the engine is gone; None while it lives."""
        return self._death

    @property
    def silent_s(self) -> float:
        """How long ago the engine last gave a sign of life: a message, or a heartbeat while its step moved on."""
        return time.monotonic() - self._last_life_s

    @property
    def num_in_flight(self) -> int:
        """Jobs that the engine still has."""
        return len(self._flights)

    async def wait_dead(self) -> EngineDeadError:
        """Wait until the engine is gone, and say why."""
        await self._dead.wait()
        assert self._death is not None
        return self._death

    async def submit(self, jobs: Sequence[GenerationJob]) -> Flight:
        """Send jobs to the engine; their outputs come from the flight. Raises EngineDeadError if it is gone,
        RequestError if it does not read and too much waits for it."""
        if self._death is not None:
            raise self._death
        if self._connection.num_waiting_bytes > MAX_WAITING_BYTES:
            num_bytes = self._connection.num_waiting_bytes
            text = f"{num_bytes} bytes of prompts are waiting for the engine, which does not read them; try again later"
            raise RequestError(text, code="server_busy")
        first = self._num_requests
        self._num_requests += len(jobs)
        request_ids = [str(number) for number in range(first, self._num_requests)]
        flight = Flight(self, request_ids)
        self._flights |= dict.fromkeys(request_ids, flight)
        try:
            for request_id, job in zip(request_ids, jobs, strict=True):
                self._connection.send(Submit(request_id, *job))
            await self._connection.drain()
        except BaseException:
            flight.close()
            raise
        return flight

    async def close(self) -> None:
        """Fail what is in flight, stop the process and wait for it; kill it if it does not stop. Idempotent."""
        self._die("the server is stopping")
        self._connection.send(Shutdown())
        try:
            if not await ended(self._process, SHUTDOWN_S):
                # It is in the middle of a long step. A signal ends that too.
                with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                    self._process.terminate()
                await ended(self._process, TERMINATE_S)
        finally:
            self._reading.cancel()
            self._watching.cancel()
            self._connection.close()
            await kill(self._process)

    async def _read(self) -> None:
        reason = ""
        try:
            while messages := await self._connection.receive():
                for message in messages:
                    reason = self._handle(message) or reason
                while any(flight.is_behind for flight in self._flights.values()):
                    await asyncio.sleep(0)
        except (EngineError, OSError) as error:
            reason = str(error)
        code = await exit_code(self._process, LAST_WORDS_S)
        self._die(f"the engine process is gone ({reason or code})")

    async def _watch(self) -> None:
        """Notice the process's end even where a child of it still holds the socket open."""
        code = await exit_code(self._process)
        # What it said last, if anything, is the better reason.
        await asyncio.wait([self._reading], timeout=LAST_WORDS_S)
        self._die(f"the engine process is gone ({code})")

    def _handle(self, message: FromEngine) -> str | None:
        """Take one message; the reason of the engine's death if it is that."""
        still_s = message.still_s if isinstance(message, Heartbeat) else 0.0
        self._last_life_s = time.monotonic() - still_s
        match message:
            case Heartbeat():
                pass
            case Outputs(outputs):
                for output in outputs:
                    # What comes for a request that was aborted meanwhile is dropped here.
                    if flight := self._flights.get(output.request_id):
                        flight._deliver(output)
            case Stats():
                self.stats = message
            case Rejected(request_id, text, param, code):
                if flight := self._flights.get(request_id):
                    self._release(request_id, abort=False)
                    flight._fail(RequestError(text, param=param, code=code))
            case Failed(text):
                return text
            case _:
                raise EngineError(f"the engine sent {type(message).__name__} after its start")
        return None

    def _release(self, request_id: str, *, abort: bool) -> None:
        if self._flights.pop(request_id, None) is not None and abort and self._death is None:
            self._connection.send(Abort(request_id))

    def _die(self, reason: str) -> None:
        if self._death is None:
            self._death = EngineDeadError(reason)
            for flight in dict.fromkeys(self._flights.values()):
                flight._fail(self._death)
            self._dead.set()


def _num_items(output: RequestOutput) -> int:
    return len(output.token_ids) + sum(len(entry.top) for entry in output.logprobs or ())


async def _handshake(
    process: asyncio.subprocess.Process, connection: EngineConnection, on_progress: Callable[[int, int], None]
) -> Ready:
    ready: Ready | None = None
    while ready is None:
        messages = await connection.receive()
        if not messages:
            raise EngineDeadError(f"the engine process ended while starting ({await exit_code(process, LAST_WORDS_S)})")
        for message in messages:
            match message:
                case Progress(done_bytes, total_bytes):
                    on_progress(done_bytes, total_bytes)
                case Ready():
                    ready = message
                case StartFailed(text, kind):
                    raise _error_of(kind, text)
                case Stats() | Heartbeat():
                    pass  # sent right after Ready; the next one comes soon
                case _:
                    raise EngineError(f"the engine sent {type(message).__name__} before it was ready")
    return ready


def _error_of(kind: str, text: str) -> HeadwaterError:
    """The engine's error as one of ours: the same class where there is one, so that callers can tell them apart."""
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, HeadwaterError):
        return known(text)
    return EngineError(text)
