"""The listening socket. A connection counts from the moment it is accepted: asyncio's server shows one with TLS to its
protocol only after the handshake, which a client can put off."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from headwater.serve.connections import Connections, WatchedProtocol

ACCEPTS_PER_TURN = 16
RETRY_S = 1.0
"""How long to wait when there is no file descriptor or memory for another connection."""
REMIND_S = 60.0
"""The log is told of that so often at most."""
SHUTDOWN_S = 1.0
"""How long a client may take to say goodbye with TLS."""
_NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

log = logging.getLogger("headwater.serve")


class HttpListener:
    """Accepts connections until it is closed. To uvicorn, it is a server."""

    def __init__(
        self,
        sock: socket.socket,
        connections: Connections,
        make_protocol: Callable[[], WatchedProtocol],
        certificate: ssl.SSLContext | None,
        backlog: int,
    ) -> None:
        self._sock = sock
        self._connections = connections
        self._make_protocol = make_protocol
        self._options: dict[str, Any] = {}
        if certificate is not None:
            self._options = {
                "ssl": certificate,
                "ssl_handshake_timeout": connections.header_timeout_s,
                "ssl_shutdown_timeout": SHUTDOWN_S,
            }
        self._loop = asyncio.get_running_loop()
        self._arriving: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._reminded_at: float | None = None
        sock.setblocking(False)
        sock.listen(backlog)
        self._loop.add_reader(sock, self._accept)

    def close(self) -> None:
        """Accept no more, and give up those that have not arrived."""
        self._loop.remove_reader(self._sock)
        if self._retry is not None:
            self._retry.cancel()
        for task in self._arriving:
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until none is arriving."""
        if self._arriving:
            await asyncio.wait(self._arriving)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                sock, _address = self._sock.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _NO_RESOURCES:
                    self._wait(error)
                    return
                continue  # the client left before it was accepted
            self._admit(sock)

    def _wait(self, error: OSError) -> None:
        now = self._loop.time()
        if self._reminded_at is None or now - self._reminded_at >= REMIND_S:
            self._reminded_at = now
            log.error("no connection can be accepted now: %s; raise the limit (ulimit -n)", error.strerror)
        self._loop.remove_reader(self._sock)
        self._retry = self._loop.call_later(RETRY_S, self._loop.add_reader, self._sock, self._accept)

    def _admit(self, sock: socket.socket) -> None:
        protocol = self._make_protocol()
        # One that is let in no more is kept to be told so, if few others are.
        if not (self._connections.enter(protocol) or self._connections.linger(protocol)):
            sock.close()
            return
        task = self._loop.create_task(self._arrive(sock, protocol))
        protocol.arriving = task
        self._arriving.add(task)

        def arrived(task: asyncio.Task[None]) -> None:
            self._arriving.discard(task)
            # The handshake failed, took too long or was ended to make room.
            if not protocol.has_arrived:
                self._connections.leave(protocol)
                sock.close()

        task.add_done_callback(arrived)

    async def _arrive(self, sock: socket.socket, protocol: WatchedProtocol) -> None:
        with suppress(OSError):
            await self._loop.connect_accepted_socket(lambda: protocol, sock, **self._options)
