"""The HTTP server around an ASGI application: its port, its signals, uvicorn with our bounds. It knows no engine."""

from __future__ import annotations

import asyncio
import math
import signal
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from headwater.serve.connections import KEEP_ALIVE_S, Connections, WatchedProtocol
from headwater.serve.listener import HttpListener
from headwater.serve.sending import SEND_TIMEOUT_S

EARLY_BACKLOG = 16
"""Connections that may wait until the application is ready."""


class HttpServer(uvicorn.Server):
    """Uvicorn without its signal handlers (ours are there before it starts), with our bounds for connections, and
    saying when it listens. Set `should_exit` to stop it: answers that were begun may take `grace_s` more."""

    def __init__(
        self, app: ASGIApp, connections: Connections, certificate: ssl.SSLContext | None, *, grace_s: float
    ) -> None:
        settings = uvicorn.Config(
            app,
            lifespan="off",
            ws="none",
            log_config=None,
            log_level="error",  # a client shall not fill the log with warnings
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=math.ceil(grace_s),
        )
        super().__init__(settings)
        self.listening = asyncio.Event()
        self._connections = connections
        self._certificate = certificate

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        def protocol() -> WatchedProtocol:
            return WatchedProtocol(self._connections, config=self.config, server_state=self.server_state, app_state={})

        self.servers = [
            HttpListener(sock, self._connections, protocol, self._certificate, self.config.backlog)  # type: ignore[misc]
            for sock in sockets or []
        ]
        self.started = True
        self.listening.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextmanager
def stop_signals() -> Iterator[asyncio.Event]:
    """An event that Ctrl-C and `kill` set, instead of ending the process wherever it is."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    for number in numbers:
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number, handler in zip(numbers, before, strict=True):
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


@contextmanager
def bound_socket(host: str, port: int) -> Iterator[socket.socket]:
    """The port, taken before anything slow begins: better to hear at once that it is busy.

    It listens at once, because only a port that somebody listens on is refused to others; who connects early waits.
    """
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, number)
    except OSError as error:
        raise OSError(f"cannot listen on {host}: {error.strerror}; choose another address with --host") from error
    with sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # Connections inherit it: the kernel ends one whose client reads nothing for so long, and frees its buffers.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SEND_TIMEOUT_S * 1000))
        try:
            sock.bind(address)
            sock.listen(EARLY_BACKLOG)
        except OSError as error:
            text = f"cannot listen on {host} port {port}: {error.strerror}; choose another with --port or --host"
            raise OSError(text) from error
        yield sock


def url_of(scheme: str, host: str, port: int) -> str:
    """The address of a server, as clients write it."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
