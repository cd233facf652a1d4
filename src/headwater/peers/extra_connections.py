"""Further connections of a link, each with a thread: one connection cannot fill a fast network.

Each sends one frame at a time and waits for its answer; the first connection, which the link's own thread serves,
works beside them. The bytes of a frame may be reused when `finish` has returned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from headwater.errors import PeerError, WireError
from headwater.peers.carriers.tcp import Connection
from headwater.peers.wire import Type

Answered = Callable[[bytes], None]


class ExtraConnections:
    """See the module. For one thread, the link's."""

    def __init__(self) -> None:
        self._connections: list[Connection] = []
        self._workers: list[ThreadPoolExecutor] = []
        self._sending: list[tuple[Future[bytes], Answered]] = []

    @property
    def count(self) -> int:
        """Connections beside the first one."""
        return len(self._connections)

    @property
    def is_open(self) -> bool:
        """Whether there are any."""
        return bool(self._connections)

    def add(self, connection: Connection) -> None:
        """One more connection of the session."""
        self._connections.append(connection)
        self._workers.append(ThreadPoolExecutor(1, thread_name_prefix="headwater-push"))

    def takes(self, turn: int) -> bool:
        """Whether the frame of this turn goes over one of these; otherwise over the first connection."""
        return turn % (self.count + 1) != 0

    def send(self, turn: int, frame: bytes, pieces: Sequence[memoryview], deadline: float, answered: Answered) -> None:
        """Begin to send a frame."""
        number = turn % (self.count + 1) - 1
        future = self._workers[number].submit(_exchange, self._connections[number], frame, pieces, deadline)
        self._sending.append((future, answered))

    def finish(self) -> list[tuple[Answered, bytes]]:
        """Wait for the answers to everything that was begun, by the deadlines of each. Raises the first failure, when
        none of them sends any more."""
        sending, self._sending = self._sending, []
        failed = next((error for future, _ in sending if (error := future.exception()) is not None), None)
        if failed is not None:
            for connection in self._connections:
                connection.shut()
            wait([future for future, _ in sending])
            raise failed
        return [(answered, future.result()) for future, answered in sending]

    def close(self) -> None:
        """End all of them. Idempotent."""
        for connection in self._connections:
            connection.shut()
        wait([future for future, _ in self._sending])
        for worker in self._workers:
            worker.shutdown()
        for connection in self._connections:
            connection.close()
        self._connections, self._workers, self._sending = [], [], []


def _exchange(connection: Connection, frame: bytes, pieces: Sequence[memoryview], deadline: float) -> bytes:
    if not connection.is_open:
        raise PeerError("the connection was closed")
    connection.send(frame, deadline, pieces)
    header, body = connection.receive(max(deadline, time.monotonic() + 1.0))
    if header.type != Type.ANSWER or header.data_bytes:
        raise WireError(f"got a {header.type.name} frame; expected an answer")
    return body
