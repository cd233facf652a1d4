"""The life of a proxy: take the port, look at the servers, serve, and let streams end when it is asked to stop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from headwater.proxy.app import Proxy, create_app
from headwater.proxy.choice import Router
from headwater.proxy.config import ProxyConfig
from headwater.proxy.fleet import Fleet, FleetServer, ServerRole
from headwater.proxy.follow import Following, follow_servers
from headwater.proxy.keys import LoadTokenizer, PromptTokenizer, TokenScheme, load_tokenizer
from headwater.proxy.metrics import ProxyMetrics
from headwater.serve.connections import Connections
from headwater.serve.http import HttpServer, bound_socket, stop_signals, url_of
from headwater.serve.tls import load_certificate, load_trusted

log = logging.getLogger("headwater.proxy")


@dataclass(frozen=True, kw_only=True)
class ProxyHooks:
    """What is told on the way."""

    on_ready: Callable[[str, Fleet], None] = lambda url, fleet: None
    on_stopping: Callable[[int], None] = lambda num_requests: None
    """How many requests are still being answered."""


def run_proxy(config: ProxyConfig, *, hooks: ProxyHooks | None = None, load: LoadTokenizer = load_tokenizer) -> int:
    """Serve until SIGINT or SIGTERM, then until all streams have ended; a second signal ends those. Returns 0.

    Raises OSError if the port cannot be had, and what loading the tokenizer raises.
    """
    return asyncio.run(_run(config, hooks or ProxyHooks(), load))


async def _run(config: ProxyConfig, hooks: ProxyHooks, load: LoadTokenizer) -> int:
    certificate = load_certificate(config.ssl_certfile, config.ssl_keyfile)
    load_trusted(config.upstream_ca)  # said now, also where no server speaks HTTPS yet
    with bound_socket(config.host, config.port) as sock, stop_signals() as stop:
        tokenizer = await asyncio.to_thread(load, config.tokenizer) if config.tokenizer is not None else None
        router = Router(history_blocks=config.history_blocks, history_age_s=config.history_age_s)
        fleet = Fleet(_servers(config, router, tokenizer), config)
        proxy = Proxy(config, fleet, router, ProxyMetrics(fleet, router), tokenizer)
        connections = Connections(config.max_connections, config.header_timeout_s)
        http = HttpServer(create_app(proxy), connections, certificate, grace_s=config.drain_timeout_s)
        following: Following | None = None
        try:
            await fleet.start()
            following = await follow_servers(fleet.servers, router, has_tokens=tokenizer is not None)
            serving = asyncio.create_task(http.serve(sockets=[sock]))
            listening = asyncio.create_task(http.listening.wait())
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait({listening, serving}, return_when=asyncio.FIRST_COMPLETED)
            scheme = "http" if certificate is None else "https"
            hooks.on_ready(url_of(scheme, config.host, sock.getsockname()[1]), fleet)
            await asyncio.wait({stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
            proxy.is_draining = True
            hooks.on_stopping(proxy.num_requests)
            stop.clear()
            http.should_exit = True
            again = asyncio.create_task(stop.wait())
            await asyncio.wait({again, serving}, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                http.force_exit = True
                serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            for task in (listening, stopping, again):
                task.cancel()
            return 0
        finally:
            if following is not None:
                await following.close()
            await fleet.close()
            proxy.close()


def _servers(config: ProxyConfig, router: Router, tokenizer: PromptTokenizer | None) -> list[FleetServer]:
    """All servers. Those without events share one scheme, so that a prompt is hashed once for them."""
    plain = None if tokenizer is None else TokenScheme()
    made = []
    for role, specs in ((ServerRole.PREFILL, config.prefill), (ServerRole.DECODE, config.decode)):
        for spec in specs:
            server = FleetServer(spec, role, router, config)
            if plain is not None:
                server.scheme = plain
            made.append(server)
    return made
